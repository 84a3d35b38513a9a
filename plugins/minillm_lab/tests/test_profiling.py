"""Tests of profilers: they time a step's parts and layers, and leave the trainer unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from minillm_core.backends.memory import process_peak
from minillm_core.errors import BackendError, MinillmError
from minillm_core.plan import build_plan
from minillm_kit.subject import rows, settings, supervised, traced_trainer
from minillm_lab.profiling import profiler_of

Made = Callable[..., tuple[Any, Any, tuple[Any, ...]]]


@pytest.fixture
def made() -> Made:
    """Return ``made("torch", train_compile="on")``: trainer, profiler, and a step's arguments."""

    def make(backend: str, micro: int = 1, **changed: Any) -> Any:
        pytest.importorskip(backend)
        plan = build_plan(settings(train_accumulate=micro, **changed))
        trainer = traced_trainer(plan, backend)
        batches = rows(plan.config, micro)
        return trainer, profiler_of(trainer), (batches, plan.values(0.5), supervised(batches))

    return make


@pytest.mark.broad(1)
@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("micro", [1, 2])
def test_torch_tells_forward_backward_and_optimizer(made: Made, compiled: str, micro: int) -> None:
    trainer, profiler, step = made("torch", micro, train_compile=compiled)
    before = trainer.step_timer
    parts = profiler.parts(*step)
    assert set(parts) == {"forward", "backward", "optimizer"}
    assert min(parts.values()) > 0
    assert trainer.step_timer is before


def test_a_profiled_step_is_a_step_like_any_other(made: Made, tmp_path: Path) -> None:
    """Check that timestamps, hooks and torch's profiler change no bit of the result."""
    (one, profiler, step), (other, _, _) = made("torch"), made("torch")
    profiler.parts(*step)
    profiler.layers(*step)
    profiler.trace(tmp_path / "t.json", lambda: one.read(one.step(*step)))
    for _ in range(3):
        other.read(other.step(*step))
    theirs = other.arrays()
    assert all(np.array_equal(array, theirs[name]) for name, array in one.arrays().items())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_torch_tells_the_layers_of_an_eager_step(made: Made, checkpointing: bool) -> None:
    trainer, profiler, step = made("torch", 2, train_checkpointing=checkpointing)
    layers = profiler.layers(*step)
    assert list(layers) == ["embedding", "layers.0", "layers.1", "head and loss"]
    assert all(forward > 0 and backward > 0 for forward, backward in layers.values())
    for module in trainer.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_compiled_step_has_no_layers(made: Made) -> None:
    _, profiler, step = made("torch", train_compile="on")
    with pytest.raises(BackendError, match=r"train\.compile=off"):
        profiler.layers(*step)


@pytest.mark.broad(1)
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_trace_has_a_range_for_every_module_of_an_eager_step(
    made: Made, tmp_path: Path, compiled: str
) -> None:
    trainer, profiler, step = made("torch", train_compile=compiled)
    from torch._dynamo.utils import counters

    trainer.read(trainer.step(*step))
    graphs = counters["stats"]["unique_graphs"]
    profiler.trace(tmp_path / "t.json", lambda: trainer.read(trainer.step(*step)))
    events = json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"forward", "backward", "optimizer"} <= names
    eager = {"layers.0", "layers.1.mlp", "layers.1.attention", "norm"}
    assert eager & names == (eager if compiled == "off" else set())
    assert counters["stats"]["unique_graphs"] == graphs  # nothing was recompiled


def test_a_trace_that_cannot_be_written_is_an_error_and_an_older_one_stays(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's profiler only logs that."""
    trainer, profiler, step = made("torch")
    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", lambda *_: None)
    path = tmp_path / "t.json"
    path.write_text("older")
    with pytest.raises(MinillmError, match="the trace could not be written"):
        profiler.trace(path, lambda: trainer.read(trainer.step(*step)))
    assert [one.read_text() for one in tmp_path.iterdir()] == ["older"]


def test_a_cpu_counts_no_arrays_on_torch(made: Made) -> None:
    _, profiler, _ = made("torch")
    profiler.forget_peak()
    assert profiler.held_bytes() is None
    assert profiler.peak_bytes() == pytest.approx(process_peak(), rel=0.02)  # the whole process
    assert "CUDA" in profiler.notes[0]


@pytest.mark.parametrize("micro", [1, 2])
def test_mlx_tells_gradients_and_optimizer_and_changes_nothing(made: Made, micro: int) -> None:
    trainer, profiler, step = made("mlx", micro)
    before = trainer.arrays()
    parts = profiler.parts(*step)
    assert set(parts) == {"gradients", "optimizer"}
    assert min(parts.values()) > 0
    after = trainer.arrays()
    assert all(np.array_equal(array, after[name]) for name, array in before.items())
    profiler.forget_peak()
    assert profiler.held_bytes() > 0
    trainer.read(trainer.step(*step))
    assert profiler.peak_bytes() >= profiler.held_bytes() > 0


def test_mlx_says_what_it_cannot_tell(made: Made, tmp_path: Path) -> None:
    _, profiler, step = made("mlx")
    profiler.check(layers=False, trace=False)
    for ask in (
        lambda: profiler.check(layers=True, trace=False),
        lambda: profiler.check(layers=False, trace=True),
        lambda: profiler.layers(*step),
        lambda: profiler.trace(tmp_path / "t.json", lambda: None),
    ):
        with pytest.raises(BackendError, match="torch"):
            ask()
    assert list(tmp_path.iterdir()) == []


class Event:
    """An event of a fake device that counts events, in place of torch.cuda.Event."""

    made: ClassVar[list[Event]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream, self.at = stream, 250.0 * len(Event.made)
        Event.made.append(self)

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_on_cuda_events_of_the_trainers_own_device_are_what_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from minillm_lab.profiling_torch import Moments

    waited: list[Any] = []
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device = torch.device("cuda:1")
    moments = Moments(device)
    for part in ("forward", "backward", "forward", "backward", "optimizer", ""):
        moments(part)
    found = moments.seconds()
    assert {name: found[name] for name in ("forward", "backward", "optimizer")} == {
        "forward": 0.5,
        "backward": 0.5,
        "optimizer": 0.25,
    }
    assert {event.stream for event in Event.made} == {("stream of", device)}
    assert waited == [device]


@pytest.mark.filterwarnings("ignore:.*CUDA")  # CUDA is missing here
def test_on_cuda_every_node_has_a_range_of_nvtx_within_its_part(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check nesting and closing of ranges, also for recomputed blocks."""
    trainer, _, step = made("torch", 2, train_checkpointing=True)
    import torch

    from minillm_lab import profiling_torch

    opened: list[str] = []
    paths: set[str] = set()

    def push(name: str) -> None:
        opened.append(name)
        paths.add(" > ".join(opened))

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: opened.pop())
    profiler = profiling_torch.TorchProfiler(trainer)
    profiler.cuda = True
    profiler.trace(tmp_path / "t.json", lambda: trainer.read(trainer.step(*step)))
    assert opened == []
    assert "forward > layers.0 > layers.0.attention > layers.0.attention.q" in paths
    assert any(path.startswith("backward > layers.1") for path in paths)  # recomputed
    assert "optimizer" in paths
