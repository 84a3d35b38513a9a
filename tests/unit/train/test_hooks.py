"""What ``on_batch`` is told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.streams import Streams
from minillm_core.train.hooks import batch_hook


class All(Plugin, api=1):
    """Notes all that it is given."""

    def on_batch(self, batch: Any, phase: str, vocab: int) -> Any:
        return {**batch, "told": np.array([phase, str(vocab)])}


class Some(Plugin, api=1):
    """Takes what it needs."""

    def on_batch(self, vocab: int, batch: Any) -> Any:
        return {**batch, "told": np.array([str(vocab)])}


@pytest.mark.parametrize("phase", ["train", "eval", "decode"])
@pytest.mark.parametrize(("plugin", "told"), [(All(), [..., "300"]), (Some(), ["300"])])
def test_it_is_told_the_phase_and_the_vocabulary(plugin: Plugin, told: list, phase: str) -> None:
    one, seen = LoadedPlugin.of("one", plugin), Counter()
    hook = batch_hook(["one"], [one], seen, 300, Streams(0))
    assert hook is not None
    batch = {
        name: np.zeros((2, 3), np.int32) for name in ("ids", "labels", "documents", "positions")
    }
    want = [phase if word is ... else word for word in told]
    assert hook(batch, phase)["told"].tolist() == want
    assert seen == {"batch:one": 1}
