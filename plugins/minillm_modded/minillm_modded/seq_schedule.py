"""Short rows first, then long ones, of as many tokens a step (modded-nanogpt, record 72).

    share of the run    0 .. 1/3                    .. 1
    tokens of a row     896 of 2,048 (0.4375)       2,048
    rows                2.29 times as many          train.rows

What is learnt first is near: attention over few tokens costs less and loses little. The record
bounds documents in one stream of tokens by these lengths; here the rows themselves are as long. Their
number is rounded to whole rows, so that a step has about as many tokens throughout. A packer has to be
one that lays out rows of any length (`eos_align`, which cuts documents at a row's end as the
record does).

Evaluation, samples and exports have ``train.seq_len``. ``batch_schedule.lengths`` does it where batches
grow as well.
"""

from __future__ import annotations

from minillm_core import PlanError, Plugin, option

__all__ = ["SeqSchedule", "is_long"]


class SeqSchedule(Plugin, api=1):
    """Rows are short for a third of the run, and there are more of them; then train.seq_len long."""

    start: float = option(
        0.4375,
        gt=0,
        lt=1,
        search=(0.25, 0.4375),
        help="of train.seq_len, the length of rows at first",
    )
    until: float = option(
        1 / 3, gt=0, lt=1, search=(1 / 6, 1 / 3, 0.5), help="share of the run that has short rows"
    )

    def build_data(self, data):
        short = round(data.seq_len * self.start)
        if not 1 <= short < data.seq_len:
            raise PlanError(
                f"seq_schedule.start={self.start} of {data.seq_len} tokens is {short}",
                where=f"train.seq_len={data.seq_len}",
                fix="longer rows (train.seq_len), or leave seq_schedule out",
            )
        rows = max(1, round(data.rows * data.seq_len / short))
        shapes = [(rows, short), (data.rows, data.seq_len)]
        data.shapes(is_long, shapes, until=self.until)


def is_long(step: int, steps: int, seed: int, *, until: float) -> int:
    """Return 1 for a step, from 1, that is past the share of the run, else 0."""
    return int(step / steps > until)
