"""Every name that a node reads is there by then, and means one thing."""

from __future__ import annotations

from collections.abc import Iterable

from minillm_core.errors import PlanError
from minillm_core.nn.decoder import DecoderSpec
from minillm_core.nn.residual import SiteSpec

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
        _check(node.owner, node.external, known, node.slot)
    known |= {"x0"}
    for node in spec.streams:
        _check(node.owner, node.external, known, node.slot)
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
            _check(node.owner, node.external, known, node.slot)
        for site in block.sites():
            _check_site(site, known)
        here = {f"layers.{index}.{tap}" for tap in block.taps}
        known |= here | {name for name, site in spec.taps if site in here}
    if spec.final is not None:
        _check_site(spec.final, known)
        for _, owner, coefficient in spec.final.terms:
            _check(owner, getattr(coefficient, "external", ()), known, "model.residual[final]")
    if spec.final_norm is not None:
        external = getattr(spec.final_norm, "external", ())
        _check(spec.final_norm.owner, external, known, "model.norm[final]")
    for term in spec.loss.terms:
        if term.node is not None:
            _check(term.owner, term.node.external, known, f"loss.term[{term.key}]")
    for target in spec.loss.targets:
        if target.field is not None:
            _check(target.owner, (target.field,), known, f"loss.target[{target.key}]")


def _check_site(site: SiteSpec, known: set[str]) -> None:
    for source, owner, _ in site.terms:
        if source not in ("carry", "sublayer"):
            _check(owner, (source,), known, f"model.residual[{site.name}][{source}]")


def _check(owner: str, names: Iterable[str], known: set[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise PlanError(
                f"plugin '{owner}' reads '{name}', which nothing provides there",
                where=where,
                fix="what can be read there: " + ", ".join(sorted(known)),
            )
