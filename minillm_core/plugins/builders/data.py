"""The slots of the data, and the order in which ``on_batch`` implementations run."""

from __future__ import annotations

from dataclasses import dataclass

from minillm_core.errors import PlanError
from minillm_core.plugins.builders.base import Builder
from minillm_core.plugins.slots import Terms, in_order

DTYPES = ("int32", "float32")


@dataclass(frozen=True)
class Field:
    """A further field of the batch, (rows, T, *shape)."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


class DataSlots:
    """The slots of the data, and their resolution."""

    def __init__(self) -> None:
        self.fields: Terms[Field] = Terms("data.field", why=self._users, shapes=False)
        self.reads: dict[str, set[str]] = {}  # plugin -> fields that its on_batch reads

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
    """The batch, as one plugin sees it: what its ``on_batch`` writes and reads."""

    _slots: DataSlots

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
