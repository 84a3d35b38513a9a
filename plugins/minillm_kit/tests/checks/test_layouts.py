"""The published layouts in NumPy, against Transformers, whose definitions they are."""

from __future__ import annotations

import numpy as np
import pytest

from minillm_hf import LAYOUTS
from minillm_kit.export import logits
from minillm_kit.subject import ODD, moved, settings


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_it_computes_what_transformers_computes(name: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    layout, model = (
        LAYOUTS[name],
        settings(**{**ODD, "model_tied": tied, "model_norm_eps": 0.02}).model,
    )
    rng = np.random.default_rng(0)
    tensors = {
        key: moved(key, 0.2 * rng.standard_normal(tensor.shape, np.float32))
        for key, tensor in layout.tensors(model).items()
    }
    document = layout.document(model, positions=16, boundary=None)
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
