"""The HTML page of a run: its curves, samples, events, plugins and plan."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from minillm_core.commands import counted
from minillm_core.studies import amount, sized
from minillm_lab import page
from minillm_lab.figure import BYTES, COUNT, NARROW, TOKENS, Axis, Line, Size, line_chart
from minillm_lab.history import History, smoothed, thinned
from minillm_lab.markup import Markup, joined, tag

Json = Mapping[str, Any]

STEPS = Axis("steps", COUNT)
LOSS = Axis("loss, nats a token")
TRAINED, HELD_OUT = 1, 2  # colours
LATER = 0.5  # fraction of a run after which a zoomed plot begins

ENDS = {
    2: "It was refused.",
    3: "A plugin ended it.",
    4: "No checkpoint verified.",
    5: "Training became non-finite.",
    6: "The device had no memory left.",
    75: "A signal stopped it after a checkpoint: --resume continues from there.",
    130: "A signal ended it; nothing was saved.",
}


def run_page(history: History, sample: str | None, why_none: str | None) -> str:
    """Render the page of a run.

    Args:
        history: of its folder.
        sample: text generated from the newest checkpoint; samples recorded by the run take precedence.
        why_none: the reason for a missing sample.
    """
    return page.document(
        f"The run {history.out.resolve().name}",
        tag("p", _headline(history), class_="lead"),
        _state(history),
        _curves(history),
        _samples(history),
        _judged(history),
        _others(history),
        _notable(history),
        _plugins_section(history.record),
        _plan_section(history.record),
        None if history.samples else _sample(sample, why_none),
        _what_was_run(history),
    )


def _headline(history: History) -> str:
    evaluated = [one for one in history.evaluations if one.event.get("val_loss") is not None]
    parts = []
    if evaluated:
        last = evaluated[-1]
        parts.append(f"held-out loss {last.event['val_loss']:.4f} after step {last.step:,}")
        if (rate := last.event.get("bits_per_byte")) is not None:
            parts.append(f"{rate:.4f} bits a byte")
    elif losses := history.series("loss", "step"):
        parts.append(f"training loss {losses[-1][1]:.4f} after step {losses[-1][0]:,.0f}")
    if history.steps:
        last = history.steps[-1]
        parts.append(f"{amount(last.tokens)} tokens in {_duration(last.seconds)}")
    return page.sentence(*(parts or ["no step is over yet"]))


def _state(history: History) -> Markup | None:
    code = history.record.get("exit")
    lines = []
    if code is None:
        lines.append("No end is recorded: the run is still going on, or it was killed.")
    elif code:
        lines.append(f"{ENDS.get(code, 'It failed.')} Exit code {code}.")
    left = [f"{counted(history.torn, 'line')} cut short"] if history.torn else []
    if history.strange:
        left.append(f"{counted(history.strange, 'event')} that are not as minillm writes them")
    if left:
        lines.append(f"Left out of metrics.jsonl: {'; '.join(left)}.")
    return tag("p", " ".join(lines), class_="warn") if lines else None


def _curves(history: History) -> Markup:
    figures = [page.chart("The whole run", _loss(history))]
    if len(history.steps) > 10:
        figures.append(page.chart("The second half, closer", _loss(history, LATER)))
    return page.section(
        "Loss",
        page.legend((("training", TRAINED), ("held-out text", HELD_OUT))),
        tag("p", _how(history), class_="soft"),
        tag("div", *figures, class_="charts"),
    )


def _how(history: History) -> str:
    """Explain the curves, and the amount of text per evaluation."""
    how = "Faint is each step of training, the line a mean of several; a dot is an evaluation"
    counts = [one.event.get("tokens") for one in history.evaluations]
    known = [count for count in counts if isinstance(count, int) and count]
    if not known:
        return f"{how}."
    last = f"{known[-1]:,} predictions"
    if known[0] != known[-1]:
        return f"{how} on held-out text: {known[0]:,} predictions on the way, {last} at the end."
    return f"{how} on held-out text, of {last}."


def _loss(history: History, share: float = 0.0) -> Callable[[Size], Markup]:
    trained = history.series("loss", "tokens")
    held_out = history.series("val_loss", "tokens", evaluations=True)
    begin = share * max((place for place, _ in trained), default=0.0)
    trained, held_out = (
        [point for point in points if point[0] >= begin] for points in (trained, held_out)
    )
    lines = [
        Line("training", TRAINED, thinned(trained), faint=True),
        Line("training", TRAINED, smoothed(trained)),
        Line("held-out text", HELD_OUT, held_out, dots=True),
    ]
    return lambda size: line_chart(lines, TOKENS, LOSS, size, from_zero=not share)


def _others(history: History) -> Markup | None:
    wanted = (
        ("Tokens a second", "tokens_per_second.real", Axis("real tokens a second", COUNT)),
        ("Learning rate", "lr", Axis("train.lr")),
        ("Gradients' norm", "grad_norm", Axis("norm, before clipping")),
        ("Peak memory", "peak_bytes", Axis("memory", BYTES)),
        ("Use of the device", "mfu", Axis("share of its peak FLOP/s")),
    )
    terms = {name for one in history.steps for name in one.event.get("terms") or {}}
    wanted += tuple((f"Loss term {n}", f"terms.{n}", Axis("unweighted")) for n in sorted(terms))
    figures = [
        page.small(heading, _series(points, axis))
        for heading, key, axis in wanted
        if (points := history.series(key, "step")[1:])
    ]
    if not figures:
        return None
    how = (
        "Without the first step, which compiles; faint is each step, the line is a mean of several."
    )
    return page.section(
        "On the way", tag("p", how, class_="soft"), tag("div", *figures, class_="small")
    )


def _series(points: list[tuple[float, float]], axis: Axis) -> Markup:
    lines = [Line(axis.name, 1, thinned(points), faint=True), Line(axis.name, 1, smoothed(points))]
    return line_chart(lines, STEPS, axis, NARROW)


def _notable(history: History) -> Markup | None:
    rows = [_event(event) for event in history.notable]
    return page.section("Events", page.table(["step", "what", "more"], rows)) if rows else None


def _event(event: Json) -> tuple[object, ...]:
    kind = str(event["event"])
    what = {
        "guard": "not finite: the update was not made",
        "rewind": "a spike: back to a checkpoint",
        "resume": "resumed",
        "skip": "batches without a supervised token were skipped",
        "unsaved": "a checkpoint could not be written",
        "end": "the end",
    }[kind]
    more = {k: v for k, v in event.items() if k not in ("event", "step")}
    return event.get("step", ""), what, page.pairs(more)


def _samples(history: History) -> Markup | None:
    """Show samples of the run: the newest step's, with older ones collapsed."""
    if not history.samples:
        return None
    newest = history.samples[-1].get("step")
    last = [one for one in history.samples if one.get("step") == newest]
    earlier = [one for one in history.samples if one.get("step") != newest]
    folded = None
    if earlier:
        summary = tag("summary", f"{counted(len(earlier), 'earlier sample')}")
        folded = tag("details", summary, *map(_written, earlier))
    return page.section(
        "Samples",
        tag("p", "The prompt, or the question, is bold; the model wrote the rest.", class_="soft"),
        *map(_written, last),
        folded,
    )


def _judged(history: History) -> Markup | None:
    """Show the newest results of `minillm eval --chats` and `--tasks`."""
    found: dict[tuple[str, str], tuple[object, ...]] = {}
    for event in history.judged:
        judge = str(event.get("judge"))
        for name, figure in _figures(event["figures"]):
            found[judge, name] = (judge, name, figure, event.get("step", ""))
    if not found:
        return None
    heads = ["judge", "figure", ">value", ">after step"]
    return page.section("Judged", page.table(heads, list(found.values())))


def _figures(found: Json, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each result; nested tables give qualified names."""
    for name, figure in found.items():
        if isinstance(figure, Mapping):
            yield from _figures(figure, f"{above}{name}, ")
        elif isinstance(figure, float):
            yield f"{above}{name}", f"{figure:.4g}"
        else:
            yield f"{above}{name}", f"{figure:,}" if isinstance(figure, int) else str(figure)


def _written(sample: Json) -> Markup:
    prompt, text = str(sample.get("prompt") or ""), str(sample["text"])
    asked = sample.get("answers") is True
    text = text if asked else text.removeprefix(prompt)
    step = sample.get("step")
    after = f"after step {step:,}" if isinstance(step, int) else ""
    return tag(
        "figure",
        tag("h3", after),
        tag("pre", tag("b", prompt) if prompt else None, "\n\n" if asked else None, text),
        class_="sample",
    )


def _sample(sample: str | None, why_none: str | None) -> Markup:
    if sample is None:
        return page.section("Sample", tag("p", f"There is none: {why_none}.", class_="soft"))
    return page.section(
        "Sample",
        tag("p", "The newest checkpoint starts a new document:", class_="soft"),
        tag("pre", sample or "(nothing)"),
    )


def _what_was_run(history: History) -> Markup:
    record, settings = history.record, history.record["config"]
    bound = record.get("binding") or {}
    kernels = ", ".join(f"{one['op']} {one['kernel']}" for one in bound.get("kernels") or ())
    lives = record.get("resumed") or ()
    return page.section(
        "What was run",
        page.facts(
            {
                "command": _command(record.get("command")),
                "started": _moment(record.get("started")),
                "ended": _moment(record.get("ended")),
                "took": _seconds(record.get("seconds")),
                "git": _git(record.get("git")),
                "model": _settings(settings, "model"),
                "training": _settings(settings, "train"),
                "evaluation": _settings(settings, "eval"),
                "seed": record.get("seed"),
                "data": (record.get("data") or {}).get("description"),
                "backend": _backend(bound),
                "peak memory": _peak(history, bound),
                "kernels": kernels,
                "resumed": "; ".join(
                    f"after step {one['step']:,} (exit code before: {one['exit_before']})"
                    for one in lives
                ),
                "hardware": page.pairs(record.get("hardware") or {}),
                "versions": page.pairs(record.get("versions") or {}),
                "folder": history.out.resolve().name,
            }
        ),
    )


def _backend(bound: Json) -> str:
    words = bound.get("backend"), "on", bound.get("device_name"), "in", bound.get("dtype")
    return " ".join(str(word) for word in words if word) if bound else ""


def _peak(history: History, bound: Json) -> str:
    """Format the peak memory over all steps and its scope (device or process), if measured."""
    if measured := [bytes_ for _, bytes_ in history.series("peak_bytes", "step")]:
        if (bound.get("backend"), bound.get("device")) == ("torch", "cpu"):
            return f"{sized(max(measured))}, of the whole process"
        return f"{sized(max(measured))}, by {bound.get('backend', 'the framework')}'s own count"
    if not (history.steps and bound):
        return ""
    return f"not measured: {bound['backend']} does not count it on {bound['device']}"


def _command(given: Any) -> Markup | None:
    """Show the command line of the run."""
    if not isinstance(given, list) or not given:
        return None
    return tag("code", shlex.join(map(str, given)))


def _moment(given: Any) -> str | None:
    """Format an ISO time to the second, in UTC."""
    if not isinstance(given, str):
        return None
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        return given
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _seconds(given: Any) -> str | None:
    return _duration(float(given)) if isinstance(given, int | float) else None


def _git(given: Any) -> str | None:
    """Format the git commit of the folder in which the run was started."""
    if not isinstance(given, Mapping) or not isinstance(given.get("commit"), str):
        return None
    return f"{given['commit'][:12]}{', with uncommitted changes' if given.get('dirty') else ''}"


def _settings(config: Json, part: str) -> str:
    return page.pairs({key: entry["value"] for key, entry in config[part].items()})


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 120 else f"{seconds:.3g} seconds"


# Plugins and plan


def _plugins_section(record: Json) -> Markup | None:
    """Show the plugins, each with the evidence that it was active."""
    rows = [_plugin(one) for one in record.get("plugins") or ()]
    if not rows:
        return None
    return page.section(
        "Plugins",
        tag("p", "Evidence is what a plugin left behind while the run went on.", class_="soft"),
        page.table(["plugin", "from", "options", "evidence"], rows),
    )


def _plugin(one: Json) -> Iterator[object]:
    yield one["name"]
    version = one.get("version")
    source = f"{one['distribution']} {version}" if one.get("distribution") else "a file"
    yield tag("span", source, class_="one")
    yield tag("div", page.pairs(one.get("options") or {}) or "none", class_="long")
    evidence = one.get("evidence")
    if evidence is None:
        yield "none yet: it is looked for when the run ends"
        return
    found = [*evidence.get("what", ()), *(f"missing: {key}" for key in evidence.get("missing", ()))]
    if "switched_off" in evidence:
        found.append(f"switched off: {evidence['switched_off']}")
    if not evidence.get("shown"):
        yield joined(
            tag("span", "nothing shows that it took part", class_="worse"), _small_lines(found)
        )
        return
    yield tag("details", tag("summary", "it took part"), _small_lines(found))


def _small_lines(keys: list[str]) -> Markup:
    return joined(*(tag("small", key, class_="wrap") for key in keys))


def _plan_section(record: Json) -> Markup:
    """Show parameters by role, update rules and scheduled values."""
    planned = record["plan"]
    parameters = list(planned["model"]["parameters"].values())
    total = sum(_size(one) for one in parameters) or 1
    roles: dict[tuple[str, str], list[Json]] = {}
    for one in parameters:
        roles.setdefault((one["role"], one["owner"]), []).append(one)
    rows: list[tuple[object, ...]] = [
        (
            role,
            owner,
            f"{len(some)}",
            tag("span", ", ".join(dict.fromkeys(map(_shape, some))), class_="one"),
            f"{(count := sum(map(_size, some))):,}",
            f"{count / total:.1%}",
        )
        for (role, owner), some in roles.items()
    ]
    rows.append(("all", "", f"{len(parameters)}", "", f"{total:,}", "100 %"))
    rules = [
        (name, rule["owner"], ", ".join(_stage(stage) for stage in rule["stages"]))
        for name, rule in planned["optimizer"]["rules"].items()
    ]
    return page.section(
        "Plan",
        tag("p", f"Hash {record['plan_hash'][:12]}.", class_="soft"),
        page.table(["parameters", "owner", ">arrays", "shape", ">number", ">share"], rows),
        page.table(["update rule", "owner", "stages"], rules),
        page.table(["scheduled value", "owner", "course"], _schedules(planned)),
    )


def _stage(stage: Json) -> str:
    return stage["anchor"] + ("" if stage["owner"] == "core" else f" ({stage['owner']})")


def _schedules(planned: Json) -> Iterator[tuple[str, str, str]]:
    for name, entry in planned["schedules"]["values"].items():
        yield name, entry["owner"], page.pairs({k: v for k, v in entry.items() if k != "owner"})


def _shape(parameter: Json) -> str:
    return " × ".join(f"{length:,}" for length in parameter["shape"]) or "1"


def _size(parameter: Json) -> int:
    return math.prod(parameter["shape"])
