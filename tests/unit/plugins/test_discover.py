"""Tests of the list of plugins: source is read, nothing is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillm_core.config.selection import RESERVED as RESERVED_BY_CONFIG
from minillm_core.errors import PluginError
from minillm_core.plugins.discover import (
    PluginEntry,
    find_module,
    installed_names,
    installed_plugins,
    unreadable,
)
from minillm_core.plugins.manager import find
from minillm_core.plugins.manifest import RESERVED

HEAVY = {"torch", "mlx", "numpy", "pydantic", "pydantic_core", "pluggy"}
LOUD = "raise SystemExit('imported')\n"


def listed(name: str) -> PluginEntry:
    (entry,) = installed_plugins(only=name)
    return entry


def test_a_good_plugin_is_read_whole(site, good) -> None:
    site.trick("gate", LOUD + good.replace("api=1", 'api=1, backends=("torch",), export="qwen3"'))
    entry = listed("gate")
    assert entry.broken is None
    assert (entry.distribution, entry.version) == ("dist-gate", "1.0")
    assert entry.value == "pkg_gate.trick:Trick"
    assert entry.file == str(site.folder / "pkg_gate" / "trick.py")
    assert entry.summary == "A trick."
    assert entry.options == ("width", "layers")
    assert entry.manifest is not None
    assert entry.manifest.backends == ("torch",)
    assert entry.manifest.export == "qwen3"
    data = entry.data()
    assert json.loads(json.dumps(data))["state"] == "ok"
    assert data["identity_at_init"] is False


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class Trick(Plugin, api=1:\n", "syntax error, line 1"),
        ("x = '\0'\n", "syntax error"),
        ("from pkg_other import Trick\n", "defines no class Trick"),
        ("class Trick(Plugin): ...\n", "states no hook API"),
        ("class Trick(Plugin, api=2): ...\n", "hook API 2"),
        ("class Trick(Plugin, api=True): ...\n", "hook API True"),
        ("class Trick(Plugin, api=API): ...\n", "keyword 'api' is not a literal"),
        ("class Trick(Plugin, api=1, **rest): ...\n", "** keyword is not a literal"),
        ("class Trick(Plugin, api=1, backend='torch'): ...\n", "unknown keyword 'backend'"),
        ("class Trick(Plugin, api=1, backends='torch'): ...\n", "keyword backends='torch'"),
        ("class Trick(Plugin, api=1, backends=('jax',)): ...\n", "should be a tuple of some"),
        ("class Trick(Plugin, api=1, devices=()): ...\n", "keyword devices=()"),
        ("class Trick(Plugin, api=1, capability=9.0): ...\n", 'should be like "==9.0"'),
        ("class Trick(Plugin, api=1, identity_at_init=1): ...\n", "should be True or False"),
        ("class Trick(Plugin, api=1, requires='numpy'): ...\n", "a tuple of requirements for pip"),
        (
            "class Trick(Plugin, api=1, requires=('; rm',)): ...\n",
            "a tuple of requirements for pip",
        ),
        ("class Trick(Plugin, api=1, export=['x']): ...\n", "keyword export="),
    ],
)
def test_a_broken_source_says_why(site, source: str, reason: str) -> None:
    site.trick("bad", source)
    entry = listed("bad")
    assert reason in str(entry.broken)
    assert entry.data()["state"] == "broken"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("pkg_bad.absent:Trick", "module not found: pkg_bad.absent"),
        ("pkg_absent.trick:Trick", "module not found: pkg_absent.trick"),
        ("pkg_bad.trick.deeper:Trick", "module not found"),
        ("pkg_bad.trick", "not of the form module:Class"),
        ("pkg_bad.trick:Trick.Inner", "not of the form module:Class"),
        ("math:Trick", "is not Python source"),
    ],
)
def test_a_broken_entry_point_says_why(site, value: str, reason: str) -> None:
    site.trick("bad", point=value)
    assert reason in str(listed("bad").broken)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_reserved_name_is_broken(site, name: str) -> None:
    site.trick(name)
    assert "reserved" in str(listed(name).broken)


def test_the_reserved_names_are_the_tables_of_the_config() -> None:
    assert RESERVED == RESERVED_BY_CONFIG


def test_a_name_that_is_no_identifier_is_broken(site) -> None:
    site.trick("my-gate", point="pkg_my.trick:Trick")
    assert "not an identifier" in str(listed("my-gate").broken)


def test_a_name_that_only_looks_like_another_is_broken_and_marked(site) -> None:
    name = "g\N{CYRILLIC SMALL LETTER A}te"
    site.trick(name, point="pkg_gate.trick:Trick")
    reason = "the name 'g\\u0430te' is not an identifier: letters a to z, digits and _ only"
    assert listed(name).broken == reason
    with pytest.raises(PluginError, match="cannot be used: the name"):
        find(name)


UNREADABLE = {
    "a line without a value": ("entry_points.txt", b"[minillm.plugins]\nnonsense\n"),
    "no utf-8": ("entry_points.txt", b"[console_scripts]\n\xff = a:b\n"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_distribution_that_cannot_be_read_is_listed_and_harms_no_other(site, what: str) -> None:
    site.trick("gate")
    site.install("torn-one", {}, version="2.1")
    file, text = UNREADABLE[what]
    (site.folder / "torn_one-2.1.dist-info" / file).write_bytes(text)
    assert listed("gate").broken is None
    (torn,) = unreadable()
    assert (torn.offered_by, torn.file) == (
        "torn-one 2.1",
        str(site.folder / "torn_one-2.1.dist-info"),
    )
    assert str(torn.broken).startswith("its entry_points.txt cannot be read: ")
    assert "gate" in installed_names()
    assert not {"?", "nonsense"} & installed_names()
    with pytest.raises(PluginError, match="no plugin 'gaet' here") as refused:
        find("gaet")
    assert "torn_one-2.1.dist-info" in str(refused.value.where)


def test_metadata_that_cannot_be_read_is_said(site) -> None:
    site.trick("gate")
    (site.folder / "dist_gate-1.0.dist-info" / "METADATA").write_bytes(b"Name: \xff\n")
    entry = listed("gate")
    assert entry.offered_by == "dist-gate 1.0"
    assert str(entry.broken).startswith("its METADATA cannot be read: ")


def test_an_earlier_distribution_of_a_name_hides_the_later_one(
    site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.trick("gate")
    newer = tmp_path / "newer" / "Dist.Gate-2.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Name: dist-gate\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(str(newer.parent))
    assert installed_plugins(only="gate") == []


@pytest.mark.parametrize("ours", [True, False])
def test_of_two_that_offer_a_name_ours_is_not_the_one_to_go(site, good, ours: bool) -> None:
    name, first = ("muon", "minillm-muon") if ours else ("gate", "dist-gate")
    site.install(first, {name: "pkg_one:Trick"}, {"pkg_one.py": good})
    site.install("a-rival", {name: "pkg_rival:Trick"}, {"pkg_rival.py": good})
    with pytest.raises(PluginError, match=f"plugin '{name}' is offered by") as refused:
        find(name)
    said = "uninstall the distribution that you do not need: a-rival"
    own = " (minillm's own 'muon' comes from minillm-muon)"
    assert refused.value.fix == (said + own if ours else f"{said} or dist-gate")


def test_two_distributions_of_one_name_are_both_broken(site, good) -> None:
    site.trick("gate")
    site.install("rival", {"gate": "pkg_rival:Trick"}, {"pkg_rival.py": good}, version="2.1")
    first, second = installed_plugins(only="gate")
    assert first.broken == "duplicate name: also offered by rival 2.1"
    assert second.broken == "duplicate name: also offered by dist-gate 1.0"


def test_terminal_sequences_are_taken_out(site, good) -> None:
    source = good.replace("A trick.", "A \\x1b[31mred\\x1b[0m \\x1b]0;owned\\x07trick\\u202e.")
    site.trick("gate", source)
    site.write("dist_gate-1.0.dist-info/METADATA", "Name: di\x1b[2Jst\nVersion: 1\x07\n")
    entry = listed("gate")
    assert entry.summary == "A red trick."
    assert (entry.distribution, entry.version) == ("dist", "1")


def test_missing_metadata_is_no_crash(site) -> None:
    site.trick("gate")
    (site.folder / "dist_gate-1.0.dist-info" / "METADATA").unlink()
    assert listed("gate").distribution == "(nameless)"


def test_warnings_of_a_source_stay_with_its_author(site, good) -> None:
    site.trick("gate", good + "\npattern = '\\d'\n")  # warnings are errors in these tests
    assert listed("gate").broken is None


def test_a_package_is_located_without_its_parents_running(site, good) -> None:
    site.install(
        "deep",
        {"deep": "pkg_deep.inner:Trick"},
        {"pkg_deep/__init__.py": LOUD, "pkg_deep/inner/__init__.py": LOUD + good},
    )
    assert listed("deep").broken is None
    assert find_module("pkg_deep.nothing") is None
    assert "pkg_deep" not in sys.modules


def test_a_namespace_package_is_located(site, good) -> None:
    site.install("space", {"space": "pkg_space.a.trick:Trick"}, {"pkg_space/a/trick.py": good})
    assert listed("space").broken is None
    site.trick("empty", point="pkg_space.a:Trick")  # a folder has no source
    assert "module not found" in str(listed("empty").broken)


PATHS = "{source}\n"
FINDER = """\
import sys; from importlib.util import spec_from_file_location
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "pkg_editable":
            return spec_from_file_location(
                name, r"{source}/pkg_editable/__init__.py",
                submodule_search_locations=[r"{source}/pkg_editable"])
sys.meta_path.append(Finder)
"""


@pytest.mark.parametrize("kind", ["path", "finder"])
def test_an_editable_install_is_read(site, good, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "checkout"
    (source / "pkg_editable").mkdir(parents=True)
    (source / "pkg_editable" / "__init__.py").write_text(LOUD)
    (source / "pkg_editable" / "trick.py").write_text(good)
    site.install("editable", {"editable": "pkg_editable.trick:Trick"})
    if kind == "path":
        site.write("editable.pth", PATHS.format(source=source))
    else:
        site.write("editable_finder.py", FINDER.format(source=source))
        site.write("editable.pth", "import editable_finder\n")
    script = (
        f"import site; site.addsitedir({str(site.folder)!r})\n"
        "from minillm_core.plugins.discover import installed_plugins\n"
        "(entry,) = installed_plugins(only='editable')\n"
        "print(entry.broken, entry.file)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None", str(source / "pkg_editable" / "trick.py")]


LIST = """
import sys
{before}
from minillm_core.cli.plugins_list import list_plugins
entries = [one.data() for one in list_plugins()]
assert {{"one", "two"}} <= {{entry["name"] for entry in entries}}, entries
print(sorted(name for name in sys.modules if name.split(".")[0] in {heavy!r} or name[:4] == "pkg_"))
"""


@pytest.mark.parametrize(("before", "found"), [("", "[]"), ("import pluggy._hooks", "['pluggy")])
def test_listing_imports_nothing(site, good, before: str, found: str) -> None:
    """The second case proves that the first could fail."""
    site.trick("one", LOUD + good)
    site.trick("two", LOUD + good)
    path = os.pathsep.join([str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIST.format(before=before, heavy=HEAVY)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.stdout.startswith(found)
