"""The whole job of ``minillm report``: read a folder, say it as a page in it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from minillm_core.checkpoint import disk
from minillm_core.errors import MinillmError, Refusal
from minillm_core.measure.ablation import PAGE, RESULT
from minillm_core.measure.ablation_page import ablation_page
from minillm_core.measure.history import History, read_history
from minillm_core.measure.run_page import run_page
from minillm_core.text import plain
from minillm_core.train.generate import open_writer
from minillm_core.train.record import RUN
from minillm_core.train.sampling import Sampling

__all__ = ["REPORT", "report"]

REPORT = "report.html"

CHEAP = 50_000_000
"""Parameters up to which a CPU writes a sample in seconds."""

TOKENS = 64

Say = Callable[[str], None]


def report(
    out: Path, *, plugins: Mapping[str, str] | None = None, sample: bool = True, say: Say
) -> Path:
    """Write the page of a run or of an ablation into its folder.

    The run may be going on, or have been killed.

    Args:
        out: the folder.
        plugins: name -> what to load for it, for plugins that must be named again for a sample.
        sample: let the newest checkpoint write a few words.
        say: is told what a person should know.

    Returns:
        The page.

    Raises:
        Refusal: the folder holds neither, or something else by their names.
    """
    if os.path.lexists(out / RUN):
        path, page = out / REPORT, _of_run
    elif os.path.lexists(out / RESULT):
        path, page = out / PAGE, _of_ablation
    else:
        raise Refusal(
            f"{out} holds neither a run nor an ablation",
            where=f"{out}: there is no {RUN} and no {RESULT}",
            fix="name the folder that minillm train or minillm ablate wrote",
        )
    try:
        text = page(out, plugins or {}, sample, say)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise Refusal(
            "what the folder holds is not understood",
            where=f"{out}: {type(error).__name__}: {plain(str(error), 120)}",
            fix="use the version of minillm that wrote it",
        ) from error
    try:
        disk.replace(path, text.encode())
    except OSError as error:
        raise Refusal(f"{path} cannot be written", where=str(error.strerror)) from error
    return path


def _of_ablation(out: Path, plugins: Mapping[str, str], sample: bool, say: Say) -> str:
    return ablation_page(json.loads((out / RESULT).read_bytes()))


def _of_run(out: Path, plugins: Mapping[str, str], sample: bool, say: Say) -> str:
    history = read_history(out)
    written, why = _sample(history, plugins, say) if sample else (None, "it was not asked for")
    if why is not None and sample:
        say(f"no sample: {why}")
    return run_page(history, written, why)


def _sample(
    history: History, plugins: Mapping[str, str], say: Say
) -> tuple[str | None, str | None]:
    """What the newest checkpoint writes on the CPU, which leaves a device to a run that has it."""
    parameters = sum(
        math.prod(one["shape"]) for one in history.record["plan"]["model"]["parameters"].values()
    )
    if parameters > CHEAP:
        return None, (
            f"{parameters:,} parameters are slow on a CPU; minillm generate {history.out} writes one"
        )
    try:
        writer, run = open_writer(history.out, device="cpu", plugins=plugins, say=say)
        generation = writer.go_on(
            "", Sampling(0.8), tokens=TOKENS, seed=run.config.seed, cached=False
        )
        return "".join(writer.text(generation)), None
    except (MinillmError, OSError) as error:  # a run that goes on may take a checkpoint away
        return None, plain(error.what if isinstance(error, MinillmError) else str(error), 200)
