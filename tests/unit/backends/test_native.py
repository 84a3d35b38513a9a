"""Tests that materialised modules are native modules, for the framework's own tools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Buffer, Linear, Module, Param, Plugin, State, ones, zeros
from minillm_core.backends.base import lone_row
from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected
from minillm_core.nn.module import declared, materialising, named_modules
from minillm_core.nn.param import Declaration

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")
import mlx.nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

BACKENDS = ["torch", "mlx"]


class Kept(Module):
    """A parameter, a constant, State, a linear module, and plain values of every kind."""

    statistics = {"seen": "sum"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.scale = Param((1,), init=ones, role="scalar")
        self.table = Buffer((3,), lambda: np.arange(3.0))
        self.count = State((), zeros)
        self.names, self.sizes, self.options = ("a", "b"), [1, 2], {"key": 3}
        self.leaves = [Linear(4, 4, role="gate"), Linear(4, 4, role="gate")]

    def forward(self, y: Any) -> Any:
        return y * self.scale, self.ops.sum(self.table)

    def next_state(self, seen: Any) -> dict[str, Any]:
        return {"count": self.count + seen}


class Keeper(Plugin, api=1):
    """Adds Kept to every layer."""

    def build_attention(self, attn: Any) -> None:
        attn.out.gate(Kept)


@pytest.fixture
def trainer_of(plan_of: Any) -> Any:
    def make(backend: str, **settings: Any) -> Any:
        plan = plan_of({"keeper": Keeper()}, **settings)
        return plan, create_backend(Detected(backend, "cpu", "test"), plan).trainer(plan, 0)

    return make


def test_torch_finds_its_own(trainer_of: Any) -> None:
    plan, run = trainer_of("torch")
    model = run.model
    assert all(isinstance(module, torch.nn.Module) for _, module in named_modules(model))
    assert isinstance(model.embedding, torch.nn.Embedding)
    assert isinstance(model.layers, torch.nn.ModuleList)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert len(linear) == 2 * (7 + 2)
    assert {name for name, _ in model.named_parameters()} == set(plan.parameters)
    saved = set(model.state_dict())
    assert saved == set(plan.parameters) | {
        f"layers.{i}.attention.out.keeper.count" for i in range(2)
    }
    model.load_state_dict(model.state_dict())
    assert "Linear(in_features=16, out_features=16, bias=False)" in repr(model)
    assert "Embedding(31, 16)" in repr(model)


def test_mlx_finds_its_own(trainer_of: Any) -> None:
    plan, run = trainer_of("mlx", train_compile="off")
    model = run.model
    assert isinstance(model.embedding, mlx.nn.Embedding)
    linear = [name for name, module in model.named_modules() if isinstance(module, mlx.nn.Linear)]
    assert len(linear) == 2 * (7 + 2)
    names = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert names == set(plan.parameters)


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_values_stay_what_they_are(trainer_of: Any, backend: str) -> None:
    _, run = trainer_of(backend)
    kept = run.model.layers[1].attention.out["keeper"]
    assert (kept.names, kept.sizes, kept.options) == (("a", "b"), [1, 2], {"key": 3})
    assert kept.table.tolist() == [0, 1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_values_are_frozen_once_materialised(trainer_of: Any, backend: str) -> None:
    """A compiled step treats them as constants: a change would be ignored silently."""
    _, run = trainer_of(backend)
    kept = run.model.layers[0].attention.out["keeper"]
    for name, value in (("sizes", [3]), ("names", None), ("fresh", 1.0), ("leaves", [])):
        with pytest.raises(AttributeError, match=rf"Kept\.{name} is frozen"):
            setattr(kept, name, value)
    assert kept.sizes == [1, 2]
    with pytest.raises(AttributeError, match=r"Decoder\.checkpointing is frozen"):
        run.model.checkpointing = True
    with pytest.raises(AttributeError, match=r"Kept\.count is a State, .* from next_state, not in"):
        kept.count = kept.count * 2
    run.model.train()
    run.model.eval()
    kept.scale = kept.scale * 2 if backend == "mlx" else torch.nn.Parameter(kept.scale.data * 2)
    assert kept.scale.tolist() == [2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scalar_state_is_written_and_loaded(trainer_of: Any, backend: str) -> None:
    plan, run = trainer_of(backend, train_compile="off")
    ids = np.zeros((2, 8), np.int32)
    batch = {"ids": ids, "labels": ids, "documents": ids, "positions": ids}
    run.step([batch, batch], plan.values(0.5), 32)
    name = "state.layers.0.attention.out.keeper.count"
    saved = run.arrays()
    assert saved[name].shape == ()
    assert saved[name] == 2 * 3
    _, other = trainer_of(backend, train_compile="off")
    other.resume(saved)
    assert other.arrays()[name] == 2 * 3
    assert other.witnesses().keys() < run.witnesses().keys()
    assert run.witnesses()["node:layers.0.attention.out.keeper"] == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_has_one_owner(trainer_of: Any, backend: str) -> None:
    class Tied(Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = Param((2,), role="scalar")

    _, run = trainer_of(backend)
    with materialising(run.framework), pytest.raises(ValueError, match="already has an owner"):
        Tied()


@pytest.mark.parametrize("backend", BACKENDS)
def test_declarations_are_the_plan_s(trainer_of: Any, backend: str) -> None:
    plan, run = trainer_of(backend)
    shapes = {name: tuple(getattr(m, a).shape) for name, m, a, _ in declared(run.model, Param)}
    assert shapes == {name: info.shape for name, info in plan.parameters.items()}
    for name, module, attribute, one in declared(run.model, Declaration):
        assert tuple(getattr(module, attribute).shape) == one.shape, name
        assert "float32" in str(getattr(module, attribute).dtype), name


class Doubling(Module):
    """Doubles its input in training mode only, like a native dropout."""

    def forward(self, x: Any) -> Any:
        return x * (2.0 if self.training else 1.0)


class Doubler(Plugin, api=1):
    """Doubles embeddings, in training."""

    def build_model(self, model: Any) -> None:
        model.embed.mix(Doubling)


class Nothing(Module):
    """The identity."""

    def forward(self, x: Any) -> Any:
        return x * 1.0


class Same(Plugin, api=1):
    """Leaves embeddings unchanged."""

    def build_model(self, model: Any) -> None:
        model.embed.mix(Nothing)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_for_training_alone_is_off_elsewhere(plan_of: Any, backend: str) -> None:
    found = []
    for plugin in (Doubler(), Same()):
        plan = plan_of({"one": plugin}, train_compile="off")
        run = create_backend(Detected(backend, "cpu", "test"), plan).trainer(plan, 0)
        row = lone_row(np.arange(5, dtype=np.int32))
        batch = {**row, "labels": np.roll(row["ids"], -1, 1)}
        logits = run.next_logits(row), run.decoding().feed(row)
        evaluated = run.evaluate([batch])
        values = plan.values(0.5)
        losses = [run.read(run.step([batch], values, 5)).loss for _ in range(2)]
        found.append((*(one.tolist() for one in logits), evaluated, losses))
    (*off, doubled), (*same, plain) = found
    assert off == same
    assert doubled != plain
