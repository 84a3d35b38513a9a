"""Step times of each technique, measured by ``minillm ablate``, beside its arithmetic.

    python -m benchmarks.step_costs runs/a/ablation.json runs/b/ablation.json
    python -m benchmarks.step_costs runs/a/ablation.json --commit 0123abcd --out /tmp
    python -m benchmarks.step_costs benchmarks/results/cards/*.json --untimed liger,moe

Writes results/step_costs.json, from results of ``minillm ablate`` or of ``benchmarks.cards``; of one that has not
ended, techniques with all their pairs are taken. A technique's step time is compared with that of the same run without
it, pair by pair, as in its card; FLOPs and bytes are counted from the two plans
(benchmarks/arithmetic.py). *Predicted* is the time of a device that reaches its datasheet's
FLOP/s and bandwidth without overlap: (FLOPs / peak + bytes / bandwidth), with it over without.
``python -m benchmarks.costs_page --write`` generates docs/costs.md from it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arithmetic import Arithmetic, arithmetic
from benchmarks.command import parser
from benchmarks.environment import RESULTS, write
from minillm_core.backends.torch.backend import PEAK_FLOPS
from minillm_core.config.load import load as load_settings
from minillm_core.config.schema import Config
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import load as load_plugins
from minillm_lab.ablation_page import at_equal_tokens

__all__ = ["BANDWIDTH", "collected", "planned", "predicted"]

Json = Mapping[str, Any]

BANDWIDTH: Mapping[str, float] = {
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "H200": 4.8e12,
    "A100": 2.0e12,
}
"""Part of a device's name -> its memory's bytes/s, by the maker's datasheet; FLOP/s are PEAK_FLOPS."""

KEPT = ("date", "commit", "device", "dtype", "backend", "hardware", "versions", "preset", "steps")


def collected(
    results: Sequence[Json], commit: str | None = None, untimed: Collection[str] = ()
) -> dict[str, Any]:
    """Return the figures of step_costs.json.

    Args:
        results: documents of ablation.json, oldest first: of a technique that several measured in the same
            company, the last one counts.
        commit: for documents without one.
        untimed: techniques whose runs were disturbed by other work on the device.

    Raises:
        SystemExit: a plan differs from the measured one.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    replaced: list[dict[str, Any]] = []
    for index, result in enumerate(results):
        counted: dict[str, Arithmetic] = {}  # one baseline belongs to many techniques
        for name, found in result["plugins"].items():
            if name in untimed:
                left_out[name] = "other work ran beside its runs"
            elif why := _unusable(found, result):
                left_out[name] = why
            else:
                for variant in {found["with"], found["without"]} - counted.keys():
                    counted[variant] = arithmetic(planned(result, variant), result["dtype"])
                row = {**_row(name, found, result, counted), "measured": index}
                if earlier := rows.get(key := (name, *row["company"])):
                    replaced.append({"technique": name, "measured": earlier["measured"]})
                rows[key] = row
        left_out |= result["not_judged"]
    measured = {row["technique"] for row in rows.values()}
    return {
        "techniques": sorted(
            rows.values(), key=lambda row: (-row["step_time"]["ratio"], row["technique"])
        ),
        "left_out": {name: why for name, why in left_out.items() if name not in measured},
        "replaced": replaced,
        "measured": [
            {key: result[key] for key in KEPT}
            | {"commit": result["commit"] or commit, "seeds": len(result["seeds"])}
            | {"model": result["model"]}
            | {key: result["train"][key] for key in ("rows", "accumulate", "seq_len")}
            for result in results
        ],
    }


def planned(result: Json, variant: str) -> Plan:
    """Return the plan of one of an ablation's plugin sets.

    Raises:
        SystemExit: the installed versions build another model.
    """
    of = result["variants"][variant]
    base = load_settings(
        preset=result["preset"], default_preset=lambda: (result["preset"], "ablation.json")
    ).config
    config = Config.model_validate(
        base.model_dump()
        | {"model": result["model"], "train": result["train"], "plugins": of["options"]}
    )
    plan = build_plan(config, load_plugins(of["plugins"], of["options"]))
    if plan.num_parameters != of["parameters"]:
        raise SystemExit(
            f"{variant} has {plan.num_parameters:,} parameters as it is planned here, and had "
            f"{of['parameters']:,} where it was measured: count with the same commit"
        )
    return plan


def predicted(counted: Arithmetic, device: str) -> tuple[float, float] | None:
    """Return seconds of a step at the datasheet's rates, fused and unfused; None: unknown device."""
    part = next((part for part in BANDWIDTH if part in device), None)
    if part is None:
        return None
    products, bandwidth = counted.all_flops / PEAK_FLOPS[part], BANDWIDTH[part]
    return products + counted.least_bytes / bandwidth, products + counted.apart_bytes / bandwidth


def _row(name: str, found: Json, result: Json, counted: Mapping[str, Arithmetic]) -> dict[str, Any]:
    having, without = (counted[found[side]] for side in ("with", "without"))
    at = [predicted(one, result["device"]) for one in (having, without)]
    ratios = None
    if at[0] and at[1]:
        ratios = {"fused": at[0][0] / at[1][0], "apart": at[0][1] / at[1][1]}
    speed = found["speed"]
    return {
        "technique": name,
        "options": result["variants"][found["with"]]["options"][name],
        "company": result["variants"][found["without"]]["plugins"],
        "step_time": {
            "ratio": 1 / speed["effect"],
            "low": 1 / speed["high"],
            "high": 1 / speed["low"],
            "pairs": found["pairs"],
        },
        "flops_ratio": having.all_flops / without.all_flops,
        "bytes_ratio": {
            "fused": having.least_bytes / without.least_bytes,
            "apart": having.apart_bytes / without.apart_bytes,
        },
        "predicted_ratio": ratios,
        "with": _side(having, at[0], result, found["with"]),
        "without": _side(without, at[1], result, found["without"]),
    }


def _side(
    counted: Arithmetic, at: tuple[float, float] | None, result: Json, variant: str
) -> dict[str, Any]:
    runs = [run for run in at_equal_tokens(result) if run["variant"] == variant]
    return {
        "step_seconds": median(run["seconds"] / run["steps"] for run in runs),
        "predicted_seconds": {"fused": at[0], "apart": at[1]} if at else None,
        **counted.data(),
    }


def _unusable(found: Json, result: Json) -> str | None:
    if found["effect"] is None:
        return "no pair of its runs came to their end"
    if not result["finished"] and found["pairs"] < len(result["seeds"]):
        return f"it has {found['pairs']} of {len(result['seeds'])} pairs"
    if found["speed"]["low"] is None:
        return "one pair has no interval"
    sides = (found["with"], found["without"])
    tokens = {run["tokens"] for run in at_equal_tokens(result) if run["variant"] in sides}
    if max(tokens) - min(tokens) > max(tokens) / result["steps"]:  # more than whole steps round
        return "its runs had other numbers of tokens"
    return None


def main() -> None:
    options = parser(__doc__)
    options.add_argument("results", type=Path, nargs="+", help="ablation.json of minillm ablate")
    options.add_argument("--commit", help="what was measured, where ablation.json does not know")
    options.add_argument("--untimed", default="", help="techniques whose times are left out")
    options.add_argument("--out", type=Path, default=RESULTS, help="where step_costs.json goes")
    given = options.parse_args()
    documents = [json.loads(path.read_text()) for path in given.results]
    ablations = [one.get("figures", one) for one in documents]
    figures = collected(ablations, given.commit, given.untimed.split(","))
    for row in figures["techniques"]:
        time = row["step_time"]
        print(
            f"{row['technique']:16} step x {time['ratio']:.3f} ({time['low']:.3f} to "
            f"{time['high']:.3f}), FLOPs x {row['flops_ratio']:.3f}, bytes x "
            f"{row['bytes_ratio']['fused']:.3f} fused, {row['bytes_ratio']['apart']:.3f} apart"
        )
    for name, why in figures["left_out"].items():
        print(f"{name:16} {why}")
    for one in figures["replaced"]:
        older = figures["measured"][one["measured"]]
        print(f"{one['technique']:16} measured again: its figure of {older['date']} is left out")
    print(f"wrote {write('step_costs', figures, folder=given.out)}")


if __name__ == "__main__":
    main()
