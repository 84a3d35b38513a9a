"""Every name that a node reads is there by then, and means one thing."""

from __future__ import annotations

from collections.abc import Iterable

from minillm_core.errors import PlanError
from minillm_core.nn.decoder import DecoderSpec
from minillm_core.nn.node import Node
from minillm_core.nn.reference import place_of
from minillm_core.nn.residual import SiteSpec
from minillm_core.text import nearest

__all__ = ["BATCH", "check_reads"]

BATCH = ("ids", "labels", "documents", "positions", "weights")
"""The core's batch fields; weights where a plugin or the data give them."""


def check_reads(spec: DecoderSpec, fields: Iterable[str], values: Iterable[str]) -> None:
    """Follow the computation from the batch to the loss.

    Args:
        spec: the model.
        fields: of the batch, that plugins declare.
        values: the schedule values.

    Raises:
        PlanError: something is read that nothing provides there, or one name has two meanings.
    """
    known = {*BATCH, *values, *fields}
    for node in spec.embed:
        _check_node(node, known)
    known |= {"x0"}
    for node in spec.streams:
        _check_node(node, known)
        if node.name in known:
            raise PlanError(
                f"plugin '{node.owner}': stream '{node.name}' has the name of a batch field",
                where=node.slot,
                fix="give one of them another name",
            )
        known.add(node.name)
    for name, site in spec.taps:
        if name in known:
            raise PlanError(
                f"the tap '{name}' of {site} has a name that is taken",
                where="model.taps",
                fix="give one of them another name",
            )
    for index, block in enumerate(spec.blocks):
        for node in block.nodes():
            _check_node(node, known)
        for site in block.sites():
            _check_site(site, known)
        here = {f"layers.{index}.{tap}" for tap in block.taps}
        known |= here | {name for name, site in spec.taps if site in here}
    if spec.final is not None:
        _check_site(spec.final, known)
        for _, _, coefficient in spec.final.terms:
            if isinstance(coefficient, Node):
                _check_node(coefficient, known)
    if isinstance(spec.final_norm, Node):
        _check_node(spec.final_norm, known)
    for term in spec.loss.terms:
        if term.node is not None:
            _check_node(term.node, known)
    for target in spec.loss.targets:
        if target.field is not None:
            _check(target.owner, (target.field,), known, f"loss.target[{target.key}]")


def _check_site(site: SiteSpec, known: set[str]) -> None:
    for source, owner, _ in site.terms:
        if source not in ("carry", "sublayer"):
            _check(owner, (source,), known, f"model.residual[{site.name}][{source}]")


def _check_node(node: Node, known: set[str]) -> None:
    """What a node's ``forward`` asks for, beside what its slot gives.

    Raises:
        PlanError: nothing provides one of them; it says what there is, and where it is asked for.
    """
    for name in node.external:
        if name in known:
            continue
        close = nearest(name, {*node.own, *known})
        meant = f"did you mean {close}? " if close else ""
        own = f"the slot gives {', '.join(node.own)}; " if node.own else ""
        raise PlanError(
            f"plugin '{node.owner}' reads '{name}', which nothing provides there",
            where=node.slot,
            fix=f"{meant}{own}there is also {', '.join(sorted(known))}; a stream or a named tap "
            "brings more (model.stream, model.tap)",
            line=place_of(node.cls.forward) if node.cls else None,  # type: ignore[attr-defined]
        )


def _check(owner: str, names: Iterable[str], known: set[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise PlanError(
                f"plugin '{owner}' reads '{name}', which nothing provides there",
                where=where,
                fix="what can be read there: " + ", ".join(sorted(known)),
            )
