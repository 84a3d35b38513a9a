"""Tests of the kernels on Metal itself, against float64, alone and in a compiled step. Needs a Mac."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
import numpy as np

from minillm_core import LossForm, TanhCap
from minillm_core.cli.main import main
from minillm_metal import exact
from minillm_metal.cases import Case, cases
from minillm_metal.kernels.attention import attention
from minillm_metal.kernels.loss import linear_cross_entropy

pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(not mx.metal.is_available(), reason="MLX sees no GPU that speaks Metal"),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases()])
def test_a_kernel_is_float64s(case: Case) -> None:
    for got, want in zip(case.compute(), case.wanted, strict=True):
        exact.close(case.op, getattr(mx, case.dtype), got, want)


def test_a_compiled_step_computes_the_same() -> None:
    rng = np.random.default_rng(0)
    hidden, weight = (exact.rounded(rng, mx.float32, *s, 16)[0] for s in ((40,), (300,)))
    targets = mx.array(rng.integers(-1, 300, (1, 40)).astype(np.int32))
    form = LossForm(TanhCap(15.0))

    def objective(hidden: mx.array, weight: mx.array) -> mx.array:
        y = attention(*(hidden.reshape(1, 40, 2, 8) for _ in range(3)), window=9)
        return linear_cross_entropy(y.reshape(40, 16), weight, targets, None, form, rows=16)[0]

    step = mx.value_and_grad(objective, argnums=(0, 1))
    (one, grads), (two, again) = step(hidden, weight), mx.compile(step)(hidden, weight)
    np.testing.assert_allclose(np.array(one), np.array(two), rtol=1e-5)
    for a, b in zip(grads, again, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5)


def test_a_run_learns_as_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(2000)))
    sizes = (
        *("model.vocab=300", "model.dim=64", "model.layers=2", "model.heads=4"),
        *("model.kv_heads=2", "model.hidden=64", "train.rows=2", "train.seq_len=64"),
        *("eval.tokens=500", "train.dtype=float32", "train.lr=0.001"),
    )
    given = ("--preset", "tiny", "--backend", "mlx", "--data", str(text), "--steps", "10", *sizes)
    plugins = "muon,softcap,windows"
    losses: dict[str, Any] = {}
    for device, more in (("cpu", ""), ("gpu", ",metal")):
        out = tmp_path / device
        asked = ("--device", device, "--plugins", plugins + more, "windows.start=8")
        asked += ("windows.window=32", "windows.block=8", "--out", str(out))
        assert main(["train", *given, *asked]) == 0, capsys.readouterr().err
        lines = (out / "metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        losses[device] = [event["loss"] for event in events if event["event"] == "step"]
    kernels = json.loads((tmp_path / "gpu" / "run.json").read_text())["binding"]["kernels"]
    assert "metal" in json.dumps(kernels)
    assert losses["gpu"] == pytest.approx(losses["cpu"], abs=1e-3)
