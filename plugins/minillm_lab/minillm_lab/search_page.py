"""The page of a search, in HTML and Markdown: the recipe's lineage, and the other candidates' outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from minillm_core.commands import counted, duration
from minillm_lab import page
from minillm_lab.card import interval, signed
from minillm_lab.figure import Axis, Interval, Line, Size, interval_chart, line_chart
from minillm_lab.markup import Markup, joined, tag
from minillm_lab.worth import times

Json = Mapping[str, Any]
Row = Sequence[str]

RESULT, PAGE = "search.json", "search.html"

RESTORED = f"restore {RESULT} from a copy, or begin another search: --out with another folder"
"""The fix for a damaged result of a search, which holds what its runs do not."""

GAIN = Axis("nats a token, with minus without (← better)")
TRENDS = 7
"""Maximum number of candidates in the plot over rungs."""


def search_page(result: Json) -> str:
    """Render the page of a search.json, finished or not."""
    return page.document(
        _title(result),
        tag("p", headline(result), class_="lead"),
        _state(result),
        _lineage(result),
        _last(result),
        _trends(result),
        *(_section(heading, words, head, rows) for heading, words, head, rows in _tables(result)),
        page.section("What was run", page.facts(dict(_facts(result)))),
    )


def markdown(result: Json) -> str:
    """Render the page as Markdown, without figures."""
    lines = [f"# {_title(result)}", "", headline(result), ""]
    lines += [*_md("Lineage", _LINEAGE_WORDS, _LINEAGE_HEAD, [*_lineage_rows(result)])]
    if result["last"]:
        lines += _md("The last comparison", _last_words(result), _PART_HEAD, _part_rows(result))
    for heading, words, head, rows in _tables(result):
        lines += _md(heading, words, head, rows)
    lines += ["## What was run", ""]
    lines += [f"- {name}: {value}" for name, value in _facts(result) if value]
    return "\n".join(lines) + "\n"


def headline(result: Json) -> str:
    """Summarise the result in one to three sentences."""
    reached = reached_words(result)
    return _found(result) + (f" {_cap(reached)}." if reached else "")


def reached_words(result: Json) -> str:
    """Format the target loss of a search with --target, and when it was reached; empty without one."""
    if (target := _target(result)) is None:
        return ""
    aim = f"a held-out loss of {target:g}"
    if reached := result.get("target"):
        return f"{aim} is reached in {_seconds(reached['seconds'])} s of training"
    if result["finished"]:
        return f"{aim} is not reached by the recipe in {result['length']['words']} of training"
    return f"the target is {aim}"


def _found(result: Json) -> str:
    tried = {
        one["name"]
        for some in result["rounds"]
        for one in some["candidates"]
        if one["rungs"] and not one["parts"]
    }
    counts = (
        f"{counted(len(tried), 'change')} tried, {len(result['steps'])} accepted, "
        f"{len(result['refused'])} refused by planning"
    )
    if not result["last"]:
        if result["finished"]:
            return f"Nothing that was tried is distinguishable from the settings as they were: {counts}."
        return f"Not finished: {counts} so far."
    if (failed := failed_words(result)) and not result["recipe"]:
        return f"{_cap(failed)}. The settings stay as they were: {counts}."
    if not result["recipe"]:
        return (
            "The accepted changes made no measurable difference with fresh seeds, and were dropped: "
            f"{counts}."
        )
    gain, recipe = (
        result["last"]["gain"],
        ", ".join(result["recipe"]) or "the settings as they were",
    )
    if gain["effect"] is None:
        return f"{recipe}: the last comparison failed; {counts}."
    found = f"{_effect(gain)} nats a token against the settings as they were"
    sure = "" if gain["distinguishable"] else ", within noise"
    fresh = "measured with fresh seeds that played no part in the selection"
    less = f"{_cap(failed)}. " if failed else ""
    return f"{recipe}: {found}{sure}, {fresh}. {less}{_cap(counts)}."


def failed_words(result: Json) -> str:
    """Say that the accepted recipe failed in the last comparison, and what was left out; empty if it did not."""
    if not (why := result["last"].get("failed")):
        return ""
    gone = ", ".join(result["last"]["dropped"])
    return f"the accepted recipe failed with a fresh seed ({why}), and is left without {gone}"


def _seconds(number: float) -> str:
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"


def _cap(words: str) -> str:
    return words[:1].upper() + words[1:]


def _title(result: Json) -> str:
    target = _target(result)
    aim = _length(result) if target is None else f"a loss of {target:g}"
    return f"A recipe for {aim} of {result['preset']}"


def _target(result: Json) -> float | None:
    """Return the loss of --target."""
    return result["asked"].get("target")


def _length(result: Json) -> str:
    kind = "training" if result["length"]["minutes"] else ""
    return f"{result['length']['words']} of {kind}".removesuffix(" of ")


def _state(result: Json) -> Markup:
    what = (
        f"Candidates ran for {', '.join(result['rungs'])}; at each length the best went on to the "
        "next. A gain is the held-out loss of a candidate minus that of the recipe so far, with the "
        "same seed and the same text in the same order; intervals are 95 %. "
        + (
            "Lengths are of training by the clock, without compilation and evaluation: all losses are "
            "at equal seconds."
            if result["length"]["minutes"]
            else "All losses are at equal tokens."
        )
    )
    made = tag("p", what, class_="soft")
    if result["finished"]:
        return made
    spent = f"Not finished: {duration(result['spent_seconds'])} of {duration(result['budget_seconds'])}."
    return joined(made, tag("p", spent, class_="warn"))


_LINEAGE_WORDS = (
    "Each step is a change of the recipe before it. It was chosen by these pairs, so its gain is "
    "rather too large; the last comparison is not."
)
_LINEAGE_HEAD = ("step", ">gain", ">pairs", ">loss after it", "on the way")


def _lineage_rows(result: Json) -> Iterator[Row]:
    for one in result["steps"]:
        way = ", ".join(f"{r['effect']:+.3f} at {r['length']}" for r in one["by_rung"])
        saved = f" (saves {one['saves']})" if one["saves"] else ""
        yield (
            one["name"],
            _effect(one) + saved,
            str(one["pairs"]),
            f"{one['loss']:.4f}",
            way.replace("-", "−"),
        )


def _lineage(result: Json) -> Markup | None:
    if not result["steps"]:
        return None
    bars = [_interval(one["name"], one, f"round {one['round']}") for one in result["steps"]]
    return page.section(
        "Lineage",
        tag("p", _LINEAGE_WORDS, class_="soft"),
        _bars("Gain of each step", bars),
        page.table(_LINEAGE_HEAD, _wrapped(_lineage_rows(result))),
    )


def _bars(heading: str, bars: Sequence[Interval]) -> Markup:
    def draw(size: Size) -> Markup:
        return interval_chart(bars, GAIN, width=size.width)

    return tag("div", page.chart(heading, draw), class_="charts")


_PART_HEAD = ("part", ">worth in the recipe", ">tokens/s", "what became of it")


def _last_words(result: Json) -> str:
    last = result["last"]
    losses = (
        f"loss {fmean(last['losses']):.4f} against {fmean(last['base_losses']):.4f}"
        if last["losses"] and last["base_losses"]
        else "a run failed"
    )
    dropped = last["dropped"]
    if failed := failed_words(result):
        left_out = f" {_cap(failed)}."
    elif dropped:
        left_out = f" Left out of the result, since they make no difference: {', '.join(dropped)}."
    else:
        left_out = ""
    return (
        f"Seeds {last['seeds'][0]} to {last['seeds'][-1]}, which played no part in the selection: {losses}. The "
        "worth of a part is the recipe's loss minus that of the recipe without it; its interval uses the noise of all "
        f"sets of runs with losses near these.{left_out}"
    )


def _part_rows(result: Json) -> list[Row]:
    rows = []
    for one in result["last"]["parts"]:
        if one["effect"] is None:
            became = "left out" if one["name"] in result["last"]["dropped"] else "not measured"
            rows.append((one["name"], "", "", f"{became}: {one['why']}"))
            continue
        speed = one["speed"]
        faster = f"{times(speed['effect'])} ×" if speed else ""
        rows.append((one["name"], _effect(one), faster, _kept(result, one)))
    return rows


def _kept(result: Json, one: Json) -> str:
    if one["name"] in result["last"]["dropped"]:
        return "left out"
    if one["distinguishable"]:
        return "kept" if one["effect"] < 0 else "worse here, kept as a step of the lineage"
    if one.get("saves"):
        return f"kept: saves {one['saves']}"
    return "within noise; without all such parts the loss is worse"


def _last(result: Json) -> Markup | None:
    if not result["last"]:
        return None
    gain, parts = result["last"]["gain"], result["last"]["parts"]
    bars = [_interval("the whole", gain, "")]
    bars += [_interval(one["name"], one, "") for one in parts if len(parts) > 1]
    return page.section(
        "The last comparison",
        tag("p", _last_words(result), class_="soft"),
        _bars("Worth in the recipe", bars),
        page.table(_PART_HEAD, _wrapped(_part_rows(result))),
    )


def _trends(result: Json) -> Markup | None:
    """Plot the gains of the first round against the length of the runs."""
    found = [
        one
        for some in result["rounds"][:1]
        for one in some["candidates"]
        if len(one["rungs"]) > 1 and not one["parts"]
    ][:TRENDS]
    if not found:
        return None
    by = "tokens" if result["length"]["tokens"] else "seconds"
    lines = [
        Line(one["name"], n, [(r[by], r["effect"]) for r in one["rungs"]], dots=True)
        for n, one in enumerate(found, 1)
    ]

    def draw(size: Size) -> Markup:
        name = "tokens of a run" if by == "tokens" else "seconds of a run"
        return line_chart(lines, Axis(name), Axis("gain, nats; below 0 is better"), size, level=0.0)

    words = (
        "Gains of the first round's single changes at each length. A line that rises towards 0 belongs to "
        "what helps early: it is expected to go on so, and ranked by that."
    )
    return page.section(
        "Trends",
        tag("p", words, class_="soft"),
        page.legend((one["name"], n) for n, one in enumerate(found, 1)),
        tag("div", page.chart("Gain against length", draw), class_="charts"),
    )


def _tables(result: Json) -> Iterator[tuple[str, str, Row, Sequence[Row]]]:
    """Yield heading, explanation, head and rows of each table of candidates."""
    for some in result["rounds"]:
        accepted = some["accepted"] or "nothing"
        head = ("change", *(f">{length}" for length in result["rungs"]), "what became of it")
        ranked = sorted(
            (one for one in some["candidates"] if one["rungs"] or one["verdict"] != "not run"),
            key=lambda one: (
                -len(one["rungs"]),
                one["rungs"][-1]["effect"] if one["rungs"] else 0.0,
            ),
        )
        rows = [(one["name"], *_by_length(one, result["rungs"]), one["verdict"]) for one in ranked]
        before = ", ".join(some["incumbent"]) or "the settings as they were"
        yield (
            f"Round {some['round']}: {accepted}",
            _taken_back(some)
            + f"Each is a change of: {before}. One pair where no interval is given.",
            head,
            rows,
        )
    if result["refused"]:
        yield (
            "Refused by planning",
            "They do not fit the recipe or this machine; nothing was run.",
            ("change", "why"),
            [(name, why) for name, why in sorted(result["refused"].items())],
        )
    if result["untried"]:
        yield (
            "Not tried",
            "The budget was too small to try these.",
            ("changes",),
            [(", ".join(result["untried"]),)],
        )


def _taken_back(some: Json) -> str:
    """Say which step a round took back; empty if it took none."""
    if not (gone := some.get("taken_back")):
        return ""
    return (
        f"{gone['name']} is taken back, since a run of the recipe with it failed: {gone['why']}. What "
        "was tried beside that is not judged. "
    )


def _by_length(one: Json, lengths: Sequence[str]) -> Iterator[str]:
    by = {rung["length"]: rung for rung in one["rungs"]}
    for length in lengths:
        yield _effect(by[length]) if length in by else ""


def _section(heading: str, words: str, head: Row, rows: Sequence[Row]) -> Markup:
    return page.section(heading, tag("p", words, class_="soft"), page.table(head, _wrapped(rows)))


def _wrapped(rows: Sequence[Row] | Iterator[Row]) -> Iterator[list[object]]:
    """Allow line breaks in long cells: names of combined moves, and reasons."""
    for row in rows:
        yield [tag("span", cell, class_="wrap") if len(cell) > 36 else cell for cell in row]


def _facts(result: Json) -> Iterator[tuple[str, str]]:
    yield "preset", result["preset"]
    yield "plugins to begin with", ", ".join(result["plugins"]) or "none"
    target = _target(result)
    yield "target", "" if target is None else f"a held-out loss of {target:g}"
    yield "length", _length(result)
    if result.get("by_pace"):
        yield (
            "time",
            "by pace: minutes were converted to steps by the time of a step, measured once for each graph, "
            "since several processes shared the GPU; in the last comparison recipe and settings as they "
            "were are timed by the clock",
        )
    yield (
        "budget",
        f"{duration(result['budget_seconds'])}, {duration(result['spent_seconds'])} spent",
    )
    yield "seed", str(result["asked"]["seed"])
    yield "begins with", result.get("begins_with") or ""
    yield "data", result["data"]["description"]
    yield "backend", ", ".join((result["backend"], result["device"], result["dtype"]))
    yield "hardware", page.pairs(result["hardware"])
    yield "versions", page.pairs(result["versions"])
    yield "commit", result["commit"] or ""
    yield "date", result["date"]


def _effect(effect: Json) -> str:
    """Format an effect with its interval, if any, using a typographic minus as wide as a plus."""
    mean, low, high = effect["effect"], effect["low"], effect["high"]
    words = f"{mean:+.4f}" if low is None else interval(signed, mean, low, high)
    return words.replace("-", "−")


def _interval(name: str, effect: Json, note: str) -> Interval:
    if effect["effect"] is None:
        return Interval(name, None, note=effect.get("why", "not measured"))
    judged = "unknown"
    if effect["distinguishable"]:
        judged = "better" if effect["effect"] < 0 else "worse"
    more = "" if effect["distinguishable"] else "within noise"
    return Interval(
        name,
        effect["effect"],
        effect["low"],
        effect["high"],
        judged,
        _effect(effect),
        "; ".join(filter(None, (note, more))),
    )


def _md(heading: str, words: str, head: Row, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    rule = ["--:" if one.startswith(">") else "---" for one in head]
    table = [[one.lstrip(">") for one in head], rule, *rows]
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in table]
    return ["", f"## {heading}", "", words, "", *(f"| {' | '.join(row)} |" for row in cells), ""]
