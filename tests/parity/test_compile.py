"""Tests that a step is compiled once, or once per stage, and never synchronises with the device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core import BackendError, Plugin, stages
from minillm_core.backends.base import Trainer
from minillm_core.backends.torch.compiling import constant_result

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

WAITS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__")
STAGES = ((0, 4), (0.5, 9))


class Windowed(Plugin, api=1):
    """A window that grows halfway."""

    def build_attention(self, attn: Any) -> None:
        attn.window(stages(*STAGES))


class Compiler:
    """torch.compile with AOT autograd and without code generation, which counts graphs.

    Raises:
        BypassAOTAutogradCache: a graph could not be kept for later processes.
    """

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, function: Any, **options: Any) -> Any:
        return torch.compile(function, backend=self.backend, **options)

    def backend(self, graph: Any, inputs: Any) -> Any:
        from torch._functorch._aot_autograd.autograd_cache import check_cacheable

        check_cacheable(graph)
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch.compiler.reset()
    yield Compiler()
    torch.compiler.reset()


def step(run: Trainer, lab: Any, plan: Any, index: int, *, parts: int = 1) -> Any:
    whole = lab.batch(plan, index, unsupervised=index)
    micro = lab.split(whole, parts)
    return run.step(micro, plan.values((index + 1) / 20), lab.supervised(micro))


CASES = {
    "plain": ((), {}, {}),
    "staged-adamw": ((), {}, {"fused": False}),
    "both": (("muon", "paired_heads"), {"model_layers": 2}, {}),
    "checkpointing": (("muon", "paired_heads"), {"train_checkpointing": True}, {}),
    "bfloat16": (("muon",), {"train_dtype": "bfloat16"}, {}),
    "float16": (("muon",), {"train_dtype": "float16"}, {}),
}
"""Plugins, settings and backend options; the default is a single layer, which is traced fastest."""


SLOW = ("both", "checkpointing", "bfloat16", "float16")


@pytest.mark.broad(1)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES]
)
def test_torch_compiles_each_graph_once(lab: Any, compiler: Compiler, case: str) -> None:
    names, settings, options = CASES[case]
    settings = {"model_layers": 1, **settings}
    plan = lab.plan(*names, train_compile="on", **settings)
    run = lab.trainer(plan, compiler=compiler, **options)
    eager = lab.trainer(lab.plan(*names, **settings), **options)
    found, expected = [run.read(step(run, lab, plan, 0))], [eager.read(step(eager, lab, plan, 0))]
    stepped = 1 if case == "plain" else 2  # fused AdamW has no graph
    assert compiler.graphs == stepped
    with torch.compiler.set_stance("fail_on_recompile"):
        for index in range(1, 5):
            found.append(run.read(step(run, lab, plan, index, parts=1)))
            expected.append(eager.read(step(eager, lab, plan, index)))
            run.evaluate([lab.batch(plan, index)])
    assert compiler.graphs == stepped
    close = 1e-5 if "float16" not in case else 2e-3
    assert [r.loss for r in found] == pytest.approx([r.loss for r in expected], rel=close)


def test_selective_checkpointing_keeps_neither_norms_nor_activations(
    lab: Any, compiler: Compiler
) -> None:
    kept, losses = [], []
    for checkpointing in (False, "selective"):
        plan = lab.plan(train_checkpointing=checkpointing, train_compile="on", model_layers=2)
        run = lab.trainer(plan, compiler=compiler)
        saved: dict[int, int] = {}

        def keep(array: Any, saved: dict[int, int] = saved) -> Any:
            saved[array.data_ptr()] = array.untyped_storage().nbytes()
            return array

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda array: array):
            losses.append(run.read(step(run, lab, plan, 0)).loss)
        kept.append(sum(saved.values()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    train, model = plan.config.train, plan.config.model
    numbers = train.rows * train.seq_len * model.layers * (2 * model.dim + model.hidden)
    assert kept[0] - kept[1] >= 4 * numbers


@pytest.mark.parametrize(("backend", "compiled"), [("torch", "off"), ("mlx", "on")])
def test_only_torchs_compiled_step_selects_what_is_recomputed(
    lab: Any, backend: str, compiled: str
) -> None:
    plan = lab.plan(train_checkpointing="selective", train_compile=compiled)
    with pytest.raises(BackendError, match="only torch's compiled step") as refused:
        lab.trainer(plan, backend)
    assert "train.checkpointing=true" in str(refused.value.fix)


@pytest.mark.slow
def test_torch_compiles_micro_batches_once(lab: Any, compiler: Compiler) -> None:
    plan = lab.plan("muon", "paired_heads", train_compile="on", model_layers=1)
    run = lab.trainer(plan, compiler=compiler)
    step(run, lab, plan, 0, parts=2)
    assert compiler.graphs == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        for index in range(1, 4):
            step(run, lab, plan, index, parts=2)
            run.arrays()
    run.resume(run.arrays())
    with torch.compiler.set_stance("fail_on_recompile"):
        step(run, lab, plan, 5, parts=2)
    assert compiler.graphs == 2


@pytest.mark.parametrize(("parts", "traces"), [(1, 1), (2, 3)])
def test_mlx_traces_each_graph_once(lab: Any, parts: int, traces: int) -> None:
    plan = lab.plan("paired_heads", train_compile="on", model_layers=1)
    run = lab.trainer(plan, "mlx")
    eager = lab.trainer(lab.plan("paired_heads", model_layers=1), "mlx")
    found, expected = [], []
    for index in range(4):
        found.append(run.read(step(run, lab, plan, index, parts=parts)).loss)
        expected.append(eager.read(step(eager, lab, plan, index, parts=parts)).loss)
        run.evaluate([lab.batch(plan, index)])
        assert run.traces == traces
    run.resume(run.arrays())
    step(run, lab, plan, 5, parts=parts)
    assert run.traces == traces
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.broad(1)
@pytest.mark.parametrize(
    ("backend", "inputs", "host", "graphs"),
    [
        ("torch", ("windowed.window",), False, 1),
        ("torch", ("windowed.window",), True, 1),
        ("torch", (), False, 2),
        ("mlx", (), False, 2),
    ],
)
def test_a_staged_window_is_an_input_of_torch_s_graph(
    lab: Any, compiler: Compiler, backend: str, inputs: tuple[str, ...], host: bool, graphs: int
) -> None:
    """It is a constant, with a graph per stage, where the kernel only accepts constants; losses are equal."""
    from minillm_kit import materialise

    windowed = {"windowed": Windowed()}
    plan = lab.plan(plugins=windowed, train_compile="on", train_lr=0.0, model_layers=1)
    assert plan.staged == ("windowed.window",)
    options = {"compiler": compiler} if backend == "torch" else {}
    run, model = lab.trainer(plan, backend, **options), materialise(plan, 0)
    assert run.binding.inputs == (("windowed.window",) if backend == "torch" else ())
    assert not run.binding.host_masks
    run.binding = replace(run.binding, inputs=inputs, host_masks=host)
    batch, found = lab.batch(plan), {}
    for index in range(20):
        values = plan.values((index + 1) / 20)
        loss = run.read(run.step([batch], values, lab.supervised([batch]))).loss
        found.setdefault(values["windowed.window"], []).append(loss)
        # all before the first step: the clock starts after it
        assert (compiler.graphs if backend == "torch" else run.traces) == graphs
    assert {window: len(losses) for window, losses in found.items()} == {4: 10, 9: 10}
    for window, losses in found.items():
        given = lab.values_of(plan, [batch]) | {"windowed.window": window}
        assert losses == pytest.approx([float(model(batch, given).objective)] * 10, rel=1e-6)
    assert abs(found[4][0] - found[9][0]) > 1e-5
    nats, count = run.evaluate([batch])  # with the last stage's window
    assert nats / count == pytest.approx(found[9][0], rel=1e-6)


LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9, 10)  # beyond torch's recompile limit for one code object


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        pytest.param("torch", "lengths", marks=pytest.mark.slow),
        *(("torch", "split"), ("mlx", "lengths"), ("mlx", "split")),
    ],
)
def test_every_size_of_a_batch_is_compiled_before_the_first_step(
    lab: Any, compiler: Compiler, backend: str, sizes: str
) -> None:
    lengths = ", ".join(f"{{until={(n + 1) / 10}, seq_len={t}}}" for n, t in enumerate(LENGTHS))
    split = "{until=0.25, rows=2, accumulate=2, seq_len=5}, {until=0.5, rows=1}"
    given = {"train_stages": f"[{lengths if sizes == 'lengths' else split}]", "model_layers": 1}
    plan = lab.plan(train_compile="on", **given)
    options = {"compiler": compiler} if backend == "torch" else {}
    run, eager = lab.trainer(plan, backend, **options), lab.trainer(lab.plan(**given), backend)
    phases, whole = [], lab.batch(plan)

    @contextmanager
    def phase(what: str) -> Iterator[None]:
        phases.append(what)
        yield

    run.phase = phase
    found, expected, counted = [], [], []
    for index in range(20):
        shape = plan.shape_at(index + 1)
        micro = [
            {
                name: np.resize(field, (shape.rows, shape.seq_len)).astype(field.dtype)
                for name, field in whole.items()
            }
        ] * shape.accumulate
        for trainer, losses in ((run, found), (eager, expected)):
            queued = trainer.step(micro, plan.values((index + 1) / 20), lab.supervised(micro))
            losses.append(trainer.read(queued).loss)
        counted.append(compiler.graphs if backend == "torch" else run.traces)
    # MLX has other graphs for a step with several micro-batches: two, and one for the update
    parts = len(plan.course) + (2 if backend == "mlx" and sizes == "split" else 0)
    assert counted == [parts] * 20
    assert len(phases) == len(plan.course)
    assert phases[0] == f"compiling for 2 rows of 16 (1 of {len(plan.course)})"
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("names", [(), ("muon", "paired_heads")], ids=["plain", "both"])
def test_a_step_asks_for_no_number(
    lab: Any, names: tuple[str, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = lab.plan(*names, train_dtype=dtype)
    run = lab.trainer(plan)
    micro = lab.split(lab.batch(plan), 2)

    def refuse(self: Any, *arguments: Any, **named: Any) -> Any:
        raise AssertionError("a step waited for a number")

    with monkeypatch.context() as patch:
        for name in WAITS:
            patch.setattr(torch.Tensor, name, refuse)
        with pytest.raises(AssertionError, match="waited"):
            torch.ones(1).item()
        handles = [run.step(micro, plan.values(0.5), lab.supervised(micro)) for _ in range(2)]
    assert np.isfinite([run.read(handle).loss for handle in handles]).all()


def test_a_result_is_marked_constant_as_torch_marks_it() -> None:
    """By :func:`constant_result`, which does without the import of Dynamo."""
    own, torchs = (
        mark(lambda: 0) for mark in (constant_result, torch.compiler.assume_constant_result)
    )
    assert vars(own) == vars(torchs) != {}


RUN = """
import sys
from minillm_core.cli.main import main
assert main(sys.argv[1:]) == 0
print([name for name in ("torch", "torch._dynamo", "sympy") if name in sys.modules])
"""


@pytest.mark.slow
def test_a_run_that_is_not_compiled_starts_without_dynamo(tmp_path: Path) -> None:
    """Its import takes as long as torch's own."""
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night; the rain fell in torrents.\n" * 200)
    small = ("model.layers=2", "model.dim=32", "train.seq_len=32", "eval.tokens=128")
    asked = ("--backend", "torch", "--device", "cpu", "--steps", "2", "--data", str(text), *small)
    command = [sys.executable, "-c", RUN, "train", *asked, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["['torch']"], done.stdout + done.stderr


@pytest.mark.slow
def test_a_process_may_compile_many_trainers(lab: Any) -> None:
    options = {"compiler": partial(torch.compile, backend="eager")}  # the limit is dynamo's own
    losses = []
    for hidden in range(8, 8 + 9 * 4, 4):  # dynamo compiles one code object at most eight times
        plan = lab.plan("muon", model_layers=1, model_hidden=hidden, train_compile="on")
        run = lab.trainer(plan, **options)
        losses += lab.losses(run, plan, [[lab.batch(plan)]])
    assert np.isfinite(losses).all()


class Apart(Plugin, api=1):
    """Attention within documents."""

    def build_attention(self, attn: Any) -> None:
        attn.documents()


def test_documents_stay_on_the_host_for_a_kernel_that_reads_them_there(lab: Any) -> None:
    from minillm_core.nn.node import MASKING

    plan = lab.plan(plugins={"apart": Apart()}, model_layers=1)
    run, batch = lab.trainer(plan), lab.batch(plan)
    batch["documents"] = (np.indices(batch["documents"].shape)[1] > 3).astype(np.int32)
    assert MASKING not in run.to_device(batch)
    losses = [run.evaluate([batch])]
    run.binding = replace(run.binding, host_masks=True)
    held = run.to_device(batch)
    assert np.shares_memory(held[MASKING].numpy(), batch["documents"])
    assert MASKING not in run.to_device({**batch, "row.columns": np.zeros((1, 2), np.int32)})
    losses.append(run.evaluate([batch]))
    assert losses[0] == losses[1]
    plain = lab.trainer(lab.plan(model_layers=1))
    plain.binding = replace(plain.binding, host_masks=True)
    assert MASKING not in plain.to_device(batch)  # nothing masks documents
    assert plain.evaluate([batch]) != losses[0]


class Growing(Plugin, api=1):
    """Windows of two kinds, the longer one of which hides nothing in the end."""

    def build_attention(self, attn: Any) -> None:
        knots = ((0, 8), (0.25, 12), (0.5, 16)) if attn.layer else ((0, 4), (0.25, 6), (0.5, 8))
        attn.window(stages(*knots), name="long" if attn.layer else "short")


@pytest.mark.slow
def test_windows_as_inputs_change_no_bit(lab: Any, compiler: Compiler) -> None:
    """A window as long as a row is not an input of the graph, which is then a different one."""
    plan = lab.plan(plugins={"growing": Growing()}, train_compile="on", model_layers=2)
    losses, graphs = [], []
    for inputs in (("growing.window.long", "growing.window.short"), ()):
        run, before = lab.trainer(plan, compiler=compiler), compiler.graphs
        assert run.binding.inputs == ("growing.window.long", "growing.window.short")
        run.binding = replace(run.binding, inputs=inputs)
        losses.append([run.read(step(run, lab, plan, index)).loss for index in range(0, 20, 3)])
        graphs.append(compiler.graphs - before)
    assert graphs == [2, 3]
    assert losses[0] == losses[1]
