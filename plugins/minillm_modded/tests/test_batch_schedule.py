"""Tests of the batch schedule: rows and learning rate of each step, and that both change together."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import plateaus
from minillm_core.errors import PlanError
from minillm_core.optim.schedules import TrainSchedule
from minillm_modded.batch_schedule import BatchSchedule, stage_of
from minillm_modded.seq_schedule import SeqSchedule


@given(steps=st.integers(1, 3000), stages=st.integers(2, 7), data=st.data())
def test_a_step_s_stage_is_that_of_its_rate(steps: int, stages: int, data: Any) -> None:
    step = data.draw(st.integers(1, steps))
    exact = sum(Fraction(step, steps) > Fraction(k, stages) for k in range(1, stages))
    assert stage_of(step, steps, 0, stages=stages) == exact
    rates = plateaus(*((index / stages, index) for index in range(stages)))
    assert rates.at(step / steps, TrainSchedule("constant", 0.0)) == exact


def test_rows_and_rates_grow_by_thirds(lab: Any) -> None:
    plan = lab.plan(BatchSchedule(), train={"rows": 24, "steps": 30, "schedule": "constant"})
    rows = [plan.shape_at(step).rows for step in range(1, 31)]
    assert rows == [8] * 10 + [16] * 10 + [24] * 10
    warmup, peak = plan.config.train.warmup, plan.config.train.lr
    rates = [plan.values(step / 30)["train.lr"] / peak for step in range(1, 31)]
    expected = [min(1, step / 30 / warmup) for step in range(1, 11)] + [1.52] * 10 + [1.73] * 10
    assert rates == pytest.approx(expected)
    assert plan.tokens_per_step == pytest.approx(16 * plan.config.train.seq_len)
    plain = lab.plan(train={"rows": 24, "steps": 30})
    assert "rates" not in plain.data()["schedules"]["run"]
    assert "rates" in plan.data()["schedules"]["run"]


def test_lengths_change_with_the_rows(lab: Any) -> None:
    schedule = BatchSchedule(parts=(1, 2), rates=(1, 1.4), lengths=(0.5, 1))
    plan = lab.plan(schedule, seq_len=32, train={"rows": 4, "steps": 10})
    shapes = [(plan.shape_at(step).rows, plan.shape_at(step).seq_len) for step in (1, 5, 6, 10)]
    assert shapes == [(2, 16), (2, 16), (4, 32), (4, 32)]


def test_rates_follow_another_rule_too(lab: Any) -> None:
    pytest.importorskip("minillm_muon")
    from minillm_muon.muon import Muon

    plan = lab.plan(BatchSchedule(), Muon(), train={"rows": 6, "steps": 30})
    plain = lab.plan(Muon(), train={"rows": 6, "steps": 30})
    for step, factor in ((10, 1), (20, 1.52), (30, 1.73)):
        ours, theirs = plan.values(step / 30), plain.values(step / 30)
        assert ours["muon.lr"] == pytest.approx(factor * theirs["muon.lr"])


@pytest.mark.parametrize(
    ("plugins", "train", "said"),
    [
        ((BatchSchedule(),), {"rows": 1}, r"all have 1 rows[\s\S]*train\.rows=3 or more"),
        (
            (BatchSchedule(parts=(3, 4), rates=(1, 2)),),
            {"rows": 2},
            r"all have 2 rows[\s\S]*train\.rows=3 or more",
        ),
        (
            (BatchSchedule(parts=(1, 1), rates=(1, 2)),),
            {"rows": 8},
            r"all have 8 rows[\s\S]*batch_schedule\.parts that differ",
        ),
        (
            (BatchSchedule(rates=(2, 2, 2)),),
            {"rows": 6},
            r"are all equal[\s\S]*multiply train\.lr by 2 instead",
        ),
        ((BatchSchedule(), SeqSchedule()), {"rows": 6}, "claimed by both"),
    ],
)
def test_what_changes_nothing_or_is_meant_twice_is_refused(
    lab: Any, plugins: tuple[Any, ...], train: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        lab.plan(*plugins, train=train)


def test_stages_have_as_many_rates_as_parts() -> None:
    with pytest.raises(ValueError, match="one number for each stage"):
        BatchSchedule(parts=(1, 2))
