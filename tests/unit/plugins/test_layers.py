"""Tests of layer selections: every form fits every depth that it can, and is refused otherwise."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from minillm_core.errors import PlanError
from minillm_core.plugins.layers import Layers

depths = st.integers(1, 200)


@st.composite
def indices_within(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Draw a depth, and distinct layer indices, some of them counted from the end."""
    depth = draw(depths)
    layers = draw(st.lists(st.integers(0, depth - 1), min_size=1, unique=True))
    return depth, [draw(st.sampled_from([layer, layer - depth])) for layer in layers]


@given(depths)
def test_all_is_every_layer(depth: int) -> None:
    assert Layers("all").resolve(depth) == tuple(range(depth))


@given(depths, st.integers(1, 300))
def test_every_n_starts_at_the_first_and_fits_any_depth(depth: int, step: int) -> None:
    layers = Layers(f"every:{step}").resolve(depth)
    assert layers == tuple(layer for layer in range(depth) if layer % step == 0)
    assert layers[0] == 0


@given(indices_within())
def test_indices_are_resolved_in_order(case: tuple[int, list[int]]) -> None:
    depth, indices = case
    assert Layers(indices).resolve(depth) == tuple(sorted(index % depth for index in indices))


@given(indices_within(), st.integers(0, 50), st.booleans())
def test_an_index_outside_is_refused(case: tuple[int, list[int]], by: int, below: bool) -> None:
    depth, indices = case
    outside = -depth - 1 - by if below else depth + by
    with pytest.raises(
        PlanError,
        match=rf"layer {outside} is outside the model, which has {depth} layer{'s' * (depth > 1)}\b",
    ):
        Layers([*indices, outside]).resolve(depth)


@given(indices_within())
def test_a_layer_named_twice_is_refused(case: tuple[int, list[int]]) -> None:
    depth, indices = case
    with pytest.raises(PlanError, match="named twice"):
        Layers([*indices, indices[0] % depth - depth]).resolve(depth)


@given(
    st.one_of(
        st.just("all"),
        st.integers(1, 999).map("every:{}".format),
        st.lists(st.integers(-99, 99), min_size=1),
    )
)
def test_json_and_back(spec: str | list[int]) -> None:
    adapter = TypeAdapter(Layers)
    layers = Layers(spec)
    assert layers.data() == spec
    assert adapter.validate_json(adapter.dump_json(layers), strict=True) == layers
    assert adapter.validate_python(spec) == layers == Layers(layers)
    assert hash(Layers(spec)) == hash(layers)
    assert json.loads(json.dumps(layers.data())) == spec


@pytest.mark.parametrize(
    "spec", ["", "every", "every:0", "every:-1", "every:x", "ALL", [], [True], [1.0], ["0"], 3, {}]
)
def test_other_forms_are_refused(spec: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Layers).validate_python(spec)
