"""Held-out loss of trained weights and of their averages, at a constant learning rate, on a CPU.

    python -m benchmarks.averages [--steps 400] [--seeds 2] [--lr 0.01] [--data PATH] [--set key=value ...]

Each arm is a run on the same text in the same order: AdamW at a constant rate, evaluated without averaging, with
``ema`` and with ``swa`` (equal training in eager mode); AdamW with a decaying rate; ``schedule_free``, evaluated
at x, as intended, and at y, its trained weights. Losses are in nats per token.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from minillm_core import Plan, build_plan, load
from minillm_lab import study as studies
from minillm_optim.schedule_free import ScheduleFree

SMALL = {
    **{"model.layers": 2, "model.dim": 128, "model.heads": 4, "model.kv_heads": 4},
    **{"model.hidden": 256, "model.vocab": 2048, "train.rows": 8, "train.seq_len": 128},
    **{"train.compile": "off", "train.dtype": "float32", "eval.tokens": 32768},
}
CONSTANT, FALLING = {"train.schedule": "constant"}, {"train.schedule": "wsd", "train.cooldown": 0.4}
CURVE = 4
"""Number of evaluations per run."""


class AtY(ScheduleFree, api=1):
    """Schedule-free AdamW, evaluated at the weights that are trained."""

    def optimizer_factory(self, optimizer):
        """Add the rule without its views."""
        super().optimizer_factory(_Unviewed(optimizer))


class _Unviewed:
    """An optimizer's builder without views."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def view(self, *_: Any, **__: Any) -> int:
        """Claim nothing."""
        return 0


ARMS = {
    "AdamW, constant rate": ("", CONSTANT),
    "... by ema": ("ema", CONSTANT | {"ema.decay": 0.98}),
    "... by swa": ("swa", CONSTANT | {"swa.last": 0.4}),
    "AdamW, rate down over the last 40 %": ("", FALLING),
    "schedule_free, at x": ("schedule_free", CONSTANT),
    "schedule_free, at y": (f"{__file__}:AtY", CONSTANT),
}
"""Arm -> its plugins and settings."""


def plans(args: argparse.Namespace) -> Iterator[tuple[str, Plan]]:
    """Plan every arm."""
    typed = dict(one.split("=", 1) for one in args.set)
    rate = {"train.lr": args.lr, "train.steps": args.steps}
    for name, (plugins, settings) in ARMS.items():
        free = {"averages.lr" if "AtY" in plugins else "schedule_free.lr": args.lr}
        own = free if "schedule_free" in name else {}
        given = SMALL | rate | settings | own | typed
        data = {} if args.data is None else {"data": args.data}
        yield name, build_plan(load(preset="tiny", plugins=plugins, settings=given, **data))


def main() -> None:
    """Train every arm, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--data")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    made = dict(plans(args))
    study = studies.Study(studies.open_corpus(next(iter(made.values())).config))
    shares = [f"{(i + 1) / CURVE:.0%}" for i in range(CURVE)]
    print(f"| evaluated | {' | '.join(f'at {share}' for share in shares)} |")
    print(f"| --- |{' ---: |' * CURVE}")
    for name, plan in made.items():
        runs = [study.train(plan, seed, evaluations=CURVE) for seed in range(args.seeds)]
        points = zip(*([point.val_loss for point in run.curve] for run in runs), strict=True)
        cells = [" / ".join(f"{loss:.3f}" for loss in seeds) for seeds in points]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
