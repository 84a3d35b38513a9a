"""Tests of the published layouts in NumPy, against Transformers, which defines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_hf import LAYOUTS, Scaling
from minillm_kit.export import logits
from minillm_kit.subject import ODD, moved, settings

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 40},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400}
MORE = {"attention_factor": 1.3, "beta_fast": 24, "beta_slow": 2, "truncate": False}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("scaling_table", [None, LLAMA3, YARN, YARN | MORE])
def test_it_computes_what_transformers_computes(
    name: str, tied: bool, scaling_table: dict[str, Any] | None
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    scaling = scaling_table and Scaling.read(scaling_table)
    layout, model = (
        LAYOUTS[name],
        settings(**{**ODD, "model_tied": tied, "model_norm_eps": 0.02}).model,
    )
    rng = np.random.default_rng(0)
    tensors = {
        key: moved(key, 0.2 * rng.standard_normal(tensor.shape, np.float32))
        for key, tensor in layout.tensors(model).items()
    }
    document = layout.document(model, positions=16, boundary=None, scaling=scaling)
    kind = document.pop("model_type")
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **document)).double()
    missing = theirs.load_state_dict(
        {key: torch.from_numpy(array) for key, array in tensors.items()}, strict=False
    )
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= ({"lm_head.weight"} if tied else set())
    ids = rng.integers(model.vocab, size=11)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)[None]).logits[0].numpy()
    got = logits(tensors, document, ids)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
