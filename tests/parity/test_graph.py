"""Tests that torch's graph of the neutral model equals that of the hand-written model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.handwritten.shape import Shape

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

VIEWS = {
    *("view", "_unsafe_view", "reshape", "transpose", "t", "permute", "expand", "unsqueeze"),
    *("squeeze", "select", "slice", "split", "split_with_sizes", "alias", "detach"),
}
Counts = Counter[str]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def shape_of(plan: Any) -> Shape:
    geometry = plan.spec.geometry
    names = ("layers", "dim", "heads", "kv_heads", "hidden", "vocab", "positions")
    return Shape(**{name: getattr(geometry, name) for name in names})


@pytest.fixture
def pair(lab: Any) -> Callable[..., tuple[Any, Any, Any]]:
    """Return (plan, our model, the hand-written one with the same weights)."""

    def make(**settings: Any) -> tuple[Any, Any, Any]:
        from benchmarks.handwritten.gpt_torch import GPT

        plan = lab.plan(model_tied=True, **settings)
        ours, hand = lab.trainer(plan).model, GPT(shape_of(plan))
        hand.load_state_dict({name: value.detach() for name, value in ours.named_parameters()})
        return plan, ours, hand

    return make


def traced(function: Callable[[Any], Any], ids: Any) -> tuple[Counts, Counts]:
    """Trace the computing operators, (forward, backward), as passed by AOT to a compiler."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: list[Counts] = []

    def count(graph: Any, inputs: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        names = (getattr(t, "_opname", getattr(t, "__name__", str(t))) for t in targets)
        found.append(Counter(name for name in names if name not in VIEWS | {"getitem"}))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        function, backend=aot_autograd(fw_compiler=count, bw_compiler=count), fullgraph=True
    )
    compiled(ids).sum().backward()
    forward, backward = found
    return forward, backward


def hidden_of(model: Any) -> Callable[[Any], Any]:
    """Return ids -> (B, T, C) after the last norm: everything before the loss."""
    return lambda ids: model.hidden({"ids": ids}, {})[0]


@pytest.mark.broad(1)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_operators_are_those_of_the_hand_written_model(pair: Any, lab: Any, kv_heads: int) -> None:
    plan, ours, hand = pair(model_kv_heads=kv_heads)
    ids = torch.from_numpy(lab.batch(plan)["ids"])
    expected = traced(hand.hidden, ids)
    assert expected[0]["mm"] == 7 * plan.config.model.layers
    assert expected[1]["mm"] == 2 * 7 * plan.config.model.layers
    assert traced(hidden_of(ours), ids) == expected


def test_losses_and_gradients_are_those_of_the_hand_written_model(pair: Any, lab: Any) -> None:
    plan, ours, hand = pair()
    batch = {k: torch.from_numpy(v) for k, v in lab.batch(plan, unsupervised=3).items()}
    count = int((batch["labels"] >= 0).sum())
    loss = ours(batch, {"normaliser": 1.0 / count}).objective
    other = hand(batch["ids"], batch["labels"])
    assert loss.item() == pytest.approx(other.item(), rel=1e-6)
    loss.backward()
    other.backward()
    named = [{n: p.grad.double().numpy() for n, p in m.named_parameters()} for m in (ours, hand)]
    lab.assert_gradients(named[0], named[1], overall=1e-6)


@pytest.mark.broad(1)
@pytest.mark.parametrize(
    ("names", "layers"), [((), 1), (("muon", "paired_heads"), 2)], ids=["plain", "both"]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_one_graph(
    lab: Any, names: tuple[str, ...], layers: int, checkpointing: bool
) -> None:
    plan = lab.plan(*names, train_checkpointing=checkpointing, model_layers=layers)
    model = lab.trainer(plan).model
    batch = {k: torch.from_numpy(v) for k, v in lab.batch(plan).items()}
    values = {name: torch.tensor(v) for name, v in lab.values_of(plan, [lab.batch(plan)]).items()}

    def objective(batch: Any, values: Any) -> Any:
        return model(batch, values).objective

    explained = torch._dynamo.explain(objective)(batch, values)
    assert explained.graph_count == 1
    assert explained.graph_break_count == 0, explained.break_reasons
    torch.compiler.reset()
    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)(batch, values)
    eager = objective(batch, values)
    assert compiled.item() == pytest.approx(eager.item(), rel=1e-6)
    parameters = list(model.parameters())
    pairs = zip(
        torch.autograd.grad(compiled, parameters),
        torch.autograd.grad(eager, parameters),
        strict=True,
    )
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, atol=1e-7)


@pytest.mark.slow
def test_paired_heads_adds_no_operator_that_computes(lab: Any) -> None:
    """It only rearranges: there may be more copies, and attention is one call in both."""
    counts = []
    for names in ((), ("paired_heads",)):
        plan = lab.plan(*names)
        ids = torch.from_numpy(lab.batch(plan)["ids"])
        counts.append(traced(hidden_of(lab.trainer(plan).model), ids))
    for plain, paired in zip(*counts, strict=True):
        assert {k for k in plain | paired if plain[k] != paired[k]} <= {"clone"}


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_inductor_makes_no_more_kernels_than_of_the_hand_written_model(
    pair: Any, lab: Any, kv_heads: int
) -> None:
    from torch._inductor import metrics

    plan, ours, hand = pair(model_kv_heads=kv_heads, train_seq_len=64)
    ids = torch.from_numpy(lab.batch(plan)["ids"])
    kernels = []
    with torch._inductor.config.patch(fx_graph_cache=False):
        for function in (hidden_of(ours), hand.hidden):
            torch.compiler.reset()
            metrics.reset()
            torch.compile(function, fullgraph=True)(ids).sum().backward()
            kernels.append(metrics.generated_kernel_count)
    assert 0 < kernels[0] <= kernels[1]
