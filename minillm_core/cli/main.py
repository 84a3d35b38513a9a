"""The program ``minillm``: its commands, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer

from minillm_core.cli.commands import CommandGroup, Group, group_command
from minillm_core.cli.console import explain, nothing_more_to, say
from minillm_core.cli.options import Debug, Help, help_without_command
from minillm_core.errors import Refusal
from minillm_core.plugins.attribution import SIGNALS
from minillm_core.plugins.watch import watching

_BY_SIGNAL = (75, 130)

NAMED_AFTER = 5.0
"""Seconds after the end of a command until threads that keep the process alive are named."""

LEFT_AFTER = 30.0
"""Seconds that these then have left."""

COMMANDS = Group(
    "Train small language models fast. Every technique is a plugin.",
    {
        "train": "minillm_core.cli.train:train",
        "plan": "minillm_core.cli.plan:plan",
        "eval": "minillm_core.cli.evaluate:evaluate",
        "generate": "minillm_core.cli.generate:generate",
        "export": "minillm_core.cli.export:export",
        "plugins": Group(
            "List, inspect, check and create plugins.",
            {
                "list": "minillm_core.cli.plugins_list:list_command",
                "info": "minillm_core.cli.plugins_info:info_command",
                "why": "minillm_core.cli.plugins_why:why_command",
            },
        ),
        "data": Group(
            "Tokenise, inspect, deduplicate, filter and mix training data.",
            {"cache": Group("Show and clear the token cache.", {})},
        ),
        "kernels": Group("List, check and time the kernels of each op.", {}),
    },
)
"""The core's commands. To move one to a distribution: delete its line here, and name the function in
that distribution's entry points ``minillm.commands``, ``plugins.new`` for one of a group.
"""


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"minillm {version('minillm-core')}")
        raise typer.Exit


_EPILOG = """Examples:

minillm train

minillm plan --plugins muon,paired_heads

minillm COMMAND --help shows the examples of each command."""


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
    debug: Debug = False,
    show_help: Help = False,
) -> None:
    help_without_command(context)


def program() -> CommandGroup:
    """Build the command ``minillm``; the commands below it are imported when they are run."""
    return group_command("minillm", COMMANDS, root=_root, epilog=_EPILOG)


def app(arguments: list[str], **more: Any) -> Any:
    """Run the command that the arguments name, without turning errors into exit codes."""
    return program()(arguments, prog_name="minillm", standalone_mode=False, **more)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; whatever goes wrong is said on stderr.

    Args:
        argv: the arguments; default: the process's, which is about to end then.
    """
    code = _run(argv)
    if argv is None:
        if code in _BY_SIGNAL and not _alive():
            _end(code)  # taking a framework down costs seconds, and somebody pressed Ctrl-C
        threading.Thread(target=_leave, args=(code,), daemon=True).start()
    return code


def _run(argv: Sequence[str] | None) -> int:
    _open_streams()
    _import_nothing_unnamed()
    arguments, debug = _without_debug(list(sys.argv[1:] if argv is None else argv))
    try:
        _check_folder()
        with watching(say):
            code = app(arguments, obj=["minillm", *arguments])  # as it was typed, for run.json
        if code == 130:  # typer's answer to a KeyboardInterrupt
            raise KeyboardInterrupt
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed_pipe()
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            return _closed_pipe()  # typer's answer to one is an exit
        from minillm_core.backends.ranks import said_by  # here, since help pages do without it

        text, code = explain(error, debug=debug)
        say(said_by() + text)
        if argv is None and code in _BY_SIGNAL:
            _ignore_signals()
        return code
    return int(code or 0)


def _leave(code: int) -> None:
    """End the process although threads keep it alive, such as a plugin's that is no daemon.

    Python waits for those without end, so that a job that is done would never leave its machine.
    Where none is left this thread ends with the process.
    """
    time.sleep(NAMED_AFTER)
    if names := _alive():
        say(
            f"waiting for {', '.join(names)}, which would keep the program alive: "
            f"it ends in {LEFT_AFTER:g} s, with exit code {code}"
        )
        time.sleep(LEFT_AFTER)
    if names := _alive():
        say(f"ended without {', '.join(names)}")
        _end(code)


def _end(code: int) -> NoReturn:
    """End the process at once, with what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _alive() -> list[str]:
    """List the threads that Python waits for, each with the code that it runs."""
    frames, found = sys._current_frames(), []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread.daemon or thread is threading.main_thread() or frame is None:
            continue
        own = ""
        while frame is not None:  # from the innermost on: the last that is not Python's is its own
            name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
            if name.partition(".")[0] not in sys.stdlib_module_names:
                plugin = name.removeprefix("minillm_file_")
                whose = f"plugin '{plugin}', " if plugin != name else ""
                own = f" ({whose}{file}:{frame.f_lineno})"
            frame = frame.f_back
        found.append(f"thread '{thread.name}'{own}")
    return found


def _import_nothing_unnamed() -> None:
    """Keep pydantic and torch from importing whatever installed package offers them an extension.

    Both look through the metadata of all that is installed when they are first used, import what
    they find there, and fail where any of it cannot be read. It is set here, and not where
    ``minillm_core`` is imported: the extensions of a program that uses it are that program's affair.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _check_folder() -> None:
    """Refuse to work in a folder that was removed: frameworks end there without an explanation.

    Raises:
        Refusal: it is gone.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise Refusal(
            "the current folder does not exist any more",
            where=os.environ.get("PWD"),
            fix="change to a folder that is there (cd ~), and type the command again",
        ) from error


def _ignore_signals() -> None:
    """Ignore signals while Python exits, which takes a second with a framework.

    Another Ctrl-C would change the exit code, or print a traceback after the last line.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _open_streams() -> None:
    """Give the process the standard streams that it was started without (``>&-``).

    Else the next file would get the number of one, and whatever is written to that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Take ``--debug`` out of the arguments, anywhere before ``--``; return whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return kept + arguments[end:], len(kept) < end


def _closed_pipe() -> int:
    """Silence stdout, whose reader went away (``minillm plan | head``); return the exit code."""
    nothing_more_to(sys.stdout)
    return 1
