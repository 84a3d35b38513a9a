"""Tests of the sequence-length schedule: rows are short for a third of the run, tokens per step constant."""

from __future__ import annotations

from typing import Any

import pytest

from minillm_core import Packer, Piece, Plugin
from minillm_core.errors import PlanError
from minillm_modded.seq_schedule import SeqSchedule


class Fixed(Plugin, api=1):
    """A packer with rows of one fixed length."""

    def build_data(self, data):
        data.packer(Rows)


class Rows(Packer):
    """A packer with one document per row."""

    def row(self, take: Any) -> list[Piece]:
        return [take().part(0, self.capacity)]


def test_rows_are_short_first_and_a_step_has_as_many_tokens(lab: Any) -> None:
    plan = lab.plan(SeqSchedule(), seq_len=2048, train={"rows": 8, "steps": 9})
    shapes = [plan.shape_at(step) for step in range(1, 10)]
    assert [one.seq_len for one in shapes] == [896] * 3 + [2048] * 6
    assert [one.rows for one in shapes] == [18] * 3 + [8] * 6
    assert shapes[0].tokens == pytest.approx(shapes[-1].tokens, rel=0.5 / 18)
    assert plan.values(1.0).keys() == {"train.lr"}


def test_it_asks_for_rows_that_can_be_shorter(lab: Any) -> None:
    with pytest.raises(PlanError, match="of 1 tokens is 0"):
        lab.plan(SeqSchedule(), seq_len=1)
    with pytest.raises(PlanError, match="lays out rows of one length"):
        lab.plan(SeqSchedule(), Fixed(), seq_len=32)
