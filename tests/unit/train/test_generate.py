"""Tests of a model's inputs in generation, of stop conditions, and of a run's requirements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.backends.base import Backend
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint.commit import commit
from minillm_core.checkpoint.read import newest_or_refuse
from minillm_core.config.load import load
from minillm_core.errors import PluginCodeError, Refusal
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.plugins.plugin import Plugin
from minillm_core.plugins.sourcing import PLAIN
from minillm_core.plugins.streams import Streams
from minillm_core.train.generate import Sampling, TextGenerator, Window
from minillm_core.train.hooks import plan_hook
from minillm_core.train.request import Prepared, train
from minillm_core.train.run import Run

Batch = dict[str, np.ndarray]
VOCAB = 11


class Reader:
    """Logits that depend on every field of every previous column, and on their order."""

    def __init__(self) -> None:
        self.rows: list[Batch] = []
        self.fed: list[int] = []

    def next_logits(self, batch: Batch) -> np.ndarray:
        self.rows.append(batch)
        columns = np.concatenate([field[0].ravel() for _, field in sorted(batch.items())])
        return np.random.default_rng(columns.astype(np.uint32)).normal(size=VOCAB)

    def decoding(self) -> Any:
        parts: list[Batch] = []

        def feed(batch: Batch) -> np.ndarray:
            parts.append(batch)
            self.fed.append(batch["ids"].shape[1])
            return self.next_logits({n: np.concatenate([p[n] for p in parts], 1) for n in batch})

        return SimpleNamespace(feed=feed)


def doubled(batch: Batch, phase: str) -> Batch:
    """Add a field to a batch."""
    assert phase == "decode"
    return batch | {"twice": 2 * batch["ids"], "wide": np.stack([batch["ids"]] * 3, -1)}


def shown(ids: list[int], context: int) -> list[int]:
    """Compute the expected result from all ids."""
    row: list[int] = []
    for index in ids:
        row.append(index)
        if len(row) > context:
            row = row[-max(1, context // 2) :]
    return row


ids_of = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


@given(ids_of, st.integers(1, 9), st.booleans(), st.none() | st.just(doubled))
def test_the_model_is_shown_the_newest_ids(ids, context, cached, on_batch) -> None:
    model, said = Reader(), []
    window = Window(model, context, cached=cached, on_batch=on_batch, say=said.append)
    for end, index in enumerate(ids, 1):
        window.next_logits([index])
        row = model.rows[-1]
        assert row["ids"].tolist() == [shown(ids[:end], context)]
        assert row["positions"].tolist() == [list(range(row["ids"].shape[1]))]
        assert row["documents"].max() == 0
        assert row["labels"].max() == -1
    assert len(said) == (len(ids) > context)


@given(ids_of, st.integers(1, 40))
def test_more_ids_than_the_context_leave_half_of_it(ids: list[int], context: int) -> None:
    model = Reader()
    Window(model, context).next_logits(ids)
    stay = ids if len(ids) <= context else ids[-max(1, context // 2) :]
    assert model.rows[-1]["ids"].tolist() == [stay]


@given(ids_of, st.integers(1, 9), st.none() | st.just(doubled))
def test_the_cache_changes_nothing(ids: list[int], context: int, on_batch: Any) -> None:
    texts = []
    for cached in (True, False):
        window = Window(Reader(), context, cached=cached, on_batch=on_batch)
        logits = [window.next_logits(ids)]
        for _ in range(15):
            logits.append(window.next_logits([int(logits[-1].argmax())]))
        texts.append(logits)
    np.testing.assert_array_equal(*texts)


def test_only_what_is_new_is_fed() -> None:
    model = Reader()
    window = Window(model, 6, on_batch=doubled)
    for new in ([1, 2, 3], [4], [5], [6], [7], [8]):
        window.next_logits(new)
    assert model.fed == [3, 1, 1, 1, 3, 1]  # the seventh does not fit; three are fed again


def writer(model: Any, vocabulary: Any, **options: Any) -> TextGenerator:
    given: dict[str, Any] = {"context": 8, **options}
    return TextGenerator(model, vocabulary, **given)


@pytest.mark.parametrize("cached", [True, False])
def test_it_goes_on_until_the_end_of_the_text(sure_of, bytewise, cached: bool) -> None:
    wrote = writer(sure_of(b"Once, I"), bytewise)
    found = wrote.generate("On", Sampling(), tokens=9, cached=cached)
    assert "".join(wrote.text(found, "On")) == "Once, I"
    assert (len(found.ids), found.ended) == (5, True)


def test_it_stops_at_the_number_of_tokens(sure_of, bytewise) -> None:
    wrote = writer(sure_of(b"Once, I"), bytewise)
    found = wrote.generate("", Sampling(0), tokens=4)
    assert list(wrote.text(found)) == list("Once")
    assert (len(found.ids), found.ended) == (4, False)


def test_a_document_begins_with_the_end_of_the_one_before(bytewise) -> None:
    model = Reader()
    window = writer(model, bytewise).generate("ab", Sampling(), tokens=1)
    with pytest.raises(IndexError):  # its vocabulary differs
        list(window)
    assert model.rows[0]["ids"].tolist() == [[0, 98, 99]]


class Changer(Plugin, api=1):
    """Drops a column."""

    def on_batch(self, batch: Batch, phase: str) -> Batch:
        return {name: field[:, 1:] for name, field in batch.items()}


def test_a_plugin_that_drops_columns_is_named(bytewise, sure_of) -> None:
    changer = LoadedPlugin.of("changer", Changer())
    config = SimpleNamespace(model=SimpleNamespace(vocab=300))
    plan: Any = SimpleNamespace(
        config=config, on_batch=["changer"], batch_fields=(), sourcing=PLAIN
    )
    hook = plan_hook(plan, [changer], streams=Streams(0))
    wrote = writer(sure_of(b"ab"), bytewise, on_batch=hook)
    with pytest.raises(PluginCodeError, match="'changer' changed the rows or columns in on_batch"):
        list(wrote.generate("a", Sampling(), tokens=3))


# A run of its own


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(bigram, tmp_path: Path, cache: Path) -> Callable[..., Path]:
    """Train a bigram model on bytes with the real loop; return OUT."""

    def trained(*assignments: str) -> Path:
        (tmp_path / "text.txt").write_text("It was a dark and stormy night. " * 200, "utf-8")
        loaded = load(
            preset="tiny",
            assignments=["model.vocab=300", "train.rows=2", "train.seq_len=16", *assignments],
            flags={"--data": [str(tmp_path / "text.txt")], "--steps": 2},
            default_preset=lambda: ("tiny", "test"),
        )
        out = tmp_path / "out"
        here = Detected("torch", "cpu", "test")
        train(
            Prepared(loaded, None, (), here),
            out=out,
            cache=cache,
            say=print,
            create=table(bigram),
        )
        return out

    return trained


def table(bigram: type, plans: list[Plan] | None = None) -> Callable[..., Backend]:
    """Return a backend whose models are tables; requested plans are recorded."""

    class Tables(Backend):
        def trainer(self, plan: Plan, seed: int, **more: Any) -> Any:
            return bigram(vocab=plan.config.model.vocab)

        def model(self, plan: Plan, seed: int, *, max_positions: int | None = None) -> Any:
            return self.trainer(plan, seed)

    def create(detected: Detected, plan: Plan) -> Backend:
        if plans is not None:
            plans.append(plan)
        return Tables()

    return create


def test_a_run_is_opened_in_float32(bigram, run) -> None:
    out, plans = run("train.dtype=bfloat16", "train.compile=on"), []
    opened = Run.open(out, say=print, create=table(bigram, plans))
    wrote = opened.writer()
    assert (plans[0].config.train.dtype, plans[0].config.train.compile) == ("float32", "off")
    assert plans[0].hash == json.loads((out / "run.json").read_text())["plan_hash"]
    assert (wrote.context, opened.step) == (16, 2)
    text = "".join(wrote.text(wrote.generate("It", Sampling(), tokens=20), "It"))
    assert text.startswith("It")


def test_a_run_on_ids_is_refused(bigram, run) -> None:
    out = run()
    (out / "tokenizer.json").unlink()
    with pytest.raises(Refusal, match=r"tokenizer\.json is missing"):
        Run.open(out, say=print, create=table(bigram)).writer()
    saved = newest_or_refuse(out)
    commit(out, saved.step, saved.arrays(), saved.scalars | {"tokenizer": None})
    with pytest.raises(Refusal, match="no tokenizer") as raised:
        Run.open(out, say=print, create=table(bigram)).writer()
    assert raised.value.fix
