"""Test of a run whose attention, loss, rotation and orthogonalisation use the emulated Metal kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")


from minillm_core.cli.main import main
from minillm_metal.emulator import emulated

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulator")]

# The plugins of this distribution, refused on a CPU.
HERE = """
from dataclasses import replace
from types import SimpleNamespace
from minillm_core import Plugin
from minillm_metal.metal import Metal

class Here(Plugin, api=1, backends=("mlx",)):
    def kernel_provider(self, kernels):
        def candidate(one):
            if one.name == "metal":
                kernels.candidate(replace(one, devices=("cpu",)))
        Metal().kernel_provider(SimpleNamespace(candidate=candidate))
"""


def test_a_run_with_emulated_kernels_learns_as_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, plugin = tmp_path / "text.txt", tmp_path / "here.py"
    text.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(2000)))
    plugin.write_text(HERE)
    given = (
        *("train", "--preset", "tiny", "--backend", "mlx", "--device", "cpu", "--data", str(text)),
        *("--steps", "3", "model.vocab=300", "model.dim=32", "model.layers=2", "model.heads=4"),
        *("model.kv_heads=2", "model.hidden=32", "train.rows=2", "train.seq_len=24"),
        *("eval.tokens=100", "train.lr=0.001", "train.compile=off", "windows.start=8"),
        *("windows.window=16", "windows.block=8", "windows.documents=true"),
    )
    losses: dict[str, Any] = {}
    for name, more in (("plain", ""), ("kernels", f",{plugin}:Here")):
        out = tmp_path / name
        asked = ("--plugins", f"muon,softcap,windows{more}", "--out", str(out))
        with emulated(orders=("shuffled",)) as launched:
            assert main([*given, *asked]) == 0, capsys.readouterr().err
        lines = (out / "metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        losses[name] = [event["loss"] for event in events if event["event"] == "step"]
    kernels = {done.launch.name.split("__")[0].removeprefix("custom_kernel_") for done in launched}
    assert kernels == {
        *("attention_forward", "attention_queries", "attention_keys"),
        *("loss_rows", "rotate", "norm_gradient", "gram"),
    }
    assert losses["kernels"] == pytest.approx(losses["plain"], abs=1e-4)
