"""The core and the plugins are packaged alike, and what is written about them agrees."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import minillm_core


def projects(root: Path) -> dict[Path, dict[str, Any]]:
    """Folder -> the [project] table of each first-party distribution, the core first."""
    homes = ("plugins", "examples")
    files = [file for home in homes for file in sorted(root.glob(f"{home}/*/pyproject.toml"))]
    files.insert(0, root / "pyproject.toml")
    return {file.parent: tomllib.loads(file.read_text())["project"] for file in files}


def requirements(project: dict[str, Any]) -> dict[str, Requirement]:
    """Everything that a distribution asks for, with its extras, by canonical name."""
    extras = project.get("optional-dependencies", {})
    lines = chain(project["dependencies"], *extras.values())
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def constraints(root: Path) -> dict[str, Requirement]:
    """The pins of constraints.txt, by canonical name."""
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def package_of(folder: Path) -> Path:
    """The one import package of a distribution."""
    (package,) = [path.parent for path in folder.glob("minillm_*/py.typed")]
    return package


def third_party_imports(package: Path, *, without: tuple[str, ...] = ()) -> set[str]:
    """Top-level names of what a package imports from elsewhere, anywhere in its modules."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        if set(path.relative_to(package).parts) & set(without):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - {package.name}


def test_versions_move_together(repository: Path) -> None:
    versions = {project["name"]: project["version"] for project in projects(repository).values()}
    assert set(versions.values()) == {minillm_core.__version__}, versions


def test_changelog_starts_with_this_version(repository: Path) -> None:
    entries = re.findall(r"^## \[(.+?)\]", (repository / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == minillm_core.__version__
    assert len(set(entries)) == len(entries)


def test_distributions_are_described_alike(repository: Path) -> None:
    core, *plugins = projects(repository).values()
    for folder, project in projects(repository).items():
        assert package_of(folder).name == project["name"].replace("-", "_")
        assert project["requires-python"] == core["requires-python"]
        assert (project["license"], project["authors"]) == ("MIT", core["authors"])
        assert (folder / "LICENSE").read_text() == (repository / "LICENSE").read_text()
        assert (folder / project["readme"]).read_text().startswith("# minillm")
    for plugin in plugins:
        ours = requirements(plugin)["minillm-core"]
        assert str(ours.specifier) == f">={core['version']}"


def test_no_folder_is_a_package_by_accident(repository: Path) -> None:
    for folder in projects(repository):
        homes = {path.parent for path in package_of(folder).rglob("*.py")}
        assert not [home for home in homes if not (home / "__init__.py").exists()]


def test_packages_carry_floors_only(repository: Path) -> None:
    for project in projects(repository).values():
        for requirement in requirements(project).values():
            assert [clause.operator for clause in requirement.specifier] == [">="], requirement


def test_constraints_pin_the_development_environment(repository: Path) -> None:
    pins, wanted = constraints(repository), requirements(projects(repository)[repository])
    assert all([clause.operator for clause in pin.specifier] == ["=="] for pin in pins.values())
    assert str(pins["torch"].specifier) == "==2.13.0"
    assert set(wanted) <= set(pins)
    for name, requirement in wanted.items():
        (pinned,) = pins[name].specifier
        assert requirement.specifier.contains(pinned.version), requirement


def test_the_core_declares_what_it_imports(repository: Path) -> None:
    # The contract kit runs inside its user's own pytest; two packages are pydantic's other halves.
    imported = third_party_imports(repository / "minillm_core", without=("testing",))
    imported -= {"annotated_types", "pydantic_core"}
    declared = {Requirement(line).name for line in projects(repository)[repository]["dependencies"]}
    assert imported - {"torch", "mlx"} == declared


def test_plugins_declare_what_they_import(repository: Path) -> None:
    for folder, project in list(projects(repository).items())[1:]:
        declared = {name.replace("-", "_") for name in requirements(project)}
        imported = third_party_imports(package_of(folder))
        assert imported - {"numpy", "torch", "mlx"} <= declared, folder


def test_entry_points_name_classes_that_exist(repository: Path) -> None:
    for folder, project in list(projects(repository).items())[1:]:
        for name, target in project["entry-points"]["minillm.plugins"].items():
            module, _, defined = target.partition(":")
            path = folder / Path(*module.split(".")).with_suffix(".py")
            assert path.stem == name
            tree = ast.parse(path.read_text())
            assert defined in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_notices_name_every_requirement(repository: Path) -> None:
    notices = (repository / "THIRD_PARTY_NOTICES.md").read_text()
    _, _, installed = notices.partition("| package |")
    named = set(re.findall(r"^\| ([a-z][\w-]*) \|", installed, re.MULTILINE))
    assert named == set(requirements(projects(repository)[repository]))


def test_the_name_of_somebody_else_is_never_recommended(repository: Path) -> None:
    # The distribution that is called just "minillm" on the public index is not ours.
    wrong = re.compile(r"pip3? install(?: +-\S+)* +[\"']?minillm(?![-\w])")
    assert wrong.search("pip install -U " + "minillm")
    assert not wrong.search("pip install minillm-muon")
    kinds = {".py", ".md", ".toml", ".txt", ".html", ""}
    for path in repository.rglob("*"):
        hidden = any(part.startswith(".") and part != ".ci" for part in path.parts)
        if path.suffix in kinds and path.is_file() and not hidden:
            assert not wrong.search(path.read_text(errors="replace")), path


@pytest.mark.slow
def test_wheels_hold_what_they_should(repository: Path, wheels: dict[str, Path]) -> None:
    for folder, project in projects(repository).items():
        with ZipFile(wheels[project["name"]]) as wheel:
            names = wheel.namelist()
            (information,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
            metadata = wheel.read(f"{information}/METADATA").decode()
            licence = wheel.read(f"{information}/licenses/LICENSE").decode()
            entry_points = wheel.read(f"{information}/entry_points.txt").decode()
        package = package_of(folder)
        source = {
            path.relative_to(folder).as_posix()
            for path in package.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert {name for name in names if not name.startswith(information)} == source
        assert f"{package.name}/py.typed" in source
        assert licence == (repository / "LICENSE").read_text()
        assert "License-Expression: MIT" in metadata
        groups = {"console_scripts"} if folder == repository else {"minillm.plugins"}
        assert groups <= set(re.findall(r"^\[(.+)\]$", entry_points, re.MULTILINE))
