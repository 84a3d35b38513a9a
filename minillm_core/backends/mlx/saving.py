"""Masters and state by name on the host, and back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from minillm_core.optim.groups import Group

__all__ = ["arrays", "copies", "masters", "state", "states"]

PREFIXES = {"states": "state", "scaler": "scaler"}
"""Part of the state -> what its entries' names begin with."""


def copies(tree: Any) -> Any:
    """A tree of arrays, each copied and queued: another thread may wait for these and read them.

    It may not for those that training goes on with. To wait for an array changes it, in every
    thread that has it; and on CUDA the host's reading moves the memory.
    """
    made = tree_map(lambda array: mx.where(True, array, array), tree)
    mx.async_eval(made)
    return made


def arrays(
    held: Mapping[str, mx.array], state: Mapping[str, Any], groups: Mapping[str, Group]
) -> dict[str, np.ndarray]:
    """Every master and every entry of the state, by name; waits for them."""
    named = {f"model.{name}": np.array(master) for name, master in held.items()}
    named["optimizer.updates"] = np.array(state["updates"])
    for key, anchors in state["optimizer"].items():
        group = groups[key]
        for anchor, entries in anchors.items():
            for entry, stack in entries.items():
                host = np.array(stack)
                parts = list(host) if group.rule.stacked else [host]
                for member, part in zip(group.members, parts, strict=True):
                    named[f"optimizer.{anchor}.{entry}.{member.name}"] = part
    for part, prefix in PREFIXES.items():
        named.update((f"{prefix}.{name}", np.array(value)) for name, value in state[part].items())
    return named


def masters(saved: Mapping[str, np.ndarray], old: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Masters, shaped as the old ones.

    Raises:
        KeyError: one is missing.
        ValueError: a shape differs.
    """
    return {
        name: _checked(f"model.{name}", saved, tuple(master.shape)) for name, master in old.items()
    }


def states(saved: Mapping[str, np.ndarray], old: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """State that the model itself reads, shaped as the old one; raises as :func:`masters`."""
    return {name: _checked(f"state.{name}", saved, tuple(v.shape)) for name, v in old.items()}


def state(
    saved: Mapping[str, np.ndarray], old: Mapping[str, Any], groups: Mapping[str, Group]
) -> dict[str, Any]:
    """The state, shaped as the old one.

    Raises:
        KeyError: an entry is missing.
        ValueError: a shape differs.
    """
    optimizer = {
        key: {
            anchor: {
                entry: _stack(f"optimizer.{anchor}.{entry}", saved, stack, groups[key])
                for entry, stack in entries.items()
            }
            for anchor, entries in anchors.items()
        }
        for key, anchors in old["optimizer"].items()
    }
    new = {**old, "optimizer": optimizer, "updates": _checked("optimizer.updates", saved, ())}
    for part, prefix in PREFIXES.items():
        new[part] = {
            name: _checked(f"{prefix}.{name}", saved, tuple(value.shape))
            for name, value in old[part].items()
        }
    return new


def _stack(prefix: str, saved: Mapping[str, np.ndarray], old: mx.array, group: Group) -> mx.array:
    shape = tuple(old.shape[1:] if group.rule.stacked else old.shape)
    parts = [_checked(f"{prefix}.{member.name}", saved, shape) for member in group.members]
    return mx.stack(parts) if group.rule.stacked else parts[0]


def _checked(name: str, saved: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> mx.array:
    value = saved[name]
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(value.shape)}, not {shape}")
    return mx.array(value)
