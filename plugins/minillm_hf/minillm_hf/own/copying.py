"""Copying of definitions from modules, with everything that they use; unsupported code is refused.

Modules are read as text: nothing is imported, and comments are kept. Keyword arguments of declarations
that only affect training are removed.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import keyword
import re
import symtable
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

FUTURE = "from __future__ import annotations\n"
CORE = "minillm_core"
DECLARED = {"Param", "State", "Linear"}
"""Declarations of the core whose calls are reduced to shapes."""
TRAINING = {"axes", "init", "role", "lr_mul", "wd_mul", "rows", "share"}
"""Their keywords for initialisation and training."""
OF_TRAINING = {"terms", "statistics", "reads", "next_state", "folded"}
"""Members of a module that inference does not need."""
SYNONYMS = {"ModelShape": "Geometry"}
"""Name in the core -> the same class's name in the parts."""
LIBRARIES = {"numpy", "mlx", "torch", "transformers"} | set(sys.stdlib_module_names)
"""Packages that a modeling file may import; plugins' modules use NumPy and the standard library."""


class CannotWriteError(Exception):
    """The error for a model that no modeling file can express; its message has no full stop."""


Key = tuple[str, str]  # module, name


@dataclass(frozen=True)
class Import:
    """A library import that copied code needs."""

    module: str
    name: str | None  # None: the module itself
    bound: str

    def __str__(self) -> str:
        if self.name is None:
            return f"import {self.module}" + (f" as {self.bound}" * (self.bound != self.module))
        return f"from {self.module} import {self.name}" + (
            f" as {self.bound}" * (self.bound != self.name)
        )


class Source:
    """The source text of a module, with its top-level definitions by name."""

    def __init__(self, module: str, text: str) -> None:
        self.module, self.text = module, text
        self.lines = text.encode().splitlines(keepends=True)

    @cached_property
    def top(self) -> dict[str, ast.stmt]:
        """Name -> the statement that binds it."""
        found: dict[str, ast.stmt] = {}
        for statement in self._statements(ast.parse(self.text).body):
            for name in _bound(statement):
                found[name] = statement
        return found

    def _statements(self, body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
        for one in body:
            if isinstance(one, ast.If):  # such as TYPE_CHECKING
                yield from self._statements(one.body)
            yield one

    def segment(self, statement: ast.stmt) -> str:
        """Return a statement's source lines, with its decorators and the comments right above it."""
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(one.lineno for one in decorators)])
        indent = " " * statement.col_offset
        while first > 1 and self.lines[first - 2].decode().startswith(f"{indent}#"):
            first -= 1
        assert statement.end_lineno is not None
        return b"".join(self.lines[first - 1 : statement.end_lineno]).decode().rstrip()


def _bound(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            of_tuples = [
                one for each in targets if isinstance(each, ast.Tuple) for one in each.elts
            ]
            return [one.id for one in (*targets, *of_tuples) if isinstance(one, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [one.asname or one.name.partition(".")[0] for one in names]
    return []


@cache
def part_source(module: str, path: Path) -> Source:
    """Read the parts common to both frameworks, followed by the file of one framework's parts."""
    shared = path.with_name("parts_both.py").read_text()
    alone = path.read_text().replace("from __future__ import annotations\n", "", 1)
    return Source(module, f"{shared}\n\n{alone}")


def source_of(module: str) -> Source:
    """Return the source of an imported module.

    Raises:
        CannotWriteError: its source is unavailable.
    """
    try:
        return Source(module, inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError) as error:
        raise CannotWriteError(f"the source of {module} cannot be read: {error}") from error


class Copier:
    """A collector of definitions and their dependencies, which writes them in dependency order.

    Args:
        parts: definitions that replace the core's; they are copied too.
        given: names that the generated file defines itself.
        unknown: attributes with a meaning in the core's modules, and none in the parts.
    """

    def __init__(
        self, parts: Source, given: Collection[str], unknown: Collection[str] = ()
    ) -> None:
        self.parts, self.given, self.unknown = parts, frozenset(given), frozenset(unknown)
        self.sources = {parts.module: parts}
        self.texts: dict[Key, str] = {}  # in dependency order
        self.uses: dict[Key, dict[str, Key]] = {}  # global names in a text -> their definitions
        self.imports: dict[str, Import] = {}
        self.ops: set[str] = set()

    def take(self, module: str, name: str) -> Key:
        """Collect a module's top-level definition with its dependencies; return its key.

        Raises:
            CannotWriteError: it, or a dependency, cannot be copied.
        """
        key = (module, name)
        if key in self.uses:
            return key
        if not name.isidentifier():
            raise CannotWriteError(f"{module}:{name} is not at the top level of its module")
        if module not in self.sources:
            self.sources[module] = source_of(module)
        source = self.sources[module]
        statement = source.top.get(name)
        if statement is None:
            raise CannotWriteError(f"{module} defines no {name} at its top level")
        text = source.segment(statement)
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                found = [one.id if isinstance(one, ast.Name) else None for one in names]
                text = f"{name} = {ast.unparse(values[found.index(name)])}"
        if text[:1].isspace():
            raise CannotWriteError(f"{module}:{name} is defined under a condition")
        return self.add(module, name, text)

    def add(self, module: str, name: str, text: str) -> Key:
        """Collect a text that defines ``name`` as if it were part of a module; return its key."""
        key = (module, name)
        if module != self.parts.module:
            self._check_attributes(text, f"{module}:{name}")
            text = _without_training(text, self._declaring(module))
        elif name == "Ops":
            self.texts[key], self.uses[key] = text, {}  # finish_ops reduces it
            return key
        self.uses[key] = used = {}
        running = _globals(text)
        for other in sorted(running | _annotated(text) - {name}):
            found = self._find(module, other, optional=other not in running)
            if found is not None:
                used[other] = found
        self._note_ops(text, f"{module}:{name}")
        self.texts[key] = text
        return key

    def take_part(self, name: str) -> str:
        """Collect one of the parts; return its name."""
        self.take(self.parts.module, name)
        return name

    def need(self, name: str) -> None:
        """Collect a name that generated text uses, resolved in the parts."""
        self._find(self.parts.module, name, optional=False)

    def note_ops(self, text: str) -> None:
        """Record the array functions that generated text calls."""
        self._note_ops(text, "the model")

    def _check_attributes(self, text: str, where: str) -> None:
        """Refuse a class that sets one of the ``unknown`` attributes."""
        for node in ast.walk(ast.parse(text)):
            found = set[str]()
            if isinstance(node, ast.ClassDef):
                found = {name for member in node.body for name in _bound(member)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found = {node.attr} if _is_self(node.value) else found
            if met := sorted(found & self.unknown):
                raise CannotWriteError(
                    f"{where} sets {met[0]}, which the writer of modeling files does not know"
                )

    def _declaring(self, module: str) -> dict[str, str]:
        """Map names in a module to the core's declarations (``DECLARED``) that they import."""
        found = {}
        source = self.sources.get(module) or source_of(module)
        for bound, statement in source.top.items():
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(CORE):
                original = next(a.name for a in statement.names if (a.asname or a.name) == bound)
                if original in DECLARED:
                    found[bound] = original
        return found

    def _find(self, module: str, name: str, *, optional: bool) -> Key | None:
        """Resolve a name in a module and collect its definition or import; None: no definition to copy.

        ``optional``: the name occurs only in annotations, which are not evaluated.
        """
        if module not in self.sources:
            self.sources[module] = source_of(module)
        statement = self.sources[module].top.get(name)
        if statement is None:
            if hasattr(builtins, name) or name in self.given or optional:
                return None
            raise CannotWriteError(f"{module} uses {name}, which is not defined at its top level")
        if name in self.given and module == self.parts.module:
            return None
        try:
            if isinstance(statement, ast.Import):
                return self._import_module(statement, name)
            if isinstance(statement, ast.ImportFrom):
                return self._import_name(module, statement, name)
            return self.take(module, name)
        except CannotWriteError:
            if optional:
                return None
            raise

    def _import_module(self, statement: ast.Import, bound: str) -> None:
        alias = next(
            one for one in statement.names if (one.asname or one.name.partition(".")[0]) == bound
        )
        self._import(Import(alias.name, None, bound))

    def _import_name(self, module: str, statement: ast.ImportFrom, bound: str) -> Key | None:
        alias = next(one for one in statement.names if (one.asname or one.name) == bound)
        home = statement.module or ""
        if statement.level:
            package = module.split(".")[: -statement.level]
            home = ".".join([*package, *filter(None, [home])])
        if home.partition(".")[0] == CORE:
            name = SYNONYMS.get(alias.name, alias.name)
            if name not in self.parts.top:
                raise CannotWriteError(
                    f"{module} uses {home}.{alias.name}, which a model without minillm does not have"
                )
            return self.take(self.parts.module, name)
        if (home, alias.name) == ("dataclasses", "dataclass") and module != self.parts.module:
            raise CannotWriteError(
                f"{module} defines a @dataclass, which mlx-lm's way of loading a file does not allow"
            )
        if home.partition(".")[0] in LIBRARIES:
            self._import(Import(home, alias.name, bound))
            return None
        return self.take(home, alias.name)

    def _import(self, one: Import) -> None:
        if (root := one.module.partition(".")[0]) not in LIBRARIES:
            raise CannotWriteError(
                f"it needs the package {root}, which a modeling file may not import"
            )
        if self.imports.setdefault(one.bound, one) != one:
            raise CannotWriteError(
                f"{one.bound} is {one} in one module, and another import in another"
            )

    def _note_ops(self, text: str, where: str) -> None:
        """Record the array functions that a text calls; all of them if it passes ``ops`` on."""
        known, tree = self._known_ops(), ast.parse(text)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "framework"
                and _is_self(node.value)
            ):
                raise CannotWriteError(f"{where} asks for its framework, self.framework")
        called = {
            id(node.value): node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and _is_ops(node.value)
        }
        bound = {
            id(leaf)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for leaf in ast.walk(node.value)
            if _is_ops(leaf)
            and any(
                isinstance(one, ast.Name) and one.id == "ops" for one in ast.walk(node.targets[0])
            )
        }
        for node in ast.walk(tree):
            if not _is_ops(node) or isinstance(getattr(node, "ctx", None), ast.Store):
                continue
            if (name := called.get(id(node))) is not None:
                if name not in known:
                    raise CannotWriteError(
                        f"{where} calls ops.{name}, which a model without minillm does not have"
                    )
                self.ops.add(name)
            elif id(node) not in bound:
                self.ops |= known

    def _known_ops(self) -> set[str]:
        ops = self.parts.top["Ops"]
        assert isinstance(ops, ast.ClassDef)
        return {name for statement in ops.body for name in _bound(statement)}

    def names(self) -> dict[Key, str]:
        """Return a name for each collected definition, prefixed with its module's where names clash."""
        count, named = Counter(name for _, name in self.uses), {}
        for module, name in self.uses:
            own = module == self.parts.module
            clashes = not own and (count[name] > 1 or name in self.given or name in self.imports)
            named[module, name] = _prefixed(module, name) if clashes else name
        if len(set(named.values())) < len(named):
            raise CannotWriteError(f"two parts have one name: {sorted(named.values())}")
        return named

    def written(self, keys: Iterable[Key]) -> str:
        """Return the source of the collected definitions ``keys``, in dependency order, renamed."""
        named, wanted = self.names(), set(keys)
        blocks = [
            _renamed(
                text, {old: named[new] for old, new in self.uses[key].items()}, key, named[key]
            )
            for key, text in self.texts.items()
            if key in wanted
        ]
        text = ""
        for before, block in zip(["", *blocks], blocks, strict=False):
            apart = "\n\n\n" if _is_definition(block) or _is_definition(before) else "\n"
            text += (apart if text else "") + block
        return text

    def finish_ops(self) -> None:
        """Reduce ``Ops`` to the array functions that are called, and collect their dependencies."""
        key = self.take(self.parts.module, "Ops")
        source = self.sources[self.parts.module]
        statement = source.top["Ops"]
        assert isinstance(statement, ast.ClassDef)
        kept = [
            source.segment(one)
            for one in statement.body
            if isinstance(one, ast.Expr) or self.ops & set(_bound(one))
        ]
        text = f"class Ops:\n{_spaced(kept)}"
        del self.texts[key], self.uses[key]
        found: dict[str, Key] = {}
        for other in sorted(_globals(text)):
            if (one := self._find(self.parts.module, other, optional=False)) is not None:
                found[other] = one
        self.texts = {key: text, **self.texts}
        self.uses[key] = found


def _spaced(members: list[str]) -> str:
    """Join a class's members, with an empty line around functions."""
    text = ""
    for before, one in zip(["", *members], members, strict=False):
        long = "\n" in one or "\n" in before or before.strip().startswith('"""')
        text += ("" if not text else "\n\n" if long else "\n") + one
    return text


def _is_definition(text: str) -> bool:
    return text.startswith(("class ", "def ", "@", "#"))


def _is_ops(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "ops") or (
        isinstance(node, ast.Attribute) and node.attr == "ops" and _is_self(node.value)
    )


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _prefixed(module: str, name: str) -> str:
    """Prefix a name with the last part of its module's name, in the same case."""
    last = module.rpartition(".")[2].strip("_")
    if name.isupper():
        return f"{last.upper()}_{name}"
    if name[0].isupper():
        return "".join(part.title() for part in last.split("_")) + name
    return f"{last}_{name}"


class _Bare(ast.NodeTransformer):
    """A transformer that removes annotations."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return ast.Assign([node.target], self.visit(node.value), lineno=node.lineno)


@cache
def _globals(text: str) -> frozenset[str]:
    """Return the global names that a text reads at run time and does not define."""
    bare = ast.unparse(ast.fix_missing_locations(_Bare().visit(ast.parse(text))))
    found: set[str] = set()

    def walk(table: symtable.SymbolTable) -> None:
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            outside = symbol.is_global() and not symbol.is_assigned()
            if symbol.is_referenced() and (outside or (top and not symbol.is_assigned())):
                found.add(symbol.get_name())
        for child in table.get_children():
            walk(child)

    table = symtable.symtable(bare, "copied", "exec")
    walk(table)
    own = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    return frozenset(found - own - {one.get_name() for one in table.get_children()})


@cache
def _annotated(text: str) -> frozenset[str]:
    """Return the names in a text's annotations."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for note in filter(None, notes):
            found |= {one.id for one in ast.walk(note) if isinstance(one, ast.Name)}
    return frozenset(found)


class Replacing:
    """Edits of a text, addressed by nodes of its syntax tree."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        starts, at = [0], 0
        for line in self.text.splitlines(keepends=True):
            at += len(line)
            starts.append(at)
        self.starts, self.edits = starts, []

    def put(self, node: Any, new: str) -> None:
        """Replace a node by a text."""
        self.edits.append((self._first(node), self._last(node), new))

    def put_between(self, node: Any, following: Any, new: str) -> None:
        """Replace everything from a node up to the following one by a text."""
        self.edits.append((self._first(node), self._first(following), new))

    def put_after(self, before: Any, first: Any, last: Any) -> None:
        """Delete from the end of ``before`` (None: the start of ``first``) to the end of ``last``."""
        start = self._first(first) if before is None else self._last(before)
        self.edits.append((start, self._last(last), ""))

    def _first(self, node: Any) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def _last(self, node: Any) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def put_lines(self, first: int, last: int, new: str) -> None:
        """Replace whole lines by a text, from ``first`` to ``last`` inclusive."""
        self.edits.append((self.starts[first - 1], self.starts[last], new))

    def done(self) -> str:
        """Return the text with all edits applied."""
        text = self.text
        for first, last, new in sorted(self.edits, reverse=True):
            text = text[:first] + new.encode() + text[last:]
        return text.decode()


def _without_training(text: str, declaring: Mapping[str, str]) -> str:
    """Remove what only training needs (keywords of declarations, members of modules), and linter comments."""
    tree, edits = ast.parse(text), Replacing(text)
    for node in ast.walk(tree):
        called = (
            node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        )
        if isinstance(node, ast.Call) and called in declaring:
            cut = copy.deepcopy(node)
            cut.keywords = [one for one in node.keywords if one.arg not in TRAINING]
            if declaring[called] == "State":
                cut.args = node.args[:1]
            edits.put(node, ast.unparse(cut))
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for member in node.body:
            if OF_TRAINING & set(_bound(member)):
                decorators = getattr(member, "decorator_list", [])
                first = min([member.lineno, *(one.lineno for one in decorators)])
                edits.put_lines(first, member.end_lineno or first, "")
    text = re.sub(r"  # (noqa|type: ignore|pyright)[^\n]*", "", edits.done())
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip()
    return text


def _renamed(text: str, names: Mapping[str, str], key: Key, own: str) -> str:
    """Rename the names that a text uses, and the one that it defines."""
    changed = {old: new for old, new in names.items() if old != new}
    if own != key[1]:
        changed[key[1]] = own
    if not changed:
        return text
    edits = Replacing(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in changed:
            edits.put(node, changed[node.id])
        elif isinstance(node, ast.arg) and node.arg in changed:
            raise CannotWriteError(
                f"{key[0]}:{key[1]} has an argument named {node.arg}, as a part is"
            )
    text = edits.done()
    if own != key[1]:
        text = re.sub(rf"^(class|def) {key[1]}\b", rf"\1 {own}", text, count=1, flags=re.MULTILINE)
    return text


def identifier(text: str) -> str:
    """Convert a text to a valid identifier."""
    name = re.sub(r"\W", "_", text)
    return f"{name}_" if keyword.iskeyword(name) or not name.isidentifier() else name
