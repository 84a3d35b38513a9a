"""Code generation for plugins' batch fields: a function that computes them by their own ``on_batch``."""

from __future__ import annotations

import inspect
import re
from typing import Any

from minillm_hf.own.copying import CannotWriteError, Key
from minillm_hf.own.draft import Draft
from minillm_hf.own.literals import Lines, plain, reference


def batch_fields(draft: Draft) -> str:
    """Generate the function that computes plugins' batch fields; empty if no part reads one."""
    wanted = {draft.declared[name] for name in draft.needed if name in draft.declared}
    if not wanted:
        return ""
    lines = Lines(
        [
            "batch = {",
            '    "ids": ids,',
            '    "labels": np.full_like(ids, -1),',
            '    "documents": np.zeros_like(ids),',
            '    "positions": np.broadcast_to(np.arange(ids.shape[1], dtype=ids.dtype), ids.shape),',
            "}",
        ]
    )
    by_name = {one.name: one.plugin for one in draft.plan.active}
    for owner in wanted:
        if owner not in draft.plan.on_batch:
            raise CannotWriteError(f"{owner} reads a field of the data, which a text has not")
    draft.copier.need("np")
    for owner in draft.plan.on_batch:
        if owner in wanted:
            key, takes = hook(draft, by_name[owner])
            known = {
                "phase": '"decode"',
                "vocab": "GEOMETRY.vocab",
                "progress": "1.0",
                "specials": repr(dict(draft.specials)),
            }
            more = "".join(f", {name}={known[name]}" for name in takes if name != "batch")
            lines.append(f"batch = {reference(key)}().on_batch(batch{more})")
    return (
        "def batch_fields(ids):\n"
        '    """Compute what parts read beside ids: NumPy arrays (B, T), by name."""\n'
        f"{lines.block(4)}\n    return batch"
    )


def hook(draft: Draft, plugin: Any) -> tuple[Key, tuple[str, ...]]:
    """Collect a plugin's ``on_batch`` as a standalone class, with its options as constants."""
    cls = type(plugin)
    taken, options, pending = {}, {}, ["on_batch"]
    while pending:
        name = pending.pop()
        function = inspect.getattr_static(cls, name, None)
        if not inspect.isfunction(function):
            value = getattr(plugin, name, None)
            options[name] = plain(value, cls.__name__)
            continue
        text = inspect.getsource(function)
        taken[name] = text.rstrip()
        for other in re.findall(r"\bself\.(\w+)", text):
            if other not in taken and other not in options and other not in pending:
                pending.append(other)
    body = [f"    {name} = {value!r}" for name, value in sorted(options.items())]
    text = f'class {cls.__name__}:\n    """Fields of a batch, from its ids."""\n\n'
    text += "\n".join(body) + ("\n\n" if body else "") + "\n\n".join(taken.values())
    key = draft.copier.add(cls.__module__, cls.__name__, text)
    takes = tuple(inspect.signature(cls.on_batch).parameters)[1:]
    return key, takes
