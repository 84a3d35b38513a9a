"""Tests of the arguments of ``on_batch``, and of the results of ``on_evaluated``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin
from minillm_core.errors import DataError, PluginCodeError
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.sourcing import PLAIN
from minillm_core.plugins.streams import Streams
from minillm_core.train.events import Evaluated
from minillm_core.train.feed import StepProgress
from minillm_core.train.hooks import Verdict, plan_hook, with_verdicts


def plan_of(*names: str) -> Any:
    """Build the part of a plan that the hook reads, with these ``on_batch`` plugins."""
    config = SimpleNamespace(seed=0, model=SimpleNamespace(vocab=300))
    return SimpleNamespace(config=config, on_batch=names, batch_fields=(), sourcing=PLAIN)


ARGUMENTS: list[Any] = []
"""The arguments of the last call; a field would have to be declared."""


class All(Plugin, api=1):
    """Records all of its arguments."""

    def on_batch(self, batch: Any, phase: str, vocab: int) -> Any:
        ARGUMENTS[:] = [phase, vocab]
        return batch


class Late(Plugin, api=1):
    """Records the progress of the run."""

    def on_batch(self, batch: Any, progress: float) -> Any:
        ARGUMENTS[:] = [progress]
        return batch


class Some(Plugin, api=1):
    """Accepts some of the arguments."""

    def on_batch(self, vocab: int, batch: Any) -> Any:
        ARGUMENTS[:] = [vocab]
        return batch


def passed_on(hook: Callable) -> Callable:
    """Wrap a hook as a decorator does that keeps its signature."""

    @wraps(hook)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return hook(*arguments, **named)

    return wrapper


class Wrapped(Plugin, api=1):
    """Accepts some of the arguments, through a decorator."""

    on_batch = passed_on(Some.on_batch)


@pytest.mark.parametrize("phase", ["train", "eval", "decode"])
@pytest.mark.parametrize(
    ("plugin", "told"), [(All(), [..., 300]), (Some(), [300]), (Wrapped(), [300])]
)
def test_it_is_told_the_phase_and_the_vocabulary(plugin: Plugin, told: list, phase: str) -> None:
    one, seen = LoadedPlugin.of("one", plugin), Counter()
    hook = plan_hook(plan_of("one"), [one], seen=seen, streams=Streams(0))
    assert hook is not None
    batch = {
        name: np.zeros((2, 3), np.int32) for name in ("ids", "labels", "documents", "positions")
    }
    hook(batch, phase)
    assert [phase if word is ... else word for word in told] == ARGUMENTS
    assert seen == {"batch:one": 1}


def test_progress_is_the_step_of_a_batch_over_all_steps_and_1_elsewhere(
    planned: Callable,
) -> None:
    place = StepProgress(planned("train.steps=8"), 0)
    late = [LoadedPlugin.of("late", Late())]
    hook = plan_hook(plan_of("late"), late, streams=Streams(0), progress=place.progress)
    assert hook is not None
    for step in range(1, 10):
        place.shape_at(step)
        for _ in range(3):  # the same for every micro-batch
            hook(batch(), "train")
            assert [min(1.0, step / 8)] == ARGUMENTS
    for phase in ("eval", "decode"):
        hook(batch(), phase)
        assert ARGUMENTS == [1.0]
    assert StepProgress(planned("train.steps=8"), 3).progress() == 0.5


def batch(labels: int = 1) -> dict[str, Any]:
    array = np.zeros((2, 4), np.int32)
    return {"ids": array, "labels": array + labels, "documents": array, "positions": array}


class Masks(Plugin, api=1):
    """Removes every label, also in evaluations."""

    def on_batch(self, batch: Any) -> Any:
        return {**batch, "labels": np.full_like(batch["labels"], -1)}


class Cuts(Plugin, api=1):
    """Returns a part of the batch."""

    rows: bool = False

    def on_batch(self, batch: Any) -> Any:
        part = np.s_[:1] if self.rows else np.s_[:, :-1]
        return {name: np.ascontiguousarray(field[part]) for name, field in batch.items()}


def called(plugin: Plugin, phase: str, seen: Counter[str]) -> dict[str, Any]:
    given = [LoadedPlugin.of("one", plugin)]
    hook = plan_hook(plan_of("one"), given, seen=seen, streams=Streams(0))
    assert hook is not None
    return hook(batch(), phase)


@pytest.mark.parametrize("phase", ["train", "eval", "decode"])
@pytest.mark.parametrize(("rows", "shape"), [(True, "(1, 4)"), (False, "(2, 3)")])
def test_a_batch_of_another_shape_is_refused(phase: str, rows: bool, shape: str) -> None:
    with pytest.raises(PluginCodeError) as refused:
        called(Cuts(rows=rows), phase, Counter())
    said = f"plugin 'one' changed the rows or columns in on_batch, phase {phase}"
    assert (refused.value.what, refused.value.where) == (said, f"'ids' {shape}, not (2, 4)")
    assert "-1 as a label" in str(refused.value.fix)


class Replaces(Plugin, api=1):
    """Replaces a field by what a test wants."""

    name: str
    value: Any

    def on_batch(self, batch: Any) -> Any:
        return {**batch, self.name: self.value}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("weights", np.ones((2, 4)), "'weights' as float64 (2, 4), not float32 (rows, T)"),
        ("weights", np.ones(2, np.float32), "'weights' as float32 (2,), not float32 (rows, T)"),
        ("weights", [1.0], "no array 'weights'"),
        ("mine", [1], "no array 'mine'"),
        ("ids", np.ones((2, 3), np.int32), "'labels' as int32 (2, 4), not int32 (rows, T), beside 'ids' (2, 3)"),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(PluginCodeError, match="'one' broke the batch in on_batch") as refused:
        called(Replaces(name=name, value=value), "train", Counter())
    assert f"on_batch returned {said}" in str(refused.value.where)


class Adds(Plugin, api=1):
    """Writes a field that it does not declare."""

    def on_batch(self, batch: Any) -> Any:
        return {**batch, "mine": batch["ids"], "documents": batch["ids"]}


def test_a_field_that_is_not_declared_is_refused() -> None:
    with pytest.raises(
        PluginCodeError, match="plugin 'one' broke the batch in on_batch"
    ) as refused:
        called(Adds(), "train", Counter())
    assert "added 'mine', which no build_data declares" in str(refused.value.where)
    assert refused.value.fix == "data.field('mine', 'int32') in build_data"


class Weighs(Plugin, api=1, unweighted=True):
    """Says that it adds no weights, and does."""

    def on_batch(self, batch: Any) -> Any:
        return {**batch, "weights": np.ones(batch["ids"].shape, np.float32)}


def test_weights_of_a_plugin_that_says_it_adds_none_are_refused() -> None:
    with pytest.raises(PluginCodeError, match="gave weights to on_batch") as refused:
        called(Weighs(), "train", Counter())
    assert refused.value.where == "a batch that had none"
    given = [LoadedPlugin.of("one", Weighs())]
    hook = plan_hook(plan_of("one"), given, seen=Counter(), streams=Streams(0))
    weighted = batch() | {"weights": np.ones((2, 4), np.float32)}
    assert hook is not None
    assert "weights" in hook(weighted, "train")


def test_who_takes_every_label_of_an_evaluation_is_counted() -> None:
    seen: Counter[str] = Counter()
    for phase in ("train", "eval", "decode"):
        called(Masks(), phase, seen)
    assert seen == {"batch:one": 3, "unlabelled:one": 1}


class Judge(Plugin, api=1):
    """Returns whatever a test wants as the metric x, or raises it."""

    def on_evaluated(self, model: Any) -> Verdict:
        if isinstance(model, Exception):
            raise model
        if isinstance(model, str):
            return Verdict(model)  # type: ignore[arg-type]
        if isinstance(model, bool):
            return Verdict({"x": 0}, stop=model)  # type: ignore[arg-type]
        return Verdict({"x": model})


def judgement(metric: Any) -> Evaluated:
    judge = LoadedPlugin.of("judge", Judge())
    return with_verdicts([judge], Evaluated(7, 2.0, None), (), metric)


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.array(2.0)])
def test_a_metric_is_any_number(number: Any) -> None:
    assert judgement(number).verdicts == {"judge.x": 2.0}


def test_figures_that_are_no_mapping_are_their_plugin_s_fault() -> None:
    with pytest.raises(PluginCodeError, match="'judge' returned no verdict from on_eval") as raised:
        judgement("high")
    assert raised.value.where == "Verdict(figures='high', stop='')"


@pytest.mark.parametrize("metric", [b"high", None, float("nan"), np.ones(2), [1.0], {}])
def test_a_metric_that_is_no_number_is_its_plugin_s_fault(metric: Any) -> None:
    with pytest.raises(PluginCodeError, match="'judge' returned no verdict from on_eval") as raised:
        judgement(metric)
    assert raised.value.where == f"figures 'x': {metric!r}"
    assert "figures={name: number}" in str(raised.value.fix)


def test_a_reason_to_stop_that_is_no_text_is_its_plugin_s_fault() -> None:
    with pytest.raises(PluginCodeError, match="'judge' returned no verdict from on_eval") as raised:
        judgement(True)
    assert raised.value.where == "Verdict(figures={'x': 0}, stop=True)"


def test_a_refusal_by_the_core_within_on_evaluated_is_its_plugin_s_fault() -> None:
    with pytest.raises(PluginCodeError) as raised:
        judgement(DataError("a row of 1 ids", where="losses", fix="2 to 65 ids"))
    assert raised.value.what == "plugin 'judge' raised in on_evaluated after step 7"
    assert "a row of 1 ids" in str(raised.value.where)
    assert isinstance(raised.value.__cause__, DataError)
