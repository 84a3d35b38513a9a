"""Tests that row-wise tables train like whole tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import Module, Param, PlanError, Plugin, RowRule
from minillm_core.nn.decoder import lookup
from minillm_core.plugins.builders.optimizer import ROWS
from minillm_modded.tables import SeenRows

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

BACKENDS = pytest.mark.parametrize("backend", ["torch", "mlx"])
TABLES = ("bigram_hash", "value_embeds")
BIGRAMS, VALUES = "streams.bigram_embedding.weight", "streams.value_embedding_0.weight"


def both(lab: Any, **settings: Any) -> tuple[Any, Any]:
    """Return the plan with two tables, whole and by rows."""
    more = {"model_layers": 2, **settings}
    options = {k: more.pop(k) for k in [*more] if k.startswith("sparse_rows.")}
    return lab.plan(*TABLES, **more), lab.plan(*TABLES, "sparse_rows", **more, **options)


def steps_of(lab: Any, plan: Any, count: int, micro: int = 1) -> list[list[Any]]:
    whole = [lab.batch(plan, seed, rows=plan.config.train.rows * micro) for seed in range(count)]
    return [lab.split(lab.completed(plan, batch), micro) for batch in whole]


@pytest.mark.parametrize(
    ("backend", "micro", "compiled"),
    [
        ("torch", 3, "off"),
        ("mlx", 1, "off"),
        pytest.param("mlx", 3, "off", marks=pytest.mark.slow),
        pytest.param("torch", 1, "on", marks=pytest.mark.slow),
        pytest.param("torch", 3, "on", marks=pytest.mark.slow),
        pytest.param("mlx", 3, "on", marks=pytest.mark.slow),
    ],
)
def test_losses_and_tables_are_those_of_whole_tables(
    lab: Any, backend: str, micro: int, compiled: str, aot_trainer: Any
) -> None:
    more: dict[str, Any] = {"value_embeds.wd_mul": 1}
    if (backend, compiled) == ("torch", "on"):  # a graph per number of rows: two of them
        more |= {"model_layers": 1, "sparse_rows.buckets": 2}
    plans = both(lab, train_compile=compiled, train_weight_decay=0.1, **more)
    batches = steps_of(lab, plans[0], 10, micro)
    made = [aot_trainer(plan, backend) for plan in plans]
    losses = [lab.losses(run, plan, batches) for run, plan in zip(made, plans, strict=True)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    dense, sparse = (run.arrays() for run in made)
    for name in plans[0].parameters:
        table = name in plans[1].by_rows  # a row moves by 0.2 in a step: see the rule's error
        assert np.abs(dense[f"model.{name}"] - sparse[f"model.{name}"]).max() < (
            5e-4 if table else 2e-5
        ), name
    probe = [one for batch in batches[:3] for one in batch]
    assert made[1].evaluate(probe)[0] == pytest.approx(made[0].evaluate(probe)[0], rel=1e-5)
    row = {name: part[:1] for name, part in probe[0].items()}
    logits = [run.next_logits(row) for run in made]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)
    seen = {name: made[1].witnesses()[f"{ROWS}{name}"] for name in plans[1].by_rows}
    most = 10 * micro * batches[0][0]["ids"].size
    assert all(0 < count <= most for count in seen.values())


@BACKENDS
def test_where_every_row_is_held_the_bits_are_those_of_the_dense_rule(
    lab: Any, backend: str
) -> None:
    """A single size, and more ids in a step than the tables have rows."""
    given = {"train_rows": 8, "bigram_hash.size": 0.5, "sparse_rows.buckets": 1}
    dense = lab.plan(*TABLES, **{k: v for k, v in given.items() if "sparse" not in k})
    sparse = lab.plan(*TABLES, "sparse_rows", **given)
    more = {"fused": False} if backend == "torch" else {}
    made = [lab.trainer(plan, backend, **more) for plan in (dense, sparse)]
    batches = steps_of(lab, dense, 6)
    for run, plan in zip(made, (dense, sparse), strict=True):
        lab.losses(run, plan, batches)
    whole, rows = (run.arrays() for run in made)
    assert made[1].witnesses()[f"{ROWS}{VALUES}"] == 6 * 97
    for name in dense.parameters:
        np.testing.assert_array_equal(whole[f"model.{name}"], rows[f"model.{name}"], name)
    moment = rows[f"optimizer.rows.precondition.v.{BIGRAMS}"]
    np.testing.assert_array_equal(whole[f"optimizer.precondition.v.{BIGRAMS}"], moment)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", "bfloat16"),
        ("mlx", "float32"),
        pytest.param("torch", "float32", marks=pytest.mark.slow),
        pytest.param("mlx", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_saved(
    lab: Any, backend: str, dtype: str
) -> None:
    """Saving and evaluating in between change nothing, at any step."""
    _, plan = both(lab, train_dtype=dtype)
    batches = steps_of(lab, plan, 6)
    straight = lab.trainer(plan, backend)
    expected = lab.losses(straight, plan, batches)
    for at in (1, 4):
        first = lab.trainer(plan, backend)
        lab.losses(first, plan, batches[:at])
        saved = first.arrays()
        first.evaluate(batches[0])
        second = lab.trainer(plan, backend, seed=1)
        second.resume(saved)
        for run in (first, second):
            total = plan.config.train.steps
            for index in range(at, len(batches)):
                values = plan.values((index + 1) / total)
                result = run.read(run.step(batches[index], values, lab.supervised(batches[index])))
                assert result.loss == expected[index]
        wanted = straight.arrays()
        for run in (first, second) if at == 4 else ():
            assert all(
                np.array_equal(run.arrays()[k], wanted[k]) for k in wanted if "random" not in k
            )


def test_a_run_goes_on_with_the_tables_of_the_other_framework(lab: Any) -> None:
    _, plan = both(lab)
    batches, made = steps_of(lab, plan, 12), [lab.trainer(plan, b) for b in ("torch", "mlx")]
    lab.losses(made[0], plan, batches[:6])
    made[1].resume(made[0].arrays())
    saved = [run.arrays() for run in made]
    for name in plan.by_rows:
        np.testing.assert_allclose(saved[1][f"model.{name}"], saved[0][f"model.{name}"], atol=1e-6)
    after = [lab.losses(run, plan, batches[6:]) for run in made]
    assert after[1] == pytest.approx(after[0], rel=1e-5)


@BACKENDS
def test_a_step_that_is_not_finite_changes_no_row(lab: Any, backend: str) -> None:
    _, plan = both(lab)
    run, batches = lab.trainer(plan, backend), steps_of(lab, plan, 3)
    lab.losses(run, plan, batches[:2])
    before = run.arrays()
    result = run.read(run.step(batches[2], plan.values(0.5), 1e-45))  # 1 / that is infinite
    assert result.skipped
    after = run.arrays()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    (loss,) = lab.losses(run, plan, batches[2:])
    assert np.isfinite(loss)


@BACKENDS
def test_a_run_with_whole_tables_is_continued_by_rows(lab: Any, backend: str) -> None:
    """As in a branch: arrays that match by name are used, the others have initial values."""
    dense, sparse = both(lab)
    batches, old = steps_of(lab, dense, 8), lab.trainer(dense, backend)
    lab.losses(old, dense, batches[:4])
    run, held = lab.trainer(sparse, backend), old.arrays()
    fresh = run.arrays()
    assert not any(k.startswith("optimizer.") and BIGRAMS in k for k in fresh.keys() & held.keys())
    run.resume(fresh | {name: array for name, array in held.items() if name in fresh})
    for name in dense.parameters:
        np.testing.assert_array_equal(run.arrays()[f"model.{name}"], held[f"model.{name}"])
    assert all(np.isfinite(lab.losses(run, sparse, batches[4:])))


@BACKENDS
def test_a_reference_model_is_given_ids_and_no_places(lab: Any, backend: str) -> None:
    """It may have tables of the same names, which are whole."""
    _, plan = both(lab)
    run, ((batch,),) = lab.trainer(plan, backend), steps_of(lab, plan, 1)
    given: list[set[str]] = []
    run.references["teacher"] = lambda host: (given.append({*host}), 0)[1]
    micro, _ = run.record_rows([batch])
    read = run.fields(micro[0], {})
    assert lookup(BIGRAMS) in read
    assert given == [{*batch}]


@BACKENDS
def test_restarted_is_as_made(lab: Any, backend: str) -> None:
    _, plan = both(lab)
    run, batches = lab.trainer(plan, backend), steps_of(lab, plan, 4)
    expected = lab.losses(run, plan, batches)
    run.restart(0)
    assert lab.losses(run, plan, batches) == expected


@pytest.mark.slow
def test_each_size_is_compiled_once_and_shown(lab: Any, aot_trainer: Any) -> None:
    from contextlib import nullcontext

    plan = lab.plan("bigram_hash", "sparse_rows", train_compile="on", model_layers=1)
    run, shown = aot_trainer(plan), []
    run.phase = lambda what: (shown.append(what), nullcontext())[1]
    batches = steps_of(lab, plan, 3)
    lab.losses(run, plan, [*batches, *batches])
    sizes = [len(run.record_rows(one)[1][BIGRAMS]) for one in batches]
    words = [f"compiling for {size} rows of {BIGRAMS}" for size in dict.fromkeys(sizes)]
    assert shown == [one for one in words for _ in range(2)]  # rows taken and updated; the model
    assert run.compile_seconds > 0
    assert len(run.graphs) == len(words)


# The host's part


@settings(deadline=None, max_examples=25)
@given(data=st.data(), micro=st.integers(1, 3))
def test_rows_are_those_of_all_micro_batches_filled_up(lab: Any, data: Any, micro: int) -> None:
    plan = data.draw(st.sampled_from(PLANS)) if PLANS else planned_once(lab)
    field = plan.by_rows[BIGRAMS].field
    count, buckets = plan.parameters[BIGRAMS].shape[0], plan.by_rows[BIGRAMS].buckets
    ids = st.lists(st.integers(0, count - 1), min_size=8, max_size=8)
    batches = [{field: np.array(data.draw(ids), np.int32).reshape(2, 4)} for _ in range(micro)]
    made, rows = SeenRows({}, plan).rows_read(batches)
    held, wanted = rows[BIGRAMS], {int(i) for one in batches for i in one[field].flat}
    assert held.dtype == np.int32
    assert np.all(np.diff(held) > 0)
    assert wanted <= {*held.tolist()}
    assert 0 <= held[0] <= held[-1] < count
    size = -(-min(count, 8 * micro) // buckets)
    assert len(held) in (count, -(-len(wanted) // size) * size)
    for one, batch in zip(made, batches, strict=True):
        np.testing.assert_array_equal(held[one[lookup(BIGRAMS)]], batch[field])


PLANS: list[Any] = []


def planned_once(lab: Any) -> Any:
    PLANS.append(lab.plan("bigram_hash", "sparse_rows"))
    return PLANS[0]


def test_what_is_packed_is_unpacked_bit_by_bit() -> None:
    rng = np.random.default_rng(0)
    raw = rng.standard_normal((5, 2)).astype(np.float32)
    raw[0] = [-0.0, np.nan]
    now, last = raw * np.float32(0.9), np.arange(5, dtype=np.float32)
    updates = np.array(7.0, np.float32)
    held = {"model.t": now, "rows.pending.t": raw, "rows.age.t": last, "optimizer.updates": updates}
    tables: Any = SeenRows(dict.fromkeys("t"), None)  # type: ignore[arg-type]
    saved = tables.packed({name: array.copy() for name, array in held.items()})
    assert saved["model.t"].tobytes() == now.tobytes()
    assert saved["rows.age.t"].tolist() == [7, 6, 5, 4, 3]
    found = tables.unpacked(saved)
    assert found["model.t"].tobytes() == raw.tobytes()
    np.testing.assert_array_equal(found["rows.age.t"], last)


# Refusals


class Inside(Module):
    """A table that is not a stream's."""

    def __init__(self, argument: str) -> None:
        super().__init__()
        self.weight = Param((97, 32), role="embedding.own", rows=argument)

    def forward(self, x: Any, ids: Any) -> Any:
        return x + self.ops.embedding(ids, self.weight)


class Reads(Module):
    """A stream looked up by a missing argument, or by something other than a field."""

    def __init__(self, argument: str) -> None:
        super().__init__()
        self.weight = Param((97, 32), role="embedding.own", rows=argument)

    def forward(self, x0: Any) -> Any:
        return x0


class Third(Plugin, api=1):
    """A table of a third party."""

    def build_model(self, model: Any) -> None:
        model.embed.mix(Inside, argument="ids")


class Stream(Plugin, api=1):
    """Another."""

    argument: str = "ids"

    def build_model(self, model: Any) -> None:
        model.stream("own", Reads, argument=self.argument)


class Rule(RowRule):
    """A rule that accepts everything."""

    def brought(self, ops: Any, held: Any, shared: Any, updates: Any) -> Any:
        return {name: array for name, array in held.items() if name != "last"}

    def next_shared(self, ops: Any, shared: Any, updates: Any, values: Any) -> Any:
        return dict(shared)

    def in_turn(self, ops: Any, updates: Any) -> Any:
        return ops.arange(1)


class Another(Plugin, api=1):
    """Claims the same tables, with another rule."""

    buckets: int = 4

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.rows(lambda _, p: bool(p.rows), Rule, buckets=self.buckets)


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ({"third": Third()}, "Inside has a table with rows='ids'"),
        ({"stream": Stream()}, "Reads has a table with rows='ids'"),
        ({"stream": Stream(argument="x0")}, "is looked up by 'x0', which is not a batch field"),
        ({"another": Another(buckets=0)}, "buckets=0"),
    ],
)
def test_tables_that_are_read_otherwise_are_refused(lab: Any, plugins: Any, words: str) -> None:
    with pytest.raises(PlanError) as refused:
        lab.plan("bigram_hash", plugins=plugins)
    assert words in str(refused.value)


def test_two_that_claim_a_table_are_refused(lab: Any) -> None:
    with pytest.raises(PlanError, match=r"opt.rows\[.*\] is claimed by both 'another' and 'sparse"):
        lab.plan("bigram_hash", "sparse_rows", plugins={"another": Another()})


@BACKENDS
def test_a_rule_of_a_third_party_is_run(lab: Any, backend: str) -> None:
    """The rule of torch's SparseAdam, except for its moments: unseen rows do not change."""
    plan = lab.plan("bigram_hash", plugins={"another": Another()})
    run, (batch,) = lab.trainer(plan, backend), steps_of(lab, lab.plan("bigram_hash"), 1)[0]
    lab.losses(run, plan, [[batch]] * 3)
    table = run.arrays()[f"model.{BIGRAMS}"]
    moved = {*np.flatnonzero(table.any(1)).tolist()}
    assert moved == {*batch["bigram"].reshape(-1).tolist()}
