"""Training with sparse_loss equals training without, for every packing of rows; and a run's notes on it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import minillm_core as minillm
from minillm_core.cli.main import main
from minillm_core.plugins.builders.loss import LEFT_OUT

SIZES = {
    **{"model.layers": 1, "model.dim": 32, "model.heads": 2, "model.kv_heads": 2},
    **{"model.vocab": 300, "train.seq_len": 64, "train.rows": 4, "train.steps": 8},
    **{"eval.samples": 0, "data.val": 0.2},
}
CHATS = [(f"What is {n}?" + " And why?" * (n % 9), "It is so. " * (1 + n % 7)) for n in range(80)]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Chats of different lengths."""
    path = tmp_path / "chats.jsonl"
    lines = ({"prompt": asked, "completion": answered} for asked, answered in CHATS)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(data: Path, out: Path, plugins: str, **more: Any) -> tuple[list[float], dict[str, Any]]:
    """Train eight steps; return the losses, and run.json's entry of sparse_loss."""
    loaded = minillm.load("tiny", plugins=plugins, data=data, settings=SIZES | more)
    minillm.Run(minillm.build_plan(loaded), out=out, cache=out.parent / "cache").train()
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    found = {one["name"]: one for one in json.loads((out / "run.json").read_text())["plugins"]}
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    return losses, found.get("sparse_loss", {})


@pytest.mark.broad(1)
@pytest.mark.parametrize("rows", ["sft", "sft,best_fit", "sft,length_buckets"])
def test_chats_are_learnt_as_without(chats: Path, tmp_path: Path, rows: str) -> None:
    """Packed rows, best-fit packing, length buckets; with gradient accumulation over two micro-batches."""
    more = {"train.accumulate": 2}
    dense, _ = run(chats, tmp_path / "dense", rows, **more)
    sparse, recorded = run(chats, tmp_path / "sparse", f"{rows},sparse_loss", **more)
    assert sparse == pytest.approx(dense, rel=1e-5)
    assert recorded["evidence"]["shown"]
    (what,) = recorded["evidence"]["what"]
    count = int(re.fullmatch(f"{LEFT_OUT} x([0-9]+)", what)[1])  # type: ignore[index]
    assert 0.2 < count / (8 * 8 * 64) < 0.9


def test_a_run_says_what_is_learnt_and_what_was_computed(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))

    def train(*more: str) -> str:
        sizes = [f"{key}={value}" for key, value in SIZES.items()]
        command = ["train", "--preset=tiny", "--task=sft", f"--data={chats}", *sizes, *more]
        assert main([*command, "--backend=torch", f"--out={tmp_path / str(len(more))}"]) == 0
        return capsys.readouterr().err

    said = train()
    assert re.search(r"note: [2-6][0-9]% of the tokens are supervised: --plugins sparse_loss", said)
    assert "the head was computed" not in said
    said = train("--plugins=sparse_loss")
    assert "are supervised" not in said
    assert re.search(r"the head was computed at [2-7][0-9]\.[0-9]% of the positions", said)


def test_where_everything_is_learnt_a_run_fails_and_says_so(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for n in range(30):
        (text / f"{n}.txt").write_text(f"{n}. A dark and stormy night. " * 20)
    with pytest.raises(minillm.MinillmError) as refused:
        run(text, tmp_path / "out", "sparse_loss", **{"train.steps": 12})
    assert "plugin 'sparse_loss' was named, but after 10 steps nothing shows" in str(refused.value)
    assert refused.value.where == f"expected: {LEFT_OUT}"


def test_a_plan_says_that_its_cost_is_a_bound(chats: Path) -> None:
    loaded = minillm.load("tiny", plugins="sft,sparse_loss", data=chats, settings=SIZES)
    plan = minillm.build_plan(loaded)
    cost = plan.estimate()
    head, mlp = cost.part("head").flops, cost.part("mlp").flops
    assert cost.flops_per_label == head + mlp / plan.config.model.layers > head > 0
    assert cost.data()["gathered"] == {"head": 1.0, "mlp": 1 / plan.config.model.layers}
    share = head / cost.flops_per_token
    assert f"head        {share:.0%} of the FLOPs at most: it is computed at" in str(plan)
    without = minillm.build_plan(minillm.load("tiny", plugins="sft", data=chats, settings=SIZES))
    assert without.estimate().flops_per_label == 0
    assert without.estimate().flops_per_token == cost.flops_per_token
    assert "gathered" not in without.estimate().data()
