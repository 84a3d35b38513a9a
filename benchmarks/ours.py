"""minillm's plain model, or one with plugins, stepped as in ``minillm train``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from minillm_core.backends.base import Backend, StepResult
from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import choose, probe
from minillm_core.config.load import load as load_config
from minillm_core.data import Documents, Loader
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_core.plugins.manager import load as load_plugins

__all__ = ["Ours", "activated", "attempted", "bound"]

PRESET = "gpt2-124m"
PROGRESS = 0.5  # of the run: schedules have their mid-run values
DOCUMENT = 1024  # tokens


def activated(
    settings: Sequence[str],
    plugins: str = "",
    backend: str = "auto",
    device: str = "auto",
    preset: str = PRESET,
) -> tuple[Plan, Backend, tuple[LoadedPlugin, ...]]:
    """Return the plan of a run with ``key=value`` settings, its bound backend, and its plugins."""
    loaded = load_config(
        preset=preset,
        assignments=tuple(settings),
        plugins=plugins or None,
        default_preset=lambda: (preset, "the benchmark"),
    )
    detected = choose(probe(), backend, device)
    active = load_plugins(loaded.specs, loaded.config.plugins)
    check_support(active, detected.backend, detected.device)
    plan = build_plan(loaded.config, active)
    return plan, create_backend(detected, plan), tuple(active)


def bound(*arguments: Any, **named: Any) -> tuple[Plan, Backend]:
    """Return the first two of :func:`activated`."""
    plan, backend, _ = activated(*arguments, **named)
    return plan, backend


def attempted(text: str) -> tuple[str, str, list[str]]:
    """Split ``LABEL:KEY=VALUE;plugins=A,B`` of --attempt into its label, plugins and settings."""
    label, _, given = text.partition(":")
    named = [one.removeprefix("plugins=") for one in given.split(";") if one.startswith("plugins=")]
    settings = [one for one in given.split(";") if one and not one.startswith("plugins=")]
    return label, ",".join(named), settings


class Ours:
    """A trainer and its dataloader.

    Args:
        plan: the plan to train.
        backend: the backend.
        tokens: (n,), read repeatedly in shuffled documents.
    """

    def __init__(self, plan: Plan, backend: Backend, tokens: np.ndarray) -> None:
        train = plan.config.train
        self.plan, self.backend = plan, backend
        documents = np.array_split(tokens, max(1, len(tokens) // DOCUMENT))
        self.loader = Loader(
            Documents.of(documents, plan.config.model.vocab),
            rows=train.rows,
            accumulate=train.accumulate,
            seq_len=train.seq_len,
            seed=0,
        )
        self.trainer = backend.trainer(plan, 0)
        self.values = plan.values(PROGRESS)
        self.handle: Any = None
        self.result: StepResult | None = None

    @property
    def multiplied(self) -> int:
        """Parameters in products: all matrices, a tied embedding once."""
        return sum(info.size for info in self.plan.parameters.values() if len(info.shape) == 2)

    def step(self) -> None:
        """Make one optimizer step; reads the previous one, as in the training loop."""
        batch = next(self.loader)
        before = self.handle
        self.handle = self.trainer.step(batch.micro, self.values, batch.supervised)
        if before is not None:
            self.result = self.trainer.read(before)

    def read(self) -> float:
        """Return the loss of the last step; synchronises."""
        self.result = self.trainer.read(self.handle)
        return self.result.loss

    def close(self) -> None:
        """End the dataloader's thread."""
        self.loader.close()

    def facts(self) -> dict[str, Any]:
        """Return plan and binding."""
        binding = asdict(self.backend.binding)
        return {
            "of": "minillm",
            "plan": self.plan.hash,
            "plugins": [plugin.name for plugin in self.plan.plugins],
            "kernels": {choice["op"]: choice["kernel"] for choice in binding["kernels"]},
            **{key: binding[key] for key in ("device_name", "dtype", "compile", "notes")},
        }
