"""The subject of a check: a plugin with its options, in a small model, on the installed backends."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from minillm_core import Param, Plan, PlanError, build_plan, load
from minillm_core.commands import pip_line
from minillm_core.inspection import (
    ALONE,
    DEVICES,
    FoundPlugin,
    LoadedPlugin,
    Member,
    Ranks,
    batch_hook,
    declared,
    find_plugin,
    generator,
    groups_of,
    installed_plugins,
    plugin_name,
    probe,
    trainer,
    with_options,
)
from minillm_kit.check import NotApplicable
from minillm_kit.probe import ask

if TYPE_CHECKING:
    from minillm_core.inspection import Config, Trainer

Batch = dict[str, np.ndarray]

T = TypeVar("T")

PAIRS = 5
"""Default number of other plugins to pair a plugin with."""

SMALL: Mapping[str, Any] = {
    **{"model.layers": 2, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2},
    **{"model.hidden": 48, "model.vocab": 97, "model.tied": False},
    **{"train.rows": 3, "train.seq_len": 13, "train.steps": 20, "train.lr": 1e-3},
    **{"train.compile": "off", "train.clip": 0.0},
}
"""The structure of preset tiny, with odd lengths; a step takes milliseconds on every framework."""

ODD: Mapping[str, Any] = {
    **{"model_layers": 3, "model_dim": 30, "model_heads": 3, "model_kv_heads": 1},
    **{"model_hidden": 35, "model_vocab": 61, "model_tied": True},
    **{"train_rows": 1, "train_seq_len": 7},
}
"""Settings without a power of two, with a shared key-value head and a tied embedding."""

STIR = np.float32(0.1)
"""Standard deviation of the perturbation of weights."""

PIECES = (
    *(b" ", b"\n", b"", b" the", b".", b"7", b"A", b"\xc3", b"\n\n", b"  ", b"ing", b" The"),
    *(b",", b"42", b"\t", b" \xe2\x80", b'"', b" I", b"(", b"://", b" = ", b"\xa9", b"e", b"_id"),
)
"""Bytes of tokens as in text: blanks, line ends, words, capitals, digits, parts of characters; empty: special."""

RULE = re.compile(r"(?:opt\.(?:extend|assign|split)\(|.*, as of )(\w+)")
"""Matches a slot that requires a missing rule, table or frequencies."""


def settings(**changed: Any) -> Config:
    """Load the small model's config; ``train_dtype="bfloat16"`` is the setting ``train.dtype``."""
    given = {key.replace("_", ".", 1): value for key, value in changed.items()}
    return load(preset="tiny", settings={**SMALL, **given}).config


def rows(config: Config, steps: int) -> list[Batch]:
    """Draw batches with a learnable (skewed) distribution of ids; row r lacks 2 r labels."""
    rng, shape, found = np.random.default_rng(0), (config.train.rows, config.train.seq_len), []
    for _ in range(steps):
        ids = (config.model.vocab * rng.random((shape[0], shape[1] + 1)) ** 3).astype(np.int32)
        labels = ids[:, 1:].copy()
        for row in range(shape[0]):
            labels[row, : 2 * row] = -1
        found.append(
            {
                "ids": ids[:, :-1].copy(),
                "labels": labels,
                "documents": np.zeros(shape, np.int32),
                "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
            }
        )
    return found


def sourced(plan: Plan, batch: Batch) -> Batch:
    """Return a batch with values for the fields of the plan's source: 0 or 1, or from 0 to 1 if they are floats.

    ``weights`` is left out: all tokens count.
    """
    rng, shape, found = np.random.default_rng(0), batch["ids"].shape, dict(batch)
    for field in plan.sourcing.batch_fields:
        drawn = rng.random((*shape, *field.shape))
        whole = np.issubdtype(field.dtype, np.integer)
        found.setdefault(field.name, (2 * drawn if whole else drawn).astype(field.dtype))
    return found


class StandIn:
    """A reference model of the small model's sizes, which stands in for a missing run."""

    identity: Mapping[str, Any] = {"weights": "a stand-in"}

    def __init__(self, path: str, config: Config) -> None:
        self.path, self.plan = path, build_plan(config)

    @cached_property
    def model(self) -> Any:
        """The model in NumPy float64; its weights have another seed than the checked model's."""
        from minillm_kit.oracle import materialise

        return materialise(self.plan, 1)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the weights, float32, by their names in a checkpoint."""
        return {
            f"model.{name}": np.float32(getattr(module, attribute))
            for name, module, attribute, _ in declared(self.model, Param)
        }


def with_stand_ins(plan: Plan, config: Config) -> Plan:
    """Return a plan whose reference models are plain models of its sizes with another seed."""
    found = (replace(one, model=StandIn(one.model.path, config)) for one in plan.references)
    return replace(plan, references=tuple(found))


def first_row(batch: Batch) -> Batch:
    """Return the first row of a batch, as a batch."""
    return {name: array[:1] for name, array in batch.items()}


def supervised(micro: Sequence[Batch]) -> int:
    """Count the labels >= 0 in all micro-batches."""
    return sum(int((one["labels"] >= 0).sum()) for one in micro)


def moved(name: str, value: np.ndarray) -> np.ndarray:
    """Perturb a parameter from its initial value, float32, so that zeros have an effect."""
    noise = generator(5, name).standard_normal(value.shape, np.float32)
    return value.astype(np.float32) + STIR * noise


def traced_trainer(plan: Plan, backend: str, ranks: Ranks = ALONE) -> Trainer:
    """Build a plan's trainer on a CPU with seed 0; torch traces its steps without code generation."""
    compiler = None
    if backend == "torch":
        from minillm_kit.on_torch import traced

        compiler = traced()
    return trainer(plan, backend, compiler=compiler, ranks=ranks)


class Subject:
    """A plugin to check.

    Args:
        spec: its name, or a file and its class: ``./my_trick.py:MyTrick``.
        options: its options if not the defaults.
        backend: ``torch``, ``mlx``, or ``both``.
        pairs: number of other plugins to pair it with; None: all.
        beside: plugins in every plan; None: those that provide the rules it extends.
        partners: plugins to pair it with, in the form of ``--plugins``; None: all installed.
    """

    def __init__(
        self,
        spec: str,
        options: Mapping[str, Any] | None = None,
        *,
        backend: str = "both",
        pairs: int | None = PAIRS,
        beside: Sequence[str] | None = None,
        partners: Sequence[str] | None = None,
    ) -> None:
        self.spec, self.options, self.pairs = spec, dict(options or {}), pairs
        self.name = plugin_name(spec)
        self._beside, self._partners = beside, partners
        self.asked = tuple(DEVICES) if backend == "both" else (backend,)
        self.plan = cache(self.planned)
        self.first_gradients = cache(self._first_gradients)
        self._measured: dict[Any, Any] = {}
        self.ask = cache(partial(ask, environment=dict(os.environ)))  # as before it was loaded

    @cached_property
    def found(self) -> FoundPlugin:
        """The plugin's class, imported."""
        return find_plugin(self.spec)

    @cached_property
    def loaded(self) -> LoadedPlugin:
        """The plugin with its options."""
        return with_options(self.found, self.options)

    @cached_property
    def absent(self) -> dict[str, str]:
        """Requested backend -> the reason why it is not checked."""
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
        """The backends to check on.

        Raises:
            NotApplicable: no backend is available.
        """
        if (kinds := self.found.cls.manifest.devices) and "cpu" not in kinds:
            raise NotApplicable(f"the plugin runs on {', '.join(kinds)} alone, this is a CPU")
        able = tuple(name for name in self.asked if name not in self.absent)
        if not able:
            raise NotApplicable("; ".join(self.absent.values()))
        return able

    @property
    def on_numpy(self) -> bool:
        """Whether the oracle can run the plugin."""
        return "numpy" in self.found.cls.manifest.backends

    @cached_property
    def companions(self) -> tuple[LoadedPlugin, ...]:
        """Plugins that it requires; they are in every plan, including the one without it."""
        if self._beside is not None:
            found = (find_plugin(spec, where="beside") for spec in self._beside)
            return tuple(with_options(one, {}) for one in found)
        names = built_on(self.loaded) if self.options else _built_on_by_default(self.found)
        return tuple(with_options(find_plugin(name), {}) for name in names)

    def with_companions(self, other: Subject) -> tuple[LoadedPlugin, ...]:
        """Return another plugin with its requirements, except this subject's companions."""
        there = {self.name, *(one.name for one in self.companions)}
        below = [one for one in other.companions if one.name not in there]
        return (other.loaded, *below)

    def probed(self, question: str, *more: str) -> dict[str, Any]:
        """Observe the plugin's effects on a fresh process; see :mod:`minillm_kit.probe`."""
        return self.ask(question, self.spec, self.described, *more)

    @property
    def described(self) -> str:
        """The other arguments that recreate the subject in another process, as JSON."""
        beside = [one.name for one in self.companions] if self._beside is None else self._beside
        return json.dumps({"options": self.options, "beside": list(beside)})

    def once(self, measure: Callable[[Subject, str], T], backend: str) -> T:
        """Return ``measure(subject, backend)``, which the first check that needs it computes."""
        if (measure, backend) not in self._measured:
            self._measured[measure, backend] = measure(self, backend)
        return self._measured[measure, backend]

    def partners(self) -> list[str]:
        """List the plugins that it can be paired with, in the form of ``--plugins``."""
        mine = {self.name, *(one.name for one in self.companions)}
        installed = {one.name for one in installed_plugins()}
        return sorted(installed - mine) if self._partners is None else [*self._partners]

    def planned(self, *others: LoadedPlugin, without: bool = False, **changed: Any) -> Plan:
        """Plan the small model with it, other plugins and other settings; ``plan`` caches."""
        plugins, config = (*self.companions, *others), settings(**changed)
        plan = build_plan(config, plugins if without else (self.loaded, *plugins))
        return with_stand_ins(plan, config)

    def trainer(self, plan: Plan, backend: str, *, stirred: bool = False) -> Trainer:
        """Build the plan's trainer on a CPU with seed 0; ``stirred``: with every parameter :func:`moved`."""
        run = traced_trainer(plan, backend)
        if stirred:
            arrays = run.arrays()
            for name in plan.parameters:
                arrays[f"model.{name}"] = moved(name, arrays[f"model.{name}"])
            run.load(arrays)
        return run

    def batches(
        self, plan: Plan, steps: int, *others: LoadedPlugin, phase: str = "train"
    ) -> list[Batch]:
        """Build :func:`rows` processed by ``on_batch``.

        Args:
            plan: sets the sizes, and the order of ``on_batch`` calls.
            steps: number of batches.
            others: plugins of the plan beside this one.
            phase: "train", "eval" or "decode".
        """
        found = rows(plan.config, steps)
        return [self.hooked(plan, batch, *others, phase=phase) for batch in found]

    def hooked(
        self, plan: Plan, batch: Batch, *others: LoadedPlugin, phase: str = "train"
    ) -> Batch:
        """Return a batch with the fields of the plan's source, processed by a run's first ``on_batch``."""
        batch = batch if phase == "decode" else sourced(plan, batch)  # decoding has no source
        hook = batch_hook(plan, (self.loaded, *self.companions, *others), pieces=spelt(plan))
        return hook({**batch}, phase) if hook else batch

    def train(
        self, run: Trainer, plan: Plan, batches: Sequence[Batch], *, first: int = 0
    ) -> list[float]:
        """Train along the plan's schedule; return every loss, NaN where the update was not finite."""
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
        """Return (loss, parameter -> float64 gradient, state) of a step from ``weights``, by default stirred ones.

        Derived from AdamW's first moments after the step, so that they are the gradients that reach an
        optimizer, whatever optimizer the plugin has.
        """
        rule = _plain_rule()
        members = (Member(name, p.shape, 1.0, 1.0) for name, p in plan.parameters.items())
        plan = replace(plan, groups=groups_of({one.name: (rule, one) for one in members}))
        run = self.trainer(plan, backend, stirred=True)
        if weights is not None:
            run.load(weights)
        (loss,) = self.train(run, plan, [batch])
        arrays, share = run.arrays(), 1 - plan.config.train.betas[0]
        moments = after("optimizer.precondition.m.", arrays)
        grads = {name: value.astype(np.float64) / share for name, value in moments.items()}
        return loss, grads, states(arrays)

    def _first_gradients(
        self, backend: str, **changed: Any
    ) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return :meth:`gradients` of the first batch under other settings; ``first_gradients`` caches."""
        (batch,) = self.batches(self.plan(), 1)
        return self.gradients(self.plan(**changed), backend, batch)


@cache
def _plain_rule() -> Any:
    """Return the rule of the core's optimizer."""
    return build_plan(settings()).groups[0].rule


@cache
def _built_on_by_default(found: FoundPlugin) -> tuple[str, ...]:
    """Return :func:`built_on` of a plugin with its default options, cached for all pairs."""
    return built_on(with_options(found, {}))


def built_on(plugin: LoadedPlugin) -> tuple[str, ...]:
    """Return the installed plugins that provide what a plugin extends, in dependency order."""
    held: tuple[LoadedPlugin, ...] = ()
    while name := _missing(plugin, held):
        held = (*held, with_options(find_plugin(name), {}))
    return tuple(one.name for one in held)


def _missing(plugin: LoadedPlugin, held: tuple[LoadedPlugin, ...]) -> str | None:
    """Return the installed plugin that provides a rule missing in the plan; None: none found."""
    try:
        build_plan(settings(), (plugin, *held))
    except PlanError as error:
        missing = RULE.match(error.where or "")
        there = {plugin.name, *(one.name for one in held)}
        if missing and missing[1] not in there and installed_plugins(only=missing[1]):
            return missing[1]
    return None


def after(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose names start with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


def states(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the modules' state among a trainer's arrays, by full names."""
    return {name: array for name, array in arrays.items() if name.startswith("state.")}


def spelt(plan: Plan) -> tuple[bytes, ...]:
    """Return stand-ins for the bytes of token ids: base-3 numbers, with the first id special."""
    return (b"", *(np.base_repr(index, 3).encode() for index in range(1, plan.config.model.vocab)))


def as_in_text(plan: Plan) -> tuple[bytes, ...]:
    """Return stand-ins of which the most frequent are :data:`PIECES`, and the others :func:`spelt`."""
    return (*PIECES, *spelt(plan))[: plan.config.model.vocab]
