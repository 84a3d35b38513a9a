"""Paired heads: adjacent heads' queries attend to each other's keys (modded-nanogpt, record 58).

Heads 2p and 2p+1 become one sequence of 2T positions: head 2p at 2t, head 2p+1 at 2t+1, each
rotated at its own position. Attention is causal over 2T, so that at 2t+1 the second head sees the first
head's key of the same token. Nothing is averaged. Full causal attention costs twice as much.

The published code's view puts heads 0..H/2-1 at 2t and the others at 2t+1, while its rotary table
follows the head's own parity: head j is paired with j + H/2, and where H is divisible by 4 both
get the same rotation, so that the stagger is lost. This plugin follows the record's text.
"""

from __future__ import annotations

from typing import Any

from minillm_core import Layers, Layout, PlanError, Plugin, option

__all__ = ["Interleave", "PairedHeads"]


class PairedHeads(Plugin, api=1):
    """Two heads share one sequence: their queries see each other's keys."""

    layers: Layers = option("all", help='layers with paired heads: "all", [0, -1], "every:2"')

    def build_attention(self, attn):
        if attn.layer not in self.layers.resolve(attn.layers):
            return
        for count, kind, key in (
            (attn.heads, "", "heads"),
            (attn.kv_heads, "key-value ", "kv_heads"),
        ):
            if count % 2:
                raise PlanError(
                    f"paired_heads cannot pair {count} {kind}heads in layer {attn.layer}: odd",
                    where=f"model.{key}={count}",
                    fix=f"an even model.{key}, or leave that layer out of paired_heads.layers",
                )
        attn.layout(Interleave)
        why = "paired q, k and v no longer line up with y head by head"
        attn.out.correct.close(why)
        attn.out.project_out.close(why)


class Interleave(Layout):
    """(B, T, H, D) -> (B, 2T, H/2, D) and back."""

    rope = "after"  # at 2 x position + parity, bitwise equal to each head at its own
    stretch = 2
    joins = 2

    def enter(self, call):
        positions = None if call.positions is None else self.both(call.positions)
        documents = None if call.documents is None else self.twice(call.documents)
        return call._replace(
            q=self.fold(call.q),
            k=self.fold(call.k),
            v=self.fold(call.v),
            positions=positions,
            documents=documents,
        )

    def leave(self, y: Any) -> Any:
        """Unfold (B, 2T, H/2, D) to (B, T, H, D)."""
        B, twice, pairs, D = y.shape
        y = self.ops.reshape(y, (B, twice // 2, 2, pairs, D))
        y = self.ops.permute_dims(y, (0, 1, 3, 2, 4))  # (B, T, H/2, 2, D)
        return self.ops.reshape(y, (B, twice // 2, 2 * pairs, D))

    def fold(self, x: Any) -> Any:
        """Fold (B, T, H, D) to (B, 2T, H/2, D): head 2p at 2t, head 2p+1 at 2t+1 of pair p."""
        B, T, H, D = x.shape
        x = self.ops.reshape(x, (B, T, H // 2, 2, D))
        x = self.ops.permute_dims(x, (0, 1, 3, 2, 4))  # (B, T, 2, H/2, D)
        return self.ops.reshape(x, (B, 2 * T, H // 2, D))

    def both(self, positions: Any) -> Any:
        """int32 (..., T) -> (..., 2T): 2p and 2p + 1 for each position p."""
        pair = self.ops.stack([positions * 2, positions * 2 + 1], -1)
        return self.ops.reshape(pair, (*positions.shape[:-1], -1))

    def twice(self, documents: Any) -> Any:
        """Repeat document ids, int32 (B, T) -> (B, 2T): both heads of a token belong to its document."""
        pair = self.ops.stack([documents, documents], -1)
        return self.ops.reshape(pair, (documents.shape[0], -1))
