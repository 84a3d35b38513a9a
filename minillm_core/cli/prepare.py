"""The step before every run or plan: flags -> config -> backend and device -> plugins.

Nothing is printed and nothing is written here; whatever is wrong is raised.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm_core.errors import BackendError, Refusal

if TYPE_CHECKING:
    from minillm_core.backends.detect import Detected
    from minillm_core.config.load import Loaded
    from minillm_core.plugins.manager import LoadedPlugin

__all__ = ["Asked", "Prepared", "prepare"]


@dataclass(frozen=True)
class Asked:
    """The command line of a run."""

    plugins: str | None = None
    preset: str | None = None
    file: Path | None = None
    assignments: Sequence[str] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)  # "--steps" -> value, None: not given
    resume: Path | None = None  # the folder of the run that is to go on

    @classmethod
    def of(
        cls,
        *,
        plugins: str | None,
        preset: str | None,
        file: Path | None,
        assignments: Sequence[str] | None,
        data: Sequence[str] | None,
        steps: int | None = None,
        seed: int | None,
        backend: str | None,
        device: str | None,
        deterministic: bool = False,
        kernels: str | None,
        init: Path | None = None,
        resume: bool = False,
        out: Path | None = None,
    ) -> Asked:
        """The command line as typer parsed it.

        Raises:
            Refusal: ``--resume`` without ``--out``.
        """
        if resume and out is None:
            raise Refusal(
                "--resume does not say which run",
                where="--resume",
                fix="--resume --out with the folder of the run, such as runs/tiny-1",
            )
        flags = {
            "--data": list(data) if data else None,
            "--steps": steps,
            "--seed": seed,
            "--backend": backend,
            "--device": device,
            "--deterministic": deterministic or None,
            "--kernels": kernels,
            "--init": str(init) if init else None,
        }
        going_on = out if resume else None
        return cls(plugins, preset, file, tuple(assignments or ()), flags, going_on)

    def with_plugins(self, plugins: str) -> Asked:
        """The same, with another set of plugins."""
        return replace(self, plugins=plugins)


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before the plan is built."""

    loaded: Loaded
    plugins: tuple[LoadedPlugin, ...]
    detected: Detected | None  # None: nothing is installed that could train, which a plan bears


def prepare(asked: Asked, *, to_run: bool) -> Prepared:
    """Load the settings, find the backend, import the plugins that are named.

    Args:
        asked: the command line.
        to_run: a backend must be there; else only one that is asked for by name.

    Raises:
        ConfigError: a setting cannot be used.
        BackendError: a backend or device cannot be had.
        PluginError: a plugin is unknown or broken, or does not run here.
        PluginCodeError: a plugin's own code raised.
    """
    from minillm_core.backends.detect import choose, default_preset, probe
    from minillm_core.config.load import given, load
    from minillm_core.config.selection import added
    from minillm_core.plugins.manager import check_support
    from minillm_core.plugins.manager import load as load_plugins
    from minillm_core.train.initial import initial_layer
    from minillm_core.train.restore import recorded, settings_of, specs_of

    machine = probe()
    settings = {"file": asked.file, "assignments": asked.assignments, "flags": asked.flags}

    def preset_here() -> tuple[str, str]:
        backend, device = (str(given(key, **settings) or "auto") for key in ("backend", "device"))
        return default_preset(machine, backend, device)

    record = recorded(asked.resume)
    loaded = load(
        preset=asked.preset,
        plugins=asked.plugins,
        recorded=settings_of(asked.resume, record) if record and asked.resume else None,
        initial=None if record else initial_layer(given("init", **settings)),
        default_preset=preset_here,
        **settings,
    )
    config = loaded.config
    specs = loaded.specs
    if record and asked.resume:
        specs = specs_of(record, config, asked.resume, added(asked.plugins))
    by_name = config.backend != "auto" or config.device != "auto"
    try:
        detected = choose(machine, config.backend, config.device)
    except BackendError:
        if to_run or by_name:
            raise
        detected = None
    with redirect_stdout(sys.stderr):  # stdout is the command's, whatever a module prints
        plugins = load_plugins(specs, config.plugins)
    if detected:
        check_support(plugins, detected.backend, detected.device)
    return Prepared(loaded, plugins, detected)
