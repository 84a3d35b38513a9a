"""Fresh processes: a module's ``main`` is called in one that has imported things, and computed nothing.

Starting Python and importing both frameworks takes seconds, and a process that has imported them is
forked in milliseconds. So one process imports, and each call is answered by a child of it: what a call
does to its process is gone with that, as if it had been started for it. Where children could hang, each
call starts a Python of its own: outside Linux, and where importing has started a thread.

    python -B -m minillm_kit.fresh MODULE ...    imports them, and forks for each line that it is sent
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Ended", "run"]


class Ended(NamedTuple):
    """How a process has ended."""

    code: int
    stdout: str
    stderr: str


def run(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    seconds: float,
    imported: Sequence[str] = (),
) -> Ended:
    """Run ``python -B -m module arguments`` in a fresh process, in this one's folder.

    Args:
        module: its ``main(arguments)`` is what it does where it is run as ``__main__``.
        arguments: of it.
        environment: of the process, instead of this one's.
        seconds: after which it is killed.
        imported: modules that it imports in any case, before the first command.

    Raises:
        TimeoutError: it was killed.
    """
    # Python reads these when it starts; a child is given the others
    fixed = {name: value for name, value in environment.items() if name.startswith("PYTHON")}
    if sys.platform == "linux":
        parent = _Parent.of(tuple(imported), tuple(sorted(fixed.items())))
        if parent.forks:
            return parent.run(module, arguments, environment, seconds)
    command = [sys.executable, "-B", "-m", module, *arguments]
    try:
        ended = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{module} still ran after {seconds} s") from None
    return Ended(ended.returncode, ended.stdout, ended.stderr)


class _Parent:
    """A process that has imported some modules and forks for every call.

    Attributes:
        forks: whether its children cannot hang.
    """

    def __init__(self, imported: tuple[str, ...], fixed: tuple[tuple[str, str], ...]) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self._process: Any = subprocess.Popen(
            [sys.executable, "-B", "-m", "minillm_kit.fresh", *imported],
            env={**kept, **dict(fixed)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        weakref.finalize(self, _end, self._process)
        self.forks: bool = self._process.stdout.readline() == "ready\n"

    @staticmethod
    @cache
    def of(imported: tuple[str, ...], fixed: tuple[tuple[str, str], ...]) -> _Parent:
        """Return the one that has imported these, which is started by the first call."""
        return _Parent(imported, fixed)

    def run(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> Ended:
        """Have a child run ``module``; as :func:`run`."""
        with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
            asked = {
                "argv": [module, *arguments],
                "environment": dict(environment),
                "folder": os.getcwd(),
                "seconds": seconds,
                "said": folder,
            }
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the process that forks has ended: {self._process.wait()}")
            if (code := json.loads(answer)) is None:
                raise TimeoutError(f"{module} still ran after {seconds} s")
            said = [Path(folder, name).read_text(errors="replace") for name in STREAMS]
            return Ended(code, *said)


STREAMS = ("stdout", "stderr")


def _end(process: Any) -> None:
    """End a parent: it exits when its standard input is closed."""
    with suppress(OSError):
        process.stdin.close()
    process.stdout.close()
    process.wait()


def _serve(names: Sequence[str]) -> None:
    """Import modules, say so, and answer lines of standard input until it ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what an import prints is no answer
        for name in names:
            with suppress(ImportError):  # a child will say so
                importlib.import_module(name)
        began = dict(os.environ)
        # a thread would not be in a child, which could wait for it
        forks = len(os.listdir("/proc/self/task")) == 1
        print("ready" if forks else "threads", file=answers, flush=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that asks, and a child
        for line in iter(sys.stdin.readline, ""):
            asked = json.loads(line)
            child = os.fork()
            if not child:
                os._exit(_answer(asked, began))
            print(json.dumps(_waited(child, asked["seconds"])), file=answers, flush=True)


def _waited(child: int, seconds: float) -> int | None:
    """Wait for a child's end; return its exit code, or None where it took longer and was killed."""
    watched = os.pidfd_open(child)
    late = not select.select([watched], [], [], seconds)[0]
    os.close(watched)
    if late:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if late else code


def _answer(asked: dict[str, Any], began: Mapping[str, str]) -> int:
    """Call a module's main in this child, as a Python of its own would; returns the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = asked["environment"]
    for name in {*began, *wanted}:
        if name not in wanted:
            os.environ.pop(name, None)
        elif wanted[name] != began.get(name):
            os.environ[name] = wanted[name]
    for number, name in enumerate(STREAMS, 1):
        written = os.open(Path(asked["said"], name), os.O_CREAT | os.O_WRONLY, 0o600)
        os.dup2(written, number)
        os.close(written)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # this process inherited the pipe of its parent's commands
    os.close(nothing)
    os.chdir(asked["folder"])
    sys.path[0] = asked["folder"]
    module, *arguments = sys.argv = asked["argv"]
    code = 0
    try:
        importlib.import_module(module).main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve(sys.argv[1:])
