"""Model directories of other programs: which distribution reads or writes one.

Entry points of the group ``minillm.directories``: the name is a layout of tensors, as ``export=`` of a
plugin says it (``llama``); the value names the :class:`DirectoryFormat` that has this layout. It is
imported when a directory is read or written, or a plan's claims are checked. The layout ``own`` is of
directories that bring the code of their model: what no other layout fits is written so.
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
from minillm_core.plugins.first_party import installing
from minillm_core.text import listed

GROUP = "minillm.directories"
FIRST_PARTY = "minillm-hf"


@dataclass(frozen=True)
class Fitted:
    """The arrays that a plan's model takes from a directory.

    Attributes:
        arrays: ``model.<parameter>`` -> float32, in memory or a :class:`~minillm_core.inspection.Deferred`.
        initial: parameters that keep their initial values: those that plugins add.
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
        """What a person should know."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a run of this model, by key: ``model.*``, ``data.tokenizer``, ``train.lr``.

        An option, ``sft.template``, is taken where the run has its plugin.
        """
        ...

    @property
    def digest(self) -> str:
        """A digest of all that decides what its model computes."""
        ...

    @property
    def plugins(self) -> Mapping[str, Mapping[str, Any]]:
        """The plugins that its model needs, each with its options."""
        ...

    @property
    def published(self) -> str | None:
        """The name and revision under which it was fetched; None: it is a folder alone."""
        ...

    @property
    def begins(self) -> str | None:
        """The token before a text, where it is another than that which ends one; a run from it begins anew."""
        ...

    @property
    def positions(self) -> int | None:
        """The longest row that its model has seen; None: it does not say."""
        ...

    def check(self, plan: Plan) -> None:
        """Check as ``fit`` does, as far as that needs no tensor.

        Raises:
            Refusal: the plan's model is another than the directory's.
        """
        ...

    def fit(self, plan: Plan) -> Fitted:
        """Match its tensors to the parameters of a plan's model.

        Raises:
            Refusal: the plan's model is another than the directory's.
        """
        ...


@dataclass(frozen=True)
class TrainedModel:
    """A model to be written as a directory.

    Attributes:
        plan: of its run.
        arrays: ``model.<parameter>`` and, where a plugin keeps state, ``state.<name>``.
        tokenizer: of its run; None: it was trained on ids.
        step: optimizer steps that it has seen; 0 where that is not known.
        record: the run.json of its run; empty where there is none.
        specials: the ids of the special tokens that its plugins ask for, by name.
    """

    plan: Plan
    arrays: Mapping[str, np.ndarray]
    tokenizer: Tokenizer | None
    step: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    specials: Mapping[str, int] = field(default_factory=dict)


class DirectoryFormat(ABC):
    """A kind of model directory that other programs read, in one or several layouts of tensors."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether a path looks like a directory of this kind, whatever is wrong with it."""

    @abstractmethod
    def read(self, path: Path) -> ModelDirectory:
        """Check a directory, all of it but the numbers.

        Raises:
            Refusal: it is damaged, or not of a model that minillm's decoder can be.
        """

    def fetch(self, name: str, say: Callable[[str], None]) -> Path | None:
        """Fetch a model that is published under a name, which no path here has.

        Args:
            name: as ``--init`` has it.
            say: prints what a person should know.

        Returns:
            Its directory, which never changes; None: it is no name of a model.

        Raises:
            Refusal: it cannot be fetched.
        """
        return None

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Check that a plan's model is of the layout that it names.

        Raises:
            PlanError: it is not; the message names the plugins that claim it.
        """

    @abstractmethod
    def write(
        self, folder: Path, model: TrainedModel, say: Callable[[str], None], **options: Any
    ) -> int:
        """Write a model to a folder that is there whole or not at all.

        Args:
            folder: new, or empty.
            model: whose plan passes ``check``.
            say: prints what a person should know.
            options: those of :meth:`minillm_core.Run.export`.

        Returns:
            The numbers that it wrote.

        Raises:
            PlanError: the model has state that the layout has no place for.
            MinillmError: the disk refused.
        """

    def loading(self, folder: str) -> Mapping[str, str]:
        """Say how programs load a directory that was written: program -> what to type."""
        return {}


def offers() -> EntryPoints:
    """List the layouts that installed distributions offer; none is imported."""
    return entry_points(group=GROUP)


def format_of(layout: str) -> DirectoryFormat | None:
    """Find the format that has a layout; None where no installed distribution has it.

    Raises:
        PluginError: several distributions offer it, or what is offered is no format.
    """
    found = offered(GROUP, layout, f"have the layout {layout}")
    return None if found is None else _load(found)


def read_directory(path: Path) -> ModelDirectory | None:
    """Read a model directory with the format that recognises it; None where none does.

    Raises:
        PluginError: what a distribution offers is no format.
        Refusal: it is damaged, or not of a model that minillm's decoder can be.
    """
    return next((one.read(path) for one in _formats() if one.recognises(path)), None)


def fetch_directory(name: str, say: Callable[[str], None]) -> Path | None:
    """Fetch a published model by the format that knows its name; None: none does.

    Raises:
        PluginError: what a distribution offers is no format.
        Refusal: it cannot be fetched.
    """
    return next((path for one in _formats() if (path := one.fetch(name, say)) is not None), None)


def exporting(plan: Plan, layout: str | None = None) -> DirectoryFormat:
    """Find the format that a plan's model is exported in, and check that it can be.

    Args:
        plan: whose ``export`` names the layout of the model.
        layout: another one, such as ``peft``, of what can be written of a model of that layout.

    Raises:
        PlanError: a plugin stands in the way, or the model is not of the layout.
        PluginError: no installed distribution has the layout.
    """
    if layout == OWN and (own := format_of(OWN)) is not None:
        own.check(plan)  # which any model may have
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
            raise PlanError(
                f"a {plan.export.layout} model cannot be written in the layout {layout}",
                where=f"layout {layout}",
                fix=f"leave it out, for a {plan.export.layout} directory; others are {listed(others)}",
            )
    found.check(plan)
    return found


def export_checked(plan: Plan) -> Plan:
    """Check a plan's claims of ``export=``; drop those that do not hold, with the reason.

    A model of no layout has the layout ``own`` where that can be written. Claims stay as they are where
    nothing is installed that could check them, or export.
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
    """Say why a plan's model cannot be written in a layout; None: it can."""
    if (found := format_of(layout)) is None:
        return f"no installed distribution writes the layout {layout}"
    try:
        found.check(plan)
    except PlanError as error:
        return f"{error.what} ({error.where})"
    return None


def refuse_taken(folder: Path) -> None:
    """Refuse a path that is taken, unless by an empty folder.

    Raises:
        Refusal: it is no folder, or not empty, or cannot be looked at.
    """
    try:
        with os.scandir(folder) as entries:
            first = next(entries, None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Refusal(
            f"a model directory cannot be written to {folder}",
            where=str(error.strerror),
            fix="--to with the name of a new folder",
        ) from error
    if first is not None:
        raise Refusal(
            f"{folder} is not empty", where=first.path, fix="--to with the name of a new folder"
        )


def _formats() -> Iterator[DirectoryFormat]:
    return map(_load, {one.value: one for one in offers()}.values())


def _load(offer: EntryPoint) -> DirectoryFormat:
    found = offer.load()
    if not isinstance(found, DirectoryFormat):
        raise PluginError(
            f"the layout {offer.name} is no minillm_core.directories.DirectoryFormat",
            where=offer.value,
            fix="tell the authors of the distribution",
        )
    return found


def absent(what: str) -> PluginError:
    """Say which distribution to install for model directories, where none is there."""
    return PluginError(
        f"{what}: no installed distribution does that",
        where=f"looked among those installed for {sys.executable}",
        fix=installing([FIRST_PARTY]),
    )
