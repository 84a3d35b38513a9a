"""Tests of kernel policies: the setting's syntax, and the policy that it defines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.config.kernels import AUTO, Policy, parse_policy
from minillm_core.config.load import load
from minillm_core.errors import ConfigError

NAMES = st.text("abcdefgh_.:-0123456789", min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", AUTO),
        ("strict", Policy("strict")),
        ("reference", Policy("reference")),
        ("attention=sdpa", Policy(named={"attention": "sdpa"})),
        ("rms_norm=reference", Policy(named={"rms_norm": "reference"})),
        ("auto,attention=sdpa", Policy(named={"attention": "sdpa"})),
        ("strict,attention=sdpa", Policy("strict", {"attention": "sdpa"})),
        (
            "linear=fp8, reference, attention=sdpa",
            Policy("reference", {"attention": "sdpa", "linear": "fp8"}),
        ),
    ],
)
def test_a_word_names_or_both(text: str, expected: Policy) -> None:
    assert parse_policy(text) == expected


@given(
    st.builds(
        Policy, st.sampled_from(["auto", "strict", "reference"]), st.dictionaries(NAMES, NAMES)
    )
)
def test_a_policy_is_what_its_text_says(policy: Policy) -> None:
    assert parse_policy(str(policy)) == policy
    assert parse_policy(str(policy.naming("swiglu", "quick"))).named["swiglu"] == "quick"


WRONG = (
    ("fast", "'fast'"),
    ("auto,strict", "'strict'"),
    ("strict,strict", "'strict'"),
    ("attention=", "'attention='"),
    ("=sdpa", "'=sdpa'"),
    ("", "''"),
    ("strict,", "''"),
)


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_the_setting_takes_what_the_policy_takes_and_refuses_the_rest(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as alone:
        parse_policy(text)
    with pytest.raises(ConfigError) as loaded:
        load(flags={"--kernels": text}, default_preset=lambda: ("tiny", "test"))
    for refused in (alone.value, loaded.value):
        assert said in refused.what
        assert "strict,attention=sdpa" in (refused.fix or "")
    assert "(--kernels)" in (loaded.value.where or "")


TWICE = (
    ("attention=sdpa,attention=flex", "attention", "keep one: attention=sdpa or attention=flex"),
    ("attention=sdpa,strict,attention=sdpa", "attention", "keep one: attention=sdpa"),
    ("attention=sdpa,attention=", "attention", "keep one: attention=sdpa"),
    ("strict=yes,strict=no", "strict", "keep one: strict=yes or strict=no"),
)


@pytest.mark.parametrize(("text", "op", "fix"), TWICE)
def test_an_op_that_is_named_twice_is_said_to_be(text: str, op: str, fix: str) -> None:
    with pytest.raises(ConfigError) as alone:
        parse_policy(text)
    with pytest.raises(ConfigError) as loaded:
        load(flags={"--kernels": text}, default_preset=lambda: ("tiny", "test"))
    for refused in (alone.value, loaded.value):
        assert f"{op} is named twice" in refused.what
        assert refused.fix == fix
    assert "(--kernels)" in (loaded.value.where or "")


@pytest.mark.parametrize("text", ["strict", "strict,attention=sdpa", "attention=sdpa,linear=x"])
def test_the_setting_may_be_given_anywhere(text: str) -> None:
    config = load(assignments=[f'kernels="{text}"'], default_preset=lambda: ("tiny", "test")).config
    assert config.kernels == text
