"""The slots of the loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.decoder import Gathering, LossSpec, RowChoice, Target, Term
from minillm_core.nn.node import Node
from minillm_core.ops.form import LossForm, SigmoidCap, TanhCap
from minillm_core.optim.schedules import stages
from minillm_core.plugins.builders.base import Builder, ValueTable
from minillm_core.plugins.slots import LOSS, Claim, Terms, way_out

TRAINING = ("smoothing", "z")
"""Parts of the form that held-out text is not judged by: ``LossForm.evaluated``."""


GIVES = {"losses": "losses", "logits": "all_logits"}
"""What a reference model gives -> the method of its decoder."""

LEFT_OUT = "gather:positions left out of the head"
"""The evidence of gathered positions: how many there were less than all."""
POSITIONS = "gather:positions"
"""How many there were in all, where a plan gathers."""


@dataclass(frozen=True)
class Reference:
    """A frozen model beside the one that is trained, and what it gives for each batch."""

    name: str  # of the field
    owner: str
    gives: str  # of GIVES
    model: Any = field(compare=False, repr=False)  # a FrozenModel

    @property
    def method(self) -> str:
        """The method of its decoder that gives it."""
        return GIVES[self.gives]

    def __str__(self) -> str:
        return f"{self.gives} of {self.model.path}"


class LossSlots:
    """The slots of the loss, each declared once, and their resolution.

    Args:
        length: tokens of a row.
        rows: of a micro-batch.
        dim: width of the stream.
    """

    def __init__(self, length: int, rows: int, dim: int) -> None:
        self.length, self.rows_there, self.dim = length, rows, dim
        self.form: dict[str, Claim[Any]] = {
            name: Claim(
                f"loss.logits[{name}]",
                default="none" if value is None else str(value),
                shapes=name not in TRAINING,
            )
            for name, value in vars(LossForm()).items()
        }
        why, main = "adds it, in training alone", {"next": "weight 1"}
        alone: dict[str, Any] = {"order": LOSS, "shapes": False}
        self.targets: Terms[Target] = Terms("loss.target", why=why, always=main, **alone)
        self.terms: Terms[Term] = Terms("loss.term", why=why, **alone)
        self.rows: Claim[RowChoice] = Claim("loss.rows", default="all of them", **alone)
        self.weights: Claim[Node] = Claim("loss.weights", default="1", **alone)
        self.gather: Claim[Gathering] = Claim(
            "loss.gather", default="every position", evidence=LEFT_OUT, **alone
        )
        why = "reads it in every training step"
        self.references: Terms[Reference] = Terms("loss.reference", why=why, **alone)

    def resolve(self) -> LossSpec:
        """Resolve to the loss; every clash is an error."""
        claimed = {name: claim for name, claim in self.form.items() if claim.held}
        form = replace(LossForm(), **{name: claim.resolve() for name, claim in claimed.items()})
        owners = tuple((name, claim.owner) for name, claim in claimed.items())
        targets = tuple(target for _, _, target in self.targets.resolve())
        terms = tuple(term for _, _, term in self.terms.resolve())
        rows, weights, gather = (s.resolve() for s in (self.rows, self.weights, self.gather))
        if rows and gather:
            raise PlanError(
                f"'{gather.owner}' gathers supervised positions while a batch is made ready, and "
                f"'{rows.node.owner}' chooses rows later, on the device",
                where="loss.gather, loss.rows",
                fix=way_out(gather.owner, rows.node.owner),
            ).concerning("loss.gather", plugins=(gather.owner, rows.node.owner))
        return LossSpec(form, owners, targets, terms, rows, weights, gather)


class LossBuilder(Builder):
    """The loss, as one plugin sees it. The main target is the next token, with weight 1.

    Attributes:
        dim: C, the width of the stream.
    """

    _slots: LossSlots

    def __init__(self, owner: str, values: ValueTable, slots: LossSlots) -> None:
        super().__init__(owner, values, slots)
        self.dim = slots.dim

    def logits(
        self,
        *,
        cap: TanhCap | SigmoidCap | None = None,
        scale: float = 1.0,
        smoothing: float = 0.0,
        z: float = 0.0,
    ) -> None:
        """Claim each: how the product becomes logits, and logits a loss. Kernels know this list.

        logits = cap(scale * hidden weight^T); a position's loss is
        -(1 - smoothing) log p[target] - smoothing mean(log p) + z * logsumexp(logits)^2.
        Held-out text is judged with the same logits, without smoothing and z. What is left as it
        is by default stays free for other plugins.

        Args:
            cap: bounds the logits: ``TanhCap(30.0)``, ``SigmoidCap(a, b, c)``.
            scale: of the product.
            smoothing: of the labels, in [0, 1).
            z: weight of the squared log-sum-exp (z-loss).

        ::

            loss.logits(cap=TanhCap(30.0), z=1e-4)
        """
        form = LossForm(cap, scale, smoothing, z)
        self._finite("loss.logits", **vars(form) | (vars(cap) if cap else {}))
        for name in form.named:
            self._slots.form[name].add(self._owner, getattr(form, name))

    def target(
        self,
        weight: Any,
        *,
        offset: int | None = None,
        field: str | None = None,
        until: float | None = None,
        weight_field: str | None = None,
    ) -> None:
        """Term: predict the token ``offset`` ahead, or a batch field, too; in training alone.

        Args:
            weight: a number or a schedule.
            offset: 2 is the token after the next.
            field: int32 (rows, T), -1 where there is nothing to predict.
            until: the share of the run after which the step is compiled without it, and costs
                nothing for it any more; None: it stays, whatever its weight.
            weight_field: float32 (rows, T), by which the weight is multiplied at each position.

        ::

            loss.target(piecewise((0, 0.5), (0.3, 0.0)), offset=2, until=0.3)

        Raises:
            PlanError: both or neither of offset and field; the main target's offset, or one that
                no token of a row has; an end outside the run.
        """
        said, length = f"plugin '{self._owner}', loss.target:", self._slots.length
        if (offset is None) == (field is None):
            raise PlanError(f"{said} give offset= or field=")
        if offset is not None and offset < 2:
            raise PlanError(
                f"{said} offset {offset}; 1 is the main target, further ones begin at 2"
            )
        if offset is not None and offset > length:
            raise PlanError(
                f"{said} offset {offset}, and a row of {length} tokens has no token so far ahead",
                where=f"train.seq_len={length}",
                fix=f"train.seq_len={offset} or more, or nearer targets",
            )
        key = field or f"offset{offset}"
        if until is not None and not 0 < until <= 1:
            raise PlanError(f"{said} until={until}, a share of the run")
        stage = None
        if until is not None and until < 1:
            there = stages((0, 1), (until, 0))
            stage = self._values.add(self._owner, f"{self._owner}.loss.{key}.there", there)
        setting = self._setting(f"loss.{key}", weight)
        target = Target(key, self._owner, setting, offset, field, stage, weight_field)
        self._slots.targets.add(self._owner, key, target)

    def term(
        self,
        key: str,
        cls: type | None = None,
        *,
        weight: Any = 1.0,
        emitted: str | None = None,
        **arguments: Any,
    ) -> None:
        """Term: x (B, T, C) after the last norm, head (V, C), form -> a scalar, a mean over the labels of its micro-batch; in training.

        It is reported apart, unweighted, as ``terms`` in metrics.jsonl; the objective has it times
        ``weight`` and its micro-batch's share of supervised tokens. What nodes emit is a mean over rows.
        Processes that divide a micro-batch by rows then add up to what one computes. ``form`` says how held-out text is
        judged: ``ops.logits(x, head, form)`` has every plugin's cap and scale. Its parameters, and those of streams
        that it alone reads, are left out of an exported model.

        Args:
            key: what it is reported as.
            cls: a Module whose ``forward`` gives it; or
            weight: a number or a schedule.
            emitted: a name in the ``terms`` of this plugin's nodes, summed over them.
            arguments: of the Module's constructor, JSON.

        ::

            loss.term("balance", emitted="balance", weight=0.01)

        Raises:
            PlanError: both or neither of cls and emitted.
        """
        if (cls is None) == (emitted is None):
            raise PlanError(f"plugin '{self._owner}', loss.term: give a Module or emitted=")
        node = None
        if cls is not None:
            node = self._loss_node(f"loss.term[{key}]", ("x", "head", "form"), cls, arguments, key)
        setting = self._setting(f"loss.{key}", weight)
        self._slots.terms.add(self._owner, key, Term(key, self._owner, setting, node, emitted))

    def weights(self, cls: type, **arguments: Any) -> None:
        """Claim: losses float32 (B, T), x (B, T, C) -> float32 (B, T), the weight of each position.

        ``losses`` are the nats of the main target at each position, 0 where nothing is predicted.
        They cost the head's product once more, and no gradient flows through them or through the
        weights. A field ``weights`` of the batch is multiplied by these. The objective is the sum of
        weight x loss over all positions, divided by the step's supervised positions: for a mean
        over fewer of them, return weights whose mean over the supervised positions is 1. The loss
        that is reported stays the plain one, over all of them.

        Args:
            cls: a Module.
            arguments: of its constructor, JSON.

        ::

            loss.weights(HardestHalf)
        """
        node = self._loss_node("loss.weights", ("losses", "x"), cls, arguments, "weights")
        self._slots.weights.add(self._owner, node)

    def rows(self, cls: type, *, keep: float, **arguments: Any) -> None:
        """Claim: losses float32 (B, T) -> float32 (B,), a score of each row: the highest are trained on.

        Before a training step's own pass there is one without gradient over all rows of the
        micro-batch; a share of them is then taken on the device, and the rest of the step sees no
        others. Its objective is the mean over their supervised positions. The loss that is reported
        is that of all rows, from the first pass, by which held-out text is judged as well; further
        targets and terms are of the rows kept.

        Args:
            cls: a Module.
            keep: the share of a micro-batch's rows (``train.rows``) that is kept, rounded to a whole
                number of them, one at least.
            arguments: of the Module's constructor, JSON.

        Raises:
            PlanError: the share keeps all rows, or is none.

        ::

            loss.rows(Learnability, keep=0.25)
        """
        there = self._slots.rows_there
        kept = max(1, round(keep * there))
        if not (0 < keep < 1 and kept < there):
            what = f"keep={keep:g} of {there} rows is {kept}, and less than all are to be kept"
            fix = "a smaller share, or more rows: train.rows"
            raise self._refusal("loss.rows", what, where=f"train.rows={there}", fix=fix)
        node = self._loss_node("loss.rows", ("losses",), cls, arguments, "rows")
        self._slots.rows.add(self._owner, RowChoice(node, kept / there))

    def gather(self, *, buckets: int) -> None:
        """Claim: the head and the cross-entropy are computed at supervised positions alone, in training.

        They are those at which the main target or a further one has something to predict. Where the
        loss alone reads what follows the last attention, the last block's MLP is computed at those
        alone, too. Their number in a micro-batch is rounded up to one of ``buckets`` sizes, with
        positions that have no target: each size is a shape of its own, which torch compiles when it
        is first met. Loss and gradients are those of all positions. Terms, weights and references see
        every position.

        Args:
            buckets: sizes, 1 / buckets of a micro-batch's positions apart.

        Raises:
            PlanError: fewer than two sizes; or together with :meth:`rows`, when the plan is resolved.

        ::

            loss.gather(buckets=16)
        """
        if buckets < 2:
            what = f"buckets={buckets}, which is every position"
            raise self._refusal("loss.gather", what, fix="2 or more, such as 16")
        self._slots.gather.add(self._owner, Gathering(self._owner, buckets))

    def reference(self, name: str, model: Any, *, gives: str = "losses") -> None:
        """Term: a frozen model computes a field from each batch, which nodes of the loss read by ``name``.

        It runs on the device of the run, in its compute dtype, without gradient, in training alone:
        terms, weights, rows and a target's ``weight_field`` may read it, nodes of the model may
        not. It is in no checkpoint and no export. A resumed run refuses other weights than those it
        began with. Its vocabulary and tokenizer must be the run's.

        Args:
            name: of the field.
            model: ``FrozenModel(folder)``, a run's folder, read when a run starts.
            gives: ``losses``, float32 (B, T), nats of the batch's labels, 0 where nothing is
                predicted; or ``logits``, float32 (B, T, V).

        Raises:
            PlanError: a name that is taken, or it gives no such thing.

        ::

            loss.reference("teacher", FrozenModel("runs/teacher"), gives="logits")
        """
        self._named("loss.reference", name)
        if gives not in GIVES:
            fix = f"one of {', '.join(GIVES)}"
            raise self._refusal("loss.reference", f"a model gives no {gives!r}", fix=fix)
        if not hasattr(model, "arrays"):
            fix = "FrozenModel(folder), from minillm_core"
            raise self._refusal("loss.reference", f"{model!r} is no frozen model", fix=fix)
        self._slots.references.add(self._owner, name, Reference(name, self._owner, gives, model))

    def _loss_node(
        self, slot: str, own: tuple[str, ...], cls: type, arguments: dict[str, Any], name: str
    ) -> Node:
        """Make a node outside the model: it has a result alone."""
        node = self._node(slot, own, cls, arguments, name)
        if cls.terms or cls.statistics:  # type: ignore[attr-defined]
            raise self._refusal(
                node.slot,
                f"{cls.__name__} emits more than its result",
                fix="emit terms and statistics from a node inside the model",
            )
        return node
