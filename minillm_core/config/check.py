"""Validation of settings: known keys, types and bounds, and combinations."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from minillm_core.config.kernels import parse_policy
from minillm_core.config.origins import FLAGS, Setting
from minillm_core.config.schema import FIELDS, SECTIONS, TOP, Config, MeshConfig, Stage, TrainConfig
from minillm_core.config.values import NONE, Words, describe, is_finite, show
from minillm_core.errors import ConfigError
from minillm_core.text import few, nearest

SLIP = 2
"""Largest difference in length of a typo: ``save_steps`` is not a typo of ``steps``."""

SYNONYMS = {
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "max_iters": "train.steps",
    "epochs": "train.steps",
    "batch_size": "train.rows",
    "gradient_accumulation_steps": "train.accumulate",
    "block_size": "train.seq_len",
    "context_length": "train.seq_len",
    "warmup_steps": "train.warmup",
    "grad_clip": "train.clip",
    "n_layer": "model.layers",
    "n_head": "model.heads",
    "n_embd": "model.dim",
    "hidden_size": "model.dim",
    "intermediate_size": "model.hidden",
    "rope_theta": "model.rope_base",
    "rms_norm_eps": "model.norm_eps",
}
"""A setting's name in nanoGPT or Transformers -> its name here."""

ELSEWHERE = {
    "save": "checkpoint.every",
    "checkpoint": "checkpoint.every",
    "eval": "eval.every",
    "val": "eval.every",
    "logging": "log.every",
    "batch": "train.rows",
}
"""A word in other programs' settings -> its equivalent here."""


def refusal(key: str, setting: Setting, plugins: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key, with the nearest name or the plugin that the run lacks.

    Args:
        key: a dotted key that is not in the config.
        setting: the setting given for it.
        plugins: the plugins of the run.
    """
    section, _, name = key.partition(".")
    if section in SECTIONS:
        what, fix = _in_section(section, name)
    elif section in plugins:
        what, fix = f"'{key}' is a plugin: its options are {key}.option", f"{key}.option=value"
    elif name or isinstance(setting.value, Mapping):
        what, fix = _in_stranger(section, name, plugins)
    else:
        what = f"there is no setting '{key}'"
        fix = _nearest_or(f"tables: {', '.join(SECTIONS)}; others: {', '.join(TOP)}", key)
    return ConfigError(what, where=setting.where, fix=fix)


def _in_section(section: str, name: str) -> tuple[str, str]:
    names = SECTIONS[section].model_fields
    if not name:
        inside = ", ".join(f"{section}.{field}" for field in names)
        return f"'{section}' is a table of settings, not one setting", inside
    meant = _near(name, names)
    fix = _nearest_or(f"{section} has: {', '.join(names)}", name, meant and f"{section}.{meant}")
    return f"there is no setting '{section}.{name}'", fix


def _in_stranger(section: str, name: str, plugins: Iterable[str]) -> tuple[str, str]:
    """Return problem and fix for a table that is neither a section nor a plugin of this run."""
    add = f"if '{section}' is a plugin, add --plugins {section}"
    tables = f"the tables are {', '.join(SECTIONS)}"
    meant = nearest(section, [*SECTIONS, *plugins])
    if meant and name:
        close = nearest(name, SECTIONS[meant].model_fields) if meant in SECTIONS else name
        meant = f"{meant}.{close or name}"
    return (
        f"'{section}' is neither a table of settings nor a plugin of this run",
        f"{meant}; or, {add}" if meant else f"{tables}; {add}",
    )


def _near(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant, if ``name`` looks like a typo."""
    return nearest(name, [one for one in names if abs(len(one) - len(name)) <= SLIP])


def settings_like(name: str) -> list[str]:
    """Return the settings that an unknown name probably means, such as train.rows for batch_size."""
    if known := (SYNONYMS | ELSEWHERE).get(name) or FLAGS.get(f"--{name}"):
        return [known]
    last = _near(name, {key.rpartition(".")[2] for key in FIELDS})
    return [key for key in FIELDS if key == name or key.rpartition(".")[2] == last]


def _nearest_or(listed: str, name: str, meant: str | None = None) -> str:
    """Return the fix for an unknown name: the probable setting, in any table, or the known names.

    Args:
        listed: the known names.
        name: the unknown one.
        meant: the nearest key, if known.
    """
    meant = meant or " or ".join(settings_like(name))
    hints = [ELSEWHERE[word] for word in name.split("_") if word in ELSEWHERE]
    return f"did you mean {meant}?" if meant else "; ".join([*dict.fromkeys(hints), listed])


def _items(parts: Sequence[str], any_number: bool) -> str:
    several = f"{parts[0].removeprefix('a ')}s"
    return (
        f"{parts[0]} or a list of {several}" if any_number else f"a list of {len(parts)} {several}"
    )


def _bounded(kind: str, limits: Mapping[str, Any]) -> str:
    low, above, high = (limits.get(name) for name in ("ge", "gt", "le"))
    if low is not None and high is not None:
        return f"{kind} from {low:g} to {high:.10g}"
    if low is not None:
        return f"{kind} of at least {low:g}"
    kind += "" if above is None else f" above {above:g}"
    return kind + ("" if high is None else f" and at most {high:.10g}")


_WORDS = Words(
    kinds={
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
        Stage: "a stage",
        type(None): "",
    },
    choices=lambda values: f"{'one of ' * (len(values) > 1)}{', '.join(map(str, values))}",
    items=_items,
    bounded=_bounded,
)


def expected(key: str) -> str:
    """Describe the values that a setting accepts."""
    return describe(FIELDS[key], _WORDS)


def purpose(key: str) -> str:
    """Return a setting's description in the schema, or nothing."""
    return FIELDS[key].description or ""


def validated(settings: Mapping[str, Setting], plugins: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return the config of the settings, strictly typed.

    Args:
        settings: dotted key of a section or the top level -> its setting; all keys are known.
        plugins: plugin -> its options as given.

    Raises:
        ConfigError: a value is of the wrong type or out of its range, or one is missing.
    """
    tree: dict[str, Any] = {name: {} for name in SECTIONS}
    for key, setting in settings.items():
        section, _, name = key.rpartition(".")
        (tree[section] if section else tree)[name] = _typed(key, setting.value)
    tree["plugins"] = {name: dict(options) for name, options in plugins.items()}
    try:
        config = Config.model_validate(tree, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = [str(part) for part in first["loc"]]
        key = ".".join(path[:2] if path[0] in SECTIONS else path[:1])
        if key not in settings:
            raise ConfigError(f"{key} has no value", fix=f"{key}=... ({purpose(key)})") from None
        place, wanted, value = key, expected(key), settings[key].value
        if len(path) == 4 and path[3] in Stage.model_fields:  # train, stages, 0, rows
            place, value = f"{path[3]} of stage {int(path[2]) + 1}", first["input"]
            wanted = describe(Stage.model_fields[path[3]], _WORDS)
        what = f"{place} must be {wanted}, not {show(value)}"
        raise ConfigError(what, where=settings[key].where, fix=f"{key}: {purpose(key)}") from None
    for key, setting in settings.items():
        _check_finite(key, setting)
    return config


def _typed(key: str, value: Any) -> Any:
    """Convert what TOML cannot say: the word for None; a tuple from a list, or from the text of its only item."""
    annotation = FIELDS[key].annotation
    kinds = typing.get_args(annotation)
    if value == NONE and type(None) in kinds:
        return None
    if typing.get_origin(annotation) is not tuple:
        return value
    if isinstance(value, str | Mapping) and Ellipsis in kinds:
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def check_option(key: str, setting: Setting) -> None:
    """Refuse a value that is invalid for any plugin option; its type is checked with the plugin's class.

    Raises:
        ConfigError: a key of more than two parts, or a number that JSON cannot hold.
    """
    plugin, _, option = key.partition(".")
    name, _, inner = option.partition(".")
    if inner:
        what = f"{key} has too many parts: a plugin's options are NAME.option"
        raise ConfigError(what, where=setting.where, fix=f"{plugin}.{name}={{{inner} = ...}}")
    _check_finite(key, setting)


def _check_finite(key: str, setting: Setting) -> None:
    """Refuse a number that a run's files cannot hold.

    Raises:
        ConfigError: it is not finite, or is an integer of more than 64 bits.
    """
    if not is_finite(setting.value):
        wanted = expected(key) if key in FIELDS else "a finite number"
        what = f"{key} must be {wanted}, not {show(setting.value)}"
        raise ConfigError(what, where=setting.where, fix="a finite number of at most 64 bits")


MOST = 1 << 40
"""Largest number of tokens of a step; 16 TiB as arrays."""


def check(config: Config, origins: Mapping[str, str]) -> None:
    """Refuse settings that are individually valid and impossible in combination.

    Raises:
        ConfigError: with the keys concerned, their values and their origins.
    """
    for what, keys, fix in _impossible(config):
        places = []
        for key in keys.split():
            value = attrgetter(key)(config)
            places.append(f"{key} = {show(value)} ({origins.get(key, 'default')})")
        raise ConfigError(what, where=", ".join(places), fix=fix)


def without_effect(mesh: MeshConfig) -> Iterator[str]:
    """Yield a line for each mesh setting without effect, because its kind of sharding is off."""
    for name, other in (("context_exchange", "context"), ("schedule", "pipeline")):
        value, usual = getattr(mesh, name), MeshConfig.model_fields[name].default
        if value != usual and getattr(mesh, other) <= 1:
            yield f"mesh.{name}={value} has no effect without mesh.{other}=2, or more"


def _impossible(config: Config) -> Iterator[tuple[str, str, str | None]]:
    """Yield each impossible combination: the problem, the keys concerned, the fix."""
    model, train, held_out = config.model, config.train, config.data.val
    if model.head_dim is None and model.dim % model.heads:
        pairs = 2 * model.heads  # a head holds pairs of features
        yield (
            f"{model.dim} features cannot be split over {model.heads} heads",
            "model.dim model.heads",
            f"a dim that heads divides, such as model.dim={-(-model.dim // pairs) * pairs}",
        )
    if model.heads % model.kv_heads:
        fits = [n for n in range(1, min(model.heads, 9999) + 1) if model.heads % n == 0]
        yield (
            f"{model.heads} query heads cannot share {model.kv_heads} key and value heads evenly",
            "model.heads model.kv_heads",
            f"model.kv_heads must divide model.heads: {few([*map(str, fits)], 8)}",
        )
    if (width := model.head_width) % 2:
        given = model.head_dim is not None
        even = f"model.dim={(width + 1) * model.heads}"
        yield (
            f"a head {width} wide cannot be rotated: rotary positions turn pairs of features",
            "model.head_dim" if given else "model.dim model.heads",
            f"model.head_dim={width + 1}" if given else f"an even dim / heads, such as {even}",
        )
    if config.data.end_of_text is not None and config.data.tokenizer is None:
        yield (
            "a tokenizer that is trained here has <|endoftext|>",
            "data.end_of_text data.tokenizer",
            "leave data.end_of_text out, or name the tokenizer that has it: data.tokenizer=PATH",
        )
    if not all(0 <= beta < 1 for beta in train.betas):
        decay_rates = "AdamW's decay rates are at least 0 and below 1"
        yield decay_rates, "train.betas", "train.betas=[0.9,0.95]"
    if isinstance(held_out, float) and not 0 < held_out < 1:
        yield (
            "the held-out fraction lies between 0 and 1",
            "data.val",
            "data.val=0.05, or the path of a file to validate on",
        )
    weights, paths = config.data.weights, config.data.files
    wrong = [weight for weight in weights if not 0 < weight < math.inf]
    again = len(set(paths)) < len(paths)
    if wrong or (weights and (again or len(weights) < len(paths))):
        what = "a path with a weight is given twice" if again else "a path has no weight"
        yield (
            f"the weight {wrong[0]:g} is not above 0" if wrong else what,
            "data.paths",
            "PATH:WEIGHT for each path, once, such as --data a.jsonl:0.7 --data b.jsonl:0.3; or no weights",
        )
    least = 4 * max(shape.seq_len for shape in train.shapes)
    if weights and config.data.block:
        yield (
            "the sources of a mixture are not read in blocks",
            "data.block data.paths",
            "leave data.block out, or the weights",
        )
    elif 0 < config.data.block < least:
        yield (
            f"a block of {config.data.block:,} tokens is too small to train on and to hold text out",
            "data.block",
            f"data.block={least} at least; millions shuffle better",
        )
    usual = type(train).model_fields["cooldown"].default
    if train.cooldown != usual and train.schedule != "wsd":
        yield (
            f"the schedule '{train.schedule}' has no cooldown",
            "train.cooldown train.schedule",
            "train.schedule=wsd, or leave train.cooldown out",
        )
    if config.eval.prompts and config.eval.samples == 0:
        yield (
            "prompts are given, but no samples are written",
            "eval.prompts eval.samples",
            "leave eval.samples=0 or the prompts out",
        )
    if (tokens := max(shape.tokens for shape in train.shapes)) > MOST:
        yield (
            f"a step of {tokens:,} tokens is more than any machine holds",
            f"train.rows train.accumulate train.seq_len{' train.stages' if train.stages else ''}",
            "a smaller train.rows or train.accumulate",
        )
    yield from _impossible_stages(train)
    try:
        parse_policy(config.kernels)
    except ConfigError as error:
        yield error.what, "kernels", error.fix


def _impossible_stages(train: TrainConfig) -> Iterator[tuple[str, str, str | None]]:
    """Yield the problems of a run's stages, in the form of :func:`_impossible`."""
    form, before, steps = "train.stages=[{until=0.25, rows=32}]", 0.0, train.steps or 10**6
    for number, (stage, shape) in enumerate(zip(train.stages, train.shapes, strict=False), 1):
        what, keys = f"stage {number}, which ends at {stage.until:g} of the run,", "train.stages"
        if int(stage.until * steps + 1e-6) <= int(before * steps + 1e-6):
            fix = "more steps" if stage.until > before else f"shares that rise: {form}"
            yield f"no step falls into {what}", f"{keys} train.steps", fix
        if not stage.model_fields_set - {"until"}:
            yield f"{what} changes nothing", keys, form
        if (length := shape.seq_len) > train.seq_len:
            fix = f"train.seq_len={length}, which is the longest row of a run, or a shorter stage"
            yield f"{what} has rows of {length:,} tokens", f"{keys} train.seq_len", fix
        before = stage.until
