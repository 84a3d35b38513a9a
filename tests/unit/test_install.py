"""Tests of the pip command that keeps the installed torch and mlx: its text, and its effect in pip."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from minillm_core.install import frameworks, pip_line, unmet
from minillm_core.plugins.first_party import FIRST_PARTY

Pip = Callable[..., str]


def installed(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_frameworks_are_those_that_are_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert frameworks() == {}
    assert pip_line("minillm-muon") == "pip install minillm-muon"
    installed(tmp_path, "torch", "2.13.0+cu130")
    assert frameworks() == {"torch": "2.13.0+cu130"}
    installed(tmp_path, "mlx", "0.32.4")
    assert pip_line("minillm-core[mlx]", upgrade=True) == (
        "pip install --upgrade 'minillm-core[mlx]' torch===2.13.0+cu130 mlx===0.32.4"
    )


def test_the_line_is_one_that_a_shell_can_be_given() -> None:
    line = pip_line("a[b]", keep={"torch": "2.9.0a0+git; rm -rf ~"})
    assert shlex.split(line) == ["pip", "install", "a[b]", "torch===2.9.0a0+git; rm -rf ~"]


def test_every_plugin_of_ours_can_be_asked_for_by_name(repository: Path) -> None:
    for file in repository.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        for name in project["entry-points"].get("minillm.plugins", {}):
            needed = Requirement(FIRST_PARTY[name])
            assert needed.name == project["name"]
            assert needed.extras <= set(project.get("optional-dependencies", {}))


def write_wheel(folder: Path, name: str, version: str, requires: Sequence[str] = ()) -> Path:
    """Write a wheel with one empty module."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata = "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires), ""])
    files = {
        f"{module}.py": "",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    folder.mkdir(exist_ok=True)
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name_inside, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(name_inside, text)
    return path


@pytest.fixture(scope="module")
def pip(
    tmp_path_factory: pytest.TempPathFactory, make_environment: Any, link_libraries: Any
) -> Pip:
    """Return ``pip(version, line)``: what pip would install with that torch; "refused": nothing."""
    home = tmp_path_factory.mktemp("pip")
    index, have, libraries = home / "index", home / "have", home / "libraries"
    for version in ("2.13.0+cu130", "2.14.0"):
        write_wheel(index, "torch", version)
    write_wheel(index, "easy", "1.0", ["torch>=2.10"])
    write_wheel(index, "greedy", "1.0", ["torch>=2.14"])
    libraries.mkdir()
    link_libraries(libraries, "pip")
    made = make_environment(home / "python", libraries)
    options = ("--no-index", "--disable-pip-version-check", "--quiet", "--quiet")

    def would(version: str, line: str) -> str:
        for old in made.site.glob("torch*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        with zipfile.ZipFile(write_wheel(have, "torch", version)) as wheel:
            wheel.extractall(made.site)  # all that installing it is: it is one module
        words = shlex.split(line)[2:]
        report = home / "report.json"
        dry = ("--dry-run", "--report", report, "--find-links", index)
        asked = [str(one) for one in ("pip", "install", *dry, *options, *words)]
        if made.call(*asked, cwd=home).returncode:
            return "refused"
        chosen = json.loads(report.read_text())["install"]
        return " ".join(
            sorted(f"{c['metadata']['name']} {c['metadata']['version']}" for c in chosen)
        )

    return would


@pytest.mark.full
@pytest.mark.parametrize("upgrade", [False, True])
@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.0a0+git12"])
def test_pip_keeps_the_torch_that_is_there(pip: Pip, version: str, upgrade: bool) -> None:
    keep = {"torch": version}
    assert pip(version, pip_line("easy", upgrade=upgrade, keep=keep)) == "easy 1.0"
    assert pip(version, pip_line("greedy", upgrade=upgrade, keep=keep)) == "refused"


@pytest.mark.full
def test_without_the_pin_pip_would_not_keep_it(pip: Pip) -> None:
    assert pip("2.13.0+cpu", "pip install greedy") == "greedy 1.0 torch 2.14.0"
    replaced = pip("2.13.0", "pip install --upgrade easy torch==2.13.0")
    assert replaced == "easy 1.0 torch 2.13.0+cu130"


@pytest.mark.parametrize(
    "found", ["2.16", "2.16.0rc1", "2.16+cu130", "2.2", "3.0.dev1", "1!0.1", "?"]
)
@pytest.mark.parametrize("need", [">=2.16", ">=2.16.0", ">=3", "==2.16", "~=2.2", ">=2.16rc1", ""])
def test_a_requirement_is_met_where_packaging_says_so(
    monkeypatch: pytest.MonkeyPatch, found: str, need: str
) -> None:
    monkeypatch.setattr("minillm_core.install.installed_version", lambda name: found)
    try:
        met = SpecifierSet(need).contains(found, prereleases=True)
    except InvalidVersion:
        met = False
    assert unmet([f"tensorboard{need}"]) == (
        {} if met else {f"tensorboard{need}": f"here is {found}"}
    )
