"""Tests of references: only objects that can be found again have names."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.nn.reference import Function, json_arguments, reference_of, resolve


class Outer:
    class Inner:
        @staticmethod
        def free(x: int) -> int:
            return x + 1

        @classmethod
        def of(cls, x: int) -> int:
            return x + 2

        def bound(self) -> None: ...


def function(x: int, by: int = 1) -> int:
    return x * by


shadowed = function


def shadow() -> None: ...


hidden, shadow = shadow, None  # type: ignore[assignment]


@pytest.mark.parametrize("target", [Outer, Outer.Inner, Outer.Inner.free, Outer.Inner.of, function])
def test_what_a_reference_names_is_found_again(target: Any) -> None:
    reference = reference_of(target)
    assert reference == f"{__name__}:{target.__qualname__}"
    assert resolve(reference) == target


def test_a_reference_is_called_with_its_arguments() -> None:
    assert Function("core", reference_of(function), (("by", 4),)).call(3) == 12
    assert Function("core", reference_of(Outer.Inner.of)).call(3) == 5


def local() -> Any:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    "target",
    [
        lambda: None,
        local(),
        Outer(),
        Outer.Inner().bound,
        functools.partial(function, by=2),
        hidden,
        3,
    ],
)
def test_what_cannot_be_found_again_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="cannot be referred to"):
        reference_of(target)


scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
finite = scalar.filter(lambda v: not isinstance(v, float) or abs(v) != float("inf"))
value = st.recursive(finite, lambda inner: st.lists(inner, max_size=3), max_leaves=8)


@given(st.dictionaries(st.text(min_size=1), value, max_size=5))
def test_arguments_are_sorted_hashable_and_the_same_as_json(arguments: dict[str, Any]) -> None:
    pairs = json_arguments(arguments)
    assert [key for key, _ in pairs] == sorted(arguments)
    hash(pairs)
    assert json.loads(json.dumps(dict(pairs))) == json.loads(json.dumps(arguments))
    assert json_arguments(dict(reversed(arguments.items()))) == pairs


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), {1, 2}, object(), b"bytes", [float("nan")], 1j]
)
def test_what_is_no_json_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"argument width=.* is not JSON"):
        json_arguments({"width": bad})


@pytest.mark.parametrize("bad", [{"a": 1}, [{"a": 1}], [[1, {}]]])
def test_a_mapping_is_refused_since_it_would_come_back_as_another_type(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"argument width: .* is a mapping"):
        json_arguments({"width": bad})
