"""Finishing of a generated file: removal of arguments that only training reads, wrapping of long lines."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from minillm_hf.own.copying import Replacing

WIDTH = 100


def finished(text: str, mark: str) -> str:
    """Remove from a file what only training reads, and wrap the long lines after ``mark``."""
    before, mark, rest = tidied(text).partition(mark)
    return before + mark + wrapped(rest)


def wrapped(text: str) -> str:
    """Wrap overlong lines with a dictionary or a call, one entry per line."""
    return "\n".join(_broken(line) for line in text.split("\n"))


def _broken(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) <= WIDTH or not indent or line.lstrip().startswith("#"):
        return line
    comma = "," * line.endswith(",")
    try:
        (statement,) = ast.parse(line.strip().removesuffix(",")).body
    except SyntaxError:
        return line  # such as a line of a docstring
    code, value = line.strip().encode(), getattr(statement, "value", None)
    match value:
        case ast.Dict(keys=keys, values=values) if values and all(keys):
            parts = [(key, one) for key, one in zip(keys, values, strict=True)]
        case ast.Call(args=args, keywords=keywords) if args or keywords:
            parts = [(one, one) for one in (*args, *keywords)]
        case _:
            return line
    entries = [code[a.col_offset : b.end_col_offset].decode() for a, b in parts]  # type: ignore[union-attr]
    first, last = parts[0][0].col_offset, parts[-1][1].end_col_offset  # type: ignore[union-attr]
    tail = code[last:].decode().removesuffix(",") if comma else code[last:].decode()
    inner = [_broken(f"{indent}    {entry},") for entry in entries]
    return "\n".join(
        [f"{indent}{code[:first].decode()}", *inner, f"{indent}{tail.lstrip()}{comma}"]
    )


def tidied(text: str) -> str:
    """Remove constructor arguments, and numbers in functions, that are never read.

    Args:
        text: a file that constructs classes by their names.
    """
    while True:
        edits = Replacing(text)
        _drop_arguments(ast.parse(text), edits)
        if not edits.edits:
            _drop_variables(ast.parse(text), edits)
        if not edits.edits:
            return text
        text = edits.done()


def _drop_arguments(tree: ast.Module, edits: Replacing) -> None:
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    made = {name: found for name in classes if (found := _constructor(name, classes)) is not None}
    unread = {name: _unread(classes[name]) for name in classes} if made else {}
    handed_on = _handed_on(tree) if any(unread.values()) else set()
    unread = {name: names for name, names in unread.items() if names and name not in handed_on}
    if not unread:
        return
    for name, names in unread.items():
        function = _own_constructor(classes[name])
        assert function is not None
        given = function.args.args[1:]
        defaults = [None] * (len(given) - len(function.args.defaults)) + list(
            function.args.defaults
        )
        _cut(
            [function.args.args[0], *given],
            [False, *(one.arg in names for one in given)],
            edits,
            ends=[function.args.args[0], *(d or a for d, a in zip(defaults, given, strict=True))],
        )
    for cls, call, target in _calls(tree, classes):
        owner = _above(target, classes) if cls is None else made.get(target)
        if owner is None or owner not in unread:
            continue
        function = _own_constructor(classes[owner])
        assert function is not None
        names = [one.arg for one in function.args.args[1:]]
        arguments = [*call.args, *call.keywords]
        known = [*names[: len(call.args)], *(one.arg for one in call.keywords)]
        _cut(arguments, [one in unread[owner] for one in known], edits)


def _own_constructor(cls: ast.ClassDef) -> ast.FunctionDef | None:
    return next(
        (one for one in cls.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"),
        None,
    )


def _constructor(name: str, classes: dict[str, ast.ClassDef]) -> str | None:
    """Return the class whose constructor a class runs, itself or a base; None: a library's."""
    if name not in classes:
        return None
    return name if _own_constructor(classes[name]) is not None else _above(name, classes)


def _above(name: str, classes: dict[str, ast.ClassDef]) -> str | None:
    """Return the base class whose constructor a class inherits."""
    bases = [one.id for one in classes[name].bases if isinstance(one, ast.Name)]
    return next((found for base in bases if (found := _constructor(base, classes))), None)


def _unread(cls: ast.ClassDef) -> set[str]:
    """Return the arguments that a class's own constructor does not read."""
    function = _own_constructor(cls)
    if function is None or function.args.vararg or function.args.kwarg or function.args.kwonlyargs:
        return set()
    read = {
        node.id for one in function.body for node in ast.walk(one) if isinstance(node, ast.Name)
    }
    return {one.arg for one in function.args.args[1:]} - read


def _handed_on(tree: ast.Module) -> set[str]:
    """Return names with uses other than calls, base classes and annotations."""
    fine: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            fine.add(id(node.func))
        elif isinstance(node, ast.ClassDef):
            fine |= {id(one) for one in node.bases}
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if note is not None:
                fine |= {id(one) for one in ast.walk(note)}
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and id(one) not in fine}


def _calls(
    tree: ast.Module, classes: dict[str, ast.ClassDef]
) -> Iterator[tuple[str | None, ast.Call, str]]:
    """Yield constructor calls: (class, call, class); of super().__init__ (None, call, enclosing class)."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in classes
        ):
            yield node.func.id, node, node.func.id
    for name, cls in classes.items():
        for node in ast.walk(cls):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__")
                ):
                    yield None, node, name


def _cut(
    items: Sequence[ast.AST],
    dropped: Iterable[bool],
    edits: Replacing,
    ends: Sequence[ast.AST] = (),
) -> None:
    """Remove items from a comma-separated list."""
    flags, ends = list(dropped), list(ends) or list(items)
    kept = [index for index, gone in enumerate(flags) if not gone]
    for index, gone in enumerate(flags):
        if gone and any(later > index for later in kept):
            edits.put_between(items[index], items[index + 1], "")
    last = kept[-1] if kept else -1
    if last < len(items) - 1:
        edits.put_after(ends[last] if kept else None, items[last + 1], ends[-1])


def _drop_variables(tree: ast.Module, edits: Replacing) -> None:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        read = {
            one.id
            for one in ast.walk(function)
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
        }
        for one in function.body:
            match one:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in read:
                    if _is_pure(value) and one.end_lineno is not None:
                        edits.put_lines(one.lineno, one.end_lineno, "")


_PURE = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp),
    *(ast.Compare, ast.BoolOp, ast.IfExp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop),
    ast.expr_context,
)
_FUNCTIONS = {"min", "max", "round", "int", "float", "abs", "ceil", "floor"}


def _is_pure(value: ast.expr) -> bool:
    """Return whether an expression is arithmetic without side effects."""
    return all(
        isinstance(one, _PURE)
        or (
            isinstance(one, ast.Call)
            and isinstance(one.func, ast.Name)
            and one.func.id in _FUNCTIONS
        )
        for one in ast.walk(value)
    )
