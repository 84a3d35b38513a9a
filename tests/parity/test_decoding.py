"""Tests that decoding with a KV cache equals a pass over the whole sequence, for any split of the sequence.

Every slot whose plugins may read other columns is covered; the same nodes
without their declared lookback give other logits, so these tests can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from minillm_core import EVERYTHING, Call, Layout, Learned, Linear, Module, Normal, Param, Plugin
from minillm_core.backends.native import Continuation
from minillm_core.errors import DataError, PluginCodeError
from minillm_core.nn.node import Scope
from minillm_core.optim.schedules import piecewise, stages
from minillm_kit import last_logits, materialise

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

LENGTH, POSITIONS = 10, 12
LEVELS = {"torch": 1e-5, "mlx": 1e-5, "numpy": 1e-10}


def before(ops: Any, x: Any, n: int = 1) -> Any:
    """Shift x (B, T, ...) by ``n`` columns, with 0 at the start."""
    n = min(n, x.shape[1])
    return ops.concat([ops.zeros_like(x[:, :n]), x[:, : x.shape[1] - n]], 1)


class Smear(Module):
    """A node that reads x and the column before it; as an embed node, a norm, or any node with x only."""

    lookback = 1

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.mix = Linear(geometry.dim, geometry.dim, role="gate")

    def forward(self, x: Any) -> Any:
        return x + self.mix(before(self.ops, x))


class Smeared(Plugin, api=1):
    """Embed nodes, norms and MLPs with a lookback."""

    def build_model(self, model: Any) -> None:
        model.embed.mix(Smear)
        model.norm("layers.0.attention", Smear)
        model.norm("final", Smear)
        model.mlp(1, Smear)


class KeyOffset(Module):
    """A node that takes half of each key from the column before."""

    lookback = 1

    def forward(self, q: Any, k: Any) -> Any:
        own, other = self.ops.split(k, 2, -1)
        return q, self.ops.concat([own, before(self.ops, other)], -1)


class Offset(Plugin, api=1):
    """Keys moved after the rotation in one layer, before it in the other."""

    def build_attention(self, attn: Any) -> None:
        (attn.qk.shift if attn.layer else attn.qk.norm)(KeyOffset)


class Pairs(Module):
    """A stream (B, T, C) of a batch field that hashes two ids, and of the one two before."""

    def __init__(self, geometry: Any, reach: int) -> None:
        super().__init__()
        self.lookback = reach
        self.reach = reach
        self.table = Param((64, geometry.dim), init=Normal(0.5), role="embedding.bigram")

    def forward(self, pair: Any) -> Any:
        rows = self.ops.embedding(pair, self.table)
        return rows + before(self.ops, rows, self.reach)


class FromStream(Module):
    """A term of v from a stream of the previous column."""

    lookback = 1

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.size = geometry.head_dim
        self.to_v = Linear(geometry.dim, geometry.kv_heads * geometry.head_dim, role="gate")

    def forward(self, v: Any, pairs: Any) -> Any:
        B, T, _ = pairs.shape
        return self.ops.reshape(self.to_v(before(self.ops, pairs)), (B, T, -1, self.size)) - 0.1 * v


class Bigram(Plugin, api=1):
    """A declared field -> a stream -> v and the residual stream."""

    def build_data(self, data: Any) -> None:
        data.field("pair", "int32")

    def build_attention(self, attn: Any) -> None:
        attn.v(FromStream)

    def build_model(self, model: Any) -> None:
        model.stream("pairs", Pairs, reach=2)
        model.residual("layers.1.in", "pairs", 0.5)

    def on_batch(self, batch: Any, phase: str) -> Any:
        return batch


class Gate(Module):
    """y weighted by x, with a schedule value, a term and a statistic."""

    reads = {"lr": "train.lr"}  # noqa: RUF012
    terms = ("balance",)
    statistics = {"load": "mean"}  # noqa: RUF012
    lookback = 1

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.gate = Linear(geometry.dim, geometry.heads, role="gate", init=Normal(0.5))

    def forward(self, y: Any, x: Any, lr: Any) -> tuple[Any, ...]:
        opened = self.ops.sigmoid(self.gate(before(self.ops, x))) * (1.0 + lr)
        load = self.ops.mean(opened, (0, 1))
        return y * self.ops.expand_dims(opened, -1), self.ops.sum(self.ops.square(load)), load

    def next_state(self, load: Any) -> dict[str, Any]:
        return {}


class FromValues(Module):
    """y minus its head's own value in the previous column; also reads a tap."""

    lookback = 1

    def forward(self, y: Any, k: Any, v: Any, early: Any) -> Any:
        mean = self.ops.mean(before(self.ops, k * v), (2, 3), keepdims=True)
        return y - mean * (1.0 + self.ops.mean(early, -1, keepdims=True)[..., None])


class Gated(Plugin, api=1):
    """The out chain, with gates that read x, k, v and a tap of an earlier layer."""

    def build_attention(self, attn: Any) -> None:
        if attn.layer:
            attn.out.correct(FromValues, name="values")
        attn.out.gate(Gate)

    def build_model(self, model: Any) -> None:
        model.tap("layers.0.mid", name="early")

    def compute_loss(self, loss: Any) -> None:
        loss.term("balance", emitted="balance", weight=0.5)


class Own(Module):
    """A whole attention, which needs every column."""

    lookback = EVERYTHING

    def forward(self, x: Any) -> Any:
        heads = self.ops.expand_dims(x, 2)
        return self.ops.attention(heads, heads, heads)[:, :, 0]


class Claimed(Plugin, api=1):
    """A whole attention."""

    def build_model(self, model: Any) -> None:
        model.attention(0, Own)


class Weigh(Module):
    """A coefficient (B, T, 1) from the previous column."""

    lookback = 1

    def forward(self, carry: Any, x0: Any) -> Any:
        return self.ops.tanh(before(self.ops, self.ops.sum(carry * x0, -1, keepdims=True)))


class Residual(Plugin, api=1):
    """Sites with nodes as coefficients, and a tap as their source."""

    def build_model(self, model: Any) -> None:
        early = model.tap("layers.0.in")
        model.residual("layers.1.mid", "sublayer", Weigh)
        model.residual("layers.1.out", early, 0.5)
        model.residual("final", "x0", Weigh)


class AlsoResidual(Plugin, api=1):
    """Further shares of the sources that Residual adds."""

    def build_model(self, model: Any) -> None:
        model.residual("layers.1.out", model.tap("layers.0.in"), Learned(-0.25))
        model.residual("final", "x0", Weigh)


def slowed(frequencies: np.ndarray, by: int) -> np.ndarray:
    """Return the frequencies of another stage."""
    return frequencies / by


class Lane(Module):
    """A lane beside the stream, updated where a sublayer is added."""

    lookback = 1

    def forward(self, x: Any, sublayer: Any, lane: Any) -> Any:
        return 0.5 * lane + before(self.ops, sublayer) + 0.1 * x


class Weights(Module):
    """Two coefficients (B, T, 2) of the stream at a site, and of a lane."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.mix = Linear(geometry.dim, 2, role="gate", init=Normal(0.5))

    def forward(self, x: Any, lane: Any) -> Any:
        return self.ops.tanh(self.mix(x + lane))


class Taken(Module):
    """One of the two, (B, T, 1)."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, weights: Any) -> Any:
        return weights[..., self.index : self.index + 1]


class GatedBy(Module):
    """y gated by one of the two."""

    def forward(self, y: Any, mix: Any) -> Any:
        return y * (1.0 + mix[..., :1, None])


class Opened(Module):
    """The product of a linear module, gated by a lane and a schedule value."""

    def forward(self, x: Any, weight: Any, lane: Any, lr: Any) -> Any:
        opened = self.ops.sigmoid(self.ops.mean(lane, -1, keepdims=True)) * (1.0 + lr)
        return self.ops.linear(x, weight) * opened


class Lanes(Plugin, api=1):
    """Lanes beside the stream, inputs apart from it, and products that read them."""

    def build_attention(self, attn: Any) -> None:
        if attn.layer == 1:
            attn.out.gate(GatedBy)

    def build_model(self, model: Any) -> None:
        lane = "x0"
        for at in ("layers.0.mid", "layers.0.out", "layers.1.mid"):
            name = f"lane_{at[7]}_{at[9:]}"
            model.stream(name, Lane, at=at, reads={"lane": lane})
            model.residual(at, name, 0.25)
            lane = name
        reads = {"lane": "lane_0_out"}
        model.stream("mix", Weights, at="layers.1.attention", reads=reads)
        model.input("layers.1.attention", "carry", Taken, reads={"weights": "mix"}, index=1)
        model.input("layers.1.attention", "lane_0_out")
        early = model.tap("layers.0.mid")
        model.input("layers.1.attention.q", early, Taken, reads={"weights": "mix"}, index=0)
        model.input("layers.1.attention.k", "carry", 0.0)
        model.input("layers.1.attention.k", "x0")
        model.input("layers.1.attention.v", "lane_0_mid", Learned(0.5))
        model.input("layers.0.mlp", "lane_0_mid", piecewise((0, 0.5), (1, 1.0)))
        product = {"lane": "lane_0_out", "lr": "train.lr"}
        for leaf in ("attention.q", "attention.o", "mlp.down"):
            model.linear(f"layers.1.{leaf}", Opened, reads=product)
        model.stream("last", Lane, at="final", reads={"lane": lane, "sublayer": "x0"})
        model.residual("final", "last")


class Window(Plugin, api=1):
    """Windows, scales and rotations: numbers, values of the schedule, staged values."""

    def build_attention(self, attn: Any) -> None:
        attn.rope.scaling(slowed, by=stages((0, 2), (0.5, 5)) if attn.layer else 3)
        attn.window((3, piecewise((0, 8), (1, 5)), stages((0, 2), (0.5, 4)))[attn.layer])
        attn.scale(0.5 if attn.layer else piecewise((0, 1.0), (1, 0.3)))


class Counted(Module):
    """Positions counted from the sequence's start, which must be visible."""

    lookback = EVERYTHING

    def forward(self, x: Any) -> Any:
        return self.ops.arange(x.shape[1]) // 2


class Given(Module):
    """Positions from the batch, reversed."""

    def forward(self, positions: Any) -> Any:
        return 11 - positions


class Positions(Plugin, api=1):
    """Positions by count in one layer, by field in the other."""

    def build_attention(self, attn: Any) -> None:
        attn.rope.positions(Given if attn.layer else Counted)


class Doubled(Layout):
    """Every column twice, the second time halved; y is the sum. Rotated before."""

    stretch = 2

    def enter(self, call: Call) -> Call:
        q, k, v = (self.twice(x) for x in (call.q, call.k, call.v))
        return call._replace(q=q, k=k, v=v)

    def twice(self, x: Any) -> Any:
        B, T, H, D = x.shape
        return self.ops.reshape(self.ops.stack([x, 0.5 * x], 2), (B, 2 * T, H, D))

    def leave(self, y: Any) -> Any:
        B, T, H, D = y.shape
        return self.ops.sum(self.ops.reshape(y, (B, T // 2, 2, H, D)), 2)


class Spans(Layout):
    """Documents of four positions each, from the call's positions; rotated after."""

    rope = "after"

    def enter(self, call: Call) -> Call:
        T = call.q.shape[1]
        where = self.ops.arange(T) if call.positions is None else call.positions
        documents = self.ops.broadcast_to(self.ops.reshape(where // 4, (1, T)), call.q.shape[:2])
        return call._replace(documents=documents)

    def leave(self, y: Any) -> Any:
        return y


class Layouts(Plugin, api=1):
    """A layout that is rotated before, and one that is rotated after it and sets documents."""

    def build_attention(self, attn: Any) -> None:
        attn.layout(Spans if attn.layer else Doubled)


class Faded(Module):
    """Sigmoid attention that fades with distance, gated by x, without a softmax."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.groups = geometry.heads // geometry.kv_heads
        self.open = Linear(geometry.dim, geometry.heads, role="gate", init=Normal(0.5))

    def forward(self, q: Any, k: Any, v: Any, x: Any, mask: Any, distance: Any, scale: Any) -> Any:
        ops = self.ops
        return fading(ops, q, k, v, mask, distance, scale) * ops.expand_dims(
            ops.sigmoid(self.open(x)), -1
        )


def fading(ops: Any, q: Any, k: Any, v: Any, mask: Any, distance: Any, scale: Any) -> Any:
    """Sum v weighted by sigmoid(q k) / (1 + distance)."""
    group = q.shape[2] // k.shape[2]
    k, v = (ops.concat([x[:, :, i // group, None] for i in range(q.shape[2])], 2) for x in (k, v))
    heads = (0, 2, 1, 3)
    q, k, v = (ops.permute_dims(x, heads) for x in (q, k, v))
    faded = ops.sigmoid(q @ ops.matrix_transpose(k) * scale) / (1.0 + ops.maximum(distance, 0))
    return ops.permute_dims(ops.where(mask, faded, 0.0) @ v, heads)


class Plain(Module):
    """The same without further inputs, for use in a layout."""

    def forward(self, q: Any, k: Any, v: Any, mask: Any, distance: Any, scale: Any) -> Any:
        return fading(self.ops, q, k, v, mask, distance, scale)


class Cores(Plugin, api=1):
    """Attention functions with windows, documents, scheduled scales and a layout."""

    def build_attention(self, attn: Any) -> None:
        attn.core(Plain if attn.layer == 1 else Faded)
        attn.window(3 + attn.layer)
        attn.scale(piecewise((0, 1.0), (1, 0.3)) if attn.layer else 0.7)
        if attn.layer == 1:
            attn.layout(Doubled)
        if attn.layer == 2:
            attn.layout(Spans)


class Shared(Module):
    """Queries and keys mixed with an earlier layer's, keys with the previous column's."""

    lookback = 1

    def forward(self, q: Any, k: Any, first_q: Any, first_k: Any) -> Any:
        return q + 0.5 * first_q, k + 0.5 * before(self.ops, first_k)


class Lent(Module):
    """A term of v from an earlier layer's values and output."""

    def forward(self, v: Any, first_v: Any, first_y: Any) -> Any:
        B, T, K, D = v.shape
        return 0.5 * first_v + self.ops.mean(self.ops.reshape(first_y, (B, T, K, -1, D)), 3) - v


class Tapped(Plugin, api=1):
    """Every array of the first attention, read in the others; rotated after a layout in one."""

    def build_attention(self, attn: Any) -> None:
        if attn.layer:
            attn.qk.shift(Shared) if attn.layer == 1 else attn.qk.norm(Shared)
            attn.v(Lent)
        if attn.layer == 2:
            attn.layout(Spans)

    def build_model(self, model: Any) -> None:
        for name in "qkvy":
            model.tap(f"layers.0.attention.{name}", name=f"first_{name}")


class Latent(Module):
    """A whole attention that caches one narrow array of keys and values, with its layer's mask."""

    keeps = ("latent",)

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.down = Linear(geometry.dim, 8, role="gate")
        self.q = Linear(geometry.dim, 8, role="gate")
        self.up = Linear(8, geometry.dim, role="gate")

    def forward(self, x: Any, window: Any, documents: Any, latent: Any) -> tuple[Any, Any]:
        new = self.down(x)
        whole = new if latent is None else self.ops.concat([latent, new], 1)
        q, k = (self.ops.expand_dims(a, 2) for a in (self.q(x), whole))
        y = self.ops.attention(q, k, k, window=window, documents=documents)
        return self.up(y[:, :, 0]), new


class Back(Module):
    """A whole attention with a lookback of a few columns, with its layer's mask."""

    lookback = 4

    def forward(self, x: Any, documents: Any, window: Any) -> Any:
        q = self.ops.expand_dims(x, 2)
        return self.ops.attention(q, q, q, window=window, documents=documents)[:, :, 0]


class Masked(Plugin, api=1):
    """Windows and documents of layers with a replaced attention, and of one without."""

    def build_attention(self, attn: Any) -> None:
        attn.window((stages((0, 2), (0.5, 4)), 5, 3)[attn.layer])
        attn.documents()

    def build_model(self, model: Any) -> None:
        model.attention(0, Latent)
        model.attention(1, Back)


class Sums(Module):
    """x and the sums of all previous columns, with two cached arrays, a term and a statistic."""

    keeps = ("total", "squares")
    terms = ("size",)
    statistics = {"load": "mean"}  # noqa: RUF012

    def forward(self, x: Any, total: Any, squares: Any) -> tuple[Any, ...]:
        kept = [self.summed(x, total), self.summed(self.ops.square(x), squares)]
        size = self.ops.mean(kept[1])
        return x + 0.1 * kept[0] / (1.0 + kept[1]), *kept, size, self.ops.mean(x, (0, 1))

    def summed(self, x: Any, earlier: Any) -> Any:
        ops, T = self.ops, x.shape[1]
        below = ops.astype(ops.expand_dims(ops.arange(T), 1) >= ops.arange(T), "float32")
        sums = ops.stack([ops.sum(x * below[t, :, None], 1) for t in range(T)], 1)
        return sums if earlier is None else sums + earlier[:, -1:]

    def next_state(self, load: Any) -> dict[str, Any]:
        return {}


class Fading(Module):
    """An attention function whose values are weighted by a cached number of each token."""

    keeps = ("weight",)

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.weigh = Linear(geometry.dim, 1, role="gate", init=Normal(0.5))

    def forward(
        self, q: Any, k: Any, v: Any, x: Any, mask: Any, distance: Any, scale: Any, weight: Any
    ) -> tuple[Any, Any]:
        new = self.ops.sigmoid(self.weigh(x))  # (B, T, 1)
        whole = new if weight is None else self.ops.concat([weight, new], 1)
        v = v * self.ops.expand_dims(whole, -1)
        return fading(self.ops, q, k, v, mask, distance, scale), new


class Kept(Plugin, api=1):
    """Nodes that cache arrays: whole attentions, attention functions, MLPs, norms."""

    def build_attention(self, attn: Any) -> None:
        if attn.layer:
            attn.core(Fading)

    def build_model(self, model: Any) -> None:
        model.attention(0, Latent)
        model.mlp(1, Sums)
        model.norm("final", Sums)

    def compute_loss(self, loss: Any) -> None:
        loss.term("size", emitted="size", weight=0.1)


SETS: dict[str, tuple[tuple[str, ...], dict[str, type[Plugin]], dict[str, Any]]] = {
    "plain": ((), {}, {}),
    "tied": ((), {}, {"model_tied": True}),
    "as many key heads": ((), {}, {"model_kv_heads": 4}),
    "checkpointing": ((), {"gated": Gated}, {"train_checkpointing": True}),
    "muon": (("muon",), {}, {}),
    "paired_heads": (("paired_heads",), {}, {}),
    "both": (("muon", "paired_heads"), {}, {}),
    "smear": ((), {"smear": Smeared}, {}),
    "offset": ((), {"offset": Offset}, {}),
    "bigram": ((), {"bigram": Bigram}, {}),
    "gated": ((), {"gated": Gated}, {}),
    "claimed": ((), {"claimed": Claimed}, {}),
    "residual": ((), {"residual": Residual}, {}),
    "lanes": ((), {"lanes": Lanes}, {}),
    "lanes, checkpointing": ((), {"lanes": Lanes}, {"train_checkpointing": True}),
    "window": ((), {"window": Window}, {"model_layers": 3}),
    "positions": ((), {"positions": Positions}, {}),
    "layouts": ((), {"layouts": Layouts}, {}),
    "cores": ((), {"cores": Cores}, {"model_layers": 3}),
    "kept": ((), {"kept": Kept}, {}),
    "tapped": ((), {"tapped": Tapped}, {"model_layers": 3}),
    "masked": ((), {"masked": Masked}, {"model_layers": 3}),
    "most": (
        ("muon", "paired_heads"),
        {
            **{"bigram": Bigram, "residual": Residual, "shares": AlsoResidual},
            **{"smear": Smeared, "window": Window},
        },
        {},
    ),
    "others": (
        (),
        {"bigram": Bigram, "gated": Gated, "offset": Offset, "positions": Positions},
        {"model_layers": 3},
    ),
}


@dataclass(frozen=True)
class Case:
    """One model: the row that is fed, and its output after each prefix."""

    row: dict[str, np.ndarray]
    decoding: Callable[[], Any]
    whole: list[np.ndarray]
    level: float

    def assert_decodes(self, sizes: list[int]) -> None:
        decoding, at = self.decoding(), 0
        for size in sizes:
            logits = decoding.feed(cut(self.row, at, at + size))
            at += size
            np.testing.assert_allclose(logits, self.whole[at - 1], rtol=0, atol=self.level)
            assert logits.argmax() == self.whole[at - 1].argmax()


def cut(row: dict[str, np.ndarray], start: int, end: int) -> dict[str, np.ndarray]:
    return {name: array[:, start:end] for name, array in row.items()}


def case_of(lab: Any, name: str, backend: str) -> Case:
    names, plugins, options = SETS[name]
    made = {key: plugin() for key, plugin in plugins.items()}
    plan = lab.plan(*names, plugins=made, train_seq_len=POSITIONS, **options)
    row = cut({key: array[:1] for key, array in lab.batch(plan, 3).items()}, 0, LENGTH)
    ids, row["documents"] = row["ids"], np.array([[0] * 3 + [1] * 4 + [2] * 3], np.int32)
    row["pair"] = (ids * 31 + np.pad(ids, ((0, 0), (1, 0)))[:, :-1]) % 64
    if backend == "numpy":
        model = materialise(plan, 0)
        logits = last_logits(plan, model)
        decoding, full = (
            lambda: Continuation(logits, model.geometry),
            lambda batch: logits(batch, Scope),
        )
    else:
        run = lab.trainer(plan, backend)
        decoding, full = run.decoding, run.next_logits
    whole = [full(cut(row, 0, end)) for end in range(1, LENGTH + 1)]
    return Case(row, decoding, whole, LEVELS[backend])


@pytest.fixture(scope="module", params=[(n, b) for n in SETS for b in LEVELS], ids="-".join)
def case(lab: Any, request: pytest.FixtureRequest) -> Case:
    return case_of(lab, *request.param)


@st.composite
def cuts(draw: Any) -> list[int]:
    """Draw sizes of pieces that sum to LENGTH columns."""
    ends = sorted(draw(st.sets(st.integers(1, LENGTH - 1))))
    return np.diff([0, *ends, LENGTH]).tolist()


@pytest.mark.broad(14)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=cuts())
@example(sizes=[LENGTH])
@example(sizes=[1] * LENGTH)
@example(sizes=[6, 1, 1, 2])
def test_however_a_sequence_is_cut_its_logits_are_those_of_the_whole(
    case: Case, sizes: list[int]
) -> None:
    case.assert_decodes(sizes)


LOOKERS = [
    ("smear", Smear),
    ("offset", KeyOffset),
    ("bigram", FromStream),
    ("gated", Gate),
    ("gated", FromValues),
    ("tapped", Shared),
    ("claimed", Own),
    ("residual", Weigh),
    ("lanes", Lane),
    ("positions", Counted),
]


@pytest.mark.parametrize(("name", "cls"), LOOKERS, ids=[cls.__name__ for _, cls in LOOKERS])
def test_a_node_that_does_not_say_how_far_it_looks_back_decodes_otherwise(
    lab: Any, monkeypatch: pytest.MonkeyPatch, name: str, cls: type[Module]
) -> None:
    monkeypatch.setattr(cls, "lookback", 0)
    case = case_of(lab, name, "numpy")
    decoding = case.decoding()
    far = [
        np.abs(decoding.feed(cut(case.row, at, at + 1)) - case.whole[at]).max()
        for at in range(LENGTH)
    ]
    assert far[0] == 0
    assert max(far) > 1e-3


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_sequences_do_not_know_of_each_other(lab: Any, backend: str) -> None:
    case = case_of(lab, "plain", backend)
    one, other = case.decoding(), case.decoding()
    for at in range(4):
        logits = [d.feed(cut(case.row, at, at + 1)) for d in (one, other)]
        np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_sequence_stays_within_the_models_tables(lab: Any, backend: str) -> None:
    case = case_of(lab, "smear", backend)
    decoding = case.decoding()
    decoding.feed(case.row)
    with pytest.raises(DataError, match=r"a sequence of 13 tokens, .* made for 12") as refused:
        decoding.feed(cut(case.row, 0, 3))
    assert "train.seq_len" in str(refused.value)
    wrong = cut(case.row, 0, 1) | {"ids": np.array([[97]], np.int32)}
    with pytest.raises(DataError, match="id 97 is outside the model's vocabulary of 97"):
        decoding.feed(wrong)
    for shape in ((2, 1), (1, 0), (1,)):
        with pytest.raises(ValueError, match="one row"):
            decoding.feed({"ids": np.zeros(shape, np.int32)})
    decoding.feed(cut(case.row, 0, 2))  # the refused feed changed nothing


def test_the_cache_holds_what_is_kept_and_no_more(lab: Any) -> None:
    case = case_of(lab, "kept", "torch")
    decoding = case.decoding()
    for at in range(LENGTH):
        decoding.feed(cut(case.row, at, at + 1))
    kept = decoding.cache.kept.items()
    held = {path: [a.shape for a in arrays if a is not None] for path, arrays in kept}
    assert held["layers.0.attention"] == [(1, LENGTH, 8)]
    assert held["layers.1.attention.core"] == [(1, LENGTH, 1)]
    assert held["norm"] == [(1, LENGTH, 32)] * 2


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_layer_with_a_window_caches_no_more_than_it(lab: Any, backend: str) -> None:
    case = case_of(lab, "window", backend)  # of 3 keys, of 5 by a dynamic schedule, finally of 4
    decoding = case.decoding()
    for at in range(LENGTH):
        logits = decoding.feed(cut(case.row, at, at + 1))
        np.testing.assert_allclose(logits, case.whole[at], rtol=0, atol=case.level)
        kept = decoding.cache.kept
        sizes = [kept[f"layers.{layer}.attention"][0].shape[1] for layer in range(3)]
        assert sizes == [min(at + 1, 2), at + 1, min(at + 1, 3)]
    again = case.decoding()
    again.feed(case.row)  # the prompt in one feed
    assert again.cache.kept["layers.0.attention"][0].shape[1] == 2


def test_a_whole_attention_sees_documents_apart(lab: Any) -> None:
    case = case_of(lab, "masked", "numpy")
    alone = {**case.row, "documents": np.zeros_like(case.row["documents"])}
    logits = case.decoding().feed(alone)
    assert np.abs(logits - case.whole[-1]).max() > 1e-3


def test_a_feed_that_raises_leaves_the_sequence_as_it_was(lab: Any) -> None:
    case = case_of(lab, "bigram", "torch")
    decoding = case.decoding()
    decoding.feed(cut(case.row, 0, 4))
    part = cut(case.row, 4, 6)
    with pytest.raises(KeyError, match="pair"):
        decoding.feed({name: array for name, array in part.items() if name != "pair"})
    np.testing.assert_allclose(decoding.feed(part), case.whole[5], rtol=0, atol=case.level)


class Short(Smear):
    def forward(self, x: Any) -> Any:
        return x[:, -1:]


class Shortened(Plugin, api=1):
    """Returns fewer columns than its input has."""

    def build_model(self, model: Any) -> None:
        model.embed.mix(Short)


class Hoarding(Latent):
    def forward(self, x: Any, window: Any, documents: Any, latent: Any) -> tuple[Any, Any]:
        y, new = super().forward(x, window, documents, latent)
        return y, new if latent is None else self.ops.concat([latent, new], 1)


class Hoarded(Plugin, api=1):
    """Returns its whole input instead of the new columns."""

    def build_model(self, model: Any) -> None:
        model.attention(0, Hoarding)


class Padded(Doubled):
    stretch = 3


class Padding(Plugin, api=1):
    """Creates fewer positions than declared."""

    def build_attention(self, attn: Any) -> None:
        attn.layout(Padded)


@pytest.mark.parametrize(
    ("plugin", "earlier", "why"),
    [
        (
            Shortened,
            1,
            r"'it' was given 3 columns and returned shape \(1, 1, 32\) from Short.forward",
        ),
        (Hoarded, 1, r"'it' returned shape \(1, 3, 8\) as 'latent' from Hoarding.forward"),
        (Padding, 0, r"'it' made 4 positions of 2 columns in Padded.enter"),
    ],
)
def test_columns_that_do_not_add_up_are_the_plugins(
    lab: Any, plugin: type[Plugin], earlier: int, why: str
) -> None:
    plan = lab.plan(plugins={"it": plugin()})
    decoding = lab.trainer(plan).decoding()
    row = {name: array[:1] for name, array in lab.batch(plan).items()}
    for at in range(earlier):
        decoding.feed(cut(row, at, at + 1))
    with pytest.raises(PluginCodeError, match=why) as raised:
        decoding.feed(cut(row, earlier, earlier + 2))
    assert raised.value.plugin == "it"
    assert raised.value.where
