"""Conformance tests of every plugin of this distribution, one test per check."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_attn_sink = conformance("attn_sink", pairs=2)
test_diff_attn = conformance("diff_attn", pairs=2)
test_forgetting_attn = conformance("forgetting_attn", pairs=2)
test_forgetting_attn_with_rope = conformance(
    "forgetting_attn", {"rope": True, "bias": 3.0}, pairs=2
)
test_gated_delta = conformance("gated_delta", {"chunk": 4, "eps": 0.1}, pairs=2)
# with the published code's epsilon a head's y, which may be close to 0, magnifies rounding: each
# framework is 1.5e-6 of the gradients' norm from float64, and the bound between them is 2e-6
test_gated_delta_as_published = conformance("gated_delta", {"chunk": 4}, pairs=0, backend="torch")
test_gated_delta_on_mlx = conformance("gated_delta", {"chunk": 4}, pairs=0, backend="mlx")
test_hyper_connections = conformance("hyper_connections", pairs=2)
test_iha = conformance("iha", pairs=2)
test_layer_loop = conformance("layer_loop", pairs=2)
test_mla = conformance("mla", pairs=2)
test_mla_with_a_latent_of_queries = conformance(
    "mla", {"q_rank": 12, "kv_rank": 10, "rope_dim": 6}, pairs=2
)
test_prefix_kv = conformance("prefix_kv", {"tokens": 3, "std": 0.5}, pairs=2)
test_stochastic_depth = conformance("stochastic_depth", {"drop": 0.5}, pairs=2)
test_value_residual = conformance("value_residual", pairs=2)


def test_no_plugin_is_left_out() -> None:
    ours = {
        entry.name
        for entry in entry_points(group="minillm.plugins")
        if entry.dist is not None and entry.dist.name == "minillm-mix"
    }
    checked = {getattr(test, "checks_plugin", None) for test in globals().values()}
    assert ours <= checked
