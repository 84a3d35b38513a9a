"""Sliding windows: most layers see the near past alone, and all of them see little at first.

    long layers    i - j < W(t)          the first, the last, and others evenly between: a third
    short layers   i - j < W(t) / 2      the rest

Of 12 layers 0, 4, 7 and 11 are long, as in modded-nanogpt's records of 2025-01 and 2025-02 (long
and short windows from Gemma 2, arXiv:2408.00118; growing windows by fernbear.bsky.social). There
W(t) grows by 128 tokens at a time up to 1,792; here in equal stages, each of which has a compiled
step of its own, since a window is a constant of the kernel. Windows are multiples of 128, the blocks
that FlexAttention skips; a row of T tokens needs none above T.

``documents`` keeps documents apart as well: a token sees those of its own alone. Evaluation and
generation take the windows of the last stage. Where heads are paired, a window counts the keys of
both: half as many tokens.
"""

from __future__ import annotations

from minillm_core import Layers, Plugin, option, stages

__all__ = ["Windows", "long_layers", "long_windows"]


class Windows(Plugin, api=1):
    """Attention sees a window of keys, half of it in most layers, growing over the run."""

    window: int = option(
        1792, ge=1, help="keys that long layers see at the end; at most a row's length"
    )
    start: int = option(256, ge=1, help="the same at the beginning")
    stages: int = option(4, ge=1, le=16, help="windows from start to window, a compilation each")
    block: int = option(128, ge=1, help="windows are multiples of it, and a short one is no less")
    long: Layers | None = option(
        None, help="long layers, such as [0, -1]; none: first, last and evenly between, a third"
    )
    documents: bool = option(False, help="tokens see those of their own document alone")

    def build_attention(self, attn):
        last = min(self.window, attn.seq_len)
        long = long_windows(min(self.start, last), last, self.stages, self.block)
        short = [max(self.block, _multiple(window // 2, self.block)) for window in long]
        layers = long_layers(attn.layers) if self.long is None else self.long.resolve(attn.layers)
        name, windows = ("long", long) if attn.layer in layers else ("short", short)
        changes = [
            (index / self.stages, window)
            for index, window in enumerate(windows)
            if index == 0 or window != windows[index - 1]
        ]
        attn.window(stages(*changes) if len(changes) > 1 else windows[0], name=name)
        if self.documents:
            attn.documents()


def long_layers(layers: int) -> tuple[int, ...]:
    """A third of the layers, at least two: the first, the last and evenly between."""
    count = max(2, round(layers / 3))
    return tuple(sorted({round(i * (layers - 1) / (count - 1)) for i in range(count)}))


def long_windows(start: int, last: int, count: int, block: int) -> list[int]:
    """Evenly from ``start`` to ``last``, up to multiples of ``block``; the last one as it is."""
    steps = [start + (last - start) * i / max(1, count - 1) for i in range(count - 1)]
    return [min(last, _multiple(step, block)) for step in steps] + [last]


def _multiple(number: float, block: int) -> int:
    """The least multiple of ``block`` from ``number`` on."""
    return int(-(-number // block)) * block
