"""Plugins that conflict with first-party ones or read too much, for the golden records."""

from minillm_core import Layout, Module, Plugin


class Same(Layout):
    def enter(self, call):
        return call


class Gate(Module):
    def forward(self, y):
        return y


class Absent(Module):
    def forward(self, x, absent):
        return x


class Rearranged(Plugin, api=1):
    """Claims the layout, as paired_heads does."""

    def build_attention(self, attn):
        attn.layout(Same)


class First(Plugin, api=1):
    """Joins a chain, and claims a part of the loss."""

    def build_attention(self, attn):
        attn.out.gate(Gate)

    def compute_loss(self, loss):
        loss.logits(z=1e-4)


class Hollow(Plugin, api=1):
    """Leaves out one layer's attention, which another one's slots are in."""

    def build_model(self, model):
        model.attention(1, None)
        model.mlp(2, None)


class Reader(Plugin, api=1):
    """Reads what nothing provides."""

    def build_model(self, model):
        model.norm("final", Absent)


class Halves(Plugin, api=1):
    """Multiplies the learning rate of every norm."""

    def optimizer_factory(self, optimizer):
        optimizer.set(lambda name, info: info.role == "norm", lr_mul=0.5)
