"""The slots of the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.decoder import LossSpec, Target, Term
from minillm_core.ops.form import LossForm, SigmoidCap, TanhCap
from minillm_core.optim.schedules import stages
from minillm_core.plugins.builders.base import Builder
from minillm_core.plugins.slots import Claim, Terms

TRAINING = ("smoothing", "z")
"""Parts of the form that held-out text is not judged by: ``LossForm.evaluated``."""


class LossSlots:
    """The slots of the loss, each declared once, and their resolution.

    Args:
        length: tokens of a row.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.form: dict[str, Claim[Any]] = {
            name: Claim(
                f"loss.logits[{name}]",
                default="none" if value is None else str(value),
                shapes=name not in TRAINING,
            )
            for name, value in vars(LossForm()).items()
        }
        why, main = "adds it, in training alone", {"next": "weight 1"}
        self.targets: Terms[Target] = Terms("loss.target", why=why, always=main, shapes=False)
        self.terms: Terms[Term] = Terms("loss.term", why=why, shapes=False)

    def resolve(self) -> LossSpec:
        """Resolve to the loss; every clash is an error."""
        claimed = {name: claim for name, claim in self.form.items() if claim.held}
        form = replace(LossForm(), **{name: claim.resolve() for name, claim in claimed.items()})
        owners = tuple((name, claim.owner) for name, claim in claimed.items())
        targets = tuple(target for _, _, target in self.targets.resolve())
        terms = tuple(term for _, _, term in self.terms.resolve())
        return LossSpec(form, owners, targets, terms)


class LossBuilder(Builder):
    """The loss, as one plugin sees it. The main target is the next token, with weight 1."""

    _slots: LossSlots

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
    ) -> None:
        """Term: predict the token ``offset`` ahead, or a batch field, too; in training alone.

        Args:
            weight: a number or a schedule.
            offset: 2 is the token after the next.
            field: int32 (rows, T), -1 where there is nothing to predict.
            until: the share of the run after which the step is compiled without it, and costs
                nothing for it any more; None: it stays, whatever its weight.

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
        target = Target(key, self._owner, setting, offset, field, stage)
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
        """Term: x (B, T, C) after the last norm -> a scalar, a mean over its micro-batch; in training.

        It is reported apart, unweighted, as ``terms`` in metrics.jsonl; the objective has it times
        ``weight`` and its micro-batch's share of supervised tokens.

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
            node = self._node(f"loss.term[{key}]", ("x",), cls, arguments, key)
            if cls.terms or cls.statistics:
                raise self._refusal(
                    node.slot,
                    f"{cls.__name__} emits more than its result",
                    fix="emit terms and statistics from a node inside the model",
                )
        setting = self._setting(f"loss.{key}", weight)
        self._slots.terms.add(self._owner, key, Term(key, self._owner, setting, node, emitted))
