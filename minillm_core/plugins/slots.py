"""The merge kinds: how what several plugins say about one place becomes one thing, or an error.

    claim   one owner, who replaces the default; a second claimant is an error
    chain   nodes in a row, ordered by named anchors, then by before/after
    term    a sum, in sorted order
    query   yes, or a reason (candidates: minillm_core.ops.select)

Resolution never looks at the order of the calls: the order of ``--plugins`` does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from minillm_core.errors import PlanError
from minillm_core.nn.node import Node

__all__ = ["Chain", "Claim", "Terms"]

T = TypeVar("T")


def way_out(one: str, other: str, layered: Collection[str] = ()) -> str:
    """What to type when two plugins want the same place.

    Args:
        one: the one.
        other: the other.
        layered: of a place that each layer has, the plugins that can be told their layers.
    """
    first, second = sorted((one, other))
    fix = (
        f"leave out '{first}' or '{second}' (--plugins -{second} takes away what a preset or a file "
        "names)"
    )
    if first in layered and second in layered:
        fix += f"; or give them different layers: {first}.layers=[0] {second}.layers=[1]"
    return fix


class Claim(Generic[T]):
    """A slot with one owner.

    Args:
        where: its name.
        layered: where each layer has one, the plugins that can be told their layers.
    """

    def __init__(self, where: str, layered: Collection[str] = ()) -> None:
        self.where, self.layered = where, layered
        self.held: dict[str, T] = {}

    def add(self, owner: str, value: T) -> None:
        """Claim the slot.

        Raises:
            PlanError: the same plugin claims it twice.
        """
        if owner in self.held:
            raise PlanError(
                f"plugin '{owner}' claims slot {self.where} twice",
                fix="claim it once; which of the two holds would be a guess",
            )
        self.held[owner] = value

    def resolve(self, default: Any = None) -> Any:
        """The claimed value, or the default.

        Raises:
            PlanError: two claimants; names both, the slot and the way out.
        """
        if len(self.held) > 1:
            first, second, *_ = sorted(self.held)
            raise PlanError(
                f"slot {self.where} is claimed by both '{first}' and '{second}'",
                where=self.where,
                fix=way_out(first, second, self.layered),
            )
        return next(iter(self.held.values()), default)

    @property
    def owner(self) -> str:
        """Who holds it."""
        return next(iter(self.held), "core")


@dataclass(frozen=True)
class Link:
    """One node of a chain, and where it wants to stand."""

    anchor: str
    node: Node
    before: tuple[str, ...]
    after: tuple[str, ...]


class Chain:
    """Nodes in a row.

    Args:
        where: its name.
        anchors: in their order.
        layered: where each layer has one, the plugins that can be told their layers.
    """

    def __init__(self, where: str, anchors: tuple[str, ...], layered: Collection[str] = ()) -> None:
        self.where, self.anchors, self.layered = where, anchors, layered
        self.links: list[Link] = []
        self.closed: dict[str, list[tuple[str, str]]] = {}  # anchor -> (owner, reason)

    def add(
        self, anchor: str, node: Node, before: tuple[str, ...] = (), after: tuple[str, ...] = ()
    ) -> None:
        """Join at ``anchor``, before or after nodes of these names where they are present."""
        self.links.append(Link(anchor, node, before, after))

    def close(self, owner: str, anchor: str, reason: str) -> None:
        """Refuse every other plugin at ``anchor``."""
        self.closed.setdefault(anchor, []).append((owner, reason))

    def resolve(self) -> tuple[tuple[str, Node], ...]:
        """(anchor, node) in order.

        Raises:
            PlanError: a closed anchor, two nodes of a name, an order that is not stated, a cycle,
                before= or after= against the order of the anchors.
        """
        links: dict[str, Link] = {}
        for link in self.links:
            for owner, reason in self.closed.get(link.anchor, []):
                if owner != link.node.owner:
                    raise PlanError(
                        f"'{link.node.owner}' cannot join {self.where}.{link.anchor}: "
                        f"'{owner}' closed it ({reason})",
                        where=self.where,
                        fix=way_out(owner, link.node.owner, self.layered),
                    )
            if link.node.name in links:
                raise PlanError(
                    f"two nodes named '{link.node.name}' in {self.where}",
                    where=self.where,
                    fix="give one of them another name=",
                )
            links[link.node.name] = link
        self.check_stated(links)
        return tuple((links[name].anchor, links[name].node) for name in self.ordered(links))

    def check_stated(self, links: dict[str, Link]) -> None:
        """Refuse before= and after= that anchors contradict; that they say the same is no harm."""
        place = self.anchors.index
        for name, link in links.items():
            stated = [("before", other) for other in link.before]
            stated += [("after", other) for other in link.after]
            for word, other in stated:
                if other not in links:
                    continue
                here, there = place(link.anchor), place(links[other].anchor)
                if (here > there) if word == "before" else (here < there):
                    raise PlanError(
                        f"'{name}' in {self.where}.{link.anchor} wants to stand {word} '{other}', "
                        f"which is in {links[other].anchor}: anchors come first",
                        where=f"{self.where}.{link.anchor}",
                        fix=f"join at {links[other].anchor}, or leave out '{link.node.owner}'",
                    )

    def ordered(self, links: dict[str, Link]) -> list[str]:
        """Names, by anchor, then by before/after; the order must be total."""
        order: list[str] = []
        for anchor in self.anchors:
            waiting = {name: link for name, link in links.items() if link.anchor == anchor}
            earlier = {
                name: {other for other in link.after if other in waiting}
                | {other for other, its in waiting.items() if name in its.before}
                for name, link in waiting.items()
            }
            while earlier:
                ready = sorted(name for name, others in earlier.items() if not others)
                if len(ready) != 1:
                    first, second, *_ = 2 * (ready or sorted(earlier))
                    why = "has no stated order" if ready else "goes round in a circle"
                    raise PlanError(
                        f"the order of '{first}' and '{second}' in {self.where}.{anchor} {why}",
                        where=f"{self.where}.{anchor}",
                        fix="one of them must say before= or after= the other; or leave out "
                        f"'{links[first].node.owner}'",
                    )
                order += ready
                del earlier[ready[0]]
                for others in earlier.values():
                    others.discard(ready[0])
        return order


class Terms(Generic[T]):
    """A sum: entries under keys, each from one plugin.

    Args:
        where: its name.
        layered: where each layer has one, the plugins that can be told their layers.
    """

    def __init__(self, where: str, layered: Collection[str] = ()) -> None:
        self.where, self.layered = where, layered
        self.held: dict[Hashable, tuple[str, T]] = {}

    def add(self, owner: str, key: Hashable, value: T) -> None:
        """Add an entry.

        Raises:
            PlanError: the key is there already; names both plugins.
        """
        if key in self.held:
            other = self.held[key][0]
            place = f"{self.where}[{key}]"
            if other == owner:
                raise PlanError(f"plugin '{owner}' adds {place} twice", fix="add it once")
            raise PlanError(
                f"{place} is added by both '{min(other, owner)}' and '{max(other, owner)}'",
                where=self.where,
                fix=way_out(other, owner, self.layered),
            )
        self.held[key] = (owner, value)

    def resolve(self) -> tuple[tuple[Any, str, T], ...]:
        """(key, owner, value), sorted by key: float sums depend on their order."""
        return tuple((key, *self.held[key]) for key in sorted(self.held, key=str))
