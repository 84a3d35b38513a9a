"""Imports run one way, and only `minillm_core/backends/` imports a framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import minillm_core

# A package may import from those after it, and never from those before it. Modules that lie
# directly in minillm_core (errors, ...) come last, and import nothing of it but each other.
ORDER = ("cli", "testing", "measure", "doctor", "train", "checkpoint", "data", "backends")
ORDER += ("plan", "plugins", "optim", "nn", "ops", "config")
FRAMEWORKS = {"torch", "mlx"}
ENTRY = {"__init__", "__main__"}  # above everything: the public names, `python -m minillm_core`


def place(package: str) -> int:
    """Where a package of minillm_core comes in the order, 0 first."""
    return ORDER.index(package) if package in ORDER else len(ORDER)


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of each import, also inside functions; not under TYPE_CHECKING.

    Args:
        source: a module's source.
        package: the dotted package that the module is in, which relative imports start from.
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
    """(top package or top module, file) of everything in minillm_core."""
    for path in sorted((root / "minillm_core").rglob("*.py")):
        first = path.relative_to(root / "minillm_core").parts[0]
        yield first.removesuffix(".py"), path


def violations(root: Path) -> Iterator[str]:
    """What breaks the directions, as `file:line: why`."""
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


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = {"torch", "mlx", "numpy", "pydantic", "typer", "rich", "importlib.metadata"}
    script = f"import sys, minillm_core; print(sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_public_names_are_sorted_and_resolve() -> None:
    assert minillm_core.__all__ == sorted(minillm_core.__all__, key=ruff_order)
    assert dir(minillm_core) == sorted(minillm_core.__all__)
    for name in minillm_core.__all__:
        assert getattr(minillm_core, name) is not None


def ruff_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order that the linter (RUF022) keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_types_and_values_of_public_names_come_from_one_place(repository: Path) -> None:
    # A type checker reads the imports under TYPE_CHECKING, the interpreter reads _HOME.
    tree = ast.parse((repository / "minillm_core" / "__init__.py").read_text())
    typed = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("minillm_core.")
        for alias in node.names
    }
    homes = {(home, name) for home, names in minillm_core._HOME.items() for name in names}
    assert typed == homes
    assert {name for _, name in homes} | {"__version__"} == set(minillm_core.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Plugni'"):
        _ = minillm_core.Plugni
