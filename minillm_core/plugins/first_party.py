"""Our own plugins that are not part of the core, and what to install for each."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FIRST_PARTY"]

_OFFERED = {
    "minillm-liger[cuda]": "liger",
    "minillm-modded": (
        "attn_scale backout bigram_hash embed_norm embed_skip half_rope moe mtp paired_heads qk_norm relu2 "
        "residual_decay smear softcap sparse_gate unet_skip value_embeds windows xsa zero_init"
    ),
    "minillm-muon": "cautious_wd muon normuon polar_express role_lr",
    "minillm-track[tensorboard]": "tensorboard",
    "minillm-track[trackio]": "trackio",
    "minillm-track[wandb]": "wandb",
}

FIRST_PARTY: Mapping[str, str] = {
    name: requirement for requirement, names in _OFFERED.items() for name in names.split()
}
"""Plugin -> what pip installs for it; an extra where the plugin needs another package to run."""
