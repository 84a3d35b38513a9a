"""``minillm report``: read a folder and write its HTML page into it."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from minillm_core import MinillmError, Refusal, Run
from minillm_core.commands import plain
from minillm_core.studies import RUN, added, read_json, replace_file
from minillm_lab.ablation import PAGE, RESULT
from minillm_lab.ablation_page import ablation_page
from minillm_lab.comparison import comparison_page
from minillm_lab.history import History, read_history
from minillm_lab.members import understood
from minillm_lab.run_page import run_page
from minillm_lab.search_page import PAGE as SEARCH_PAGE
from minillm_lab.search_page import RESTORED, search_page
from minillm_lab.search_page import RESULT as SEARCH

REPORT, COMPARISON = "report.html", "comparison.html"

CHEAP = 50_000_000
"""Largest model, in parameters, that generates a sample on a CPU within seconds."""

TOKENS = 64

Say = Callable[[str], None]


def report(out: Path, *, plugins: str | None = None, sample: bool = True, say: Say) -> Path:
    """Write the HTML page of a run, an ablation or a search into its folder.

    The run or the search may be unfinished, or killed.

    Args:
        out: the folder.
        plugins: plugins of a run that are needed again for a sample, in the form of ``--plugins``.
        sample: generate a short sample from the newest checkpoint.
        say: prints a line.

    Returns:
        The path of the page.

    Raises:
        Refusal: the folder holds none of them, a search without results, or files of another format under their
            names; or ``plugins`` are given for no run, or are not the run's.
    """
    if os.path.lexists(out / RUN):
        path, page = out / REPORT, _of_run
    elif os.path.lexists(out / RESULT):
        path, page = out / PAGE, _of_ablation
    elif os.path.lexists(out / SEARCH):
        path, page = out / SEARCH_PAGE, _of_search
    else:
        fix = "name the folder that minillm train, ablate or search wrote"
        run = out.parent / (out.name.partition("@")[0] or out.name)
        if os.path.lexists(run / RUN):
            fix = f"a page shows all steps of a run: minillm report {shlex.quote(str(run))}"
        raise Refusal(
            f"{out} holds neither a run nor an ablation nor a search",
            where=f"{out}: there is no {RUN}, no {RESULT} and no {SEARCH}",
            fix=fix,
        )
    if page is not _of_run:
        _refuse_plugins(plugins, str(out))
    return _written(path, lambda: page(out, plugins, sample, say))


def compare(outs: Sequence[Path], *, plugins: str | None = None) -> Path:
    """Write a page comparing several runs into the folder of the first.

    Raises:
        Refusal: a folder holds no run, or is named twice; or ``plugins`` are given, which it does not need.
    """
    _refuse_plugins(plugins, " ".join(map(str, outs)))
    if len({out.resolve() for out in outs}) < len(outs):
        raise Refusal(
            "a run is compared with itself",
            where=shlex.join(["minillm", "report", *map(str, outs)]),
            fix="name each run's folder once",
        )
    return _written(outs[0] / COMPARISON, lambda: comparison_page([*map(read_history, outs)]))


def _refuse_plugins(plugins: str | None, of: str) -> None:
    """Check that no plugins are named for a page without a generated sample.

    Raises:
        Refusal: some are.
    """
    if plugins is not None:
        raise Refusal(
            "--plugins is for the sample of a single run, and this page generates none",
            where=f"--plugins {plugins}, for {of}",
            fix="leave --plugins out",
        )


def _refuse_others(history: History, plugins: str | None) -> None:
    """Check that the plugins named again are the run's, as ``minillm generate`` does.

    Raises:
        Refusal: one is not.
    """
    own = [one["name"] for one in history.record["plugins"]]
    for name in added(plugins):
        if name not in own:
            raise Refusal(
                f"the run was not trained with a plugin '{name}'",
                where=str(history.out / RUN),
                fix=f"its plugins are: {', '.join(own) or 'none'}",
            )


def _written(path: Path, make: Callable[[], str]) -> Path:
    """Render a page and write it atomically."""
    out = path.parent
    try:
        text = make()
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise Refusal(
            "what the folder holds is not understood",
            where=f"{out}: {type(error).__name__}: {plain(str(error), 120)}",
            fix="use the version of minillm that wrote it",
        ) from error
    try:
        replace_file(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise Refusal(f"{path} cannot be written", where=str(error.strerror)) from error
    return path


def _of_ablation(out: Path, plugins: str | None, sample: bool, say: Say) -> str:
    result = read_json(out / RESULT)
    with understood(
        out / RESULT, "its minillm ablate command, given again, writes the file anew from its runs"
    ):
        return ablation_page(result)


def _of_search(out: Path, plugins: str | None, sample: bool, say: Say) -> str:
    result = read_json(out / SEARCH)
    if "rounds" not in result:  # written before the length of its runs is known
        raise Refusal(
            "the search was ended before it compared anything",
            where=str(out / SEARCH),
            fix="give its minillm search command again, with --resume",
        )
    with understood(out / SEARCH, RESTORED):
        return search_page(result)


def _of_run(out: Path, plugins: str | None, sample: bool, say: Say) -> str:
    history = read_history(out)
    _refuse_others(history, plugins)
    written, why = None, "it was not asked for"
    if not sample:
        history.samples.clear()
    elif history.samples:  # recorded during the run
        why = None
    else:
        written, why = _sample(history, plugins, say)
    if why is not None and sample:
        say(f"no sample: {why}")
    return run_page(history, written, why)


def _sample(history: History, plugins: str | None, say: Say) -> tuple[str | None, str | None]:
    """Generate a sample from the newest checkpoint on the CPU, so that a running run keeps its device."""
    parameters = sum(
        math.prod(one["shape"]) for one in history.record["plan"]["model"]["parameters"].values()
    )
    if parameters > CHEAP:
        return None, (
            f"{parameters:,} parameters are slow on a CPU; "
            f"minillm generate {shlex.quote(str(history.out))} writes one"
        )
    try:
        run = Run.open(history.out, device="cpu", plugins=plugins, say=say)
        seed = run.plan.config.seed
        return run.generate(max_tokens=TOKENS, seed=seed, cached=False), None
    except (MinillmError, OSError) as error:  # a running run may delete a checkpoint
        return None, plain(error.what if isinstance(error, MinillmError) else str(error), 200)
