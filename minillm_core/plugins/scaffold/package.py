"""The package itself: templates filled in, and written into a new folder."""

from __future__ import annotations

import json
import re
import shutil
from datetime import date
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from minillm_core.errors import PluginError, Refusal
from minillm_core.plugins.begun import begun
from minillm_core.plugins.manifest import read_class
from minillm_core.plugins.scaffold.names import Names, checked
from minillm_core.text import nearest, plain

__all__ = ["KINDS", "write_package"]

KINDS = ("attention", "model", "loss", "optimizer", "kernel", "data", "observer")
"""What a plugin can be begun as: a folder of templates each."""

COMMON = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "LICENSE": "LICENSE",
    ".gitignore": "gitignore",
    ".github/workflows/ci.yml": "ci.yml",
    "$package/__init__.py": "init.py",
}
"""File of the package -> its template, for every kind."""

OF_KIND = {
    "$package/$name.py": "plugin.py",
    "$package/reference.py": "reference.py",
    "tests/test_$name.py": "test.py",
}
"""The same, from the kind's own folder; any other module there goes beside the plugin."""

_PARTS = ("about.md", "options.md")
"""Templates of a kind that its README is made of."""

_SUFFIX = ".template"
_WIDTH = 100
_IMPORT = re.compile(r"^(?P<start>from \S+ import )(?P<names>[^(\n]+)$", re.MULTILINE)


def write_package(name: str, kind: str, folder: Path, author: str = "The authors") -> list[Path]:
    """Write the package of a new plugin into ``folder/minillm-NAME``.

    Args:
        name: of the plugin; ``-`` and ``_`` both do.
        kind: one of :data:`KINDS`.
        folder: where the package's folder is made; made too where it is missing.
        author: who holds the copyright.

    Returns:
        The files, sorted.

    Raises:
        Refusal: a name or kind that cannot be, a folder that is there already or cannot be written.
    """
    if kind not in KINDS:
        close = nearest(kind, KINDS)
        raise PluginError(
            f"there is no kind '{plain(kind)}' of plugin to begin with",
            where="--kind",
            fix=f"did you mean {close}?" if close else f"one of {', '.join(KINDS)}",
        )
    names = checked(name)
    target = folder / names.distribution
    if (other := begun(names.plugin, folder)) is not None and other != target:
        raise PluginError(
            f"a package of plugin '{names.plugin}' is there already: {other}",
            where=str(other.absolute()),
            fix="go on with that one, or choose another name",
        )
    made = _filled(names, kind, plain(author) or "The authors")
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise PluginError(
            f"{target} is there already",
            where=str(target.absolute()),
            fix="choose another name or --dir, or move it away",
        ) from None
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        for path, text in made.items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)  # half a package is of no use
        if isinstance(error, OSError):
            raise _unwritable(target, error) from error
        raise
    return sorted(target / path for path in made)


def _filled(names: Names, kind: str, author: str) -> dict[str, str]:
    """Path in the package -> its text."""
    own = _templates(kind)
    class_name = names.class_name
    if any(re.search(rf"\b{class_name}\b", text) for text in own.values()):
        class_name += "Plugin"  # the templates mean something else by it
    words = {
        "name": names.plugin,
        "package": names.package,
        "distribution": names.distribution,
        "class_name": class_name,
        "core": version("minillm-core"),
        "author": author,
        "quoted_author": json.dumps(author, ensure_ascii=False),  # as TOML spells it, too
        "year": str(date.today().year),
    }
    code = Template(own["plugin.py"]).substitute(words)
    words["summary"] = read_class(code.encode(), class_name).summary
    words["title"] = words["summary"].rstrip(".")
    for part in _PARTS:
        words[part.partition(".")[0]] = Template(own[part]).substitute(words).strip()
    beside = {f"$package/{key}": key for key in own if key not in (*OF_KIND.values(), *_PARTS)}
    common = _templates("common")
    texts = {path: common[key] for path, key in COMMON.items()}
    texts |= {path: own[key] for path, key in (OF_KIND | beside).items()}
    texts["$package/py.typed"] = ""
    return {
        Template(path).substitute(words): _wrapped(Template(text).substitute(words))
        for path, text in texts.items()
    }


def _wrapped(text: str) -> str:
    """Imports that a long name makes longer than a line, as a formatter writes them."""

    def wrap(line: re.Match[str]) -> str:
        names = "".join(f"\n    {name}," for name in line["names"].split(", "))
        return f"{line['start']}({names}\n)" if len(line[0]) > _WIDTH else line[0]

    return _IMPORT.sub(wrap, text)


def _templates(folder: str) -> dict[str, str]:
    """Name of a template, without its suffix -> its text."""
    place = files("minillm_core.plugins.scaffold") / "templates" / folder
    return {
        one.name.removesuffix(_SUFFIX): one.read_text("utf-8")
        for one in place.iterdir()
        if one.name.endswith(_SUFFIX)
    }


def _unwritable(target: Path, error: OSError) -> Refusal:
    return PluginError(
        f"the package cannot be written: {error.strerror or error}",
        where=str(target.absolute()),
        fix="another --dir, or make room",
    )
