"""The errors that minillm raises on purpose, and their exit codes.

MinillmError                 1   a defect: anything unforeseen
├── Refusal                  2   bad input, config or plan; nothing was started
│   ├── ConfigError              a key, a value, a file of settings
│   ├── DataError                text, ids, tokenizer
│   ├── PlanError                slots that conflict, shapes that cannot be built
│   ├── PluginError              a plugin: unknown, other API, misspelt hook, option
│   └── BackendError             no framework, no device, a kernel that cannot serve
├── PluginCodeError          3   a plugin's own code raised
├── NoEvidence               3   no evidence that a named plugin ran
├── NoCheckpoint             4   no checkpoint verifies
├── NonFinite                5   training became non-finite
├── OutOfMemory              6   with the peak, and what to set instead
├── Stopped                 75   a signal, after a checkpoint: resume
└── Interrupted            130   a signal, nothing saved
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable


class MinillmError(Exception):
    """An error with its cause, its place and its fix, in at most twelve lines.

    Args:
        what: one sentence, without a full stop.
        where: the file, line, byte, key or slot concerned.
        fix: the input or change that resolves it.
        line: file and line of the cause in a plugin, if ``where`` is a slot.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        fix: str | None = None,
        line: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.where, self.fix, self.line = what, where, fix, line

    def __str__(self) -> str:
        lines = [self.what]
        if place := ", ".join(filter(None, (self.where, self.line))):
            lines.append(f"  where: {place}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class Refusal(MinillmError):
    """A refusal, before anything was started or written."""

    exit_code = 2


class ConfigError(Refusal):
    """A setting that is unknown, ill-typed or impossible."""


class DataError(Refusal):
    """Text, ids or a tokenizer that cannot be used."""


class PlanError(Refusal):
    """A conflict: the plugins and the model cannot be put together.

    Attributes:
        slots: the slots concerned, by their names in the plan; empty: see ``where``.
        plugins: the plugins concerned, sorted.
    """

    slots: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()

    def concerning(self, *slots: str, plugins: Iterable[str] = ()) -> Self:
        """Attach the slots and the plugins concerned, so that callers need not parse the message."""
        self.slots, self.plugins = slots, tuple(sorted({*plugins}))
        return self


class PluginError(Refusal):
    """A mistake in a plugin that the core finds before it runs any of its code."""


class BackendError(Refusal):
    """A plan that no framework or device can run, or a kernel that cannot serve it."""


class PluginCodeError(MinillmError):
    """An error in a plugin's own code: it raised (``__cause__``), or returned an unusable value.

    Args:
        plugin: the plugin's name.
        hook: the hook or phase: ``build_model``, ``import``.
        kind: ``plugin``, or ``command`` for a command of a distribution.
        did: verb phrase: ``raised in``, ``broke the batch in``.
        offered_by: distribution and version; None: a single file, which ``where`` names.
        where: file, line and the exception.
        fix: the remedy.
    """

    exit_code = 3

    def __init__(
        self,
        plugin: str,
        hook: str,
        *,
        kind: str = "plugin",
        did: str = "raised in",
        offered_by: str | None = None,
        where: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.plugin, self.hook = plugin, hook
        self._kind, self._did, self._offered_by, self._when = kind, did, offered_by, ""
        super().__init__(self._header(), where=where, fix=fix)

    def happened(self, when: str) -> None:
        """Add the time in the run: ``at step 7``."""
        self._when = f", {when}"
        self.what = self._header()

    def offered(self, by: str | None) -> None:
        """Add the distribution and its version, if not yet known."""
        self._offered_by = self._offered_by or by
        self.what = self._header()

    def _header(self) -> str:
        version = f" ({self._offered_by})" if self._offered_by else ""
        return f"{self._kind} '{self.plugin}'{version} {self._did} {self.hook}{self._when}"


class NoEvidence(MinillmError):
    """A missing effect: after ten steps there is no evidence that a named plugin took part."""

    exit_code = 3


class NoCheckpoint(MinillmError):
    """A failed verification of every checkpoint that was written."""

    exit_code = 4


class NonFinite(MinillmError):
    """A loss, or gradients, that became NaN or infinite."""

    exit_code = 5


class OutOfMemory(MinillmError):
    """A lack of memory on the device."""

    exit_code = 6


class Stopped(MinillmError):
    """A stop by a signal, after a checkpoint was committed."""

    exit_code = 75


class Interrupted(MinillmError):
    """An interruption by a signal, with nothing saved."""

    exit_code = 130
