"""Evaluation of a model on public tasks of lm-evaluation-harness, by name."""

from __future__ import annotations

import difflib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from minillm_core import DataError, Refusal, Run
from minillm_core.commands import InferenceOptions, plain

__all__ = ["judge_command", "judge_tasks"]

_CANNOT = {
    "UNSAFE_CODE": "runs the code that a model writes, which minillm does not",
    "MULTIMODAL": "shows images, and models here read text",
}
"""Flag of a task -> the reason why it is refused."""

SEEDS = 0, 1234
"""Seeds as in the harness: of Python's ``random``, and of NumPy and the choice of few-shot examples."""

DRAWS = 1_000
"""Bootstrap samples for the standard error of metrics without a formula for it."""


def judge_command(
    out: Path, read: InferenceOptions, shown: Any, tasks: Sequence[str], **options: Any
) -> tuple[Run, dict[str, Any]]:
    """Open the run or model directory of ``minillm eval OUT --tasks`` and evaluate it.

    Args:
        out: the folder.
        read: options for opening it.
        shown: see :func:`judge_tasks`.
        tasks: see :func:`judge_tasks`.
        options: see :func:`judge_tasks`; ``None`` if not given.

    Returns:
        The run, and the metrics.
    """
    run = read.open(out, shown)
    return run, judge_tasks(run, tasks, shown, **options)


def judge_tasks(
    run: Run,
    tasks: Sequence[str],
    shown: Any,
    *,
    task_path: Sequence[str | Path] | None = None,
    limit: int | None = None,
    shots: int | None = None,
) -> dict[str, Any]:
    """Evaluate a run on tasks.

    Args:
        run: a run with a tokenizer.
        tasks: names of tasks, groups or tags, also comma-separated; ``arc_*`` is a pattern.
        shown: displays progress and notes (:func:`minillm_core.commands.display`).
        task_path: folders with custom tasks, which take precedence over the harness's.
        limit: number of documents per task, from its start; None: all.
        shots: few-shot examples per question; None: the task's default.

    Returns:
        ``tasks``: metrics by task and group, under the harness's names (``acc``, ``acc_stderr``, ...),
        with ``shots`` and ``documents``; and ``lm_eval``: the harness's version.

    Raises:
        Refusal: no task is named, the harness or a package of a task is not installed, or a task is unknown,
            defective or unsupported: it runs generated code, or needs images.
        DataError: a task's data is not available.
    """
    named = [one for given in tasks for one in given.split(",") if one]
    if not named:
        raise Refusal(
            "no task is named",
            where=f"--tasks {plain(','.join(tasks), 80)}",
            fix="names with commas between them, like hellaswag,arc_easy",
        )
    try:
        version("lm-eval")
    except PackageNotFoundError:
        raise Refusal(
            "lm-evaluation-harness is not installed",
            where="--tasks",
            fix="pip install 'minillm-eval[harness]'",
        ) from None
    with shown.phase("importing lm-evaluation-harness"):
        from lm_eval.evaluator import evaluate
        from lm_eval.tasks import TaskManager

        from minillm_eval.harness import HarnessModel

    model = HarnessModel(run, shown.progress, shown.say)
    folders = [_folder(one) for one in task_path or ()]
    with shown.phase("listing the tasks"), _to_stderr():
        manager = TaskManager(include_path=folders or None)
    names = known(named, manager)
    random.seed(SEEDS[0])  # for tasks that shuffle, as in the harness
    np.random.seed(SEEDS[1])
    with shown.phase("reading the tasks' data"), _to_stderr(), _refusals(names):
        loaded = manager.load(names)
        for name, task in loaded["tasks"].items():
            prepare(name, task, shots)
    with shown.phase("asking"), _to_stderr(), _defects(names):
        found = evaluate(model, loaded, limit=limit, log_samples=False, bootstrap_iters=DRAWS)
    assert found is not None  # this is the only process
    return {
        "tasks": dict(_figures(found)),
        "lm_eval": version("lm-eval"),
    }


def known(names: Sequence[str], manager: Any) -> list[str]:
    """Resolve names and patterns to tasks.

    Raises:
        Refusal: a name matches no task.
    """
    found: list[str] = []
    for name in names:
        if not (matched := manager.match_tasks([name])):
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, n=5, cutoff=0.6))
            raise Refusal(
                f"there is no task {plain(repr(name), 80)}",
                where=f"--tasks {plain(name, 80)}",
                fix=(f"did you mean {near}? " if near else "")
                + "lm-eval ls tasks lists all; --task-path names a folder of your own",
            )
        found += [one for one in matched if one not in found]
    return found


def prepare(name: str, task: Any, shots: int | None) -> None:
    """Set the number of few-shot examples of a task.

    Raises:
        Refusal: the task runs generated code or needs images, or supports no few-shot examples.
    """
    for lacks, what in _CANNOT.items():
        if getattr(task, lacks, False):
            raise Refusal(
                f"the task {plain(name, 80)} {what}",
                where=f"--tasks {plain(name, 80)}",
                fix="another task",
            )
    own = task.get_config("num_fewshot")
    if shots and own == 0:
        raise Refusal(
            f"the task {plain(name, 80)} is posed without examples",
            where=f"--shots {shots}",
            fix="leave --shots out, or ask this task in a command of its own",
        )
    task.set_config(key="num_fewshot", value=(own or 0) if shots is None else shots)
    task.set_fewshot_seed(seed=SEEDS[1])


def _folder(path: str | Path) -> str:
    if not Path(path).is_dir():
        raise Refusal(
            f"{path} is not a folder",
            where=f"--task-path {path}",
            fix="the folder of the task's YAML file",
        )
    return str(path)


@contextmanager
def _to_stderr() -> Iterator[None]:
    """Redirect the harness's stdout to stderr, since stdout is for the metrics."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def _refusals(names: Sequence[str]) -> Iterator[None]:
    """Convert exceptions of the harness and its data libraries into DataError and Refusal."""
    where = _where(names)
    try:
        with _defects(names):
            yield
    except OSError as error:  # of the hub's client and the network, missing files included
        raise DataError(
            f"the data of a task is not available: {plain(str(error) or type(error).__name__, 300)}",
            where=where,
            fix="a connection to the hub, or HF_HOME of a machine that has fetched them",
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        what = " ".join(map(str, error.args))
        if not isinstance(error, ValueError) or not what:
            what = f"{type(error).__name__} {what}"
        raise Refusal(
            f"a task cannot be evaluated: {plain(what, 300)}",
            where=where,
            fix="correct its YAML, or name another task",
        ) from error


@contextmanager
def _defects(names: Sequence[str]) -> Iterator[None]:
    """Convert exceptions of a task's own templates and Python files into Refusal."""
    from jinja2 import TemplateError  # the harness brings it

    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        raise Refusal(
            f"a task cannot be imported: {plain(str(error), 300)}",
            where=_where(names),
            fix=f"pip install {plain(package, 80)}" if package else "mend it, or name another task",
        ) from error
    except TemplateError as error:
        raise Refusal(
            f"a template of a task fails: {plain(str(error), 300)}",
            where=_where(names),
            fix="correct its YAML, or name another task",
        ) from error


def _where(names: Sequence[str]) -> str:
    return f"--tasks {plain(','.join(names), 200)}"


def _figures(found: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each task's and group's metrics: numbers by the harness's names."""
    shots, samples = found.get("n-shot", {}), found.get("n-samples", {})
    for name, figures in {**found["results"], **found.get("groups", {})}.items():
        own: dict[str, Any] = {}
        for key, value in figures.items():
            metric, _, by = key.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and by:
                own[metric if by == "none" else f"{metric} ({by})"] = float(value)
        if name in shots:
            own["shots"] = int(shots[name])
        if name in samples:
            own["documents"] = int(samples[name]["effective"])
        if own:
            yield name, own
