"""What is checked: a plugin, its options, the backends, and a small odd model around it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from minillm_core.backends.base import Trainer
from minillm_core.backends.detect import DEVICES, Detected, probe
from minillm_core.backends.traced import create_traced
from minillm_core.config.load import load
from minillm_core.config.schema import Config
from minillm_core.config.selection import name_of
from minillm_core.optim.groups import Member, groups_of
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.find import FoundPlugin, find
from minillm_core.plugins.manager import LoadedPlugin, with_options
from minillm_core.plugins.streams import Streams
from minillm_core.testing.check import NotApplicable
from minillm_core.testing.processes import ask
from minillm_core.train.hooks import batch_hook

__all__ = ["Batch", "Subject", "settings", "supervised"]

Batch = dict[str, np.ndarray]

SMALL: Mapping[str, Any] = {
    **{"model.layers": 2, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2},
    **{"model.hidden": 48, "model.vocab": 97, "model.tied": False},
    **{"train.rows": 3, "train.seq_len": 13, "train.steps": 20, "train.lr": 1e-3},
    **{"train.compile": "off", "train.clip": 0.0},
}
"""The structure of preset tiny; every framework steps it in milliseconds. Lengths are odd."""


def settings(**changed: Any) -> Config:
    """The small model's config; ``train_dtype="bfloat16"`` is the setting ``train.dtype``."""
    given = {**SMALL, **{key.replace("_", ".", 1): value for key, value in changed.items()}}
    return load(
        preset="tiny",
        assignments=[f"{key}={str(value).lower()}" for key, value in given.items()],
        default_preset=lambda: ("tiny", "the contract kit"),
    ).config


def supervised(micro: Sequence[Batch]) -> int:
    """Labels >= 0 in all of them."""
    return sum(int((one["labels"] >= 0).sum()) for one in micro)


class Subject:
    """A plugin to check.

    Args:
        spec: its name, or a file and its class: ``./my_trick.py:MyTrick``.
        options: its options where not the defaults.
        backend: ``torch``, ``mlx``, or ``both``.
        pairs: how many other plugins it is paired with; None: all.
    """

    def __init__(
        self,
        spec: str,
        options: Mapping[str, Any] | None = None,
        *,
        backend: str = "both",
        pairs: int | None = 5,
    ) -> None:
        self.spec, self.options, self.pairs = spec, dict(options or {}), pairs
        self.name = name_of(spec, where="plugin")
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
                reasons[name] = f"{name} is not installed: pip install 'minillm-core[{name}]'"
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

    def planned(self, *others: LoadedPlugin, without: bool = False, **changed: Any) -> Plan:
        """The small model with the plugin, other plugins and other settings; ``plan`` makes each once."""
        plugins = others if without else (self.loaded, *others)
        return build_plan(settings(**changed), plugins)

    def trainer(self, plan: Plan, backend: str) -> Trainer:
        """The plan on a CPU, with seed 0."""
        return create_traced(Detected(backend, "cpu", "the contract kit"), plan).trainer(plan, 0)

    def stirred(self, plan: Plan, backend: str) -> Trainer:
        """The same with every parameter moved: what starts at 0 takes part."""
        run, rng = self.trainer(plan, backend), np.random.default_rng(5)
        arrays = run.arrays()
        for name in sorted(plan.parameters):
            value = arrays[f"model.{name}"]
            arrays[f"model.{name}"] = value + np.float32(0.1) * rng.standard_normal(
                value.shape, np.float32
            )
        run.load(arrays)
        return run

    def batches(self, plan: Plan, steps: int, *others: LoadedPlugin) -> list[Batch]:
        """Rows that can be learnt a little, as ``on_batch`` leaves them; row r lacks 2 r labels."""
        config = plan.config
        hook = batch_hook(
            plan.on_batch, (self.loaded, *others), Counter(), config.model.vocab, Streams(0)
        )
        rng, shape = np.random.default_rng(0), (config.train.rows, config.train.seq_len)
        found = []
        for _ in range(steps):
            ids = (config.model.vocab * rng.random((shape[0], shape[1] + 1)) ** 3).astype(np.int32)
            labels = ids[:, 1:].copy()
            for row in range(shape[0]):
                labels[row, : 2 * row] = -1
            batch = {
                "ids": ids[:, :-1].copy(),
                "labels": labels,
                "documents": np.zeros(shape, np.int32),
                "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
            }
            found.append(hook(batch, "train") if hook else batch)
        return found

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
        self, plan: Plan, backend: str, batch: Batch
    ) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """(loss, parameter -> float64 gradient, state) of a first step.

        Taken from the first moments that AdamW leaves of it: so they are what reaches an
        optimizer, whatever optimizer the plugin brings.
        """
        rule = self.plan(without=True).groups[0].rule
        members = (Member(name, p.shape, 1.0, 1.0) for name, p in plan.parameters.items())
        plan = replace(plan, groups=groups_of({one.name: (rule, one) for one in members}))
        run = self.trainer(plan, backend)
        (loss,) = self.train(run, plan, [batch])
        arrays, share = run.arrays(), 1 - plan.config.train.betas[0]
        prefix = "optimizer.precondition.m."
        grads = {
            key.removeprefix(prefix): value.astype(np.float64) / share
            for key, value in arrays.items()
            if key.startswith(prefix)
        }
        return loss, grads, {k: v for k, v in arrays.items() if k.startswith("state.")}
