"""Sliding-window attention: most layers have a short window, and all windows grow during the run.

    long layers    i - j < W(t)          the first, the last, and others evenly spaced: a third
    short layers   i - j < W(t) / 2      the others

Of 12 layers 0, 4, 7 and 11 are long, as in modded-nanogpt's records of 2025-01 and 2025-02 (long
and short windows from Gemma 2, arXiv:2408.00118; growing windows by fernbear.bsky.social). There
W(t) grows by 128 tokens at a time up to 1,792; here in equal stages. On PyTorch a window is an input
of the compiled step, so that all stages share a graph, except windows as long as a row, which are
omitted from it. On MLX, and with ``yarn``, each stage has a graph of its own. Windows are multiples of 128,
the blocks that FlexAttention skips; a row of T tokens needs none above T. If no window is shorter than a
row, or none can grow, the plan has a note.

``yarn`` makes a longer window resemble the previous one (YaRN, arXiv:2309.00071; the record of
2025-09, by classiclarryd). Where W(t) grows from W to W', in every layer and by the long windows:

    r       = W theta / 2 pi                    turns of a pair of features within W
    kept    = clip((r - 1) / (32 - 1), 0, 1)
    theta  <- theta (kept + (1 - kept) W / W')  slow pairs are stretched, fast pairs are unchanged
    scale  <- scale (0.2 ln(W' / W) + 1)        keeps attention equally sharp with more keys

It claims the attention scale, initially ``scale`` times D^-1/2, and so replaces
`attn_scale`. Each stage has its own tables of cos and sin. The record's evaluation window, longer than
the last one of training, is not implemented.

``documents`` also separates documents: a token attends to its own document only. Evaluation and
generation use the windows of the last stage. With paired heads, a window counts the keys of
both: half as many tokens.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from pydantic import model_validator

from minillm_core import Layers, PlanError, Plugin, option, plateaus, stages

__all__ = ["Windows", "long_layers", "long_windows", "sharpness", "yarn"]

SLOW, FAST = 1.0, 32.0
"""Turns within a window: a pair with at most SLOW is fully stretched, one with at least FAST is unchanged."""


FIRST = 256
"""The initial long window, unless ``start`` sets another."""


class Windows(Plugin, api=1):
    """Attention sees a window of keys that grows over the run; in most layers half of it."""

    window: int = option(1792, ge=1, help="final long window, in keys; at most a row's length")
    start: int = option(FIRST, ge=1, search=(64, 128, 256), help="initial long window, in keys")
    stages: int = option(4, ge=1, le=16, help="number of window sizes from start to window")
    block: int = option(
        128,
        ge=1,
        help="granularity of windows, in keys: all are multiples of it, short ones at least one, "
        "but none above the long one",
    )
    long: Layers | None = option(
        None,
        help="layers with the long window, such as [0, -1]; none: a third of them: first, last and "
        "evenly spaced",
    )
    documents: bool = option(
        False, search=(False, True), help="restrict attention to the token's own document"
    )
    yarn: bool = option(
        False, help="rescale rotations and sharpen attention where windows grow, as YaRN does"
    )
    scale: float | None = option(
        None,
        gt=0,
        help="with yarn: attention scale of the first stage, in units of D^-1/2; none: 1 (1.13 in "
        "the record)",
    )

    @model_validator(mode="after")
    def _scale_is_yarn_s(self) -> Windows:
        if self.scale is not None and not self.yarn:
            raise ValueError("scale is for yarn=true; attn_scale scales attention without it")
        return self

    def build_attention(self, attn):
        last = min(self.window, attn.seq_len)
        long = long_windows(min(self.start, last), last, self.stages, self.block)
        short = [
            min(max(_multiple(window // 2, self.block), self.block), window) for window in long
        ]
        layers = long_layers(attn.layers) if self.long is None else self.long.resolve(attn.layers)
        self._say_what_is_missing(attn, long if len(layers) == attn.layers else long + short)
        self._check_grows(attn.seq_len, long)
        name, windows = ("long", long) if attn.layer in layers else ("short", short)
        changes = self._changes(windows)
        attn.window(stages(*changes) if len(changes) > 1 else windows[0], name=name)
        if self.yarn:
            self._rescale(attn, self._changes(long))
        if self.documents:
            attn.documents()

    def _say_what_is_missing(self, attn, windows: list[int]) -> None:
        """Add a note if ``windows``, those of every layer and stage, mask nothing or do not grow."""
        if min(windows) >= attn.seq_len and not self.documents:
            attn.note(
                f"no window is shorter than a row of {attn.seq_len} tokens, so they mask "
                f"nothing ({self._given})"
            )
        elif self.stages == 1 and self.start not in (self.window, FIRST):
            attn.note(
                f"windows.start={self.start} has no effect with windows.stages=1: there is one window "
                f"throughout, windows.window={self.window}; it grows with windows.stages=2 or more"
            )
        elif self.stages > 1 and self.start > self.window:
            attn.note(
                f"windows.start={self.start} is above windows.window={self.window}: there is one "
                "window throughout"
            )

    def _check_grows(self, row: int, windows: list[int]) -> None:
        """Refuse YaRN if ``windows``, those of the long layers, do not grow."""
        first, last = windows[0], windows[-1]
        if not self.yarn or first < last:
            return
        lower = (last - 1) // self.block * self.block
        grows = f"windows.start={lower} or less, or " if lower else ""
        raise PlanError(
            f"windows.yarn rescales as windows grow, but those of the long layers have {last} "
            "keys throughout",
            where=f"{self._given} train.seq_len={row}",
            fix=("windows.stages=2 or more, or " if self.stages == 1 else grows)
            + "windows.yarn=false",
        )

    @property
    def _given(self) -> str:
        """Format the options that determine the windows, in command-line form."""
        names = ("start", "window", "stages", "block")
        return " ".join(f"windows.{name}={getattr(self, name)}" for name in names)

    def _changes(self, windows: list[int]) -> list[tuple[float, int]]:
        """Return (fraction of the run, window from there on) where the window changes."""
        return [
            (index / self.stages, window)
            for index, window in enumerate(windows)
            if index == 0 or window != windows[index - 1]
        ]

    def _rescale(self, attn, changes: list[tuple[float, int]]) -> None:
        first = (1.0 if self.scale is None else self.scale) * attn.head_dim**-0.5
        windows = [window for _, window in changes]
        attn.rope.scaling(yarn, window=stages(*changes), windows=windows)
        attn.scale(plateaus(*((at, first * sharpness(now, windows)) for at, now in changes)))


def yarn(frequencies: np.ndarray, window: int, windows: list[int]) -> np.ndarray:
    """Rescale frequencies, float64 (D/2,) in radians per position, for windows that have grown to ``window``."""
    theta = frequencies
    for before, after in pairwise(w for w in windows if w <= window):
        kept = np.clip((before * theta / (2 * math.pi) - SLOW) / (FAST - SLOW), 0.0, 1.0)
        theta = theta * (kept + (1.0 - kept) * before / after)
    return theta


def sharpness(window: int, windows: list[int]) -> float:
    """Return the factor of the scale once the windows have grown to ``window``."""
    grown = pairwise(w for w in windows if w <= window)
    return math.prod(0.2 * math.log(after / before) + 1.0 for before, after in grown)


def long_layers(layers: int) -> tuple[int, ...]:
    """Return a third of the layers, at least two: the first, the last and others evenly spaced."""
    count = max(2, round(layers / 3))
    return tuple(sorted({round(i * (layers - 1) / (count - 1)) for i in range(count)}))


def long_windows(start: int, last: int, count: int, block: int) -> list[int]:
    """Space windows evenly from ``start`` to ``last``, rounded up to multiples of ``block``; ``last`` is exact."""
    steps = [start + (last - start) * i / max(1, count - 1) for i in range(count - 1)]
    return [min(last, _multiple(step, block)) for step in steps] + [last]


def _multiple(number: float, block: int) -> int:
    """Round ``number`` up to a multiple of ``block``."""
    return int(-(-number // block)) * block
