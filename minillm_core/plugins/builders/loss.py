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
from minillm_core.plugins.slots import LOSS, Claim, Terms, clash_fix

TRAINING = ("smoothing", "z")
"""Parts of the form that the held-out loss leaves out: ``LossForm.evaluated``."""


GIVES = {"losses": "losses", "logits": "all_logits"}
"""Output of a reference model -> the method of its decoder that computes it."""

LEFT_OUT = "gather:positions left out of the head"
"""Evidence key: the number of positions that gathering leaves out of the head."""
POSITIONS = "gather:positions"
"""Evidence key: the number of all positions, if a plan gathers."""


@dataclass(frozen=True)
class Reference:
    """A frozen reference model (teacher), and the field that it computes from each batch."""

    name: str  # of the field
    owner: str
    gives: str  # of GIVES
    model: Any = field(compare=False, repr=False)  # a FrozenModel

    @property
    def method(self) -> str:
        """The name of the decoder's method that computes the field."""
        return GIVES[self.gives]

    def __str__(self) -> str:
        return f"{self.gives} of {self.model.path}"


class LossSlots:
    """The slots of the loss, each declared once, and their resolution.

    Args:
        length: tokens of a row.
        rows: rows of a micro-batch.
        dim: width of the residual stream.
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
        """Resolve the slots to the loss; raise on a conflict."""
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
                fix=clash_fix(gather.owner, rows.node.owner),
            ).concerning("loss.gather", plugins=(gather.owner, rows.node.owner))
        return LossSpec(form, owners, targets, terms, rows, weights, gather)


class LossBuilder(Builder):
    """The slots of the loss, bound to one plugin. The main target is the next token, with weight 1.

    Attributes:
        dim: C, the width of the residual stream.
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
        """Claim per argument: softcap and scale of the logits, label smoothing, z-loss; loss kernels support them.

        logits = cap(scale * hidden weight^T); a position's loss is
        -(1 - smoothing) log p[target] - smoothing mean(log p) + z * logsumexp(logits)^2.
        The held-out loss uses the same logits, without smoothing and z. An argument left at its default
        is not claimed: other plugins may set it.

        Args:
            cap: softcap that bounds the logits: ``TanhCap(30.0)``, ``SigmoidCap(a, b, c)``; cap, a and c > 0.
            scale: factor on the product, above 0.
            smoothing: label smoothing, in [0, 1).
            z: weight of the squared log-sum-exp (z-loss), at least 0.

        Raises:
            PlanError: a number outside its range, or a cap of another kind.

        ::

            loss.logits(cap=TanhCap(30.0), z=1e-4)
        """
        if not isinstance(cap, TanhCap | SigmoidCap | None):
            raise self._refusal("loss.logits", f"cap={cap!r}", fix="cap=TanhCap(30.0)")
        form = LossForm(cap, scale, smoothing, z)
        numbers = {"scale": scale, "smoothing": smoothing, "z": z} | (vars(cap) if cap else {})
        self._finite("loss.logits", **numbers)
        fits = {"smoothing": 0 <= smoothing < 1, "z": z >= 0, "b": True}
        for name, number in numbers.items():
            if not fits.get(name, number > 0):
                fix = "cap, a, c and scale above 0, smoothing in [0, 1), z at least 0"
                raise self._refusal("loss.logits", f"{name}={number}", fix=fix)
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
        """Term: a further target, the token ``offset`` ahead or a batch field; in training only.

        Args:
            weight: a number or a schedule.
            offset: distance of the predicted token; 2 is the token after the next (multi-token prediction).
            field: name of an int32 field (rows, T) of target ids, -1 where there is no target.
            until: fraction of the run after which the step is compiled without the target and no longer
                pays for it; None: it is always computed, whatever its weight.
            weight_field: name of a float32 field (rows, T) that multiplies the weight at each position.

        ::

            loss.target(piecewise((0, 0.5), (0.3, 0.0)), offset=2, until=0.3)

        Raises:
            PlanError: both or neither of offset and field; offset 1, which is the main target's, or an
                offset beyond the row; ``until`` outside the run.
        """
        said, length = f"plugin '{self._owner}', loss.target:", self._slots.length
        if (offset is None) == (field is None):
            raise PlanError(f"{said} give offset= or field=")
        if offset is not None and (not isinstance(offset, int) or offset < 2):
            what = f"{said} offset {offset}; 1 is the main target, further ones begin at 2"
            raise PlanError(what)
        if offset is not None and offset > length:
            what = f"{said} offset {offset}, and a row of {length} tokens has no token so far ahead"
            fix = f"train.seq_len={offset} or more, or nearer targets"
            raise PlanError(what, where=f"train.seq_len={length}", fix=fix)
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
        """Term: x (B, T, C) after the last norm, head (V, C), form -> a scalar, a mean over labels; in training.

        The scalar is logged separately and unweighted, as ``terms`` in metrics.jsonl. In the objective it is
        multiplied by ``weight`` and by the micro-batch's share of the step's supervised tokens. Nodes must emit a
        mean over rows, so that data-parallel processes sum to the result of one process. ``form`` is the form of
        the held-out loss: ``ops.logits(x, head, form)`` applies every plugin's cap and scale. The term's
        parameters, and those of streams that only it reads, are left out of an exported model.

        Args:
            key: the name in metrics.jsonl.
            cls: a Module class whose ``forward`` returns the scalar; None: ``emitted`` is set.
            weight: a number or a schedule.
            emitted: a name in the ``terms`` of this plugin's nodes; their values are summed.
            arguments: constructor arguments, JSON values.

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

        ``losses`` are the main target's losses in nats, 0 at unsupervised positions. They cost one more
        product with the head; no gradient flows through them or through the weights. A batch field
        ``weights`` is multiplied by the result. The objective is the sum of weight x loss over all
        positions, divided by the number of supervised positions of the step: for a mean over a subset,
        return weights whose mean over the supervised positions is 1. The logged loss stays the
        unweighted one, over all supervised positions.

        Args:
            cls: a Module class.
            arguments: constructor arguments, JSON values.

        ::

            loss.weights(HardestHalf)
        """
        node = self._loss_node("loss.weights", ("losses", "x"), cls, arguments, "weights")
        self._slots.weights.add(self._owner, node)

    def rows(self, cls: type, *, keep: float, **arguments: Any) -> None:
        """Claim: losses float32 (B, T) -> float32 (B,), a score per row; only the highest rows are trained on.

        A training step first runs a forward pass without gradient over all rows of the micro-batch, then
        selects the kept rows on the device; the rest of the step uses only these. The objective is the
        mean over their supervised positions. The logged loss is that of all rows, from the first pass, in
        the form of the held-out loss; further targets and terms are computed on the kept rows.

        Args:
            cls: a Module class.
            keep: fraction of a micro-batch's rows (``train.rows``) that is kept, rounded to a whole
                number of rows, at least one.
            arguments: constructor arguments, JSON values.

        Raises:
            PlanError: a fraction that keeps all rows, or that is outside (0, 1).

        ::

            loss.rows(Learnability, keep=0.25)
        """
        there = self._slots.rows_there
        kept = max(1, round(keep * there))
        if not (0 < keep < 1 and kept < there):
            what = f"keep={keep:g} of {there} rows keeps {kept}; it must keep fewer than {there}"
            fix = "a smaller share, or more rows: train.rows"
            raise self._refusal("loss.rows", what, where=f"train.rows={there}", fix=fix)
        node = self._loss_node("loss.rows", ("losses",), cls, arguments, "rows")
        self._slots.rows.add(self._owner, RowChoice(node, kept / there))

    def gather(self, *, buckets: int) -> None:
        """Claim: head and cross-entropy are computed at supervised positions only, in training.

        A position is supervised if the main target or a further target has a label there. If only the
        loss reads the activations after the last attention, the last block's MLP is computed at these
        positions only, too. Their number in a micro-batch is padded with unsupervised positions up to one
        of ``buckets`` sizes; torch compiles each size when it first occurs. Loss and gradients equal those
        computed at all positions. Terms, weights and references see every position.

        Args:
            buckets: the number of sizes, spaced 1 / buckets of a micro-batch's positions.

        Raises:
            PlanError: fewer than two sizes; while resolving, a plan that also uses :meth:`rows`.

        ::

            loss.gather(buckets=16)
        """
        if buckets < 2:
            what = f"buckets={buckets} would compute every position"
            raise self._refusal("loss.gather", what, fix="2 or more, such as 16")
        self._slots.gather.add(self._owner, Gathering(self._owner, buckets))

    def reference(self, name: str, model: Any, *, gives: str = "losses") -> None:
        """Term: a frozen model (teacher) computes a field from each batch; nodes of the loss read it as ``name``.

        The model runs on the device of the run, in its compute dtype, without gradient, in training only.
        Terms, weights, rows and a target's ``weight_field`` may read the field; nodes of the model may
        not. Its weights are in no checkpoint and no export; a run is resumed only with the same weights.
        Its vocabulary and tokenizer must be the run's.

        Args:
            name: the field's name.
            model: ``FrozenModel(folder)``, the folder of a run, loaded when training starts.
            gives: ``losses``, float32 (B, T), the loss of the batch's labels in nats, 0 at unsupervised
                positions; or ``logits``, float32 (B, T, V).

        Raises:
            PlanError: a name in use, or an unknown value of ``gives``.

        ::

            loss.reference("teacher", FrozenModel("runs/teacher"), gives="logits")
        """
        self._named("loss.reference", name)
        if gives not in GIVES:
            fix = f"one of {', '.join(GIVES)}"
            raise self._refusal("loss.reference", f"a model gives no {gives!r}", fix=fix)
        if not hasattr(model, "arrays"):
            fix = "FrozenModel(folder), from minillm_core"
            raise self._refusal("loss.reference", f"{model!r} is not a frozen model", fix=fix)
        self._slots.references.add(self._owner, name, Reference(name, self._owner, gives, model))

    def _loss_node(
        self, slot: str, own: tuple[str, ...], cls: type, arguments: dict[str, Any], name: str
    ) -> Node:
        """Return a node outside the model, which may not emit terms or statistics."""
        node = self._node(slot, own, cls, arguments, name)
        if cls.terms or cls.statistics:  # type: ignore[attr-defined]
            fix = "emit terms and statistics from a node inside the model"
            raise self._refusal(node.slot, f"{cls.__name__} emits more than its result", fix=fix)
        return node
