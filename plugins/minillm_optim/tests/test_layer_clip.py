"""Tests of layer-wise clipping against torch's clip_grad_norm_ per layer, before AdamW and head-wise Muon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minillm_muon.head_muon import HeadMuon
from minillm_muon.muon import Muon
from minillm_optim.agc import AGC
from minillm_optim.layer_clip import LayerClip

RATES = {"train.lr": 0.01, "muon.lr": 0.02}


def clipped(grads: dict[str, np.ndarray], most: float) -> dict[str, np.ndarray]:
    """Apply torch's function to the two layers of the model, and to each other parameter alone."""
    layers = [[n for n in grads if n.startswith(f"layers.{i}.")] for i in range(2)]
    layers += [[name] for name in grads if not name.startswith("layers.")]
    found = {}
    for names in layers:
        tensors = [torch.nn.Parameter(torch.zeros(grads[name].shape)).double() for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            tensor.grad = torch.tensor(grads[name])
        torch.nn.utils.clip_grad_norm_(tensors, most)
        found |= {n: t.grad.numpy() for n, t in zip(names, tensors, strict=True)}  # pyright: ignore[reportOptionalMemberAccess]
    return found


@pytest.mark.parametrize("rule", [{}, {"muon": Muon(), "head_muon": HeadMuon(heads=1)}])
def test_rules_are_given_gradients_clipped_by_layers(
    planned: Any, drawn: Any, stepped: Any, rule: Any
) -> None:
    plain, plan = planned(rule), planned(rule | {"layer_clip": LayerClip(most=3.0)})
    rng = np.random.default_rng(0)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(2)]
    for name in grads[0]:
        if not name.startswith("layers.1."):  # whose norm remains large
            grads[0][name] = grads[0][name] * 0.01
    cut = [clipped(one, 3.0) for one in grads]
    assert np.array_equal(cut[0]["norm.weight"], grads[0]["norm.weight"])
    want, state = stepped(plain, params, cut, RATES)
    got, held = stepped(plan, params, grads, RATES)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-9, atol=1e-11)
    for key, anchors in state.items():
        for anchor, entries in anchors.items():
            for entry, array in entries.items():
                np.testing.assert_allclose(held[key][anchor][entry], array, rtol=1e-9, atol=1e-11)


def test_it_comes_before_clipping_by_units(planned: Any) -> None:
    plan = planned({"agc": AGC(), "layer_clip": LayerClip()})
    first = [anchor for anchor, _, _ in plan.rules["adamw"].stages[:2]]
    assert first == ["gradient[layer_clip]", "gradient[agc]"]
