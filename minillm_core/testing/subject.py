"""What is checked: a plugin with its options, in the small model, on the backends that there are."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from minillm_core.backends.base import Trainer
from minillm_core.backends.detect import DEVICES, Detected, probe
from minillm_core.backends.traced import create_traced
from minillm_core.config.selection import name_of
from minillm_core.errors import PlanError
from minillm_core.install import pip_line
from minillm_core.optim.groups import Member, groups_of
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.discover import installed_names
from minillm_core.plugins.find import FoundPlugin, find
from minillm_core.plugins.manager import LoadedPlugin, with_options
from minillm_core.plugins.streams import Streams
from minillm_core.testing.check import NotApplicable
from minillm_core.testing.processes import ask
from minillm_core.testing.small import Batch, moved, rows, settings, supervised
from minillm_core.train.hooks import batch_hook

__all__ = ["Batch", "Subject", "moved", "supervised"]

RULE = re.compile(r"opt\.(?:extend|assign)\((\w+)")
"""Where a plugin builds on a rule that is not there."""


class Subject:
    """A plugin to check.

    Args:
        spec: its name, or a file and its class: ``./my_trick.py:MyTrick``.
        options: its options where not the defaults.
        backend: ``torch``, ``mlx``, or ``both``.
        pairs: how many other plugins it is paired with; None: all.
        beside: plugins that are in every plan; None: those that provide the rules it extends.
        partners: those that it is paired with, as ``--plugins`` takes them; None: the installed.
    """

    def __init__(
        self,
        spec: str,
        options: Mapping[str, Any] | None = None,
        *,
        backend: str = "both",
        pairs: int | None = 5,
        beside: Sequence[str] | None = None,
        partners: Sequence[str] | None = None,
    ) -> None:
        self.spec, self.options, self.pairs = spec, dict(options or {}), pairs
        self.name = name_of(spec, where="plugin")
        self._beside, self._partners = beside, partners
        self.asked = tuple(DEVICES) if backend == "both" else (backend,)
        self.plan = cache(self.planned)
        self.ask = cache(partial(ask, environment=dict(os.environ)))  # as before it was loaded

    @cached_property
    def found(self) -> FoundPlugin:
        """Its class, imported."""
        return find(self.spec)

    @cached_property
    def loaded(self) -> LoadedPlugin:
        """The plugin with its options."""
        return with_options(self.found, self.options)

    @cached_property
    def absent(self) -> dict[str, str]:
        """Backend that was asked for -> why nothing is checked on it."""
        machine, reasons = probe(), {}
        for name in self.asked:
            framework = getattr(machine, name)
            if name not in self.found.cls.manifest.backends:
                reasons[name] = f"the plugin does not support {name}"
            elif framework is None or framework.broken:
                line = pip_line(f"minillm-core[{name}]")
                reasons[name] = f"{name} is not installed: {line}"
        return reasons

    @property
    def backends(self) -> tuple[str, ...]:
        """Those that it can be checked on.

        Raises:
            NotApplicable: there is none.
        """
        if (kinds := self.found.cls.manifest.devices) and "cpu" not in kinds:
            raise NotApplicable(f"the plugin runs on {', '.join(kinds)} alone, this is a CPU")
        able = tuple(name for name in self.asked if name not in self.absent)
        if not able:
            raise NotApplicable("; ".join(self.absent.values()))
        return able

    @property
    def why_alone(self) -> str:
        """Why there are not two backends to compare."""
        return "; ".join(self.absent.values()) or "no other was asked for"

    @cached_property
    def companions(self) -> tuple[LoadedPlugin, ...]:
        """Plugins that it builds on: they are in every plan, that without it included."""
        if self._beside is not None:
            return tuple(with_options(find(spec), {}) for spec in self._beside)
        held: tuple[LoadedPlugin, ...] = ()
        while True:
            try:
                build_plan(settings(), (self.loaded, *held))
            except PlanError as error:
                wanted = RULE.match(error.where or "")
                names = {self.name, *(one.name for one in held)}
                if wanted is None or wanted[1] in names or wanted[1] not in installed_names():
                    return held
                held = (*held, with_options(find(wanted[1]), {}))
            else:
                return held

    def probed(self, question: str, *more: str) -> dict[str, Any]:
        """What the plugin does to a fresh process; see :mod:`minillm_core.testing.probe`."""
        beside = [one.name for one in self.companions] if self._beside is None else self._beside
        given = {"options": self.options, "beside": list(beside)}
        return self.ask(question, self.spec, json.dumps(given), *more)

    def partners(self) -> list[str]:
        """Plugins that it can be paired with, as ``--plugins`` takes them."""
        mine = {self.name, *(one.name for one in self.companions)}
        return sorted(installed_names() - mine) if self._partners is None else [*self._partners]

    def planned(self, *others: LoadedPlugin, without: bool = False, **changed: Any) -> Plan:
        """The small model with the plugin, other plugins and other settings; ``plan`` makes each once."""
        plugins = (*self.companions, *others)
        return build_plan(settings(**changed), plugins if without else (self.loaded, *plugins))

    def trainer(self, plan: Plan, backend: str) -> Trainer:
        """The plan on a CPU, with seed 0."""
        return create_traced(Detected(backend, "cpu", "the contract kit"), plan).trainer(plan, 0)

    def stirred(self, plan: Plan, backend: str) -> Trainer:
        """The same with every parameter :func:`moved`."""
        run = self.trainer(plan, backend)
        arrays = run.arrays()
        for name in plan.parameters:
            arrays[f"model.{name}"] = moved(name, arrays[f"model.{name}"])
        run.load(arrays)
        return run

    def batches(
        self, plan: Plan, steps: int, *others: LoadedPlugin, phase: str = "train"
    ) -> list[Batch]:
        """Rows that can be learnt a little, as ``on_batch`` leaves them; row r lacks 2 r labels.

        Args:
            plan: says the sizes, and in which order ``on_batch`` are called.
            steps: how many.
            others: plugins of the plan beside this one.
            phase: "train", "eval" or "decode".
        """
        found = rows(plan.config, steps)
        return [self.hooked(plan, batch, *others, phase=phase) for batch in found]

    def hooked(
        self, plan: Plan, batch: Batch, *others: LoadedPlugin, phase: str = "train"
    ) -> Batch:
        """A batch as a run's first ``on_batch`` leaves it."""
        plugins = (self.loaded, *self.companions, *others)
        vocab = plan.config.model.vocab
        hook = batch_hook(plan.on_batch, plugins, Counter(), vocab, Streams(0))
        return hook({**batch}, phase) if hook else batch

    def train(
        self, run: Trainer, plan: Plan, batches: Sequence[Batch], *, first: int = 0
    ) -> list[float]:
        """Every step's loss, along the plan's schedule; NaN where the update was not finite."""
        total, losses = plan.config.train.steps or 1, []
        for index, batch in enumerate(batches, first + 1):
            handle = run.step([batch], plan.values(index / total), supervised([batch]))
            result = run.read(handle)
            losses.append(float("nan") if result.skipped else result.loss)
        return losses

    def gradients(
        self,
        plan: Plan,
        backend: str,
        batch: Batch,
        *,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """(loss, parameter -> float64 gradient, state) of a step from ``weights``, by default the stirred.

        Taken from the first moments that AdamW leaves of it: so they are what reaches an
        optimizer, whatever optimizer the plugin brings.
        """
        rule = build_plan(settings()).groups[0].rule
        members = (Member(name, p.shape, 1.0, 1.0) for name, p in plan.parameters.items())
        plan = replace(plan, groups=groups_of({one.name: (rule, one) for one in members}))
        run = self.stirred(plan, backend)
        if weights is not None:
            run.load(weights)
        (loss,) = self.train(run, plan, [batch])
        arrays, share = run.arrays(), 1 - plan.config.train.betas[0]
        prefix = "optimizer.precondition.m."
        grads = {
            key.removeprefix(prefix): value.astype(np.float64) / share
            for key, value in arrays.items()
            if key.startswith(prefix)
        }
        return loss, grads, {k: v for k, v in arrays.items() if k.startswith("state.")}
