"""The cost model: bytes, FLOPs and bandwidths -> seconds of a step, from 1 to 1,024 cards.

    step      = computing + update + exposed + slowed + waiting + bubble
    computing = FLOPs / (peak x utilisation); with the recomputed ones of activation checkpointing
    update    = FLOPs / (peak x utilisation) + bytes / memory bandwidth
    exposed   = time of collectives beyond the overlapping computation
    slowed    = SLOWED x time of overlapped collectives: their kernels compete for memory and cores
    waiting   = SPREAD x E[largest of n normal samples] x computing: all cards wait for the slowest
    bubble    = (stages - 1) / micro-batches x computing: pipeline stages wait for each other

A collective of S bytes over n cards on h hosts takes latency + bytes / bandwidth, by NCCL's choice of:

    ring      base + hops, each of one card to the next;  2 (n - 1) / n S bytes for an all-reduce,
              half of them for a reduce-scatter or an all-gather
    tree      base + 2 (cards a host - 1 + log2 h hops);  2 S bytes; for an all-reduce alone
    pairs     base + a hop to each other card;  (n - 1) / n S bytes; an all-to-all
    one       base + a hop;  S bytes; a send to one other card

The cards of a collective are adjacent or ``stride`` ranks apart: then a host has fewer of them.

Latencies are those of NCCL's own model (``src/graph/tuning.cc``, protocol Simple). docs/scale.md compares
predictions with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist

from minillm_core import ConfigError
from minillm_core.commands import nearest, plain

MOST = 1024
"""Maximum number of cards of the model."""

BASE = {"ring": 8.4e-6, "tree": 0.0, "pairs": 8.4e-6, "one": 8.4e-6}
NVLINK = {"ring": 3.4e-6, "tree": 28e-6, "pairs": 3.4e-6, "one": 3.4e-6}
NETWORK = {"ring": 9.6e-6, "tree": 50e-6, "pairs": 9.6e-6, "one": 9.6e-6}
"""Base latency, and latency per hop within and between hosts, in seconds: NCCL's own numbers."""

TREE = 0.9
"""Bandwidth of a tree relative to a ring: NCCL's own number."""

REACHED = 0.70
"""Achieved fraction of link bandwidth: 315 of 450 GB/s between two H200, in all-reduces of 16 to 512 MiB."""

SLOWED = 0.5
"""Slow-down of computation per second of an overlapped collective: 1.31 B under FSDP2, 1 to 2 cards."""

SPREAD = 0.011
"""Relative standard deviation of a card's step time: Llama 3.1 8B under FSDP2, 8 to 128 cards."""

UTILISATION = 0.45
"""Model FLOPs utilisation (MFU) of one card: preset gpt2-124m, compiled, bfloat16, H100 (README, Throughput)."""


@dataclass(frozen=True)
class Card:
    """A card and its host, from the vendor's data sheets."""

    name: str
    flops: float  # dense bfloat16, FLOP/s
    memory: float  # bytes
    bandwidth: float  # of its memory, bytes/s
    link: float  # to the cards of its host, bytes/s each way
    network: float  # to other hosts, bytes/s each way; a card's share
    host: int = 8  # cards in a host
    utilisation: float = UTILISATION
    reached: float = REACHED


def _cards(*rows: tuple[str, float, float, float, float, float]) -> dict[str, Card]:
    return {
        name: Card(name, flops * 1e12, memory * 2**30, bandwidth * 1e12, link * 1e9, network * 1e9)
        for name, flops, memory, bandwidth, link, network in rows
    }


CARDS: Mapping[str, Card] = _cards(
    # TFLOP/s, GiB, TB/s, GB/s within a host, GB/s between
    ("h200", 989.4, 139, 4.8, 450, 50),  # NVLink 4; ConnectX-7, 400 Gb/s per card
    ("h100", 989.4, 80, 3.35, 450, 50),
    ("b200", 2250, 178, 8.0, 900, 50),  # NVLink 5; DGX B200: 400 Gb/s per card
    ("a100", 312, 80, 2.039, 300, 25),  # NVLink 3; DGX A100: 200 Gb/s per card
    ("l40s", 362, 45, 0.864, 32, 25),  # PCIe 4 x16
    ("rtx4090", 165.2, 24, 1.008, 32, 1.25),  # PCIe 4 x16; 10 Gb/s Ethernet
)
"""Name -> card, from the vendors' data sheets."""

DEFAULT = "h200"

NUMBERS = tuple(one.name for one in fields(Card) if one.name != "name")


def card_of(text: str) -> Card:
    """Parse a card: ``h100``, ``h100,utilisation=0.5``, ``flops=1e15,memory=96e9,...``.

    Args:
        text: a name of :data:`CARDS` with optional overrides, or all fields; FLOP/s, bytes, bytes/s.

    Raises:
        ConfigError: an unknown card or field, or a field that is missing or not above 0.
    """
    name, given = "", dict[str, float]()
    for part in filter(None, (one.strip() for one in text.split(","))):
        key, is_number, value = part.partition("=")
        if not is_number:
            if name or part.lower() not in CARDS:
                raise _refused(part, f"there is no card '{plain(part)}'", [*CARDS])
            name = part.lower()
        elif key not in NUMBERS:
            raise _refused(part, f"a card has no number '{plain(key)}'", NUMBERS)
        else:
            given[key] = _number(key, value)
    own = replace(CARDS[name or DEFAULT], **given)  # type: ignore[arg-type]
    if not name:
        needed = [one.name for one in fields(Card)[1:] if one.name not in (*given, *OPTIONAL)]
        if needed:
            fix = f"name a card first, or add {', '.join(f'{key}=...' for key in needed)}"
            raise ConfigError(
                "the description of the card is incomplete", where=f"--card {text}", fix=fix
            )
        own = replace(own, name="a card of these numbers")
    return replace(own, host=int(own.host))


OPTIONAL = ("host", "utilisation", "reached")


def _number(key: str, text: str) -> float:
    most = 1.0 if key in ("utilisation", "reached") else math.inf
    least = 1.0 if key == "host" else 0.0
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    broken = key == "host" and not number.is_integer()
    if broken or not (least <= number <= most and 0 < number < math.inf):
        what = f"a number above 0{' and at most 1' if most == 1 else ''}"
        if key == "host":
            what = "a whole number of at least 1"
        raise ConfigError(f"{key} is not {what}", where=f"--card {key}={plain(text)}", fix=what)
    return number


def _refused(
    part: str, what: str, known: Mapping[str, Card] | list[str] | tuple[str, ...]
) -> ConfigError:
    close = nearest(part.partition("=")[0], known)
    fix = f"did you mean {close}?" if close else f"one of {', '.join(known)}"
    return ConfigError(what, where=f"--card {plain(part)}", fix=fix)


MOVED: Mapping[str, tuple[int, str]] = {
    "all-reduce": (2, "ring"),
    "reduce-scatter": (1, "ring"),
    "all-gather": (1, "ring"),
    "all-to-all": (1, "pairs"),
    "send": (1, "one"),
}
"""Collective -> multiple of (n - 1) / n of the bytes that each card sends (all, in a send); algorithm."""


def sent(kind: str, size: float, ranks: int) -> float:
    """Compute the bytes that each card sends in a collective of ``size`` bytes in total."""
    times, how = MOVED[kind]
    return size if how == "one" else times * (ranks - 1) / ranks * size


def seconds(kind: str, size: float, ranks: int, card: Card, stride: int = 1) -> float:
    """Estimate the seconds of a collective without overlap; ``size`` is each card's full input or output.

    Args:
        kind: of :data:`MOVED`.
        size: bytes of the whole array.
        ranks: participating cards, host by host.
        card: their type.
        stride: distance between the ranks of two neighbours.
    """
    if ranks == 1 or size == 0:
        return 0.0
    here = min(ranks, max(1, card.host // stride))
    hosts = math.ceil(ranks / here)
    times, how = MOVED[kind]
    if how == "one":  # with several hosts the other card may be on another one
        hop, bandwidth = (
            (NVLINK, card.link) if hosts == 1 else (NETWORK, min(card.link, card.network))
        )
        return BASE[how] + hop[how] + size / (card.reached * bandwidth)
    if how == "pairs":
        inside = sent(kind, size, ranks) * (here - 1) / (ranks - 1) / card.link
        outside = sent(kind, size, ranks) * (ranks - here) / (ranks - 1) / card.network
        hops = (here - 1) * NVLINK[how] + (ranks - here) * NETWORK[how]
        return BASE[how] + hops + max(inside, outside) / card.reached
    # in a ring over hosts each card of a host has its own link to the next host
    bandwidth = card.reached * (card.link if hosts == 1 else min(card.link, here * card.network))
    crossed = times * (hosts - 1)
    hops = crossed * NETWORK[how] + (times * (ranks - 1) - crossed) * NVLINK[how]
    ring = BASE[how] + hops + sent(kind, size, ranks) / bandwidth
    if kind != "all-reduce":
        return ring
    hops = 2 * ((here - 1) * NVLINK["tree"] + math.log2(hosts) * NETWORK["tree"])
    return min(ring, BASE["tree"] + hops + 2 * size / (TREE * bandwidth))


@dataclass(frozen=True)
class Collective:
    """A collective in every training step."""

    what: str  # "gradients"
    kind: str  # of MOVED
    size: float  # bytes of the whole array, over all turns
    turns: int = 1  # number of collectives for these bytes
    beside: float = 0.0  # fraction of the step's computation that overlaps
    among: int | None = None  # participating neighbours; None: all cards
    stride: int = 1  # distance between the ranks of two neighbours

    def seconds(self, ranks: int, card: Card) -> float:
        """Estimate the seconds of all turns without overlap."""
        cards, size = self.among or ranks, self.size / self.turns
        return self.turns * seconds(self.kind, size, cards, card, self.stride)

    def sent(self, ranks: int) -> float:
        """Compute the bytes that each card sends over all turns."""
        return sent(self.kind, self.size, self.among or ranks)


@dataclass(frozen=True)
class Work:
    """The work of a card in a step."""

    flops: float  # forward and backward, and what is recomputed there
    update_flops: float = 0.0
    update_bytes: float = 0.0  # read and written by the update
    exchanges: tuple[Collective, ...] = ()
    bubble: float = 0.0  # waiting for other pipeline stages, relative to computation


@dataclass(frozen=True)
class Times:
    """The time of a step in seconds, by component."""

    computing: float  # forward and backward
    update: float
    exposed: float  # collectives that do not overlap
    slowed: float  # slow-down by overlapped collectives
    waiting: float  # for the slowest
    alone: Mapping[str, float] = field(default_factory=dict)  # exchange -> seconds without overlap
    bubble: float = 0.0  # for other pipeline stages

    @property
    def total(self) -> float:
        """The step time."""
        each = self.computing, self.update, self.exposed, self.slowed, self.waiting, self.bubble
        return sum(each)

    @property
    def share(self) -> float:
        """The fraction of the step spent on communication: exposed and slowed."""
        return (self.exposed + self.slowed) / self.total


def check_ranks(ranks: int) -> None:
    """Refuse more cards than the model covers.

    Raises:
        ConfigError: there are more.
    """
    if not 1 <= ranks <= MOST:
        fix = f"1 to {MOST:,}"
        raise ConfigError(
            "the cost model does not cover this many", where=f"--gpus {ranks}", fix=fix
        )


def times(work: Work, ranks: int, card: Card) -> Times:
    """Estimate the time of a step on ``ranks`` cards, each with this work.

    Raises:
        ConfigError: more cards than the model covers.
    """
    check_ranks(ranks)
    rate = card.flops * card.utilisation
    computing = work.flops / rate
    update = work.update_flops / rate + work.update_bytes / card.bandwidth
    alone = {one.what: one.seconds(ranks, card) for one in work.exchanges}
    exposed = slowed = 0.0
    for one in work.exchanges:
        hidden = min(alone[one.what], one.beside * computing)
        exposed += alone[one.what] - hidden
        slowed += SLOWED * hidden
    waiting = SPREAD * slowest(ranks) * computing
    bubble = work.bubble * computing
    return Times(computing, update, exposed, slowed, waiting, alone, bubble)


def slowest(ranks: int) -> float:
    """Return the expected maximum of n standard normal samples (Blom 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
