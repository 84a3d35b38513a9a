"""Tests of the program on CUDA: resumed runs, benchmarks, traces, ablations.

They share one process, and so compiled code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm_core.checkpoint.read import newest
from minillm_core.cli.main import main

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("default"),  # inductor recommends TF32
]

SIZES = (
    *("model.vocab=300", "model.dim=64", "model.layers=2", "model.heads=4", "model.kv_heads=2"),
    *("model.hidden=64", "train.rows=2", "train.seq_len=256", "eval.tokens=500"),
)
WHERE = ("--preset", "tiny", "--device", "cuda", "--backend", "torch")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def given(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, ...]]:
    monkeypatch.setenv("MINILLM_CACHE", str(cache))
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(2000)))
    before = torch.are_deterministic_algorithms_enabled()
    yield ("--data", str(path), *WHERE, *SIZES)
    torch.use_deterministic_algorithms(before)


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "run.json").read_bytes())


def kernels(out: Path) -> dict[str, dict[str, Any]]:
    """Return op -> its kernel, from run.json."""
    return {choice["op"]: choice for choice in record(out)["binding"]["kernels"]}


def learnt(out: Path) -> list[tuple[Any, ...]]:
    events = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events if e["event"] == "step"]


MANY = "muon,windows,qk_norm,value_embeds,smear,sparse_gate,bigram_hash,mtp"


def test_a_resumed_run_is_bit_equal(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resume with --deterministic, compiled, across a change of the windows."""
    full, part = tmp_path / "full", tmp_path / "part"
    options = ("windows.start=128", "windows.window=256", "windows.stages=2")
    saved = ("checkpoint.every=3", "checkpoint.keep=9", "eval.every=4")
    asked = ("--plugins", MANY, "--deterministic", "--steps", "9", *options, *saved)
    assert main(["train", *given, *asked, "--out", str(full)]) == 0, capsys.readouterr().err
    bound = record(full)["binding"]
    assert (bound["deterministic"], bound["compile"]) == (True, True)
    assert kernels(full)["attention"]["kernel"] == "flex"
    shutil.copytree(full, part)
    for path in (part / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > 3:
            shutil.rmtree(path)
    (part / "run.json").write_text(json.dumps(record(part) | {"exit": None}))
    assert main(["train", "--resume", "--out", str(part)]) == 0, capsys.readouterr().err
    assert "resumed after step 3" in capsys.readouterr().err
    assert learnt(part) == learnt(full)
    ours, theirs = newest(part), newest(full)
    assert ours
    assert theirs
    arrays, expected = ours.arrays(), theirs.arrays()
    assert arrays.keys() == expected.keys()
    different = [name for name in expected if arrays[name].tobytes() != expected[name].tobytes()]
    assert different == []


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("auto", {"rms_norm": "liger", "linear_cross_entropy": "liger", "swiglu": "liger"}),
        ("reference,rotate=liger", {"rms_norm": "composed", "rotate": "liger"}),
        ("strict,rms_norm=fused", {"rms_norm": "fused", "linear_cross_entropy": "liger"}),
    ],
)
def test_run_json_has_the_kernels_that_served(
    given: tuple[str, ...], tmp_path: Path, chosen: str, expected: dict[str, str]
) -> None:
    pytest.importorskip("liger_kernel")
    out = tmp_path / "out"
    asked = ("--plugins", "liger", "--kernels", chosen, "--steps", "12", "train.compile=off")
    assert main(["train", *given, *asked, "--out", str(out)]) == 0
    served = kernels(out)
    assert {op: served[op]["kernel"] for op in expected} == expected
    (liger,) = (one for one in record(out)["plugins"] if one["name"] == "liger")
    assert liger["evidence"]
    notes = record(out)["binding"]["notes"]
    assert ("rms_norm=liger of plugin liger does not serve" in "".join(notes)) == (chosen != "auto")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--plugins", "liger,mtp"), "leave the plugin out: 'chunked' serves instead"),
        (("--plugins", "liger,mtp", "train.compile=off"), "liger.loss=false leaves the op to"),
        (("--plugins", "liger", "train.dtype=float16"), "float16"),
        (("--plugins", "liger", "--kernels", "reference"), "plugin 'liger' brings serves"),
        (("--plugins", "liger", "--kernels", "swiglu=liger"), "the compiled step fuses this op"),
        (("--kernels", "swiglu=liger"), "no kernel 'liger' for swiglu"),
        (("--kernels", "attention=flex"), "the mask is only causal"),
    ],
)
def test_kernels_that_cannot_serve_are_refused_before_anything_starts(
    given: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    asked: tuple[str, ...],
    said: str,
) -> None:
    if "--plugins" in asked:
        pytest.importorskip("liger_kernel")  # else it is refused for another reason
    for command in (["train", "--out", str(tmp_path / "out")], ["plan"]):
        assert main([*command, *given, *asked]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_benchmark_tells_where_time_goes(
    given: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed: list[str] = []
    depth = [0, 0]  # open ranges, and the minimum so far
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def opened(name: str) -> Any:
        pushed.append(name)
        depth[0] += 1
        return push(name)

    def closed() -> Any:
        depth[0] -= 1
        depth[1] = min(depth)
        return pop()

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", opened)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", closed)
    trace, asked = tmp_path / "trace.json", ("--plugins", "muon,sparse_gate")
    how = ("--against", "none", "--steps", "4", "--repeats", "2", "--layers", "--trace", str(trace))
    assert main(["bench", *given, *asked, *how, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device"] == torch.cuda.get_device_name()
    for one in result["sets"].values():
        assert one["compile"]
        assert sum(one["shares"].values()) == pytest.approx(1)
        assert min(one["part_seconds"].values()) > 0
        assert set(one["part_seconds"]) == {"forward", "backward", "optimizer"}
        assert one["peak_bytes"] > 0
        assert list(one["layers"]) == ["embedding", "layers.0", "layers.1", "head and loss"]
        assert min(spent for layer in one["layers"].values() for spent in layer.values()) > 0
        eager = sum(spent for layer in one["layers"].values() for spent in layer.values())
        assert eager < 10 * one["first_step_seconds"]  # seconds, not milliseconds
        assert not any("CUDA alone" in note for note in one["notes"])
    assert depth == [0, 0]
    (path,) = result["sets"]["muon+sparse_gate"]["traces"]
    events = json.loads(Path(path).read_bytes())["traceEvents"]
    assert all("ph" in event for event in events)
    lasting = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in lasting)
    names = {event["name"] for event in lasting}
    assert main(["plan", *given, *asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    nodes = called(plan)
    assert len(nodes) > 15
    assert nodes <= names
    assert nodes <= set(pushed)
    assert {"forward", "backward", "optimizer"} <= names & set(pushed)
    on_device = {event["name"] for event in lasting if event.get("cat") == "gpu_user_annotation"}
    assert {"layers.0.attention", "layers.1.mlp"} <= on_device
    assert any(event.get("cat") == "kernel" for event in lasting)


def called(plan: dict[str, Any]) -> set[str]:
    """Return the nodes of a plan that have parameters; the head's product is part of the loss op."""
    return {name.rpartition(".")[0] for name in plan["model"]["parameters"]} - {"head"}


def test_an_ablation_of_one_plugin(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = ("--plugins", "muon", "--seeds", "2", "--steps", "8", "--out", str(out))
    assert main(["ablate", *given, *asked]) == 0, capsys.readouterr().err
    kept = json.loads((out / "ablation.json").read_bytes())
    assert kept["finished"]
    assert kept["device"] == torch.cuda.get_device_name()
    muon = kept["plugins"]["muon"]
    assert muon["low"] <= muon["effect"] <= muon["high"]
    assert {run["variant"] for run in kept["runs"]} == {"baseline", "+muon"}
    assert all(run["peak_bytes"] > 0 for run in kept["runs"])
    by_seed = {(run["variant"], run["seed"]): run["curve"][-1]["val_loss"] for run in kept["runs"]}
    assert len(set(by_seed.values())) == len(by_seed)  # each run is different
