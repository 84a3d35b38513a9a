"""Hygiene: properties of a plugin's source, import and options, before planning."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm_core import HOOK_API, MinillmError
from minillm_core.commands import counted, plain
from minillm_core.inspection import installed_plugins, read_class, with_options
from minillm_kit.check import Failed, NotApplicable
from minillm_kit.subject import Subject

HEAVY = {"torch", "mlx", "transformers", "jax", "tensorflow"}


def api(subject: Subject) -> str:
    """Check that the source declares this hook API, without importing: other versions are refused."""
    stated = _stated_api(*_source(subject))
    if stated != HOOK_API:
        raise Failed(
            f"api={stated!r}, and this minillm has {HOOK_API}",
            cause="the CHANGELOG says what changed between the two: adapt the plugin, then raise it",
        )
    return f"api {stated}"


def loads(subject: Subject) -> str:
    """Check that the plugin is found, imports, accepts its options, and implements a hook."""
    origin, hooks = subject.loaded.origin, subject.found.cls.hooks
    if not hooks:
        raise Failed("it implements no hook", cause="methods are named after hooks")
    return f"{origin.offered_by or origin.source}: {', '.join(hooks)}"


def clean_import(subject: Subject) -> str:
    """Check that importing in a fresh process imports no framework, writes no file, opens no socket."""
    answer = subject.ask("import", subject.spec)
    if heavy := sorted(HEAVY & set(answer["modules"])):
        raise Failed(
            f"imports {', '.join(heavy)}",
            cause="write against self.ops; import a framework inside a native module's factory",
        )
    if answer["seen"]:
        raise Failed("; ".join(answer["seen"][:3]), cause="a statement at module level does it")
    if answer["changed"]:
        raise Failed(
            f"changes {', '.join(answer['changed'][:3])}", cause="a statement at module level does"
        )
    if printed := answer["printed"]:
        raise Failed(
            f"prints {plain(printed.splitlines()[0], 100)!r}",
            cause="a print at module level: stdout is for what a command answers; leave it out",
        )
    return f"{counted(len(answer['modules']), 'module')}, nothing opened for writing, no socket, no print"


def manifest(subject: Subject) -> str:
    """Check that the manifest read from the source (``minillm plugins list``) matches the imported class."""
    cls, origin = subject.found.cls, subject.found.origin
    facts = read_class(Path(origin.file).read_bytes(), cls.__name__)
    if facts.manifest != cls.manifest:
        raise Failed(
            f"the source says {facts.manifest}, the class is {cls.manifest}",
            cause="keywords of the class are computed or changed after the class statement",
        )
    if not facts.summary:
        raise Failed("no docstring", cause="its first line is the summary in plugins list")
    own = tuple(name for name in cls.__annotations__ if name in cls.model_fields)
    if facts.options != own:
        raise Failed(
            f"the source has options {facts.options}, the class {own}",
            cause="options are made by code, and not stated as fields of the class",
        )
    return f"api {facts.manifest.api}, {counted(len(own), 'option')}"


def options(subject: Subject) -> str:
    """Check that options survive a round trip through JSON and TOML, and unknown ones are refused."""
    given = subject.loaded.plugin.options()
    forms: Mapping[str, Mapping[str, Any]] = {
        "JSON": json.loads(json.dumps(given)),
        "TOML": {k: _toml(v) for k, v in given.items() if _fits_toml(v)},
    }
    for form, read in forms.items():
        again = with_options(subject.found, read).plugin.options()
        wrong = sorted(key for key in read if again[key] != given[key])
        if wrong:
            key = wrong[0]
            raise Failed(
                f"{key}={given[key]!r} comes back from {form} as {again[key]!r}",
                cause="a validator is not idempotent, or a serialiser loses something",
            )
    try:
        with_options(subject.found, {**given, "no_such_option": 1})
    except MinillmError:
        return f"{counted(len(given), 'option')} through JSON and TOML; an unknown one is refused"
    raise Failed(
        "an unknown option is accepted without an error",
        cause="model_config with extra= other than forbid",
    )


def _fits_toml(value: Any) -> bool:
    return value is not None and not isinstance(value, dict)


def _toml(value: Any) -> Any:
    return tomllib.loads(f"value = {json.dumps(value)}")["value"]


def _source(subject: Subject) -> tuple[str, str]:
    """Locate the file that defines the class, and the class's name.

    Raises:
        NotApplicable: there is no such file; the next check reports it.
    """
    path, _, name = subject.spec.rpartition(":")
    if not path:
        (entry, *_) = installed_plugins(only=subject.spec) or [None]
        if entry is None or entry.file is None:
            raise NotApplicable("its source is not found: see the next check")
        path, name = entry.file, entry.value.rpartition(":")[2]
    return path, name


def _stated_api(path: str, name: str) -> Any:
    """Read the literal behind ``api=`` in the statement of the class.

    Raises:
        NotApplicable: it cannot be read; the next check reports the reason.
    """
    try:
        classes = [
            n for n in ast.parse(Path(path).read_bytes()).body if isinstance(n, ast.ClassDef)
        ]
        given = {k.arg: k.value for node in classes if node.name == name for k in node.keywords}
        return ast.literal_eval(given["api"])
    except (OSError, SyntaxError, ValueError, KeyError) as error:
        raise NotApplicable(f"no literal api= can be read ({error}): see the next check") from error
