"""Tests that commands and flags are the specified ones, and that start-up is fast."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from minillm_core.cli.commands import CommandGroup, LazyCommand
from minillm_core.cli.main import COMMANDS
from minillm_core.cli.main import program as root
from minillm_core.plugins.first_party import FIRST_PARTY_COMMANDS

Program = Callable[..., tuple[int, str, str]]

SETTINGS = {"--plugins", "--preset", "--data", "--backend", "--device", "--out", "--resume"} | {
    *("--task", "--steps", "--seed", "--deterministic", "--kernels", "-c", "KEY=VALUE")
}
AGREED = {
    ("train",): SETTINGS | {"--branch"},
    ("plan",): SETTINGS | {"--json", "--diff", "--branch"},
    ("eval",): {"OUT", "--data", "--seq-len", "--max-tokens", "--json", "--step", "--best"},
    ("generate",): {"OUT", "PROMPT", "--max-tokens", "--temperature", "--top-k", "--top-p"}
    | {"--seed", "--no-cache", "--step", "--best"},
    ("chat",): {"OUT", "--system", "--max-tokens", "--temperature", "--top-k", "--top-p"}
    | {"--seed", "--step", "--best", "--json", "--backend", "--device", "--plugins"},
    ("export",): {"OUT", "--to", "--step", "--best"},
    ("report",): {"OUT"},
    ("doctor",): {"--json"},
    ("ablate",): {"--plugins", "--seeds", "--steps", "--minutes", "--data", "--out"}
    | {"--leave-one-out", "--one-at-a-time"},
    ("bench",): {"--plugins", "--preset", "--trace", "--json", "KEY=VALUE"},
    ("search",): {"--minutes", "--tokens", "--target", "--budget", "--plugins", "--space", "--gpus"}
    | {"--out", "--resume", "--json", "KEY=VALUE"},
    ("tune",): {"--plugins", "--preset", "--to", "--memory", "--json", "KEY=VALUE"},
    ("plugins", "list"): {"--json"},
    ("plugins", "info"): {"NAME", "--json"},
    ("plugins", "new"): {"NAME", "--kind", "--dir"},
    ("plugins", "check"): {"NAME", "--backend", "--json"},
    ("plugins", "why"): SETTINGS | {"SLOT", "--json"},
    ("data", "tokenize"): {"PATH", "--to", "--tokenizer", "--format", "--json"},
    ("data", "train-tokenizer"): {"PATH", "--to", "--vocab"},
    ("data", "inspect"): {"PATH", "--json"},
    ("data", "dedup"): {"PATH", "--to", "--json"},
    ("data", "filter"): {"PATH", "--to", "--json"},
    ("data", "mix"): {"PATH[:WEIGHT]", "--to"},
    ("data", "cache", "list"): {"--json"},
    ("data", "cache", "clear"): set(),
    ("kernels", "list"): {"--json"},
    ("kernels", "check"): {"--json"},
    ("kernels", "bench"): {"--json"},
}
MORE = {
    ("train",): {
        "--depth",
        "--gpus",
        "--memory",
        "--config",
        "--init",
        "--prompt",
        "-v",
        "--verbose",
    },
    ("plan",): {"--depth", "--memory", "--config", "--init", "--gpus", "--card"},
    ("eval",): {"--backend", "--device", "--plugins", "--chats", "--pattern", "--limit"}
    | {"--tasks", "--task-path", "--shots"},
    ("generate",): {"--backend", "--device", "--plugins", "--json"},
    ("export",): {"--plugins", "--json", "--dtype", "--layout"},
    ("report",): {"--plugins", "--no-sample"},
    ("ablate",): {"--depth", "--with", "--preset", "--seed", "--config", "--backend", "--device"}
    | {"--kernels", "--json", "-c", "KEY=VALUE", "--gpus", "--processes"}
    | {"--equal-seconds", "--no-equal-seconds"},
    ("search",): {
        "--depth",
        "--processes",
        "--preset",
        "--data",
        "--seed",
        "-c",
        "--config",
        "--backend",
        "--device",
    }
    | {"--kernels"},
    ("tune",): {
        "--depth",
        "--steps",
        "--repeats",
        "--data",
        "--seed",
        "-c",
        "--config",
        "--backend",
    }
    | {"--device", "--kernels"},
    ("bench",): {
        "--depth",
        "--against",
        "--steps",
        "--repeats",
        "--layers",
        "--data",
        "--seed",
        "-c",
    }
    | {"--config", "--backend", "--device", "--kernels"},
    ("plugins", "list"): {"-v", "--verbose"},
    ("plugins", "info"): {"--preset"},
    ("plugins", "check"): {"NAME.OPTION=VALUE", "--pairs", "--only"},
    ("plugins", "why"): {"--depth", "--config", "--init", "--all"},
    ("data", "tokenize"): {"--vocab", "--seq-len", "--malformed"},
    ("data", "train-tokenizer"): {"--json", "--malformed"},
    ("data", "inspect"): {"--tokenizer", "--samples", "--page", "--malformed"},
    ("data", "dedup"): {"--near", "--no-near", "--threshold", "--shingle", "--spans"}
    | {"--min-words", "--malformed"},
    ("data", "filter"): {"--rules", "--language", "--language-probability", "--model"}
    | {"--min-bits", "--max-bits", "--malformed"},
    ("data", "mix"): {
        *("--temperature", "--like", "--size", "--repeat", "--tokenizer", "--seed"),
        *("--doremi", "--preset"),
    }
    | {"--json", "--malformed"},
    ("data", "cache", "clear"): {"KEY", "--json"},
    ("kernels", "list"): {
        "OP|KEY=VALUE",
        "--plugins",
        "--preset",
        "--backend",
        "--device",
        "--dtype",
    }
    | {"--kernels"},
    ("kernels", "check"): {
        "OP",
        "--kernel",
        "--plugins",
        "--backend",
        "--device",
        "--dtype",
        "--seed",
    }
    | {"--case", "--large"},
    ("kernels", "bench"): {"OP", "--kernel", "--plugins", "--backend", "--device", "--dtype"}
    | {"--shape", "--repeats"},
}
"""Flags beyond the specified ones."""
GROUPS = [("plugins",), ("data",), ("data", "cache"), ("kernels",)]
EVERYWHERE = {"--debug", "--help"}


def ours(path: tuple[str, ...], inner: Mapping[str, Any]) -> bool:
    """Return whether a command belongs to the core, or to an installed first-party distribution."""
    group: Any = COMMANDS
    for name in path[:-1]:
        group = group.commands[name]
    return path[-1] in group.commands or (
        ".".join(path) in FIRST_PARTY_COMMANDS and not inner[path[-1]].hidden
    )


def commands() -> dict[tuple[str, ...], set[str]]:
    """Return command -> its options and arguments, in command-line form."""
    found: dict[tuple[str, ...], set[str]] = {}
    todo: list[tuple[tuple[str, ...], Any]] = [((), root())]
    while todo:
        path, command = todo.pop()
        if isinstance(command, LazyCommand):
            command = command.load()
        inner = getattr(command, "commands", None)
        if inner is not None:
            names = [*inner]
            if isinstance(command, CommandGroup):  # including commands of our other distributions
                names = [name for name in command.list_commands(None) if ours((*path, name), inner)]
            todo += [((*path, name), inner[name]) for name in names]
        else:
            found[path] = {
                name
                for param in command.params
                for name in (
                    (*param.opts, *param.secondary_opts)
                    if param.param_type_name == "option"
                    else [param.metavar]
                )
            }
    return found


def test_the_commands_are_those_that_exist() -> None:
    assert set(commands()) == set(AGREED)


@pytest.mark.parametrize("command", sorted(AGREED))
def test_the_flags_are_those_that_were_agreed(command: tuple[str, ...]) -> None:
    assert commands()[command] == AGREED[command] | MORE.get(command, set()) | EVERYWHERE


@pytest.mark.parametrize("command", [(), *GROUPS, *sorted(AGREED)])
def test_help_is_shown_with_examples(program: Program, command: tuple[str, ...]) -> None:
    code, out, err = program(*command, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: {' '.join(('minillm', *command))}" in out
    assert "Examples:" in out or command in GROUPS
    for flag in AGREED.get(command, ()):
        assert flag in out


@pytest.mark.parametrize("group", [(), *GROUPS])
def test_a_group_alone_shows_its_help(program: Program, group: tuple[str, ...]) -> None:
    assert program(*group) == program(*group, "--help")


@pytest.mark.parametrize("command", [(), *GROUPS, *sorted(AGREED)])
def test_help_names_no_type_of_python_s(program: Program, command: tuple[str, ...]) -> None:
    assert "<bool>" not in program(*command, "--help")[1]


HELP = [[*command, "--help"] for command in ((), *GROUPS, *sorted(AGREED))]


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    "lines",
    [[["--version"]], [["plugins", "list"]], [["plugins", "list", "--json"]], HELP],
    ids=["version", "list", "json", "every help page"],
)
def test_starting_up_is_light(lines: list[list[str]]) -> None:
    heavy = {"torch", "mlx", "numpy", "pydantic", "tokenizers", "minillm_muon", "minillm_modded"}
    script = (
        "import sys; from minillm_core.cli.main import main\n"
        f"code = max(main(arguments) for arguments in {lines!r})\n"
        f"print(code, sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stderr.strip() == "0 []"


def test_the_paragraphs_of_help_are_filled(program: Program) -> None:
    """The line breaks of a docstring do not break the lines of the page."""
    lines = [line.strip() for line in program("tune", "--help")[1].splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("The tokens of"))
    paragraph = lines[first : lines.index("", first)]
    assert all(len(line) > 60 for line in paragraph[:-1])


def test_the_module_is_the_program() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "minillm_core", "train", "--foo"], capture_output=True, text=True
    )
    assert found.returncode == 2
    assert found.stdout == ""
    assert "No such option: --foo" in found.stderr


def test_the_version_is_the_distribution_s(program: Program) -> None:
    from importlib.metadata import version

    assert program("--version") == (0, f"minillm {version('minillm-core')}\n", "")


def test_plugins_are_listed_as_one_document(program: Program) -> None:
    code, out, err = program("plugins", "list", "--json")
    assert (code, err) == (0, "")
    assert all({"name", "distribution", "state"} <= set(entry) for entry in json.loads(out))
