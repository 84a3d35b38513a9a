"""Tests of nodes: planned modules, and how their arguments are resolved."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm_core.errors import PlanError, PluginCodeError
from minillm_core.nn.init import zeros
from minillm_core.nn.layers import Linear
from minillm_core.nn.module import Module, declared, named_modules
from minillm_core.nn.node import ModelShape, Scope, call_names, node_of
from minillm_core.nn.param import Param, State

GEOMETRY = ModelShape(
    layers=2, dim=8, heads=2, kv_heads=2, head_dim=4, hidden=16, vocab=32, positions=8
)


class Gate(Module):
    def __init__(self, geometry: ModelShape, width: int = 4, widths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.gate = Linear(width, geometry.heads, role="gate")
        self.inner = [Linear(n, n, role="gate") for n in widths]
        self.bias = State((geometry.heads,), zeros)

    def forward(self, y: Any, x: Any, bigram: Any) -> Any:
        return y


class Bare(Module):
    def forward(self, x: Any) -> Any:
        return x


class Other(Module):
    def forward(self, a: Any, *, b: Any) -> Any:
        return a


def test_a_node_knows_what_it_reads() -> None:
    node = node_of("p", Gate, {"width": 2}, own=("y", "q", "k", "v", "x"), slot="attn.out.gate")
    assert node.reads == ("y", "x", "bigram")
    assert node.external == ("bigram",)
    assert (node.name, node.owner, node.slot) == ("p", "p", "attn.out.gate")
    data = json.loads(json.dumps(node.data()))
    assert data["arguments"] == {"width": 2}
    assert data["reference"] == f"{__name__}:Gate"


def test_a_node_becomes_a_module_with_the_models_sizes() -> None:
    node = node_of("p", Gate, {"width": 2, "widths": [3, 5]}, own=("y", "x"), name="p_second")
    module: Any = node.make(GEOMETRY)
    assert isinstance(module, Gate)
    assert (module.owner, module.bound) == ("p", ("y", "x", "bigram"))
    assert {name: p.shape for name, _, _, p in declared(module, Param)} == {
        "gate.weight": (2, 2),
        "inner.0.weight": (3, 3),
        "inner.1.weight": (5, 5),
    }
    assert [name for name, *_ in declared(module, State)] == ["bias"]
    assert [path for path, _ in named_modules(module)] == ["", "gate", "inner.0", "inner.1"]


def test_a_node_is_made_again_from_its_reference() -> None:
    node = node_of("p", Gate, {"width": 2}, own=())
    again = type(node)(node.name, node.owner, node.reference, node.arguments, node.reads)
    module: Any = again.make(GEOMETRY)
    assert isinstance(module, Gate)
    assert node == node_of("p", Gate, {"width": 2}, own=())
    assert node != node_of("p", Gate, {"width": 3}, own=())


class Scheduled(Module):
    reads = {"lr": "train.lr", "late": "layers.1.out"}  # noqa: RUF012

    def forward(self, late: Any, y: Any, lr: Any) -> Any:
        return y


def test_a_class_says_what_its_arguments_are_called_elsewhere() -> None:
    node = node_of("p", Scheduled, {}, own=("y", "x"))
    assert node.reads == ("layers.1.out", "y", "train.lr")
    assert node.external == ("layers.1.out", "train.lr")
    given = np.arange(3.0).reshape(3, 1)
    scope = Scope({"layers.1.out": given[0], "train.lr": given[1]})
    digits = called(lambda a, b, c: 100 * a + 10 * b + c, node.reads)
    assert scope.apply(digits, {"x": 0, "y": given[2]}) == [21]


class Elsewhere(Module):
    reads = {"rate": "train.lr"}  # noqa: RUF012

    def forward(self, y: Any) -> Any:
        return y


class Slots(Module):
    reads = {"y": "train.lr"}  # noqa: RUF012

    def forward(self, y: Any) -> Any:
        return y


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Elsewhere, r"Elsewhere\.reads names 'rate': forward takes y"),
        (Slots, r"Slots\.reads names 'y', which the slot itself gives"),
    ],
)
def test_reads_fit_the_call_and_leave_the_slot_alone(cls: type, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        node_of("p", cls, {}, own=("y",))


class Path(Module):
    def __init__(self) -> None:
        super().__init__()
        self.path = "mine"

    def forward(self, x: Any) -> Any:
        return x


def test_names_with_a_meaning_are_not_a_plugins() -> None:
    node = node_of("p", Path, {}, own=("x",), slot="model.mlp[0]")
    with pytest.raises(PlanError, match=r"Path sets self\.path") as refused:
        node.make(GEOMETRY)
    assert refused.value.where == "model.mlp[0]"


class Within(Module):
    def __init__(self, framework: str, what: str) -> None:
        super().__init__()
        self.inner = Foreign(framework, what)

    def forward(self, x: Any) -> Any:
        return x


class Foreign(Module):
    def __init__(self, framework: str, what: str) -> None:
        super().__init__()
        self.table = np.arange(3)
        self.other = foreign(framework, what)

    def forward(self, x: Any) -> Any:
        return x


def foreign(framework: str, what: str) -> Any:
    """Return an array, a module or a dtype of a framework."""
    if framework == "torch":
        torch = pytest.importorskip("torch")
        made = torch.nn.Parameter(torch.ones(2)), torch.nn.Linear(2, 2), torch.float32
    else:
        mx, nn = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.nn")
        made = mx.ones(2), nn.Linear(2, 2), mx.float32
    return made[["array", "module", "dtype"].index(what)]


@pytest.mark.parametrize("framework", ["torch", "mlx"])
def test_what_no_plan_knows_is_refused(framework: str) -> None:
    """An array or a module of a framework would be neither trained nor saved."""
    for what, kind in (("array", "Parameter|array"), ("module", "Linear")):
        node = node_of("p", Within, {"framework": framework, "what": what}, own=("x",), slot="here")
        with pytest.raises(PlanError, match=rf"'p': Foreign\.other is a {kind}, which") as refused:
            node.make(GEOMETRY)
        assert refused.value.where == "here"
    node_of("p", Within, {"framework": framework, "what": "dtype"}, own=("x",)).make(GEOMETRY)


def test_where_a_node_stands_is_no_part_of_what_it_is() -> None:
    here, there = (node_of("p", Bare, {}, own=("x",), slot=slot) for slot in ("here", "there"))
    assert here == there
    assert here.data() == there.data()


def test_names_are_those_of_the_call() -> None:
    assert call_names(Bare.forward) == ("x",)
    assert call_names(Other.forward) == ("a", "b")


class Seen:
    """A framework that only records evidence, and counts an array's first number."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def witness(self, key: str) -> None:
        self.keys.append(key)

    def versions(self, arrays: Any) -> tuple[int, ...]:
        return tuple(int(np.ravel(array)[0]) for array in arrays)


class Called(SimpleNamespace):
    """A node in the form that a scope uses."""

    def __call__(self, *arguments: Any) -> Any:
        return self.give(*arguments)


def called(give: Any, reads: tuple[str, ...], **emits: Any) -> Called:
    return Called(
        give=give,
        owner="trick",
        bound=reads,
        path="layers.0.mlp",
        framework=Seen(),
        keeps=(),
        terms=emits.get("terms", ()),
        statistics=emits.get("statistics", {}),
    )


def test_a_scope_binds_arguments_by_name() -> None:
    x, bigram = np.zeros(1), np.ones(1)
    scope = Scope({"bigram": bigram, "unused": x})
    node = called(lambda bigram, x: (bigram, x), ("bigram", "x"))
    assert scope.apply(node, {"x": x, "carry": bigram}) == (bigram, x)
    assert node.framework.keys == ["node:layers.0.mlp"]


def test_a_scope_keeps_what_a_node_emits() -> None:
    scope = Scope({})
    node = called(
        lambda x: (x, "balance", "load"), ("x",), terms=("balance",), statistics={"load": "sum"}
    )
    x = np.ones(1)
    assert scope.apply(node, {"x": x}) is x
    assert scope.emitted == {"layers.0.mlp.balance": "balance", "layers.0.mlp.load": "load"}


def test_what_a_node_promises_it_returns() -> None:
    node = called(lambda x: (x, "balance"), ("x",), terms=("balance", "size"))
    with pytest.raises(PluginCodeError, match=r"'trick' returned no tuple of 3 .* Called.forward"):
        Scope({}).apply(node, {"x": np.ones(1)})


Y, Q, K = (np.zeros((2, 3, heads, 4)) for heads in (4, 2, 1))


def add(y: Any) -> Any:
    y += 1
    return y


@pytest.mark.parametrize(
    ("give", "reads", "said"),
    [
        (lambda y: None, ("y",), r"returned NoneType from"),
        (lambda y: 0.5, ("y",), r"returned float from"),
        (lambda y: y[0], ("y",), r"returned \(3, 4, 4\) from"),
        (lambda q: q, ("q",), r"returned \(2, 3, 2, 4\) from"),
        (lambda q, k: (k, q), ("q", "k"), r"returned \(2, 3, 1, 4\) and \(2, 3, 2, 4\) from"),
        (add, ("y",), "changed an argument in place in"),
    ],
)
def test_what_a_slot_cannot_use_is_its_plugin_s_fault(give: Any, reads: Any, said: str) -> None:
    own = {"y": Y.copy()} if "y" in reads else {"q": Q, "k": K}
    with pytest.raises(PluginCodeError, match=f"plugin 'trick' {said} Called.forward") as error:
        Scope({}).apply(called(give, reads), own, like=tuple(own))
    assert error.value.where == "layers.0.mlp"


def test_a_shape_is_held_where_the_slot_asks_for_it_and_not_by_names_of_arguments() -> None:
    names = {"scale": 1.0, "y": Y, "q": Q}
    assert Scope({}).apply(called(lambda y: y[0], ("y",)), names).shape == Y[0].shape
    with pytest.raises(PluginCodeError, match=r"return \(2, 3, 2, 4\)"):
        Scope({}).apply(called(lambda y: y, ("y",)), names, like=("q",))


def test_a_result_keeps_the_dtype_of_its_slot() -> None:
    y = Y.astype(np.float16)
    wide = called(lambda y: y.astype(np.float32), ("y",))
    with pytest.raises(PluginCodeError, match=r"'trick' returned float32 from Called") as error:
        Scope({}).apply(wide, {"y": y}, like=("y",))
    assert error.value.where == "layers.0.mlp"
    assert error.value.fix == "return float16: cast with ops.astype(..., 'float16')"
    assert Scope({}).apply(wide, {"y": y}).dtype == np.float32  # where any array will do
    assert Scope({}).apply(wide, {"y": Y}, like=("y",)).dtype == np.float32  # of float64


class TwoOwners(Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Param((2,), role="scalar")
        self.two = self.one


class Keys(Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = Param((2,), role="scalar")


def test_a_param_has_no_name_that_mlx_s_modules_use() -> None:
    with pytest.raises(ValueError, match="'keys' is a method of MLX's modules: give the attribute"):
        Keys()


def test_a_param_has_one_owner() -> None:
    with pytest.raises(ValueError, match="'two' is given a Param that already has an owner"):
        TwoOwners()
