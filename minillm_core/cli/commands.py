"""Commands that are imported lazily: the core's, and those of other distributions.

The core's are listed in a table (``main.py``). A distribution adds a command with an entry point of the
group ``minillm.commands``: its name is the command's, with a dot after a group of the core (``plugins.new``
is typed ``minillm plugins new``); its value is ``module:function``, a function with typer's annotations, or
``module:app``, a typer app, which is a group. Help pages read the summaries from the source. The names in
the core's table always refer to the core's commands.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import typer
import typer.main
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from minillm_core.cli.console import documents_alone, say
from minillm_core.errors import MinillmError, PluginCodeError, PluginError
from minillm_core.plugins import first_party
from minillm_core.plugins.attribution import root_of, shown_frames, watch_signals
from minillm_core.plugins.discover import CommandEntry, find_module, installed_commands, unreadable
from minillm_core.plugins.manifest import doc_summary
from minillm_core.text import few, plain

OTHERS = "Commands of other distributions"
"""Title of the help panel of these commands."""


def help_if_bare(context: typer.Context) -> None:
    """Show the help of a group that is called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


# typer's own --help makes it import pydantic for every command, `minillm plugins list` as well.
Help = Annotated[
    bool,
    typer.Option(
        "--help", metavar="", callback=_show_help, is_eager=True, help="Show this message and exit."
    ),
]
# main() removes --debug from the arguments at any position; it is declared here for --help.
Debug = Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class Group:
    """A group of the core's commands, which distributions may add to.

    Args:
        summary: the first line of its help page.
        commands: name -> ``module:function``, or a group.
    """

    summary: str
    commands: Mapping[str, str | Group]


class LazyCommand(TyperCommand):
    """A command with its name and summary, imported when it is run.

    Args:
        name: the command's name.
        load: imports the command.
        guard: context manager around its import and run.
        shown: ``short_help``, ``hidden`` and ``rich_help_panel``.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Any],
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        **shown: Any,
    ) -> None:
        super().__init__(name, **shown)
        self.load, self.guard = load, guard


class CommandGroup(TyperGroup):
    """A group whose commands are imported when they are run."""

    prefix = ""  # prefix of the entry points that add to it: "plugins."
    core: Mapping[str, str | Group] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, after reading the summaries for the help page."""
        self._add_offered()
        for name, target in self.core.items():
            summary = target.summary if isinstance(target, Group) else _summary(target)
            self.commands[name].short_help = summary
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; installed distributions are searched only if it is not the core's."""
        if cmd_name not in self.commands:
            self._add_offered()
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the command to run; from here on errors are attributed to its distribution."""
        try:
            name, found, rest = super().resolve_command(ctx, args)
        except typer.TyperException as error:
            if lost := [one.file or one.distribution for one in unreadable()]:
                error.message += f" These distributions cannot be read: {few(lost)}."
            raise
        if isinstance(found, LazyCommand):
            self._guards.enter_context(found.guard())
            found = found.load()
        self._chosen = name, found
        _note_repeated(found, rest)
        return name, found, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with ExitStack() as self._guards:
            try:
                return super().invoke(ctx)
            except typer.TyperException as error:
                # the parser names no command if an option's value is missing
                if getattr(error, "ctx", ctx) is None:
                    name, found = self._chosen
                    error.ctx = typer.Context(found, parent=ctx, info_name=name)  # type: ignore[attr-defined]
                raise

    def _belongs_here(self, whole: str) -> bool:
        """Return whether a command of this full name is one of this group, not of a group within."""
        group, dot, _ = whole.removeprefix(self.prefix).partition(".")
        within = bool(dot) and isinstance(self.core.get(group), Group)
        return whole.startswith(self.prefix) and not within

    def _add_offered(self) -> None:
        """Add the commands of installed distributions, and of first-party ones that are not installed."""
        for whole, same in groupby(installed_commands(self._belongs_here), lambda one: one.name):
            name, offers = whole.removeprefix(self.prefix), list(same)
            group, dot, _ = name.partition(".")
            shown = _shown(offers, first_party.FIRST_PARTY_COMMANDS.get(whole))
            if name in self.core:
                reason = f"not used: '{name}' is a command of minillm itself"
            elif dot:
                reason = f"not used: '{group}' is not a group that takes commands"
            else:
                load = partial(_import_offered, name, whole, offers)
                guard = partial(_own_code, offers[0])
                self.commands[name] = LazyCommand(name, load, guard, **shown)
                continue
            for one in offers:  # a separate row, under a key that is not a command name
                said = escape(f"{reason} ({one.offered_by})")
                row = LazyCommand(name, _refuse_row, rich_help_panel=OTHERS, short_help=said)
                self.commands[f"{name} of {one.offered_by}"] = row
        for whole in first_party.FIRST_PARTY_COMMANDS:
            name = whole.removeprefix(self.prefix)
            if whole.startswith(self.prefix) and "." not in name and name not in self.commands:
                self.commands[name] = LazyCommand(name, partial(_refuse_absent, whole), hidden=True)


def group_command(
    name: str, group: Group, prefix: str = "", root: Callable[..., None] | None = None, **more: Any
) -> CommandGroup:
    """Build the command of a group.

    Args:
        name: the group's name.
        group: its commands.
        prefix: prefix of the entry points that add to it.
        root: a function with the group's own options, which is called before every command.
        more: keywords of typer's ``callback``, such as ``epilog``.
    """
    app = typer.Typer(name=name, cls=CommandGroup, rich_markup_mode="rich", add_completion=False)
    app.callback(invoke_without_command=True, help=group.summary, **more)(root or _root)
    made = typer.main.get_command(app)
    assert isinstance(made, CommandGroup)
    made.prefix, made.core = prefix, group.commands
    for own, target in group.commands.items():
        made.commands[own] = _core_command(own, target, prefix)
    return made


def _root(context: typer.Context, debug: Debug = False, show_help: Help = False) -> None:
    help_if_bare(context)


def _core_command(name: str, target: str | Group, prefix: str) -> LazyCommand:
    if isinstance(target, Group):
        return LazyCommand(name, lambda: group_command(name, target, f"{prefix}{name}."))
    return LazyCommand(name, lambda: _import(name, target))


def _summary(target: str) -> str:
    """Return the summary of a command of the core."""
    module, _, function = target.partition(":")
    spec = find_module(module)
    assert spec is not None
    assert spec.origin is not None
    return doc_summary(Path(spec.origin).read_bytes(), function)


def _shown(offers: list[CommandEntry], ours: str | None) -> dict[str, str | None]:
    """Describe a command on a help page: its summary and distribution, or why it is refused.

    Args:
        offers: the entry points of its name.
        ours: the first-party distribution of a command of this name.
    """
    first, by = offers[0], " and ".join(one.offered_by for one in offers)
    if len(offers) > 1:
        text = f"refused: offered by {by}"
    elif first.broken:
        text = f"broken: {first.broken} ({by})"
    elif first.distribution == ours:
        return {"short_help": escape(first.summary)}
    else:
        text = f"{first.summary} ({by})"
    return {"short_help": escape(text), "rich_help_panel": OTHERS}


def _note_repeated(found: Any, arguments: Sequence[str]) -> None:
    """Print a note for each option with one value that is given several times, since the last one counts."""
    arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    typed = Counter(word.partition("=")[0] for word in arguments)
    for option in getattr(found, "params", ()):
        single = hasattr(option, "is_flag") and not (option.multiple or option.is_flag)
        if single and sum(typed[name] for name in option.opts) > 1:
            say(f"note: {option.opts[0]} is given several times: the last value is used")


def _import(name: str, target: str) -> TyperCommand | TyperGroup:
    """Import ``module:function`` or ``module:app`` and build its command.

    Raises:
        PluginError: it is neither a function nor a typer app.
    """
    module_name, _, defined = target.partition(":")
    module = importlib.import_module(module_name.strip())
    found = getattr(module, defined.strip())
    outer = typer.Typer(rich_markup_mode="rich", add_completion=False)
    outer.callback()(lambda: None)  # makes it a group even with a single command
    if isinstance(found, typer.Typer):
        outer.add_typer(found, name=name)
    elif callable(found):
        outer.command(name)(command(found))
    else:
        raise PluginError(
            f"command '{name}': {target} is neither a function nor a typer app",
            where=getattr(module, "__file__", None),
            fix=f"def {defined.strip()}() -> None, with typer's annotations",
        )
    made = typer.main.get_command(outer).commands[name]  # type: ignore[attr-defined]
    made.epilog = made.epilog or getattr(module, "EXAMPLES", None)
    return made


def command(function: Callable[..., object]) -> Callable[..., None]:
    """Turn a command's function into one that typer accepts.

    A parameter whose type is a dataclass is replaced by the options in its fields; ``--debug`` and
    ``--help`` are added; with ``--json`` all printed output except that of ``emit`` goes to stderr.
    """
    from minillm_core.cli.options import AsJson, LeaveOut  # no help page needs the options

    parameters: dict[str, inspect.Parameter] = {}
    bundles: dict[str, tuple[Any, list[str]]] = {}
    document = None  # name of the --json parameter
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        bundle, *rest = get_args(parameter.annotation) or (parameter.annotation,)
        if is_dataclass(bundle):
            without = " ".join(one.names for one in rest if isinstance(one, LeaveOut))
            options = _options(bundle, without.split())
            bundles[name] = bundle, list(options)
            parameters |= options
        else:
            parameters[name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        if parameter.annotation == AsJson:
            document = name
    added = {
        name: _option(name, annotation, False)
        for name, annotation in (("debug", Debug), ("show_help", Help))
        if name not in parameters
    }

    def run(**given: Any) -> None:
        for name in added:
            del given[name]
        for name, (bundle, names) in bundles.items():
            given[name] = bundle(**{one: given.pop(one) for one in names})
        with documents_alone() if document and given[document] else nullcontext():
            function(**given)

    text = inspect.getdoc(function) or ""  # typer would keep the line breaks within a paragraph
    run.__name__, run.__doc__ = function.__name__, re.sub(r"(?<!\n)\n(?=[\w-])", " ", text)
    every = [*parameters.values(), *added.values()]
    setattr(run, "__signature__", inspect.Signature(every))  # noqa: B010
    return run


def _options(bundle: Any, left_out: Collection[str]) -> dict[str, inspect.Parameter]:
    """Return the options of a bundle, except for those that a command leaves out."""
    kinds = get_type_hints(bundle, include_extras=True)
    for one in fields(bundle):
        if declared := one.metadata.get("option"):
            kinds[one.name] = Annotated[kinds[one.name], declared]
    return {
        name: _option(name, kind, getattr(bundle, name))
        for name, kind in kinds.items()
        if name not in left_out
    }


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _import_offered(name: str, whole: str, offers: list[CommandEntry]) -> TyperCommand | TyperGroup:
    """Import a command of another distribution; refuse broken or several offers."""
    ours = first_party.FIRST_PARTY_COMMANDS.get(whole, "")
    if refused := first_party.unusable("command", name, offers, ours):
        raise refused
    first_party.check_versions([offers[0].distribution])
    return _import(name, offers[0].value)


def _refuse_row() -> NoReturn:
    raise PluginError("this row of the help page is not a command", fix="minillm --help")


def _refuse_absent(whole: str) -> NoReturn:
    requirement = first_party.FIRST_PARTY_COMMANDS[whole]
    raise PluginError(
        f"no installed distribution has the command minillm {whole.replace('.', ' ')}",
        where=f"{requirement} has it; looked among those installed for {sys.executable}",
        fix=first_party.installing([requirement]),
    )


@contextmanager
def _own_code(entry: CommandEntry) -> Iterator[None]:
    """Attribute exceptions of a command to its distribution; errors that minillm explains pass through.

    Raises:
        PluginCodeError: its code raised; SystemExit too, since a command ends with typer.Exit.
    """
    with watch_signals() as interrupted:
        try:
            yield
        except (MinillmError, typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and interrupted():
                raise
            if isinstance(error.__context__, BrokenPipeError):  # rich turns it into a SystemExit
                raise
            fix = f"tell the authors of {entry.offered_by}"
            if isinstance(error, ModuleNotFoundError) and error.name:
                fix = f"install what provides the module '{plain(error.name)}', or {fix}"
            raise PluginCodeError(
                entry.name.replace(".", " "),
                entry.value,
                kind="command",
                offered_by=entry.offered_by,
                where=shown_frames(error, root_of(entry.module, entry.file or "")),
                fix=fix,
            ) from error
