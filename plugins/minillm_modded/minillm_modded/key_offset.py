"""Partial key offset: half of each key comes from the previous token (modded-nanogpt, record 49).

    k_t[i] <- k_(t-1)[i]        i in [D/4, D/2) and [3D/4, D): the unrotated features

A query that matches content then finds the token *after* the match, so that a single layer
implements induction, which otherwise needs two (by classiclarryd). It suits layers with long
windows, and `half_rope`: the upper halves of both halves of a head are the pairs that it does not
rotate. On rotated features the offset would also shift the angle; in the records this happened for
four features when the feature order changed. The first token keeps its key. The records carry the
last key of one document into the first of the next; here it stays within its document unless
``across`` is set.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Module, Plugin, option
from minillm_modded.half_rope import half_truncated
from minillm_modded.windows import long_layers

__all__ = ["KeyOffset", "OffsetAcross", "OffsetWithin"]


class KeyOffset(Plugin, api=1):
    """Keys of which one half, the features without rotation, comes from the previous token."""

    layers: Layers | None = option(
        None,
        help="layers with a key offset, such as [0, -1]; none: the default long layers of windows",
    )
    across: bool = option(
        False, help="apply the offset across document boundaries, as the records do"
    )

    def build_attention(self, attn):
        chosen = self.layers.resolve(attn.layers) if self.layers else long_layers(attn.layers)
        if attn.layer in chosen:
            attn.rope.expects(
                half_truncated, of="half_rope", why="moves the features without rotation"
            )
            attn.qk.shift(OffsetAcross if self.across else OffsetWithin)


class OffsetAcross(Module):
    """A key offset across documents: k (B, T, K, D) -> k, its unrotated half shifted by one column."""

    lookback = 1

    def forward(self, q: Any, k: Any) -> tuple[Any, Any]:
        """Shift k (B, T, K, D); return q (B, T, H, D) unchanged, and k."""
        return q, self.offset(k, self.before(k))

    def before(self, k: Any) -> Any:
        """Return k (B, T, K, D) shifted by one column; the first column is unchanged."""
        return self.ops.concat([k[:, :1], k[:, :-1]], 1)

    def offset(self, k: Any, earlier: Any) -> Any:
        """Take the second and last quarters of the features from ``earlier``."""
        ops: Any = self.ops
        first, _, third, _ = ops.split(k, 4, -1)
        _, second, _, fourth = ops.split(earlier, 4, -1)
        return ops.concat([first, second, third, fourth], -1)


class OffsetWithin(OffsetAcross):
    """A key offset within documents: the first token of a document keeps its key."""

    def forward(self, q: Any, k: Any, documents: Any) -> tuple[Any, Any]:
        """Shift k (B, T, K, D) within documents int32 (B, T); return q (B, T, H, D) unchanged, and k."""
        ops: Any = self.ops
        begins = documents[:, 1:] != documents[:, :-1]
        first = ops.concat([documents[:, :1] == documents[:, :1], begins], 1)[..., None, None]
        return q, self.offset(k, ops.where(first, k, self.before(k)))
