"""``minillm-sweep``: trains the same model once for each learning rate and names the best one.

Only the public Python API is used: ``load``, ``build_plan``, ``Run`` and the events of a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import minillm_core as minillm

__all__ = ["held_out_loss", "main"]


def held_out_loss(rate: float, settings: dict[str, Any], **source: Any) -> float:
    """Train in memory and return the last held-out loss, in nats per token.

    Args:
        rate: the peak learning rate of AdamW.
        settings: key -> value, as for :func:`minillm_core.load`.
        source: ``preset``, ``plugins`` and ``data`` of :func:`minillm_core.load`.

    Raises:
        minillm_core.MinillmError: a setting is refused, or training failed.
    """
    config = minillm.load(settings={**settings, "train.lr": rate}, **source)
    loss = float("nan")
    for event in minillm.Run(minillm.build_plan(config)).steps():
        if isinstance(event, minillm.Evaluated):
            loss = event.val_loss
    return loss


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep the learning rate; returns the exit code."""
    parser = argparse.ArgumentParser(prog="minillm-sweep", description=__doc__)
    parser.add_argument("rates", nargs="+", type=float, metavar="LR", help="learning rates")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--plugins", metavar="A,B")
    parser.add_argument("--data", action="append", metavar="PATH")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)
    source = {"preset": options.preset, "plugins": options.plugins, "data": options.data}
    losses: dict[float, float] = {}
    try:
        for rate in options.rates:
            losses[rate] = held_out_loss(rate, {"train.steps": options.steps}, **source)
            print(f"lr {rate:g}: held-out loss {losses[rate]:.4f}", flush=True)
    except minillm.NonFinite as error:
        print(f"lr {rate:g}: {error.what}", file=sys.stderr)
    except minillm.MinillmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"best: lr {min(losses, key=losses.__getitem__):g}")
    return 0
