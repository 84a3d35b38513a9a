"""Model directories of other programs, and the distributions that read or write them.

Entry points of the group ``minillm.directories``: the name is a layout of tensors, such as ``llama``, as
in a plugin's ``export=``; the value names the :class:`DirectoryFormat` with this layout. It is imported
when a directory is read or written, or a plan's claims are checked. Directories of the layout ``own``
contain the code of their model: it is for models that fit no other layout.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from minillm_core.data import Tokenizer
from minillm_core.errors import PlanError, PluginError, Refusal
from minillm_core.plan import Plan
from minillm_core.plan.plan import OWN, Export
from minillm_core.plugins.discover import entry_points, offered
from minillm_core.plugins.first_party import PROVIDERS, installing
from minillm_core.text import listed

GROUP = "minillm.directories"


@dataclass(frozen=True)
class Fitted:
    """The arrays of a directory that a plan's model takes.

    Attributes:
        arrays: ``model.<parameter>`` -> float32, in memory or a :class:`~minillm_core.inspection.Deferred`.
        initial: parameters that keep their initial values, such as those that plugins add.
    """

    arrays: dict[str, Any]
    initial: tuple[str, ...]


class ModelDirectory(Protocol):
    """A model directory that a run can start from; its tensors are read by ``fit``."""

    @property
    def path(self) -> Path:
        """The folder."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a run of this model, by key: ``model.*``, ``data.tokenizer``, ``train.lr``.

        An option such as ``sft.template`` applies if the run has its plugin.
        """
        ...

    @property
    def digest(self) -> str:
        """A digest of everything that affects the model's outputs."""
        ...

    @property
    def plugins(self) -> Mapping[str, Mapping[str, Any]]:
        """The plugins that the model needs, each with its options."""
        ...

    @property
    def published(self) -> str | None:
        """The published name and revision that it was fetched by; None: a local folder."""
        ...

    @property
    def begins(self) -> str | None:
        """The token that begins a text, if it is not the end-of-text token; a run from it restarts the data."""
        ...

    @property
    def positions(self) -> int | None:
        """The longest row that the model was trained on; None: not declared."""
        ...

    def check(self, plan: Plan) -> None:
        """Check as ``fit`` does, without reading tensors.

        Raises:
            Refusal: the plan's model differs from the directory's.
        """
        ...

    def fit(self, plan: Plan) -> Fitted:
        """Match the tensors to the parameters of a plan's model.

        Raises:
            Refusal: the plan's model differs from the directory's.
        """
        ...


@dataclass(frozen=True)
class TrainedModel:
    """A trained model to write as a directory.

    Attributes:
        plan: the run's.
        arrays: ``model.<parameter>`` and, if a plugin keeps state, ``state.<name>``.
        tokenizer: the run's; None: it was trained on ids.
        step: optimizer steps taken; 0 if unknown.
        record: the run.json of the run; empty if there is none.
        specials: the ids of the special tokens that the plugins ask for, by name.
    """

    plan: Plan
    arrays: Mapping[str, np.ndarray]
    tokenizer: Tokenizer | None
    step: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    specials: Mapping[str, int] = field(default_factory=dict)


class DirectoryFormat(ABC):
    """A format of model directories that other programs read, with one or several layouts of tensors."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether a path looks like a directory of this format, even a damaged one."""

    @abstractmethod
    def read(self, path: Path) -> ModelDirectory:
        """Read a directory, and check all of it but the tensors' values.

        Raises:
            Refusal: it is damaged, or minillm's decoder cannot represent its model.
        """

    def fetch(self, name: str, say: Callable[[str], None]) -> Path | None:
        """Fetch a published model by a name that is not an existing path.

        Args:
            name: as given to ``--init``.
            say: prints notes for the user.

        Returns:
            Its directory, whose content never changes; None: it is not the name of a model.

        Raises:
            Refusal: it cannot be fetched.
        """
        return None

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Check that a plan's model fits the layout that it names.

        Raises:
            PlanError: it does not; the message names the plugins that claim the layout.
        """

    @abstractmethod
    def write(
        self, folder: Path, model: TrainedModel, say: Callable[[str], None], **options: Any
    ) -> int:
        """Write a model to a folder atomically.

        Args:
            folder: new, or empty.
            model: a model whose plan passes ``check``.
            say: prints notes for the user.
            options: those of :meth:`minillm_core.Run.export`.

        Returns:
            The number of values that it wrote.

        Raises:
            PlanError: the layout has no place for state of the model.
            MinillmError: the disk refused.
        """

    def loading(self, folder: str) -> Mapping[str, str]:
        """Return how programs load a written directory: program -> command or code."""
        return {}


def offers() -> EntryPoints:
    """List the layouts of installed distributions, without importing any."""
    return entry_points(group=GROUP)


def format_of(layout: str) -> DirectoryFormat | None:
    """Find the format of a layout; None if no installed distribution has it.

    Raises:
        PluginError: several distributions offer it, or the offered object is not a format.
    """
    found = offered(GROUP, layout, f"have the layout {layout}")
    return None if found is None else _load(found)


def read_directory(path: Path) -> ModelDirectory | None:
    """Read a model directory with the format that recognises it; None if none does.

    Raises:
        PluginError: the object that a distribution offers is not a format.
        Refusal: it is damaged, or minillm's decoder cannot represent its model.
    """
    return next((one.read(path) for one in _formats() if one.recognises(path)), None)


def fetch_directory(name: str, say: Callable[[str], None]) -> Path | None:
    """Fetch a published model by the format that recognises its name; None: none does.

    Raises:
        PluginError: the object that a distribution offers is not a format.
        Refusal: it cannot be fetched.
    """
    return next((path for one in _formats() if (path := one.fetch(name, say)) is not None), None)


def exporting(plan: Plan, layout: str | None = None) -> DirectoryFormat:
    """Find the export format of a plan's model, and check that the model fits it.

    Args:
        plan: its ``export`` names the layout of the model.
        layout: replaces it with a variant, such as ``peft``, for a model of that layout.

    Raises:
        PlanError: a plugin prevents the export, or the model does not fit the layout.
        PluginError: no installed distribution has the layout.
    """
    if layout == OWN and (own := format_of(OWN)) is not None:
        own.check(plan)  # any model may have the layout ``own``
        return own
    if plan.export.layout is None:
        blockers = plan.export.blocked_by
        verb = "has" if len(blockers) == 1 else "have"
        raise PlanError(
            plan.export.reason
            or f"{listed(blockers)} {verb} no equivalent elsewhere, so this model cannot be exported",
            where=f"plugins: {', '.join(blockers)}",
            fix="train without them, or use the run's folder itself (minillm generate, eval)",
        )
    if (found := format_of(plan.export.layout)) is None:
        raise absent(f"the model cannot be written in the layout {plan.export.layout}")
    if layout not in (None, plan.export.layout):
        own, found = found, format_of(layout)
        if found is None or found is own:
            others = sorted({one.name for one in offers() if format_of(one.name) is not own})
            what = f"this model cannot be written in layout {layout}"
            fix = f"leave it out, for layout {plan.export.layout}; others are {listed(others)}"
            raise PlanError(what, where=f"layout {layout}", fix=fix)
    found.check(plan)
    return found


def export_checked(plan: Plan) -> Plan:
    """Check a plan's claims of ``export=``; drop the false ones, with the reason.

    A model that fits no layout gets the layout ``own`` if that can be written. Claims stay unchanged if no
    installed distribution can check them, or export.
    """
    export = plan.export
    if export.layout == OWN or not offers():
        return plan
    if export.layout is not None:
        if (reason := _unfit(plan, export.layout)) is None:
            return plan
        owners = {info.owner for info in plan.parameters.values()} - {"core"}
        export = Export(None, tuple(sorted(owners)), reason)
    if any(one.name == OWN for one in offers()):
        if (unwritten := _unfit(plan, OWN)) is None:
            export = replace(export, layout=OWN)
        elif not export.reason:
            export = replace(export, reason=unwritten)
    return replace(plan, export=export)


def _unfit(plan: Plan, layout: str) -> str | None:
    """Return the reason why a plan's model does not fit a layout; None: it does."""
    if (found := format_of(layout)) is None:
        return f"no installed distribution writes the layout {layout}"
    try:
        found.check(plan)
    except PlanError as error:
        return f"{error.what} ({error.where})"
    return None


def refuse_taken(folder: Path) -> None:
    """Refuse an existing path, except an empty folder.

    Raises:
        Refusal: it is not a folder, is not empty, is the current folder, or cannot be read.
    """
    fix = "name a new folder"
    if os.path.realpath(folder) == os.path.realpath("."):  # a shell would stay in the replaced one
        what = "a model directory is written whole, and cannot replace the current folder"
        raise Refusal(what, where=str(folder), fix=fix)
    try:
        with os.scandir(folder) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        return
    except OSError as error:
        what = f"a model directory cannot be written to {folder}"
        raise Refusal(what, where=str(error.strerror), fix=fix) from error
    if first is not None:
        raise Refusal(f"{folder} is not empty", where=first.path, fix=fix)


def _formats() -> Iterator[DirectoryFormat]:
    return map(_load, {one.value: one for one in offers()}.values())


def _load(offer: EntryPoint) -> DirectoryFormat:
    found = offer.load()
    if not isinstance(found, DirectoryFormat):
        what = f"the layout {offer.name} is not a minillm_core.directories.DirectoryFormat"
        raise PluginError(what, where=offer.value, fix="tell the authors of the distribution")
    return found


def absent(what: str) -> PluginError:
    """Build the error that names the distribution to install for model directories."""
    return PluginError(
        f"{what}: no installed distribution does that",
        where=f"looked among those installed for {sys.executable}",
        fix=installing([PROVIDERS[GROUP]]),
    )
