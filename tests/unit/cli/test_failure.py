"""Tests that errors become exit codes and at most twelve lines on stderr."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core import errors
from minillm_core.cli import main as program_module
from minillm_core.cli.console import LINES, explain
from minillm_core.errors import MinillmError

Program = Callable[..., tuple[int, str, str]]
FAMILY = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, MinillmError)
    if one is not errors.PluginCodeError  # built from a plugin and a hook
]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make every command raise."""

    def fail(error: BaseException) -> None:
        def app(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(program_module, "app", app)

    return fail


@pytest.mark.parametrize("kind", FAMILY)
def test_each_error_has_its_code_and_no_traceback(program: Program, failing, kind) -> None:
    failing(kind("what", where="where", fix="fix"))
    code, out, err = program("train")
    assert (code, out) == (kind.exit_code, "")
    assert err == "what\n  where: where\n  fix:   fix\n"


def test_a_plugin_s_own_error_is_3(program: Program, failing) -> None:
    failing(errors.PluginCodeError("muon", "build_model", where="muon.py:3 in f\nValueError: x"))
    code, _, err = program("train")
    assert code == 3
    assert "plugin 'muon' raised in build_model" in err


@pytest.mark.parametrize("place", [["--debug", "train"], ["train", "--debug"]])
def test_debug_shows_the_traceback(program: Program, failing, place: list[str]) -> None:
    failing(MinillmError("what"))
    _, _, err = program(*place)
    assert err.startswith("Traceback")
    assert err.endswith("what\n")


def test_debug_after_the_end_of_flags_is_an_argument(program: Program) -> None:
    code, _, err = program("train", "--", "--debug")
    assert code == 2
    assert "'--debug' is not of the form key=value" in err


def test_anything_else_is_a_defect(program: Program, failing) -> None:
    failing(ZeroDivisionError("division by zero"))
    code, _, err = program("train")
    assert code == 1
    assert err.startswith("a defect in minillm: ZeroDivisionError: division by zero\n")
    assert "--debug" in err
    assert "Traceback" not in err


def test_an_end_of_file_is_no_exception(program: Program, monkeypatch) -> None:
    def truncated(*_: object) -> None:
        raise EOFError("compressed file ended early")

    monkeypatch.setattr("minillm_core.cli.plugins_list.list_plugins", truncated)
    code, _, err = program("plugins", "list")
    assert code == 1
    assert "EOFError: compressed file ended early" in err


def test_an_interruption_is_130_and_one_line(program: Program, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("minillm_core.cli.plugins_list.list_plugins", interrupted)
    assert program("plugins", "list") == (130, "", "interrupted: nothing was saved\n")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train", "--stps", "3"], "minillm train: No such option: --stps"),
        (["train", "--lr", "0.1"], "settings have no dashes: train.lr=..."),
        (["train", "--minutes", "5"], "train.minutes=... or checkpoint.minutes=..."),
        (["train", "--batch-size", "8"], "settings have no dashes: train.rows=..."),
        (["train", "--train.rows", "8"], "settings have no dashes: train.rows=..."),
        (["train", "--foo.bar", "3"], "minillm train: No such option: --foo.bar"),
        (["generate", "out", "-x"], "No such option: -x\n  fix:   minillm generate --help\n"),
        (
            ["train", "--steps"],
            "minillm train: Option '--steps' requires an argument.\n  fix:   minillm",
        ),
        (
            ["plan", "-c"],
            "minillm plan: Option '-c' requires an argument.\n  fix:   minillm plan --help",
        ),
        (["train", "--steps", "x"], "Invalid value for '--steps'"),
        (["train", "--out", ""], "Invalid value for '--out': it is empty"),
        (["train", "--out", "--resume"], "for '--out': '--resume' begins with a dash"),
        (["export", "runs/a", "--to", "--json"], "for '--to': '--json' begins with a dash"),
        (["train", "--branch", ""], "Invalid value for '--branch': it is empty"),
        (["export", "runs/a", "--to", ""], "Invalid value for '--to': it is empty"),
        (["ablate", "--out", ""], "Invalid value for '--out': it is empty"),
        (["eval"], "minillm eval: Missing"),
        (["export", "OUT"], "minillm export: Missing option '--to'."),
        (
            ["export", "OUT"],
            "fix:   minillm export runs/tiny-1 --to my_model, for example; minillm",
        ),
        (["plan", "--diff", "a"], "minillm plan: Option '--diff' requires 2 arguments."),
        (
            ["plan", "--diff", "a"],
            "fix:   minillm plan --diff muon muon,paired_heads, for example;",
        ),
        (["plugins", "why", "x", "--preset"], "minillm plugins why: Option '--preset' requires"),
        (["plugins", "info"], "minillm plugins info: Missing argument 'NAME'."),
        (["plugins", "info"], "fix:   minillm plugins info muon, for example; minillm plugins"),
    ],
)
def test_usage_errors_are_2(program: Program, arguments: list[str], what: str) -> None:
    code, out, err = program(*arguments)
    assert (code, out) == (2, "")
    assert what in err
    assert "--help" in err
    assert err.count("\n") <= LINES


def test_a_settings_file_is_not_written_over(program: Program, tmp_path: Path) -> None:
    """A run writes its settings to run.toml."""
    file = tmp_path / "run.toml"
    file.write_text(typed := "seed = 3  # of mine\n")
    words = (
        "train",
        "-c",
        str(file),
        "--preset",
        "tiny",
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
    )
    code, _, err = program(*words)
    assert (code, file.read_text(), [*tmp_path.iterdir()]) == (2, typed, [file])
    assert "the run would overwrite" in err


def test_a_repeated_option_is_noted(program: Program) -> None:
    code, _, err = program("plan", "--preset", "tiny", "--preset=nope", "--diff", "none", "muon")
    assert code == 2
    assert "note: --preset is given several times: the last value is used" in err
    assert "--diff" not in err.partition("there is no preset")[0]


@given(st.text(), st.text(), st.none() | st.text())
def test_an_explanation_is_short_and_harmless(what: str, where: str, fix: str | None) -> None:
    for error in (MinillmError(what, where=where, fix=fix), RuntimeError(what)):
        text, _ = explain(error)
        assert text.count("\n") < LINES
        assert not any(ord(c) < 32 and c != "\n" for c in text.replace("\t", ""))


def test_colours_of_others_are_stripped() -> None:
    text, _ = explain(MinillmError("a\x1b[31mred\x1b]0;title\x07 file"))
    assert text == "ared file"


def test_a_long_explanation_is_cut() -> None:
    text, _ = explain(MinillmError("\n".join("abcdefghijklmnopqrstuvwxyz")))
    assert text.count("\n") == LINES - 1
    assert text.endswith("(--debug shows everything)")


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--help"]], ids=["core", "offered"])
def test_a_reader_that_goes_away_is_no_traceback(words: list[str]) -> None:
    script = f"import sys; from minillm_core.cli.main import main; sys.exit(main({words}))"
    program = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == b""
    assert program.wait() in (0, 1)
    program.stderr.close()


def test_a_page_of_a_framework_is_cut_to_its_first_line() -> None:
    text, code = explain(NotImplementedError("no such operator\n" + "registered at ...\n" * 30))
    assert code == 1
    assert text.startswith("a defect in minillm: NotImplementedError: no such operator ...\n")
    assert "fix:" in text
    assert "registered" not in text


PRINT = "import sys; from minillm_core.cli import main as m, console\n"


@pytest.mark.parametrize("end", ["reader", "disk", "terminal"])
def test_messages_that_cannot_be_written_end_nothing(end: str) -> None:
    """The reader of stderr is gone, its disk is full, or its terminal was closed (no SIGHUP came)."""
    if end == "disk" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    if end == "terminal":
        read, write = pytest.importorskip("pty").openpty()
    elif end == "reader":
        read, write = os.pipe()
    else:
        read, write = os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    script = (
        f"{PRINT}"
        "from minillm_core.train.progress import display\n"
        "def app(*_, **__):\n"
        "    sys.stdin.read()\n"
        "    console.say('one'); console.say('two')\n"
        "    with display(console.say) as shown:\n"
        "        shown.say('three')\n"
        "    print('the run went on')\n"
        "m.app = app\n"
        "sys.exit(m.main())"
    )
    pipe, environment = subprocess.PIPE, os.environ | {"TERM": "xterm"}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=write, env=environment, start_new_session=True
    ) as process:
        os.close(write)
        os.close(read)
        assert process.communicate()[0] == b"the run went on\n"
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("output", ["console.emit({'a': 1})", "print('x' * 100_000)", "print('x')"])
def test_a_full_disk_behind_stdout_is_no_defect(output: str) -> None:
    script = f"{PRINT}m.app = lambda *_, **__: {output}\nsys.exit(m.main())"
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("stdout could not be written: No space left on device\n")
    assert "defect" not in done.stderr


def test_standard_streams_that_are_closed_are_no_files_of_a_run() -> None:
    script = (
        f"{PRINT}"
        "def app(*_, **__):\n"
        "    assert sys.stdin.read() == ''\n"
        "    console.write('x'); console.say('x')\n"
        "    assert open(sys.executable).fileno() > 2\n"
        "m.app = app\n"
        "sys.exit(m.main(['eval']))"
    )
    closed = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(script)} <&- >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", closed], check=False).returncode == 0


@pytest.mark.parametrize("status", [0, 1, None])
def test_no_exit_from_within_is_a_success(program: Program, failing, status: int | None) -> None:
    failing(SystemExit(status))
    code, out, err = program("train")
    assert (code, out) == (1, "")
    assert "a defect in minillm: SystemExit" in err


THREAD = """
import sys, threading, time
from types import ModuleType
from minillm_core.cli import main as program

plugin = ModuleType("minillm_file_mine")
exec(compile("import time\\ndef stay(): time.sleep(60)", "mine.py", "exec"), vars(plugin))
program.NAMED_AFTER, program.LEFT_AFTER = 0.2, 0.2
program.app = lambda *_, **__: threading.Thread(target=plugin.stay, name="mine").start() or {code}
sys.argv = ["minillm", "train"]
sys.exit(program.main())
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_thread_that_stays_is_named_and_left(code: int) -> None:
    program = THREAD.replace("{code}", str(code))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == code
    first, last = done.stderr.splitlines()
    thread = "thread 'mine' (plugin 'mine', mine.py:2)"
    assert first.startswith(f"waiting for {thread}, which would keep the program alive")
    assert first.endswith(f"it ends in 0.2 s, with exit code {code}")
    assert last == f"ended without {thread}"


INTERRUPTED = """
import os, runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv = ["minillm", "plugins", "list"]
runpy.run_module("minillm_core", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("typer", (-signal.SIGINT, "")),  # before the program can say anything
        ("minillm_core.cli.plugins_list", (130, "interrupted: nothing was saved\n")),
    ],
)
def test_an_interrupted_import_shows_no_traceback(module: str, said: tuple[int, str]) -> None:
    script = INTERRUPTED.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == said


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    program = f"import os, shutil; os.chdir({str(folder)!r}); shutil.rmtree({str(folder)!r}); "
    program += "from minillm_core.cli.main import main; raise SystemExit(main(['plan']))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("the current folder no longer exists")
    assert "fix:" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("torn", ["entry_points.txt", "METADATA"])
def test_a_distribution_that_cannot_be_read_ends_no_command(tmp_path: Path, torn: str) -> None:
    """Plugins of pydantic or torch are only imported if named."""
    (tmp_path / "loud.py").write_text("raise SystemExit('imported')\n")
    for name in ("torn", "loud"):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        groups = ("pydantic", "torch.backends", "minillm.plugins")
        points = "".join(
            f"[{group}]\nloud = loud:Loud\n" for group in groups[: 2 + (name == "torn")]
        )
        (folder / "entry_points.txt").write_text(points)
    (tmp_path / "torn-1.0.dist-info" / torn).write_bytes(b"[minillm.plugins]\nx\n\xff")
    commands = (["plugins", "list"], ["plan", "--preset", "tiny", "--json"])
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "minillm_core", *command],
            **{"capture_output": True, "text": True, "check": False},
            env={
                **os.environ,
                "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            },
        )
        assert done.returncode == 0, done.stderr
        if command[0] == "plugins":
            assert f"its {torn} cannot be read" in done.stdout
