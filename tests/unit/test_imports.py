"""Tests that imports follow one direction, and that only `minillm_core/backends/` imports a framework."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import minillm_core

# A package may import from those after it, and never from those before it. Modules
# directly in minillm_core (errors, ...) come last, and import only each other.
ORDER = ("cli", "train", "checkpoint", "data", "backends")
ORDER += ("plan", "plugins", "optim", "nn", "ops", "config")
FRAMEWORKS = {"torch", "mlx"}
# First: the public names, and `python -m minillm_core`.
ENTRY = {"__init__", "__main__", "commands", "directories", "inspection", "studies", "testing"}


def place(package: str) -> int:
    """Return a package's position in the order, 0 first."""
    return ORDER.index(package) if package in ORDER else len(ORDER)


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """List (line, absolute name) of each import, also inside functions; not under TYPE_CHECKING.

    Args:
        source: a module's source.
        package: the dotted package of the module, to which relative imports refer.
    """
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*base, node.module] if node.module else base)
            origin = module if node.level else str(node.module)
            # `from minillm_core import nn` imports minillm_core.nn
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        todo.extend(ast.iter_child_nodes(node))


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """List (top package or top module, file) of everything in minillm_core."""
    for path in sorted((root / "minillm_core").rglob("*.py")):
        first = path.relative_to(root / "minillm_core").parts[0]
        yield first.removesuffix(".py"), path


def violations(root: Path) -> Iterator[str]:
    """List violations of the directions, as `file:line: why`."""
    for package, path in modules(root):
        dotted = ".".join(path.relative_to(root).parent.parts)
        for line, name in imports(path.read_text(), dotted):
            where, parts = f"{path.relative_to(root)}:{line}", name.split(".")
            if parts[0] in FRAMEWORKS and package != "backends":
                yield f"{where}: only minillm_core/backends imports {parts[0]}"
            if parts[0] != "minillm_core" or package in ENTRY or len(parts) < 2:
                continue
            target = parts[1]
            if target == "__version__":
                continue
            inside = (root / "minillm_core" / target).is_dir()
            if not inside and not (root / "minillm_core" / f"{target}.py").is_file():
                yield f"{where}: {package} imports from minillm_core itself; name the module"
            elif inside and place(target) < place(package):
                yield f"{where}: {package} imports {target}, which comes before it"


def test_imports_run_one_way(repository: Path) -> None:
    assert not list(violations(repository))


def test_every_package_has_a_place(repository: Path) -> None:
    packages = {path.parent.name for path in (repository / "minillm_core").glob("*/*.py")}
    assert packages <= set(ORDER)


@pytest.mark.parametrize(
    ("package", "source", "why"),
    [
        ("ops", "from minillm_core.nn import Linear", "ops imports nn, which comes before it"),
        ("ops", "from minillm_core import nn", "ops imports nn, which comes before it"),
        ("ops", "from ..nn import Linear", "ops imports nn, which comes before it"),
        ("ops", "from .. import nn", "ops imports nn, which comes before it"),
        ("nn", "def f():\n    import minillm_core.optim", "nn imports optim, which comes before"),
        ("plan", "def f():\n    import torch.nn as nn", "only minillm_core/backends imports torch"),
        ("train", "from mlx import core", "only minillm_core/backends imports mlx"),
        ("nn", "from minillm_core import Plugin", "imports from minillm_core itself"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path: Path, package: str, source: str, why: str) -> None:
    for name in ("ops", "nn", "optim", "plan", "train"):
        (tmp_path / "minillm_core" / name).mkdir(parents=True)
    (tmp_path / "minillm_core" / package / "a.py").write_text(source)
    (found,) = violations(tmp_path)
    assert why in found


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("nn", "from minillm_core.ops import select"),
        ("nn", "from minillm_core.errors import PlanError"),
        ("nn", "from .other import Linear"),
        ("optim", "from minillm_core.nn import Linear"),
        ("ops", "if TYPE_CHECKING:\n    from minillm_core.nn import Linear\n    import torch"),
        ("nn", "from minillm_core import __version__"),
        ("backends", "import torch"),
        ("__init__", "def f():\n    import minillm_core.cli"),
    ],
)
def test_a_right_import_passes(tmp_path: Path, package: str, source: str) -> None:
    for name in ("ops", "nn", "optim", "backends", "cli"):
        (tmp_path / "minillm_core" / name).mkdir(parents=True)
    (tmp_path / "minillm_core" / "errors.py").touch()
    module = tmp_path / "minillm_core" / package
    (module / "a.py" if module.is_dir() else module.with_suffix(".py")).write_text(source)
    assert not list(violations(tmp_path))


# The distributions beside the core

OPEN = {
    "minillm_chat": (
        "minillm_core",
        "minillm_core.commands",
        "minillm_core.documents",
    ),
    "minillm_data": (
        "minillm_core",
        "minillm_core.commands",
        "minillm_core.documents",
        "minillm_core.studies",
    ),
    "minillm_eval": (
        "minillm_core",
        "minillm_core.commands",
    ),
    "minillm_hf": (
        "minillm_core",
        "minillm_core.commands",
        "minillm_core.directories",
        "minillm_core.documents",
        "minillm_core.inspection",  # the specification of a model, from which modeling files are written
    ),
    "minillm_modded": (
        "minillm_core",
        "minillm_core.inspection",  # the update, which row-wise tables run on fewer rows
    ),
    "minillm_mesh": (
        "minillm_core",
        "minillm_core.commands",
        "minillm_core.inspection",
    ),
    "minillm_lab": (
        "minillm_core",
        "minillm_core.commands",
        "minillm_core.documents",
        "minillm_core.inspection",
        "minillm_core.studies",
    ),
}
"""Package of a distribution -> all core modules that it may import from."""


def closed(source: str, open_modules: Collection[str]) -> Iterator[str]:
    """List a module's imports of non-public core names, as `line: what`; also for type checkers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            taken = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            taken = [(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("minillm_core."):
            taken = [(str(node.value).partition(":")[0], None)]  # for importlib
        else:
            continue
        for module, name in taken:
            if module.partition(".")[0] != "minillm_core":
                continue
            public = module in open_modules
            if not public or (name and name not in import_module(module).__all__):
                yield f"{node.lineno}: {module}{f'.{name}' if name else ''}"


@pytest.mark.parametrize("package", OPEN)
def test_a_distribution_uses_public_names_alone(repository: Path, package: str) -> None:
    files = sorted((repository / "plugins" / package / package).rglob("*.py"))
    assert files
    found = {str(f): [*closed(f.read_text(), OPEN[package])] for f in files}
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        "from minillm_core.train.loop import Loop",
        "from minillm_core import plugins",
        "from minillm_core.studies import disk",
        "import minillm_core.train",
        "if TYPE_CHECKING:\n    from minillm_core.plan import Plan",
        "def f():\n    import_module('minillm_core.backends.torch')",
    ],
)
def test_a_name_that_is_not_public_is_seen(source: str) -> None:
    assert [*closed(source, OPEN["minillm_lab"])]


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {"torch", "mlx", "numpy", "pydantic", "typer", "rich", "importlib.metadata"}
    script = f"import sys, minillm_core; print(sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_a_star_import_takes_every_public_name() -> None:
    public = minillm_core.__all__
    assert {"Run", "build_plan", "load", "Plugin", "__version__"} <= set(public)
    star: dict[str, object] = {}
    exec("from minillm_core import *", star)
    assert set(public) <= set(star)


PUBLIC = {
    "minillm_core",
    "minillm_core.commands",
    "minillm_core.documents",
    "minillm_core.inspection",
}
"""The modules of the core that a distribution of tools may import from."""


def core_imports(source: str) -> Iterator[tuple[int, str]]:
    """List (line, module of the core) of each import, at any level, and of each reference to one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = str(node.module)
            inner = (f"{base}.{alias.name}" for alias in node.names)
            names = [name if name in PUBLIC else base for name in inner]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # import_module("...")
            names = [node.value] if re.fullmatch(r"minillm_core(\.\w+)+", node.value) else []
        else:
            continue
        core = (name for name in names if name.partition(".")[0] == "minillm_core")
        yield from ((node.lineno, name) for name in core)


@pytest.mark.parametrize("package", ["minillm_kit"])
def test_tools_import_public_modules_of_the_core_alone(package: str, repository: Path) -> None:
    files = sorted((repository / "plugins" / package / package).rglob("*.py"))
    assert files
    found = [
        f"{path.name}:{line}: {name}"
        for path in files
        for line, name in core_imports(path.read_text())
        if name not in PUBLIC
    ]
    assert not found


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from minillm_core import Plan", ["minillm_core"]),
        ("from minillm_core import inspection", ["minillm_core.inspection"]),
        ("from minillm_core.commands import say", ["minillm_core.commands"]),
        ("def f():\n    import minillm_core.plan", ["minillm_core.plan"]),
        ("from minillm_core.errors import MinillmError", ["minillm_core.errors"]),
        ("if TYPE_CHECKING:\n    from minillm_core.plan import Plan", ["minillm_core.plan"]),
        ("import_module('minillm_core.backends.torch')", ["minillm_core.backends.torch"]),
        ("import minillm_muon, numpy", []),
    ],
)
def test_an_import_of_the_core_is_seen(source: str, names: list[str]) -> None:
    assert [name for _, name in core_imports(source)] == names


@pytest.mark.parametrize(
    "name", ["", ".commands", ".directories", ".documents", ".inspection", ".studies"]
)
def test_public_names_resolve_from_their_stub(name: str) -> None:
    module = import_module(f"minillm_core{name}")
    stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_bytes())
    listed = {
        one.asname or one.name
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for one in node.names
        if one.asname
    }
    listed |= {ast.unparse(one.targets[0]) for one in stub.body if isinstance(one, ast.Assign)}
    listed |= {ast.unparse(one.target) for one in stub.body if isinstance(one, ast.AnnAssign)}
    assert dir(module) == module.__all__ == sorted(listed)
    for public in listed:
        assert getattr(module, public) is not None
    with pytest.raises(
        AttributeError, match=f"module 'minillm_core{name}' has no attribute 'Plna'"
    ):
        _ = module.Plna


def test_the_plugin_look_up_imports_nothing_heavy() -> None:
    heavy = {"torch", "mlx", "numpy", "pydantic", "typer", "rich"}
    script = (
        "import sys; from minillm_core.inspection import installed_plugins, read_class, bad_name\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
