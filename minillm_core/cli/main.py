"""The program ``minillm``: its commands, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

import typer

from minillm_core.cli import (
    ablate,
    bench,
    doctor,
    evaluate,
    export,
    generate,
    plan,
    plugins,
    report,
    train,
)
from minillm_core.cli.console import documents_alone, nothing_more_to, say
from minillm_core.cli.failure import explain
from minillm_core.cli.options import Debug, Help, help_without_command
from minillm_core.plugins.watch import watching

__all__ = ["app", "main"]

_BY_SIGNAL = (75, 130)

app = typer.Typer(
    name="minillm",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("eval", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("generate", epilog=generate.EXAMPLES)(generate.generate)
app.command("export", epilog=export.EXAMPLES)(export.export)
app.command("ablate", epilog=ablate.EXAMPLES)(ablate.ablate)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.add_typer(plugins.app, name="plugins")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"minillm {version('minillm-core')}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="Examples:\n\n"
    "minillm train\n\n"
    "minillm plan --plugins muon,paired_heads\n\n"
    "minillm COMMAND --help shows the examples of each command.",
)
def root(
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
    """Train small language models fast. Every technique is a plugin."""
    help_without_command(context)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; whatever goes wrong is said on stderr.

    Args:
        argv: the arguments; default: the process's.
    """
    _open_streams()
    arguments, debug = _without_debug(list(sys.argv[1:] if argv is None else argv))
    try:
        with watching(say), documents_alone() if _asks_json(arguments) else nullcontext():
            code = app(arguments, prog_name="minillm", standalone_mode=False)
        if code == 130:  # typer's answer to a KeyboardInterrupt
            raise KeyboardInterrupt
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed_pipe()
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            return _closed_pipe()  # typer's answer to one is an exit
        text, code = explain(error, debug=debug)
        say(text)
        if argv is None and code in _BY_SIGNAL:
            _hear_no_more()
        return code
    return int(code or 0)


def _hear_no_more() -> None:
    """Let Python take its leave, which takes a framework a second, with the code that was said.

    A key that is hit once more would else change it, or put a traceback behind the last line.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _open_streams() -> None:
    """Give the process the standard streams that it was started without (``>&-``).

    Else the next file would get the number of one, and whatever is written to that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _asks_json(arguments: list[str]) -> bool:
    """Whether ``--json`` stands before ``--``, and nobody asks for help."""
    given = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in given and "--help" not in given


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments without ``--debug``, which may stand anywhere before ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return kept + arguments[end:], len(kept) < end


def _closed_pipe() -> int:
    """The reader of stdout went away (``minillm plan | head``): nothing more can be said there."""
    nothing_more_to(sys.stdout)
    return 1
