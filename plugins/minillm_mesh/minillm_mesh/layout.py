"""The sharding of updates: which rank updates which parameters of a plan; pure, and equal on every rank.

It balances two things. First the time of an update, nearly all of it in stages that need whole matrices
(Newton-Schulz: 30 R C min(R, C) FLOPs for five iterations): such parameters are assigned whole, the
costliest first, to the rank with the least work. Second bytes: of optimizer state, and of gradients and
weights sent. Matrices whose stages are elementwise or row-wise are cut by rows, so that all ranks have
equally many elements; a vector is one row.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from minillm_core.inspection import Group, Member

FLOPS_A_BYTE = 100
"""FLOPs that a GPU computes in the time of moving one byte: a good third of an H200's 989 TFLOP/s in
bfloat16, over 4.8 TB/s. Only its order of magnitude matters to the layout."""

ITERATION = 6
"""FLOPs per Newton-Schulz iteration, over R C min(R, C): a Gram matrix, its square and a product."""

ITERATIONS = 5

BUCKET = 2**26
"""Bucket size in bytes, for parameters that are not sent all at once."""


@dataclass(frozen=True, slots=True)  # there is one for each parameter and rank
class Part:
    """The part of a parameter that one rank updates: all of it, or some rows."""

    name: str
    shape: tuple[int, ...]  # of the part
    first: int | None = None  # its first row; None: the whole parameter

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def of(self, whole: Any) -> Any:
        """Select the part from an array whose first axis is the parameter's."""
        return whole if self.first is None else whole[self.first : self.first + self.shape[0]]


Layout = tuple[tuple[Part, ...], ...]
"""Parts by rank, in the order of the groups."""


def layout(groups: Iterable[Group], ranks: int, *, weights: bool = False) -> Layout:
    """Assign the parameters of parameter groups to ranks.

    Args:
        groups: of a plan, without tables that are updated by rows.
        ranks: number of ranks.
        weights: weights are sharded too: a rank updates the rows of cuttable parameters that it holds.

    Returns:
        The parts of each rank: every row of every parameter once. A parameter that follows another is
        cut like its leader.
    """
    units = _units(groups)
    shares: list[dict[str, Part]] = [{} for _ in range(ranks)]
    time, numbers = [0.0] * ranks, [0] * ranks
    whole = [unit for unit in units if not unit.rows]
    for unit in sorted(whole, key=lambda unit: -unit.cost):  # stable: ties keep their order
        rank = min(range(ranks), key=lambda rank: (time[rank], numbers[rank]))
        time[rank] += unit.cost
        numbers[rank] += unit.size
        shares[rank] |= {one.name: Part(one.name, one.shape) for one in unit.members}
    cut = _cut_alike if weights else _cut
    cut([unit for unit in units if unit.rows], numbers, shares)
    names = [member.name for unit in units for member in unit.members]
    return tuple(tuple(share[name] for name in names if name in share) for share in shares)


@dataclass(frozen=True)
class _Unit:
    """Parameters that must be divided alike: one, or one with its followers."""

    members: tuple[Member, ...]
    cost: float
    rows: int  # that can be cut; 0: it stays whole

    @property
    def size(self) -> int:
        return sum(prod(one.shape) for one in self.members)


def _units(groups: Iterable[Group]) -> list[_Unit]:
    found: dict[str, list[tuple[Group, Member]]] = {}
    for group in groups:
        for member in group.members:
            leader = member.follows.leader if member.follows else member.name
            found.setdefault(leader, []).append((group, member))
    return [
        _Unit(
            tuple(member for _, member in those),
            sum(cost(group) for group, _ in those),
            those[0][1].shape[0] if all(cuttable(group, member) for group, member in those) else 0,
        )
        for those in found.values()
    ]


def uncut(groups: Iterable[Group]) -> set[str]:
    """Return the names of parameters that are updated whole."""
    return {one.name for unit in _units(groups) if not unit.rows for one in unit.members}


def cuttable(group: Group, member: Member) -> bool:
    """Return whether rows of a parameter can be updated independently: no stage needs more than a row.

    Not with views, which are computed from a whole parameter, with state that is scalar or has its own shape,
    or with quantized state whose blocks cross rows. Vectors stay whole: a stage may take their norm.
    """
    rule = group.rule
    alike = all(kind == "like" for _, _, stage in rule.stages for _, kind in stage.state)
    return len(member.shape) > 1 and not rule.stacked and alike and not member.view


def cost(group: Group) -> float:
    """Estimate the time of one member's update, in bytes of memory traffic of the same duration.

    Elements and their state are read and written in float32; a stage that needs a matrix runs five
    Newton-Schulz iterations on each of its blocks, on the steps on which it is due.
    """
    numbers, blocks = prod(group.shape), group.blocks
    state = sum(prod(one.shape) for kept in group.state_arrays().values() for one in kept.values())
    members = len(group.members) if group.rule.stacked else 1
    moved = 4 * (3 * numbers * blocks + 2 * state / members)
    turns = sum(1 / stage.every for _, _, stage in group.rule.stages if stage.needs == "matrix")
    shortest = min(group.shape, default=1)
    flops = ITERATIONS * ITERATION * numbers * shortest * blocks * turns
    return moved + flops / FLOPS_A_BYTE


def _cut(units: Sequence[_Unit], numbers: Sequence[int], shares: Sequence[dict[str, Part]]) -> None:
    """Cut parameters by rows, so that ranks that already have ``numbers`` elements end with equally many."""
    ends = list(accumulate(_filled(numbers, sum(unit.size for unit in units))))
    begun = 0  # elements of the units before
    for unit in units:
        a_row = unit.size // unit.rows
        cuts = [0, *(min(unit.rows, max(0, round((end - begun) / a_row))) for end in ends)]
        cuts[-1] = unit.rows
        for share, first, last in zip(shares, cuts, cuts[1:], strict=False):
            if last > first:
                parts = last - first < unit.rows
                share.update(
                    (
                        one.name,
                        Part(one.name, (last - first, *one.shape[1:]), first if parts else None),
                    )
                    for one in unit.members
                )
        begun += unit.size


def rows_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row and the number of rows of a rank's shard of a parameter, as torch.chunk cuts."""
    most = -(-rows // ranks)
    first = min(rows, rank * most)
    return first, min(rows, first + most) - first


def _cut_alike(
    units: Sequence[_Unit], numbers: Sequence[int], shares: Sequence[dict[str, Part]]
) -> None:
    """Cut each parameter like its sharded weights, regardless of the balance."""
    for rank, share in enumerate(shares):
        for one in (member for unit in units for member in unit.members):
            if (part := row_part(one.name, one.shape, rank, len(shares))) is not None:
                share[one.name] = part


def row_part(name: str, shape: Sequence[int], rank: int, ranks: int) -> Part | None:
    """Return a rank's shard of a parameter by rows; None: the rank has no rows."""
    first, count = rows_of(shape[0], rank, ranks)
    return Part(name, (count, *shape[1:]), first if count < shape[0] else None) if count else None


def _filled(numbers: Sequence[int], more: int) -> list[int]:
    """Distribute ``more`` to raise the lowest of ``numbers`` to a common level; sums to ``more``."""
    lowest = sorted(numbers)
    sums = [0, *accumulate(lowest)]
    # include the lowest numbers as long as they are below the resulting level
    needs = [lowest[i] * i - sums[i] for i in range(len(lowest))]
    taking = max(1, bisect(needs, more))
    level, rest = divmod(sums[taking] + more, taking)
    order = sorted(range(len(numbers)), key=lambda rank: numbers[rank])
    added = {
        rank: level - numbers[rank] + (place < rest) for place, rank in enumerate(order[:taking])
    }
    return [added.get(rank, 0) for rank in range(len(numbers))]


def uneven(parts: Layout) -> float:
    """Return the imbalance of elements per rank: maximum over mean, 1 at best."""
    sizes = [sum(part.size for part in share) for share in parts]
    return max(sizes) * len(sizes) / max(1, sum(sizes))


__all__ = [
    "BUCKET",
    "Layout",
    "Part",
    "cost",
    "cuttable",
    "layout",
    "row_part",
    "rows_of",
    "uncut",
    "uneven",
]
