"""A growing batch size with a growing learning rate (modded-nanogpt, record 46, by varunneal).

    fraction of the run 0 .. 1/3    .. 2/3    .. 1
    rows                1/3         2/3       1        of train.rows
    learning rate       1           1.52      1.73     times the run's schedule

Early in training, gradients of small and large batches agree, and small batches give more updates
per token; late gradients are noisy, and a large batch averages the noise. The records' batches have
8, 16 and 24 rows, and their rates are 2^0.6 and 3^0.5 of the first: between the square root of the
batch size (Adam, arXiv:2205.10287) and the batch size itself. nanochat left it out as too complex;
here each size is compiled before the first step.

``train.rows`` is the largest batch, which must fit into memory. ``train.lr`` is the learning rate of
the smallest batch. A rate with a schedule of its own (``schedule_free``, ``muon.cooldown``) gets no
factor. ``lengths`` also changes the row length, in place of `seq_schedule`, whose batches keep the number
of tokens constant.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from minillm_core import PlanError, Plugin, option, plateaus

__all__ = ["BatchSchedule", "stage_of"]

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class BatchSchedule(Plugin, api=1):
    """Batches that grow from a third of the rows to all, for a third of the run each; rates grow with them."""

    parts: tuple[Positive, ...] = option(
        (1.0, 2.0, 3.0),
        min_length=2,
        help="relative batch sizes, stage by stage; the largest has train.rows rows",
    )
    rates: tuple[Positive, ...] = option(
        (1.0, 1.52, 1.73),
        min_length=2,
        help="factors on every learning rate that follows the run's schedule, stage by stage",
    )
    lengths: tuple[Share, ...] | None = option(
        None,
        help="row lengths, stage by stage, as fractions of train.seq_len, such as [0.4375, 1, 1]; "
        "none: unchanged",
    )

    @model_validator(mode="after")
    def _one_for_each_stage(self) -> BatchSchedule:
        counts = {len(self.parts), len(self.rates), len(self.lengths or self.parts)}
        if len(counts) > 1:
            raise ValueError("parts, rates and lengths have one number for each stage")
        return self

    def build_data(self, data):
        shares = self.lengths or [1.0] * len(self.parts)
        shapes = [
            (max(1, round(data.rows * part / max(self.parts))), max(1, round(data.seq_len * share)))
            for part, share in zip(self.parts, shares, strict=True)
        ]
        if len(set(shapes)) == 1:
            raise PlanError(
                f"batch_schedule: batches of {list(self.parts)} parts all have {shapes[0][0]} rows",
                where=f"train.rows={data.rows}",
                fix=f"{self._differing()}, or leave it out",
            )
        data.shapes(stage_of, shapes, stages=len(shapes))

    def _differing(self) -> str:
        """Format the setting with which the number of rows changes."""
        least, most = min(self.parts), max(self.parts)
        if least == most:
            return "batch_schedule.parts that differ"
        rounded_apart = int(0.5 * most / (most - least)) + 1
        return f"train.rows={max(round(most / least), rounded_apart)} or more"

    def optimizer_factory(self, optimizer):
        knots = [(index / len(self.rates), rate) for index, rate in enumerate(self.rates)]
        if len(set(self.rates)) > 1:
            optimizer.rates(plateaus(*knots))
        elif self.rates[0] != 1:
            raise PlanError(
                f"batch_schedule.rates={list(self.rates)} are all equal",
                where="batch_schedule.rates",
                fix=f"multiply train.lr by {self.rates[0]:g} instead, or give different rates",
            )


def stage_of(step: int, steps: int, seed: int, *, stages: int) -> int:
    """Return which of ``stages`` equal stages a step, counted from 1, is in, as ``plateaus`` divides them."""
    return (step * stages - 1) // steps
