"""The size of the code: lines, files and imports of the core by room, and of each plugin package.

python -m tools.size                       # this checkout
python -m tools.size ../other --json       # another checkout, as JSON
python -m tools.size plugins/minillm_muon  # one distribution, or one package

A line of code is a line that is not blank, not only a comment, and not part of a docstring.
Source is parsed; nothing of the checkout is imported.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LONG", "File", "count", "packages", "summary"]

LONG = 600
"""Lines of code above which a file counts as long."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class File:
    """The counts of one source file."""

    path: str  # relative to its package's folder, in POSIX form
    code: int  # lines of code
    imports: int  # lines of code that belong to an import statement
    lines: int  # all lines

    @property
    def room(self) -> str:
        """The folder of the package that holds the file; empty for the package's own files."""
        return self.path.rpartition("/")[0].partition("/")[0]


def count(path: str, source: str) -> File:
    """Count the lines of one file.

    Args:
        path: its name in the result.
        source: its text.

    Raises:
        SyntaxError: the text is not Python.
    """
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            code -= _lines(node.body[0])
    imports = {line for node in ast.walk(tree) if _imports(node) for line in _lines(node)}
    return File(path, len(code), len(code & imports), len(source.splitlines()))


def packages(root: Path) -> dict[str, list[File]]:
    """Count the packages of a checkout, of one distribution, or one package alone.

    Args:
        root: a folder: of a package (it has an ``__init__.py``), or one that holds packages
            ``minillm_*`` directly or in ``plugins/*``.

    Returns:
        Package -> its files, sorted; the core first.

    Raises:
        FileNotFoundError: no package was found.
    """
    if (root / "__init__.py").is_file():
        found = [root]
    else:
        places = ("minillm_*", "plugins/*/minillm_*")
        found = [one for place in places for one in sorted(root.glob(f"{place}/__init__.py"))]
        found = [one.parent for one in found]
    if not found:
        raise FileNotFoundError(f"no package minillm_* in {root}")
    return {one.name: list(_counted(one)) for one in found}


def summary(files: Iterable[File]) -> dict[str, Any]:
    """Summarise files: files, lines, lines per file, the fraction of imports and the long files."""
    files = list(files)
    code = sum(one.code for one in files)
    imports = sum(one.imports for one in files)
    return {
        "files": len(files),
        "code": code,
        "code_per_file": round(code / len(files), 1) if files else 0.0,
        "imports": imports,
        "import_share": round(imports / code, 4) if code else 0.0,
        "long": {one.path: one.code for one in files if one.code > LONG},
    }


def _imports(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _lines(node: Any) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def _counted(package: Path) -> Iterator[File]:
    for path in sorted(package.rglob("*.py")):
        with tokenize.open(path) as file:
            yield count(path.relative_to(package).as_posix(), file.read())


def _measured(files: list[File]) -> dict[str, Any]:
    rooms = sorted({one.room for one in files})
    by_room = {room or ".": summary(f for f in files if f.room == room) for room in rooms}
    return summary(files) | {"rooms": by_room}


def _table(package: str, measured: dict[str, Any]) -> Iterator[str]:
    yield f"{package:<20} {'files':>6} {'code':>7} {'a file':>7} {'imports':>8}"
    for room, of in [*measured["rooms"].items(), ("total", measured)]:
        yield (
            f"  {room:<18} {of['files']:>6,} {of['code']:>7,} {of['code_per_file']:>7.1f} "
            f"{of['import_share']:>8.1%}"
        )
    for path, code in measured["long"].items():
        yield f"  above {LONG} lines: {path} ({code:,})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    try:
        counted = packages(given.root.resolve())
    except FileNotFoundError as error:
        parser.error(str(error))
    measured = {name: _measured(files) for name, files in counted.items()}
    if given.json:
        print(json.dumps(measured, indent=2))
    else:
        print("\n\n".join("\n".join(_table(*one)) for one in measured.items()))


if __name__ == "__main__":
    main()
