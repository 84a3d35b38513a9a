"""Tests that with ``--json`` stdout is one document, whatever a plugin prints."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from minillm_core.cli.console import documents_alone, emit

Program = Callable[..., tuple[int, str, str]]

LOUD = '''
from minillm_core import Plugin

print("at import")


class Loud(Plugin, api=1):
    """Prints."""

    def model_post_init(self, context):
        print("with its options")

    def compute_loss(self, loss):
        print("in a hook", end="")
        loss.logits(z=1e-4)
'''


@pytest.fixture
def loud(tmp_path: Path) -> str:
    (tmp_path / "loud.py").write_text(LOUD)
    return f"{tmp_path / 'loud.py'}:Loud"


@pytest.mark.parametrize(
    "command", [("plan", "--plugins"), ("plugins", "info"), ("plugins", "check", "--only", "plans")]
)
def test_a_document_stands_alone(program: Program, loud: str, command: tuple[str, ...]) -> None:
    code, out, err = program(*command, loud, "--json")
    assert code == 0
    assert json.loads(out)
    assert "at import" in err
    assert "in a hook" in err


def test_a_table_begins_without_what_a_module_prints(program: Program, loud: str) -> None:
    _, out, err = program("plan", "--plugins", loud)
    assert "at import" not in out
    assert "at import\nwith its options" in err


def test_threads_print_to_stderr_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    with documents_alone():
        thread = threading.Thread(target=print, args=("a loader's",))
        thread.start()
        thread.join()
        emit({"loss": float("nan")})
        print("after it", file=sys.stdout)
    print("as before")
    out, err = capsys.readouterr()
    document, _, rest = out.partition("}\n")
    assert json.loads(document + "}") == {"loss": None}
    assert rest == "as before\n"
    assert err == "a loader's\nafter it\n"


def test_help_is_no_document(program: Program) -> None:
    assert "--json" in program("plan", "--json", "--help")[1]
