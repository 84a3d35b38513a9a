"""A run as it was left: what it was told, its plan made anew, and its newest good checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm_core import backends
from minillm_core.backends.base import Backend, Model
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint import Checkpoint, newest_or_refuse
from minillm_core.config.origins import Layer, Setting
from minillm_core.config.schema import Config
from minillm_core.data import OnBatch, Tokenizer
from minillm_core.errors import PlanError, Refusal
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.blame import blaming
from minillm_core.plugins.discover import installed_names
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.manager import load as load_plugins
from minillm_core.plugins.streams import Streams
from minillm_core.train.hooks import batch_hook
from minillm_core.train.reading import alike, for_reading
from minillm_core.train.record import RUN, read_record
from minillm_core.train.settings import config_of, layer_of

__all__ = ["TOKENIZER", "Create", "Run", "open_run", "recorded", "settings_of", "specs_of"]

TOKENIZER = "tokenizer.json"

Create = Callable[[Detected, Plan], Backend]
"""Binds a plan to a backend and device."""


@dataclass(frozen=True)
class Run:
    """What OUT holds; made by :func:`open_run`, on no device yet."""

    out: Path
    record: Mapping[str, Any]  # run.json
    config: Config
    plugins: tuple[LoadedPlugin, ...]
    plan: Plan
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None  # None: it was trained on ids

    def batch_hook(self) -> OnBatch | None:
        """The plugins' ``on_batch`` outside of training, as one function."""
        streams = Streams(self.config.seed)
        return batch_hook(
            self.plan.on_batch,
            self.plugins,
            Counter(),
            self.config.model.vocab,
            streams,
            self.plan.batch_fields,
        )

    def model(
        self,
        detected: Detected,
        *,
        max_positions: int | None = None,
        say: Callable[[str], None],
        create: Create | None = None,
    ) -> Model:
        """The trained model on a device; it need not be the run's.

        What only training needed may be missing there: see
        :func:`minillm_core.train.reading.for_reading`.

        Args:
            detected: where.
            max_positions: longest row that will ever be fed; default: the run's seq_len.
            say: is told what the model is read without.
            create: makes the backend; default: :func:`minillm_core.backends.create`.

        Raises:
            Refusal: a plugin that shaped the model, its data or its loss does not run there, or the
                checkpoint does not fit the plan.
        """
        with blaming(self.plugins, "while kernels are chosen"):
            plan = for_reading(self.plan, self.plugins, detected, say)
            backend = (create or backends.create)(detected, plan)
        model = backend.model(plan, self.config.seed, max_positions=max_positions)
        arrays = self.checkpoint.arrays("model.") | self.checkpoint.arrays("state.")
        try:
            model.load(arrays)
        except (KeyError, ValueError) as error:
            raise Refusal(
                f"the checkpoint does not fit the model: {error}",
                where=str(self.checkpoint.path),
                fix="install the versions of the plugins that run.json names",
            ) from error
        return model


def open_run(
    out: Path, *, plugins: Mapping[str, str] | None = None, say: Callable[[str], None]
) -> Run:
    """Read a run's folder; changes nothing in it, and needs no framework.

    Args:
        out: the folder.
        plugins: name -> what to load for it, for plugins that must be named again.
        say: is told what a person should know.

    Raises:
        Refusal: OUT holds no run or no checkpoint, or plugins that shaped its model, its data or
            its loss cannot be had.
        NoCheckpoint: none verifies.
        PluginCodeError: a plugin's own code raised.
    """
    record = read_record(out)
    config = config_of(record["config"], where=str(out / RUN))
    active, plan = _planned(record, config, specs_of(record, config, out, plugins or {}), say)
    checkpoint = newest_or_refuse(out, say)
    path = out / TOKENIZER
    tokenizer = Tokenizer.load(path, config.model.vocab) if path.exists() else None
    return Run(out, record, config, active, plan, checkpoint, tokenizer)


def _planned(
    record: Mapping[str, Any],
    config: Config,
    specs: Mapping[str, str],
    say: Callable[[str], None],
) -> tuple[tuple[LoadedPlugin, ...], Plan]:
    """The run's plugins and its plan; without those that are not installed and shaped nothing.

    Raises:
        PluginError: a plugin cannot be had, and the record does not show that it shaped nothing.
    """
    named = {name for name, spec in specs.items() if name == spec}
    absent = named - installed_names() if named else named
    here = {name: spec for name, spec in specs.items() if name not in absent}
    active = load_plugins(here, config.plugins)
    try:
        plan = build_plan(config, active)
    except PlanError:
        if absent:  # one that is here may build on one that is not
            load_plugins(specs, config.plugins)  # refuses, and says what to install
        raise
    if absent and not alike(record.get("plan"), plan):
        load_plugins(specs, config.plugins)
    for name in sorted(absent):
        say(
            f"plugin '{name}' is not installed here: it shaped neither the model nor its data nor "
            "its loss, and the run is read without it"
        )
    if not absent and plan.hash != record["plan_hash"]:  # without one of them it is another
        say("warning: the installed versions make another plan of this run than it was trained by")
    return active, plan


def recorded(out: Path | None) -> dict[str, Any] | None:
    """The record of a run that is to go on; None where there is none, and the run starts.

    Raises:
        Refusal: there is one, and it cannot be read.
    """
    return read_record(out) if out is not None and os.path.lexists(out / RUN) else None


def settings_of(out: Path, record: Mapping[str, Any]) -> Layer:
    """What a run that is to go on was told; a tokenizer that was given is taken from its folder.

    Raises:
        Refusal: the record's config is not understood.
    """
    layer = layer_of(record["config"], where=str(out / RUN))
    if "data.tokenizer" in layer.settings and (own := out / TOKENIZER).exists():
        layer.settings["data.tokenizer"] = Setting(str(own), "the run", str(out / RUN))
    return layer


def specs_of(
    record: Mapping[str, Any], config: Config, out: Path, named: Mapping[str, str]
) -> dict[str, str]:
    """What to load for a run: its installed plugins by name, and what is named again.

    Code is run by these names, so a folder of somebody else's must not choose it.

    Raises:
        Refusal: a single-file plugin, or one of an OUT that another account owns, is not named; or
            one is named that the run does not have.
    """
    for name in named:
        if name not in config.plugins:
            raise Refusal(
                f"the run was not trained with a plugin '{name}'",
                where=str(out / RUN),
                fix=f"its plugins are: {', '.join(config.plugins) or 'none'}",
            )
    files = {
        entry.get("name"): entry.get("source")
        for entry in record.get("plugins", ())
        if isinstance(entry, Mapping) and entry.get("distribution") is None
    }
    foreign = hasattr(os, "getuid") and (out / RUN).stat().st_uid != os.getuid()
    for name in config.plugins:
        if name not in named and (foreign or name in files):
            why = "another account owns its folder" if foreign else "it is a single file"
            raise Refusal(
                f"the run's plugin '{name}' must be named again: {why}",
                where=str(out / RUN),
                fix=f"--plugins {name if foreign else files[name]}",
            )
    return {name: named.get(name, name) for name in config.plugins}
