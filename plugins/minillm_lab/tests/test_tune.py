"""Tests of a tuning: candidates from the largest on, with a stand-in whose speed is a formula."""

from __future__ import annotations

import io
import json
import os
import signal
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from minillm_core import Candidate, MinillmError, OutOfMemory, Plan, Plugin, Refusal, build_plan
from minillm_core.backends.base import Binding, StepResult
from minillm_core.config.schema import Stage
from minillm_core.studies import Detected, LoadedPlugin
from minillm_lab.cli.tune import print_whole, render, verdict
from minillm_lab.tune import UNFINISHED, Request, kernel_plugins, tune

DETECTED = Detected("torch", "cpu", "the test says so")
MIB = 2**20


class Machine:
    """A device whose step takes ``seconds(train, kernels)``, with limited memory."""

    def __init__(self, seconds: Callable[[Any, str], float], memory: int = 2**40) -> None:
        self.seconds, self.memory = seconds, memory
        self.full: set[int] = set()  # rows at which memory runs out despite the estimate
        self.built: list[tuple[int, bool, str]] = []

    def create(self, detected: Detected, plan: Plan) -> Any:
        train, kernels = plan.config.train, plan.config.kernels
        kernels += "".join(f" {owner}" for owner, _ in plan.candidates)
        self.built.append((train.rows, train.checkpointing, kernels))
        return SimpleNamespace(trainer=lambda plan, seed, **more: FakeTrainer(self, train, kernels))

    def profile(self, trainer: Any) -> Any:
        return SimpleNamespace(
            memory_bytes=lambda: self.memory,
            trim=lambda: None,
            forget_peak=lambda: None,
            held_bytes=lambda: 1,
            peak_bytes=lambda: 100 * MIB,
        )


class FakeTrainer:
    """A trainer with simulated step times: each step subtracts its duration from the compile time."""

    def __init__(self, machine: Machine, train: Any, kernels: str) -> None:
        self.machine, self.train, self.kernels = machine, train, kernels
        self.compile_seconds = 0.0
        self.binding = Binding(
            "torch", "cpu", "a device", "why", "float32", False, False, False, peak_flops=1e12
        )

    def step(self, micro: Any, values: Mapping[str, float], supervised: int) -> int:
        if self.train.rows in self.machine.full:
            raise OutOfMemory("the device is full")
        assert len(micro) == self.train.accumulate
        self.compile_seconds -= self.machine.seconds(self.train, self.kernels)
        return 0

    def read(self, handle: int) -> StepResult:
        return StepResult(1.0, 1.0)

    def join(self, ranks: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a text, and its token cache after the first use."""
    found = tmp_path_factory.mktemp("tune")
    lines = (f"the {n} little cats sat on mat {n * n}" for n in range(300))
    (found / "text.txt").write_text("\n\n".join(lines))
    return found


@pytest.fixture
def tuned(asked: Callable, folder: Path) -> Callable[..., dict[str, Any]]:
    """Return ``tuned(machine, rows=, memory=)``: the result for ``rows`` in one micro-batch."""
    text = folder / "text.txt"

    def run(
        machine: Machine,
        *,
        rows: int = 8,
        memory: float | None = None,
        offered: tuple[Plugin, ...] = (),
        **train: Any,
    ) -> Any:
        loaded, plugins = asked()
        update = {
            "data": loaded.config.data.model_copy(update={"paths": (str(text),)}),
            "model": loaded.config.model.model_copy(update={"vocab": 300}),
            "train": loaded.config.train.model_copy(
                update={"rows": rows, "accumulate": 1, "seq_len": 16, **train}
            ),
        }
        found = replace(loaded, config=loaded.config.model_copy(update=update))
        plan = build_plan(found, plugins)
        more = {type(one).__name__.lower(): one for one in offered}

        def planned(added: Collection[str]) -> Plan:
            return build_plan(found, [*plugins, *(LoadedPlugin.of(n, more[n]) for n in added)])

        result, plan = tune(
            Request(steps=2, repeats=2, memory=memory),
            plan,
            DETECTED,
            cache=folder / "cache",
            say=lambda line: None,
            offered=[*more],
            planned=planned,
            create=machine.create,
            profile=machine.profile,
        )
        assert plan.config.train.rows == result["best"]["train.rows"]
        assert plan.config.kernels == result["best"]["kernels"]
        return result

    return run


def rows_tried(result: Mapping[str, Any]) -> list[int]:
    return [one["train.rows"] for one in result["candidates"] if not one["kernel"]]


def test_the_fastest_division_is_found_and_the_rest_is_not_tried(tuned) -> None:
    """Four rows are the best; one row is not tried, since two are clearly slower."""
    machine = Machine(lambda train, kernels: {8: 2.0, 4: 1.0, 2: 3.0}[train.rows])
    result = tuned(machine)
    assert rows_tried(result) == [8, 4, 2]
    assert result["best"] | {"kernels": "auto"} == {
        "kernels": "auto",
        "train.rows": 4,
        "train.accumulate": 2,
        "train.checkpointing": False,
    }
    assert result["gain"] == pytest.approx(2.0, rel=0.1)
    assert [one[0] for one in machine.built[-4:]] == [8, 4, 4, 8]  # A B B A
    assert not any(recomputed for _, recomputed, _ in machine.built)
    assert verdict(result).startswith("best: train.rows=4 train.accumulate=2; against")
    assert "timed again in turns" in str(render(result).caption)


def test_no_gain_leaves_the_settings_as_they_were(tuned) -> None:
    result = tuned(Machine(lambda train, kernels: 1.0))
    assert result["best"] == result["as_they_were"]
    assert result["gain"] == 1.0
    assert "they stay" in verdict(result)
    table = render(result)
    assert table.row_count == len(result["candidates"])
    assert [*table.columns[-1].cells].count("chosen") == 1


def test_a_faster_kernel_is_taken(tuned) -> None:
    machine = Machine(lambda train, kernels: 0.5 if "attention=composed" in kernels else 1.0)
    result = tuned(machine, rows=1)
    assert result["best"]["kernels"] == "attention=composed"
    assert "--kernels attention=composed" in verdict(result)
    tried = [one["kernel"] for one in result["candidates"] if one["kernel"]]
    assert len(tried) == len(set(tried)) >= 3
    shown = [*render(result).columns[1].cells]
    assert shown == [
        "" if one["kernels"] == "auto" else one["kernels"] for one in result["candidates"]
    ]
    assert any(text.startswith("attention=composed,") for text in shown)  # what later ones build on


def kernel(name: str, **more: Any) -> Candidate:
    reference = "minillm_core.backends.torch.ops:swiglu"
    return Candidate("swiglu", name, ("torch",), reference, rank=lambda request: -1, **more)


class Quick(Plugin, api=1, backends=("torch",)):
    """A faster kernel."""

    def kernel_provider(self, kernels: Any) -> None:
        kernels.candidate(kernel("quick"))


class Slow(Plugin, api=1, backends=("torch",)):
    """A slower kernel."""

    def kernel_provider(self, kernels: Any) -> None:
        kernels.candidate(kernel("slow"))


class Rough(Plugin, api=1, backends=("torch",)):
    """A kernel that rounds."""

    def kernel_provider(self, kernels: Any) -> None:
        kernels.candidate(kernel("rough", within_tolerance=False))


class Elsewhere(Plugin, api=1, backends=("torch",), devices=("cuda",)):
    """A kernel for another device."""

    def kernel_provider(self, kernels: Any) -> None:
        kernels.candidate(kernel("elsewhere", devices=("cuda",)))


def test_kernels_of_plugins_that_are_not_named_are_tried_and_the_faster_ones_stay(tuned) -> None:
    times = {"quick": 0.5, "slow": 2.0}
    machine = Machine(
        lambda train, kernels: min((times[n] for n in times if n in kernels), default=1.0)
    )
    result = tuned(machine, rows=1, offered=(Elsewhere(), Rough(), Slow(), Quick()))
    tried = [one["plugins"] for one in result["candidates"] if one["plugins"] and not one["kernel"]]
    assert tried == [["slow"], ["quick"]]
    assert result["best"]["plugins"] == ["quick"]
    assert "plugins" not in result["as_they_were"]
    assert result["gain"] == pytest.approx(2.0, rel=0.1)
    assert verdict(result).startswith("best: --plugins quick; against")
    table = render(result)
    assert [*table.columns[-1].cells].count("chosen") == 1
    assert "with quick" in [*table.columns[1].cells]
    narrow = Console(file=io.StringIO(), width=20, color_system=None)
    print_whole(narrow, table)
    lines = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
    for name in table.columns[1].cells:
        assert any(str(name) in line for line in lines), "in one piece"


def test_a_kernel_of_its_own_that_fails_is_listed_with_the_reason(tuned) -> None:
    """One of a plugin that was added, and one of the core."""

    def seconds(train: Any, kernels: str) -> float:
        if "quick" in kernels or "composed" in kernels:
            raise MinillmError("the kernel broke", where="quick.py:3")
        return 1.0

    result = tuned(Machine(seconds), rows=1, offered=(Quick(), Slow()))
    failed = {one["kernel"]: one for one in result["candidates"] if one["reason"]}
    assert {None, "attention=composed"} <= failed.keys()
    assert failed[None]["plugins"] == ["quick"]
    for one in failed.values():
        assert one["reason"] == "failed: the kernel broke"
        assert one["tokens_per_second"] is None
    assert ["slow"] in [one["plugins"] for one in result["candidates"]]
    assert result["finished"]

    def broken(train: Any, kernels: str) -> float:
        raise MinillmError("the model broke")

    with pytest.raises(MinillmError, match="the model broke"):
        tuned(Machine(broken), rows=1)


def test_a_signal_leaves_the_best_candidate_so_far(tuned) -> None:
    def seconds(train: Any, kernels: str) -> float:
        if "quick" in kernels:
            signal.raise_signal(signal.SIGINT)
        return {8: 2.0, 4: 1.0, 2: 3.0}[train.rows]

    result = tuned(Machine(seconds), offered=(Quick(),))
    assert not result["finished"]
    assert result["best"]["train.rows"] == 4
    assert result["candidates"][-1]["reason"] == "ended by a signal"
    assert verdict(result) == "best so far: train.rows=4 train.accumulate=2"
    assert render(result).caption is None
    assert [*render(result).columns[-1].cells].count("chosen") == 1

    def at_once(train: Any, kernels: str) -> float:
        signal.raise_signal(signal.SIGINT)
        return 1.0

    with pytest.raises(KeyboardInterrupt):  # there is no best one
        tuned(Machine(at_once))


def test_installed_plugins_of_kernels_are_found_and_others_are_not() -> None:
    assert {*kernel_plugins(())} >= {"cute", "fp8_head", "liger", "metal", "triton"}
    assert not {"liger", "muon", "fp8_mlp"} & {*kernel_plugins({"liger"})}


@pytest.mark.parametrize(
    ("plugins", "loaded", "offered"),
    [
        ("-liger", set(), False),
        ("muon,-liger", {"muon"}, False),
        ("muon", {"muon"}, True),
        ("-qk_norm,-liger", {"half_rope"}, False),
    ],
)
def test_kernels_of_a_plugin_are_left_out_whether_or_not_the_run_names_it(
    program,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plugins: str,
    loaded: set[str],
    offered: bool,
) -> None:
    """The error of the interrupted command names the file with the best candidate so far."""
    seen: dict[str, Any] = {}

    def interrupted(request: Any, plan: Plan, *given: Any, **more: Any) -> Any:
        seen.update(more, names={one.name for one in plan.active})
        best = {"train.rows": 4}
        empty = {"device": "a CPU", "backend": "torch", "candidates": []}
        found = {**empty, "finished": False, "best": best, "as_they_were": {}, "gain": None}
        return found, plan

    monkeypatch.setattr("minillm_lab.tune.tune", interrupted)
    file, to = tmp_path / "run.toml", tmp_path / "tuned.toml"
    table = "[plugins.qk_norm]\n[plugins.half_rope]\n" if "qk_norm" in plugins else ""
    file.write_text(f'preset = "tiny"\n{table}')
    where = ("--data", str(folder / "text.txt"), "--backend", "torch", "--device", "cpu")
    code, out, said = program(
        *("tune", "-c", str(file), "--plugins", plugins, *where, "--to", str(to), "--json")
    )
    assert code == 130, said
    assert seen["names"] == loaded
    assert ("liger" in seen["offered"]) == offered
    assert "triton" in seen["offered"]
    assert json.loads(out)["file"] == str(to)
    assert f"# {UNFINISHED}\n" in to.read_text()
    assert f"{to} has the best candidate so far: minillm train -c {to}" in said


def test_another_plugin_that_the_run_does_not_name_cannot_be_taken_away(
    program, tmp_path: Path
) -> None:
    to = ("--to", str(tmp_path / "a.toml"), "--backend", "torch", "--device", "cpu")
    for wrong in ("-muon", "-lieger", "liger,-liger"):
        code, _, said = program("tune", "--preset", "tiny", "--plugins", wrong, *to)
        assert code == 2
        assert "taken away" in said


@pytest.mark.slow
def test_what_does_not_fit_is_listed_and_not_run(tuned) -> None:
    everything = tuned(Machine(lambda train, kernels: 1.0 / train.rows))
    needs = {one["train.rows"]: one["predicted_bytes"] for one in everything["candidates"]}
    machine = Machine(lambda train, kernels: 1.0 / train.rows)
    result = tuned(machine, memory=(needs[4] + needs[8]) / 2)
    found = {one["train.rows"]: one for one in result["candidates"] if not one["kernel"]}
    assert found[8]["reason"].startswith("needs about")
    assert found[8]["tokens_per_second"] is None
    assert result["best"]["train.rows"] == 4
    assert result["gain"] is None
    assert "those do not fit" in verdict(result)


def test_recomputation_is_tried_where_it_allows_more_rows(tuned) -> None:
    """With recomputation eight rows fit instead of four, and are the fastest."""
    long = {"seq_len": 256}
    needs = tuned(Machine(lambda train, kernels: 1.0), **long)["candidates"]
    most = max(one["predicted_bytes"] for one in needs)
    machine = Machine(lambda train, kernels: 1.0 if train.checkpointing else 2.0)
    result = tuned(machine, memory=most / 0.95, **long)
    assert (result["best"]["train.rows"], result["best"]["train.checkpointing"]) == (8, True)
    recomputed = [one for one in result["candidates"] if one["train.checkpointing"]]
    assert {one["train.rows"] for one in recomputed} == {8}


@pytest.mark.parametrize("slower", ["selective", True])
def test_a_compiled_step_is_also_recomputed_selectively(tuned, slower: str | bool) -> None:
    """Eight rows fit if whole blocks are recomputed, and four selectively: the faster of both is chosen."""
    setting = {"seq_len": 256, "compile": "on"}

    def seconds(train: Any, kernels: str) -> float:
        return (
            2.0 if train.checkpointing is False else 1.5 if train.checkpointing == slower else 1.0
        )

    needs = tuned(Machine(seconds), **setting)["candidates"]
    half = {one["train.rows"]: one["predicted_bytes"] for one in needs}[4]
    result = tuned(Machine(seconds), memory=half / 0.95, **setting)
    ran = {
        (one["train.rows"], one["train.checkpointing"])
        for one in result["candidates"]
        if one["tokens_per_second"]
    }
    assert {(8, True), (4, "selective"), (2, False)} <= ran
    assert not ran & {(4, True), (2, "selective"), (2, True)}
    assert result["best"]["train.checkpointing"] == (True if slower == "selective" else "selective")


def test_a_device_that_is_full_after_all_goes_to_fewer_rows(tuned) -> None:
    machine = Machine(lambda train, kernels: 1.0 / train.rows)
    machine.full = {8}
    result = tuned(machine)
    assert result["candidates"][0]["reason"] == "out of memory: the device is full"
    assert result["best"]["train.rows"] == 4
    assert result["gain"] is None


def test_nothing_that_fits_is_refused(tuned) -> None:
    """The refusal has the smallest candidate's need, not the largest's."""
    with pytest.raises(Refusal, match=r"no candidate fits: 1 x 8 rows.*: needs about") as refused:
        tuned(Machine(lambda train, kernels: 1.0), memory=1000)
    assert "--memory" in (refused.value.fix or "")


@pytest.mark.parametrize(("flag", "value"), [("--steps", "0"), ("--repeats", "0")])
def test_no_time_is_refused(program, flag: str, value: str) -> None:
    code, _, said = program("tune", flag, value)
    assert code == 2
    assert f"{flag} {value}" in said


def test_a_folder_without_permission_is_refused_before_anything_is_timed(
    program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    code, out, said = program("tune", "--preset", "tiny", "--to", str(tmp_path / "a.toml"))
    assert (code, out) == (2, "")
    assert said.startswith(f"nothing can be written to {tmp_path}\n")


def test_a_file_that_is_there_is_kept(program, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("x")
    code, _, said = program("tune", "--to", str(tmp_path / "mine.toml"))
    assert (code, (tmp_path / "mine.toml").read_text()) == (2, "x")
    assert "is there already" in said
    assert program("tune", "--to", str(tmp_path / "none" / "a.toml"))[0] == 2
    code, _, said = program("tune", "--memory", "much", "--to", str(tmp_path / "a.toml"))
    assert code == 2
    assert "'much' is not a size" in said


def test_a_plugin_that_chooses_within_micro_batches_is_refused(program, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words\n\n" * 50)
    code, _, said = program(
        *("tune", "--preset", "tiny", "--plugins", "batch_schedule", "--data", str(text)),
        *("--device", "cpu", "--to", str(tmp_path / "a.toml"), "--backend", "torch"),
    )
    assert code == 2
    assert "another division of a step is another run" in said


def test_stages_are_refused_with_the_setting_that_removes_them(tuned) -> None:
    stage = Stage(until=0.5, rows=2, accumulate=None, seq_len=None)
    with pytest.raises(Refusal, match=r"by train\.stages") as refused:
        tuned(Machine(lambda train, kernels: 1.0), stages=(stage,))
    assert refused.value.fix == "train.stages=[]"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_program_tunes_a_model(program, folder: Path, tmp_path: Path, backend: str) -> None:
    pytest.importorskip({"torch": "torch", "mlx": "mlx.core"}[backend])
    text, to = folder / "text.txt", tmp_path / "tuned.toml"
    sizes = ("model.layers=1", "model.dim=16", "model.heads=2", "model.kv_heads=2")
    sizes += ("model.hidden=32", "model.vocab=300", "train.rows=2", "train.seq_len=16")
    code, out, said = program(
        *("tune", "--preset", "tiny", "--data", str(text), "--backend", backend, *sizes),
        *("--device", "cpu", "--to", str(to), "--steps", "1", "--repeats", "1", "--json"),
    )
    assert code == 0, said
    result = json.loads(out)
    assert all(one["tokens_per_second"] for one in result["candidates"])
    chosen = tomllib.loads(to.read_text())
    assert chosen["train"]["rows"] == result["best"]["train.rows"]
    assert chosen["kernels"] == result["best"]["kernels"]
    assert chosen["model"]["dim"] == 16
    assert to.read_text().startswith(f"# minillm train -c {to}\n# minillm tune, ")
    assert program("plan", "-c", str(to), "--json")[0] == 0
    assert "2 x 1 rows" in said
