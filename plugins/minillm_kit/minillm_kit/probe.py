"""The effects of a plugin on a fresh process, observed there and returned by :func:`ask` as JSON.

    python -B -m minillm_kit.probe import SPEC            what its import does
    python -B -m minillm_kit.probe plan SPEC JSON         plans before, with and after it
    python -B -m minillm_kit.probe train SPEC JSON torch  what planning and steps change

JSON holds the other arguments of a ``Subject``. Each question runs in a separate process, since a module is
imported for the first time only once; the modules of :data:`IMPORTED` are imported beforehand.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any

import numpy as np

from minillm_core.commands import plain
from minillm_kit import fresh
from minillm_kit.check import Failed

PATIENCE = 180
"""Timeout in seconds of an import, a plan or a few steps, generous for a busy machine."""

FORBIDDEN = {
    **dict.fromkeys(("socket.connect", "socket.getaddrinfo", "socket.bind"), "opens a socket"),
    **dict.fromkeys(("socket.__new__",), "makes a socket"),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn"), "starts a process"),
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rename", "os.rmdir"), "changes files"),
}
"""Audit event -> its description."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND


IMPORTED: Mapping[str, tuple[str, ...]] = {
    "torch": ("minillm_kit.on_torch", "torch._dynamo"),
    "mlx": ("minillm_kit.on_mlx",),
}
"""Question -> modules that its process has imported before the plugin."""


def ask(*question: str, environment: Mapping[str, str], hash_seed: int = 1) -> dict[str, Any]:
    """Run a question in a separate process, and return the answer.

    Raises:
        Failed: the process ended with an error, or did not end.
    """
    try:
        ended = fresh.run(
            "minillm_kit.probe",
            *question,
            environment={**environment, "PYTHONHASHSEED": str(hash_seed)},
            seconds=PATIENCE,
            imported=prepared(*question),
        )
    except TimeoutError:
        raise Failed(
            f"not done after {PATIENCE} seconds", cause="work at import: leave it to a hook"
        ) from None
    if ended.code:
        last = plain((ended.stderr.strip().splitlines() or ["no output"])[-1])
        raise Failed(f"exit {ended.code}: {last}", cause="it raised in a fresh process")
    return json.loads(ended.stdout.splitlines()[-1])


def prepared(*words: str) -> tuple[str, ...]:
    """List the modules that the process of a question imports beforehand."""
    return ("minillm_kit.subject", *(name for word in words for name in IMPORTED.get(word, ())))


def imported(spec: str) -> dict[str, Any]:
    """Observe the files, processes, sockets and modules of importing the plugin."""
    import socket  # noqa: F401  what the standard library does when it is first imported is not the plugin's

    import minillm_core
    from minillm_core.inspection import find_plugin

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
    with redirect_stdout(StringIO()) as printed:
        find_plugin(spec)
    modules = {name.partition(".")[0] for name in set(sys.modules) - before}
    return {
        "seen": seen,
        "modules": sorted(modules),
        "changed": differences(process, state()),
        "printed": printed.getvalue(),
    }


def planned(spec: str, given: dict[str, Any]) -> dict[str, Any]:
    """Hash the plain plan before and after loading the plugin, and the plan with it."""
    from minillm_kit.subject import Subject

    subject = Subject(spec, **given)
    before, process, modules = subject.planned(without=True).hash, state(), set(sys.modules)
    hashes = {"before": before, "with": subject.planned().hash}
    return {
        **hashes,
        "after": subject.planned(without=True).hash,
        "changed": differences(process, state()),
        "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    }


def trained(spec: str, given: dict[str, Any], *backends: str) -> dict[str, Any]:
    """Observe how planning with the plugin and its steps change a framework's state.

    The plain model is trained first, to exclude the framework's lazy initialisation. Generators may
    advance during training, as the plugin's modules may draw from them; reseeding shows in the seed.
    """
    from minillm_kit.subject import Subject

    subject = Subject(spec, **given)

    def step(backend: str, **which: bool) -> None:
        plan = subject.planned(**which)
        subject.train(subject.trainer(plan, backend), plan, subject.batches(plan, 2))

    def everything() -> dict[str, Any]:
        found = state()
        for backend in backends:
            framework = import_module(f"minillm_kit.on_{backend}")
            found |= framework.process_state() | patchable(PUBLIC[backend])
        return found

    for backend in backends:
        step(backend, without=True)
    before = everything()
    subject.planned()
    planning = everything()
    for backend in backends:
        step(backend)
    own = {f"{backend}'s generator" for backend in backends}
    steps = [name for name in differences(planning, everything()) if name not in own]
    return {"planning": differences(before, planning), "steps": steps}


def state() -> dict[str, Any]:
    """Return the state of the process that a plugin must not change."""
    return {
        "os.environ": dict(os.environ),
        "the working directory": os.getcwd(),
        "random's generator": hash(random.getstate()),
        "numpy.random's generator": hash(np.random.get_state()[1].tobytes()),  # type: ignore[union-attr]
        "numpy's error handling": np.geterr(),
        "the recursion limit": sys.getrecursionlimit(),
        **patchable(("numpy", "minillm_core")),
    }


PUBLIC = {
    "torch": ("torch.nn", "torch.optim", "torch.autograd", "torch.functional", "torch._tensor"),
    "mlx": ("mlx.core", "mlx.nn", "mlx.optimizers", "mlx.utils"),
}
"""Backend -> packages whose functions and classes are watched, besides the backend's own."""


def patchable(packages: tuple[str, ...]) -> dict[str, Any]:
    """Map each function, class, method and constant of these packages to its identity, by dotted name."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name not in packages and not name.startswith(tuple(f"{p}." for p in packages)):
            continue
        for key, value in list(vars(module).items()):
            if callable(value) or key.isupper():
                found[f"{name}.{key}"] = identity(value)
            if isinstance(value, type) and value.__module__ == name:
                members = list(vars(value).items())
                found |= {
                    f"{name}.{key}.{k}": identity(v) for k, v in members if k not in MACHINERY
                }
    return found


MACHINERY = {"__abstractmethods__", "_abc_impl", "__annotations__", "__weakref__", "__dict__"}
"""Attributes of classes that Python itself sets lazily."""


def identity(value: Any) -> Any:
    """Return a plain value's repr, or any other object's id."""
    return repr(value) if isinstance(value, bool | int | float | str | bytes | None) else id(value)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names whose values differ; new names do not count."""
    return sorted(name for name in before if name in after and before[name] != after[name])


def main(arguments: list[str]) -> None:
    """Answer one question in JSON."""
    questions: dict[str, Callable[[], dict[str, Any]]] = {
        "import": lambda: imported(arguments[1]),
        "plan": lambda: planned(arguments[1], json.loads(arguments[2])),
        "train": lambda: trained(arguments[1], json.loads(arguments[2]), *arguments[3:]),
    }
    with redirect_stdout(sys.stderr):  # keeps a hook's prints out of the answer
        answer = questions[arguments[0]]()
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
