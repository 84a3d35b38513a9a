"""The merge kinds of slots: how the entries of several plugins become one value, or a conflict.

    claim   one owner replaces the default; a second claimant is a conflict
    chain   nodes in a row, ordered by named anchors, then by before/after
    term    a sum, in sorted order
    query   yes, or a reason (candidates: minillm_core.ops.select)

Resolution is independent of the order of the calls, and so of the order of ``--plugins``.

A slot is declared once, where it is constructed (``AttentionSlots`` and similar classes): its name, its
merge kind, the core's default in words. The slot table (minillm_core.plan.slots) is built from that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar

from minillm_core.errors import PlanError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

EMBED, STREAMS, AFTER = -2, -1, 1 << 30
LOSS = AFTER + 1
"""Positions in the order of a step outside the layers, the loss last; a layer's position is its index."""

PLACES: Mapping[str, float] = {"in": 0.0, "attention": 0.2, "mid": 0.4, "mlp": 0.6, "out": 0.8}
"""Place in a layer -> offset added to the layer's position, in the order of a step."""


def time_of(place: str) -> float:
    """Return the position in a step of a place such as ``layers.3.mid``; AFTER if it is in no layer."""
    _, layer, name, *_ = [*place.split("."), "", "", ""]
    return int(layer) + PLACES[name] if name in PLACES and layer.isdigit() else AFTER


def clash_fix(one: str, other: str, layered: Collection[str] = ()) -> str:
    """Return the fix for a conflict between two plugins, in words.

    Args:
        one: a plugin.
        other: another plugin.
        layered: for a slot that each layer has, the plugins with an option ``layers``.
    """
    first, second = sorted((one, other))
    fix = f"leave out '{first}' or '{second}' (--plugins -{second} removes what a preset names)"
    if first in layered and second in layered:
        fix += f"; or give them different layers: '{first}.layers=[0]' '{second}.layers=[1]'"
    return fix


def call_site() -> str:
    """Return file and line of the call that fills a slot: the first frame beyond the builders."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("minillm_core.plugins.") and frame.f_back:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def topological(waiting: Mapping[str, Collection[str]]) -> tuple[list[str], list[str]]:
    """Sort names topologically, ties by name.

    Args:
        waiting: name -> the names that precede it; names that are not keys are ignored.

    Returns:
        The names in order; and the names in cycles, sorted.
    """
    order, left = [], sorted(waiting)
    while ready := [name for name in left if not {*left}.intersection(waiting[name])]:
        order.append(ready[0])
        left.remove(ready[0])
    return order, left


@dataclass(eq=False)
class Slot:
    """Base of the merge kinds: the declaration of a slot that plugins may fill."""

    where: str  # its name in the plan: layers.0.attention.window
    _: KW_ONLY
    # for a slot that each layer has, plugins with an option ``layers``
    layered: Collection[str] = ()
    default: str = "none"  # the core's default, in words
    also: tuple[str, ...] = ()  # further names for look-ups
    order: float = AFTER  # position in a step: EMBED, STREAMS, in its layer, or AFTER the layers
    shapes: bool = True  # it changes the function of the model; a loss or an optimizer does not
    listed: bool = True  # a plan lists the plugins' entries
    # heading under which a plan counts it with others; empty: it is listed itself
    heading: str = ""
    owners: set[str] = field(default_factory=set, init=False)  # the plugins that fill it


def slots_in(kept: object) -> Iterator[Slot]:
    """Yield every slot among an object's attributes, in the order of their declaration."""
    for value in vars(kept).values():
        several = value.values() if isinstance(value, dict) else (value,)
        yield from (one for one in several if isinstance(one, Slot))


@dataclass(eq=False)
class Claim(Slot, Generic[T]):
    """A slot with one owner."""

    _: KW_ONLY
    evidence: str = ""  # evidence in a run that the claim had an effect, if it is not a node
    held: dict[str, T] = field(default_factory=dict, init=False)
    lines: dict[str, str] = field(default_factory=dict, init=False)  # claimant -> file and line

    def add(self, owner: str, value: T, line: str | None = None) -> None:
        """Claim the slot.

        Args:
            owner: the plugin.
            value: the slot's value.
            line: file and line of the claim; None: of the current call in the plugin's hook.

        Raises:
            PlanError: the same plugin claims it twice.
        """
        if owner in self.held:
            raise PlanError(
                f"plugin '{owner}' claims slot {self.where} twice",
                fix="claim it once",
            ).concerning(self.where, plugins=(owner,))
        self.owners.add(owner)
        self.held[owner], self.lines[owner] = value, line or call_site()

    def resolve(self, default: Any = None) -> Any:
        """Return the claimed value, or the default.

        Raises:
            PlanError: two claimants; the error names both, the slot and the fix.
        """
        if len(self.held) > 1:
            first, second, *_ = sorted(self.held)
            raise PlanError(
                f"slot {self.where} is claimed by both '{first}' and '{second}'",
                where=self.where,
                fix=clash_fix(first, second, self.layered),
                line=f"{self.lines[first]} and {self.lines[second]}",
            ).concerning(self.where, plugins=self.held)
        return next(iter(self.held.values()), default)

    @property
    def owner(self) -> str:
        """The claimant, or ``core``."""
        return next(iter(self.held), "core")


class Claims(dict[K, Claim[T]]):
    """Claims by key, each created when its key is first looked up.

    Args:
        where: the name of each claim, with ``{}`` for its key, or for each part of the key.
        evidence: the evidence of each claim, with ``{}`` likewise.
        declared: fields of each claim, see :class:`Slot`.
    """

    def __init__(self, where: str, evidence: str = "", **declared: Any) -> None:
        super().__init__()
        self.texts, self.declared = (where, evidence), declared

    def __missing__(self, key: K) -> Claim[T]:
        parts = key if isinstance(key, tuple) else (key,)
        where, evidence = (text.format(*parts) for text in self.texts)
        return self.setdefault(key, Claim(where, evidence=evidence, **self.declared))


Names = str | tuple[str, ...]
"""One name of a node, or several."""


@dataclass(frozen=True)
class Link:
    """A node of a chain, with its anchor and the names of the nodes that it precedes or follows."""

    anchor: str
    node: Any  # a Node, or a stage of the optimizer: it has a name and an owner
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(eq=False)
class Chain(Slot):
    """A slot whose nodes run one after the other."""

    anchors: tuple[str, ...]  # in their order
    links: list[Link] = field(default_factory=list, init=False)
    closed: dict[str, list[tuple[str, str]]] = field(default_factory=dict, init=False)
    """Anchor -> (owner, reason)."""

    def add(self, anchor: str, node: Any, before: Names = (), after: Names = ()) -> None:
        """Add a node at ``anchor``, before or after the nodes of these names, if they are present."""
        before, after = ((v,) if isinstance(v, str) else tuple(v) for v in (before, after))
        self.owners.add(node.owner)
        self.links.append(Link(anchor, node, before, after))

    def close(self, owner: str, anchor: str, reason: str) -> None:
        """Refuse every other plugin at ``anchor``."""
        self.closed.setdefault(anchor, []).append((owner, reason))

    def resolve(self) -> tuple[tuple[str, Any], ...]:
        """Return (anchor, node) in order.

        Raises:
            PlanError: a closed anchor, two nodes of a name, an order that is not stated, a cycle,
                before= or after= against the order of the anchors.
        """
        links: dict[str, Link] = {}
        for link in self.links:
            node, place = link.node, f"{self.where}.{link.anchor}"
            for owner, reason in self.closed.get(link.anchor, []):
                if owner != node.owner:
                    raise PlanError(
                        f"'{node.owner}' cannot join {place}: '{owner}' closed it ({reason})",
                        where=self.where,
                        fix=clash_fix(owner, node.owner, self.layered),
                    ).concerning(place, plugins=(owner, node.owner))
            if node.name in links:
                raise PlanError(
                    f"two nodes named '{node.name}' in {self.where}",
                    where=self.where,
                    fix="give one of them another name=",
                ).concerning(plugins=(node.owner, links[node.name].node.owner))
            links[node.name] = link
        self._check_stated(links)
        return tuple((links[name].anchor, links[name].node) for name in self._ordered(links))

    def _check_stated(self, links: dict[str, Link]) -> None:
        """Refuse before= and after= that the order of the anchors contradicts."""
        place = self.anchors.index
        for name, link in links.items():
            stated = [("before", other) for other in link.before if other in links]
            stated += [("after", other) for other in link.after if other in links]
            for word, other in stated:
                here, there = place(link.anchor), place(links[other].anchor)
                if (here > there) if word == "before" else (here < there):
                    raise PlanError(
                        f"'{name}' in {self.where}.{link.anchor} cannot run {word} '{other}', which "
                        f"is in {links[other].anchor}: the order of the anchors is fixed",
                        where=f"{self.where}.{link.anchor}",
                        fix=f"join at {links[other].anchor}, or leave out '{link.node.owner}'",
                    ).concerning(plugins=(link.node.owner, links[other].node.owner))

    def _ordered(self, links: dict[str, Link]) -> list[str]:
        """Return the names ordered by anchor, then by before/after; the order must be total."""
        order: list[str] = []
        for anchor in self.anchors:
            waiting = {name: link for name, link in links.items() if link.anchor == anchor}
            earlier = {
                name: {other for other in link.after if other in waiting}
                | {other for other, its in waiting.items() if name in its.before}
                for name, link in waiting.items()
            }
            left = sorted(waiting)
            while left:
                ready = [name for name in left if not earlier[name].intersection(left)]
                if len(ready) != 1:
                    first, second, *_ = 2 * (ready or left)
                    why = "is not stated" if ready else "is circular"
                    raise PlanError(
                        f"the order of '{first}' and '{second}' in {self.where}.{anchor} {why}",
                        where=f"{self.where}.{anchor}",
                        fix="one of them must state before= or after= the other; or leave out "
                        f"'{links[first].node.owner}'",
                    ).concerning(plugins=(links[one].node.owner for one in (first, second)))
                order += ready
                left.remove(ready[0])
        return order


@dataclass(eq=False)
class Terms(Slot, Generic[T]):
    """A sum: entries under keys, each from one plugin unless ``shared``."""

    _: KW_ONLY
    keyed: bool = True  # each key is a place of its own in the plan, ``where[key]``
    always: Mapping[str, str] = field(default_factory=dict)
    """The core's own entries, key -> value in words; a plugin may claim a key."""
    shared: bool = False  # several plugins may add to a key that is not the core's
    kind: str = "term"  # the kind shown for its keys: a key of the core is claimed, not added to
    why: str | Callable[[str], str] = "adds it"  # reason for an entry, or a function of its key
    times: dict[Hashable, float] = field(default_factory=dict, init=False)
    """Positions of the entries that a step does not compute at ``order``."""
    held: dict[Hashable, tuple[str, T]] = field(default_factory=dict, init=False)
    """Key -> (owner, value); if shared, (key, owner) is the dictionary key."""

    def add(self, owner: str, key: Hashable, value: T) -> None:
        """Add an entry.

        Raises:
            PlanError: the key is in use; the error names both plugins.
        """
        place = f"{self.where}[{key}]"
        if self.shared and key not in self.always:
            key = (key, owner)
        if key in self.held:
            other = self.held[key][0]
            if other == owner:
                raise PlanError(
                    f"plugin '{owner}' adds {place} twice", fix="add it once"
                ).concerning(place, plugins=(owner,))
            does = "claimed" if key in self.always else "added"
            raise PlanError(
                f"{place} is {does} by both '{min(other, owner)}' and '{max(other, owner)}'",
                where=self.where,
                fix=clash_fix(other, owner, self.layered),
            ).concerning(place, plugins=(other, owner))
        self.owners.add(owner)
        self.held[key] = (owner, value)

    def resolve(self) -> tuple[tuple[Any, str, T], ...]:
        """Return (key, owner, value), sorted by key and owner: float sums depend on their order."""
        held = ((k[0] if isinstance(k, tuple) else k, *its) for k, its in self.held.items())
        return tuple(sorted(held, key=lambda one: (str(one[0]), one[1])))
