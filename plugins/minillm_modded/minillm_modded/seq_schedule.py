"""A sequence-length schedule: short rows first, at constant tokens per step (modded-nanogpt, record 72).

    fraction of the run 0 .. 1/3                    .. 1
    tokens per row      896 of 2,048 (0.4375)       2,048
    rows                2.29 times as many          train.rows

Short-range structure is learned first: attention over few tokens costs less and loses little. The record
limits documents in one stream of tokens to these lengths; here the rows themselves have these lengths.
Their number is rounded to whole rows, so that tokens per step stay about constant. The packer must
support rows of any length (`eos_align`, which cuts documents at a row's end as the
record does).

Evaluation, samples and exports use ``train.seq_len``. Where the batch size grows as well,
``batch_schedule.lengths`` does the same.
"""

from __future__ import annotations

from minillm_core import PlanError, Plugin, option

__all__ = ["SeqSchedule", "is_long"]


class SeqSchedule(Plugin, api=1):
    """Short rows, and more of them, for the first third of the run; then rows of train.seq_len."""

    start: float = option(
        0.4375,
        gt=0,
        lt=1,
        search=(0.25, 0.4375),
        help="initial row length, as a fraction of train.seq_len",
    )
    until: float = option(
        1 / 3, gt=0, lt=1, search=(1 / 6, 1 / 3, 0.5), help="fraction of the run with short rows"
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
    """Return 1 for a step, counted from 1, after that fraction of the run, else 0."""
    return int(step / steps > until)
