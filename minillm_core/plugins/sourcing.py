"""The document source that plugins declare, and the base class of packers.

A plugin may declare a source, fields of its tokens and special tokens. A packer builds rows from pieces of
documents without seeing their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from minillm_core.nn.reference import Function

if TYPE_CHECKING:
    import numpy as np

WEIGHTS = "weights"
"""The field of a source that the core reads itself: the loss weight of predicting a token."""

TARGET = "target_"
"""Prefix of a field's name: the field of the token predicted at a position."""


@dataclass(frozen=True)
class Field:
    """A further field of the batch, (rows, T, *shape)."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


class Special(NamedTuple):
    """A reserved special token in a document; ``end_of_text``, or a name given to data.special."""

    name: str


class Segment(NamedTuple):
    """A part of a document whose tokens have the same values of the source's fields.

    A segment is tokenized separately, so a boundary between segments is a boundary between tokens. Put
    boundaries where inference has them: at special tokens, or at the end of a prompt.

    Attributes:
        content: text, a special token, or ids.
        values: field -> a number for all its tokens; with ids also an array with one number per token.
            Omitted fields are 0.
    """

    content: str | Special | Sequence[int] | np.ndarray
    values: Mapping[str, float | np.ndarray] = {}


class Reserved(NamedTuple):
    """A special token that a plugin declares."""

    name: str
    text: str  # the token's text: <|fim_prefix|>
    owner: str
    add: bool  # add it to a tokenizer that lacks it
    instead: str = ""  # settings without need of it, for the error if a tokenizer lacks it


@dataclass(frozen=True)
class Sourcing:
    """The source of documents, its fields and the special tokens that plugins declare.

    Attributes:
        source: the function that yields documents; None: files are read by their formats.
        files: whether the source reads files.
        fields: the fields of its tokens.
        specials: special tokens, by name.
        code: version of the source's distribution and sha256 of its file.
        template: the chat template for the exported tokenizer, equivalent to the source's format.
        ends: names of the special tokens that end an answer in the template.
        prompt: the function that returns a question as segments, up to the start of the answer.
        epochs: default passes over the documents when fine-tuning a trained model; None: as for other text.
    """

    source: Function | None = None
    files: bool = True
    fields: tuple[Field, ...] = ()
    specials: tuple[Reserved, ...] = ()
    code: tuple[str | None, ...] = ()
    template: str | None = None
    ends: tuple[str, ...] | None = None
    prompt: Function | None = None
    epochs: float | None = None

    @property
    def key(self) -> list[object]:
        """The token cache key as JSON: all that determines the ids and values read from the same files."""
        made = self.source and (self.source.reference, self.source.arguments)
        return [made, [(f.name, f.dtype) for f in self.fields], self.code] if made else []

    @property
    def ids(self) -> dict[str, int]:
        """The special tokens' ids by name, in a tokenizer trained for the run."""
        texts = sorted({one.text for one in self.specials})
        return {"end_of_text": 0, **{one.name: 1 + texts.index(one.text) for one in self.specials}}

    @property
    def batch_fields(self) -> tuple[Field, ...]:
        """The batch fields: two per field, of a token and of the predicted token; without ``weights``, a core field."""
        named = [one for one in self.fields if one.name != WEIGHTS]
        return (*named, *(Field(TARGET + one.name, one.dtype) for one in named))

    def joined(self, other: Sourcing) -> Sourcing | None:
        """Merge two plans' declarations for one corpus; None if documents or special tokens conflict."""
        both = {one.name: one for one in (*other.specials, *self.specials)}
        clash = any(both[one.name].text != one.text for one in other.specials)
        specials = tuple(both[name] for name in sorted(both))
        return None if clash or self.key != other.key else replace(self, specials=specials)


PLAIN = Sourcing()
"""The sourcing of a plan without plugins that declare any."""


class Piece(NamedTuple):
    """A document or a part of one, located in the endless stream of all epochs' documents."""

    first: int  # its first token, counted from the start of the stream
    last: int  # one past its last token

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.last - self.first

    def part(self, first: int, last: int) -> Piece:
        """Return the part from token ``first`` up to ``last`` (exclusive), within the piece and clipped."""
        return Piece(self.first + first, min(self.first + last, self.last))


class Packer:
    """Base of packers, which choose the documents that share a row (sequence packing).

    A run constructs one packer and calls it for every row in turn, in the dataloader's thread. It takes
    whole documents from an endless stream, in the order of each epoch, and puts pieces of them into
    rows. A token that is neither in a row nor in ``pending`` is cut: no later row contains it, and the run
    counts it. Only ``pending`` and ``state`` may carry over from row to row: they are saved in checkpoints
    and restored on resume. A random generator of the packer's own would not be.

    Attributes:
        capacity: tokens that fit in a row: train.seq_len, plus one, which is only a label.
        any_capacity: set by the class: ``capacity`` may change from row to row. Without it, a run
            whose rows change their length (train.stages, ``data.shapes``) is refused.
        pending: pieces taken from the stream and kept for later rows.
        state: further state, as JSON.
    """

    any_capacity: ClassVar[bool] = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pending: list[Piece] = []
        self.state: Any = None

    def row(self, take: Callable[[], Piece]) -> Sequence[Piece]:
        """Return the pieces of the next row: at least one, together at most ``capacity`` tokens.

        Args:
            take: takes the next document of the stream, whole.
        """
        raise NotImplementedError
