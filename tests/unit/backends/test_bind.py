"""Tests of binding a plan to a machine: its requirements, and the result."""

from __future__ import annotations

import os
from typing import Any

import pytest

from minillm_core import Plugin, Request, TanhCap, piecewise, stages
from minillm_core.backends.bind import bind, create_backend, requests_of
from minillm_core.backends.candidates import CORE
from minillm_core.backends.detect import Detected
from minillm_core.errors import BackendError, ConfigError
from minillm_core.ops.contract import CONTRACTS


class Windows(Plugin, api=1):
    """A window of its own kind in each layer."""

    first: str = "static"
    second: str = "static"

    def build_attention(self, attn: Any) -> None:
        kinds = {
            "static": 4,
            "staged": stages((0, 2), (0.5, 4)),
            "dynamic": piecewise((0, 2), (1, 8)),
        }
        kind = (self.first, self.second)[attn.layer]
        if kind != "none":
            attn.window(kinds[kind])


class Batcher(Plugin, api=1):
    """May weight positions, and predicts a further token in a form of its own."""

    batches: bool = True

    def compute_loss(self, loss: Any) -> None:
        loss.target(0.5, offset=2)
        loss.logits(cap=TanhCap(15.0))


class Weighter(Plugin, api=1):
    """Weights positions."""

    def on_batch(self, batch: Any) -> Any:
        return batch


def facts_of(plan: Any, op: str) -> dict[str, Any]:
    asked = requests_of(plan, backend="torch", device="cpu", dtype="float32", compiled=False)
    (facts,) = (one.facts for one in asked if one.op == op)
    return dict(facts)


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "compiled"),
    [
        ("torch", "cpu", "float32", False),
        ("torch", "cuda", "bfloat16", True),
        ("torch", "cuda:1", "bfloat16", True),
        ("torch", "mps", "bfloat16", True),
        ("mlx", "cpu", "float32", True),
        ("mlx", "gpu", "bfloat16", True),
    ],
)
def test_defaults_of_a_device(
    plan_of: Any, backend: str, device: str, dtype: str, compiled: bool
) -> None:
    binding, candidates = bind(Detected(backend, device, "why"), plan_of())
    assert (binding.dtype, binding.compile) == (dtype, compiled)
    assert (binding.backend, binding.device, binding.reason) == (backend, device, "why")
    assert {choice.op for choice in binding.kernels} <= set(CONTRACTS)
    by_name = {(c.op, c.name): c for c in candidates}
    for choice in binding.kernels:
        assert backend in by_name[choice.op, choice.kernel].backends
        assert choice.reason


def test_what_is_said_wins(plan_of: Any) -> None:
    plan = plan_of(train_dtype="float16", train_compile="on", train_checkpointing=True)
    binding, _ = bind(Detected("torch", "cpu", "test"), plan)
    assert (binding.dtype, binding.compile, binding.checkpointing) == ("float16", True, True)
    binding, _ = bind(Detected("mlx", "gpu", "test"), plan_of(train_compile="off"))
    assert not binding.compile


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_reference_and_a_kernel_by_name(plan_of: Any, backend: str) -> None:
    plain, candidates = bind(Detected(backend, "cpu", "test"), plan_of(kernels="reference"))
    names = {c.name for c in candidates if c.plain}
    assert {choice.kernel for choice in plain.kernels} <= names
    named, _ = bind(Detected(backend, "cpu", "test"), plan_of(kernels="attention=composed"))
    assert {c.op: c.kernel for c in named.kernels}["attention"] == "composed"


@pytest.mark.parametrize("op", [*CONTRACTS])
@pytest.mark.parametrize("where", ["torch cpu", "torch cuda", "mlx cpu", "mlx gpu"])
def test_the_reference_of_one_op(plan_of: Any, where: str, op: str) -> None:
    backend, device = where.split()
    here = Detected(backend, device, "test")
    alone, whole, usual = (
        {choice.op: choice.kernel for choice in bind(here, plan_of(kernels=kernels))[0].kernels}
        for kernels in (f"{op}=reference", "reference", "auto")
    )
    assert alone == {**usual, op: whole[op]}


def test_a_kernel_that_cannot_serve_is_refused(plan_of: Any) -> None:
    here = Detected("torch", "cpu", "test")
    with pytest.raises((BackendError, ConfigError), match="fast_one"):
        bind(here, plan_of(kernels="attention=fast_one"))


def test_torchs_own_loss_is_refused_where_it_cannot_serve(plan_of: Any) -> None:
    pytest.importorskip("torch", minversion="2.13")  # older versions lack it, with that reason
    here = Detected("torch", "cpu", "test")
    plan = plan_of({"batcher": Batcher()}, kernels="linear_cross_entropy=torch")
    with pytest.raises(BackendError, match="one target"):
        bind(here, plan)
    plan = plan_of({"weighter": Weighter()}, kernels="linear_cross_entropy=torch")
    with pytest.raises(BackendError, match="weight per position"):
        bind(here, plan)


def test_mlxs_own_loss_is_refused_where_it_would_lose_digits() -> None:
    (fused,) = (c for c in CORE["mlx"] if c.name == "fused" and c.op == "linear_cross_entropy")
    for device, vocab, refused in (("cpu", 16_384, 0), ("cpu", 16_385, 1), ("cuda", 50_304, 0)):
        request = Request("linear_cross_entropy", "mlx", device, "float32", facts={"vocab": vocab})
        assert ("one by one" in (fused.refusal(request) or "")) == bool(refused)


@pytest.mark.parametrize(
    ("first", "second", "window"),
    [
        ("none", "none", None),
        ("none", "static", "static"),
        ("static", "staged", "static"),
        ("static", "dynamic", "dynamic"),
        ("dynamic", "staged", "dynamic"),
    ],
)
def test_the_layer_that_asks_the_most(plan_of: Any, first: str, second: str, window: Any) -> None:
    plugins = {} if window is None else {"windows": Windows(first=first, second=second)}
    facts = facts_of(plan_of(plugins), "attention")
    assert facts["window"] == window
    assert facts["grouped"] is True
    assert (facts["head_dim"], facts["length"]) == (4, 8)


def test_facts_of_the_loss(plan_of: Any) -> None:
    plain = facts_of(plan_of(), "linear_cross_entropy")
    assert (plain["targets"], plain["weights"], plain["form"].empty) == (1, None, True)
    assert (plain["rows"], plain["width"], plain["vocab"]) == (16, 16, 31)
    further = facts_of(plan_of({"batcher": Batcher()}), "linear_cross_entropy")
    assert (further["targets"], further["weights"]) == (2, "target")
    assert further["form"].cap == TanhCap(15.0)
    weighted = facts_of(plan_of({"weighter": Weighter()}), "linear_cross_entropy")
    assert weighted["weights"] == "position"


def test_a_device_that_is_not_there_is_refused(plan_of: Any) -> None:
    torch, mx = pytest.importorskip("torch"), pytest.importorskip("mlx.core")
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="sees no CUDA device"):
            create_backend(Detected("torch", "cuda", "test"), plan_of())
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        with pytest.raises(BackendError, match="no GPU"):
            create_backend(Detected("mlx", "gpu", "test"), plan_of())


@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_threads_sleep_while_they_wait_unless_told_otherwise(
    plan_of: Any, monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    create_backend(Detected("torch", "cpu", "test"), plan_of())
    assert os.environ["OMP_WAIT_POLICY"] == found


@pytest.mark.parametrize(
    ("backend", "device", "refused"),
    [
        ("torch", "cuda", False),
        ("torch", "cpu", False),
        ("mlx", "cpu", False),
        ("mlx", "gpu", True),
    ],
)
def test_determinism_is_refused_where_there_is_none(
    plan_of: Any, backend: str, device: str, refused: bool
) -> None:
    plan = plan_of(deterministic=True)
    if refused:
        with pytest.raises(BackendError, match="no deterministic mode on a GPU"):
            bind(Detected(backend, device, "test"), plan)
    else:
        assert bind(Detected(backend, device, "test"), plan)[0].deterministic
