"""The toolkit of measuring: for distributions that train a text several times, time steps, or read runs.

docs/python.md shows a study whole. Unlike :mod:`minillm_core.commands` this module is not light: a
command imports it when it runs, and not for its ``--help``.

- Runs: :func:`open_corpus` reads a text once; a :class:`Study` trains plans on it (:class:`Trained`,
  with a :class:`Point` for each evaluation) and gives a :class:`Stepper` for steps by hand
  (:class:`Timed`). :func:`graph_of` tells which plans share a compiled step.
- Plans: :func:`prepare` makes settings, plugins and machine (:class:`Prepared`) of a command line,
  which ``StudyOptions.asked`` gives as a :class:`RunRequest`; :func:`plan_with`
  plans with some of the plugins, and :func:`bind` refuses what does not run here. Of a text such as
  ``muon,-xsa``: :func:`added`, :func:`taken_away`; of a preset: :func:`plugins_of`.
- A run's folder: :func:`read_record`, :func:`read_events`, :func:`read_json`; names of files.
- Writing: :func:`lock` a folder, :func:`replace_file` atomically, :func:`refuse_unwritable` before
  anything is started; :func:`stop_on_signals` lets a run end well.
- Facts of a result: :func:`hardware` and :func:`versions`.
- Technique cards: :class:`Card` and its parts, kept in :func:`card_folder`.
- Numbers in words: :func:`amount`, :func:`sized`, :func:`signed`, :func:`times`, :func:`interval`.
"""

from pathlib import Path

from minillm_core.backends.base import Batch, Binding, Trainer
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint import disk, lock
from minillm_core.config.folders import data_folder
from minillm_core.config.load import Loaded
from minillm_core.config.presets import plugins_of
from minillm_core.config.selection import added, taken_away
from minillm_core.plan.render import amount, sized
from minillm_core.plugins.attribution import attribute_errors
from minillm_core.plugins.cards import (
    FOLDER,
    PAIRS,
    Card,
    Cost,
    Interval,
    Scale,
    interval,
    signed,
    times,
)
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.metrics import METRICS, thin
from minillm_core.train.record import (
    ABLATION,
    RUN,
    RUNS,
    hardware,
    read_json,
    read_record,
    refuse_unwritable,
    versions,
)
from minillm_core.train.request import Prepared, RunRequest, prepare
from minillm_core.train.signals import StopRequest, stop_on_signals
from minillm_core.train.study import (
    Point,
    Stepper,
    Study,
    Timed,
    Trained,
    bind,
    graph_of,
    open_corpus,
    plan_with,
    read_events,
    without_gc,
)

__all__ = [
    "ABLATION",
    "METRICS",
    "PAIRS",
    "RUN",
    "RUNS",
    "Batch",
    "Binding",
    "Card",
    "Cost",
    "Detected",
    "Interval",
    "Loaded",
    "LoadedPlugin",
    "Point",
    "Prepared",
    "RunRequest",
    "Scale",
    "Stepper",
    "StopRequest",
    "Study",
    "Timed",
    "Trained",
    "Trainer",
    "added",
    "amount",
    "attribute_errors",
    "bind",
    "card_folder",
    "graph_of",
    "hardware",
    "interval",
    "lock",
    "open_corpus",
    "plan_with",
    "plugins_of",
    "prepare",
    "read_events",
    "read_json",
    "read_record",
    "refuse_unwritable",
    "replace_file",
    "signed",
    "sized",
    "stop_on_signals",
    "taken_away",
    "thin",
    "times",
    "versions",
    "without_gc",
]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole: its readers find the old content or the new one, also after a kill.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    disk.replace(path, content)


def card_folder() -> Path:
    """Give the user's folder of technique cards, which ``minillm plugins info`` reads first."""
    return data_folder() / FOLDER
