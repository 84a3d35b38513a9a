"""Tests that core and plugins are packaged alike, and that their descriptions agree."""

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
from minillm_core.config.presets import plugins_of
from minillm_core.plugins.first_party import (
    DISTRIBUTIONS,
    FIRST_PARTY,
    FIRST_PARTY_COMMANDS,
    PROVIDERS,
)
from tools.release import ReleaseError, build, check_tag, distributions, set_version, version

GROUPS = {"minillm.plugins", "minillm.commands"}
"""Groups of entry points: a distribution besides the core has one of them, or a script."""
OBJECTS = "minillm.directories"
"""A group whose entry points are objects, not classes or functions."""
ENGINES = ("minillm.judges", "minillm.measured", "minillm.ranks")
"""Groups whose entry points are named after their function instead of their modules."""


def projects(root: Path) -> dict[Path, dict[str, Any]]:
    """Return folder -> the [project] table of each first-party distribution, the core first."""
    homes = ("plugins", "examples")
    files = [file for home in homes for file in sorted(root.glob(f"{home}/*/pyproject.toml"))]
    files.insert(0, root / "pyproject.toml")
    return {file.parent: tomllib.loads(file.read_text())["project"] for file in files}


def requirements(project: dict[str, Any]) -> dict[str, Requirement]:
    """List a distribution's requirements, including its extras, by canonical name."""
    extras = project.get("optional-dependencies", {})
    lines = chain(project["dependencies"], *extras.values())
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def third_party(root: Path) -> dict[str, Requirement]:
    """List the core's third-party requirements, by canonical name."""
    found = projects(root)
    ours = {project["name"] for project in found.values()}
    return {n: need for n, need in requirements(found[root]).items() if n not in ours}


def constraints(root: Path) -> dict[str, Requirement]:
    """Return the pins of constraints.txt, by canonical name."""
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pins}


def package_of(folder: Path) -> Path:
    """Return the single import package of a distribution."""
    (package,) = [path.parent for path in folder.glob("minillm_*/py.typed")]
    return package


COPIED = {"own/parts_both.py", "own/parts_torch.py", "own/parts_mlx.py"}
"""Files of minillm-hf that are copied as text into modeling files, with the imports of those files."""


def third_party_imports(package: Path) -> set[str]:
    """List the top-level names of a package's third-party imports, in all of its modules."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        if package.name == "minillm_hf" and str(path.relative_to(package)) in COPIED:
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
    assert all("minillm-core" in requirements(plugin) for plugin in plugins)


def test_what_requires_one_of_ours_requires_this_version(repository: Path) -> None:
    found = projects(repository)
    ours = {project["name"] for project in found.values()}
    for project in found.values():
        for name in requirements(project).keys() & ours:
            floor = str(requirements(project)[name].specifier)
            assert floor == f">={minillm_core.__version__}", (project["name"], name)


def test_the_extra_all_brings_every_distribution_of_ours(repository: Path) -> None:
    extras = projects(repository)[repository]["optional-dependencies"]
    published = {project["name"] for project in distributions(repository).values()}
    assert {Requirement(line).name for line in extras["all"]} == published - {"minillm-core"}
    assert published == DISTRIBUTIONS  # otherwise mixed versions would not be detected


def test_no_folder_is_a_package_by_accident(repository: Path) -> None:
    for folder in projects(repository):
        homes = {path.parent for path in package_of(folder).rglob("*.py")}
        assert not [home for home in homes if not (home / "__init__.py").exists()]


PINNED = {"flash-attn-4": "flash_attn", "quack-kernels": "quack", "nvidia-cutlass-dsl": "cutlass"}
"""Distribution -> what it is imported as: functions of these change between versions."""


def test_packages_carry_floors_only_but_for_those_whose_functions_change(repository: Path) -> None:
    for project in projects(repository).values():
        for name, requirement in requirements(project).items():
            wanted = "==" if name in PINNED else ">="
            assert [clause.operator for clause in requirement.specifier] == [wanted], requirement


def test_constraints_pin_the_development_environment(repository: Path) -> None:
    pins, wanted = constraints(repository), third_party(repository)
    assert all([clause.operator for clause in pin.specifier] == ["=="] for pin in pins.values())
    assert str(pins["torch"].specifier) == "==2.13.0"
    assert set(wanted) <= set(pins)
    for name, requirement in wanted.items():
        (pinned,) = pins[name].specifier
        assert requirement.specifier.contains(pinned.version), requirement


def test_the_core_declares_what_it_imports(repository: Path) -> None:
    imported = third_party_imports(repository / "minillm_core")
    imported -= {"annotated_types", "pydantic_core"}  # pydantic's dependencies
    declared = {Requirement(line).name for line in projects(repository)[repository]["dependencies"]}
    assert imported - {"torch", "mlx", "fastokens"} == declared  # each in an extra


def test_plugins_declare_what_they_import(repository: Path) -> None:
    for folder, project in list(projects(repository).items())[1:]:
        declared = {PINNED.get(name, name.replace("-", "_")) for name in requirements(project)}
        imported = third_party_imports(package_of(folder))
        # The contract kit runs inside its user's own pytest.
        assert imported - {"numpy", "torch", "mlx", "pytest"} <= declared, folder


def test_what_is_copied_as_text_is_imported_by_nothing(repository: Path) -> None:
    package = repository / "plugins" / "minillm_hf" / "minillm_hf"
    assert all((package / name).is_file() for name in COPIED)
    for path in repository.rglob("*.py"):
        if ".venv" not in path.parts:
            assert not re.search(
                r"^\s*(from|import) .*\bparts_(both|torch|mlx)\b", path.read_text(), re.M
            )


def test_entry_points_name_classes_and_commands_that_exist(repository: Path) -> None:
    for folder, project in list(projects(repository).items())[1:]:
        found = {**project.get("entry-points", {}), "scripts": project.get("scripts", {})}
        offered = [one for group in (*GROUPS, "scripts") for one in found.get(group, {}).items()]
        objects = {value.partition(":")[0] for value in found.get(OBJECTS, {}).values()}
        judged = [one for group in ENGINES for one in found.get(group, {}).items()]
        assert offered or objects or judged
        for module in objects:
            assert (folder / Path(*module.split(".")).with_suffix(".py")).is_file()
        for name, target in (*offered, *judged):
            module, _, defined = target.partition(":")
            path = folder / Path(*module.split(".")).with_suffix(".py")
            words = name.removeprefix("minillm-").replace("-", "_").split(".")
            named = (name, target) in judged or path.stem in ("_".join(words), *words[1:])
            assert named  # plugins_new.py, cli/cache.py
            kinds = (ast.ClassDef, ast.FunctionDef)
            tree = ast.parse(path.read_text())
            assert defined in {node.name for node in tree.body if isinstance(node, kinds)}


def test_notices_name_every_requirement(repository: Path) -> None:
    notices = (repository / "THIRD_PARTY_NOTICES.md").read_text()
    _, _, installed = notices.partition("| package |")
    named = set(re.findall(r"^\| ([a-z][\w-]*) \|", installed, re.MULTILINE))
    assert named == set(third_party(repository))


@pytest.mark.slow
def test_the_name_of_somebody_else_is_never_recommended(repository: Path) -> None:
    # The distribution named just "minillm" on the public index is not ours.
    wrong = re.compile(r"pip3? install(?: +-\S+)* +[\"']?minillm(?![-\w])")
    assert wrong.search("pip install -U " + "minillm")
    assert not wrong.search("pip install minillm-muon")
    kinds = {".py", ".md", ".toml", ".txt", ".html", ""}
    for path in repository.rglob("*"):
        hidden = any(part.startswith(".") and part != ".ci" for part in path.parts)
        if path.suffix in kinds and path.is_file() and not hidden:
            assert not wrong.search(path.read_text(errors="replace")), path


# Releases


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """Copy the files that a release reads."""
    for folder in projects(repository):
        copy = tmp_path / folder.relative_to(repository)
        copy.mkdir(parents=True, exist_ok=True)
        (copy / "pyproject.toml").write_text((folder / "pyproject.toml").read_text())
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [0.2.0] - 2026-12-01\n\n## [0.1.0]\n")
    return tmp_path


def test_one_command_moves_every_version_and_every_floor(checkout: Path) -> None:
    changed = set_version("0.2.0", checkout)
    assert {file.parent for file in changed} == set(projects(checkout))
    found = projects(checkout)
    ours = {project["name"] for project in found.values()}
    assert {project["version"] for project in found.values()} == {"0.2.0"} == {version(checkout)}
    for project in found.values():
        needed = requirements(project)
        assert {str(needed[name].specifier) for name in needed.keys() & ours} <= {">=0.2.0"}
    assert set_version("0.2.0", checkout) == []
    before = requirements(found[checkout])["numpy"]
    set_version("0.3.0rc1", checkout)
    assert requirements(projects(checkout)[checkout])["numpy"] == before
    with pytest.raises(ReleaseError, match="not a version"):
        set_version("next", checkout)


def test_a_tag_is_the_version_of_all_and_of_a_dated_entry(checkout: Path) -> None:
    set_version("0.2.0", checkout)
    check_tag("v0.2.0", checkout)
    for tag in ("0.2.0", "v0.2.1", "v0.2"):
        with pytest.raises(ReleaseError, match="the tag is"):
            check_tag(tag, checkout)
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("2026-12-01", "unreleased"))
    with pytest.raises(ReleaseError, match="YYYY-MM-DD"):
        check_tag("v0.2.0", checkout)
    file = next(folder for folder in projects(checkout) if folder.name == "minillm_muon")
    text = (file / "pyproject.toml").read_text()
    (file / "pyproject.toml").write_text(text.replace('version = "0.2.0"', 'version = "0.1.9"'))
    with pytest.raises(ReleaseError, match=r"versions differ: .*minillm-muon 0\.1\.9"):
        check_tag("v0.2.0", checkout)


def test_what_no_build_made_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("keep me")
    with pytest.raises(ReleaseError, match=r"letter\.txt"):
        build(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "keep me"


def test_the_workflow_publishes_every_distribution_core_first(repository: Path) -> None:
    text = (repository / ".github" / "workflows" / "publish.yml").read_text()
    (listed,) = re.findall(r"^ +distribution: \[(.+)\]$", text, re.MULTILINE)
    named = listed.split(", ")
    published = [project["name"] for project in distributions(repository).values()]
    assert named == published
    assert named[0] == "minillm-core"


def test_workflows_use_commands_that_are_there(repository: Path) -> None:
    pages = [path.read_text() for path in (repository / ".github" / "workflows").glob("*.yml")]
    makefile = (repository / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    named = {name for page in pages for name in re.findall(r"run: make ([a-z-]+)", page)}
    assert named
    assert named <= set(phony.split())


def test_groups_that_the_core_looks_into_are_those_of_their_distributions(repository: Path) -> None:
    own = {"minillm.plugins", "minillm.commands"}
    found = {
        (group, project["name"])
        for project in projects(repository).values()
        for group in project.get("entry-points", {}).keys() - own
        if group.startswith("minillm.")
    }
    assert PROVIDERS.items() <= found


def test_make_run_installs_what_its_recipes_name(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    (listed,) = re.findall(r"^RUN_PLUGINS +:= (.+)$", makefile, re.MULTILINE)
    found = projects(repository)
    installed = {found[repository / folder]["name"] for folder in listed.split()}
    named = {name for preset in ("cpu", "mac", "small") for name in plugins_of(preset)}
    example = re.search(
        r'make run ARGS="--plugins ([\w,]+)"', (repository / "README.md").read_text()
    )
    assert example is not None
    plugins = {FIRST_PARTY[name] for name in {*named, *example[1].split(",")}}
    # A run's last lines name report and export, and the README's commands show the token cache
    commands = {FIRST_PARTY_COMMANDS[name] for name in ("report", "data.cache.list")}
    # and start from a model directory.
    assert {*plugins, *commands, PROVIDERS["minillm.directories"]} == installed


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
        groups = (
            {"console_scripts"}
            if folder == repository
            else {*GROUPS, OBJECTS, *ENGINES, "console_scripts"}
        )
        assert groups & set(re.findall(r"^\[(.+)\]$", entry_points, re.MULTILINE))
