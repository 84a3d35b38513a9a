"""Convert a config to its form in run.json, each value with its origin, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from minillm_core.config.load import Loaded
from minillm_core.config.origins import Layer, Setting
from minillm_core.config.schema import Config
from minillm_core.config.selection import check_name
from minillm_core.errors import ConfigError, Refusal


def settings(loaded: Loaded) -> dict[str, Any]:
    """Convert settings to run.json's ``{"train": {"lr": {"value": 0.003, "origin": "preset tiny"}}}``."""

    def entry(key: str, value: Any) -> dict[str, Any]:
        return {"value": value, "origin": loaded.origins.get(key, "default")}

    document = loaded.config.model_dump(mode="json")
    plugins: Mapping[str, Mapping[str, Any]] = document.pop("plugins")
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            found[name] = {key: entry(f"{name}.{key}", part) for key, part in value.items()}
        else:
            found[name] = entry(name, value)
    found["plugins"] = {
        name: {
            "origin": loaded.origins.get(f"plugins.{name}", "default"),
            "options": {key: entry(f"{name}.{key}", value) for key, value in options.items()},
        }
        for name, options in plugins.items()
    }
    return found


def _entries(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield the path of each value in the config, with its entry; a plugin's table before its options."""
    for name, value in document.items():
        if name == "plugins":
            for plugin, table in value.items():
                yield (name, plugin), table
                yield from (((name, plugin, key), one) for key, one in table["options"].items())
        elif "origin" in value and "value" in value:
            yield (name,), value
        else:
            yield from (((name, key), entry) for key, entry in value.items())


def config_of(document: Mapping[str, Any], *, where: str) -> Config:
    """Read the config of a run.json.

    Raises:
        Refusal: this version cannot read it.
    """
    tree: dict[str, Any] = {}
    try:
        for (*places, last), entry in _entries(document):
            table = tree
            for place in places:
                table = table.setdefault(place, {})
            if places == ["plugins"]:
                check_name(last, where=where)  # it names code to run, in an untrusted file
                table[last] = {}
            else:
                table[last] = entry["value"]
        return Config.model_validate(tree)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        raise _not_understood(f"{key}: {problem['msg']}", where) from error
    except ConfigError as error:
        raise Refusal(
            f"{error.what}; nothing of the run was loaded",
            where=f"{where}: config.plugins",
            fix="minillm writes no such name: the file was changed, so do not trust its folder",
        ) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise _not_understood(f"{type(error).__name__}: {error}", where) from error


def layer_of(document: Mapping[str, Any], *, where: str) -> Layer:
    """Read the config of a run.json as the lowest layer of a resumed run's settings.

    Raises:
        Refusal: this version cannot read it.
    """
    config_of(document, where=where)
    layer = Layer()
    for (*places, last), entry in _entries(document):
        if places == ["plugins"]:
            layer.named[last] = Setting(last, str(entry.get("origin")), where)
        elif entry["value"] is not None:  # else it was not set
            key = ".".join((*places, last)).removeprefix("plugins.")
            layer.add(key, Setting(entry["value"], str(entry.get("origin")), where))
    return layer


def _not_understood(what: str, where: str) -> Refusal:
    return Refusal(
        f"the run's config is not understood: {what}",
        where=where,
        fix="use the version of minillm that wrote it; run.json names it",
    )


def fit_vocabulary(loaded: Loaded) -> Loaded:
    """Reduce the preset's vocabulary size for a small text of the user's, with a note.

    Raises:
        DataError: a path of the data does not exist or holds no data.
    """
    from minillm_core.data.sources import TEXT_PER_ENTRY, check_weighted, find, fitting_entries

    config, key = loaded.config, "model.vocab"
    own = loaded.origins[key].startswith("preset ") and config.data.tokenizer is None
    if not own or not config.data.paths:
        return loaded
    check_weighted(config.data.paths)
    vocab = fitting_entries(find(config.data.files, lambda line: None), config.model.vocab)
    if vocab == config.model.vocab:
        return loaded
    note = (
        f"model.vocab={vocab}, not the preset's {config.model.vocab}: a vocabulary has at most "
        f"one entry per {TEXT_PER_ENTRY} bytes of text"
    )
    model = config.model.model_copy(update={"vocab": vocab})
    return replace(
        loaded,
        config=config.model_copy(update={"model": model}),
        origins={**loaded.origins, key: "the size of the text"},
        notes=(*loaded.notes, note),
    )
