"""What plugins ask of the reading of documents, and how a packer lays them out.

Asked are a source, fields of its tokens, reserved tokens. A packer makes rows of pieces of documents,
and never sees an id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from minillm_core.nn.reference import Function

if TYPE_CHECKING:
    import numpy as np

WEIGHTS = "weights"
"""The field of a source that the core reads itself: what the loss of predicting a token counts."""

TARGET = "target_"
"""Before a field's name: the field of the token that is predicted at a position."""


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

    It is encoded apart from the segments around it: a boundary between two of them is one between
    tokens. Put it where inference has one: at a special token, or where a prompt ends.

    Attributes:
        content: text; a special token; or ids.
        values: field -> number, of each of its tokens; or, beside ids, an array of as many. A field
            that is left out is 0.
    """

    content: str | Special | Sequence[int] | np.ndarray
    values: Mapping[str, float | np.ndarray] = {}


class Reserved(NamedTuple):
    """A special token that a plugin asks for."""

    name: str
    text: str  # of the token: <|fim_prefix|>
    owner: str
    add: bool  # to a tokenizer that lacks it


@dataclass(frozen=True)
class Sourcing:
    """What plugins ask of the reading of documents.

    Attributes:
        source: yields them; None: the files are read by their formats.
        files: whether it reads files.
        fields: of its tokens.
        specials: reserved tokens, by name.
        code: of the source, the version of its distribution and the sha256 of its file.
        template: that writes chats as the source does, for the exported tokenizer.
        ends: names of the special tokens that end an answer in it.
        prompt: writes a question, up to where its answer begins, as segments.
        epochs: how often they are read by default where a trained model is tuned; None: as other text is.
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
        """Return, as JSON, what decides which ids and values are made of the same files."""
        made = self.source and (self.source.reference, self.source.arguments)
        return [made, [(f.name, f.dtype) for f in self.fields], self.code] if made else []

    @property
    def ids(self) -> dict[str, int]:
        """The special tokens' ids by name, as a tokenizer has them that is trained for the run."""
        texts = sorted({one.text for one in self.specials})
        return {"end_of_text": 0, **{one.name: 1 + texts.index(one.text) for one in self.specials}}

    @property
    def batch_fields(self) -> tuple[Field, ...]:
        """The fields of a batch: of a token and of the one predicted there; ``weights`` is the latter."""
        named = [one for one in self.fields if one.name != WEIGHTS]
        return (*named, *(Field(TARGET + one.name, one.dtype) for one in named))

    def joined(self, other: Sourcing) -> Sourcing | None:
        """Join what two plans ask, for one corpus; None: other documents, or one name for two tokens."""
        both = {one.name: one for one in (*other.specials, *self.specials)}
        clash = any(both[one.name].text != one.text for one in other.specials)
        specials = tuple(both[name] for name in sorted(both))
        return None if clash or self.key != other.key else replace(self, specials=specials)


PLAIN = Sourcing()
"""Of a plan without such a plugin."""


class Piece(NamedTuple):
    """A document, or a part of one, by its place in the endless stream of all epochs' documents."""

    first: int  # its first token, counted from the beginning of the stream
    last: int  # one past its last token

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.last - self.first

    def part(self, first: int, last: int) -> Piece:
        """Return the tokens from ``first`` up to ``last``, counted within the piece, where it has them."""
        return Piece(self.first + first, min(self.first + last, self.last))


class Packer:
    """Base of packers: what decides which documents lie together in a row.

    A run makes one packer and asks it for every row in turn, in the loader's thread. It takes whole
    documents from an endless stream, in the order of each epoch, and lays out pieces of them. A
    token that is neither in a row nor in ``pending`` is cut: no later row has it, and the run counts
    it. ``pending`` and ``state`` are all that a packer may remember from row to row: checkpoints
    hold them, and a resumed run puts them back. Random numbers of its own would not be.

    Attributes:
        capacity: tokens that a row has room for: train.seq_len, and one more, which is only a label.
        any_capacity: of the class: ``capacity`` may be another for the next row. Without it, a run
            whose rows change their length (train.stages, ``data.shapes``) is refused.
        pending: pieces that were taken, for later rows.
        state: what else it remembers, as JSON.
    """

    any_capacity: ClassVar[bool] = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pending: list[Piece] = []
        self.state: Any = None

    def row(self, take: Callable[[], Piece]) -> Sequence[Piece]:
        """Return the pieces of the next row, one at least, of ``capacity`` tokens together at most.

        Args:
            take: takes the next document of the stream, whole.
        """
        raise NotImplementedError
