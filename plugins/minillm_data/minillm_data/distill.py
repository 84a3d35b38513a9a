"""Knowledge distillation: match a teacher's next-token distribution (Hinton et al., arXiv:1503.02531).

    loss = CE(labels) + weight t^2 mean KL,     p = softmax(teacher / t),  q = softmax(model / t)

    forward     KL(p, q) = sum p (log p - log q)      cover all that the teacher holds likely
    reverse     KL(q, p) = sum q (log q - log p)      nothing that the teacher holds unlikely (arXiv:2306.08543)

The teacher is a trained run with the same tokenizer, frozen. A temperature t above 1 reveals how it
ranks unlikely tokens; the factor t^2 restores the gradient scale that this loses, so that ``weight``
means the same at any t. The mean is over supervised tokens. Both models' logits are final ones: each
model's own cap or scale is applied (``softcap``, ``logit_rescale``).

``only=true`` gives every label a weight of 0: the model learns from the teacher alone. The reported
loss is still that of the labels, so runs are comparable.

Cost: a forward pass of the teacher, and memory for both models' logits of a micro-batch at once, several
times B T V numbers of 4 bytes: use small vocabularies, or fewer rows with train.accumulate.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from minillm_core import FrozenModel, Module, Plugin, option

__all__ = ["Distill", "Divergence"]


class Distill(Plugin, api=1):
    """The model's distribution of each token is trained to match that of a teacher model."""

    model: str = option("runs/teacher", help="the teacher: a run's folder", min_length=1)
    weight: float = option(
        1.0, gt=0, help="weight of the divergence; the labels' loss has weight 1"
    )
    temperature: float = option(2.0, gt=0, help="divisor of both models' logits")
    direction: Literal["forward", "reverse"] = option(
        "forward",
        help="KL divergence: forward covers the teacher's likely tokens, reverse avoids its "
        "unlikely ones",
    )
    only: bool = option(False, help="train on the teacher's distribution only, not on the labels")

    def compute_loss(self, loss):
        loss.reference("distill_teacher", FrozenModel(self.model), gives="logits")
        given = {"temperature": self.temperature, "reverse": self.direction == "reverse"}
        loss.term("distill", Divergence, weight=self.weight, **given)
        if self.only:
            loss.weights(Nothing)


class Divergence(Module):
    """x (B, T, C), head (V, C), form, teacher (B, T, V), labels (B, T) -> t^2 mean KL, nats."""

    reads: ClassVar = {"teacher": "distill_teacher"}

    def __init__(self, temperature: float, reverse: bool) -> None:
        super().__init__()
        self.temperature, self.reverse = temperature, reverse

    def forward(self, x: Any, head: Any, form: Any, teacher: Any, labels: Any) -> Any:
        """Compute the mean over supervised positions; 0 if there are none."""
        ops: Any = self.ops
        ours = ops.logits(ops.reshape(x, (-1, x.shape[-1])), head, form)  # (N, V), float32
        theirs = ops.reshape(teacher, ours.shape)
        log_q, log_p = (self.log_softmax(one / self.temperature) for one in (ours, theirs))
        first, second = (log_q, log_p) if self.reverse else (log_p, log_q)
        apart = ops.sum(ops.exp(first) * (first - second), -1)  # (N,)
        there = ops.astype(ops.reshape(labels, (-1,)) >= 0, "float32")
        count = ops.sum(there)
        mean = ops.sum(apart * there) / ops.maximum(count, ops.like(1.0, count))
        return mean * self.temperature**2

    def log_softmax(self, logits: Any) -> Any:
        """Compute log-softmax over the vocabulary: (N, V) -> (N, V)."""
        return logits - self.ops.logsumexp(logits, -1, keepdims=True)


class Nothing(Module):
    """losses (B, T) -> 0 for each."""

    def forward(self, losses: Any) -> Any:
        """Return zero weights: losses (B, T) -> (B, T)."""
        return losses * 0.0
