"""Tests of prefix tokens against an exhaustive search, of the loss in NumPy, and of a run on real text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import DataError, Run, Stepped, build_plan, load
from minillm_kit import one_step
from minillm_kit.subject import Subject, spelt
from minillm_modded.prefix_tokens import PrefixTokens, prefixes


@given(st.lists(st.binary(max_size=4).map(lambda b: bytes(x % 3 for x in b)), max_size=30))
def test_the_prefix_is_the_longest_that_is_shorter(pieces: list[bytes]) -> None:
    found = prefixes(tuple(pieces))
    assert found.dtype == np.int32
    for piece, at in zip(pieces, found.tolist(), strict=True):
        begins = [p for p in pieces if p and len(p) < len(piece) and piece.startswith(p)]
        if not begins:
            assert at == -1
            continue
        longest = max(begins, key=len)
        assert at == pieces.index(longest)


def test_bases_of_numbers_begin_those_with_a_digit_more() -> None:
    pieces = spelt(Subject("prefix_tokens").plan())
    assert prefixes(pieces)[3:].tolist() == [index // 3 for index in range(3, len(pieces))]
    assert prefixes(pieces)[:3].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("weight", [0.25, 2.0])
def test_the_objective_adds_the_prefixes(backend: str, weight: float) -> None:
    pytest.importorskip("torch" if backend == "torch" else "mlx.core")
    step = one_step("prefix_tokens", {"weight": weight, "hold": 0.9, "end": 1}, backend=backend)
    labels = step.batch["labels"]
    wanted = np.where(labels >= 3, labels // 3, -1)
    np.testing.assert_array_equal(step.batch["prefix_token"], wanted)
    logits = step.hidden @ step.head.T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, np.maximum(labels, 0)[..., None], -1)[..., 0]
    assert step.loss == pytest.approx(nats[labels >= 0].mean(), rel=1e-5)  # reported: the labels'
    slope = np.zeros_like(logits)  # of CE(label) + weight CE(prefix), with respect to the logits
    for targets, factor in ((labels, 1.0), (wanted, weight)):
        one = np.eye(logits.shape[-1])[np.maximum(targets, 0)]
        slope += factor * (targets >= 0)[..., None] * (np.exp(log_p) - one)
    expected = np.einsum("btv,btc->vc", slope, step.hidden) / (labels >= 0).sum()
    np.testing.assert_allclose(step.gradients["head.weight"], expected, rtol=2e-4, atol=1e-6)


def test_the_weight_stays_falls_and_is_gone(lab: Any) -> None:
    plan = lab.plan(PrefixTokens(), train={"steps": 90})
    (target,) = plan.spec.loss.targets
    weight, there = target.weight.value, target.stage
    found = [
        (plan.values(step / 90)[weight], plan.values(step / 90)[there]) for step in range(1, 91)
    ]
    assert all(one == (0.25, 1) for one in found[:30])
    assert found[44] == (pytest.approx(0.125), 1)
    assert found[59] == (pytest.approx(0), 1)
    assert all(there == 0 for _, there in found[60:])


def test_a_run_predicts_beginnings_of_real_tokens(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = "think thinking thinks thinker thought thoughtful thoughts th the these them there. "
    (tmp_path / "text.txt").write_text(words * 200)
    small = {
        **{"model.vocab": 300, "model.dim": 32, "model.layers": 1, "model.heads": 2},
        **{"model.kv_heads": 2, "model.hidden": 32, "train.rows": 2, "train.seq_len": 16},
        **{"eval.tokens": 200, "eval.samples": 0, "train.steps": 6, "train.compile": "off"},
    }
    config = load("tiny", plugins="prefix_tokens", settings=small, data=tmp_path / "text.txt")
    with Run(build_plan(config), out=tmp_path / "run", cache=tmp_path / "cache") as run:
        steps = [event for event in run.steps() if isinstance(event, Stepped)]
        assert run.tokenizer is not None
        pieces = tuple(run.tokenizer._bytes.get(i, b"") for i in range(300))
    table = prefixes(pieces)
    long = next(i for i, p in enumerate(pieces) if p.endswith(b"think") and len(p) >= 5)
    assert pieces[long].startswith(pieces[table[long]])
    assert [("prefix_token" in step.terms) for step in steps] == [True] * 4 + [False] * 2


def test_a_run_without_a_tokenizer_is_refused_in_words() -> None:
    labels = np.array([[1, 2]], np.int32)
    with pytest.raises(DataError, match="the run has no tokenizer"):
        PrefixTokens().on_batch({"labels": labels}, "train", ())
    found = PrefixTokens().on_batch({"labels": labels}, "eval", ())
    assert found["prefix_token"].tolist() == [[-1, -1]]


def test_the_weight_falls_between_two_shares() -> None:
    with pytest.raises(ValueError, match="hold is less than end"):
        PrefixTokens(hold=0.5, end=0.5)
