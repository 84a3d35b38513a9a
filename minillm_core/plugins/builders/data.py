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
from minillm_core.plugins.slots import Claim, Terms, topological
from minillm_core.plugins.sourcing import WEIGHTS, Field, Packer, Reserved, Sourcing
from minillm_core.text import plain

DTYPES = ("int32", "float32")


class Shaping(NamedTuple):
    """The batch shapes of a run, and the function that chooses a step's shape."""

    choose: Function
    shapes: tuple[Shape, ...]

    def at(self, step: int, steps: int, seed: int) -> Shape:
        """Return the batch shape of a step, counted from 1; after the last step, the last one.

        Raises:
            PluginCodeError: the function returned something else than an index of a shape.
        """
        index, count = self.choose.call(min(step, steps), steps, seed), len(self.shapes)
        if type(index) is not int or not 0 <= index < count:
            what = f"{plain(repr(index), 60)} at step {step} is not an index of {count} shapes"
            raise self.choose.broken(what, "return which of the shapes the step has, from 0")
        return self.shapes[index]

    def __str__(self) -> str:
        """Return the function's name."""
        return self.choose.reference.rpartition(":")[2]


def by_share(step: int, steps: int, seed: int, *, until: Sequence[float]) -> int:
    """Return the index of the ``train.stages`` entry that a step falls into; after the last, the next index."""
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
        self.given: set[str] = set()  # fields that a source provides
        self.rewriters: set[str] = set()  # plugins whose on_batch changes the tokens
        self.source: Claim[Sourcing] = Claim(
            "data.source", default="the files of data.paths, by their formats", shapes=False
        )
        self.specials: Terms[Reserved] = Terms("data.special", why="asks for it", shapes=False)

    def sourcing(self) -> Sourcing:
        """Resolve the source, token fields and special tokens that plugins declare.

        Raises:
            PlanError: two plugins claim the source.
        """
        specials = tuple(one for _, _, one in self.specials.resolve())
        return replace(self.source.resolve(Sourcing()), specials=specials)

    def arrangement(self) -> dict[str, Function]:
        """Resolve the claims on order, packer and windows, keyed by the slots' names.

        Raises:
            PlanError: two plugins claim one slot, or one claim rules out another.
        """
        found = {name: claim.resolve() for name, claim in self.claims.items() if claim.held}
        windows, other = found.get("windows"), found.get("packer") or found.get("order")
        if windows and other:
            slot = "data.packer" if "packer" in found else "data.order"
            raise PlanError(
                f"plugin '{windows.owner}' shuffles rows, which would undo the "
                f"{slot.partition('.')[2]} of plugin '{other.owner}'",
                where=f"data.windows, {slot}",
                fix=f"leave out '{windows.owner}' or '{other.owner}'",
            ).concerning("data.windows", slot, plugins=(windows.owner, other.owner))
        return found

    def shaping(self) -> Shaping | None:
        """Resolve the batch shapes: a plugin's, or those of the settings; None if all are equal.

        Raises:
            PlanError: two plugins claim them, or a plugin claims them and train.stages is set.
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
        """Describe in words which plugins write and read a field."""
        readers = sorted(name for name, reads in self.reads.items() if field in reads)
        return (
            "its source gives it" if field in self.given else "its on_batch writes it"
        ) + "".join(f"; that of '{name}' reads it" for name in readers)

    def order(self, plugins: tuple[str, ...]) -> tuple[str, ...]:
        """Order the ``on_batch`` implementations: writers before readers, then by name.

        Plugins that change the tokens run before plugins that do not.

        Raises:
            PlanError: a cycle among the plugins.
        """
        writers = {name: owner for name, owner, _ in self.fields.resolve()}
        waiting = {
            plugin: {writers[f] for f in self.reads.get(plugin, ()) if f in writers} - {plugin}
            for plugin in plugins
        }
        for plugin in set(waiting) - self.rewriters:
            waiting[plugin] |= self.rewriters
        order, circle = topological(waiting)
        if circle:
            raise PlanError(
                f"on_batch of {', '.join(circle)}: each reads what another writes",
                fix="drop one of them",
            ).concerning(plugins=circle)
        return tuple(order)


class DataBuilder(Builder):
    """The slots of the data, bound to one plugin: documents, their order, rows, the fields of ``on_batch``.

    Attributes:
        seq_len: T, the length of a training row in tokens; the longest, if lengths change.
        rows: the rows of a micro-batch, if they do not change.
        sources: number of sources of a mixture (--data PATH:WEIGHT); 0 without one.
    """

    _slots: DataSlots

    def __init__(self, owner: str, values: ValueTable, slots: DataSlots) -> None:
        super().__init__(owner, values, slots)
        self.seq_len, self.rows = slots.config.train.seq_len, slots.config.train.rows
        self.sources = len(slots.config.data.weights)

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
        """Claim: the files, a Reading -> documents, instead of those that the core reads from the files.

        The function is a generator, called as ``function(files, reading, **arguments)``. It yields each
        document as text, as ids, or as a list of :class:`~minillm_core.documents.Segment`. It must be
        finite and deterministic: the same files and arguments yield the same documents. Held-out text is
        read with it too. Its documents are tokenized once and cached; the cache key covers the function,
        its file, the version of its distribution, the arguments, and the files' content, names and folders' names.

        ::

            data.source(conversations, fields={"role": "int32"}, system=True)

        Args:
            function: a module-level generator function.
            fields: per-token fields, name -> int32 or float32. A batch holds each twice, (rows, T):
                ``role`` for the token at a position and ``target_role`` for the token predicted there.
                The name ``weights`` is reserved for loss weights: float32, not negative, the weight of
                predicting a token; 0 masks the label, in evaluations too.
            files: False if the source reads no files; data paths in the settings are then refused.
            chat_template: the chat template of the exported tokenizer, if documents are chats.
            chat_ends: names of the template's special tokens that end an answer; the exported model stops there.
            chat_prompt: ``chat_prompt(question, **arguments)`` returns the segments of a user's question, up to
                the start of the answer; samples of the run then answer questions.
            epochs: passes over the documents if a run starts from a trained model (--init, --branch) and
                train.steps is not set; None: the number of steps is chosen as for any run.
            arguments: keyword arguments of the function, JSON values.

        Raises:
            PlanError: a reserved name, an unknown dtype, or a field that another plugin writes.
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

    def special(
        self, name: str, text: str | None = None, *, add: bool = False, instead: str = ""
    ) -> None:
        """Term: a special token that no text encodes to, identified by ``name``.

        A tokenizer trained for the run reserves it; an existing one must contain it, unless ``add`` is set.
        ``on_batch`` receives the ids of all special tokens as ``specials``; a source refers to them with
        :class:`~minillm_core.documents.Special`. To use an id in a node, write it to a field in ``on_batch``.

        ::

            data.special("fim_middle")

        Args:
            name: an identifier.
            text: the token's text; default: ``<|name|>``.
            add: add the token to an existing tokenizer that lacks it, in an unused row of the
                embedding.
            instead: the settings with which the plugin needs no such token, such as ``sft.template=plain``,
                for the error if a tokenizer lacks it.

        Raises:
            PlanError: another plugin declares the same name.
        """
        if not name.isidentifier() or name == "end_of_text" or text == "":
            raise self._refusal("data.special", f"{name!r} cannot be asked for")
        reserved = Reserved(name, text or f"<|{name}|>", self._owner, add, instead)
        self._slots.specials.add(self._owner, name, reserved)

    def rewrites(self) -> None:
        """Declare that this plugin's ``on_batch`` changes the tokens: it runs before hooks that do not.

        ::

            data.rewrites()
        """
        self._slots.rewriters.add(self._owner)

    def packer(self, cls: type[Packer], **arguments: Any) -> None:
        """Claim: lengths of documents -> which of them share a row, instead of concatenation.

        Packing applies to training rows only. Held-out text is always concatenated, so that held-out
        losses stay comparable.

        ::

            data.packer(WholeDocuments, buffer=100)

        Args:
            cls: a module-level Packer class, constructed as ``cls(capacity=train.seq_len + 1, **arguments)``.
            arguments: constructor arguments, JSON values.
        """
        if not (isinstance(cls, type) and issubclass(cls, Packer)):
            raise self._refusal("data.packer", f"{cls!r} is not a class derived from Packer")
        claimed = self._claim("packer", cls, dict(arguments, capacity=self.seq_len + 1))
        claimed.call()  # an error of its constructor is raised while planning

    def order(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Claim: lengths int64 (documents,), seed, epoch -> the order of the documents in that epoch.

        The function returns a permutation and must be deterministic in its arguments.

        ::

            data.order(by_length, descending=True)

        Args:
            function: a module-level function, called as ``function(lengths, seed, epoch, **arguments)``.
            arguments: further keyword arguments, JSON values.
        """
        self._claim("order", function, arguments)

    def shapes(
        self, function: Callable[..., Any], shapes: Sequence[tuple[int, int]], **arguments: Any
    ) -> None:
        """Claim: step from 1, steps of the run, seed -> the index in ``shapes`` of the step's batch shape.

        The function is called for every step while planning and again by the dataloader, so that a
        checkpoint needs no state for it. Every shape in use is compiled before training begins. A step
        has train.accumulate micro-batches of its shape (gradient accumulation).

        ::

            data.shapes(longer, [(4 * data.rows, data.seq_len // 4), (data.rows, data.seq_len)])

        Args:
            function: a module-level function, called as ``function(step, steps, data.seed, **arguments)``;
                returns an index of ``shapes``.
            shapes: pairs (rows of a micro-batch, tokens of a row), tokens at most ``data.seq_len``.
            arguments: further keyword arguments, JSON values.

        Raises:
            PlanError: an impossible shape, or a run whose length is set in minutes.
        """
        train, seed = self._slots.config.train, self._slots.config.data.seed
        steps = train.steps or 0
        for rows, length in shapes:
            if min(rows, length) < 1 or length > self.seq_len:
                fits = f"at least 1 row, and 1 to {self.seq_len} tokens (train.seq_len)"
                raise self._refusal("data.shapes", f"{rows} rows of {length} tokens", fix=fits)
        found = tuple(Shape(rows, train.accumulate, length) for rows, length in shapes)
        shaping = Shaping(self._function("data.shapes", function, arguments), found)
        for step in range(1, steps + 1):  # its errors are raised while planning
            shaping.at(step, steps, seed)
        self._slots.shapes.add(self._owner, shaping)

    def windows(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Claim: a number of rows, seed, epoch -> the order of the rows in that epoch.

        Documents are concatenated in their order and cut into windows of train.seq_len tokens; the
        function permutes the windows. A row that spans two epochs keeps its place, so an epoch covers
        every token exactly once, whatever the order.

        ::

            data.windows(shuffled)

        Args:
            function: a module-level function, called as ``function(count, seed, epoch, **arguments)``;
                returns a permutation, int64 (count,), and is deterministic in its arguments.
            arguments: further keyword arguments, JSON values.
        """
        self._claim("windows", function, arguments)

    def _claim(self, name: str, target: Any, arguments: dict[str, Any]) -> Function:
        claimed = self._function(f"data.{name}", target, arguments)
        self._slots.claims[name].add(self._owner, claimed)
        return claimed

    def field(self, name: str, dtype: str = "int32", shape: tuple[int, ...] = ()) -> None:
        """Claim: a batch field ``(rows, T, *shape)`` that this plugin's ``on_batch`` writes.

        A node receives the field if its ``forward`` has an argument of that name.

        ::

            data.field("bigram", "int32")

        Args:
            name: the field's name.
            dtype: int32 or float32.
            shape: the shape of one token's entry.

        Raises:
            PlanError: a reserved name, an unknown dtype, or a field that another plugin writes.
        """
        self._named("data.field", name)
        if dtype not in DTYPES:
            raise PlanError(
                f"plugin '{self._owner}': field '{name}' has dtype {dtype}",
                fix=f"one of {', '.join(DTYPES)}",
            )
        self._slots.fields.add(self._owner, name, Field(name, dtype, tuple(shape)))

    def reads(self, *names: str) -> None:
        """Declare the fields that this plugin's ``on_batch`` reads: it runs after the hooks that write them.

        ::

            data.reads("bigram")
        """
        self._slots.reads.setdefault(self._owner, set()).update(names)
