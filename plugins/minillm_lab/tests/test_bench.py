"""Tests of plugin sets timed in turns, each with its own figures; a stand-in trains nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from minillm_core import build_plan
from minillm_core.backends.base import Binding, StepResult
from minillm_core.backends.detect import Detected
from minillm_core.errors import BackendError, PluginCodeError, Refusal
from minillm_lab.bench import WARM, Request, bench, shares
from minillm_lab.cli.bench import render

DETECTED = Detected("torch", "cpu", "the test says so")


class Machine:
    """A device shared by two trainers: its allocated memory, and the log of calls in order."""

    def __init__(
        self,
        *,
        compiled: bool = False,
        counts: bool = True,
        process: int | None = None,
    ) -> None:
        self.compiled, self.counts = compiled, counts
        self.process = process  # the process's peak, where the device does not count
        self.log: list[str] = []
        self.held: dict[str, int] = {}
        self.fails = ""

    def create(self, detected: Detected, plan: Any) -> Any:
        name = "+".join(one.name for one in plan.plugins) or "plain"
        compiled = self.compiled and plan.config.train.compile != "off"
        return SimpleNamespace(trainer=lambda plan, seed, **more: FakeTrainer(self, name, compiled))

    def profile(self, trainer: Any) -> Any:
        return FakeProfiler(self, trainer)


class FakeTrainer:
    compile_seconds = 0.0

    def __init__(self, machine: Machine, name: str, compiled: bool) -> None:
        self.machine, self.name = machine, name
        self.binding = Binding(
            "torch", "cpu", "a device", "why", "float32", compiled, False, False, peak_flops=1e9
        )
        machine.held[name] = 1000 * len(name)

    def step(self, micro: Any, values: Mapping[str, float], supervised: int) -> int:
        if self.machine.fails == self.name:
            raise PluginCodeError(self.name, "forward", where="its line", fix="mend it")
        assert values["train.lr"] > 0
        assert supervised > 0
        self.machine.log.append(f"step {self.name}")
        return 0

    def read(self, handle: int) -> StepResult:
        return StepResult(1.0, 1.0)

    def join(self, ranks: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeProfiler:
    notes = ("a stand-in",)

    def __init__(self, machine: Machine, trainer: FakeTrainer) -> None:
        self.machine, self.trainer = machine, trainer

    def parts(self, *given: Any) -> dict[str, float]:
        return {"forward": 1.0, "backward": 2.0, "optimizer": 1.0}

    def layers(self, *given: Any) -> dict[str, tuple[float, float]]:
        assert not self.trainer.binding.compile
        return {"layers.0": (0.25, 0.5)}

    def trace(self, path: Path, step: Callable[[], object]) -> None:
        assert not self.trainer.binding.compile
        step()
        path.write_text("{}")

    def held_bytes(self) -> int | None:
        return sum(self.machine.held.values()) if self.machine.counts else None

    def trim(self) -> None:
        pass

    def forget_peak(self) -> None:
        self.machine.log.append(f"turn {self.trainer.name}")

    def peak_bytes(self) -> int | None:
        counted = sum(self.machine.held.values()) + 10
        return counted if self.machine.counts else self.machine.process


@pytest.fixture
def timed(asked: Callable, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """Return ``timed(machine, request, ("scale",), ())``: the result, and the printed lines."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(200)))

    def run(machine: Machine, request: Request, *sets: tuple[str, ...]) -> Any:
        plans, said = {}, []
        for names in sets:
            loaded, plugins = asked(*names)
            config = loaded.config.model_copy(
                update={
                    "data": loaded.config.data.model_copy(update={"paths": (str(text),)}),
                    "model": loaded.config.model.model_copy(update={"vocab": 300}),
                    "train": loaded.config.train.model_copy(update={"rows": 2, "seq_len": 16}),
                }
            )
            name = "+".join(names) or "plain"
            plans[name] = build_plan(replace(loaded, config=config), plugins)
        result = bench(
            request,
            plans,
            DETECTED,
            cache=tmp_path / "cache",
            say=said.append,
            create=machine.create,
            profile=machine.profile,
        )
        return result, said

    return run


def shown(result: dict[str, Any]) -> str:
    """Render the tables."""
    console = Console(file=StringIO(), width=200)
    for table in render(result):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_two_sets_take_turns(timed) -> None:
    machine = Machine()
    result, said = timed(machine, Request(steps=4, repeats=3), ("scale",), ())
    turns = [line for line in machine.log if line.startswith("turn")]
    assert turns == ["turn scale", "turn plain"] * 3
    begun = machine.log.index("turn scale")
    assert machine.log[:begun] == ["step scale"] * WARM + ["step plain"] * WARM + ["step scale"]
    assert machine.log[begun:].count("step scale") == 4 * 3 + 2  # one before each later turn
    assert list(result["sets"]) == ["scale", "plain"]
    for one in result["sets"].values():
        assert len(one["tokens_per_second_by_turn"]) == 3
        assert one["tokens_per_second"] in one["tokens_per_second_by_turn"]
        assert sum(one["shares"].values()) == pytest.approx(1)
    ratio = result["ratio"]
    assert ratio["low"] <= ratio["high"]
    assert f" x (turns: {ratio['low']:.3f} to {ratio['high']:.3f})" in shown(result)
    assert next(line for line in said if line.startswith("turn 3")).endswith("tokens/s")
    assert json.loads(json.dumps(result)) == result


def test_a_set_s_peak_is_without_what_the_other_holds(timed) -> None:
    result, _ = timed(Machine(), Request(1, 1), ("scale",), ("extension", "rule"))
    peaks = {name: one["peak_bytes"] for name, one in result["sets"].items()}
    assert peaks == {"scale": 5010, "extension+rule": 14010}
    assert result["ratio"]["peak_bytes"] == 5010 / 14010
    assert result["ratio"]["low"] is result["ratio"]["high"] is None
    assert "turns:" not in shown(result)


def test_what_nobody_counts_is_unknown(timed) -> None:
    result, _ = timed(Machine(counts=False), Request(1, 1), (), ("scale",))
    assert {one["peak_bytes"] for one in result["sets"].values()} == {None}
    assert result["ratio"]["peak_bytes"] is None
    assert "unknown" in shown(result)


def test_a_process_s_peak_is_called_that_and_not_shared_out(timed) -> None:
    result, _ = timed(Machine(counts=False, process=3 << 30), Request(1, 1), (), ("scale",))
    assert {one["peak_bytes"] for one in result["sets"].values()} == {3 << 30}
    assert {one["peak_of"] for one in result["sets"].values()} == {"process"}
    assert result["ratio"]["peak_bytes"] is None
    assert "peak of the process" in shown(result)
    assert "3.00 GiB" in shown(result)


def test_what_is_not_timed_is_said(timed) -> None:
    result, _ = timed(Machine(), Request(1, 1), ("scale", "watcher"), ())
    notes = {name: one["notes"] for name, one in result["sets"].items()}
    said = "what 'watcher' does at an event is not timed"
    assert notes == {"scale+watcher": ["a stand-in", said], "plain": ["a stand-in"]}


def test_utilisation_is_that_of_tokens_which_are_no_padding(timed) -> None:
    result, _ = timed(Machine(), Request(2, 1), ())
    (one,) = result["sets"].values()
    expected = one["tokens_per_second"] * one["flops_per_token"] / 1e9
    assert one["mfu"] == pytest.approx(expected)
    assert result["ratio"] is None


def test_layers_and_traces_are_of_an_eager_step_and_that_is_said(timed, tmp_path: Path) -> None:
    request = Request(1, 1, layers=True, trace=tmp_path / "t.json")
    result, said = timed(Machine(compiled=True), request, ("scale",), ())
    for name, one in result["sets"].items():
        assert one["compile"] is True
        assert one["layers"] == {"layers.0": {"forward_seconds": 0.25, "backward_seconds": 0.5}}
        assert one["traces"] == [str(tmp_path / f"t-{name}.json")]
        assert (tmp_path / f"t-{name}.json").exists()
        assert any("eager step" in note for note in one["notes"])
    assert sum("eager step" in line for line in said) == 2


def test_one_set_s_trace_is_where_it_was_asked_for(timed, tmp_path: Path) -> None:
    result, said = timed(Machine(), Request(1, 1, trace=tmp_path / "t.json"), ())
    assert (tmp_path / "t.json").exists()
    assert not any("eager" in line for line in said)
    assert result["sets"]["plain"]["notes"] == ["a stand-in"]


class BlindProfiler:
    @staticmethod
    def check(*, layers: bool, trace: bool) -> None:
        if layers or trace:
            raise BackendError("it cannot tell")


def test_what_the_framework_cannot_tell_is_refused_before_the_text_is_read(
    timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm_lab.bench.profiler_class", lambda backend: BlindProfiler)
    monkeypatch.setattr("minillm_lab.bench.open_corpus", None)
    machine = Machine()
    with pytest.raises(BackendError, match="cannot tell"):
        timed(machine, Request(1, 1, layers=True), ())
    assert machine.log == []


def test_a_plugin_that_raises_is_named(timed) -> None:
    machine = Machine()
    machine.fails = "scale"
    with pytest.raises(PluginCodeError, match="scale"):
        timed(machine, Request(1, 1), ("scale",), ())


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        (Request(steps=0), "--steps 0"),
        (Request(repeats=-1), "--repeats -1"),
        (Request(trace=Path("/nowhere/there/t.json")), "--trace"),
        (Request(trace=Path("/")), "--trace /"),
    ],
)
def test_what_cannot_be_timed_is_refused(request_: Request, where: str) -> None:
    with pytest.raises(Refusal) as error:
        request_.check()
    assert where in str(error.value.where)


@given(
    st.floats(0, 1),
    st.dictionaries(st.text(min_size=1), st.floats(1e-6, 1e3), min_size=1, max_size=4),
)
def test_shares_sum_to_one_and_keep_their_proportions(
    waited: float, parts: dict[str, float]
) -> None:
    parts.pop("data", None)
    found = shares(waited, parts or {"forward": 1.0})
    assert sum(found.values()) == pytest.approx(1)
    assert found["data"] == waited
    assert all(share >= 0 for share in found.values())


def test_the_table_shows_both_and_what_is_unknown(timed, tmp_path: Path) -> None:
    result, _ = timed(Machine(counts=False), Request(1, 2, layers=True), ("scale",), ())
    result["sets"]["plain"]["mfu"] = None
    text = shown(result)
    for part in ("scale", "plain", "first / second", "optimizer", "data", "layers.0", "unknown"):
        assert part in text
