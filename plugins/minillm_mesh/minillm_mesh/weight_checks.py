"""Checks for sharded weights (``mesh.shard=weights``): each process holds some rows of every parameter."""

from __future__ import annotations

from collections.abc import Mapping

from minillm_core import ConfigError, Plan, PlanError

BESIDE: Mapping[str, str] = {
    "tensor": "a process computes with slices of layers, but FSDP gathers whole layers",
    "pipeline": "a process computes some layers, but FSDP gathers each on all at once",
}
"""Settings of ``mesh`` that conflict with sharded weights -> the reason."""


def check(plan: Plan) -> None:
    """Check that a plan's weights can be sharded.

    Raises:
        ConfigError: a conflicting setting also divides the layers, or a layer of a unit of several runs
            more than once in a micro-batch.
        PlanError: a parameter is a scalar, which has no rows.
    """
    mesh, where = plan.config.mesh, "mesh.shard=weights"
    for setting, why in BESIDE.items():
        if (others := getattr(mesh, setting)) > 1:
            raise ConfigError(
                f"weights cannot be sharded beside mesh.{setting}: {why}",
                where=f"{where}, mesh.{setting}={others}",
                fix=f"mesh.shard=updates, or mesh.{setting}=1",
            )
    loop = plan.spec.loop
    if mesh.unit > 1 and loop is not None:
        raise ConfigError(
            f"mesh.unit={mesh.unit} beside plugin '{loop.owner}', which runs layers {loop.first} to {loop.last} "
            "several times: FSDP counts one call of each layer of a unit",
            where=f"{where}, mesh.unit={mesh.unit}",
            fix=f"mesh.unit=1, or leave out '{loop.owner}'",
        )
    scalar = next((info for info in plan.parameters.values() if not info.shape), None)
    if scalar is not None:
        raise PlanError(
            f"weights cannot be sharded: parameter '{scalar.name}' of plugin '{scalar.owner}' is a scalar, "
            "and FSDP shards parameters by rows",
            where=where,
            fix="mesh.shard=updates, or a parameter of shape (1,)",
        )


__all__ = ["check"]
