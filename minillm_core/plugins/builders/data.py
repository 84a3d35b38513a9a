"""The slots of the data, and the order in which ``on_batch`` implementations run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.reference import Function
from minillm_core.plugins.builders.base import Builder, ValueTable
from minillm_core.plugins.packing import Packer
from minillm_core.plugins.slots import Claim, Terms, in_order

DTYPES = ("int32", "float32")


@dataclass(frozen=True)
class Field:
    """A further field of the batch, (rows, T, *shape)."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


class DataSlots:
    """The slots of the data, and their resolution.

    Args:
        length: tokens of a row.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        defaults = {"order": "shuffled by data.seed and epoch", "packer": "end to end"}
        self.claims: dict[str, Claim[Function]] = {
            name: Claim(f"data.{name}", default=words, shapes=False)
            for name, words in defaults.items()
        }
        self.fields: Terms[Field] = Terms("data.field", why=self._users, shapes=False)
        self.reads: dict[str, set[str]] = {}  # plugin -> fields that its on_batch reads

    def arrangement(self) -> dict[str, Function]:
        """Resolve what plugins claim of order and packer, by the slots' names.

        Raises:
            PlanError: two plugins claim one.
        """
        return {name: claim.resolve() for name, claim in self.claims.items() if claim.held}

    def _users(self, field: str) -> str:
        """Word which plugins' ``on_batch`` write and read a field."""
        readers = sorted(name for name, reads in self.reads.items() if field in reads)
        return "its on_batch writes it" + "".join(
            f"; that of '{name}' reads it" for name in readers
        )

    def order(self, plugins: tuple[str, ...]) -> tuple[str, ...]:
        """Order the ``on_batch`` implementations: writers before readers, then by name.

        Raises:
            PlanError: they wait for each other.
        """
        writers = {name: owner for name, owner, _ in self.fields.resolve()}
        waiting = {
            plugin: {writers[f] for f in self.reads.get(plugin, ()) if f in writers} - {plugin}
            for plugin in plugins
        }
        order, circle = in_order(waiting)
        if circle:
            raise PlanError(
                f"on_batch of {', '.join(circle)}: each reads what another writes",
                fix="drop one of them",
            ).concerning(plugins=circle)
        return tuple(order)


class DataBuilder(Builder):
    """The data, as one plugin sees them: their order, their rows, and what ``on_batch`` writes and reads.

    Attributes:
        seq_len: T, the length of a training row.
    """

    _slots: DataSlots

    def __init__(self, owner: str, values: ValueTable, slots: DataSlots) -> None:
        super().__init__(owner, values, slots)
        self.seq_len = slots.length

    def packer(self, cls: type[Packer], **arguments: Any) -> None:
        """Claim: lengths of documents -> which of them lie in a row, instead of end to end.

        Held-out text is laid end to end whatever packs the rows of training, so that its losses
        can be compared.

        ::

            data.packer(WholeDocuments, buffer=100)

        Args:
            cls: a Packer of a module, made as ``cls(capacity=train.seq_len + 1, **arguments)``.
            arguments: of its constructor, JSON.
        """
        if not (isinstance(cls, type) and issubclass(cls, Packer)):
            raise self._refusal("data.packer", f"{cls!r} is not a class derived from Packer")
        claimed = self._claim("packer", cls, dict(arguments, capacity=self.seq_len + 1))
        claimed.call()  # what its constructor raises is raised while planning

    def order(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Claim: lengths int64 (documents,), seed, epoch -> the documents' order in that epoch.

        An order is a permutation of the documents, and the same for the same three.

        ::

            data.order(by_length, descending=True)

        Args:
            function: of a module, called ``function(lengths, seed, epoch, **arguments)``.
            arguments: JSON.
        """
        self._claim("order", function, arguments)

    def _claim(self, name: str, target: Any, arguments: dict[str, Any]) -> Function:
        claimed = self._function(f"data.{name}", target, arguments)
        self._slots.claims[name].add(self._owner, claimed)
        return claimed

    def field(self, name: str, dtype: str = "int32", shape: tuple[int, ...] = ()) -> None:
        """Claim: ``(rows, T, *shape)``, a field that this plugin's ``on_batch`` writes.

        A node whose ``forward`` names the field is given it.

        ::

            data.field("bigram", "int32")

        Args:
            name: of the field.
            dtype: int32 or float32.
            shape: of one token's entry.

        Raises:
            PlanError: a reserved name, an unknown dtype, or another plugin writes it.
        """
        self._named("data.field", name)
        if dtype not in DTYPES:
            raise PlanError(
                f"plugin '{self._owner}': field '{name}' has dtype {dtype}",
                fix=f"one of {', '.join(DTYPES)}",
            )
        self._slots.fields.add(self._owner, name, Field(name, dtype, tuple(shape)))

    def reads(self, *names: str) -> None:
        """Names of fields that this plugin's ``on_batch`` reads: it runs after who writes them.

        ::

            data.reads("bigram")
        """
        self._slots.reads.setdefault(self._owner, set()).update(names)
