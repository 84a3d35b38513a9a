"""Functions that build HTML and SVG; everything but Markup is escaped, which prevents injection."""

from __future__ import annotations

from html import escape

from minillm_core.commands import printable

VOID = {"br", "meta"}


class Markup(str):
    """HTML or SVG text, inserted without escaping."""


def text(content: object) -> Markup:
    """Escape anything but Markup, so that a browser shows it literally."""
    if isinstance(content, Markup):
        return content
    shown = printable(str(content)).encode("utf-8", "replace").decode()
    return Markup(escape(shown, quote=True))


def joined(*parts: object) -> Markup:
    """Concatenate parts, skipping None."""
    return Markup("".join(text(part) for part in parts if part is not None))


def tag(name: str, /, *parts: object, **attributes: object) -> Markup:
    """Build an element.

    Args:
        name: "td", "circle".
        parts: its content, see :func:`joined`.
        attributes: ``class_`` is class, ``stroke_width`` is stroke-width; None is skipped, and a
            float is written with two digits, enough for coordinates.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{joined(*parts)}</{name}>")


def _value(value: object) -> str:
    return text(f"{value:.2f}" if isinstance(value, float) else value)
