"""Tests of the contrastive term against its definition, pair by pair, and of training with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import Run, Stepped, build_plan, load
from minillm_core.ops.form import LossForm
from minillm_data.simctg import Contrast
from minillm_kit import run_module


def contrast(x: np.ndarray, labels: np.ndarray, margin: float) -> float:
    """Compute the mean over supervised positions of the mean hinge with the others of their row."""
    found = []
    for row, supervised in zip(x, labels >= 0, strict=True):
        at = np.flatnonzero(supervised)
        for i in at:
            hinges = [
                max(
                    0.0,
                    margin
                    - 1
                    + row[i] @ row[j] / np.sqrt(row[i] @ row[i] + 1e-12) / np.linalg.norm(row[j]),
                )
                for j in at
                if j != i
            ]
            found.append(np.mean(hinges) if hinges else 0.0)
    return float(np.mean(found)) if found else 0.0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), margin=st.sampled_from([0.2, 0.5, 1.0, 2.0]))
def test_the_term_is_the_mean_over_pairs_of_a_row(seed: int, margin: float) -> None:
    rng = np.random.default_rng(seed)
    B, T, C, V = (*rng.integers(1, 5, 2), 6, 7)
    x, head = rng.standard_normal((B, T, C)), rng.standard_normal((V, C))
    labels = rng.integers(-2, V, (B, T)).astype(np.int32)
    found, _ = run_module(
        Contrast, {"margin": margin}, x=x, head=head, form=LossForm(), labels=labels
    )
    assert float(found) == pytest.approx(contrast(x, labels, margin), rel=1e-5, abs=1e-6)


def test_training_lowers_the_term(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    settings = {
        **{"model.layers": 1, "model.dim": 32, "model.heads": 2, "model.kv_heads": 2},
        **{"model.vocab": 300, "train.rows": 4, "train.seq_len": 32, "train.steps": 30},
        **{"backend": "torch", "device": "cpu", "train.compile": "off", "simctg.margin": 1.0},
        **{"simctg.weight": 20.0, "data.paths": [str(text)], "eval.every": 0, "eval.samples": 0},
    }
    run = Run(build_plan(load(preset="tiny", plugins="simctg", settings=settings)))
    terms = [event.terms["contrast"] for event in run.steps() if isinstance(event, Stepped)]
    assert all(0 <= one <= 1.0 for one in terms)  # no hinge exceeds the margin
    assert terms[-1] < 0.7 * terms[0]
