"""Parser of source for documentation: docstring sections, signatures, fields with the comments beside them.

Docstrings are Google style, with one paragraph ``::`` and a block for an example; some sections have
custom headings, which standard parsers reject.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Argument", "Doc", "Member", "arguments", "doc_of", "members", "prose"]

_SECTION = re.compile(r"(\S[^\n]*):\n((?:[ ]{4}[^\n]*(?:\n|$)|\n)+)")
_ITEM = re.compile(r"\*{0,2}(\w+(?:, \w+)*): ")


@dataclass
class Doc:
    """A parsed docstring, as Markdown."""

    summary: str = ""
    body: list[str] = field(default_factory=list)  # further paragraphs
    example: str = ""
    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Heading (Args, Returns, Raises ...) -> (name or "", text)."""


def doc_of(target: Any) -> Doc:
    """Parse the docstring of a class or function."""
    text = (inspect.getdoc(target) or "").strip() + "\n"
    found = Doc()
    if match := re.search(r"^::\n\n((?:[ ]{4}[^\n]*\n|\n)+)", text, re.MULTILINE):
        found.example = textwrap.dedent(match[1]).strip()
        text = text[: match.start()] + text[match.end() :]
    for match in re.finditer(rf"^{_SECTION.pattern}", text, re.MULTILINE):
        found.sections[match[1]] = list(_items(textwrap.dedent(match[2])))
        text = text.replace(match[0], "")
    paragraphs = [part for part in re.split(r"\n{2,}", text.strip())]
    found.summary, *found.body = (prose(part) for part in paragraphs)
    return found


def _items(text: str) -> Iterator[tuple[str, str]]:
    """Parse ``name: description``, continued on indented lines; text without names is one item."""
    for part in re.split(r"\n(?=\S)", text.strip()):
        match = _ITEM.match(part)
        name = match[1] if match else ""
        yield name, prose(re.sub(r"\n +", " ", part[match.end() :] if match else part))


def prose(text: str) -> str:
    """Convert a paragraph of a docstring to Markdown; indented lines stay unchanged."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    lines = text.splitlines()
    if any(line.startswith("    ") for line in lines):
        return "\n".join(
            f"    {line.strip()}" if line.startswith("    ") else line for line in lines
        )
    return " ".join(line.strip() for line in lines)


@dataclass(frozen=True)
class Argument:
    """One argument of a function, as written in a call."""

    text: str  # name, *name, **name, name=default
    name: str
    annotation: str  # "" if there is none


def arguments(function: Any) -> list[Argument]:
    """List the arguments of a function, without self; a lone ``*`` before keyword-only ones."""
    found, named = [], False
    for one in inspect.signature(function).parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not named:
            found.append(Argument("*", "", ""))
        named = named or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else f"={_default(one.default)}"
        annotation = "" if one.annotation is one.empty else str(one.annotation).strip("'\"")
        silent = stars or annotation in ("Any", "type", "type | None")
        found.append(Argument(stars + one.name + default, one.name, "" if silent else annotation))
    return found


def _default(value: Any) -> str:
    return "..." if value is ... else repr(value)


@dataclass(frozen=True)
class Member:
    """A field or attribute declared in a class body."""

    name: str
    annotation: str
    default: str
    about: str  # the comment beside it, or the string below it


def members(cls: type) -> list[Member]:
    """List the public annotated names of a class body, in order."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        about = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :].partition("# ")[2]
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            about = prose(inspect.cleandoc(str(after.value.value)))
        default = ast.unparse(node.value) if node.value else ""
        if not node.target.id.startswith("_"):
            annotation = ast.unparse(node.annotation)
            annotation = re.sub(r"^ClassVar\[(.+)\]$", r"\1", annotation)
            found.append(Member(node.target.id, annotation, default, about))
    return found
