"""Every error that minillm raises on purpose, and the exit code each one ends the program with.

MinillmError                 1   a defect: anything that nobody foresaw
├── Refusal                  2   bad input, config or plan; nothing was started
│   ├── ConfigError              a key, a value, a file of settings
│   ├── DataError                text, ids, tokenizer
│   ├── PlanError                slots that clash, shapes that cannot be built
│   ├── PluginError              what the core says about a plugin: unknown, other API, misspelt hook, option
│   └── BackendError             no framework, no device, a kernel that cannot serve
├── PluginCodeError          3   a plugin's own code raised
├── NoEvidence               3   a plugin was named and nothing shows that it ran
├── NoCheckpoint             4   no checkpoint verifies
├── NonFinite                5   training became non-finite
├── OutOfMemory              6   with the peak, and what to set instead
├── Stopped                 75   a signal, after a checkpoint: resume
└── Interrupted            130   a signal, nothing saved
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "ConfigError",
    "DataError",
    "Interrupted",
    "MinillmError",
    "NoCheckpoint",
    "NoEvidence",
    "NonFinite",
    "OutOfMemory",
    "PlanError",
    "PluginCodeError",
    "PluginError",
    "Refusal",
    "Stopped",
]


class MinillmError(Exception):
    """What happened, where, and what to do about it; printed as at most twelve lines.

    Args:
        what: one sentence, no full stop needed.
        where: the file, line, byte, key or slot concerned.
        fix: what to type or change instead.
        line: file and line in a plugin that led to it, where ``where`` is a slot.
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
    """Refused before anything was started or written."""

    exit_code = 2


class ConfigError(Refusal):
    """A setting is unknown, ill-typed or impossible."""


class DataError(Refusal):
    """The text, the ids or the tokenizer cannot be used."""


class PlanError(Refusal):
    """The plugins and the model cannot be put together."""


class PluginError(Refusal):
    """What the core has to say about a plugin before it runs any of its code."""


class BackendError(Refusal):
    """No framework or device can run the plan, or a kernel cannot serve it."""


class PluginCodeError(MinillmError):
    """A plugin's own code raised, or gave what cannot be used; ``__cause__`` is what was raised.

    Args:
        plugin: its name.
        hook: what was running: ``build_model``, ``import``.
        did: ``raised in``, ``broke the batch in``.
        offered_by: distribution and version; None: a single file, which ``where`` names.
        where: file, line and what was raised.
        fix: what to do.
    """

    exit_code = 3

    def __init__(
        self,
        plugin: str,
        hook: str,
        *,
        did: str = "raised in",
        offered_by: str | None = None,
        where: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.plugin, self.hook = plugin, hook
        self._did, self._offered_by, self._when = did, offered_by, ""
        super().__init__(self._said(), where=where, fix=fix)

    def happened(self, when: str) -> None:
        """Say when in the run it was: ``at step 7``."""
        self._when = f", {when}"
        self.what = self._said()

    def offered(self, by: str | None) -> None:
        """Say of which distribution and version, where that was not known."""
        self._offered_by = self._offered_by or by
        self.what = self._said()

    def _said(self) -> str:
        version = f" ({self._offered_by})" if self._offered_by else ""
        return f"plugin '{self.plugin}'{version} {self._did} {self.hook}{self._when}"


class NoEvidence(MinillmError):
    """A plugin was named, and after ten steps nothing shows that it took part."""

    exit_code = 3


class NoCheckpoint(MinillmError):
    """Checkpoints were written, and none of them verifies."""

    exit_code = 4


class NonFinite(MinillmError):
    """The loss or the gradients stopped being numbers."""

    exit_code = 5


class OutOfMemory(MinillmError):
    """The device's memory did not suffice."""

    exit_code = 6


class Stopped(MinillmError):
    """A signal ended the run after a checkpoint was committed."""

    exit_code = 75


class Interrupted(MinillmError):
    """A signal ended the run and nothing was saved."""

    exit_code = 130
