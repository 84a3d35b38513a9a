"""Test of adding a slot: at most three files, and all output from the slot table includes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DIFF = Path(__file__).with_name("new_slot.diff")

LOUD = """
from minillm_core import Plugin, piecewise

class Loud(Plugin, api=1):
    '''Claims the new slot.'''

    def build_attention(self, attn):
        if attn.layer:
            attn.gain(0.5)
        else:
            attn.gain(piecewise((0, 0.5), (0.5, 1.0)))
"""

SCRIPT = """
import contextlib, io, json
from minillm_core.cli.main import main

def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*words, "--preset", "tiny", "--device", "cpu"])
    return code, out.getvalue(), err.getvalue()

one, both = ("--plugins", "loud.py:Loud"), ("--plugins", "loud.py:Loud,louder.py:Loud")
print(json.dumps({
    "plan": run("plan", *one, "--json"),
    "text": run("plan", *one),
    "why": run("plugins", "why", "attn.gain", *one, "--json"),
    "plain": run("plugins", "why", "attn.gain", "--json"),
    "clash": run("plugins", "why", "attn.gain", *both, "--json"),
    "left_out": run("plan", *both),
}))
"""


def test_the_page_shows_the_diff(repository: Path) -> None:
    page = (repository / "docs" / "internals.md").read_text("utf-8")
    (block,) = re.findall(r"^ *```diff\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    assert textwrap.dedent(block) == DIFF.read_text("utf-8")


def applied(diff: str, root: Path) -> dict[str, int]:
    """Apply a diff whose hunks are found by their text; return file -> added lines."""
    added: dict[str, int] = {}
    for part in diff.split("--- ")[1:]:
        name, *hunks = part.split("\n@@")
        text = (root / name).read_text()
        for hunk in hunks:
            lines = hunk.split("\n")[1:]
            old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", "-"))
            new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", "+"))
            assert text.count(old) == 1, f"{name}: this hunk does not fit any more:\n{hunk}"
            text = text.replace(old, new)
            added[name] = added.get(name, 0) + len(new.splitlines()) - len(old.splitlines())
        (root / name).write_text(text)
    return added


@pytest.fixture(scope="module")
def shown(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Return the commands' exit codes, output and messages, with the new slot in a copy of the core."""
    root = tmp_path_factory.mktemp("core")
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repository / "minillm_core", root / "minillm_core", ignore=skipped)
    added = applied(DIFF.read_text(), root)
    assert len(added) <= 3, "an entry in the table, its place in nn, its builder line"
    assert sum(added.values()) <= 16
    for name in ("loud.py", "louder.py"):
        (root / name).write_text(LOUD)
    command = (sys.executable, "-c", SCRIPT)  # which puts its working folder first on sys.path
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


@pytest.mark.slow
def test_a_plan_holds_the_new_slot(shown: dict[str, list]) -> None:
    code, out, err = shown["plan"]
    assert (code, err) == (0, "")
    document = json.loads(out)
    blocks = document["plan"]["model"]["spec"]["blocks"]
    assert [one["attention"]["gain"]["number"] for one in blocks] == [
        {"value": "loud.gain"},
        *[0.5] * (len(blocks) - 1),
    ]
    assert list(document["plan"]["schedules"]["values"]) == ["loud.gain", "train.lr"]
    (plugin,) = document["plugins"]
    assert plugin["expected"][0] == "slot:layers.0.attention.gain"
    assert document["export"]["layout"] is None  # it changes the model's function


def test_the_plan_s_tables_show_it(shown: dict[str, list]) -> None:
    code, out, _ = shown["text"]
    assert code == 0
    assert "attention.gain" in out
    assert "with loud" in out


def test_why_tells_its_owner_its_default_and_its_conflict(shown: dict[str, list]) -> None:
    code, out, _ = shown["why"]
    first, rest = json.loads(out)["answers"]
    assert code == 0
    assert (first["slot"], first["kind"]) == ("layers.*.attention.gain", "claim")
    assert [one["what"] for one in (*first["held"], *rest["held"])] == ["loud.gain", "0.5"]
    (plain,) = json.loads(shown["plain"][1])["answers"]
    assert plain["held"] == [
        {"owner": "core", "what": "1", "why": "the default: no plugin claims it"}
    ]
    code, out, err = shown["clash"]
    assert code == 2
    assert "slot layers.0.attention.gain is claimed by both 'loud' and 'louder'" in err
    assert {tuple(r["who"]) for one in json.loads(out)["answers"] for r in one["refused"]} == {
        ("loud", "louder")
    }
    assert shown["left_out"][0] == 2
