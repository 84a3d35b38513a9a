"""Tests of row-wise AdamW against AdamW of every row in every step, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import PlanError, Plugin
from minillm_core.config.load import load
from minillm_core.optim.groups import Group
from minillm_core.optim.rows import rules_of
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_kit import NumPyOps
from minillm_modded.bigram_hash import BigramHash
from minillm_modded.sparse_rows import ROUND, WINDOW, LazyAdamW, SparseRows
from minillm_modded.tables import LAST, state_shapes, stepped
from minillm_modded.value_embeds import ValueEmbeds

OPS = NumPyOps()
ROWS, WIDTH = 6, 3


def planned(*plugins: Plugin, **settings: Any) -> Plan:
    sizes = {"layers": 2, "dim": 8, "heads": 2, "kv_heads": 2, "hidden": 8, "vocab": 9}
    given = {f"model.{key}": value for key, value in sizes.items()} | settings
    config = load(
        preset="tiny",
        assignments=[f"{key}={str(value).lower()}" for key, value in given.items()],
        default_preset=lambda: ("tiny", "test"),
    ).config
    names = {SparseRows: "sparse_rows", BigramHash: "bigram_hash", ValueEmbeds: "value_embeds"}
    loaded = [LoadedPlugin.of(names.get(type(p), type(p).__name__.lower()), p) for p in plugins]
    return build_plan(config, loaded)


def rule_of(
    betas: tuple[float, float], epsilon: float = 1e-8, decay: float = 0.1, wd_mul: float = 1.0
) -> LazyAdamW:
    """Build the rule of a table with these constants; it does not depend on the table's size."""
    one = BigramHash(betas=betas, lr_mul=2.0, wd_mul=wd_mul)
    more = {"train.epsilon": epsilon, "train.weight_decay": decay}
    (rule,) = rules_of(planned(one, SparseRows(), **more)).values()
    assert isinstance(rule, LazyAdamW)
    return rule


class Dense:
    """AdamW of every row, as the reference."""

    def __init__(self, rule: LazyAdamW, start: np.ndarray) -> None:
        self.p, self.m, self.v = start.copy(), np.zeros_like(start), np.zeros_like(start)
        self.summed = np.zeros_like(start)  # m of the gradients' sizes: rounding is relative to it
        self.betas, self.t = rule.betas, 0
        self.epsilon = rule.constant("precondition", "epsilon")
        self.decay = rule.constant("decay", "weight_decay") * rule.group.members[0].wd_mul
        self.moved = np.zeros_like(start)  # total distance moved by each number

    def step(self, grad: np.ndarray, lr: float) -> None:
        (b1, b2), self.t = self.betas, self.t + 1
        self.m = b1 * self.m + (1 - b1) * grad
        self.summed = b1 * self.summed + (1 - b1) * np.abs(grad)
        self.v = b2 * self.v + (1 - b2) * grad**2
        m_hat, v_hat = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        move = 2.0 * lr * m_hat / (np.sqrt(v_hat) + self.epsilon)
        self.moved += np.abs(move)
        self.p -= 2.0 * lr * self.decay * self.p + move


class Sparse:
    """The row-wise rule, applied a step at a time as in a backend."""

    def __init__(self, rule: LazyAdamW, start: np.ndarray) -> None:
        self.rule, self.updates = rule, np.float64(0)
        moments = {entry: np.zeros_like(start) for entry in state_shapes(rule) if entry != LAST}
        self.held = {"param": start.copy(), **moments, LAST: np.zeros(len(start))}
        self.shared = {entry: np.zeros(shape) for entry, shape in rule.shared.items()}

    def step(self, rows: list[int], grad: np.ndarray, lr: float) -> None:
        values, seen = {"train.lr": np.float64(lr)}, []
        held = {entry: array[rows] for entry, array in self.held.items()}
        args = (self.rule, OPS, held, self.shared, grad[rows], 1.0, self.updates, values)
        new = stepped(*args, seen.append)
        for entry, array in self.held.items():
            array[rows] = new[entry]
        self.shared = self.rule.next_shared(OPS, self.shared, self.updates, values)
        self.updates += 1

    def whole(self) -> dict[str, np.ndarray]:
        return self.rule.brought(OPS, self.held, self.shared, self.updates)


def compared(
    rule: LazyAdamW, seen: list[list[int]], rates: list[float], scale: float = 1.0
) -> tuple[Dense, dict[str, np.ndarray]]:
    """Run both with steps that look up these rows, with gradients of that scale."""
    rng = np.random.default_rng(len(seen))
    start = rng.standard_normal((ROWS, WIDTH))
    dense, sparse = Dense(rule, start), Sparse(rule, start)
    for rows, lr in zip(seen, rates, strict=True):
        grad = np.zeros_like(start)
        grad[rows] = scale * rng.standard_normal((len(rows), WIDTH))
        dense.step(grad, lr)
        sparse.step(rows, grad, lr)
    return dense, sparse.whole()


BETAS = st.sampled_from([(0.75, 0.95), (0.9, 0.95), (0.0, 0.95), (0.9, 0.999), (0.5, 0.5)])
SEEN = st.lists(
    st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS).map(sorted),
    min_size=1,
    max_size=60,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(betas=BETAS, seen=SEEN, data=st.data())
def test_rows_are_where_every_step_would_have_moved_them(
    betas: tuple[float, float], seen: list[list[int]], data: Any
) -> None:
    """For any lookups and learning rates, with epsilon small against the gradients."""
    rates = data.draw(st.lists(st.floats(0, 0.1), min_size=len(seen), max_size=len(seen)))
    dense, sparse = compared(rule_of(betas, epsilon=1e-13), seen, rates)
    assert np.all(np.abs(sparse["precondition.m"] - dense.m) <= 1e-12 * dense.summed)
    np.testing.assert_allclose(sparse["precondition.v"], dense.v, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(sparse["param"], dense.p, rtol=0, atol=1e-8)


@pytest.mark.broad(1)
@pytest.mark.parametrize(
    ("betas", "before", "worst"),
    [
        ((0.75, 0.95), 1, 2e-3),
        ((0.75, 0.95), 100, 1e-5),
        ((0.9, 0.95), 1, 1.5e-2),
        ((0.9, 0.95), 100, 4e-4),
        ((0.9, 0.999), 100, 1e-6),
    ],
)
def test_where_epsilon_matters_a_move_is_off_by_what_is_stated(
    betas: tuple[float, float], before: int, worst: float
) -> None:
    """Rows seen first, then never again: the remaining effect of momentum is a single sum."""
    seen = [[*range(ROWS)]] * before + [[]] * 250
    rates = [0.01 * (1 + index % 7) for index in range(len(seen))]
    rule = rule_of(betas, decay=0.0)
    off = {}
    for size in (1e-12, 1e-8, 3e-8, 1e-7, 1.0):  # scale of the gradient; epsilon is 1e-8
        dense, sparse = compared(rule, seen, rates, size)
        off[size] = (np.abs(sparse["param"] - dense.p) / dense.moved).max()
    assert max(off.values()) < worst
    assert max(off[1e-12], off[1.0]) < 3e-6  # epsilon dominates, or is negligible


def test_a_row_that_every_step_sees_is_updated_as_ever() -> None:
    seen = [[*range(ROWS)]] * 30
    dense, sparse = compared(rule_of((0.9, 0.95)), seen, [0.01] * 30, 1e-8)
    np.testing.assert_allclose(sparse["param"], dense.p, rtol=1e-13, atol=0)


def test_decay_alone_is_a_product() -> None:
    """Rows that were never seen have no moments, and only decay."""
    rates = [0.001 * index for index in range(50)]
    dense, sparse = compared(rule_of((0.9, 0.95), decay=0.5), [[0]] * 50, rates)
    np.testing.assert_allclose(sparse["param"][1:], dense.p[1:], rtol=1e-12)
    assert np.all(np.abs(sparse["param"]) > 0)


def test_skipping_is_another_rule() -> None:
    """Updates that torch's SparseAdam skips are most of a row's movement, so that the sum is worthwhile."""
    dense, _ = compared(rule_of((0.75, 0.95), decay=0.0), [[*range(ROWS)]] + [[]] * 80, [0.01] * 81)
    first = 2.0 * 0.01 * 1.0  # the first step moves each number by the learning rate
    assert 0.7 < 1 - first / dense.moved.min() < 0.8


def test_brought_up_to_date_twice_is_once_bit_by_bit() -> None:
    rule, rng = rule_of((0.75, 0.95)), np.random.default_rng(0)
    held = {"param": rng.standard_normal((ROWS, WIDTH)), LAST: np.full(ROWS, 5.0)}
    held |= {entry: rng.random((ROWS, WIDTH)) for entry in ("precondition.m", "precondition.v")}
    shared = {"sums": np.zeros((5, WINDOW))}
    for updates in range(5, 9):
        now = rule.brought(OPS, held, shared, np.float64(updates))
        if updates == 5:
            assert all(np.array_equal(now[entry], held[entry]) for entry in now)
        held = {**now, LAST: np.full(ROWS, float(updates))}


@pytest.mark.parametrize("rows", [2, 999, 1000, 1001, 2500, 250_001])
def test_no_row_waits_longer_than_the_sums_reach_back(rows: int) -> None:
    rule = rule_of((0.9, 0.95))
    member = rule.group.members[0]
    sized = LazyAdamW(Group(rule.group.rule, (replaced(member, rows),)))
    last, longest = np.zeros(rows), 0.0
    for updates in range(1, 2 * ROUND + 10):
        index = sized.in_turn(OPS, np.float64(updates))
        assert len(np.unique(index)) == len(index)
        longest = max(longest, float((updates - last[index]).max()))
        last[index] = updates
    assert max(longest, float((updates - last).max())) < WINDOW


def replaced(member: Any, rows: int) -> Any:
    return type(member)(**{**vars(member), "shape": (rows, WIDTH)})


def test_the_plan_names_tables_and_hashes_differ() -> None:
    tables = (BigramHash(), ValueEmbeds(tables=1, gate_width=4))
    dense, sparse = planned(*tables), planned(*tables, SparseRows())
    assert dense.by_rows == {}
    assert {one.field for one in sparse.by_rows.values()} == {"bigram", "ids"}
    assert dense.hash != sparse.hash
    assert "rows" not in str(dense.data()["optimizer"]["groups"])
    placed = [one for one in sparse.placements if one.owner == "sparse_rows"]
    assert [one.what for one in placed] == [
        "rows of 'bigram' alone, in 8 sizes",
        "rows of 'ids' alone, in 8 sizes",
    ]
    assert not any(one.settled or one.shapes for one in placed)
    assert sparse.export == dense.export


class Cautious(Plugin, api=1):
    """Replaces the decay of every rule."""

    def optimizer_factory(self, optimizer: Any) -> None:
        from minillm_core import INHERITED, stage
        from minillm_core.optim.adamw import decay

        optimizer.extend("*", "decay", stage(decay, weight_decay=INHERITED))


class Freezes(Plugin, api=1):
    """Freezes the table."""

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.freeze(lambda _, p: bool(p.rows))


class Head(Plugin, api=1):
    """Declares row-wise lookup for a parameter that is not a table."""

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.rows(lambda _, p: p.role == "head", LazyAdamW)


def test_another_decay_is_none_where_there_is_none() -> None:
    plan = planned(BigramHash(wd_mul=0.0), SparseRows(), Cautious())
    assert len(plan.by_rows) == 1


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ((SparseRows(),), "no table of this model is looked up"),
        (
            (BigramHash(wd_mul=1.0), SparseRows(), Cautious()),
            "rule 'adamw' of cautious, not plain AdamW",
        ),
        ((BigramHash(), SparseRows(), Freezes()), "'freezes' freezes it"),
        ((BigramHash(betas=(0.98, 0.95)), SparseRows()), "betas (0.98, 0.95) a row"),
        ((BigramHash(), Head()), "its module does not say that its rows are looked up"),
    ],
)
def test_what_cannot_be_updated_by_rows_is_refused(plugins: tuple[Plugin, ...], words: str) -> None:
    with pytest.raises(PlanError) as refused:
        planned(*plugins, **{"model.tied": False})
    assert words in str(refused.value)
    assert refused.value.fix
