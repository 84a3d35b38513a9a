"""What follows from who owns what: evidence to ask for, files to digest, what can be exported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.decoder import DecoderSpec
from minillm_core.nn.module import named_modules
from minillm_core.optim.groups import Group
from minillm_core.plan.placements import Placement
from minillm_core.plan.plan import Export, as_json
from minillm_core.plugins.builders import ParamInfo
from minillm_core.plugins.manager import LoadedPlugin, Manager
from minillm_core.plugins.origin import digest_of

__all__ = ["digests", "expected", "export"]

REFERENCE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


def expected(
    plugin: LoadedPlugin,
    model: Any,
    parameters: Mapping[str, ParamInfo],
    placements: Iterable[Placement],
) -> tuple[str, ...]:
    """What must be seen of a plugin: minillm_core.train.evidence looks for these.

    Numbers are evidence of a plugin that put nothing else in: they are true once planned.

    Raises:
        PlanError: it put nothing into the plan.
    """
    name, named = plugin.name, plugin.name if plugin.distribution else plugin.source
    mine = [placement for placement in placements if placement.owner == name]
    keys = [f"node:{path}" for path, m in named_modules(model) if getattr(m, "owner", None) == name]
    keys += [f"parameter:{p.name}" for p in parameters.values() if p.owner == name]
    for placement in mine:
        kind, _, rest = placement.slot.partition("[")
        if kind == "opt.rule":
            keys.append(f"stage:{rest.replace(']', '', 1)}")
        elif kind == "model.init":
            keys.append(f"init:{rest.rstrip(']')}")
        elif kind == "kernel":
            keys.append(f"kernel:{rest.rstrip(']')}={placement.what}")
        elif kind in ("on_batch", "on_event"):
            keys.append(f"{kind.removeprefix('on_')}:{name}")
    keys = keys or [f"slot:{placement.slot}" for placement in mine if placement.settled]
    if not keys:
        raise PlanError(
            f"plugin '{name}' put nothing into the plan",
            where=plugin.source,
            fix=f"look at its options (minillm plugins info {named}), or leave it out",
        )
    return tuple(keys)


def digests(
    spec: DecoderSpec,
    parameters: Mapping[str, ParamInfo],
    groups: Iterable[Group],
    manager: Manager,
) -> dict[str, str]:
    """sha256 of every file outside the core that the plan refers to."""
    found = {plugin.name: plugin.digest for plugin in manager.plugins}
    data = (as_json(spec), as_json(dict(parameters)), [group.rule.data() for group in groups])
    for module in set(_modules(data)):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and not module.startswith("minillm_core."):
            found[module] = digest_of(file)
    return found


def _modules(data: Any) -> Iterator[str]:
    """The module of everything in JSON that reads as a reference."""
    if isinstance(data, Mapping):
        for item in data.values():
            yield from _modules(item)
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from _modules(item)
    elif isinstance(data, str) and (match := REFERENCE.fullmatch(data)):
        yield match[1]


def export(manager: Manager, placements: Iterable[Placement]) -> Export:
    """Which layout fits; plugins that leave the model's function alone do not count."""
    inside = {placement.owner for placement in placements if placement.shapes}
    layouts = {p.name: p.plugin.manifest.export for p in manager.plugins if p.name in inside}
    blocked = sorted(name for name, layout in layouts.items() if layout is None)
    wanted = {layout for layout in layouts.values() if layout is not None}
    if blocked or len(wanted) > 1:
        return Export(None, tuple(blocked or sorted(layouts)))
    return Export(wanted.pop() if wanted else "llama")
