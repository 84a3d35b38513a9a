"""HTML and SVG by functions: what is not markup already is escaped, so that nothing can slip in."""

from __future__ import annotations

from html import escape

from minillm_core.commands import printable

VOID = {"br", "meta"}


class Markup(str):
    """Text that is HTML or SVG, and is put in as it is."""


def text(content: object) -> Markup:
    """Escape anything but Markup, so that a browser shows it letter by letter."""
    if isinstance(content, Markup):
        return content
    shown = printable(str(content)).encode("utf-8", "replace").decode()
    return Markup(escape(shown, quote=True))


def joined(*parts: object) -> Markup:
    """Join parts; None is left out."""
    return Markup("".join(text(part) for part in parts if part is not None))


def tag(name: str, /, *parts: object, **attributes: object) -> Markup:
    """Make an element.

    Args:
        name: "td", "circle".
        parts: its content, see :func:`joined`.
        attributes: ``class_`` is class, ``stroke_width`` is stroke-width; None is left out, and a
            float is written with two digits, as coordinates need.
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
