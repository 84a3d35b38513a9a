"""Tests of runs that start from a model directory, through the program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm_core import Run, build_plan, load
from minillm_core.checkpoint.read import newest_or_refuse
from minillm_core.cli.main import main

MODEL = (
    *("model.vocab=300", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=1"),
    *("model.hidden=48", "model.tied=true", "model.rope_base=5000.0"),
)
FEW = (
    "--device",
    "cpu",
    "--preset",
    "tiny",
    "train.rows=2",
    "train.seq_len=16",
    "eval.tokens=100",
    "eval.samples=0",
)
STILL = ("--steps", "1", "train.lr=1e-30", "train.weight_decay=0.0")  # too small for float32
GATE = """
from minillm_core import Module, Param, Plugin
from minillm_core.nn.init import zeros

class Bias(Module):
    def __init__(self, geometry):
        super().__init__()
        self.bias = Param((geometry.head_dim,), init=zeros, role="scalar")

    def forward(self, y):
        return y + self.bias

class Gate(Plugin, api=1):
    \"\"\"Adds a bias to what attention gives.\"\"\"

    def build_attention(self, attn):
        attn.out.gate(Bias)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create text.txt, a run on it, and the model directory exported from the run."""
    folder = tmp_path_factory.mktemp("init")
    (folder / "text.txt").write_text(
        "It was a dark and stormy night; the räin fell.\n" * 99, "utf-8"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLM_CACHE", str(folder / "cache"))
        place = ("--data", str(folder / "text.txt"), "--out", str(folder / "run"), "--steps", "3")
        assert main(["train", *place, *FEW, *MODEL]) == 0
    assert main(["export", str(folder / "run"), "--to", str(folder / "model")]) == 0
    return folder


def start(folder: Path, out: Path, *arguments: str, init: str = "model") -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLM_CACHE", str(folder / "cache"))
        place = ("--data", str(folder / "text.txt"), "--out", str(out))
        return main(["train", *place, "--init", str(folder / init), *FEW, *arguments])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_it_starts_with_the_shape_weights_and_tokenizer(
    folder: Path, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gate.py").write_text(GATE, "utf-8")
    gate = ("--plugins", f"muon,{tmp_path}/gate.py:Gate", "muon.lr=1e-30")
    assert start(folder, tmp_path / "out", *STILL, "--backend", backend, *gate) == 0
    said = capsys.readouterr().err
    assert f"the weights come from {folder / 'model'}\n" in said
    assert "not in the directory, so newly initialised: layers.0.attention.out.gate.bias" in said

    ours, theirs = (newest_or_refuse(out, print) for out in (tmp_path / "out", folder / "run"))
    found, expected = ours.arrays("model."), theirs.arrays("model.")
    for name, array in expected.items():
        assert found.pop(name).tobytes() == array.tobytes(), name
    assert all(name.endswith(".gate.bias") for name in found)
    assert len(found) == 2

    record = json.loads((tmp_path / "out" / "run.json").read_text())
    dim = record["config"]["model"]["dim"]
    assert (dim["value"], dim["origin"]) == (32, f"--init {folder / 'model'}")
    tokenizers = [
        json.loads((at / "tokenizer.json").read_text()) for at in (tmp_path / "out", folder / "run")
    ]
    assert tokenizers[0] == tokenizers[1]

    # a run from this run keeps what an export takes the chat template from
    for flag in ("--branch", "--init"):
        out, given = tmp_path / flag, (flag, str(tmp_path / "out"), *gate[:2])
        assert main(["train", *given, "--out", str(out), "--steps", "2", "eval.samples=0"]) == 0
        assert json.loads((out / "run.json").read_text())["initial"] == record["initial"]


@pytest.mark.parametrize("init", ["model", "run"])
def test_a_run_from_python_begins_with_them_too(
    folder: Path, init: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(folder / "cache"))
    sizes = {"train.rows": 2, "train.seq_len": 16, "eval.tokens": 100, "train.steps": 1}
    settings = {**sizes, "device": "cpu", "init": str(folder / init)}
    new = Run(build_plan(load(preset="tiny", data=folder / "text.txt", settings=settings)))
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    *_, last = (one["val_loss"] for one in map(json.loads, lines) if "val_loss" in one)
    assert new.validate().val_loss == pytest.approx(last, abs=1e-5)


@pytest.mark.parametrize(
    ("init", "more", "said"),
    [
        ("model", ["model.dim=64"], "model.dim is 64, and the model to start from has 32"),
        ("model", ["model.tied=false"], "leave model.tied out, or set it to true"),
        ("run", ["model.dim=64"], "no weight of the checkpoint fits this model"),
        ("nowhere", [], "there is no such folder"),
        ("text.txt", [], "is not a model directory"),
    ],
)
def test_what_cannot_be_started_from_is_refused(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    init: str,
    more: list[str],
    said: str,
) -> None:
    assert start(folder, tmp_path / "out", *STILL, *more, init=init) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
