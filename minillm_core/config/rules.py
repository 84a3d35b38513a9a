"""What settings must hold together, refused while loading and named with where each came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from minillm_core.config.kernels import parse_policy
from minillm_core.config.schema import Config
from minillm_core.config.values import show
from minillm_core.errors import ConfigError

__all__ = ["check"]


def check(config: Config, origins: Mapping[str, str]) -> None:
    """Refuse settings that are each well-typed and together impossible.

    Raises:
        ConfigError: naming the keys concerned, their values and their origins.
    """
    for rule in (_heads, _groups, _rotary, _betas, _fraction, _cooldown, _kernels):
        rule(config, _refuser(config, origins))


def _refuser(config: Config, origins: Mapping[str, str]) -> Callable[..., ConfigError]:
    def refusal(what: str, *keys: str, fix: str) -> ConfigError:
        places = []
        for key in keys:
            value: object = config
            for part in key.split("."):
                value = getattr(value, part)
            places.append(f"{key} = {show(value)} ({origins.get(key, 'default')})")
        return ConfigError(what, where=", ".join(places), fix=fix)

    return refusal


def _heads(config: Config, refusal: Callable[..., ConfigError]) -> None:
    model = config.model
    if model.dim % model.heads:
        pairs = 2 * model.heads  # a head holds pairs of features
        wide = -(-model.dim // pairs) * pairs
        raise refusal(
            f"{model.dim} features cannot be split over {model.heads} heads",
            *("model.dim", "model.heads"),
            fix=f"a dim that heads divides, such as model.dim={wide}",
        )


def _groups(config: Config, refusal: Callable[..., ConfigError]) -> None:
    model = config.model
    if model.heads % model.kv_heads:
        fits = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        raise refusal(
            f"{model.heads} query heads cannot share {model.kv_heads} key and value heads evenly",
            *("model.heads", "model.kv_heads"),
            fix=f"model.kv_heads must divide model.heads: {_few(fits)}",
        )


def _rotary(config: Config, refusal: Callable[..., ConfigError]) -> None:
    model = config.model
    if (width := model.dim // model.heads) % 2:
        raise refusal(
            f"a head {width} wide cannot be rotated: rotary positions turn pairs of features",
            *("model.dim", "model.heads"),
            fix=f"an even dim / heads, such as model.dim={(width + 1) * model.heads}",
        )


def _betas(config: Config, refusal: Callable[..., ConfigError]) -> None:
    if not all(0 <= beta < 1 for beta in config.train.betas):
        raise refusal(
            "AdamW's decay rates are at least 0 and below 1",
            *("train.betas",),
            fix="train.betas=[0.9,0.95]",
        )


def _fraction(config: Config, refusal: Callable[..., ConfigError]) -> None:
    held_out = config.data.val
    if isinstance(held_out, float) and not 0 < held_out < 1:
        raise refusal(
            "the held-out fraction lies between 0 and 1",
            *("data.val",),
            fix="data.val=0.05, or the path of a file to validate on",
        )


def _cooldown(config: Config, refusal: Callable[..., ConfigError]) -> None:
    train = config.train
    usual = type(train).model_fields["cooldown"].default
    if train.cooldown != usual and train.schedule != "wsd":
        raise refusal(
            f"the schedule '{train.schedule}' has no cooldown",
            *("train.cooldown", "train.schedule"),
            fix="train.schedule=wsd, or leave train.cooldown out",
        )


def _kernels(config: Config, refusal: Callable[..., ConfigError]) -> None:
    try:
        parse_policy(config.kernels)
    except ConfigError as error:
        raise refusal(error.what, *("kernels",), fix=error.fix) from error


def _few(numbers: list[int]) -> str:
    shown = numbers if len(numbers) <= 8 else [*numbers[:4], *numbers[-4:]]
    return ", ".join(map(str, shown))
