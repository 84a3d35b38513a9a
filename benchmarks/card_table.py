"""The techniques that get a technique card, with their company and options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["AWAITED", "REFERENCE", "SHAPE", "TABLE", "Judged", "active", "divided"]

REFERENCE = ("muon",)
"""The plugin set that most techniques are compared with, as they are used with it."""

SHAPE = (
    *("model.layers=6", "model.vocab=50304", "model.tied=false"),
    *("train.rows=32", "train.seq_len=1024", "train.lr=0.002", "train.schedule=cosine"),
    *("train.warmup=0.05", "eval.tokens=262144"),
)
"""Settings in addition to preset ``small``. The head is not tied to the embedding: techniques that change
one of them would change both.
"""


@dataclass(frozen=True)
class Judged:
    """One technique."""

    plugin: str
    beside: tuple[str, ...] = REFERENCE
    options: tuple[str, ...] = ()  # key=value, if the defaults do not suit this shape
    cost: float = 1.0  # approximate cost of a run relative to the reference's, to divide the GPUs

    @property
    def sets(self) -> set[frozenset[str]]:
        """The plugin sets trained for it, besides the reference."""
        both = {frozenset(self.beside), frozenset((*self.beside, self.plugin))}
        return both - {frozenset(REFERENCE)}


TABLE = (
    Judged("muon", beside=()),
    Judged("value_embeds"),
    Judged("zero_init"),
    Judged("qk_norm"),
    Judged("attn_scale", beside=("muon", "qk_norm")),
    Judged("softcap"),
    Judged("relu2"),
    Judged("embed_norm"),
    Judged("normuon", cost=1.1),
    Judged("polar_express", cost=1.1),
    Judged("cautious_wd", cost=1.1),
    Judged("half_rope"),
    Judged("sparse_gate"),
    Judged("xsa", cost=1.1),
    Judged("paired_heads", cost=1.2),
    Judged("smear"),
    Judged("bigram_hash", cost=1.2),
    Judged("embed_skip"),
    Judged("unet_skip"),
    Judged("backout"),
    Judged("residual_decay"),
    Judged("liger"),
    Judged("untie_head"),
    Judged("qat"),
    Judged("mtp", options=("mtp.weights=[0.5]",), cost=1.4),
    Judged("windows", options=("windows.stages=2",), cost=1.3),
    Judged("moe", cost=1.6),
    Judged("best_fit"),
    Judged("eos_align"),
    Judged("length_buckets"),
    Judged("shuffle_rows"),
    Judged("value_residual"),
    Judged("key_offset", beside=("half_rope", "muon")),
    Judged("mudd", cost=1.3),
    Judged("cached_stream"),
    Judged("hyper_connections", cost=1.3),
    Judged("muon_eq"),
    Judged("uw_floor"),
    Judged("head_muon"),
    Judged("soap_muon", cost=1.5),
    Judged("snoo"),
    Judged("logit_rescale"),
    Judged("value_init"),
    Judged("layer_drop"),
    Judged("prefix_tokens", cost=1.3),
    Judged("power_cooldown"),
    Judged("infinite_lr"),
    Judged("embed_grad_shrink"),
    Judged("two_step_embed"),
    Judged("layer_clip"),
    Judged("iha"),
    Judged("diff_attn", cost=1.3),
    Judged("gated_delta", cost=2.0),
    Judged("mla", cost=1.2),
    Judged("layer_loop", cost=1.3),
    Judged("lion", beside=()),
    Judged("cautious_adam", beside=()),
    Judged("ademamix", beside=()),
    Judged("mars", beside=()),
    Judged("adafactor", beside=()),
    Judged("adam8bit", beside=()),
    Judged("schedule_free", beside=()),
    Judged("galore", beside=()),
    Judged("soap", beside=(), cost=1.5),
    Judged("shampoo", beside=(), cost=1.5),
    Judged("agc", beside=()),
    Judged("ema", options=("ema.decay=0.95",)),
    Judged("swa"),
    Judged("ema_nesterov"),
    Judged("dc_mha", cost=2.0),
    Judged("attn_sink", cost=2.0),
    Judged("forgetting_attn", cost=2.0),
    Judged("stochastic_depth"),
    Judged("seq_schedule"),
    Judged("batch_schedule"),
    Judged("length_curriculum"),
    Judged("prefix_kv", cost=1.7),
    Judged("simctg", cost=1.2),
)
"""The first entries are run first. Left out: ``role_lr``, which has no effect at its defaults,
and the trackers, which do not change training. ``mtp`` and ``windows`` have two stages here: each is
compiled, and a run of a few hundred steps is short for more.
"""

AWAITED: tuple[Judged, ...] = ()
"""Techniques without a card until the next measurement, which then belong to TABLE."""


def active(judged: Iterable[Judged]) -> tuple[str, ...]:
    """Return all active plugins."""
    return tuple(sorted({*REFERENCE}.union(*({one.plugin, *one.beside} for one in judged))))


def divided(judged: Sequence[Judged], parts: int) -> list[list[Judged]]:
    """Divide into shares of about equal cost; techniques that share a plugin set stay together.

    Args:
        judged: in the order of their runs.
        parts: number of shares.
    """
    bundles: list[list[Judged]] = []
    for one in judged:
        near = [b for b in bundles if any(one.sets & other.sets for other in b)]
        bundles = [b for b in bundles if b not in near]
        bundles.append([*(other for b in near for other in b), one])
    shares: list[list[Judged]] = [[] for _ in range(parts)]
    for bundle in sorted(bundles, key=_cost, reverse=True):
        min(shares, key=_cost).extend(bundle)
    order = {one.plugin: index for index, one in enumerate(judged)}
    return [sorted(share, key=lambda one: order[one.plugin]) for share in shares if share]


def _cost(judged: Sequence[Judged]) -> float:
    costs: dict[frozenset[str], float] = {}
    for one in judged:
        costs |= dict.fromkeys(one.sets, one.cost)
    return sum(costs.values())
