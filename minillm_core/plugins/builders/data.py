"""The slots of the data, and the order in which ``on_batch`` implementations run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minillm_core.config.schema import Config, Shape
from minillm_core.errors import PlanError
from minillm_core.nn.reference import Function, reference_of
from minillm_core.plugins.builders.base import Builder, ValueTable
from minillm_core.plugins.slots import Claim, Terms, in_order
from minillm_core.plugins.sourcing import WEIGHTS, Field, Packer, Reserved, Sourcing
from minillm_core.text import plain

DTYPES = ("int32", "float32")


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
        defaults["windows"] = "one after the other"
        self.claims: dict[str, Claim[Function]] = {
            name: Claim(f"data.{name}", default=words, shapes=False)
            for name, words in defaults.items()
        }
        usual = "train.stages" if config.train.stages else "train.rows x train.seq_len"
        self.shapes: Claim[Shaping] = Claim("data.shapes", default=usual, shapes=False)
        self.fields: Terms[Field] = Terms("data.field", why=self._users, shapes=False)
        self.reads: dict[str, set[str]] = {}  # plugin -> fields that its on_batch reads
        self.given: set[str] = set()  # fields that a source gives
        self.rewriters: set[str] = set()  # plugins whose on_batch lays out other tokens
        self.source: Claim[Sourcing] = Claim(
            "data.source", default="the files of data.paths, by their formats", shapes=False
        )
        self.specials: Terms[Reserved] = Terms("data.special", why="asks for it", shapes=False)

    def sourcing(self) -> Sourcing:
        """Resolve what plugins ask of the reading of documents.

        Raises:
            PlanError: two plugins claim the source.
        """
        specials = tuple(one for _, _, one in self.specials.resolve())
        return replace(self.source.resolve(Sourcing()), specials=specials)

    def arrangement(self) -> dict[str, Function]:
        """Resolve what plugins claim of order, packer and windows, by the slots' names.

        Raises:
            PlanError: two plugins claim one, or one takes away what another asks for.
        """
        found = {name: claim.resolve() for name, claim in self.claims.items() if claim.held}
        windows, other = found.get("windows"), found.get("packer") or found.get("order")
        if windows and other:
            slot = "data.packer" if "packer" in found else "data.order"
            raise PlanError(
                f"plugin '{windows.owner}' shuffles rows, and nothing would be left of the "
                f"{slot.partition('.')[2]} of plugin '{other.owner}'",
                where=f"data.windows, {slot}",
                fix=f"leave out '{windows.owner}' or '{other.owner}'",
            ).concerning("data.windows", slot, plugins=(windows.owner, other.owner))
        return found

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
        """Word which plugins write and read a field."""
        readers = sorted(name for name, reads in self.reads.items() if field in reads)
        return (
            "its source gives it" if field in self.given else "its on_batch writes it"
        ) + "".join(f"; that of '{name}' reads it" for name in readers)

    def order(self, plugins: tuple[str, ...]) -> tuple[str, ...]:
        """Order the ``on_batch`` implementations: writers before readers, then by name.

        Those that lay out other tokens come before those that do not.

        Raises:
            PlanError: they wait for each other.
        """
        writers = {name: owner for name, owner, _ in self.fields.resolve()}
        waiting = {
            plugin: {writers[f] for f in self.reads.get(plugin, ()) if f in writers} - {plugin}
            for plugin in plugins
        }
        for plugin in set(waiting) - self.rewriters:
            waiting[plugin] |= self.rewriters
        order, circle = in_order(waiting)
        if circle:
            raise PlanError(
                f"on_batch of {', '.join(circle)}: each reads what another writes",
                fix="drop one of them",
            ).concerning(plugins=circle)
        return tuple(order)


class DataBuilder(Builder):
    """The data, as one plugin sees them: documents, their order, rows, and what ``on_batch`` writes and reads.

    Attributes:
        seq_len: T, the length of a training row; the longest one, where lengths change.
        rows: of a micro-batch, where they do not change.
    """

    _slots: DataSlots

    def __init__(self, owner: str, values: ValueTable, slots: DataSlots) -> None:
        super().__init__(owner, values, slots)
        self.seq_len, self.rows = slots.config.train.seq_len, slots.config.train.rows

    def source(
        self,
        function: Callable[..., Any],
        *,
        fields: Mapping[str, str] | None = None,
        files: bool = True,
        chat_template: str | None = None,
        chat_ends: Sequence[str] = (),
        chat_prompt: Callable[..., Any] | None = None,
        epochs: float | None = None,
        **arguments: Any,
    ) -> None:
        """Claim: the files, a Reading -> documents, instead of the files' own.

        It is a generator, called ``function(files, reading, **arguments)``, and yields documents as
        text, as ids, or as a list of :class:`~minillm_core.documents.Segment`. The same files and
        arguments give the same documents, which come to an end. Held-out text comes from it too.
        What it yields is encoded once and kept: the core's cache knows it by the function, its file,
        the version of its distribution, the arguments and the files' content.

        ::

            data.source(conversations, fields={"role": "int32"}, system=True)

        Args:
            function: of a module.
            fields: of its tokens, name -> int32 or float32. Batches have each twice, (rows, T):
                ``role`` of the token at a position and ``target_role`` of the one predicted there.
                The name ``weights`` is the core's: float32 and not negative, what the loss of
                predicting a token counts; 0: no label, in evaluations too.
            files: False: it reads none, and naming some is refused.
            chat_template: the one template of the exported tokenizer, where documents are chats.
            chat_ends: names of the special tokens that end an answer in it; the exported model stops there.
            chat_prompt: ``chat_prompt(question, **arguments)`` gives the segments of a user's question, up to
                where its answer begins: samples of the run answer questions.
            epochs: how often the documents are read where a run starts from a trained model (--init, --branch)
                and train.steps is not given; None: the steps are those of any run.
            arguments: JSON.

        Raises:
            PlanError: a reserved name, an unknown dtype, or another plugin writes the field.
        """
        claimed = self._function("data.source", function, arguments)
        given = tuple(Field(name, dtype) for name, dtype in sorted((fields or {}).items()))
        if any(one.name == WEIGHTS and one.dtype != "float32" for one in given):
            raise self._refusal("data.source", "'weights' are float32")
        asked = Sourcing(
            claimed,
            files,
            given,
            template=chat_template,
            ends=tuple(chat_ends) or None,
            prompt=chat_prompt and self._function("data.source", chat_prompt, arguments),
            epochs=epochs,
        )
        for one in asked.batch_fields:
            self.field(one.name, one.dtype)
            self._slots.given.add(one.name)
        self._slots.source.add(self._owner, asked)

    def special(self, name: str, text: str | None = None, *, add: bool = False) -> None:
        """Term: a special token that no text is encoded to, known by ``name``.

        A tokenizer that is trained for the run reserves it; a given one must have it, or gets it by ``add``.
        ``on_batch`` gets the ids of all of them as ``specials``, a source names them by
        :class:`~minillm_core.documents.Special`. A node is given one as a field that on_batch writes.

        ::

            data.special("fim_middle")

        Args:
            name: an identifier.
            text: of the token; default: ``<|name|>``.
            add: whether a tokenizer that is given and lacks it gets it, in a row of the embedding
                that it does not use.

        Raises:
            PlanError: another plugin asks for the same name.
        """
        if not name.isidentifier() or name == "end_of_text" or text == "":
            raise self._refusal("data.special", f"{name!r} cannot be asked for")
        reserved = Reserved(name, text or f"<|{name}|>", self._owner, add)
        self._slots.specials.add(self._owner, name, reserved)

    def rewrites(self) -> None:
        """Say that this plugin's ``on_batch`` lays out other tokens: it runs before those that do not.

        ::

            data.rewrites()
        """
        self._slots.rewriters.add(self._owner)

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

    def windows(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Claim: a number of rows, seed, epoch -> the rows' order in that epoch.

        Documents are laid end to end in their order, and cut into windows of train.seq_len; this is
        the order in which rows read them. A row that begins in one epoch and ends in the next stays
        where it is. So an epoch is every token once, whatever the order.

        ::

            data.windows(shuffled)

        Args:
            function: of a module, called ``function(count, seed, epoch, **arguments)``; it returns a
                permutation, int64 (count,), the same for the same three.
            arguments: JSON.
        """
        self._claim("windows", function, arguments)

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
