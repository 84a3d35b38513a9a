"""Tests of a run's batches: the sizes of each step's, at its start, after a rewind and when resumed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin, build_plan, load
from minillm_core.backends.ranks import ALONE
from minillm_core.data.documents import Documents
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.feed import Feed
from minillm_core.train.hooks import plan_hook

SETTINGS = {
    **{"train.steps": 8, "train.rows": 2, "train.seq_len": 8, "model.vocab": 4096},
    "train.stages": [{"until": 0.25, "seq_len": 3}, {"until": 0.5, "rows": 5, "accumulate": 2}],
}
WIDTHS = [3, 3, 8, 8, 8, 8, 8, 8]
ROWS = [2, 2, 5, 5, 2, 2, 2, 2]


class Watches(Plugin, api=1):
    """Records its position, and removes all labels of some batches."""

    def on_batch(self, batch: dict, phase: str, progress: float) -> dict:
        told = np.full_like(batch["positions"], round(1000 * progress))
        odd = int(batch["ids"][0, 0]) % 5 == 0
        labels = np.full_like(batch["labels"], -1) if odd else batch["labels"]
        return {**batch, "positions": told, "labels": labels}


@pytest.fixture
def job() -> Any:
    plugins = [LoadedPlugin.of("watches", Watches())]
    plan = build_plan(load("tiny", settings=SETTINGS).config, plugins)
    rng = np.random.default_rng(0)
    train = Documents.of([rng.integers(0, 4096, n) for n in rng.integers(1, 40, 60)], 4096)
    corpus = SimpleNamespace(train=train, parts=())
    parts = {
        "config": plan.config,
        "plan": plan,
        "corpus": corpus,
        "seen": Counter(),
        "ranks": ALONE,
    }
    return SimpleNamespace(**parts, hook=partial(plan_hook, plan))


def taken(feed: Feed, step: int, upto: int) -> list[Any]:
    """Return the batches of the steps after ``step``; those without labels are skipped, as in the loop."""
    found = []
    while step < upto:
        batch = next(feed)
        rows, width = {one["ids"].shape for one in batch.micro}.pop()
        assert (rows, width) == (ROWS[step], WIDTHS[step])
        assert len(batch.micro) == (2 if step in (2, 3) else 1)
        assert {round(1000 * (step + 1) / 8)} == {*np.unique(batch.micro[0]["positions"])}
        if batch.supervised:
            step += 1
            found.append(batch)
    return found


def same(one: list[Any], two: list[Any]) -> None:
    assert [step.cursor for step in one] == [step.cursor for step in two]
    for mine, yours in zip(one, two, strict=True):
        for a, b in zip(mine.micro, yours.micro, strict=True):
            assert all(np.array_equal(a[name], b[name]) for name in a)


def test_a_batch_without_a_label_is_no_step_and_a_resumed_run_has_the_same(job: Any) -> None:
    with Feed(job, None) as feed:
        whole = taken(feed, 0, 8)
    with Feed(job, None) as feed:
        made = [next(feed).supervised for _ in range(8)]
    assert 0 in made  # otherwise nothing is tested
    for step in range(1, 8):
        with Feed(job, whole[step - 1].cursor, step=step) as feed:
            same(taken(feed, step, 8), whole[step:])


@pytest.mark.parametrize("skip", [0, 1, 4])
def test_after_a_rewind_the_sizes_are_those_of_the_steps_that_are_trained_again(
    job: Any, skip: int
) -> None:
    signalled = False
    with Feed(job, None, lambda: signalled) as feed:
        whole = taken(feed, 0, 6)
        signalled = True  # ends the run after the rewind, not within it
        cursor = feed.rewind(whole[0].cursor, skip, 1)
        signalled = False
        again = taken(feed, 1, 8)
    with Feed(job, cursor, step=1) as feed:  # a checkpoint of the rewound run, resumed
        same(taken(feed, 1, 8), again)
    if not skip:
        same(again[:5], whole[1:])
    else:
        assert not np.array_equal(again[0].micro[0]["ids"], whole[1].micro[0]["ids"])
