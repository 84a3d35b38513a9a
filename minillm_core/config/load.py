"""The merge of all settings into one config: preset < file < ``key=value`` < flag, each value with its origin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from minillm_core.config import origins, schema
from minillm_core.config.check import check, check_option, refusal, validated, without_effect
from minillm_core.config.origins import FLAGS, Layer, Setting, flatten
from minillm_core.config.presets import DEPTH, read_preset
from minillm_core.config.schema import Config
from minillm_core.config.selection import Spec, check_name, select, taken_away
from minillm_core.config.values import is_number, show
from minillm_core.errors import ConfigError
from minillm_core.text import few


@dataclass(frozen=True)
class Loaded:
    """A config with the origin of each of its values.

    ``origins`` contains every key of the config (``train.lr``, ``seed``), every plugin
    (``plugins.NAME``) and every option given (``NAME.option``).
    """

    config: Config
    origins: dict[str, str]
    specs: dict[str, Spec] = field(default_factory=dict)  # plugin -> its name or file
    notes: tuple[str, ...] = ()  # notes to print: how values were chosen
    command: tuple[str, ...] = ()  # the command as typed; empty: from Python
    branch: Any = None  # the ``train.initial.Branch`` whose weights a new run begins with

    @property
    def preset(self) -> str:
        """The preset's name."""
        return self.config.preset

    @property
    def seed(self) -> int:
        """The seed of the initial weights and of all randomness except the order of the data."""
        return self.config.seed

    @property
    def model(self) -> schema.ModelConfig:
        """The model's shape: layers, dim, heads, vocab, ..."""
        return self.config.model

    @property
    def train(self) -> schema.TrainConfig:
        """The training settings: steps, rows, seq_len, lr, ..."""
        return self.config.train

    @property
    def data(self) -> schema.DataConfig:
        """The data settings: paths, val, tokenizer, seed."""
        return self.config.data

    @property
    def eval(self) -> schema.EvalConfig:
        """The settings of evaluations during training: every, tokens, samples, ..."""
        return self.config.eval

    @property
    def checkpoint(self) -> schema.CheckpointConfig:
        """The checkpoint settings: every, minutes, keep, best."""
        return self.config.checkpoint

    @property
    def plugins(self) -> Mapping[str, Mapping[str, Any]]:
        """Plugin -> the options given."""
        return self.config.plugins


def load(
    *,
    preset: str | None = None,
    file: Path | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    plugins: str | None = None,
    recorded: Layer | None = None,
    branch: bool = False,
    initial: Layer | None = None,
    default_preset: Callable[[], tuple[str, str]],
) -> Loaded:
    """Load the config of a run.

    Args:
        preset: the value of ``--preset``: a preset, or a settings file (``./best.toml``) that names one.
        file: the ``-c`` file.
        assignments: ``key=value`` arguments.
        flags: flag (a key of :data:`FLAGS`) -> its value; None: the flag was not given.
        settings: key -> value, from Python: ``{"train.lr": 0.01, "muon.momentum": 0.9}``.
        plugins: the value of ``--plugins``: ``a,b,-c,./x.py:X``.
        recorded: all settings of the run to resume; they replace the preset.
        branch: ``recorded`` belongs to the run that a new run branches from.
        initial: the settings of a model directory, above the preset.
        default_preset: called if no source names a preset; returns its name and the reason.

    Raises:
        ConfigError: an unusable setting; with its place and the fix.
    """
    upper = _upper_layers(file, assignments, flags or {}, settings, preset)
    if (depth := (flags or {}).get("--depth")) is not None:
        default_preset = partial(tuple[str, str], (DEPTH, "--depth"))
    if recorded is None:
        chosen, notes = _preset(upper, default_preset)
        document = read_preset(chosen.value, origin=chosen.where)
        layers = [flatten(document, origin=f"preset {chosen.value}"), *upper]
        if initial is not None:
            if taken := set(layers[0].named) - taken_away(plugins):
                initial.without |= taken
                notes.append(
                    f"the plugins of preset {chosen.value} are for a model trained from scratch and are "
                    f"left out: {few(sorted(taken), 20)}; --plugins adds the ones you want"
                )
            layers.insert(1, initial)
    else:
        chosen, notes = _same_preset(recorded, upper), []
        layers = [recorded, *upper]
    notes += [note for layer in upper for note in layer.notes]
    if depth is not None:
        _check_depth(depth, layers, chosen)
    budget, cleared = _budget(layers)
    notes += _followed(layers, cleared)

    named = _named(layers)
    specs, named_by = select(named, plugins, goes_on=recorded is not None and not branch)
    without = taken_away(plugins).union(*(layer.without for layer in layers)) - set(specs)
    if initial is not None:  # options in a model directory apply only if the run has their plugin
        for key in [*initial.settings]:
            if key not in schema.FIELDS and key.partition(".")[0] not in specs:
                del initial.settings[key]
    merged, options = _merged(layers, set(specs), without)
    merged["preset"] = chosen
    for key, by in cleared.items():
        notes.append(f"{budget} ({by}) replaces {key} ({merged.pop(key).origin})")

    options = {name: options.get(name, {}) for name in specs}
    values = {name: {key: one.value for key, one in its.items()} for name, its in options.items()}
    if initial is not None:
        notes += [
            f"{key} comes from the model directory; {key}=... overrides it"
            for key, own in initial.settings.items()
            if key not in schema.FIELDS and _last(layers, key) is own
        ]
    config = validated(merged, values)
    origins = {key: merged[key].origin if key in merged else "default" for key in schema.FIELDS}
    origins |= {key: f"cleared by {by}" for key, by in cleared.items()}
    origins |= {f"plugins.{name}": origin for name, origin in named_by.items()}
    for name, table in options.items():
        origins |= {f"{name}.{option}": setting.origin for option, setting in table.items()}
    check(config, origins)
    notes += without_effect(config.mesh)
    return Loaded(config, dict(sorted(origins.items())), specs, tuple(notes))


def given(key: str, **sources: Any) -> Any:
    """Return the value of ``key`` from any source except the preset; None if no source sets it.

    Args:
        key: the key of a setting.
        sources: preset, file, assignments, flags and settings, as :func:`load` takes them.

    Raises:
        ConfigError: the file or an argument cannot be read.
    """
    setting = _last(_upper_layers(**sources), key)
    return setting.value if setting else None


def absolute(config: Config) -> Config:
    """Return the config with absolute paths, so that a run can be resumed from another folder."""

    def seen(path: str | None) -> str | None:
        return str(Path(path).expanduser().absolute()) if path else path

    data = {
        "paths": tuple(map(seen, config.data.paths)),
        "val": seen(config.data.val) if isinstance(config.data.val, str) else config.data.val,
        "tokenizer": seen(config.data.tokenizer),
    }
    changed = {"data": config.data.model_copy(update=data), "init": seen(config.init)}
    return config.model_copy(update=changed)


def _upper_layers(
    file: Path | None,
    assignments: Sequence[str],
    flags: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
) -> list[Layer]:
    # --preset may name a settings file as well, of lower priority than -c
    named = Path(preset) if preset and preset.endswith(".toml") else None
    layers = [origins.from_file(one) for one in (named, file) if one]
    typed = origins.from_assignments(assignments), origins.from_flags(flags)
    if preset is not None and named is None:
        typed[1].add("preset", Setting(preset, "--preset", f"--preset {preset}"))
    for key in typed[0].settings.keys() & typed[1].settings:
        typed[1].notes.append(f"{key} is given twice; {typed[1].settings[key].where} holds")
    return [*layers, *typed, origins.from_python(settings or {})]


def _last(layers: Iterable[Layer], key: str) -> Setting | None:
    found = [layer.settings[key] for layer in layers if key in layer.settings]
    return found[-1] if found else None


def _preset(
    upper: Sequence[Layer], default: Callable[[], tuple[str, str]]
) -> tuple[Setting, list[str]]:
    """Return the preset's name with its origin, and notes on the choice."""
    if (chosen := _last(upper, "preset")) is None:
        name, reason = default()
        return Setting(name, "device", f"this machine: {reason}"), [
            f"no --preset given; using {name}, the default for {reason}"
        ]
    if not isinstance(chosen.value, str):
        raise ConfigError(f"preset must be a name, not {show(chosen.value)}", where=chosen.where)
    return chosen, []


def _same_preset(recorded: Layer, upper: Sequence[Layer]) -> Setting:
    """Return the preset of the resumed run.

    Raises:
        ConfigError: another preset is given.
    """
    first = recorded.settings["preset"]
    if (asked := _last(upper, "preset")) is not None and asked.value != first.value:
        raise ConfigError(
            f"the run was started from preset {first.value}, not {show(asked.value)}",
            where=asked.where,
            fix="leave it out, or start a new run in another --out",
        )
    return first


def _named(layers: Iterable[Layer]) -> dict[str, Setting]:
    """Return the plugins that the layers name; a plugin's origin is the last layer that names it."""
    named: dict[str, Setting] = {}
    for layer in layers:
        for name in layer.without:
            named.pop(name, None)
        for name, setting in layer.named.items():
            check_name(name, where=setting.where)
            named[name] = setting
    return named


def _merged(
    layers: Iterable[Layer], plugins: set[str], without: set[str]
) -> tuple[dict[str, Setting], dict[str, dict[str, Setting]]]:
    """Merge the layers into the settings of the config, and of each plugin.

    Args:
        layers: the layers, lowest priority first.
        plugins: the plugins of the run.
        without: the removed plugins; their options in a preset or a file are dropped.

    Raises:
        ConfigError: a key that is neither in the config nor an option of a plugin of this run; or an
            option for a plugin removed in the same command.
    """
    settings: dict[str, Setting] = {}
    options: dict[str, dict[str, Setting]] = {}
    for layer in layers:
        for key, setting in layer.settings.items():
            owner, _, option = key.partition(".")
            if owner in plugins and option:
                check_option(key, setting)
                options.setdefault(owner, {})[option] = setting
            elif owner in without and option:
                if layer.typed:
                    raise ConfigError(
                        f"plugin '{owner}' is removed, but its option {key} is given",
                        where=setting.where,
                        fix=f"leave out {key}, or -{owner} in --plugins",
                    )
            elif key in schema.FIELDS:
                settings[key] = setting
            else:
                raise refusal(key, setting, plugins)
    return settings, options


def _check_depth(depth: Any, layers: Sequence[Layer], preset: Setting) -> None:
    """Refuse ``--depth`` if no setting follows it, or outside the range that the preset defines.

    Raises:
        ConfigError: with the valid depths.
    """
    key = FLAGS["--depth"]
    knots = [each.knots for layer in layers for each in layer.follow.values() if each.dial == key]
    ends = [(one[0][0], one[-1][0]) for one in knots]
    if not ends:
        raise ConfigError(
            f"no setting of preset {preset.value} follows {key}",
            where=f"--depth {depth}",
            fix=f"--preset {DEPTH} --depth {depth}; or {key}={depth}, which changes nothing else",
        )
    least, most = max(low for low, _ in ends), min(high for _, high in ends)
    if not least <= depth <= most:
        raise ConfigError(
            f"preset {preset.value} goes from {least} to {most} layers",
            where=f"--depth {depth}",
            fix=f"--depth {least if depth < least else most}, or settings of your own",
        )


def _followed(layers: Sequence[Layer], cleared: Mapping[str, str]) -> list[str]:
    """Set the settings that follow other settings, in the declaring layer; return notes on exceptions."""
    notes = []
    for layer in layers:
        for key, one in layer.follow.items():
            dial = _last(layers, one.dial)
            if dial is None or one.dial in cleared:
                notes.append(f"{key} follows {one.dial}, which is not given: it keeps its value")
            elif is_number(dial.value):  # other values are refused later, in validation
                layer.settings[key] = one.at(dial.value)
    return notes


_BUDGETS = ("train.steps", "train.minutes")


def _budget(layers: Sequence[Layer]) -> tuple[str, dict[str, str]]:
    """Choose steps or minutes by the highest layer; return the key, and the origin that cleared the other.

    Raises:
        ConfigError: a layer sets both, or no layer sets either.
    """
    seen: dict[str, str] = {}  # key -> origin; the highest layer's first
    for layer in reversed(layers):
        here = [key for key in _BUDGETS if key in layer.settings]
        if len(here) > 1:
            raise ConfigError(
                "train.steps and train.minutes are both given",
                where=" and ".join(layer.settings[key].where for key in here),
                fix="one of them: a number of steps, or minutes by the clock",
            )
        for key in here:
            seen.setdefault(key, layer.settings[key].origin)
    if not seen:
        raise ConfigError(
            "neither train.steps nor train.minutes is given", fix="--steps N, or train.minutes=1.5"
        )
    (chosen, by), *others = seen.items()
    return chosen, {key: by for key, _ in others}
