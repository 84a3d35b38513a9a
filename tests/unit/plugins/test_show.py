"""Tests of the output of `plugins list` and `plugins info`."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from minillm_core.cli.plugin_facts import info, planned_on, render_info
from minillm_core.cli.plugins_list import list_plugins, render_list
from minillm_core.errors import PlanError, PluginCodeError, PluginError
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin

TINY = planned_on("tiny")


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the width that the shell, or a test worker, has set."""
    monkeypatch.delenv("COLUMNS", raising=False)


def printed(render, what, *, width: int = 80, terminal: bool = False, **how: bool) -> str:
    out = io.StringIO()
    render(what, Console(file=out, width=width, force_terminal=terminal, color_system=None), **how)
    return out.getvalue()


def test_for_a_pipe_a_line_is_a_plugin(site, good) -> None:
    long = good.replace("A trick.", f"[bold]A {'very ' * 40}long trick[/bold].")
    site.trick("gate", long)
    site.trick("bad", "class Trick(Plugin, api=9): ...")
    lines = printed(render_list, [e for e in list_plugins() if e.name in {"bad", "gate"}])
    assert [line.split()[0] for line in lines.splitlines()] == ["name", "bad", "gate"]
    assert "broken: written for hook API 9; this minillm has 1: install a newer minillm" in lines
    assert f"[bold]A {'very ' * 40}long trick[/bold]." in lines
    assert "dist-gate 1.0" in lines


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [30, 80, 200])
def test_a_terminal_is_never_overrun(site, width: int, verbose: bool) -> None:
    site.trick("gate")
    shown = printed(render_list, list_plugins(), width=width, terminal=True, verbose=verbose)
    assert max(map(len, shown.splitlines())) <= width


def test_the_installed_plugins_take_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [one for one in list_plugins() if one.distribution.startswith("minillm-")]
    assert len(entries) >= 32
    shown = printed(render_list, entries, terminal=True).splitlines()
    assert len(shown) == len(entries) + len({one.distribution for one in entries}) + 1
    assert max(map(len, shown)) <= 80
    names = [line.split()[0] for line in shown if line.startswith("  ")]
    assert sorted(names) == sorted(one.name for one in entries)
    assert "-v shows everything" in shown[-1]
    monkeypatch.setenv("COLUMNS", "80")  # as set by a user, also in a pipe
    assert printed(render_list, entries).splitlines() == shown


def test_a_broken_plugin_s_reason_is_whole_in_the_short_list(site) -> None:
    site.trick("gate")
    site.trick("bad", "class Trick(Plugin, api=9): ...")
    entries = [one for one in list_plugins() if one.name in {"bad", "gate"}]
    shown = " ".join(printed(render_list, entries, width=50, terminal=True).split())
    assert (
        "bad broken: written for hook API 9; this minillm has 1: install a newer minillm" in shown
    )
    assert "dist-gate 1.0 gate A trick." in shown


def test_no_plugin_says_what_to_install() -> None:
    assert "pip install minillm-muon" in printed(render_list, [])


def test_the_list_is_json(site) -> None:
    site.trick("gate")
    (entry,) = [one.data() for one in list_plugins() if one.name == "gate"]
    assert json.loads(json.dumps(entry)) == {
        "name": "gate",
        "distribution": "dist-gate",
        "version": "1.0",
        "value": "pkg_gate.trick:Trick",
        "file": str(site.folder / "pkg_gate" / "trick.py"),
        "summary": "A trick.",
        "options": ["width", "layers"],
        "broken": None,
        "state": "ok",
        "api": 1,
        "backends": ["torch", "mlx", "numpy"],
        "devices": [],
        "capability": "",
        "identity_at_init": False,
        "discrete": False,
        "surrogate": False,
        "export": None,
        "task": False,
        "unweighted": False,
        "requires": [],
    }


def test_info_shows_everything(site, good) -> None:
    good = good.replace("api=1", 'api=1, identity_at_init=True, export="qwen3"')
    site.trick("trick", good.replace("attn.append(", "attn.window("))
    shown = json.loads(json.dumps(info("trick", TINY)))
    assert shown["hooks"] == ["build_attention"]
    assert [option["name"] for option in shown["options"]] == ["width", "layers"]
    assert shown["slots"] == ["attention.window, layers 0-3: 12"]
    long = {"name": "a" * 20, "default": None, "type": "an integer " * 9, "help": "what it is " * 9}
    narrow = printed(render_info, shown | {"options": [long | {"required": False}]}, width=80)
    assert any(line.split()[:2] == [f"trick.{'a' * 20}", "none"] for line in narrow.splitlines())
    text = printed(render_info, shown, width=200)
    for part in ("A trick.", "dist-trick 1.0", "trick.width", "an integer >= 1", "features read"):
        assert part in text
    for part in (
        "attention.window, layers 0-3",
        "qwen3",
        "unchanged",
        "torch, mlx, numpy",
        '"all"',
    ):
        assert part in text


def test_what_a_plugin_lacks_is_shown_with_the_line_that_installs_it(make_plugin) -> None:
    make_plugin("api=1", 'api=1, requires=("pytest>=1", "no-such-thing>=2.1")')
    shown = info("trick")
    assert shown["requires"] == ["pytest>=1", "no-such-thing>=2.1"]
    assert shown["lacking"] == {"no-such-thing>=2.1": "it is not installed"}
    text = printed(render_info, shown, width=200)
    assert "pip install 'no-such-thing>=2.1'" in text
    assert "pytest>=1 (" not in text
    listed = printed(render_list, [one for one in list_plugins() if one.name == "trick"])
    assert "needs no-such-thing>=2.1: pip install" in listed


def test_info_says_along_which_axes_several_processes_are_refused(make_plugin) -> None:
    make_plugin("attn.append(", "attn.window(")
    shown = info("trick", TINY)
    assert set(shown["mesh"].values()) == {None}
    text = printed(render_info, shown | {"mesh": {"data": None, "rows": "it reads all"}}, width=200)
    assert "data: nothing in its plan rules it out, but it was not trained" in text
    assert "rows: refused, it reads all" in text
    assert "minillm plugins check trick --only mesh tries it" in text
    assert "mesh" not in info("trick")


def test_info_of_what_does_not_fit_the_preset(make_plugin) -> None:
    make_plugin()

    def planned(one: LoadedPlugin) -> Plan:
        raise PlanError("heads cannot pair")

    shown = info("trick", planned)
    assert (shown["slots"], shown["slots_refused"]) == ([], "heads cannot pair")
    assert "heads cannot pair" in printed(render_info, shown)
    assert shown["mesh"] == {}
    said = " ".join(printed(render_info, shown).split())
    assert (
        "mesh unknown, because it was not planned: minillm plugins check trick --only mesh" in said
    )


def test_info_of_a_plugin_that_needs_an_option(make_plugin) -> None:
    make_plugin("option(12, ", "option(")
    shown = info("trick", TINY)
    assert "'width' of plugin 'trick' is required" in shown["slots_refused"]
    assert "required" in printed(render_info, shown)
    assert "slots" not in info("trick")


def test_info_of_a_single_file_without_options(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from minillm_core.plugins.plugin import Plugin\n"
        "class Mine(Plugin, api=1):\n    def on_event(self, event): ...\n"
    )
    shown = info(f"{file}:Mine")
    assert shown["distribution"] is None
    assert f"{file}:Mine" in printed(render_info, shown, width=300)


def test_info_refuses_as_train_does(make_plugin) -> None:
    with pytest.raises(PluginError, match="no plugin 'nothing'"):
        info("nothing")
    make_plugin(prelude="1 / 0\n")
    with pytest.raises(PluginCodeError):
        info("trick")
