"""The slots of the data, and the order in which ``on_batch`` implementations run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minillm_core.config.schema import Config, Shape
from minillm_core.errors import PlanError
from minillm_core.nn.reference import Function, reference_of
from minillm_core.plugins.builders.base import Builder, ValueTable
from minillm_core.plugins.packing import Packer
from minillm_core.plugins.slots import Claim, Terms, in_order
from minillm_core.text import plain

DTYPES = ("int32", "float32")


@dataclass(frozen=True)
class Field:
    """A further field of the batch, (rows, T, *shape)."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


class Shaping(NamedTuple):
    """The sizes that batches of a run have, and a function that chooses those of a step."""

    choose: Function
    shapes: tuple[Shape, ...]

    def at(self, step: int, steps: int, seed: int) -> Shape:
        """Return the sizes of a step's batch, from 1; behind the last step they stay as they were.

        Raises:
            PluginCodeError: the function returned none of the shapes.
        """
        index, count = self.choose.call(min(step, steps), steps, seed), len(self.shapes)
        if type(index) is not int or not 0 <= index < count:
            what = f"{plain(repr(index), 60)} at step {step} is no index of {count} shapes"
            raise self.choose.broken(what, "return which of the shapes the step has, from 0")
        return self.shapes[index]

    def __str__(self) -> str:
        """Name the function."""
        return self.choose.reference.rpartition(":")[2]


def by_share(step: int, steps: int, seed: int, *, until: Sequence[float]) -> int:
    """Choose the stage of ``train.stages`` that a step falls into; behind the last, the shape after it."""
    return bisect_left(until, step / steps)


class DataSlots:
    """The slots of the data, and their resolution.

    Args:
        config: the settings.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        defaults = {"order": "shuffled by data.seed and epoch", "packer": "end to end"}
        self.claims: dict[str, Claim[Function]] = {
            name: Claim(f"data.{name}", default=words, shapes=False)
            for name, words in defaults.items()
        }
        usual = "train.stages" if config.train.stages else "train.rows x train.seq_len"
        self.shapes: Claim[Shaping] = Claim("data.shapes", default=usual, shapes=False)
        self.fields: Terms[Field] = Terms("data.field", why=self._users, shapes=False)
        self.reads: dict[str, set[str]] = {}  # plugin -> fields that its on_batch reads

    def arrangement(self) -> dict[str, Function]:
        """Resolve what plugins claim of order and packer, by the slots' names.

        Raises:
            PlanError: two plugins claim one.
        """
        return {name: claim.resolve() for name, claim in self.claims.items() if claim.held}

    def shaping(self) -> Shaping | None:
        """Resolve the shapes of batches: a plugin's, or the settings'; None where all have one.

        Raises:
            PlanError: two plugins claim them, or one does beside train.stages.
        """
        train, claimed = self.config.train, self.shapes.resolve()
        if not train.stages:
            return claimed
        if claimed:
            what = f"plugin '{claimed.choose.owner}' sizes batches, and train.stages does so too"
            raise PlanError(what, where="data.shapes", fix="leave out one of them")
        given = (("until", tuple(stage.until for stage in train.stages)),)
        return Shaping(Function("train.stages", reference_of(by_share), given), train.shapes)

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
        seq_len: T, the length of a training row; the longest one, where lengths change.
        rows: of a micro-batch, where they do not change.
    """

    _slots: DataSlots

    def __init__(self, owner: str, values: ValueTable, slots: DataSlots) -> None:
        super().__init__(owner, values, slots)
        self.seq_len, self.rows = slots.config.train.seq_len, slots.config.train.rows

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

    def shapes(
        self, function: Callable[..., Any], shapes: Sequence[tuple[int, int]], **arguments: Any
    ) -> None:
        """Claim: step from 1, steps of the run, seed -> which of ``shapes`` the step's batch has.

        It is called for every step while planning, and again where batches are made, so that a
        resumed run needs no state of it. Every shape that a step has is compiled before training
        begins. A step has train.accumulate micro-batches of its shape.

        ::

            data.shapes(longer, [(4 * data.rows, data.seq_len // 4), (data.rows, data.seq_len)])

        Args:
            function: of a module, called ``function(step, steps, data.seed, **arguments)``; returns
                an index of ``shapes``.
            shapes: rows of a micro-batch, and tokens of a row, at most ``data.seq_len``.
            arguments: JSON.

        Raises:
            PlanError: a shape that no batch can have, or a run by the clock.
        """
        train, seed = self._slots.config.train, self._slots.config.data.seed
        steps = train.steps or 0
        for rows, length in shapes:
            if min(rows, length) < 1 or length > self.seq_len:
                fits = f"at least 1 row, and 1 to {self.seq_len} tokens (train.seq_len)"
                raise self._refusal("data.shapes", f"{rows} rows of {length} tokens", fix=fits)
        found = tuple(Shape(rows, train.accumulate, length) for rows, length in shapes)
        shaping = Shaping(self._function("data.shapes", function, arguments), found)
        for step in range(1, steps + 1):  # what it raises is raised while planning
            shaping.at(step, steps, seed)
        self._slots.shapes.add(self._owner, shaping)

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
