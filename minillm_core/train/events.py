"""Events of a run, typed: the console, metrics.jsonl and observers read these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Base of all events; ``event`` is the name in metrics.jsonl."""

    event: ClassVar[str] = ""
    seldom: ClassVar[tuple[str, ...]] = ()  # fields that JSON leaves out if they are empty

    def data(self) -> dict[str, Any]:
        """Return the event as one JSON object, its name first."""
        shown = {"event": self.event, **asdict(self)}
        return {name: value for name, value in shown.items() if value or name not in self.seldom}


@dataclass(frozen=True)
class Throughput:
    """Tokens a second by this process's clock, warm-up excluded."""

    real: float  # not padding
    padded: float  # all positions
    supervised: float  # labels >= 0


@dataclass(frozen=True)
class Started(Event):
    """The run starts or resumes: everything has been checked and bound."""

    event: ClassVar[str] = "run"
    plan_hash: str
    steps: int | None
    parameters: int
    out: str = "."  # the run's folder
    settings: Mapping[str, Any] = field(default_factory=dict)  # all of the config, as JSON

    def data(self) -> dict[str, Any]:
        """Return the event as one JSON object; run.json, beside it, has the settings."""
        shown = super().data()
        return {key: value for key, value in shown.items() if key not in ("out", "settings")}


@dataclass(frozen=True)
class Stepped(Event):
    """One optimizer step, read one step late."""

    event: ClassVar[str] = "step"
    step: int  # from 1
    loss: float  # main target, nats, before the update
    lr: float  # train.lr after its schedule
    tokens: int  # real tokens so far
    tokens_per_second: Throughput  # its .real, .padded and .supervised
    step_seconds: float
    mfu: float | None  # share of the device's peak FLOP/s; None if that is unknown
    peak_bytes: int | None  # None if the device does not report it
    grad_norm: float  # before clipping
    terms: Mapping[str, float] = field(default_factory=dict)  # terms of the loss, by name


@dataclass(frozen=True)
class Skipped(Event):
    """A batch without one supervised token was skipped; the step took the next one."""

    event: ClassVar[str] = "skip"
    step: int  # the step that the batch would have been
    skipped: int  # such batches so far


@dataclass(frozen=True)
class Evaluated(Event):
    """One evaluation on held-out text."""

    event: ClassVar[str] = "eval"
    seldom = ("sources", "verdicts", "stop")
    step: int
    val_loss: float  # nats per token, main target
    bits_per_byte: float | None  # None without a tokenizer
    tokens: int = 0  # predictions made
    sources: Mapping[str, Any] = field(default_factory=dict)  # of a mixture: path -> its figures
    verdicts: Mapping[str, float] = field(default_factory=dict)  # of plugins, by "plugin.name"
    stop: str = ""  # why a plugin ends the run here; empty: it does not

    def figures(self) -> dict[str, Any]:
        """Return the event's figures without the step."""
        return {key: getattr(self, key) for key in ("val_loss", "bits_per_byte", "tokens")}


@dataclass(frozen=True)
class Sampled(Event):
    """The model continued a prompt, or answered a question."""

    event: ClassVar[str] = "sample"
    seldom = ("answers",)
    step: int
    prompt: str  # empty: the beginning of a document
    text: str  # the model's continuation
    answers: bool = False  # the prompt is a user's question, and the text an answer


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint was committed."""

    event: ClassVar[str] = "save"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True)
class Unsaved(Event):
    """A checkpoint could not be written, and the run continues."""

    event: ClassVar[str] = "unsaved"
    step: int
    reason: str


@dataclass(frozen=True)
class Resumed(Event):
    """The run was resumed from a checkpoint."""

    event: ClassVar[str] = "resume"
    step: int
    path: str


@dataclass(frozen=True)
class Guarded(Event):
    """A step whose loss or gradients were not finite: its update was not made."""

    event: ClassVar[str] = "guard"
    step: int
    loss: float
    grad_norm: float
    recent: int  # such steps among the last hundred


@dataclass(frozen=True)
class Rewound(Event):
    """The loss had a spike: the run went back to a checkpoint and skipped some batches."""

    event: ClassVar[str] = "rewind"
    step: int  # of the spike
    loss: float
    to: int  # the checkpoint's step
    skipped: int  # steps whose batches are skipped


@dataclass(frozen=True)
class Ended(Event):
    """The run is over."""

    event: ClassVar[str] = "end"
    step: int
    exit: int
    seconds: float
