"""Tests of options from the command line and TOML: strictly typed, with helpful errors."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from minillm_core.config.values import read_value
from minillm_core.errors import PluginError
from minillm_core.plugins.layers import Layers
from minillm_core.plugins.options import describe_option, option, validated
from minillm_core.plugins.plugin import Plugin

Share = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class Example(Plugin, api=1):
    """Options of every kind."""

    width: int = option(12, ge=1, le=64, help="features")
    lr: float = option(0.02, gt=0, help="learning rate")
    gated: bool = option(False, help="whether")
    tag: str = option("plain", min_length=1, help="a word")
    mark: str = option("<|mark|>", min_length=1, help="a token")
    adjust: Literal["shape", "match_rms"] = option("shape", help="which rule")
    betas: tuple[float, float] = option((0.9, 0.95), help="decay rates")
    windows: list[int] = option([4], help="sizes")
    limit: int | None = option(None, help="at most")
    layers: Layers = option("all", help="where")
    shares: tuple[Share, ...] = option((0.5,), min_length=1, help="of what")
    decay: tuple[Rate, Rate] | None = option((0.9, 0.95), help="of the rule; none: the run's")


class Demanding(Plugin, api=1):
    """An option without a default, a wrong default, and a check of both."""

    must: int = option(ge=3, help="needed")
    broken: int = option(0, ge=1, help="its default is wrong")

    @model_validator(mode="after")
    def _agree(self):
        if self.must < self.broken:
            raise ValueError("must is at least broken")
        return self


def refusal(cls: type[Plugin] = Example, **values: Any) -> PluginError:
    with pytest.raises(PluginError) as refused:
        validated(cls, "x", values)
    assert len(str(refused.value).splitlines()) <= 12
    return refused.value


values = st.fixed_dictionaries(
    {},
    optional={
        "width": st.integers(1, 64),
        "lr": st.floats(1e-9, 1e9) | st.integers(1, 9),
        "gated": st.booleans(),
        "tag": st.text(min_size=1),
        "adjust": st.sampled_from(["shape", "match_rms"]),
        "betas": st.lists(st.floats(0, 1), min_size=2, max_size=2),
        "windows": st.lists(st.integers(-(2**31), 2**31)),
        "limit": st.integers(-99, 99),
        "layers": st.sampled_from(["all", "every:3", [0, -1]]),
    },
)


@given(values)
def test_right_values_are_taken_and_come_back(given_values: dict[str, Any]) -> None:
    options = validated(Example, "x", given_values).options()
    assert given_values.items() <= options.items()
    assert validated(Example, "x", {k: v for k, v in options.items() if v is not None})


@given(st.text(min_size=1))
def test_an_unknown_option_is_refused(key: str) -> None:
    assume(key not in Example.__pydantic_fields__)
    given: dict[str, Any] = {key: 1}
    assert "has no option" in refusal(Example, **given).what


def test_an_unknown_option_has_a_nearest_name() -> None:
    assert "did you mean x.width?" in str(refusal(widht=1).fix)
    assert "leave it out" in str(refusal(type("None_", (Plugin,), {}, api=1), a=1).fix)


@pytest.mark.parametrize(
    ("key", "value", "takes", "types"),
    [
        ("width", "twelve", "an integer >= 1, <= 64", "x.width=12"),
        ("width", "12", "an integer", "x.width=12"),
        ("width", 1.5, "an integer", "x.width=12"),
        ("width", True, "an integer", "x.width=12"),
        ("width", 65, "<= 64", "x.width=12"),
        ("lr", 0, "a number > 0", "x.lr=0.02"),
        ("lr", "fast", "a number", "x.lr=0.02"),
        ("lr", math.inf, "a number", "x.lr=0.02"),
        ("lr", math.nan, "a number", "x.lr=0.02"),
        ("gated", 1, "true or false", "x.gated=false"),
        ("gated", "yes", "true or false", "x.gated=false"),
        ("tag", 5, "a string", "x.tag='\"5\"'"),
        ("adjust", "scale", '"shape" or "match_rms"', "x.adjust=shape"),
        ("betas", [0.9], "a list of 2, each a number", "x.betas='[0.9, 0.95]'"),
        ("windows", [1, "a"], "a list, each item an integer", "x.windows='[4]'"),
        ("limit", "None", "an integer or none", "x.limit=none (its default)"),
        ("width", "none", "an integer >= 1, <= 64", "x.width=12"),
        ("shares", [], "a list, each item a number > 0; at least 1 long", "x.shares='[0.5]'"),
        ("shares", [-1], "a list, each item a number > 0; at least 1 long", "x.shares='[0.5]'"),
        (
            "decay",
            [0.9, 1.5],
            "a list of 2, each a number >= 0, < 1 or none",
            "x.decay='[0.9, 0.95]'",
        ),
        ("tag", "", "a string at least 1 long", "x.tag=plain (its default)"),
        ("mark", "", "a string at least 1 long", "x.mark='<|mark|>' (its default)"),
        ("layers", "evry:2", '"all", "every:2"', "x.layers=all"),
        ("layers", [0.5], '"all", "every:2"', "x.layers=all"),
    ],
)
def test_an_ill_typed_option_says_what_to_type(
    key: str, value: Any, takes: str, types: str
) -> None:
    refused = refusal(**{key: value})
    assert f"option '{key}' of plugin 'x'" in refused.what
    assert takes in refused.what
    assert refused.where == f"x.{key}"
    assert types in str(refused.fix)


def test_none_is_typed_where_an_option_takes_it() -> None:
    assert validated(Example, "x", {"limit": 3, "decay": "none"}).options()["decay"] is None
    assert validated(Example, "x", {"limit": "none"}).options()["limit"] is None
    assert validated(Example, "x", {"tag": "none"}).options()["tag"] == "none"  # not converted


def test_what_a_refusal_says_to_type_is_taken() -> None:
    wrongs = {"width": "a", "betas": 3, "tag": 5, "adjust": "a", "layers": {}, "limit": "a"}
    for key, wrong in wrongs.items():
        typed = str(refusal(**{key: wrong}).fix).removeprefix(f"type x.{key}=")
        text = typed.removesuffix(" (its default)").removeprefix("'").removesuffix("'")
        validated(Example, "x", {key: read_value(text)})


def test_required_and_wrong_defaults() -> None:
    missing = refusal(Demanding)
    assert missing.what == "option 'must' of plugin 'x' is required: an integer >= 3"
    assert missing.fix == "type x.must=3"
    assert "the default of option 'broken'" in refusal(Demanding, must=3).what


def test_options_that_do_not_go_together() -> None:
    refused = refusal(Demanding, must=3, broken=4)
    assert "together: must is at least broken" in refused.what
    assert refused.where == "x.must=3, x.broken=4"


def test_what_the_author_raised_passes() -> None:
    class Raises(Plugin, api=1):
        @model_validator(mode="before")
        @classmethod
        def _check(cls, values: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        validated(Raises, "x", {})


def test_an_option_is_described() -> None:
    fields = Example.__pydantic_fields__
    assert describe_option("layers", fields["layers"])["default"] == "all"
    assert describe_option("betas", fields["betas"]) == {
        "name": "betas",
        "type": "a list of 2, each a number",
        "required": False,
        "default": [0.9, 0.95],
        "help": "decay rates",
    }
    must = describe_option("must", Demanding.__pydantic_fields__["must"])
    assert must["required"]
    assert "default" not in must
