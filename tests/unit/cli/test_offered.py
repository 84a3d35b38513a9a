"""Tests of other distributions' commands: listed without import, imported when run, errors under their name."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from minillm_core.cli.commands import OTHERS, Group
from minillm_core.cli.main import COMMANDS
from minillm_core.plugins import discover
from minillm_core.plugins.discover import installed_commands, unreadable
from minillm_core.plugins.first_party import FIRST_PARTY_COMMANDS

Program = Callable[..., tuple[int, str, str]]

COUNT = '''
from typing import Annotated

import typer

EXAMPLES = """Examples:

minillm count a.txt"""


def count(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What is counted.")],
    times: Annotated[int, typer.Option(metavar="N", help="How often.")] = 1,
) -> None:
    """Count the letters of a text.

    More about it.
    """
    {body}
'''
APP = '''
import typer

app = typer.Typer({help})


@app.callback()
def root() -> None:
    """Count things."""


@app.command("words")
def words(text: str) -> None:
    """Count words."""
    print(len(text.split()))
'''
LOUD = "raise SystemExit('imported')\n"


@pytest.fixture
def offer(site: Any) -> Callable[..., None]:
    """Install ``dist-<name>`` with commands: ``name = point``, in the module ``pkg_<name>.tool``."""

    def install(
        name: str, body: str = "print(len(text) * times)", *, source: str = COUNT, **points: str
    ) -> None:
        named = {point.replace("__", "."): value for point, value in points.items()}
        site.install(
            f"dist-{name}",
            named or {name: f"pkg_{name}.tool:count"},
            {
                f"pkg_{name}/__init__.py": "",
                f"pkg_{name}/tool.py": source.replace("{body}", body).replace("{help}", ""),
            },
            group="minillm.commands",
        )

    return install


def shown(page: str) -> str:
    """Return a help page as one line without its frames."""
    return " ".join(page.translate(str.maketrans("│╭╮╰╯─", "      ")).split())


def test_a_command_is_listed_and_run(program: Program, offer) -> None:
    offer("count")
    page = shown(program("--help")[1])
    assert f"{OTHERS} count Count the letters of a text. (dist-count 1.0)" in page
    assert "pkg_count.tool" not in sys.modules
    assert program("count", "abc", "--times", "2") == (0, "6\n", "")
    page = shown(program("count", "--help")[1])
    assert "Usage: minillm count [OPTIONS] {TEXT}" in page
    assert "minillm count a.txt" in page
    assert "--debug Show the traceback of an error." in page
    code, _, err = program("count", "abc", "--tims", "2")
    assert (code, err.partition("\n")[0][:36]) == (2, "minillm count: No such option: --tim")


def test_a_typer_app_is_a_group(program: Program, offer) -> None:
    offer("count", source=APP, count="pkg_count.tool:app")
    assert "count Count things. (dist-count 1.0)" in shown(program("--help")[1])
    assert program("count", "words", "a b") == (0, "2\n", "")
    assert "words Count words." in shown(program("count", "--help")[1])
    assert "completion" not in program("count", "--help")[1]


@pytest.mark.parametrize("value", ["help='Count.'", "'count', help='Count.'"])
def test_the_help_of_an_app_comes_before_its_callback_s(offer, value: str) -> None:
    offer("count", source=APP.replace("{help}", value), count="pkg_count.tool:app")
    found = {one.name: one.summary for one in installed_commands(bool)}
    assert found["count"] == "Count."


def test_a_command_of_a_group_of_the_core(program: Program, offer) -> None:
    offer("count", plugins__count="pkg_count.tool:count")
    assert "count Count the letters of a text." in shown(program("plugins", "--help")[1])
    assert "Count the letters" not in program("--help")[1]
    assert program("plugins", "count", "abc") == (0, "3\n", "")


@pytest.mark.parametrize(
    ("point", "page"),
    [
        ({"train": "pkg_count.tool:count"}, []),
        ({"plugins__list": "pkg_count.tool:count"}, ["plugins"]),
        ({"train__more": "pkg_count.tool:count"}, []),
        ({"count__more": "pkg_count.tool:count"}, []),
    ],
)
def test_a_name_that_cannot_be_taken_is_shown_and_changes_nothing(
    program: Program, offer, point: dict[str, str], page: list[str]
) -> None:
    (name,) = point
    before = program(*page, "--help")[1], program("train", "--help")
    offer("count", source=LOUD + COUNT, **point)
    after = shown(program(*page, "--help")[1])
    assert shown(before[0]).partition(" Examples:")[0] in after
    reason = (
        f"'{name.partition('__')[0]}' is not a group that takes commands"
        if name.endswith("more")
        else f"'{name.rpartition('__')[2]}' is a command of minillm itself"
    )
    assert f"not used: {reason} (dist-count 1.0)" in after
    assert program("train", "--help") == before[1]
    assert program("plugins", "list", "--json")[0] == 0
    assert program("count", "more")[0] == 2


def test_two_that_offer_one_name_are_refused_with_both(program: Program, offer) -> None:
    offer("one", source=LOUD + COUNT, count="pkg_one.tool:count")
    offer("two", source=LOUD + COUNT, count="pkg_two.tool:count")
    page = shown(program("--help")[1])
    assert "count refused: offered by dist-one 1.0 and dist-two 1.0" in page
    code, out, err = program("count", "abc")
    assert (code, out) == (2, "")
    assert err.startswith("command 'count' is offered by dist-one 1.0 and dist-two 1.0\n")
    assert "uninstall the distribution that you do not need: dist-one or dist-two" in err


def test_two_that_judge_by_one_name_are_refused(program: Program, site) -> None:
    for name in ("one", "two"):
        site.install(f"judge-{name}", {"chats": f"pkg_{name}:judge"}, group="minillm.judges")
    code, out, err = program("eval", "runs/a", "--chats", "chats.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("several distributions provide chats of minillm.judges\n")


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        ("pkg_count.absent:count", "module not found: pkg_count.absent"),
        ("pkg_count.tool:absent", "its module defines no function or typer app absent"),
        ("pkg_count.tool", "is not of the form module:function"),
    ],
)
def test_a_broken_one_says_why(program: Program, offer, point: str, reason: str) -> None:
    offer("count", source=LOUD + COUNT, count=point)
    assert f"count broken: {reason}" in shown(program("--help")[1]).replace(f"'{point}' ", "")
    code, _, err = program("count")
    assert code == 2
    assert reason in err
    assert "command 'count' of dist-count 1.0 cannot be used" in err
    assert "pip install --upgrade dist-count" in err


@pytest.mark.parametrize("name", ["Count", "-count", "count.", "c\N{CYRILLIC SMALL LETTER A}t"])
def test_a_bad_name_is_broken(site, name: str) -> None:
    files = {"pkg_count/__init__.py": "", "pkg_count/tool.py": COUNT}
    site.install("dist-count", {name: "pkg_count.tool:count"}, files, group="minillm.commands")
    (entry,) = [one for one in installed_commands(bool) if one.distribution == "dist-count"]
    assert "is not a command's" in str(entry.broken)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("import absent_module\n" + COUNT, "No module named 'absent_module'"),
        (LOUD + COUNT, "SystemExit: imported"),
        ("def count(:\n", "SyntaxError"),
        (COUNT.replace("str,", "NoSuchType,"), "NoSuchType"),
    ],
)
def test_an_import_that_fails_is_the_distribution_s(
    program: Program, offer, source: str, where: str
) -> None:
    offer("count", source=source)
    code, out, err = program("count", "abc")
    assert (code, out) == (3, "")
    assert err.startswith("command 'count' (dist-count 1.0) raised in pkg_count.tool:count\n")
    assert where in err
    assert "tell the authors of dist-count 1.0" in err
    assert "defect" not in err


@pytest.mark.parametrize(
    ("body", "raised"),
    [
        ("raise ValueError('too long')", "ValueError: too long"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise EOFError('early')", "EOFError: early"),
    ],
)
def test_what_a_command_raises_is_its_distribution_s(
    program: Program, offer, body: str, raised: str
) -> None:
    offer("count", body)
    code, _, err = program("count", "abc")
    assert code == 3
    assert err.startswith("command 'count' (dist-count 1.0) raised in pkg_count.tool:count\n")
    assert f"tool.py:19 in count\n         {raised}" in err
    assert program("--debug", "count", "abc")[2].startswith("Traceback")


def test_what_a_group_s_command_raises_is_its_distribution_s(program: Program, offer) -> None:
    source = APP.replace("print(", "raise ValueError(")
    offer("count", source=source, count="pkg_count.tool:app")
    code, _, err = program("count", "words", "a b")
    assert (code, "ValueError: 2" in err) == (3, True)
    assert err.startswith("command 'count' (dist-count 1.0) raised in pkg_count.tool:app\n")


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("raise typer.Exit(7)", 7, ""),
        ("raise typer.BadParameter('no text')", 2, "minillm count: Invalid value: no text\n"),
        (
            "from minillm_core import Refusal; raise Refusal('no text', fix='write one')",
            2,
            "no text\n  fix:   write one\n",
        ),
    ],
)
def test_how_a_command_ends_by_itself(
    program: Program, offer, body: str, code: int, said: str
) -> None:
    offer("count", body)
    found, _, err = program("count", "abc")
    assert found == code
    assert err.startswith(said)


def test_a_key_that_interrupts_a_command_is_not_its_error(program: Program, offer) -> None:
    offer(
        "count",
        f"import os; os.kill(os.getpid(), {int(signal.SIGINT)}); import time; time.sleep(9)",
    )
    assert program("count", "abc") == (130, "", "interrupted: nothing was saved\n")


def test_a_distribution_that_is_absent_takes_its_commands_with_it(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = program("--help")[1]
    assert {"ablate", "bench", "doctor", "report"} <= set(shown(page).split())
    installed = discover.entry_points

    def without_lab(**which: str) -> list[EntryPoint]:
        return [one for one in installed(**which) if not one.value.startswith("minillm_lab")]

    monkeypatch.setattr(discover, "entry_points", without_lab)
    code, out, err = program("ablate", "--seeds", "3")
    assert (code, out) == (2, "")
    assert "no installed distribution has the command minillm" in err
    needed = FIRST_PARTY_COMMANDS["ablate"]
    assert re.search(f"^  fix:   pip install (--upgrade )?{needed}", err, re.MULTILINE)
    assert "Did you mean 'ablate'?" in program("ablat")[2]
    assert {"ablate", "bench", "doctor", "report"}.isdisjoint(shown(program("--help")[1]).split())
    assert needed not in program("--help")[1]


def test_metadata_that_cannot_be_read_breaks_no_command(program: Program, offer, site) -> None:
    offer("count")
    site.install("torn-one", {}, version="2.1")
    torn = site.folder / "torn_one-2.1.dist-info"
    (torn / "entry_points.txt").write_bytes(b"[minillm.commands]\nnonsense\n")
    assert [one.distribution for one in unreadable()] == ["torn-one"]
    assert program("count", "abc") == (0, "3\n", "")
    assert "Count the letters" in program("--help")[1]
    code, _, err = program("cuont")
    assert code == 2
    assert "No such command 'cuont'. Did you mean 'count'?" in err
    assert "torn_one-2.1.dist-info" in err


def test_terminal_sequences_and_markup_are_shown_as_they_are(program: Program, offer) -> None:
    offer("count", source=COUNT.replace("Count the", "Count [red]\\x1b[31mthe"))
    page = program("--help")[1]
    assert "Count [red]the letters" in shown(page)
    assert "\x1b[31mthe" not in page


def test_help_imports_no_command(offer, site) -> None:
    offer("one", source=LOUD + COUNT)
    offer("two", source=LOUD + COUNT, plugins__two="pkg_two.tool:count")
    script = (
        "import sys; from minillm_core.cli.main import main\n"
        "main(['--help']); main(['plugins', '--help'])\n"
        "own = ('main', 'commands', 'options', 'console')\n"
        "print(sorted(name for name in sys.modules if name[:4] == 'pkg_' or "
        "name.rpartition('.')[0] == 'minillm_core.cli' and name.rpartition('.')[2] not in own), "
        "file=sys.stderr)"
    )
    path = os.pathsep.join([str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.stdout.count("Count the letters") == 2
    assert done.stderr.strip() == "[]"


def test_every_core_command_has_a_summary_that_can_be_read() -> None:
    from minillm_core.cli.commands import _summary

    todo: list[Group | str] = [COMMANDS]
    while todo:
        one = todo.pop()
        if isinstance(one, Group):
            todo += one.commands.values()
        else:
            assert _summary(one)
