"""Tests of the doctor's findings on distributions, with fake installed metadata."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from minillm_lab.doctor.finding import Finding
from minillm_lab.doctor.packages import package_findings

Install = Callable[..., None]

CORE = ("numpy>=2.0", 'torch>=2.10; extra == "torch"')


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replace site-packages by an empty folder; ``install(name, version, requires, points)``."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def put(
        name: str,
        version: str = "0.1.0",
        requires: Sequence[str] = (),
        points: Sequence[str] = (),
        extras: Sequence[str] = (),
    ) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in requires]
        lines += [f"Provides-Extra: {one}" for one in extras]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if points:
            text = "[minillm.plugins]\n" + "".join(f"{p} = pkg_{p}.trick:Trick\n" for p in points)
            (info / "entry_points.txt").write_text(text)
        for point in points:
            (tmp_path / f"pkg_{point}").mkdir()
            source = f"class Trick(Plugin, api=1):\n    '''{point}.'''\n"
            (tmp_path / f"pkg_{point}" / "trick.py").write_text(source)

    return put


@pytest.fixture
def core(install: Install) -> None:
    install("minillm-core", requires=CORE)
    install("numpy", "2.4.0")


def wrong() -> list[Finding]:
    return [
        one for one in package_findings(nvidia=True) if one.state != "ok" and one.part != "export"
    ]


def test_all_is_well(install: Install, core: None) -> None:
    install("minillm-muon", requires=["minillm-core>=0.1.0"], points=["muon"])
    assert wrong() == []
    lines = {one.part: one.what for one in package_findings(nvidia=True)}
    assert lines["minillm"] == "minillm-core 0.1.0, with numpy 2.4.0"
    assert lines["plugins"].startswith("1 installed")


def test_what_the_core_lacks_is_broken(install: Install) -> None:
    (found,) = wrong()
    assert (found.state, found.command) == ("broken", "pip install minillm-core")
    install("minillm-core", requires=CORE)
    install("torch", "2.13.0+cpu")
    (found,) = wrong()
    assert "needs numpy>=2.0: it is not installed" in found.what
    assert found.command == "pip install 'numpy>=2.0' torch===2.13.0+cpu"


def test_an_old_requirement_is_broken(install: Install) -> None:
    install("minillm-core", requires=CORE)
    install("numpy", "1.26.0")
    (found,) = wrong()
    assert (found.state, "here is 1.26.0" in found.what) == ("broken", True)


def test_ours_of_mixed_versions(install: Install, core: None) -> None:
    install("minillm-muon", "0.2.0", points=["muon"])
    install("other-plugins", "7.0", points=["other"])
    (found,) = wrong()
    assert "minillm-muon 0.2.0 beside minillm-core 0.1.0" in found.what
    assert found.command == "pip install --upgrade minillm-core minillm-muon"
    install("minillm-modded", points=["relu2"])  # of the core's version, which changes
    (found,) = wrong()
    assert "minillm-modded" not in found.what
    assert found.command == "pip install --upgrade minillm-core minillm-modded minillm-muon"


def test_a_plugin_that_needs_another_core(install: Install, core: None) -> None:
    install("other-plugins", "7.0", ["minillm-core>=0.3,<0.4", "six"], points=["other"])
    needs_core, needs_six = wrong()
    assert needs_core.what.startswith("other-plugins 7.0 needs minillm-core")
    assert "here is 0.1.0" in needs_core.what
    assert needs_core.command == "pip install --upgrade other-plugins minillm-core"
    assert (needs_six.state, needs_six.command) == ("warning", "pip install six")


def test_an_extra_that_is_not_there_is_missing(install: Install, core: None) -> None:
    requires = [
        'liger-kernel>=0.8; extra == "cuda"',
        'six; extra == "never" and python_version<"3"',
    ]
    install("minillm-liger", requires=requires, points=["liger"], extras=["cuda", "never"])
    install("mlx", "0.32.4")
    (found,) = wrong()
    assert (found.part, found.state) == ("minillm-liger", "missing")
    assert "its extra 'cuda' needs liger-kernel>=0.8" in found.what
    assert found.command == "pip install 'minillm-liger[cuda]' mlx===0.32.4"
    assert list(package_findings(nvidia=False)) == [
        one for one in package_findings(nvidia=True) if one != found
    ]
    install("liger-kernel", "0.8.5")
    assert wrong() == []


def test_extras_that_not_everybody_wants_are_optional_and_one_line(
    install: Install, core: None
) -> None:
    requires = ['wandb>=0.20; extra == "wandb"', 'trackio; extra == "trackio"']
    install("minillm-track", requires=requires, points=["wandb"], extras=["trackio", "wandb"])
    (found,) = wrong()
    assert (found.part, found.state) == ("minillm-track", "optional")
    assert found.what == "for those who want trackio or wandb"
    assert found.command == "pip install 'minillm-track[trackio,wandb]'"


def test_a_broken_plugin_is_a_warning_with_its_reason(
    install: Install, core: None, tmp_path: Path
) -> None:
    install("other-plugins", "7.0", points=["other", "good"])
    (tmp_path / "pkg_other" / "trick.py").write_text("class Trick(Plugin, api=99): ...\n")
    (found,) = wrong()
    assert "'other' of other-plugins 7.0 cannot be used: written for hook API 99" in found.what
    assert found.state == "warning"
    assert "1 installed" in next(
        o.what for o in package_findings(nvidia=True) if o.part == "plugins"
    )


def test_who_opens_an_export(install: Install, core: None) -> None:
    found = next(one for one in package_findings(nvidia=True) if one.part == "export")
    assert (found.state, found.command) == ("missing", "pip install transformers")
    install("mlx-lm", "0.32")
    found = next(one for one in package_findings(nvidia=True) if one.part == "export")
    assert (found.state, "mlx-lm 0.32 can open" in found.what) == ("ok", True)


def test_metadata_that_cannot_be_read_is_passed_over(install: Install, core: None) -> None:
    install("other-plugins", "7.0", ["a requirement of nothing (("], points=["other"])
    install("minillm-modded", "one", points=["relu2"])
    (found,) = wrong()
    assert "minillm-modded one beside" in found.what


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
def test_a_distribution_that_cannot_be_read_is_named(
    install: Install, core: None, tmp_path: Path, file: str
) -> None:
    install("torn-one", points=["trick"])
    folder = tmp_path / "torn_one-0.1.0.dist-info"
    (folder / file).write_bytes(b"\xff = a\n")
    (found,) = [one for one in wrong() if one.part == "plugins"]
    assert found.state == "warning"
    assert f"its {file} cannot be read" in found.what
    assert "torn-one" in f"{found.what} {found.command}"
