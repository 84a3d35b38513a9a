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

from minillm_core.cli.commands import CommandGroup, Debug, Group, Help, group_command, help_if_bare
from minillm_core.cli.console import Documents, Messages, explain, opened, say, silence
from minillm_core.errors import Refusal
from minillm_core.plugins.attribution import SIGNALS
from minillm_core.plugins.watch import watching

_BY_SIGNAL = (75, 130)

NAMED_AFTER = 5.0
"""Seconds after the end of a command before threads that keep the process alive are reported."""

LEFT_AFTER = 30.0
"""Seconds that these threads then have before the process ends."""

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
    help_if_bare(context)


def program() -> CommandGroup:
    """Build the command ``minillm``; the commands below it are imported when they are run."""
    return group_command("minillm", COMMANDS, root=_root, epilog=_EPILOG)


def app(arguments: list[str], **more: Any) -> Any:
    """Run the command that the arguments name, without turning errors into exit codes."""
    return program()(arguments, prog_name="minillm", standalone_mode=False, **more)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; errors are printed on stderr.

    Args:
        argv: the arguments; default: the process's, which then ends soon after.
    """
    code = _run(argv)
    if argv is None:
        if code in _BY_SIGNAL and not _alive():
            _end(code)  # a framework's shutdown takes seconds, too long after Ctrl-C
        threading.Thread(target=_leave, args=(code,), daemon=True).start()
    return code


def _run(argv: Sequence[str] | None) -> int:
    _open_streams(own=argv is None)
    _import_nothing_unnamed()
    arguments, debug = _without_debug(list(sys.argv[1:] if argv is None else argv))
    try:
        _check_folder()
        with watching(say):
            code = app(arguments, obj=["minillm", *arguments])  # the command as typed, for run.json
        if code == 130:  # typer's exit code for a KeyboardInterrupt
            raise KeyboardInterrupt
        sys.stdout.flush()
    except BaseException as error:
        exited = isinstance(error, SystemExit)  # typer turns a BrokenPipeError into an exit
        if isinstance(error.__context__ if exited else error, BrokenPipeError):
            silence(sys.stdout)  # its reader has closed the pipe: minillm plan | head
            return 1
        from minillm_core.backends.ranks import rank_prefix  # a help page does without it

        text, code = explain(error, debug=debug)
        say(rank_prefix() + text)
        if argv is None and code in _BY_SIGNAL:
            _ignore_signals()
        return code
    return int(code or 0)


def _leave(code: int) -> None:
    """End the process even if threads keep it alive, such as a plugin's non-daemon thread.

    Python waits for such threads indefinitely, so that a finished job would never release its machine.
    If no such thread remains, this daemon thread ends with the process.
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
    """Flush the output and end the process at once."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _alive() -> list[str]:
    """Return the threads that Python waits for, each with the code that it runs."""
    frames, found = sys._current_frames(), []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread.daemon or thread is threading.main_thread() or frame is None:
            continue
        own = ""
        while frame is not None:  # innermost first; the last outside Python's library
            name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
            if name.partition(".")[0] not in sys.stdlib_module_names:
                plugin = name.removeprefix("minillm_file_")
                whose = f"plugin '{plugin}', " if plugin != name else ""
                own = f" ({whose}{file}:{frame.f_lineno})"
            frame = frame.f_back
        found.append(f"thread '{thread.name}'{own}")
    return found


def _import_nothing_unnamed() -> None:
    """Keep pydantic and torch from importing extensions that installed packages offer them.

    On first use both scan the metadata of all installed distributions, import the extensions they find,
    and fail if any metadata is unreadable. This is set here and not on import of ``minillm_core``: a
    program that uses the package keeps its own extensions.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _check_folder() -> None:
    """Refuse to work in a deleted working directory: frameworks fail there without an explanation.

    Raises:
        Refusal: the working directory no longer exists.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise Refusal(
            "the current folder no longer exists",
            where=os.environ.get("PWD"),
            fix="change to an existing folder (cd ~) and run the command again",
        ) from error


def _ignore_signals() -> None:
    """Ignore signals while Python exits, which takes a second with a framework loaded.

    Another Ctrl-C would change the exit code, or print a traceback after the last line.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _open_streams(*, own: bool) -> None:
    """Open the standard streams that the process was started without (``>&-``).

    Otherwise the next opened file would get such a stream's descriptor, and all output written to it.

    Args:
        own: the process is this program's: no command ends because its stderr cannot be written, and a
            stdout that cannot be written is an error with a reason.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for name, raw in (("stdout", Documents), ("stderr", Messages)):
        stream = getattr(sys, name)
        if own and stream is getattr(sys, f"__{name}__"):  # and not a test's or a notebook's
            setattr(sys, name, opened(raw, stream))


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without ``--debug`` (anywhere before ``--``), and whether it was given."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return kept + arguments[end:], len(kept) < end
