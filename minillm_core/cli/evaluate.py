"""``minillm eval``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm_core.cli import options
from minillm_core.cli.console import emit, say, write
from minillm_core.errors import PluginError, Refusal
from minillm_core.install import pip_line
from minillm_core.plugins.provided import provided
from minillm_core.train.progress import display

EXAMPLES = options.examples(
    "minillm eval runs/tiny-1 --data my_text.txt",
    "minillm eval runs/tiny-1 --data my_text.txt --step 90",
    "minillm eval runs/chat --chats held_out.jsonl --pattern '#### (.+)'",
    "minillm eval runs/tiny-1 --tasks hellaswag,arc_easy --limit 200",
    "minillm eval runs/tiny-1 --data my_texts/ --seq-len 512 --max-tokens 100000 --json",
)


JUDGES = "minillm.judges"
"""Entry-point group of functions that evaluate a model: ``chats`` serves --chats, ``tasks`` serves --tasks.

A function is called with OUT, the inference options (whose ``open`` opens a run), the console, the option's
values, and its own options; it returns the run, and metrics by name, which may be tables of metrics."""

OFFERED = {"chats": "minillm-chat", "tasks": "minillm-eval[harness]"}
"""Judge -> the distribution that offers it."""


OWN = {
    "data": ("seq_len", "max_tokens"),
    "chats": ("pattern", "limit", "max_tokens"),
    "tasks": ("task_path", "shots", "limit"),
}
"""Kind of evaluation -> the options that apply to it."""


@dataclass(frozen=True)
class EvalSet:
    """The options that select the evaluation data and method."""

    data: list[str] | None = options.option(
        "PATH", "Text to evaluate on: a file or a folder, read in file order; may be repeated."
    )
    chats: list[str] | None = options.option(
        "PATH", "Chats whose last answers are judged, by the chat template; may be repeated."
    )
    tasks: list[str] | None = options.option(
        "A,B", "Tasks of lm-evaluation-harness: hellaswag,arc_easy; may be repeated."
    )
    pattern: str | None = options.option(
        "REGEX", "With --chats: part of an answer to compare, the first group. Default: all of it."
    )
    task_path: list[Path] | None = options.option(
        "DIR",
        "With --tasks: folder of your own tasks, in YAML; may be repeated. Python files of the "
        "folder that a task names are run.",
    )
    shots: int | None = options.option(
        "N", "With --tasks: examples before each question. Default: the task's.", min=0
    )
    limit: int | None = options.option(
        "N",
        "With --chats: answer only the first N; with --tasks: the first N of each. Default: all.",
        min=1,
    )
    seq_len: int | None = options.option(
        "N", "Context length; windows do not overlap. Default: the run's train.seq_len.", min=1
    )
    max_tokens: int | None = options.option(
        "M", "Most predictions (default: all); with --chats, most tokens of an answer (512).", min=1
    )

    def chosen(self) -> tuple[str, list[str], dict[str, Any]]:
        """Return the kind of evaluation, its arguments, and the options that apply to it.

        Raises:
            Refusal: no or several kinds are given, or an option has no effect.
        """
        given = [name for name in OWN if getattr(self, name)]
        if len(given) != 1:
            where = ", ".join(f"--{one}" for one in given) or "none of them is given"
            fix = "--data with text, --chats with chats, or --tasks hellaswag; minillm eval --help"
            raise Refusal("eval takes one of --data, --chats and --tasks", where=where, fix=fix)
        (name,) = given
        for one in dict.fromkeys(flag for flags in OWN.values() for flag in flags):
            if (value := getattr(self, one)) not in (None, []) and one not in OWN[name]:
                what = f"--{one.replace('_', '-')} has no effect beside --{name}"
                raise Refusal(what, where=f"--{one.replace('_', '-')} {value}", fix="leave it out")
        return name, getattr(self, name), {one: getattr(self, one) for one in OWN[name]}


def evaluate(
    out: options.Model, on: EvalSet, read: options.InferenceOptions, as_json: options.AsJson = False
) -> None:
    """Measure a model's loss and bits per byte on text, or judge it by chats or by public tasks.

    Runs on any machine, and needs only the plugins that change the model, its data or its loss. The
    results of --chats and --tasks for a run are written to its metrics.jsonl as well.
    """
    name, named, own = on.chosen()
    judge = _text if name == "data" else _judge(name)
    with display(say) as shown:
        run, figures = judge(out, read, shown, named, **own)
        if name != "data":
            _record(out, run.step, name, figures)
    if as_json:
        emit({**figures, "step": run.step, "checkpoint": str(run.checkpoint)})
    else:
        _write(figures)


def _text(
    out: Path, read: options.InferenceOptions, shown: Any, paths: list[str], **own: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Evaluate a model's loss on text, with the signature of the entry points."""
    run = read.open(out, shown)
    found = run.evaluate(paths, **own)
    return run, {one: getattr(found, one) for one in ("val_loss", "bits_per_byte", "tokens")}


def _record(out: Path, step: int, name: str, figures: Mapping[str, Any]) -> None:
    """Append the metrics of an evaluation to a run's metrics.jsonl; a model directory has none."""
    from minillm_core.train.metrics import METRICS, add

    if (out / METRICS).exists():
        try:
            add(out / METRICS, {"event": "judged", "step": step, "judge": name, "figures": figures})
        except OSError as error:  # the run of another account, or a folder without write access
            say(f"note: the figures are not in {METRICS}: {error.strerror}")


def _write(figures: Mapping[str, Any], indent: str = "") -> None:
    """Print metrics, nested tables under their names; None is a metric that needs a missing tokenizer."""
    width = max(13, *map(len, figures))
    for name, figure in figures.items():
        if isinstance(figure, Mapping):
            write(f"{indent}{name}")
            _write(figure, f"{indent}  ")
        else:
            shown = "unknown: no tokenizer" if figure is None else figure
            form = {float: ".4f", int: ","}.get(type(figure), "")
            write(f"{indent}{name:<{width}}  {shown:{form}}")


def _judge(name: str) -> Callable[..., tuple[Any, Mapping[str, Any]]]:
    """Import the function of a kind of evaluation.

    Raises:
        PluginError: no installed distribution offers it, or several do.
    """
    if (judge := provided(JUDGES, name)) is None:
        what = f"no installed distribution judges {name}"
        raise PluginError(what, where=f"--{name}", fix=pip_line(OFFERED[name]))
    return judge
