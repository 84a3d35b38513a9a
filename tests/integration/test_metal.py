"""Tests of the program on Metal: MLX on the GPU of a Mac with Apple silicon, against MLX on its CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minillm_core.cli.main import main

mx = pytest.importorskip("mlx.core")

pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(not mx.metal.is_available(), reason="MLX sees no GPU that speaks Metal"),
]

SIZES = (
    *("model.vocab=300", "model.dim=64", "model.layers=2", "model.heads=4", "model.kv_heads=2"),
    *("model.hidden=64", "train.rows=2", "train.seq_len=64", "eval.tokens=500"),
    *("train.dtype=float32", "train.lr=0.001"),
)


def losses(out: Path) -> list[float]:
    events: list[dict[str, Any]] = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    return [event["loss"] for event in events if event["event"] == "step"]


def test_the_gpu_learns_as_the_cpu_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(2000)))
    given = ("--preset", "tiny", "--backend", "mlx", "--data", str(text), "--steps", "10", *SIZES)
    for device in ("gpu", "cpu"):
        out = ("--device", device, "--out", str(tmp_path / device))
        assert main(["train", *given, *out]) == 0, capsys.readouterr().err
    binding = json.loads((tmp_path / "gpu" / "run.json").read_text())["binding"]
    assert binding["device"] == "gpu"
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), abs=1e-3)


def test_a_run_on_the_gpu_is_resumed_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", str(tmp_path / "out")
    text.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(2000)))
    where = ("--preset", "tiny", "--backend", "mlx", "--device", "gpu", "--data", str(text))
    plugins = ("--plugins", "muon,value_embeds")
    assert main(["train", *where, *plugins, "--steps", "6", *SIZES, "--out", out]) == 0
    assert main(["train", "--resume", "--steps", "8", "--out", out]) == 0, capsys.readouterr().err
    assert len(losses(tmp_path / "out")) == 8
    capsys.readouterr()
    assert main(["generate", out, "the 7 little", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("the 7 little")
