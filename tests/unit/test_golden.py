"""Tests that planning equals the golden records, except for intended changes."""

from __future__ import annotations

import json

import pytest

from tools.golden import CASES, FOLDER, compared

QUICK = (
    "--preset tiny",
    "--preset tiny --plugins muon,qk_norm train.lr=0.01 train.schedule=wsd",
    "--preset tiny --plugins paired_heads,xsa",
)
"""Cases of the fast tier: the plain model, an optimizer with settings, a conflict."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_a_case_is_as_it_was(case: str) -> None:
    assert compared(case) == {}


def test_every_case_has_a_record_and_every_change_a_reason() -> None:
    records = json.loads((FOLDER / "plans.json").read_text())
    assert set(records["cases"]) == set(CASES)
    assert set(QUICK) <= set(CASES)
    changes = json.loads((FOLDER / "changes.json").read_text())
    assert all(changes["settings"].values())
    assert all(changes["slots"].values())
    assert all(changes["layouts"].values())
    assert all(one["why"] for one in (*changes["words"], *changes["cases"]))
    assert {one["case"] for one in changes["cases"]} <= set(CASES)
