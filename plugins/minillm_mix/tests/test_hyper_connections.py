"""Tests of hyper-connections against the paper's matrices, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.errors import PlanError
from minillm_mix.hyper_connections import HyperConnections
from minillm_modded.unet_skip import UNetSkip


def matrices(node: Any, H: np.ndarray, own: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute a (n,), A (n, n), b (n,) of a token's lanes H (n, C)."""
    n = len(H)
    a, A, b = np.eye(n)[own], np.eye(n), np.ones(n)
    a, A, b = a + node.static[:, 0], A + node.static[:, 1:-1], b + node.static[:, -1]
    if node.dynamic:
        normed = H / np.sqrt((H * H).mean(-1, keepdims=True) + node.eps)
        found = np.tanh(normed @ node.weight.weight.T)  # (n, n + 2)
        a = a + node.scale_in * found[:, 0]
        A = A + node.scale_in * found[:, 1:-1]
        b = b + node.scale_out * found[:, -1]
    return a, A, b


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_lanes_are_the_papers(lab: Any, lanes: int, dynamic: bool) -> None:
    plan = lab.plan(HyperConnections(lanes=lanes, dynamic=dynamic), layers=3)
    model, batch = lab.model(plan), lab.batch()
    x0 = model.net.embedding(batch["ids"])
    B, T, _C = x0.shape
    H = np.repeat(x0[:, :, None], lanes, 2)  # (B, T, n, C)
    for layer, block in enumerate(model.net.layers):
        for index, part in enumerate(("attention", "mlp")):
            node = block.given[part].computed[f"hyper_{part}_{layer}"]
            own = (2 * layer + index) % lanes
            found = [[matrices(node, H[r, t], own) for t in range(T)] for r in range(B)]
            given = np.stack([[found[r][t][0] @ H[r, t] for t in range(T)] for r in range(B)])
            y = getattr(model, part)(layer, given)
            H = np.stack(
                [
                    [
                        found[r][t][1].T @ H[r, t] + np.outer(found[r][t][2], y[r, t])
                        for t in range(T)
                    ]
                    for r in range(B)
                ]
            )
    np.testing.assert_allclose(model.hidden(batch), model.net.norm(H.mean(2)), rtol=1e-9)


def test_at_first_every_lane_is_the_stream(lab: Any) -> None:
    batch = lab.batch()
    plain = lab.model(lab.plan(), moved=False).hidden(batch)
    hyper = lab.model(lab.plan(HyperConnections()), moved=False).hidden(batch)
    np.testing.assert_array_equal(hyper, plain)


def test_a_layer_without_attention_has_no_lanes_to_mix(lab: Any) -> None:
    with pytest.raises(PlanError, match=r"gives layers\.3\.attention an input of its own"):
        lab.plan(HyperConnections(), UNetSkip(attention=False))
