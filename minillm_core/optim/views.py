"""Views: arrays that evaluation, sampling and exports use instead of parameters (weight averages)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from minillm_core.ops.arrays import dtype_name
from minillm_core.optim.groups import Group, Member
from minillm_core.optim.stage import Stage
from minillm_core.optim.update import State, by_parameter, flatten, unflatten

VIEW = "view:"
"""Prefix of an evidence key, before a parameter's name: its view was computed."""

VIEWED = "view."
"""Prefix of a checkpoint key, before a parameter's name: its view, float32."""


def views_of(
    framework: Any,
    groups: Mapping[str, Group],
    params: Mapping[str, Any],
    state: State,
    tables: Iterable[tuple[Member, Any, Mapping[str, Any]]] = (),
) -> Iterator[tuple[str, Any]]:
    """Yield (parameter, view), float32, of each parameter with a claimed view, computed one by one.

    Args:
        framework: the framework object, with ops, witness and versions.
        groups: key -> group, without those of tables that are updated by rows.
        params: name -> float32 master weights.
        state: the optimizer state, laid out as by :func:`minillm_core.optim.update.initial_state`.
        tables: for each table that is updated by rows and has a view: the member, and the table and
            its state by ``stage.entry``, up to date.

    Raises:
        PluginCodeError: a view is not an array like its parameter, or its function wrote in place.
    """
    viewed = {key: one for key, one in groups.items() if any(m.view for m in one.members)}
    ops = framework.ops

    def widened(group: Group, stage: Stage, kept: Mapping[str, Any]) -> dict[str, Any]:
        flat = {entry: flatten(ops, group, one) for entry, one in kept.items()}
        wide = stage.unpacked(ops, flat, int(group.rule.stacked))
        return {entry: unflatten(ops, group, one) for entry, one in wide.items()}

    wide: State = {
        key: {
            anchor: widened(group, stage, state[key][anchor])
            for anchor, _, stage in group.rule.stages
            if anchor in state.get(key, {})
        }
        for key, group in viewed.items()
    }
    held = by_parameter(viewed, wide)
    for key, group in viewed.items():
        entries = [f"{anchor}.{entry}" for anchor, one in wide[key].items() for entry in one]
        for member in group.members:
            if member.view:
                own = {entry: held[f"{entry}.{member.name}"] for entry in entries}
                yield member.name, _view(framework, member, params[member.name], own)
    for member, param, own in tables:
        yield member.name, _view(framework, member, param, own)


def _view(framework: Any, member: Member, param: Any, held: Mapping[str, Any]) -> Any:
    view = member.view
    assert view is not None
    before = framework.versions((param, *held.values()))
    made, where = _seen(framework.ops, member, param, held), f"opt.view[{member.name}]"
    if framework.versions((param, *held.values())) != before:
        did = "changed param or state in place in"
        raise view.broken(where, "return a new array instead", did)
    got = tuple(getattr(made, "shape", ())), dtype_name(made) if hasattr(made, "dtype") else ""
    if got != (tuple(param.shape), dtype_name(param)):
        did = f"returned {got[1] or type(made).__name__} {got[0]} from"
        fix = f"a view is {dtype_name(param)} {tuple(param.shape)}, as its parameter is"
        raise view.broken(where, fix, did)
    framework.witness(f"{VIEW}{member.name}")
    return made


def _seen(ops: Any, member: Member, param: Any, held: Mapping[str, Any]) -> Any:
    """Compute a view; for a parameter in blocks (R / blocks, C), block by block."""
    view, blocks = member.view, member.blocks
    assert view is not None
    if blocks == 1:
        return view.call(ops, param, held)
    parts = ops.split(param, blocks, 0)
    own = [{entry: one[i] for entry, one in held.items()} for i in range(blocks)]
    return ops.concat([view.call(ops, *one) for one in zip(parts, own, strict=True)], 0)


def with_views(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's arrays with each view in place of its parameter, ``model.<parameter>``."""
    names = [name for name in arrays if name.startswith(VIEWED)]
    found = {name: array for name, array in arrays.items() if name not in names}
    return found | {f"model.{name.removeprefix(VIEWED)}": arrays[name] for name in names}
