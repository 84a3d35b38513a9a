"""Tests of the presets' properties."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minillm_core.config.load import Loaded
from minillm_core.config.presets import SHAPES, plugins_of, preset_names, recipe_names
from minillm_core.config.schema import ModelConfig
from minillm_core.plugins.first_party import FIRST_PARTY

Load = Callable[..., Loaded]

MILLIONS = {
    "tiny": 4.85,
    "small": 34.1,
    "gpt2-124m": 123.6,
    "350m": 359.9,
    "1b": 1076.2,
    "depth": 125.4,
}


def parameters(model: ModelConfig) -> int:
    """Count by formula: embedding, attention (q, o, k, v), gated MLP, norms."""
    width = model.dim // model.heads
    attention = 2 * model.dim * model.heads * width + 2 * model.dim * model.kv_heads * width
    block = attention + 3 * model.dim * model.hidden + 2 * model.dim
    embeddings = model.vocab * model.dim * (1 if model.tied else 2)
    return embeddings + model.layers * block + model.dim


def test_these_are_the_presets() -> None:
    assert preset_names() == [*MILLIONS, "cpu", "mac", "speedrun"]  # shapes by size
    assert list(SHAPES) == list(MILLIONS)


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_parameters(loaded: Load, name: str, millions: float) -> None:
    assert parameters(loaded(preset=name).config.model) / 1e6 == pytest.approx(millions, abs=0.1)


def test_gpt2_is_as_large_as_gpt2_small(loaded: Load) -> None:
    model = loaded(preset="gpt2-124m").config.model
    assert parameters(model) == pytest.approx(124.4e6, rel=0.01)
    assert (model.layers, model.dim, model.heads, model.kv_heads) == (12, 768, 12, 12)
    assert (model.vocab, model.tied) == (50_304, True)


def test_tiny_is_as_agreed(loaded: Load) -> None:
    config = loaded(preset="tiny").config
    model, train = config.model, config.train
    assert (model.dim, model.layers, model.heads, model.kv_heads) == (256, 4, 4, 2)
    assert (model.vocab, model.tied) == (4096, False)
    assert (train.rows, train.seq_len, train.accumulate, train.lr) == (8, 256, 1, 3e-3)
    assert (train.weight_decay, train.clip, train.betas) == (0.1, 1.0, (0.9, 0.95))
    assert (config.eval.tokens, config.log.every, config.data.seed) == (65_536, 1, 0)
    assert train.steps is not None


def test_small_ends_by_the_clock(loaded: Load) -> None:
    train = loaded(preset="small").config.train
    assert train.steps is None
    assert train.minutes is not None
    assert 0 < train.minutes < 3


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_names_no_plugin(loaded: Load, name: str) -> None:
    assert loaded(preset=name).config.plugins == plugins_of(name) == {}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_names_plugins_of_ours_with_their_origin(loaded: Load, name: str) -> None:
    found = loaded(preset=name)
    assert found.config.plugins == plugins_of(name) != {}
    assert set(found.config.plugins) <= set(FIRST_PARTY)  # or no error could name what to install
    for plugin, options in found.config.plugins.items():
        for key in (f"plugins.{plugin}", *(f"{plugin}.{option}" for option in options)):
            assert found.origins[key] == f"preset {name}"


def test_speedrun_has_the_size_of_gpt2_small(loaded: Load) -> None:
    ours, gpt2 = (loaded(preset=name).config for name in ("speedrun", "gpt2-124m"))
    for key in ("layers", "dim", "hidden", "vocab"):
        assert getattr(ours.model, key) == getattr(gpt2.model, key)
    assert ours.train.seq_len == gpt2.train.seq_len
    assert ours.eval == gpt2.eval
