"""The package of a new plugin: fills templates and writes them into a new folder.

The templates are in templates/, one folder per kind. Nothing here imports numpy or a framework, so that
``minillm plugins new`` starts fast.
"""

from __future__ import annotations

import json
import keyword
import re
import shutil
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from minillm_core import PluginError, Refusal
from minillm_core.commands import nearest, plain
from minillm_core.inspection import bad_name, installed_plugins, local_package, read_class

KINDS = ("attention", "model", "loss", "optimizer", "kernel", "data", "observer")
"""Kinds of new plugins, with one folder of templates each."""

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
"""Likewise, from the kind's own folder; further modules there are written beside the plugin."""

_PARTS = ("about.md", "options.md")
"""Templates of a kind that are inserted into its README."""

_SUFFIX = ".template"
_WIDTH = 100
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_IMPORT = re.compile(r"^(?P<start>from \S+ import )(?P<names>[^(\n]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Names:
    """The names of a plugin, derived from the given one."""

    given: str  # head-gate or head_gate

    @property
    def plugin(self) -> str:
        """The plugin's name for ``--plugins``, and its module's: head_gate."""
        return self.given.replace("-", "_")

    @property
    def package(self) -> str:
        """The import package: minillm_head_gate."""
        return f"minillm_{self.plugin}"

    @property
    def distribution(self) -> str:
        """The distribution's name, and its folder's: minillm-head-gate."""
        return f"minillm-{self.given}"

    @property
    def class_name(self) -> str:
        """The class's name: HeadGate."""
        return "".join(part.capitalize() for part in self.plugin.split("_"))


def checked(given: str) -> Names:
    """Derive the names of a new plugin from the given one.

    Raises:
        PluginError: the name is invalid, or already taken.
    """
    names = Names(given)
    reason = bad_name(names.plugin)
    if reason is None and not _NAME.fullmatch(names.plugin):
        reason = "a name is small letters a-z, digits and _ between them, a letter first"
    if reason is None and keyword.iskeyword(names.plugin):
        reason = f"'{names.plugin}' is a word of Python's"
    if reason is None and names.plugin == "reference":
        reason = "reference.py is the file that the plugin is compared with"
    if reason is not None:
        raise PluginError(
            f"a new plugin cannot be called '{plain(given)}': {reason}",
            where=f"minillm plugins new {plain(given)}",
            fix="such as: minillm plugins new head_gate",
        )
    _refuse_taken(names)
    return names


def _refuse_taken(names: Names) -> None:
    for entry in installed_plugins(only=names.plugin):
        raise PluginError(
            f"a plugin '{names.plugin}' is installed already, by {entry.offered_by}",
            where=entry.file or entry.value,
            fix=f"choose another name; or pip uninstall {entry.distribution}",
        )
    spec = find_spec(names.plugin)
    if spec and spec.origin and Path(spec.origin).parent != Path.cwd():  # not a plugin of one file
        raise PluginError(
            f"'{names.plugin}' is the name of a package that is installed here",
            where=spec.origin,
            fix="choose another name: a reader would take the plugin for that package's",
        )
    if (spec := find_spec(names.package)) is not None:
        raise PluginError(
            f"there is a package {names.package} already: Python would find either of the two",
            where=spec.origin or names.package,
            fix="choose another name",
        )


def write_package(name: str, kind: str, folder: Path, author: str = "The authors") -> list[Path]:
    """Write the package of a new plugin into ``folder/minillm-NAME``.

    Args:
        name: of the plugin, with ``-`` or ``_``.
        kind: one of :data:`KINDS`.
        folder: parent of the package's folder; created if it is missing.
        author: the copyright holder.

    Returns:
        The files, sorted.

    Raises:
        Refusal: an invalid name or kind, or a folder that exists already or cannot be written.
    """
    if kind not in KINDS:
        close = nearest(kind, KINDS)
        raise PluginError(
            f"there is no kind '{plain(kind)}' of plugin",
            where=f"--kind {plain(kind)}",
            fix=f"did you mean {close}?" if close else f"one of {', '.join(KINDS)}",
        )
    names = checked(name)
    target = folder / names.distribution
    if (other := local_package(names.plugin, folder)) is not None and other != target:
        raise PluginError(
            f"a package of plugin '{names.plugin}' is there already: {other}",
            where=str(other.absolute()),
            fix="continue with that one, or choose another name",
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
        shutil.rmtree(target, ignore_errors=True)  # remove an incomplete package
        if isinstance(error, OSError):
            raise _unwritable(target, error) from error
        raise
    return sorted(target / path for path in made)


def _filled(names: Names, kind: str, author: str) -> dict[str, str]:
    """Fill the templates: path in the package -> text."""
    own = _templates(kind)
    class_name = names.class_name
    if any(re.search(rf"\b{class_name}\b", text) for text in own.values()):
        class_name += "Plugin"  # in the templates the plain name has another meaning
    words = {
        "name": names.plugin,
        "package": names.package,
        "distribution": names.distribution,
        "class_name": class_name,
        "core": version("minillm-core"),
        "author": author,
        "quoted_author": json.dumps(author, ensure_ascii=False),  # also a valid TOML string
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
    """Wrap imports that exceed the line length, as a formatter does."""

    def wrap(line: re.Match[str]) -> str:
        names = "".join(f"\n    {name}," for name in line["names"].split(", "))
        return f"{line['start']}({names}\n)" if len(line[0]) > _WIDTH else line[0]

    return _IMPORT.sub(wrap, text)


def _templates(folder: str) -> dict[str, str]:
    """Read a folder of templates: name without suffix -> text."""
    place = files("minillm_kit") / "templates" / folder
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
