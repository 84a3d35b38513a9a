"""Tests of the embedding norm against its definition, and of its purpose: a row's scale has no effect."""

from __future__ import annotations

from typing import Any

import numpy as np

from minillm_modded.embed_norm import EmbedNorm
from minillm_modded.embed_skip import EmbedSkip
from minillm_modded.smear import Smear


def test_tokens_enter_with_unit_rms(lab: Any) -> None:
    model, batch = lab.model(lab.plan(EmbedNorm())), lab.batch()
    x = model.net.embedding(batch["ids"])
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    for i in range(4):
        x = x + model.attention(i, x)
        x = x + model.mlp(i, x)
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(x), rtol=1e-12)


def test_the_size_of_an_embedding_does_not_count(lab: Any) -> None:
    for others in ((), (EmbedSkip(), Smear(across=True))):  # after added terms, before x0
        model, batch = lab.model(lab.plan(EmbedNorm(), *others)), lab.batch()
        if others:
            model.net.embed["smear"].gate.weight[:] = 0.0  # its gate depends on the scale
        before = model.hidden(batch)
        model.net.embedding.weight = 1000 * model.net.embedding.weight
        np.testing.assert_allclose(model.hidden(batch), before, rtol=1e-3, atol=1e-3)
