"""The search space: recipes, the moves between them, and the candidate values of each setting.

A recipe is a difference from the baseline settings of the search: plugins, and settings by key. A move
changes one place of it: adds or removes a plugin, changes a setting, or the shape of the model. Only
planning decides which recipes are valid; this module does not.
"""

from __future__ import annotations

import inspect
import math
import random
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from types import NoneType
from typing import Any, TypeGuard, get_args

from minillm_core import MinillmError, Plan, Plugin, Refusal
from minillm_core.commands import listed, nearest, rounded
from minillm_core.inspection import Config, find_plugin, installed_plugins
from minillm_core.studies import plugins_of, recipe_names
from minillm_lab.card import BadCard, card_sources, read_cards

SECTIONS = ("model", "train")
"""Tables of settings that may be searched; the others define the data and the measurement."""

FIXED = {
    "model.vocab": "another tokenizer has another loss a token",
    "train.steps": "--minutes, --tokens or --target is the length",
    "train.minutes": "--minutes, --tokens or --target is the length",
    "train.seq_len": "the loss of a longer context is another",
    "train.stages": "the plugins batch_schedule and seq_schedule change the sizes of batches",
}
"""Settings that cannot be searched, as they make losses incomparable or set the length -> the reason."""

SHAPE = ("layers", "dim", "heads", "kv_heads", "hidden")
"""Settings of the model that a shape move changes together."""

SHAPES = ((0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 0.75), (1.0, 1.5), (0.5, 0.5), (2.0, 0.75))
"""Factors on layers and on width."""

HIDDEN = (0.5, 1.5, 2.0)
"""Factors on the MLP's hidden width alone."""

USUAL: Mapping[str, tuple[Any, ...]] = {
    "train.warmup": (0.0, 0.02, 0.05, 0.1, 0.2),
    "train.schedule": ("cosine", "wsd"),
    "train.cooldown": (0.2, 0.4, 0.6, 0.8, 1.0),
    "train.weight_decay": (0.0, 0.01, 0.1, 0.3),
    "train.clip": (0.0, 0.5, 1.0),
    "train.betas": ((0.8, 0.95), (0.9, 0.95), (0.9, 0.99)),
    "train.epsilon": (1e-12, 1e-10, 1e-8),
}
"""Settings -> values to try, unless a space file sets others."""


WIDEST, LARGEST = 32, 1e100
"""Maximum number of doublings that a range spans, and the largest number that one contains."""


@dataclass(frozen=True)
class Recipe:
    """A difference from a search's baseline settings."""

    plugins: frozenset[str] = frozenset()  # all plugins of the run
    settings: Mapping[str, Any] = field(default_factory=dict)  # "train.lr", "muon.lr" -> value

    @property
    def key(self) -> str:
        """A key that identifies the recipe."""
        return repr((sorted(self.plugins), sorted(self.settings.items())))


@dataclass(frozen=True)
class Move:
    """A change of a recipe in one place, or a combination of such changes."""

    name: str  # "+muon", "train.lr=0.006", "2 layers of 128"
    adds: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Move, ...] = ()  # the combined moves; empty: a single change

    def applied(self, recipe: Recipe) -> Recipe:
        """Return the changed recipe; removing a plugin also removes its options."""
        settings = {
            key: value
            for key, value in {**recipe.settings, **self.settings}.items()
            if key.partition(".")[0] not in self.drops
        }
        return Recipe((recipe.plugins | self.adds) - self.drops, settings)

    def overlaps(self, other: Move) -> bool:
        """Return whether both moves change the same place."""
        return bool(
            self.settings.keys() & other.settings.keys()
            or (self.adds | self.drops) & (other.adds | other.drops)
        )


def together(moves: Sequence[Move]) -> Move:
    """Combine moves that change different places into one."""
    return Move(
        " ".join(one.name for one in moves),
        frozenset().union(*(one.adds for one in moves)),
        frozenset().union(*(one.drops for one in moves)),
        {key: value for one in moves for key, value in one.settings.items()},
        tuple(part for one in moves for part in one.parts or (one,)),
    )


def parts_of(recipe: Recipe, base: Recipe) -> list[Move]:
    """List the changes of a recipe, each as the move that reverts it."""
    moves = [
        Move(f"+{name}", drops=frozenset({name})) for name in sorted(recipe.plugins - base.plugins)
    ]
    moves += [
        Move(f"-{name}", adds=frozenset({name})) for name in sorted(base.plugins - recipe.plugins)
    ]
    shape = {key: recipe.settings[key] for key in recipe.settings if _of_shape(key)}
    if shape:
        moves.append(Move(_typed(shape), settings=dict.fromkeys(shape)))
    moves += [
        Move(_typed({key: value}), settings={key: None})
        for key, value in sorted(recipe.settings.items())
        if not _of_shape(key)
    ]
    return moves


def without(recipe: Recipe, part: Move) -> Recipe:
    """Revert a part of a recipe; in a reverting move a setting has the value None."""
    changed = part.applied(recipe)
    return replace(
        changed, settings={key: one for key, one in changed.settings.items() if one is not None}
    )


@dataclass(frozen=True)
class Prospect:
    """What is known of a plugin before a search."""

    gain: float  # the end nearer to 0 of the interval on its technique card, in nats; 0: none known
    company: tuple[str, ...] = ()  # plugins beside which it was measured

    @property
    def helps(self) -> bool:
        """Whether a gain was measured."""
        return self.gain < 0


@dataclass(frozen=True)
class Space:
    """A search space."""

    plugins: tuple[str, ...]  # that may be added or dropped, in the order of trial
    values: Mapping[str, tuple[Any, ...]]  # a setting or a plugin's option -> its values
    parameters: int  # maximum, of a model
    shapes: bool = True  # include moves that change layers, widths and heads together
    options: bool = True  # try the values that plugins declare for their options
    prospects: Mapping[str, Prospect] = field(default_factory=dict)  # of plugins, the best first

    def data(self) -> dict[str, Any]:
        """Return the space as JSON."""
        return {
            "plugins": list(self.plugins),
            "values": {key: list(some) for key, some in self.values.items()},
            "parameters": self.parameters,
            "shapes": self.shapes,
            "options": self.options,
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Space:
        """Parse a space from JSON: the inverse of :meth:`data`."""
        values = {key: tuple(map(_frozen, some)) for key, some in data["values"].items()}
        return cls(**{**data, "plugins": tuple(data["plugins"]), "values": values})

    def moves(self, recipe: Recipe, plan: Plan, base: Recipe) -> list[Move]:
        """List the moves from a recipe: settings and shapes alternate with plugins.

        Args:
            recipe: the starting point.
            plan: its plan, which holds the current values.
            base: the baseline recipe, whose plugins may be dropped.
        """
        found = [*self._settings(plan), *(self._shapes(plan) if self.shapes else ())]
        found += [
            Move(f"-{name}", drops=frozenset({name}))
            for name in sorted(base.plugins & recipe.plugins & {*self.plugins})
        ]
        names = [one for one in self.plugins if one not in recipe.plugins | base.plugins]
        plugins = [Move(f"+{name}", adds=frozenset({name})) for name in names]
        both = zip_longest(found, plugins)  # alternate, so that a small budget tries both kinds
        return [one for pair in both for one in pair if one is not None]

    def inactive(self, plan: Plan) -> list[str]:
        """List the plugins whose options have values here, and that are neither active nor to be added."""
        absent = {key.partition(".")[0] for key in self.values if present(plan, key) is ABSENT}
        return sorted(absent - {*self.plugins})

    def stacks(self, recipe: Recipe, left_out: Collection[str]) -> Iterator[list[Move]]:
        """Yield the plugins whose technique cards show a gain, the largest first, as moves that add them.

        A plugin that was measured beside others comes with those of them that the recipe lacks.

        Args:
            recipe: the starting point.
            left_out: names of moves that are not to be tried again.
        """
        for name, prospect in self.prospects.items():
            moves = [
                Move(f"+{one}", adds=frozenset({one}))
                for one in (*prospect.company, name)
                if one not in recipe.plugins
            ]
            known = all(move.adds <= {*self.plugins} for move in moves)
            tried = any(move.name in left_out for move in moves)
            if prospect.helps and name not in recipe.plugins and known and not tried:
                yield moves

    def additions(self, move: Move) -> list[Move]:
        """List the ways to add a plugin without effect at its defaults: one per declared option value."""
        if len(move.adds) != 1 or move.settings or not self.options:
            return []
        (name,) = move.adds
        return [
            replace(move, name=f"{move.name} {_typed({key: value})}", settings={key: value})
            for key, values in _declared(name, find_plugin(name).cls)
            for value in values
        ]

    def _settings(self, plan: Plan) -> Iterator[Move]:
        declared: dict[str, tuple[Any, ...]] = {}
        if self.options:
            for one in plan.active:
                declared |= dict(_declared(one.name, type(one.plugin)))
        for key, values in {**self.values, **declared}.items():
            now = present(plan, key)
            if now is ABSENT:
                continue
            for value in _neighbours(now, values):
                yield Move(_typed({key: value}), settings={key: value})

    def _shapes(self, plan: Plan) -> Iterator[Move]:
        for shape in shapes(plan):
            yield Move(_typed(shape), settings=shape)


ABSENT = object()
"""The value of an option whose plugin is not in the plan."""


def present(plan: Plan, key: str) -> Any:
    """Return the value of a setting or a plugin's option in a plan."""
    owner, _, name = key.partition(".")
    if owner in SECTIONS:
        return getattr(getattr(plan.config, owner), name)
    plugins = {one.name: one.plugin for one in plan.active}
    return getattr(plugins[owner], name) if owner in plugins else ABSENT


def shapes(plan: Plan) -> Iterator[dict[str, int]]:
    """Yield model shapes near a plan's, keeping head_dim and the ratio of key-value heads."""
    model = plan.config.model
    width, shared = model.head_width, model.heads // model.kv_heads
    now = {f"model.{key}": getattr(model, key) for key in SHAPE}
    for deeper, wider in SHAPES:
        dim = round(model.dim * wider / 8) * 8
        heads = max(1, round(dim / width))
        if model.head_dim is None and (dim % heads or dim // heads % 2):
            continue
        found = {
            "model.layers": max(1, round(model.layers * deeper)),
            "model.dim": dim,
            "model.heads": heads,
            "model.kv_heads": heads // shared if heads % shared == 0 else heads,
            "model.hidden": max(8, round(model.hidden * wider / 8) * 8),
        }
        if changed := {key: value for key, value in found.items() if value != now[key]}:
            yield changed
    for factor in HIDDEN:
        yield {"model.hidden": max(8, round(model.hidden * factor / 8) * 8)}


def usual_space(plan: Plan, plugins: Sequence[str], parameters: int) -> Space:
    """Return the default space, for a search without a space file.

    Args:
        plan: of the baseline settings.
        plugins: that may be added or dropped.
        parameters: maximum, of a model.
    """
    train = plan.config.train
    values = {
        "train.lr": tuple(float(f"{train.lr * 2.0**power:.3g}") for power in range(-3, 4)),
        "train.rows": tuple(sorted({max(1, train.rows * 2**p // 4) for p in range(5)})),
        **USUAL,
    }
    return Space(tuple(plugins), values, parameters)


def installed(named: Collection[str], seed: int) -> list[str]:
    """List the installed plugins except broken ones and those in ``named``, in an order set by the seed."""
    found = [one.name for one in installed_plugins() if not one.broken and one.name not in named]
    random.Random(seed).shuffle(found)
    return found


def prospects(
    plugins: Mapping[str, Any],
    *,
    equal_seconds: bool,
    leave_out: Callable[[str], None] | None = None,
) -> dict[str, Prospect]:
    """Read the technique cards of plugins.

    Args:
        plugins: name -> the name, or the file to load it from.
        equal_seconds: use the effect at equal time, which some cards lack, else at equal tokens.
        leave_out: called with a line for each plugin that cannot be imported, which is left out; None: that
            is an error.

    Returns:
        Plugin -> what its newest card shows, the largest gain first. Of those without a gain or a card the
        ones that minillm's recipes name are first, and measured harm is last.

    Raises:
        MinillmError: a plugin cannot be imported, and ``leave_out`` is None.
    """
    recipes = [plugins_of(name) for name in recipe_names()]
    found = {}
    for name, spec in plugins.items():
        try:
            cls = find_plugin(str(spec)).cls
        except MinillmError as error:
            if leave_out is None:
                raise
            leave_out(f"not tried: {name}: {error.what}")
            continue
        try:
            cards = read_cards(name, card_sources(inspect.getfile(cls)))
        except BadCard:  # plugins info says why
            cards = []
        shown = (cards[0].equal_seconds if equal_seconds else cards[0]) if cards else None
        if shown is None or shown.low <= 0 <= shown.high:
            found[name] = Prospect(0.0)
        else:
            gain = shown.high if shown.high < 0 else shown.low
            found[name] = Prospect(gain, cards[0].company)
    named = {one: sum(one in recipe for recipe in recipes) for one in found}
    return dict(sorted(found.items(), key=lambda one: (one[1].gain, -named[one[0]])))


KEYS = ("plugins", "parameters", "shapes", "options")
"""Top-level keys of a space file besides the tables of settings and plugin options."""


def read_space(path: Path, usual: Space, names: Sequence[str]) -> Space:
    """Read a space file; entries that it lacks keep their value in ``usual``.

    ::

        plugins = ["muon", "qk_norm"]      # or "installed"; none without this line
        parameters = 5_000_000             # of a model at most
        shapes = true                      # layers, widths and heads, together
        options = false                    # values that plugins declare for their options

        [train]
        lr = [1e-3, 3e-3, 1e-2]
        rows = { from = 4, to = 32 }       # 4, 8, 16, 32

        [muon]
        lr = { from = 0.01, to = 0.04 }

    Args:
        path: a TOML file.
        usual: the default space.
        names: of all installed plugins.

    Raises:
        Refusal: the file cannot be read, or has an invalid key or value.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise _refused(path, "", f"the space file cannot be read: {why}", "a TOML file") from None
    plugins = document.pop("plugins", [])
    if plugins == "installed":
        plugins = list(usual.plugins)
    kinds = {"parameters": int, "shapes": bool, "options": bool}
    given = {key: document.pop(key) for key in kinds if key in document}
    for key, value in given.items():
        if type(value) is not kinds[key]:
            word = "a whole number" if kinds[key] is int else "true or false"
            raise _refused(path, key, f"{key} must be {word}, not {value!r}", f"{key} = ...")
    if given.get("parameters", 1) < 1:
        what = f"parameters must be above 0, not {given['parameters']}"
        raise _refused(
            path, "parameters", what, f"parameters = {usual.parameters}, or leave it out"
        )
    if not isinstance(plugins, list) or not all(isinstance(one, str) for one in plugins):
        raise _refused(
            path, "plugins", "plugins must be a list of names", 'plugins = ["muon"], or "installed"'
        )
    for name in plugins:
        if name not in names:
            raise _unknown(path, "plugins", name, names)
        if plugins.count(name) > 1:
            raise _refused(path, "plugins", f"{name} is named twice", "each plugin once")
    values = dict(_values(path, document, names))
    space = Space(
        tuple(plugins),
        values,
        given.get("parameters", usual.parameters),
        given.get("shapes", False),
        given.get("options", False),
    )
    if not (space.plugins or values or space.shapes or space.options):
        raise _refused(path, "", "the space is empty: nothing can be tried", "[train], lr = [...]")
    return space


def _values(
    path: Path, document: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for owner, table in document.items():
        if not isinstance(table, Mapping) or owner not in (*SECTIONS, *names):
            raise _unknown(path, owner, owner, [*KEYS, *SECTIONS, *names])
        if owner in SECTIONS:
            known: Mapping[str, Any] = Config.model_fields[owner].annotation.model_fields  # type: ignore[union-attr]
        else:
            known = find_plugin(owner, where=str(path)).cls.model_fields
        for name, given in table.items():
            key = f"{owner}.{name}"
            if name not in known:
                raise _unknown(path, key, name, known)
            if key in FIXED:
                raise _refused(path, key, f"{key} cannot be searched: {FIXED[key]}", "leave it out")
            values = _expanded(path, key, given)
            if _whole(known[name].annotation) and any(isinstance(one, float) for one in values):
                raise _refused(
                    path,
                    key,
                    f"{key} takes whole numbers, not {given!r}",
                    f"{name} = {{ from = 2, to = 8 }}, or a list of whole numbers",
                )
            yield key, values


def _expanded(path: Path, key: str, given: Any) -> tuple[Any, ...]:
    """Expand a range: geometric by about 2 if it starts above 0 and spans a doubling, else five even steps."""
    if isinstance(given, list) and given:
        return tuple(map(_frozen, given))
    ends = given if isinstance(given, Mapping) and set(given) == {"from", "to"} else {}
    low, high = ends.get("from"), ends.get("to")
    if not _is_number(low) or not _is_number(high):
        raise _refused(
            path,
            key,
            f"{key} must be a list of values or a range, not {given!r}",
            f"{key.partition('.')[2]} = [0.001, 0.003], or {{ from = 0.001, to = 0.01 }}",
        )
    if not low < high:
        raise _refused(path, key, f"{key} goes from {low} to {high}", "the smaller number first")
    if not -LARGEST <= low < high <= LARGEST or (
        low > 0 and math.log2(high) - math.log2(low) > WIDEST
    ):
        raise _refused(
            path,
            key,
            f"the range of {key} from {low} to {high} is too wide: it may double {WIDEST} times",
            "ends that are nearer, or a list of the values",
        )
    whole = isinstance(low, int) and isinstance(high, int)
    if low > 0 and high >= 2 * low:
        count = round(math.log2(high / low))
        some = [low * (high / low) ** (n / count) for n in range(count + 1)]
    else:
        some = [low + (high - low) * n / 4 for n in range(5)]
    return tuple(dict.fromkeys(round(one) if whole else float(f"{one:.3g}") for one in some))


def _whole(annotation: Any) -> bool:
    """Return whether a setting of this type is a whole number, or none."""
    return {*(get_args(annotation) or (annotation,))} <= {int, NoneType}


def _frozen(value: Any) -> Any:
    """Return a value of a setting as settings have it: a tuple in place of a list."""
    return tuple(value) if isinstance(value, list) else value


def _declared(plugin: str, cls: type[Plugin]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield (option, values) of a plugin's options that declare values to search."""
    for name, info in cls.model_fields.items():
        extra = info.json_schema_extra
        if isinstance(extra, dict) and isinstance(some := extra.get("search"), list) and some:
            yield f"{plugin}.{name}", tuple(some)


def _neighbours(now: Any, values: Sequence[Any]) -> list[Any]:
    """List the values adjacent to the current one on both sides; all others if they have no order."""
    others = [one for one in values if one != now]
    if not _is_number(now) or not all(map(_is_number, others)):
        return others
    ordered = sorted(others)
    below, above = bisect_left(ordered, now), bisect_right(ordered, now)
    return [*ordered[max(0, below - 1) : below], *ordered[above : above + 1]]


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_shape(key: str) -> bool:
    owner, _, name = key.partition(".")
    return owner == "model" and name in SHAPE


def _typed(settings: Mapping[str, Any]) -> str:
    """Format settings, close to their command-line form."""
    return " ".join(f"{key}={_shown(value)}" for key, value in settings.items())


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_shown, value))}]"
    return (
        rounded(repr(value))
        if isinstance(value, float)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _unknown(path: Path, key: str, name: str, known: Iterable[str]) -> Refusal:
    known = [*known]
    meant = nearest(name, known)
    fix = f"did you mean {meant}?" if meant else f"known: {listed(known[:12])}"
    return _refused(path, key, f"there is no '{name}' to search", fix)


def _refused(path: Path, key: str, what: str, fix: str) -> Refusal:
    return Refusal(what, where=f"--space {path}" + (f", {key}" if key else ""), fix=fix)
