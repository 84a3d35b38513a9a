"""What a plugin does to a fresh process; prints one JSON document.

    python -B -m minillm_core.testing.probe import SPEC     what its import does
    python -B -m minillm_core.testing.probe plan SPEC JSON  hashes of plans before, with and after

A process of its own, since a thing is imported for the first time once only.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["main"]

FORBIDDEN = {
    **dict.fromkeys(("socket.connect", "socket.getaddrinfo", "socket.bind"), "opens a socket"),
    **dict.fromkeys(("socket.__new__",), "makes a socket"),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn"), "starts a process"),
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rename", "os.rmdir"), "changes files"),
}
"""Audit event -> what it is called."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND


def imported(spec: str) -> dict[str, Any]:
    """What importing the plugin opens, starts and brings in."""
    import socket  # noqa: F401  what the standard library does when it is first imported is not the plugin's

    import minillm_core
    from minillm_core.plugins.find import find

    for name in minillm_core.__all__:
        getattr(minillm_core, name)
    seen: list[str] = []
    before, process = set(sys.modules), state()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
            seen.append(f"opens {arguments[0]!r} for writing")
        elif event in FORBIDDEN:
            seen.append(f"{FORBIDDEN[event]}: {event}{arguments!r}"[:200])

    sys.addaudithook(watch)
    find(spec)
    modules = {name.partition(".")[0] for name in set(sys.modules) - before}
    return {"seen": seen, "modules": sorted(modules), "changed": differences(process, state())}


def planned(spec: str, options: dict[str, Any]) -> dict[str, Any]:
    """Hashes of the plain plan before the plugin came and after, and of the plan with it."""
    from minillm_core.testing.subject import Subject

    subject = Subject(spec, options)
    before, process = subject.planned(without=True).hash, state()
    hashes = {"before": before, "with": subject.planned().hash}
    return {
        **hashes,
        "after": subject.planned(without=True).hash,
        "changed": differences(process, state()),
    }


def state() -> dict[str, Any]:
    """What a process has once, and a plugin has no business to change."""
    return {
        "os.environ": dict(os.environ),
        "the working directory": os.getcwd(),
        "random's generator": hash(random.getstate()),
        "numpy.random's generator": hash(np.random.get_state()[1].tobytes()),  # type: ignore[union-attr]
        "numpy's error handling": np.geterr(),
        "the recursion limit": sys.getrecursionlimit(),
        **patchable(),
    }


def patchable() -> dict[str, int]:
    """Dotted name -> identity of each function, class and method of numpy's and minillm's modules."""
    found: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("numpy", "minillm_core"):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                members = vars(value).items()
                found |= {f"{name}.{key}.{k}": id(v) for k, v in members if callable(v)}
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names whose values differ; what is new is no difference."""
    return sorted(name for name in before if name in after and before[name] != after[name])


def main(arguments: list[str]) -> None:
    """Answer one question in JSON."""
    questions: dict[str, Callable[[], dict[str, Any]]] = {
        "import": lambda: imported(arguments[1]),
        "plan": lambda: planned(arguments[1], json.loads(arguments[2])),
    }
    sys.stdout.write(json.dumps(questions[arguments[0]]()))


if __name__ == "__main__":
    main(sys.argv[1:])
