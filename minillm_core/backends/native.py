"""The parts of a backend, a model and its decoding that are the same on torch and MLX.

Written against the array functions of ``framework.ops``; what differs between the frameworks
(writing in place, queueing) is left to methods of their subclasses.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from minillm_core.backends.base import Backend, Batch, Binding, Decoding, Model, Trainer
from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected
from minillm_core.backends.memory import memory_or_error
from minillm_core.backends.ranks import ALONE, Ranks
from minillm_core.backends.steps import Statistics, supervised_positions
from minillm_core.errors import BackendError, DataError, PluginCodeError
from minillm_core.nn.block import GATHERED
from minillm_core.nn.decoder import decoder, lookup
from minillm_core.nn.decoding import KVCache
from minillm_core.nn.initial import initial_values, witness_inits
from minillm_core.nn.module import materialising
from minillm_core.nn.node import ModelShape, Scope
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.select import Candidate, Choice, load
from minillm_core.optim.rows import rules_of
from minillm_core.plan import Plan
from minillm_core.plugins.builders.loss import LEFT_OUT, POSITIONS, Reference
from minillm_core.plugins.builders.optimizer import ROWS
from minillm_core.plugins.provided import required

LastLogits = Callable[[Batch, Callable[..., object]], np.ndarray]
"""(batch, maker of its scope) -> float32 (V,): the logits after the last column."""


class NativeBackend(Backend):
    """A framework on a device, which builds models and trainers from plans.

    Args:
        binding: the decisions, kernels included.
        candidates: the kernels to load from: the core's and the plugins'.
        compiler: as for :func:`create_backend`; also used for reference models.
    """

    _prepare: Callable[[int], None]  # for a trainer: seeds the framework's own random generators
    # called with plan, binding, materialised model and framework object
    _model: Callable[..., Any]
    _trainer: Callable[..., Any]

    def __init__(
        self,
        binding: Binding,
        candidates: tuple[Candidate, ...],
        compiler: Callable[..., Any] | None = None,
    ) -> None:
        self.binding, self.candidates, self._compiler = binding, candidates, compiler

    @abstractmethod
    def _framework(self, kernels: Mapping[str, Callable[..., Any]]) -> Any:
        """Create the framework object with these kernels, op -> function."""

    def model(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> Model:
        """Create the plan's model with its initial values."""
        with memory_or_error():
            return self._model(plan, self.binding, *self._materialise(plan, seed, max_positions))

    def trainer(
        self, plan: Plan, seed: int, *, max_positions: int | None = None, ranks: Ranks = ALONE
    ) -> Trainer:
        """Create the plan's model with its initial values, and its optimizer; this process's part if sharded."""
        selects = self.name == "torch" and self.binding.compile
        if self.binding.checkpointing == "selective" and not selects:
            what = "only torch's compiled step selects what is recomputed"
            fix = "train.compile=on with --backend torch, or train.checkpointing=true"
            raise BackendError(what, where="train.checkpointing=selective", fix=fix)
        self._prepare(seed)
        param_device = "meta" if ranks.shard == "weights" else None
        with memory_or_error():
            parts = self._materialise(plan, seed, max_positions, param_device)
            trainer: Any = self._trainer(plan, self.binding, *parts)
            trainer.references = {one.name: self._frozen(one, plan) for one in plan.references}
            trainer.join(ranks)
            if ranks.shard:
                trainer.shard(ranks.shard)
            if param_device:
                trainer.restart(seed)
            for _ in trainer.views():  # so that a broken view fails before the first step
                pass
        return trainer

    def _frozen(self, one: Reference, plan: Plan) -> Callable[[Batch], Any]:
        """Create a frozen reference model on this device; return the function that computes its batch field."""
        bound, train = self.binding, plan.config.train
        same = {"dtype": bound.dtype, "compile": "on" if bound.compile else "off"}
        there = one.model.plan.with_train(**same, rows=train.rows, seq_len=train.seq_len)
        config = there.config.model_copy(update={"kernels": "auto"})
        # without kernels of plugins: they were for the reference model's own training
        there = replace(there, config=config, candidates=())
        detected = Detected(bound.backend, bound.device, "the run's")
        model: Any = create_backend(detected, there, compiler=self._compiler).model(there, 0)
        model.load(one.model.arrays())
        return model.frozen(one.method)

    def _materialise(
        self, plan: Plan, seed: int, positions: int | None, param_device: str | None = None
    ) -> tuple[Any, Any]:
        framework = self._framework(load(self.binding.kernels, self.candidates, self.name))
        framework.param_device = param_device
        _watch_kernels(framework, plan, self.binding.kernels)
        checkpointing = self.binding.checkpointing is True
        return materialise(plan, framework, seed, positions, checkpointing=checkpointing), framework


def materialise(
    plan: Plan,
    framework: Any,
    seed: int,
    positions: int | None = None,
    *,
    checkpointing: bool = False,
) -> Any:
    """Build the plan's model with its seeded initial values, float32, on the framework's device.

    Args:
        plan: the plan.
        framework: the framework object of the modules; if its ``param_device`` is set, parameters get no
            values yet.
        seed: the run's seed.
        positions: length of the longest row to come; default: the plan's seq_len.
        checkpointing: whether blocks are recomputed in the backward pass.
    """
    positions = positions or plan.config.train.seq_len
    spec = replace(plan.spec, geometry=replace(plan.spec.geometry, positions=positions))
    with materialising(framework), framework.placing():
        model = decoder(spec, checkpointing=checkpointing)
    whole = not framework.param_device
    for module, attribute, value in initial_values(model, plan.inits, seed, parameters=whole):
        framework.fill(module, attribute, value)
    witness_inits(model, plan.inits if whole else {}, seed, framework.host, framework.witness)
    return model


def _watch_kernels(framework: Any, plan: Plan, choices: Iterable[Choice]) -> None:
    """Wrap every plugin's kernel in ``framework.ops``, to record its evidence, ``kernel:<op>=<name>``.

    The core's kernels are not wrapped. The wrapper raises PluginCodeError if the kernel returns
    something other than arrays, or changes its arguments in place.
    """
    offered = {(candidate.op, candidate.name): owner for owner, candidate in plan.candidates}
    for choice in choices:
        if owner := offered.get((choice.op, choice.kernel)):
            setattr(framework.ops, choice.op, _watched(choice, framework, owner))


def _watched(choice: Choice, framework: Any, owner: str) -> Callable[..., Any]:
    kernel, witness = getattr(framework.ops, choice.op), framework.witness
    versions = framework.versions
    key, contract = f"kernel:{choice.op}={choice.kernel}", CONTRACTS[choice.op]
    op = contract.signature

    def wrong(did: str, fix: str) -> PluginCodeError:
        return PluginCodeError(owner, kernel.__name__, did=did, where=key, fix=fix)

    with suppress(ValueError):  # a builtin may tell no signature
        try:
            needed = [one for one in op.parameters.values() if one.default is one.empty]
            inspect.signature(kernel).bind(*needed)
        except TypeError as error:
            raise wrong(f"does not take the op's arguments ({error}) in", f"take {op}") from None

    @functools.wraps(kernel)
    def call(*arguments: Any, **named: Any) -> Any:
        witness(key)
        before = versions(arguments)
        result = kernel(*arguments, **named)
        if versions(arguments) != before:
            raise wrong("changed an argument in place in", "write into new arrays")
        parts = result if isinstance(result, tuple) else (result,)
        for part in parts:
            if isinstance(part, np.ndarray) or not hasattr(part, "shape"):
                did = f"returned {type(part).__name__} from"
                raise wrong(did, "return what the op's contract says")
        shapes = [tuple(part.shape) for part in parts]
        if shapes != (asked := [*map(tuple, contract.shapes(*arguments, **named))]):
            found, needed = (", ".join(map(str, each)) for each in (shapes, asked))
            raise wrong(f"returned shape {found} from", f"return shape {needed}")
        return result

    return call


def rows_of(name: str) -> str:
    """Return the name of the entry in a step's values with the rows of a table that it holds, int32 (S,)."""
    return f"rows.of.{name}"


class Tables:
    """The tables that are updated by rows, of which a step holds only the rows that it reads; here none.

    Entry points of the group ``minillm.tables`` have the names of backends; the value is a class with the
    methods of the backend's subclass, constructed with the rules by table, the plan, and the trainer's own
    arguments. A plan without such tables imports nothing.
    """

    def rows_read(self, micro: Sequence[Batch]) -> tuple[Sequence[Batch], dict[str, np.ndarray]]:
        """Find the rows that a step reads.

        Args:
            micro: the step's micro-batches.

        Returns:
            The micro-batches, each with the positions of its ids among the step's rows, int32 (B, T);
            and the rows by table, int32 (S,), sorted and distinct.
        """
        return micro, {}

    def packed(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert a snapshot's tables to checkpoint form: up to date, plus data to restore the same bits."""
        return arrays

    def unpacked(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Invert :meth:`packed`: ``model.<name>`` is then the table as on the device."""
        return arrays


def tables_of(plan: Plan, backend: str, none: type[Tables], *of: Any) -> Any:
    """Create the tables of a plan, with the backend's arguments ``of``; ``none`` is its class for no tables.

    Raises:
        BackendError: no installed distribution provides the backend's class.
        PluginError: several do.
    """
    if not plan.by_rows:
        return none()
    made = required("minillm.tables", backend, f"updating tables by rows on {backend}")
    return made(rules_of(plan), plan, *of)


class NativeModel(Model):
    """A model on one device; evaluation and generation run in eager mode, without compilation.

    Args:
        plan: the plan.
        binding: dtype, kernels and device.
        model: materialised and filled, float32.
        framework: the framework object of the model's modules.
    """

    def __init__(self, plan: Plan, binding: Binding, model: Any, framework: Any) -> None:
        self.plan, self.binding, self.framework = plan, binding, framework
        self.model = self.part = model  # part: this process's part, under tensor parallelism
        self.statistics = Statistics(model, framework.ops)
        self.staged, self.sizes = plan.staged, len(plan.course) > 1
        self.references: dict[str, Callable[[Batch], Any]] = {}  # batch field -> reference model
        self.tables = Tables()  # in a trainer: the tables that are updated by rows

    def fields(
        self, host: Batch, staged: Mapping[str, int], *, trained: bool = True
    ) -> dict[str, Any]:
        """Copy the fields that the model reads to its device, and compute those of reference models.

        Args:
            host: a micro-batch of training.
            staged: the staged values of its step.
            trained: whether to count gathered positions as evidence; False when warming up.
        """
        loss, seen = self.plan.spec.loss, self.framework.evidence if trained else Counter[str]()
        own = {lookup(name) for name in self.plan.by_rows}  # refer to tables of this model only
        others = {name: part for name, part in host.items() if name not in own}
        if loss.gather:
            seen[POSITIONS] += host["labels"].size
            if (at := supervised_positions(loss, host, staged)) is not None:
                seen[LEFT_OUT] += host["labels"].size - at.size
                host = {**host, GATHERED: at}
        given = {name: field(others) for name, field in self.references.items()}
        return self.to_device(host) | given

    def record_rows(self, micro: Sequence[Batch]) -> tuple[Sequence[Batch], dict[str, np.ndarray]]:
        """Find the table rows that a step reads, and record them as evidence: see :meth:`Tables.rows_read`."""
        micro, rows = self.tables.rows_read(micro)
        if rows:
            self.framework.evidence[ROWS] += 1
        self.framework.evidence.update({f"{ROWS}{name}": ids.size for name, ids in rows.items()})
        return micro, rows

    @abstractmethod
    def frozen(self, method: str) -> Callable[[Batch], Any]:
        """Freeze the current weights, and return a method of the decoder as a function of a batch."""

    @abstractmethod
    def inferring(self) -> AbstractContextManager[None]:
        """Return a context for inference: no gradients, weights in place, dropout of native modules off."""

    @abstractmethod
    def to_device(self, host: Batch) -> dict[str, Any]:
        """Copy the fields that the model reads to its device."""

    @abstractmethod
    def scalars_to_device(self, numbers: Mapping[str, float]) -> dict[str, Any]:
        """Copy each number to the device as 0-d float32."""

    def enqueue(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a batch's results, which are read once all batches are queued."""
        return results

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Return the sum of nats of the main target, and the number of predictions."""
        given, pending = self.final_values(), []
        with memory_or_error(), self.inferring():
            for host in batches:
                pending.append(self.enqueue(self.part.evaluate(self.to_device(host), given)))
            total, count = 0.0, 0
            for nats, predictions in pending:
                total += nats.item()  # in float64; not sum(), which compensates since Python 3.12
                count += int(predictions.item())
        return total, count

    def losses(self, batch: Batch) -> np.ndarray:
        """Return the nats of each label, float32 (rows, T), 0 where it is -1."""
        with memory_or_error(), self.inferring():
            found = self.model.losses(self.to_device(batch), self.final_values())
            return self.framework.host(found)

    def scores(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the nats of each label, and the largest logit minus its own."""
        with memory_or_error(), self.inferring():
            nats, below = self.model.scores(self.to_device(batch), self.final_values())
            return self.framework.host(nats), self.framework.host(below)

    def next_logits(self, batch: Batch) -> np.ndarray:
        """Return the logits after the last column of one row, float32 (V,)."""
        check_row(batch, self.model.geometry)
        return self.last_logits(batch, Scope)

    def decoding(self) -> Decoding:
        """Start an empty sequence."""
        return Continuation(self.last_logits, self.model.geometry)

    def last_logits(self, batch: Batch, scope_of: Callable[..., Any]) -> np.ndarray:
        """Return the logits after a row's last column, float32 (V,): a whole row, or columns after a KV cache."""
        ops, columns = self.framework.ops, batch["ids"].shape[1]
        with memory_or_error(), self.inferring():
            last = ops.arange(columns)[columns - 1 :]  # int32 (1,)
            logits = self.model.logits(self.to_device(batch), self.final_values(), last, scope_of)
            return self.framework.host(ops.astype(logits[0], "float32"))

    def final_values(self) -> dict[str, Any]:
        """Return the schedule values at the end of training, which inference uses."""
        staged, given = self.values_at(self.plan.values(1.0), 1.0)
        return given | staged

    def values_at(
        self, values: Mapping[str, float], normaliser: float
    ) -> tuple[dict[str, int], dict[str, Any]]:
        """Split schedule values into staged and dynamic ones, as a step takes them.

        Args:
            values: schedule value -> number.
            normaliser: multiplies the objective.

        Returns:
            The staged values, which are baked into a compiled step; and as 0-d float32 on the device
            the dynamic ones, staged ones that are inputs of the step, and ``normaliser``.
        """
        staged = {name: int(values[name]) for name in self.staged}
        baked = staged.keys() - set(self.binding.inputs)
        dynamic = {name: float(v) for name, v in values.items() if name not in baked}
        return staged, self.scalars_to_device(dynamic | {"normaliser": normaliser})

    def witnesses(self) -> Mapping[str, int]:
        """Return the evidence so far: key -> count."""
        return dict(self.framework.evidence)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Set the model to evaluation mode inside, which turns dropout of native modules off."""
    model.eval()
    try:
        yield
    finally:
        model.train()


class Continuation(Decoding):
    """The decoding of one sequence, from its start.

    Args:
        last_logits: the model's method.
        geometry: the model's sizes, to check ids and positions.
    """

    def __init__(self, last_logits: LastLogits, geometry: ModelShape) -> None:
        self.last_logits, self.geometry = last_logits, geometry
        self.cache = KVCache()

    def feed(self, batch: Batch) -> np.ndarray:
        """Append columns, checked by :func:`check_row`; a call that raises leaves the sequence unchanged."""
        check_row(batch, self.geometry, earlier=self.cache.columns)
        logits = self.last_logits(batch, self.cache.scope)
        self.cache.commit()
        return logits


def check_row(batch: Batch, sizes: ModelShape, *, earlier: int = 0) -> None:
    """Check one row's ids and length against the model: MLX silently reads out of range.

    Args:
        batch: the new columns.
        sizes: the model's sizes.
        earlier: the number of columns before them.

    Raises:
        DataError: more columns than the model has positions, or ids outside its vocabulary.
        ValueError: the batch is not one row of at least one column.
    """
    ids = batch["ids"]
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 1:
        raise ValueError(f"ids have shape {ids.shape}, not (1, T): one row of T >= 1 columns")
    if (columns := earlier + ids.shape[1]) > sizes.positions:
        what = f"a sequence of {columns} tokens, and the model was made for {sizes.positions}"
        fix = "fewer tokens, or a model trained with a larger train.seq_len"
        raise DataError(what, where="decoding", fix=fix)
    wrong = ids[(ids < 0) | (ids >= sizes.vocab)]
    if wrong.size:
        what = f"id {wrong[0]} is outside the model's vocabulary of {sizes.vocab}"
        fix = "the tokenizer that the model was trained with"
        raise DataError(what, where="decoding", fix=fix)
