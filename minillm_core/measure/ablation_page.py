"""An ablation as a page: what each plugin is worth, how the runs went, and what was run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from minillm_core.measure import page
from minillm_core.measure.curves import at_equal_tokens, curves, finished
from minillm_core.measure.effects import effects, verdict
from minillm_core.measure.markup import Markup, joined, tag
from minillm_core.plan.render import amount, sized
from minillm_core.text import counted

__all__ = ["ablation_page"]

Json = Mapping[str, Any]


def ablation_page(result: Json) -> str:
    """The page of an ablation.json, finished or not."""
    names = list(result["plugins"])
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return page.document(
        f"What {_and(shown)} {'is' if len(names) == 1 else 'are'} worth",
        tag("p", _headline(result), class_="lead"),
        _state(result),
        effects(result),
        curves(result),
        _sets(result),
        _failed(result),
        _what_was_run(result),
    )


def _headline(result: Json) -> str:
    """What the intervals at equal tokens say, in words."""
    by: dict[str, list[str]] = {"better": [], "worse": [], "unknown": [], "missing": []}
    for name, one in result["plugins"].items():
        by["missing" if one["effect"] is None else verdict(one)].append(name)
    told = {
        "better": "the loss at equal tokens is lower with",
        "worse": "the loss at equal tokens is higher with",
        "unknown": "no effect on the loss at equal tokens is distinguishable for",
        "missing": "no pair of runs tells of",
    }
    if result.get("finished"):
        told["missing"] = "all pairs of runs failed for"
    line = "; ".join(f"{told[verdict]} {_and(names)}" for verdict, names in by.items() if names)
    return f"{line[:1].upper()}{line[1:]}."


def _state(result: Json) -> Markup:
    what = (
        f"{_design(result)}: {counted(len(result['seeds']), 'pair')} of runs with "
        f"{counted(result['steps'], 'step')} each on {result.get('device', 'a device of no name')}. "
        "Both runs of a pair have the same seed, the same text in the same order, and are held to "
        "the same text that was kept back."
    )
    made = tag("p", what, class_="soft")
    if result.get("finished"):
        return made
    told = f"Not finished: what {counted(len(result['runs']), 'run')} tell so far."
    return joined(made, tag("p", told, class_="warn"))


def _design(result: Json) -> str:
    told = {
        "one at a time": "Each plugin alone against none of them",
        "leave one out": "All plugins against all but one",
        "side by side": "Each plugin in its company against that company alone",
    }
    return told[result["design"]]


def _sets(result: Json) -> Markup:
    head = ["set", ">parameters", ">loss, equal tokens", ">loss, other lengths"]
    rows = [_set_cells(result, name, one) for name, one in result["variants"].items()]
    how = "Means over seeds, with the lowest and the highest; speed is the median, memory the peak."
    return page.section(
        "Sets of plugins",
        tag("p", how, class_="soft"),
        page.table([*head, ">tokens/s", ">peak memory", ">runs", "plugins"], rows),
    )


def _set_cells(result: Json, name: str, one: Json) -> Iterator[object]:
    equal = [run for run in at_equal_tokens(result) if run["variant"] == name]
    runs = [run for run in finished(result) if run["variant"] == name]
    speeds = [run["tokens_per_second"] for run in equal]
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    yield name
    yield f"{one['parameters']:,}"
    yield _losses(equal) or ("none" if result.get("finished") else "none yet")
    yield _other_lengths(runs, result["steps"])
    yield f"{median(speeds):,.0f}" if speeds else ""
    yield sized(max(peaks)) if peaks else "unknown"
    failed = sum(run["variant"] == name and "error" in run for run in result["runs"])
    yield joined(
        f"{len(runs)}", tag("small", f"{failed} failed", class_="worse") if failed else None
    )
    yield ", ".join(one["plugins"]) or "none"


def _other_lengths(runs: Sequence[Json], steps: int) -> Markup | str:
    """What a set's loss is where it was trained for as long as another took."""
    lengths = sorted({run["steps"] for run in runs} - {steps})
    told = [
        joined(
            _losses([run for run in runs if run["steps"] == length]),
            tag("small", counted(length, "step")),
        )
        for length in lengths
    ]
    return joined(*told) if told else ""


def _losses(runs: Sequence[Json]) -> Markup | str:
    losses = [run["curve"][-1]["val_loss"] for run in runs]
    if not losses:
        return ""
    spread = tag("small", f"{min(losses):.4f} to {max(losses):.4f}") if len(losses) > 1 else None
    return joined(f"{fmean(losses):.4f}", spread)


def _failed(result: Json) -> Markup | None:
    rows = [
        (f"{run['variant']}, seed {run['seed']}, {counted(run['steps'], 'step')}", run["error"])
        for run in result["runs"]
        if "error" in run
    ]
    rows += [(name, f"not judged: {why}") for name, why in result["not_judged"].items()]
    return (
        page.section("What is missing", page.table(["run or plugin", "why"], rows))
        if rows
        else None
    )


def _what_was_run(result: Json) -> Markup:
    train, model = result.get("train") or {}, result.get("model") or {}
    data, tokens = result.get("data"), [r["tokens"] for r in finished(result)]
    told = data.get("description") if isinstance(data, Mapping) else data
    shape = {
        key: model.get(key) for key in ("layers", "dim", "heads", "kv_heads", "hidden", "vocab")
    }
    options = [
        tag("div", f"{name}: {page.pairs(table) or 'no options'}")
        for name, table in sorted(
            {n: t for one in result["variants"].values() for n, t in one["options"].items()}.items()
        )
    ]
    return page.section(
        "What was run",
        page.facts(
            {
                "design": result["design"],
                "seeds": ", ".join(map(str, result["seeds"])),
                "length": counted(result["steps"], "step")
                + (f", {amount(max(tokens))} tokens at most" if tokens else ""),
                "preset": result.get("preset"),
                "model": page.pairs(shape),
                "training": page.pairs(train),
                "plugins": joined(*options) if options else "",
                "data": told,
                "held out": f"{result['eval_tokens']:,} tokens" if "eval_tokens" in result else "",
                "backend": _listed(
                    result.get("backend"), result.get("device"), result.get("dtype")
                ),
                "hardware": page.pairs(result.get("hardware") or {}),
                "versions": page.pairs(result.get("versions") or {}),
                "commit": result.get("commit"),
                "date": result.get("date"),
            }
        ),
    )


def _listed(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
