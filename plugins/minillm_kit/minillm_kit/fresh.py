"""Fresh processes: call a module's ``main`` in a process that has imported modules but computed nothing.

Starting Python and importing both frameworks takes seconds; forking a process that has imported them
takes milliseconds. So one parent process imports, and a forked child answers each call: the side effects
of a call end with its child. Where children could hang, each call starts a new Python instead: outside
Linux, and where importing has started a thread.

    minillm_kit.fresh MODULE ...    imports the modules, and forks for each line on stdin

A process imports from the folders of its own PYTHONPATH, then from those of this process (``sys.path``). A new
Python started with ``-m`` or ``-c`` would look into the current folder first, where an author's random.py hides
the standard library's.
"""

from __future__ import annotations

import gc
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Ended", "exit_code", "run", "serve"]


class Ended(NamedTuple):
    """The result of an ended process."""

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
    """Run a module's ``main(arguments)`` in a fresh process, in this one's folder.

    Args:
        module: with the function ``main``, which takes a list of arguments.
        arguments: of ``main``; ``sys.argv`` is the module and these.
        environment: of the process, instead of this one's; folders of its PYTHONPATH precede this ``sys.path``.
        seconds: timeout, after which it is killed.
        imported: modules to import before the first command.

    Raises:
        TimeoutError: the process was killed.
    """
    # Python reads these at startup; a child gets the others
    fixed = {name: value for name, value in environment.items() if name.startswith("PYTHON")}
    if sys.platform == "linux":
        parent = _Parent.of(tuple(imported), tuple(sorted(fixed.items())))
        if parent.forks:
            return parent.run(module, arguments, environment, seconds)
    try:
        ended = subprocess.run(
            _command(_path(environment), module, *arguments),
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{module} still ran after {seconds} s") from None
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def _path(environment: Mapping[str, str]) -> list[str]:
    """Return the ``sys.path`` of a process: folders of its own PYTHONPATH, and this one's ``sys.path``."""
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    return [*(one for one in named if one and one not in sys.path), *sys.path]


def _command(path: Sequence[str], module: str, *arguments: str) -> list[str]:
    """Return the command that calls a module's main in a new Python with this ``sys.path``."""
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); del sys.argv[:2]; " + (
        "from importlib import import_module; import_module(sys.argv[0]).main(sys.argv[1:])"
    )
    return [sys.executable, "-B", "-P", "-c", code, json.dumps(path), module, *arguments]


class _Parent:
    """A process that has imported some modules and forks a child for every call.

    Attributes:
        forks: whether forking is safe, without children that hang.
    """

    def __init__(self, imported: tuple[str, ...], fixed: tuple[tuple[str, str], ...]) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self._process: Any = subprocess.Popen(
            _command(_path(dict(fixed)), "minillm_kit.fresh", *imported),
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
        """Return the parent with these imports, started by the first call."""
        return _Parent(imported, fixed)

    def run(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> Ended:
        """Run ``module`` in a child; as :func:`run`."""
        with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
            asked = {
                "argv": [module, *arguments],
                "environment": dict(environment),
                "folder": os.getcwd(),
                "path": _path(environment),
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


def main(names: Sequence[str]) -> None:
    """Import modules, report it, and answer lines of standard input until it ends."""
    serve(names, _answer)


def serve(imported: Sequence[str], answer: Callable[[dict[str, Any]], int]) -> None:
    """Import modules, print ``ready``, and fork a child for each line of standard input until it ends.

    ``threads`` is printed instead if an import started a thread: it is not forked, and a child could wait
    for it. The answer to a line is its child's exit code, or ``null`` where the child timed out.

    Args:
        imported: modules; those that cannot be imported are left out, since a child will report it.
        answer: called in a child with the line's JSON object, whose ``seconds`` are the timeout; returns
            the exit code.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # keeps prints of imports out of answers
        for name in imported:
            with suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()  # a child need neither walk over what is there, nor copy its pages
        forks = len(os.listdir("/proc/self/task")) == 1
        print("ready" if forks else "threads", file=answers, flush=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller and a child
        for line in iter(sys.stdin.readline, ""):
            asked = json.loads(line)
            child = os.fork()
            if not child:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os._exit(answer(asked))
            print(json.dumps(_waited(child, asked["seconds"])), file=answers, flush=True)


def _waited(child: int, seconds: float) -> int | None:
    """Wait for a child; return its exit code, or None if it timed out and was killed."""
    watched = os.pidfd_open(child)
    late = not select.select([watched], [], [], seconds)[0]
    os.close(watched)
    if late:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if late else code


def _answer(asked: dict[str, Any]) -> int:
    """Call a module's main in this child as a new Python would; return the exit code."""
    began, wanted = dict(os.environ), asked["environment"]
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
    sys.path[:] = asked["path"]
    module, *arguments = sys.argv = asked["argv"]
    return exit_code(lambda: importlib.import_module(module).main(arguments))


def exit_code(call: Callable[[], object]) -> int:
    """Call a function as Python runs a script, whose errors end in a traceback; return the exit code."""
    code = 0
    try:
        call()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
