"""What to set where the device's memory did not suffice, or numbers stopped being any."""

from __future__ import annotations

from collections.abc import Sequence

from minillm_core.config.schema import TrainConfig
from minillm_core.errors import OutOfMemory

__all__ = ["not_finite", "out_of_memory"]

CLIP = 1.0
"""A bound of the gradients' norm that is worth a try where there is none, or a larger one."""


def not_finite(train: TrainConfig, plugins: Sequence[str]) -> str:
    """What to try; ``--resume`` takes no other settings, so that it is for a new run.

    Args:
        train: what the run was told.
        plugins: in whose code it may have happened.
    """
    plugin = "plugin" if len(plugins) == 1 else "plugins"
    without = [f"try without {plugin} {', '.join(plugins)}"] if plugins else []
    clip = [] if 0 < train.clip <= CLIP else [f"set train.clip={CLIP}"]
    ways = [*without, "lower train.lr", "lengthen train.warmup", *clip]
    return f"in a new run: {', '.join(ways[:-1])}, or {ways[-1]}"


def out_of_memory(
    error: BaseException, train: TrainConfig, peak_bytes: int | None, step: int
) -> OutOfMemory:
    """The error that a person reads: the peak, and rows and accumulate for the same tokens a step."""
    peak = "" if peak_bytes is None else f"; the peak was {peak_bytes / 2**30:,.2f} GiB"
    detail = error.what if isinstance(error, OutOfMemory) else str(error)
    return OutOfMemory(
        f"out of memory in step {step}{peak}",
        where=f"rows={train.rows}, accumulate={train.accumulate}, seq_len={train.seq_len}"
        + (f": {detail.splitlines()[0][:200]}" if detail else ""),
        fix=_fix(train),
    )


def _fix(train: TrainConfig) -> str:
    divisors = [n for n in range(1, train.rows) if train.rows % n == 0]
    if divisors:
        rows = divisors[-1]
        accumulate = train.accumulate * train.rows // rows
        return (
            f"train.rows={rows} train.accumulate={accumulate}: "
            "the same tokens a step, and the same result"
        )
    if not train.checkpointing:
        return "train.checkpointing=true, then a smaller train.seq_len or model"
    return "a smaller train.seq_len or model"
