"""The available kernels: the core's and those of installed plugins, with their command-line names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minillm_core import BackendError, Candidate, MinillmError, Request
from minillm_core.commands import few, nearest, plain
from minillm_core.inspection import (
    CONTRACTS,
    DEVICES,
    MLX_KERNELS,
    TORCH_KERNELS,
    Detected,
    InstalledFramework,
    LoadedPlugin,
    attribute_errors,
    choose,
    installed_plugins,
    probe,
)
from minillm_kit.subject import Subject

HOOK = "kernel_provider"
CHOOSING = "while kernels are chosen"
"""When a plugin's code raises, for its error."""


@dataclass(frozen=True)
class Offer:
    """A kernel, and the plugin that --plugins must name for it."""

    candidate: Candidate
    plugin: str | None = None  # as in --plugins; None: a kernel of the core, always available
    loaded: LoadedPlugin | None = field(default=None, compare=False, repr=False)

    @property
    def called(self) -> str:
        """``op=name``, in the form of ``--kernels``."""
        return f"{self.candidate.op}={self.candidate.name}"

    def refusal(self, request: Request) -> str | None:
        """Return why the kernel cannot serve a request; None: it can.

        Raises:
            PluginCodeError: the plugin's own code raised, or returned something else.
        """
        with attribute_errors((self.loaded,) if self.loaded else (), CHOOSING):
            return self.candidate.refusal(request)


@dataclass(frozen=True)
class Offers:
    """All kernels, and the plugins whose kernels could not be listed."""

    kernels: tuple[Offer, ...]
    broken: Mapping[str, str]  # plugin -> the reason

    def of(self, ops: Sequence[str] = (), kernel: str | None = None) -> tuple[Offer, ...]:
        """Return the kernels of some ops, or all; with one name, or all.

        Raises:
            BackendError: an unknown op, or no kernel of that name for it.
        """
        for op in ops:
            if op not in CONTRACTS:
                close = nearest(op, CONTRACTS)
                raise BackendError(
                    f"there is no op '{plain(op)}'",
                    where=f"OP {plain(op)}",
                    fix=f"did you mean {close}?" if close else f"one of {', '.join(CONTRACTS)}",
                )
        found = [one for one in self.kernels if not ops or one.candidate.op in ops]
        names = dict.fromkeys(one.candidate.name for one in found)
        if kernel is not None and kernel not in names:
            close = nearest(kernel, names)
            raise BackendError(
                f"no kernel '{plain(kernel)}' for {few(ops) if ops else 'any op'}",
                where=f"--kernel {plain(kernel)}",
                fix=(f"did you mean {close}? " if close else "")
                + f"one of {', '.join(names)}; a kernel of a file is there once "
                "--plugins ./file.py:Class names it",
            )
        return tuple(one for one in found if kernel in (None, one.candidate.name))


def offers(named: Sequence[str] = ()) -> Offers:
    """Collect the kernels of the core, of the plugins named, and of all that are installed.

    An installed plugin is imported only if its source mentions the hook; a kernel's module is imported
    at its first call.

    Args:
        named: plugins, as ``--plugins`` takes them: names, and files with a class.

    Raises:
        MinillmError: a named plugin cannot be used.
    """
    found = [Offer(one) for one in (*TORCH_KERNELS, *MLX_KERNELS)]
    for spec in named:
        found += _offered(spec)
    broken: dict[str, str] = {}
    for name in _providers():
        if name not in named:
            try:
                found += _offered(name)
            except MinillmError as error:
                broken[name] = error.what
    order = list(CONTRACTS)
    found.sort(key=lambda one: order.index(one.candidate.op) if one.candidate.op in order else 99)
    return Offers(tuple(found), broken)


def _offered(spec: str) -> Iterator[Offer]:
    subject = Subject(spec)
    for owner, candidate in subject.plan().candidates:
        if owner == subject.name:
            yield Offer(candidate, spec, subject.loaded)


def _providers() -> Iterator[str]:
    for entry in installed_plugins():
        if entry.file and not entry.broken:
            try:
                source = Path(entry.file).read_bytes()
            except OSError:
                continue
            if HOOK.encode() in source:
                yield entry.name


def places(backend: str | None, device: str | None) -> tuple[Detected, ...]:
    """Return the backends to use, each with its device.

    Args:
        backend: a single one; None or "auto": all installed ones that have the device.
        device: in the form of ``--device``; None or "auto": the best of each backend.

    Raises:
        BackendError: no backend is installed, or the device is unknown.
    """
    machine, wanted = probe(), device or "auto"
    if backend is not None and backend != "auto":
        return (choose(machine, backend, wanted),)
    kind = wanted.partition(":")[0]
    found = []
    for name, kinds in DEVICES.items():
        framework: InstalledFramework | None = getattr(machine, name)
        if framework and not framework.broken and kind in ("auto", *kinds):
            found.append(choose(machine, name, wanted))
    return tuple(found) or (choose(machine, "auto", wanted),)
