"""A config as run.json holds it, each value with its origin, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from minillm_core.config.load import Loaded
from minillm_core.config.origins import Layer, Setting
from minillm_core.config.schema import Config
from minillm_core.errors import Refusal

__all__ = ["config_of", "layer_of", "settings"]


def settings(loaded: Loaded) -> dict[str, Any]:
    """``{"train": {"lr": {"value": 0.003, "origin": "preset tiny"}}, ..., "plugins": {NAME: ...}}``."""

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


def config_of(document: Mapping[str, Any], *, where: str) -> Config:
    """The config of a run.json.

    Raises:
        Refusal: it is not one that this version understands.
    """
    try:
        tree: dict[str, Any] = {}
        for name, value in document.items():
            if name == "plugins":
                tree[name] = {
                    plugin: {key: entry["value"] for key, entry in table["options"].items()}
                    for plugin, table in value.items()
                }
            elif "origin" in value and "value" in value:
                tree[name] = value["value"]
            else:
                tree[name] = {key: entry["value"] for key, entry in value.items()}
        return Config.model_validate(tree)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        raise _not_understood(f"{key}: {problem['msg']}", where) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise _not_understood(f"{type(error).__name__}: {error}", where) from error


def layer_of(document: Mapping[str, Any], *, where: str) -> Layer:
    """The config of a run.json as the lowest layer of the settings of a run that goes on.

    Raises:
        Refusal: it is not one that this version understands.
    """
    config_of(document, where=where)
    layer = Layer()

    def put(key: str, entry: Mapping[str, Any]) -> None:
        if entry["value"] is not None:  # what was never given
            layer.add(key, Setting(entry["value"], str(entry["origin"]), where))

    for name, value in document.items():
        if name == "plugins":
            for plugin, table in value.items():
                layer.named[plugin] = Setting(plugin, str(table["origin"]), where)
                for key, entry in table["options"].items():
                    put(f"{plugin}.{key}", entry)
        elif "origin" in value and "value" in value:
            put(name, value)
        else:
            for key, entry in value.items():
                put(f"{name}.{key}", entry)
    return layer


def _not_understood(what: str, where: str) -> Refusal:
    return Refusal(
        f"the run's config is not understood: {what}",
        where=where,
        fix="use the version of minillm that wrote it; run.json names it",
    )
