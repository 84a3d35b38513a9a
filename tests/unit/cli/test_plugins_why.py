"""Tests of ``minillm plugins why``: one document on stdout, messages on stderr, exit code 2 for a conflict."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from minillm_core.cli.slot_answers import show_table
from minillm_core.plan.render import columns

Program = Callable[..., tuple[int, str, str]]

LAYOUT = '''
from minillm_core import Plugin
from minillm_core.nn.attention import Layout

class Same(Layout):
    def enter(self, call):
        return call

class Trick(Plugin, api=1):
    """A layout."""

    def build_attention(self, attn):
        attn.layout(Same)
'''


@pytest.fixture
def clash(tmp_path: Path) -> str:
    """Return ``--plugins`` with two plugins that claim one slot."""
    (tmp_path / "trick.py").write_text(LAYOUT)
    return f"paired_heads,{tmp_path / 'trick.py'}:Trick"


def test_the_document_says_who_and_why(program: Program) -> None:
    code, out, err = program("plugins", "why", "attn", "--plugins", "paired_heads", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    answers = {one["slot"]: one for one in document["answers"]}
    layout = answers["layers.*.attention.layout"]
    assert layout["kind"] == "claim"
    assert [one["owner"] for one in layout["held"]] == ["paired_heads"]
    assert layout["layers"] == [0, 1, 2, 3]
    shift = answers["layers.*.attention.qk.shift"]
    assert [(one["how"], one["who"]) for one in shift["refused"]] == [("closed", ["paired_heads"])]
    assert document["plugins"]["paired_heads"]["distribution"] == "minillm-modded"
    assert document["plan_refused"] is None


def test_the_table_is_a_line_an_owner(program: Program) -> None:
    code, out, _ = program("plugins", "why", "opt.rule[muon].scale", "--plugins", "muon")
    assert code == 0
    heading, line = (line.split() for line in out.splitlines())
    assert heading == ["slot", "where", "owner", "what", "why"]
    assert line[:2] == ["opt.rule[muon].scale", "muon"]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_clash_is_answered_and_then_refused(program: Program, clash: str, flags: tuple) -> None:
    code, out, err = program("plugins", "why", "attn.layout", "--plugins", clash, *flags)
    assert code == 2
    assert "Interleave" in out
    assert "Same" in out
    assert "slot layers.0.attention.layout is claimed by both 'paired_heads' and 'trick'" in err
    assert "where: attn.layout, layers 0-3" in err
    assert "fix:" in err
    if flags:
        (answer,) = json.loads(out)["answers"]
        assert answer["refused"][0]["who"] == ["paired_heads", "trick"]


def test_a_clash_elsewhere_is_a_note(program: Program, clash: str) -> None:
    code, out, err = program("plugins", "why", "attn.window", "--plugins", clash)
    assert code == 0
    assert "every key" in out
    assert err.startswith("note: the plan is refused elsewhere: slot layers.0.attention.layout")
    assert len(err.splitlines()) == 1


def test_what_a_refused_plan_does_not_reach_is_refused(program: Program, clash: str) -> None:
    code, out, err = program("plugins", "why", "kernel", "--plugins", clash)
    assert (code, out) == (2, "")
    assert "claimed by both" in err


def test_settings_and_flags_are_those_of_a_plan(program: Program, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[plugins.paired_heads]\nlayers = [1]\n")
    asked = ("plugins", "why", "model.mlp", "-c", str(tmp_path / "run.toml"), "--json")
    _, out, _ = program(*asked, "model.layers=2", "model.hidden=96", "--preset", "tiny")
    document = json.loads(out)
    (answer,) = document["answers"]
    assert answer["layers"] == [0, 1]
    assert answer["held"][0]["what"] == "SwiGLU 96"
    assert set(document["plugins"]) == {"paired_heads"}


def test_an_op_names_its_kernel_and_the_others(program: Program) -> None:
    asked = ("plugins", "why", "rms_norm", "--backend", "torch", "--device", "cpu", "--json")
    code, out, _ = program(*asked, "--kernels", "rms_norm=composed")
    (answer,) = json.loads(out)["answers"]
    assert code == 0
    assert answer["held"] == [
        {"owner": "core", "what": "composed", "why": "named by --kernels"},
    ]
    assert {one["how"] for one in answer["refused"]} <= {"passed over", "cannot serve"}
    code, out, err = program(*asked, "--kernels", "rms_norm=absent")
    assert code == 2
    assert json.loads(out)["answers"][0]["held"] == []
    assert "no kernel 'absent' for rms_norm" in err


def test_defaults_that_no_plugin_touches_are_left_out_of_the_table(program: Program) -> None:
    asked = ("plugins", "why", "opt", "--preset", "tiny", "--plugins", "muon")
    _, whole, silent = program(*asked, "--all")
    code, short, said = program(*asked)
    assert (code, silent) == (0, "")
    hidden = len(whole.splitlines()) - len(short.splitlines())
    assert said == (f"note: {hidden} defaults that no plugin claims are hidden; --all shows them\n")
    rows, shown = ([line.split() for line in text.splitlines()[1:]] for text in (whole, short))
    assert len(shown) < len(rows) / 2
    gone = [row for row in rows if row not in shown]
    assert len(gone) == hidden
    for row in gone:  # unchanged everywhere
        assert row[0].startswith(("opt.set[", "opt.assign["))
        assert " core " in f" {' '.join(row)} "
        assert any(word in row for word in ("1", "adamw", "own"))
    assert any("opt.rule[adamw].decay" in row for row in shown)
    assert any("opt.assign[attention.q.weight]" in row and "muon" in row for row in shown)
    assert any("opt.set[norm.weight].wd_mul" in row and "0" in row for row in shown)


def test_defaults_are_shown_where_nothing_else_was_asked_for(program: Program) -> None:
    code, out, err = program("plugins", "why", "opt.set[head.weight]", "--preset", "tiny")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 4


def test_the_document_holds_the_defaults_too(program: Program) -> None:
    asked = ("plugins", "why", "opt.set", "--preset", "tiny", "--json")
    _, out, err = program(*asked)
    answers = json.loads(out)["answers"]
    assert err == ""
    assert {one["usual"] for one in answers} == {True, False}
    assert program(*asked, "--all")[1] == out


@pytest.mark.parametrize(
    ("slot", "fix"), [("atn.layout", "did you mean attn.layout"), ("elsewhere", "shows all")]
)
def test_an_unknown_name_is_refused_with_near_ones(program: Program, slot: str, fix: str) -> None:
    code, out, err = program("plugins", "why", slot)
    assert (code, out) == (2, "")
    assert f"no slot, parameter, rule or op '{slot}'" in err
    assert fix in err


@pytest.mark.parametrize("width", [50, 80, 200])
def test_a_table_that_is_too_wide_cuts_no_name(width: int) -> None:
    table = columns("slot", "where", "owner", "what", "why")
    names = ("opt.set[attention_norm.weight].precondition", "layers 0-3", "muon", "newton_schulz")
    table.add_row(*map(Text, names), Text("a stage of the rule that the core provides"))
    table.add_row(Text(""), Text(""), Text("refused"), Text("other"), Text("it came too late"))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_table(table, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert max(map(len, lines)) <= max(width, 55)
    assert all(any(name in line for line in lines) for name in names)
    assert "refused  other" in text
    assert ("slot" in lines[0]) == (width == 200)
