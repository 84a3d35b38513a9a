"""What each technique's step costs, measured by ``minillm ablate``, beside its arithmetic.

    python -m benchmarks.step_costs runs/a/ablation.json runs/b/ablation.json
    python -m benchmarks.step_costs runs/a/ablation.json --commit 0123abcd --out /tmp

Writes results/step_costs.json. A technique's step time is compared with that of the same run without
it, pair by pair, as its card is; FLOPs and bytes are counted from the two plans
(benchmarks/arithmetic.py). *Predicted* is what a device would take that reaches its datasheet in
products and in memory, one after the other: (FLOPs / peak + bytes / bandwidth), with it over without.
``python -m benchmarks.costs_page --write`` makes docs/costs.md of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arithmetic import Arithmetic, arithmetic
from benchmarks.environment import RESULTS, write
from minillm_core.config.load import load as load_settings
from minillm_core.config.schema import Config
from minillm_core.measure.curves import at_equal_tokens
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import load as load_plugins

__all__ = ["DEVICES", "collected", "planned", "predicted"]

Json = Mapping[str, Any]

DEVICES: Mapping[str, tuple[float, float]] = {
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989.4e12, 3.35e12),
    "H200": (989.4e12, 4.8e12),
    "A100": (312e12, 2.0e12),
}
"""Part of a device's name -> dense bfloat16 FLOP/s and bytes/s, by its maker's datasheet."""

KEPT = ("date", "commit", "device", "dtype", "backend", "hardware", "versions", "preset", "steps")


def collected(results: Sequence[Json], commit: str | None = None) -> dict[str, Any]:
    """The figures of step_costs.json.

    Args:
        results: documents of ablation.json.
        commit: of those that do not know theirs.

    Raises:
        SystemExit: one is not finished, two measured the same, or a plan is not the measured one.
    """
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for index, result in enumerate(results):
        if not result["finished"]:
            raise SystemExit(f"the ablation of {', '.join(result['plugins'])} is not finished")
        for name, found in result["plugins"].items():
            if why := _unusable(found):
                left_out[name] = why
            else:
                rows.append({**_row(name, found, result), "measured": index})
        left_out |= result["not_judged"]
    _refuse_twice(rows)
    rows.sort(key=lambda row: (-row["step_time"]["ratio"], row["technique"]))
    return {
        "techniques": rows,
        "left_out": left_out,
        "measured": [
            {key: result[key] for key in KEPT}
            | {"commit": result["commit"] or commit, "seeds": len(result["seeds"])}
            | {"model": result["model"]}
            | {key: result["train"][key] for key in ("rows", "accumulate", "seq_len")}
            for result in results
        ],
    }


def planned(result: Json, variant: str) -> Plan:
    """The plan of one of an ablation's sets of plugins.

    Raises:
        SystemExit: what is installed here makes another model of it.
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
    """Seconds of a step at the datasheet's rates, fused and unfused; None: no such device here."""
    for part, (flops, bandwidth) in DEVICES.items():
        if part in device:
            return (
                counted.all_flops / flops + counted.least_bytes / bandwidth,
                counted.all_flops / flops + counted.apart_bytes / bandwidth,
            )
    return None


def _row(name: str, found: Json, result: Json) -> dict[str, Any]:
    sides = {side: _side(result, found[side]) for side in ("with", "without")}
    having, without = sides["with"], sides["without"]
    speed = found["speed"]
    both = [predicted(side["counted"], result["device"]) for side in (having, without)]
    ratios = None
    if both[0] and both[1]:
        ratios = dict(zip(("fused", "apart"), map(_ratio, both[0], both[1]), strict=True))
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
        "flops_ratio": _ratio(having["counted"].all_flops, without["counted"].all_flops),
        "bytes_ratio": {
            "fused": _ratio(having["counted"].least_bytes, without["counted"].least_bytes),
            "apart": _ratio(having["counted"].apart_bytes, without["counted"].apart_bytes),
        },
        "predicted_ratio": ratios,
        **{
            side: {"step_seconds": one["seconds"], **one["counted"].data()}
            | ({"predicted_seconds": list(at)} if at else {})
            for (side, one), at in zip(sides.items(), both, strict=True)
        },
    }


def _side(result: Json, variant: str) -> dict[str, Any]:
    runs = [run for run in at_equal_tokens(result) if run["variant"] == variant]
    return {
        "seconds": median(run["seconds"] / run["steps"] for run in runs),
        "counted": _counted(json.dumps(result, sort_keys=True), variant),
    }


@cache
def _counted(result: str, variant: str) -> Arithmetic:
    """Once for a baseline that many techniques share."""
    document = json.loads(result)
    return arithmetic(planned(document, variant), document["dtype"])


def _unusable(found: Json) -> str | None:
    if found["effect"] is None:
        return "no pair of its runs came to their end"
    if found["speed"]["low"] is None:
        return "one pair has no interval"
    return None


def _refuse_twice(rows: Iterable[Json]) -> None:
    seen: set[tuple[str, ...]] = set()
    for row in rows:
        key = (row["technique"], *row["company"])
        if key in seen:
            raise SystemExit(f"{row['technique']} is measured twice in the same company")
        seen.add(key)


def _ratio(one: float, other: float) -> float:
    return one / other


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("results", type=Path, nargs="+", help="ablation.json of minillm ablate")
    parser.add_argument("--commit", help="what was measured, where ablation.json does not know")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where step_costs.json goes")
    given = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in given.results]
    figures = collected(documents, given.commit)
    for row in figures["techniques"]:
        time = row["step_time"]
        print(
            f"{row['technique']:16} step x {time['ratio']:.3f} ({time['low']:.3f} to "
            f"{time['high']:.3f}), FLOPs x {row['flops_ratio']:.3f}, bytes x "
            f"{row['bytes_ratio']['fused']:.3f} to {row['bytes_ratio']['apart']:.3f}"
        )
    for name, why in figures["left_out"].items():
        print(f"{name:16} {why}")
    print(f"wrote {write('step_costs', figures, folder=given.out)}")


if __name__ == "__main__":
    main()
