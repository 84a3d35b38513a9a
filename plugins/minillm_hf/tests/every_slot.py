"""A plugin that fills the slots that no shipped plugin fills, for tests of generated modeling files."""

import numpy as np

from minillm_core import (
    EVERYTHING,
    Buffer,
    Constant,
    Learned,
    Linear,
    Module,
    Normal,
    Param,
    Plugin,
    cosine,
    ones,
)

FACTORS = (0.5, 0.25)  # of two parts


class Slots(Plugin, api=1):
    """Fills slots."""

    shift: int = 3

    def build_data(self, data):
        data.field("parity", "int32")

    def on_batch(self, batch, phase, vocab):
        return {**batch, "parity": self._parity(batch["ids"])}

    def _parity(self, ids):
        return ((ids + self.shift) % 2).astype(np.int32)

    def build_attention(self, attn):
        if attn.layer == 1:
            return
        attn.qk.shift(Earlier)
        attn.rope.positions(Doubled)
        attn.scale(cosine(0.2, 0.4))
        tapped = "early" if attn.layer else "x0"
        attn.out.gate(Leaky, reads={"number": "train.lr", "tapped": tapped})

    def build_model(self, model):
        model.tap("layers.0.mid", name="early")
        model.stream("mean", Mean)
        model.stream("halved", Half)
        model.embed.mix(Marked)
        model.attention(1, Whole, width=8)
        model.norm("layers.0.mlp", Scaled)
        model.norm("final", None)
        model.norm("layers.2.attention", None)
        model.mlp(2, None)
        model.residual("layers.0.out", "sublayer", cosine(0.1, 0.7))
        model.residual("layers.1.mid", "halved", Opened)
        model.residual("layers.2.in", "carry", 0.9)
        model.residual("final", "early", 0.3)
        model.linear("layers.0.attention.o", Product, factor=0.5)
        model.linear("layers.1.mlp.up", Product, factor=0.25)
        model.stream("lane", Lane, at="layers.0.mid")
        model.input("layers.0.mlp", "lane", 0.5)
        model.residual("layers.1.mid", "lane", 0.2)
        model.stream("opening", Opening, at="layers.2.attention")
        model.input("layers.2.attention", "carry", 0.0)
        model.input("layers.2.attention", "lane")
        model.input("layers.2.attention.v", "x0", Taken, reads={"numbers": "opening"})
        model.linear("layers.2.attention.q", Lent, reads={"number": "train.lr", "other": "lane"})
        model.stream("last", Lane, at="final", reads={"sublayer": "early"})
        model.residual("final", "last", Learned(0.5))

    def compute_loss(self, loss):
        loss.term("size", Size, weight=0.1)


class Earlier(Module):
    lookback = 2

    def forward(self, q, k):
        first = self.ops.zeros_like(k[:, :2])
        return q, k + 0.5 * self.ops.concat([first, k], 1)[:, : k.shape[1]]


class Doubled(Module):
    def forward(self, positions):
        return positions // 2


class Leaky(Module):
    def __init__(self, geometry):
        super().__init__()
        self.gate = Linear(geometry.dim, geometry.heads, role="gate", init=Normal(0.1))

    def forward(self, y, number, tapped):
        gate = self.ops.expand_dims(self.ops.sigmoid(self.gate(tapped)), -1)
        return y * gate * self.ops.like(1.0 + number, y)


class Mean(Module):
    lookback = EVERYTHING

    def forward(self, x0):
        count = self.ops.astype(self.ops.arange(x0.shape[1]), "float32") + 1.0
        return self.ops.cumsum(x0, 1) / self.ops.reshape(count, (-1, 1))


class Half(Module):
    def __init__(self):
        super().__init__()
        self.factors = Buffer((2,), lambda: np.array(FACTORS, np.float32))

    def forward(self, mean, parity):
        chosen = self.ops.take(self.factors, self.ops.reshape(parity, (-1,)), 0)
        return mean * self.ops.reshape(chosen, (*parity.shape, 1))


class Marked(Module):
    def __init__(self, geometry):
        super().__init__()
        self.table = Param((2, geometry.dim), init=Normal(0.5), role="embedding.bigram")

    def forward(self, x, parity):
        return x + self.ops.embedding(parity, self.table)


class Whole(Module):
    lookback = EVERYTHING

    def __init__(self, geometry, width):
        super().__init__()
        self.q = Linear(geometry.dim, width, role="attention.q")
        self.k = Linear(geometry.dim, width, role="attention.k")
        self.v = Linear(geometry.dim, geometry.dim, role="attention.v")

    def forward(self, x):
        q, k, v = (self.ops.expand_dims(one(x), 2) for one in (self.q, self.k, self.v))
        v = self.ops.reshape(v, (*v.shape[:2], -1, q.shape[-1]))
        q, k = (self.ops.broadcast_to(one, v.shape) for one in (q, k))
        return self.ops.reshape(self.ops.attention(q, k, v), x.shape)


class Scaled(Module):
    def __init__(self, geometry):
        super().__init__()
        self.gain = Param((geometry.dim,), init=ones, role="norm", wd_mul=0.0)

    def forward(self, x):
        return x * self.gain


class Opened(Module):
    def forward(self, carry, sublayer):
        return self.ops.sigmoid(carry[..., :1] - sublayer[..., :1])


class Product(Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.own = Param((1,), init=Constant(1.0), role="scalar")

    def forward(self, x, weight):
        return self.ops.linear(x, weight) * (self.own * self.factor)


class Lane(Module):
    lookback = 1

    def forward(self, x, sublayer):
        first = self.ops.zeros_like(sublayer[:, :1])
        return x + self.ops.concat([first, sublayer], 1)[:, : x.shape[1]]


class Opening(Module):
    def __init__(self, geometry):
        super().__init__()
        self.gate = Linear(geometry.dim, 2, role="gate", init=Normal(0.5))

    def forward(self, x, lane):
        return self.ops.sigmoid(self.gate(x + lane))


class Taken(Module):
    def forward(self, numbers, carry):
        return numbers[..., 1:] * carry[..., :1]


class Lent(Module):
    def forward(self, x, weight, number, other):
        more = self.ops.mean(other, -1, keepdims=True) * self.ops.like(number, other)
        return self.ops.linear(x, weight) * (1.0 + more)


class Size(Module):
    def __init__(self, geometry):
        super().__init__()
        self.weight = Param((geometry.dim,), init=ones, role="scalar")

    def forward(self, x):
        return self.ops.mean(self.ops.square(x * self.weight))
