"""Tests of `minillm plugins check`: refusals, failures, output, and JSON."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minillm_kit import Outcome, Report, plugins_check
from minillm_kit.plugins_check import render_report
from minillm_kit.runner import Result

Program = Callable[..., tuple[int, str, str]]

PLUGIN = '''
"""A plugin that does nothing to the model."""

from minillm_core import Plugin, option

print("at module level")


class Quiet(Plugin, api=1, backends=("torch", "numpy")):
    """Nothing."""

    size: int = option(1, ge=0, help="of nothing")
    word: str = option("a", help="for it")

    def compute_loss(self, loss):
        print("in a hook")
        loss.logits(z=1e-4)
'''


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write the plugin into the current folder, with a line replaced; return its spec."""
    monkeypatch.chdir(tmp_path)

    def write(old: str = "", new: str = "") -> str:
        assert PLUGIN.count(old) == 1 or not old
        Path("quiet.py").write_text(PLUGIN.replace(old, new) if old else PLUGIN)
        return "./quiet.py:Quiet"

    return write


def check(program: Program, *arguments: str) -> tuple[int, Any, str]:
    code, out, err = program("plugins", "check", *arguments, "--json")
    return code, json.loads(out), err


def test_all_that_is_asked_for_passes(program: Program) -> None:
    code, out, err = program("plugins", "check", "muon", "--only", "options", "--only", "loads,api")
    assert code == 0
    heading, *rows = [line.split() for line in out.splitlines() if line]
    assert heading == ["check", "s", "what", "holds"]
    assert sorted(row[1] for row in rows if row[0] == "ok") == ["api", "loads", "options"]
    assert " ".join(rows[-1]).startswith("muon on ")
    assert ": 3 passed, in " in out
    assert err == ""


def test_in_a_log_a_line_says_now_and_then_where_it_is(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins_check, "SECONDS", 0)
    err = program("plugins", "check", "muon", "--only", "options,loads,api")[2]
    assert [line.partition(", ")[0] for line in err.splitlines()] == [
        "muon: 1 of 3",
        "muon: 2 of 3",
        "muon: 3 of 3",
    ]


@pytest.mark.parametrize("columns", [None, "70", "100", "160"])
def test_in_a_file_the_table_is_as_wide_as_said(
    monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    long = Outcome("passed", "torch float32 8e-08, logits 1e-7, " * 9)
    report = Report("my_trick", (Result("forward", "losses are NumPy's", long, 1.5, "again"),))
    file = StringIO()
    render_report(report, Console(file=file))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= int(columns or 100)
    assert "".join(file.getvalue().split()).count("torchfloat32") >= 8


def test_a_failure_is_said_at_once(program: Program, quiet: Any) -> None:
    spec = quiet("loss.logits(z=1e-4)", "loss.logits(z=1e-4); loss.logits(z=1e-4)")
    err = program("plugins", "check", spec, "--only", "plans,deterministic")[2]
    first, last = (line for line in err.splitlines() if "failed" in line)
    assert first.startswith("plans failed: ")
    assert last == "plugin 'quiet' failed: plans"


def test_json_is_one_document_whatever_the_plugin_prints(program: Program, quiet: Any) -> None:
    code, report, err = check(program, quiet(), "--only", "loads,plans", "--backend", "torch")
    assert (code, report["passed"]) == (0, True)
    assert (report["plugin"], report["backends"]) == ("quiet", ["torch"])
    loads, plans = report["checks"]
    assert (loads["check"], plans["check"]) == ("loads", "plans")
    keys = {"check", "proves", "verdict", "found", "cause", "seconds", "rerun"}
    assert loads.keys() == plans.keys() == keys
    assert "in a hook" in err


def test_a_backend_that_it_does_not_have_is_said(program: Program, quiet: Any) -> None:
    code, out, _ = program("plugins", "check", quiet(), "--only", "parity")
    assert code == 0
    assert "n/a  parity" in out
    assert "not on mlx: the plugin does not support mlx" in out
    assert "quiet on torch: 1 not applicable" in out


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("nuon",), "no plugin 'nuon'", "did you mean 'muon'?"),
        (("./no.py:X",), "no file ./no.py", "give the path"),
        (("./quiet.py",), "does not say which class", "./quiet.py:ClassName"),
        (
            ("./quiet.py:Quite",),
            "defines no class Quite",
            "use ./quiet.py:Quiet; or, in the file: class Quite",
        ),
        (("muon", "--only", "slope"), "no check 'slope'", "did you mean 'slopes'?"),
        (("muon", "--only", "x"), "no check 'x'", "one of "),
        (("muon", "--backend", "tortch"), "no backend 'tortch'", "did you mean torch?"),
        (("muon", "--backend", "jax"), "no backend 'jax'", "one of both, torch, mlx"),
        (("muon", "--pairs", "-1"), "not '-1'", "--pairs all"),
        (("muon", "lr=1"), "'lr' is not an option of muon", "muon.lr=..."),
        (("muon", "train.lr=1"), "'train.lr' is not an option", "muon.lr=..."),
        (("muon", "muon.lrr=1"), "no option 'lrr'", "did you mean muon.lr?"),
        (("muon", "muon.lr"), "not of the form key=value", ""),
        (("./quiet.py:Quiet", "quiet.size=-1"), "option 'size' of plugin 'quiet' is -1", ""),
        (("./quiet.py:Quiet", "--backend", "mlx"), "does not support mlx", "it runs on torch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_checked_is_refused(
    program: Program, quiet: Any, arguments: tuple[str, ...], what: str, fix: str
) -> None:
    if "mlx" in arguments:
        pytest.importorskip("mlx.core")
    quiet()
    code, out, err = program("plugins", "check", *arguments)
    assert code == 2
    assert "s  what holds" not in out
    assert what in err
    assert "fix:" in err
    assert fix in err


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('print("at module level")', "1 / 0", "ZeroDivisionError: division by zero"),
        ('print("at module level")', "raise SystemExit(0)", "SystemExit: 0"),
        ('print("at module level")', "def", "SyntaxError: invalid syntax"),
        ("compute_loss", "compute_lose", "compute_lose"),
    ],
)
def test_a_broken_plugin_fails_loads(
    program: Program, quiet: Any, old: str, new: str, found: str
) -> None:
    code, out, err = program("plugins", "check", quiet(old, new))
    assert code == 3
    assert "FAILED  loads" in out
    assert found in out
    assert re.search("not run, needs 'loads': .*plans, .*pairs", out)
    assert err.splitlines()[-1] == "plugin 'quiet' failed: loads"
    assert "Traceback" not in err
    err = program("plugins", "check", quiet(old, new), "--debug")[2]
    assert "Traceback" in err
    assert found.partition(":")[0] in err


def test_what_an_observer_writes_is_not_left_here(program: Program, quiet: Any) -> None:
    hook = (
        'on_event(self, event):\n        open("losses.csv", "w").close()\n\n    def compute_loss('
    )
    spec = quiet("compute_loss(", hook)
    Path("losses.csv").write_text("kept")
    assert program("plugins", "check", spec, "--only", "events")[0] == 0
    assert Path("losses.csv").read_text() == "kept"


def test_what_stops_its_own_options_is_a_failure(program: Program, quiet: Any) -> None:
    spec = quiet('"""Nothing."""', '"""Nothing."""\n    def model_post_init(self, _): 1 / 0')
    code, report, _ = check(program, spec, "quiet.size=2")
    assert code == 3
    verdicts = {one["check"]: one["verdict"] for one in report["checks"]}
    assert verdicts["loads"] == "failed"
    assert verdicts["plans"] == verdicts["trains"] == "not run"


def test_a_failure_is_run_again_by_its_command(program: Program, quiet: Any) -> None:
    spec = quiet("compute_loss(self, loss)", "compute_loss(self, other)")
    options = ["quiet.size=2", 'quiet.word=it\'s a "b" $HOME']
    _, report, _ = check(program, spec, *options, "--backend", "torch", "--pairs", "all")
    (failed,) = [one for one in report["checks"] if one["verdict"] == "failed"]
    words = shlex.split(failed["rerun"])
    chosen = ["--backend", "torch", "--pairs", "all", "--only", failed["check"]]
    assert words == ["minillm", "plugins", "check", spec, *options, *chosen]
    again = check(program, *words[3:])[1]["checks"]
    assert [one | {"seconds": 0} for one in again] == [failed | {"seconds": 0}]


def results() -> tuple[Result, ...]:
    """Build one result of each verdict, with long texts."""
    rerun = "minillm plugins check ./a/folder/of/mine/my_trick.py:MyTrick 'my_trick.x=a b' --only b"
    told = {
        "passed": Outcome("passed", "torch float32 8e-08, mlx float32 2e-08 [0, 1]"),
        "failed": Outcome("failed", "torch: [bold] differs by 1.2e-02\n/a/b.py:3 in f", "a cause"),
        "not run": Outcome("not run", "needs 'failed'"),
        "not applicable": Outcome("not applicable", "torch alone: mlx is not installed"),
    }
    return tuple(
        Result(name.replace(" ", "-"), "both frameworks have the same gradients", one, 1.5, rerun)
        for name, one in told.items()
    )


@pytest.mark.parametrize("width", range(60, 201, 20))
def test_the_table_fits_and_commands_stay_whole(width: int) -> None:
    report = Report("my_trick", results(), ("torch",), {"mlx": "mlx is not installed"})
    file = StringIO()
    render_report(report, Console(file=file, width=width, force_terminal=True, no_color=True))
    text = re.sub(r"\x1b\[\d*m", "", file.getvalue())
    table, _, rest = text.partition("failed failed:")
    assert max(map(len, table.splitlines())) <= width
    assert f"  again: {results()[1].rerun}\n" in rest  # at any width
    assert "FAILED" in table
    assert "[bold] differs" in text  # text, not markup
    assert "/a/b.py:3 in f" in text
    assert "not run, needs 'failed': not-run" in text
    assert "not on mlx: mlx is not installed" in text
    assert "1 passed, 1 failed, 1 not run, 1 not applicable, in 6 s" in text


def test_on_a_terminal_one_line_moves(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = program("plugins", "check", "muon", "--only", "loads,api", "--json")
    assert code == 0
    assert json.loads(out)["passed"]
    assert re.search("muon: (loads|api)", err)
    assert "0/2" in err
    assert "1 of 2" not in err
    code, out, _ = program("plugins", "check", "muon", "--only", "loads")
    assert "\x1b[32mok\x1b[0m" in out


@pytest.mark.slow
def test_an_interrupt_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text(
        PLUGIN.replace(
            'print("in a hook")', "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
        )
    )
    command = [sys.executable, "-m", "minillm_core", "plugins", "check", "./quiet.py:Quiet"]
    ended = subprocess.run(
        [*command, "--only", "plans"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 130, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr


def test_help_shows_examples(program: Program) -> None:
    code, out, _ = program("plugins", "check", "--help")
    assert code == 0
    assert "minillm plugins check muon" in out
    assert all(flag in out for flag in ("--backend", "--pairs", "--only", "--json"))
