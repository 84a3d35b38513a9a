"""Conformance tests of every plugin of this distribution, one test per check."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_attn_scale = conformance("attn_scale")
test_backout = conformance("backout")
test_batch_schedule = conformance("batch_schedule", pairs=2)
test_bigram_hash = conformance("bigram_hash")
test_bigram_hash_with_signs = conformance("bigram_hash", {"signs": 64})
test_cached_stream = conformance("cached_stream", pairs=2)
test_dc_mha = conformance("dc_mha", pairs=2)
test_embed_norm = conformance("embed_norm")
test_embed_skip = conformance("embed_skip")
test_half_rope = conformance("half_rope")
test_key_offset = conformance("key_offset")
test_key_offset_across = conformance("key_offset", {"across": True})
test_layer_drop = conformance("layer_drop", pairs=2)
test_logit_rescale = conformance("logit_rescale", pairs=2)
test_moe = conformance("moe")
test_mtp = conformance("mtp")
test_mudd = conformance("mudd", pairs=2)
test_paired_heads = conformance("paired_heads")
test_prefix_tokens = conformance("prefix_tokens", pairs=2)
test_qk_norm = conformance("qk_norm")
test_qk_norm_with_gains = conformance("qk_norm", {"gains": True})
test_relu2 = conformance("relu2")
test_residual_decay = conformance("residual_decay")
test_seq_schedule = conformance("seq_schedule", pairs=2)
test_smear = conformance("smear")
test_softcap = conformance("softcap")
test_softcap_by_tanh = conformance("softcap", {"form": "tanh"})
test_sparse_gate = conformance("sparse_gate")
test_sparse_rows = conformance("sparse_rows")
test_unet_skip = conformance("unet_skip")
test_unet_skip_without_attention = conformance("unet_skip", {"attention": False})
test_untie_head = conformance("untie_head", pairs=2)
test_value_embeds = conformance("value_embeds")
test_value_init = conformance("value_init", pairs=2)
test_windows = conformance("windows", {"start": 4, "window": 16, "block": 4})
test_windows_and_documents = conformance("windows", {"documents": True, "stages": 1})
test_windows_and_yarn = conformance("windows", {"start": 4, "window": 16, "block": 4, "yarn": True})
test_xsa = conformance("xsa")
test_zero_init = conformance("zero_init")


def test_no_plugin_is_left_out() -> None:
    ours = {
        entry.name
        for entry in entry_points(group="minillm.plugins")
        if entry.dist is not None and entry.dist.name == "minillm-modded"
    }
    checked = {getattr(test, "checks_plugin", None) for test in globals().values()}
    assert ours <= checked
