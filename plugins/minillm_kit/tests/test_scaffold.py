"""Tests of `plugins new`: the package is complete, clean, and works unchanged, for every kind."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.config.load import load as load_config
from minillm_core.errors import PluginError
from minillm_core.nn.reference import resolve
from minillm_core.plan import build_plan
from minillm_core.plugins.hookspecs import HOOKS
from minillm_core.plugins.manager import load
from minillm_kit.scaffold import KINDS, Names, checked, write_package

HOOK = {
    "attention": "build_attention",
    "model": "build_model",
    "loss": "compute_loss",
    "optimizer": "optimizer_factory",
    "kernel": "kernel_provider",
    "data": "on_batch",
    "observer": "on_event",
}
FILES = {
    *(".github/workflows/ci.yml", ".gitignore", "LICENSE", "README.md", "pyproject.toml"),
    *("minillm_my_trick/__init__.py", "minillm_my_trick/my_trick.py", "minillm_my_trick/py.typed"),
    *("minillm_my_trick/reference.py", "tests/test_my_trick.py"),
}
MORE = {"kernel": {"minillm_my_trick/torch_swiglu.py"}}
TEMPLATES = Path(resolve("minillm_kit.scaffold:__file__")).parent / "templates"


def package(folder: Path, kind: str, name: str = "my_trick", author: str = "A. Person") -> Path:
    write_package(name, kind, folder, author)
    return folder / f"minillm-{name}"


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_is_complete(kind: str, tmp_path: Path) -> None:
    paths = write_package("my_trick", kind, tmp_path, "A. Person")
    folder = tmp_path / "minillm-my_trick"
    assert paths == sorted(path for path in folder.rglob("*") if path.is_file())
    made = {path.relative_to(folder).as_posix() for path in paths}
    assert made == FILES | MORE.get(kind, set())
    for path in paths:
        assert not re.search(r"\$(?!\{\{)", path.read_text()), path
        assert len(path.read_text().splitlines()) < 70  # short enough to be read in full
    points = project(folder)["entry-points"]["minillm.plugins"]
    assert points == {"my_trick": "minillm_my_trick.my_trick:MyTrick"}
    assert "A. Person" in (folder / "LICENSE").read_text()
    assert "${{ matrix.python }}" in (folder / ".github/workflows/ci.yml").read_text()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["my_trick", "a_name_of_forty_letters_is_a_long_one_ok"])
def test_a_package_is_clean(kind: str, name: str, tmp_path: Path, repository: Path) -> None:
    folder = package(tmp_path, kind, name)
    ours = ["--config", str(repository / "pyproject.toml"), "--no-cache"]
    # its author does not own the core
    sections = ["--config", f'lint.isort.known-first-party=["minillm_{name}"]']
    for command in (["check", *ours, *sections], ["format", "--check", *ours]):
        found = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_is_independent(kind: str, tmp_path: Path) -> None:
    folder = package(tmp_path, kind)
    tree = ast.parse((folder / "minillm_my_trick" / "reference.py").read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    assert set(names) <= {"__future__", "math", "numpy"}


@pytest.fixture
def installed(site: Any) -> Iterator[Any]:
    """Return ``installed(kind)``: fakes an installed package of that kind; returns its name."""

    def install(kind: str) -> str:
        name = f"pkg_{kind}"
        folder = package(site.folder / "source", kind, name)
        files = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.glob("*/*.py")}
        site.install(folder.name, project(folder)["entry-points"]["minillm.plugins"], files)
        return name

    yield install
    for module in [name for name in sys.modules if name.startswith("minillm_pkg_")]:
        del sys.modules[module]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_loads_and_plans(kind: str, installed: Any) -> None:
    name = installed(kind)
    (loaded,) = load([name])
    assert loaded.distribution == f"minillm-{name}"
    assert loaded.plugin.hooks == (HOOK[kind],)
    assert loaded.plugin.summary().endswith(".")
    config = load_config(preset="tiny", default_preset=lambda: ("tiny", "test")).config
    plan = build_plan(config, [loaded])
    (planned,) = plan.plugins
    assert planned.name == name
    assert planned.expected  # some evidence is expected of it
    assert not {"torch", "mlx"} & imported_by(sys.modules[type(loaded.plugin).__module__])
    with pytest.raises(PluginError, match="is installed already, by minillm-pkg_"):
        checked(name)


def imported_by(module: Any) -> set[str]:
    """List the top-level names imported by a module's own statements."""
    tree = ast.parse(Path(module.__file__).read_text())
    found = {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    found |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return {name.partition(".")[0] for name in found}


def test_every_hook_is_begun_by_a_kind() -> None:
    assert set(HOOK) == set(KINDS) == {p.name for p in TEMPLATES.iterdir()} - {"common"}
    # for fields, beside on_batch; and a few lines, which docs/hooks.md has whole
    assert set(HOOKS) - set(HOOK.values()) == {"build_data", "on_evaluated"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_its_tests_import_is_public(kind: str, tmp_path: Path) -> None:
    folder = package(tmp_path, kind)
    tree = ast.parse((folder / "tests" / "test_my_trick.py").read_text())
    imported = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "minillm_kit" in imported
    internal = {"minillm_core", "minillm_kit", "minillm_my_trick"}
    assert {name for name in imported if name.startswith("minillm")} <= {
        *internal,
        "minillm_my_trick.my_trick",
        "minillm_my_trick.torch_swiglu",
    }


@pytest.mark.slow
def test_every_package_passes_its_tests(tmp_path: Path) -> None:
    """Runs in one process with all of them installed: imports take most of a test's time."""
    folders = [package(tmp_path, kind, f"my_{kind}") for kind in KINDS]
    for folder in folders:
        facts = folder / f"minillm_{folder.name.removeprefix('minillm-')}-0.1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 0.1.0\n"
        )
        ((name, value),) = project(folder)["entry-points"]["minillm.plugins"].items()
        (facts / "entry_points.txt").write_text(f"[minillm.plugins]\n{name} = {value}\n")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *folders],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    (line,) = re.findall(r"(?m)^minillm 0.*$", found.stdout)  # the kit's line, with the backends
    assert all(f"my_{kind}" in line for kind in KINDS)


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,7}([-_][a-z0-9]{1,7}){0,2}", fullmatch=True)


@given(given_=NAMES)
def test_names_follow_from_the_one_that_is_given(given_: str) -> None:
    names = Names(given_)
    assert names.distribution == f"minillm-{given_}"
    assert names.package == "minillm_" + given_.replace("-", "_")
    assert names.plugin.isidentifier()
    assert names.class_name.isidentifier()
    assert names.class_name.lower() == names.plugin.replace("_", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["plugin", "module", "layers", "head_gate", "batch", "path", "sw-a"]
)
def test_a_name_of_the_template_s_own_hides_nothing(kind: str, name: str, tmp_path: Path) -> None:
    folder = package(tmp_path, kind, name)
    (target,) = project(folder)["entry-points"]["minillm.plugins"].values()
    module, _, defined = target.partition(":")
    tree = ast.parse((folder / Path(*module.split(".")).with_suffix(".py")).read_text())
    bound = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    bound += [a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert bound.count(defined) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is not an identifier"),
        ("two words", "is not an identifier"),
        ("../up", "is not an identifier"),
        ("8bit", "is not an identifier"),
        ("train", "is reserved for a table of settings"),
        ("Gate", "small letters"),
        ("gaté", "is not an identifier"),
        ("_gate", "small letters"),
        ("gate-", "small letters"),
        ("lambda", "is a word of Python's"),
        ("reference", "reference.py is the file"),
        ("core", "is reserved for the core"),
        ("numpy", "'numpy' is the name of a package that is installed here"),
        ("random", "'random' is the name of a package"),
        ("muon", "a plugin 'muon' is installed already, by minillm-muon"),
        ("modded", "there is a package minillm_modded already"),
    ],
)
def test_a_bad_name_is_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=re.escape(why)) as refused:
        write_package(name, "model", tmp_path)
    assert refused.value.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "fix"), [("optimiser", "did you mean optimizer?"), ("x", "one of attention, model")]
)
def test_an_unknown_kind_is_refused(kind: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=f"no kind '{kind}'") as refused:
        write_package("my_trick", kind, tmp_path)
    assert str(refused.value.fix).startswith(fix)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "minillm-my_trick"
    folder.mkdir()
    with pytest.raises(PluginError, match="is there already"):
        write_package("my_trick", "model", tmp_path)
    assert not list(folder.iterdir())


def test_a_second_package_of_one_plugin_is_refused(tmp_path: Path) -> None:
    write_package("csv_rows", "model", tmp_path)
    with pytest.raises(PluginError, match=r"is there already: .*minillm-csv_rows"):
        write_package("csv-rows", "model", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["minillm-csv_rows"]


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(PluginError, match="cannot be written"):
        write_package("my_trick", "model", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("stopped", "raised"),
    [
        (OSError(28, "No space left on device"), PluginError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_half_a_package_is_never_left(
    stopped: BaseException,
    raised: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Path.write_text

    def full(path: Path, *args: Any) -> int:
        if path.name == "reference.py":
            raise stopped
        return whole(path, *args)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(raised, match=r"cannot be written: No space left|^$"):
        write_package("my_trick", "model", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("author", ['Ö "quoted" \\ Ünal', "a\x1b[31mb\n[project]", ""])
def test_any_author_can_be_written_down(author: str, tmp_path: Path) -> None:
    folder = package(tmp_path, "model", author=author)
    (one,) = project(folder)["authors"]
    shown = {"": "The authors", "a\x1b[31mb\n[project]": "ab [project]"}.get(author, author)
    assert one == {"name": shown}
    assert f"Copyright (c) {date.today().year} {shown}\n" in (folder / "LICENSE").read_text()
