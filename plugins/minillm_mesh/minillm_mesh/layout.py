"""Who updates what: the parameters of a plan, divided among ranks; pure, and the same on every rank.

Two things are to be even. The time of an update, which is nearly all in stages that need whole matrices
(Newton-Schulz: 30 R C min(R, C) FLOPs for five iterations); such parameters go whole, the costliest
first, to the rank that has least to do. And bytes: of state that is kept, of gradients and weights that
are sent. Matrices whose stages see one element at a time, or a row, are cut by rows, so that all ranks end
with as many numbers; a vector is one row.
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
"""FLOPs that a GPU computes while it moves a byte of its memory: an H200's 989 T/s in bfloat16 at a good
third of that, over 4.8 TB/s. Only its order of magnitude matters to the layout."""

ITERATION = 6
"""FLOPs a step of Newton-Schulz, over R C min(R, C): a Gram matrix, its square and a product."""

ITERATIONS = 5

BUCKET = 2**26
"""Bytes of parameters that are sent together, where they are not all at once."""


@dataclass(frozen=True)
class Part:
    """What one rank updates of one parameter: all of it, or some rows."""

    name: str
    shape: tuple[int, ...]  # of the part
    first: int | None = None  # its first row; None: it is the whole parameter

    @property
    def size(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    def of(self, whole: Any) -> Any:
        """Take the part from an array whose first axis is the parameter's."""
        return whole if self.first is None else whole[self.first : self.first + self.shape[0]]


Layout = tuple[tuple[Part, ...], ...]
"""By rank, in the order of the groups."""


def layout(groups: Iterable[Group], ranks: int, *, weights: bool = False) -> Layout:
    """Divide the parameters of some groups among ranks.

    Args:
        groups: of a plan, without tables that are updated by rows.
        ranks: how many there are.
        weights: of each parameter that may be cut a rank has those rows whose weights it has.

    Returns:
        What each rank updates: every row of every parameter once. Parameters that follow another have
        the parts that it has.
    """
    units = _units(groups)
    shares: list[dict[str, Part]] = [{} for _ in range(ranks)]
    time, numbers = [0.0] * ranks, [0] * ranks
    whole = [unit for unit in units if not unit.rows]
    for unit in sorted(whole, key=lambda unit: -unit.cost):  # stable: equal ones as they come
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
    """Parameters that have to be divided alike: one, or one and those that follow it."""

    members: tuple[Member, ...]
    cost: float
    rows: int  # into which it may be cut; 0: it stays whole

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
    """Name the parameters that are updated whole."""
    return {one.name for unit in _units(groups) if not unit.rows for one in unit.members}


def cuttable(group: Group, member: Member) -> bool:
    """Return whether rows of a parameter can be updated without the others: no stage needs more.

    A view is computed of a whole parameter, scalars and shapes of a plugin's own are a whole parameter's,
    and blocks of narrow state run over the ends of rows. Of a vector a stage may take the norm, as of a row.
    """
    rule = group.rule
    alike = all(kind == "like" for _, _, stage in rule.stages for _, kind in stage.state)
    return len(member.shape) > 1 and not rule.stacked and alike and not member.view


def cost(group: Group) -> float:
    """Estimate the time of one member's update, in bytes of memory that could be moved in it.

    Numbers and their state are read and written in float32; a stage that needs a matrix takes five
    iterations of Newton-Schulz on each of its blocks, in its turns.
    """
    numbers, blocks = prod(group.shape), group.blocks
    state = sum(prod(one.shape) for kept in group.kept().values() for one in kept.values())
    members = len(group.members) if group.rule.stacked else 1
    moved = 4 * (3 * numbers * blocks + 2 * state / members)
    turns = sum(1 / stage.every for _, _, stage in group.rule.stages if stage.needs == "matrix")
    shortest = min(group.shape, default=1)
    flops = ITERATIONS * ITERATION * numbers * shortest * blocks * turns
    return moved + flops / FLOPS_A_BYTE


def _cut(units: Sequence[_Unit], numbers: Sequence[int], shares: Sequence[dict[str, Part]]) -> None:
    """Cut parameters by rows, so that ranks which have ``numbers`` of others end with as many."""
    ends = list(accumulate(_filled(numbers, sum(unit.size for unit in units))))
    begun = 0  # numbers of the units before
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
    """Return the first row, and how many, of the weights that a rank has of a parameter: torch.chunk's."""
    most = -(-rows // ranks)
    first = min(rows, rank * most)
    return first, min(rows, first + most) - first


def _cut_alike(
    units: Sequence[_Unit], numbers: Sequence[int], shares: Sequence[dict[str, Part]]
) -> None:
    """Cut each parameter as its weights are, whatever else ranks have."""
    for rank, share in enumerate(shares):
        for one in (member for unit in units for member in unit.members):
            if (part := row_part(one.name, one.shape, rank, len(shares))) is not None:
                share[one.name] = part


def row_part(name: str, shape: Sequence[int], rank: int, ranks: int) -> Part | None:
    """Return the rows of a parameter whose weights a rank has; None: there are fewer rows than ranks."""
    first, count = rows_of(shape[0], rank, ranks)
    return Part(name, (count, *shape[1:]), first if count < shape[0] else None) if count else None


def _filled(numbers: Sequence[int], more: int) -> list[int]:
    """Divide ``more`` so that the lowest of ``numbers`` are filled up to one level; sums to ``more``."""
    lowest = sorted(numbers)
    sums = [0, *accumulate(lowest)]
    # as many of the lowest take part as lie below the level that they then reach
    needs = [lowest[i] * i - sums[i] for i in range(len(lowest))]
    taking = max(1, bisect(needs, more))
    level, rest = divmod(sums[taking] + more, taking)
    order = sorted(range(len(numbers)), key=lambda rank: numbers[rank])
    added = {
        rank: level - numbers[rank] + (place < rest) for place, rank in enumerate(order[:taking])
    }
    return [added.get(rank, 0) for rank in range(len(numbers))]


def uneven(parts: Layout) -> float:
    """Return how many times the mean of the numbers that ranks have the largest has, 1 at best."""
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
