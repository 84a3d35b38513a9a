"""A run as a page: its curves, what was planned, who took part, and what went otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minillm_core.measure import page
from minillm_core.measure.figure import NARROW, Line, Size, line_chart
from minillm_core.measure.history import History, smoothed, thinned
from minillm_core.measure.markup import Markup, tag
from minillm_core.measure.tables import plan, plugins
from minillm_core.measure.ticks import BYTES, COUNT, TIME, Axis
from minillm_core.plan.render import amount, sized

__all__ = ["run_page"]

Json = Mapping[str, Any]

X = {
    "tokens": Axis("tokens", COUNT),
    "seconds": Axis("time of training", TIME),
    "step": Axis("steps", COUNT),
}
LOSS = Axis("loss, nats a token")
TRAINED, HELD_OUT = 1, 2  # colours
LATER = 0.5  # share of a run from which on it is shown closer

ENDS = {
    2: "It was refused.",
    3: "A plugin ended it.",
    4: "No checkpoint verified.",
    5: "Training became non-finite.",
    6: "The device had no memory left.",
    75: "A signal stopped it, with a checkpoint: --resume goes on from there.",
    130: "A signal ended it, with nothing saved.",
}


def run_page(history: History, sample: str | None, why_none: str | None) -> str:
    """The page of a run.

    Args:
        history: what its folder tells.
        sample: what it writes.
        why_none: why there is no sample.
    """
    return page.document(
        f"The run {history.out.resolve().name}",
        tag("p", _headline(history), class_="lead"),
        _state(history),
        _curves(history),
        _others(history),
        _notable(history),
        plugins(history.record),
        plan(history.record),
        _sample(sample, why_none),
        _told(history),
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
    line = ", ".join(parts) or "no step is over yet"
    return f"{line[:1].upper()}{line[1:]}."


def _state(history: History) -> Markup | None:
    code = history.record.get("exit")
    told = []
    if code is None:
        told.append("No end is recorded: the run is still going on, or it was killed.")
    elif code:
        told.append(f"{ENDS.get(code, 'It failed.')} Exit code {code}.")
    if history.torn:
        lines = "line" if history.torn == 1 else "lines"
        told.append(f"Left out of metrics.jsonl: {history.torn} {lines} cut short.")
    return tag("p", " ".join(told), class_="warn") if told else None


def _curves(history: History) -> Markup:
    figures = [
        page.chart("Loss against tokens", _loss(history, "tokens")),
        page.chart("Loss against seconds", _loss(history, "seconds")),
    ]
    if len(history.steps) > 10:
        figures += [
            page.chart("The second half, against tokens", _loss(history, "tokens", LATER)),
            page.chart("The second half, against seconds", _loss(history, "seconds", LATER)),
        ]
    return page.section(
        "Loss",
        page.legend((("training", TRAINED), ("held-out text", HELD_OUT))),
        tag("div", *figures, class_="charts"),
    )


def _loss(history: History, x: str, share: float = 0.0) -> Callable[[Size], Markup]:
    trained = history.series("loss", x)
    held_out = history.series("val_loss", x, evaluations=True)
    begin = share * max((place for place, _ in trained), default=0.0)
    trained, held_out = (
        [point for point in points if point[0] >= begin] for points in (trained, held_out)
    )
    lines = [
        Line("training", TRAINED, thinned(trained), faint=True),
        Line("training", TRAINED, smoothed(trained)),
        Line("held-out text", HELD_OUT, held_out, dots=True),
    ]
    return lambda size: line_chart(lines, X[x], LOSS, size, from_zero=not share)


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
    return line_chart(lines, X["step"], axis, NARROW)


def _notable(history: History) -> Markup | None:
    rows = [_event(event) for event in history.notable]
    return page.section("Events", page.table(["step", "what", "more"], rows)) if rows else None


def _event(event: Json) -> tuple[object, ...]:
    kind = str(event["event"])
    what = {
        "guard": "not finite: the update was not made",
        "rewind": "a spike: back to a checkpoint",
        "resume": "gone on with",
        "skip": "batches without a supervised token passed over",
        "unsaved": "a checkpoint could not be written",
        "end": "the end",
    }[kind]
    more = {k: v for k, v in event.items() if k not in ("event", "step")}
    return event.get("step", ""), what, page.pairs(more)


def _sample(sample: str | None, why_none: str | None) -> Markup:
    if sample is None:
        return page.section("Sample", tag("p", f"There is none: {why_none}.", class_="soft"))
    return page.section(
        "Sample",
        tag(
            "p", "What the newest checkpoint writes at the beginning of a document.", class_="soft"
        ),
        tag("pre", sample or "(nothing)"),
    )


def _told(history: History) -> Markup:
    record, settings = history.record, history.record["config"]
    bound = record.get("binding") or {}
    kernels = ", ".join(f"{one['op']} {one['kernel']}" for one in bound.get("kernels") or ())
    lives = record.get("resumed") or ()
    return page.section(
        "What was run",
        page.facts(
            {
                "model": _settings(settings, "model"),
                "training": _settings(settings, "train"),
                "evaluation": _settings(settings, "eval"),
                "seed": record.get("seed"),
                "data": (record.get("data") or {}).get("description"),
                "backend": " ".join(
                    map(
                        str,
                        filter(
                            None,
                            (
                                bound.get("backend"),
                                "on",
                                bound.get("device_name"),
                                "in",
                                bound.get("dtype"),
                            ),
                        ),
                    )
                )
                if bound
                else "",
                "peak memory": _peak(history, bound),
                "kernels": kernels,
                "taken up again": "; ".join(
                    f"after step {one['step']:,} (exit code before: {one['exit_before']})"
                    for one in lives
                ),
                "hardware": page.pairs(record.get("hardware") or {}),
                "versions": page.pairs(record.get("versions") or {}),
                "folder": history.out.resolve().name,
            }
        ),
    )


def _peak(history: History, bound: Json) -> str:
    """What the steps say of it; that nobody measured it, where they say nothing."""
    if measured := [bytes_ for _, bytes_ in history.series("peak_bytes", "step")]:
        return f"{sized(max(measured))}, by {bound.get('backend', 'the framework')}'s own count"
    if not (history.steps and bound):
        return ""
    return f"not measured: {bound['backend']} does not count it on {bound['device']}"


def _settings(config: Json, part: str) -> str:
    return page.pairs({key: entry["value"] for key, entry in config[part].items()})


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 120 else f"{seconds:.3g} seconds"
