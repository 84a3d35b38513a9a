"""Tests of kernel selection: modes, names, ranks, and a reason for every rejection."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.backends.candidates import MLX, TORCH
from minillm_core.config.kernels import Policy, parse_policy
from minillm_core.errors import BackendError, MinillmError, PluginCodeError
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.form import LossForm, TanhCap
from minillm_core.ops.select import Candidate, Request, choose, choose_all, load

NUMPY = tuple(
    Candidate(op, "reference", ("numpy",), f"minillm_kit.reference:{op}", plain=True)
    for op in CONTRACTS
)
CORE = (*TORCH, *MLX, *NUMPY)
LOSS = Request("linear_cross_entropy", "torch", "cuda", "bfloat16", compiled=True)


def offer(name: str, reason: str | None = None, **more: Any) -> Candidate:
    given = {"backends": ("torch",), "accepts": lambda request: reason} | more
    return Candidate("linear", name, reference=f"math:{name}", **given)


ASKED = Request("linear", "torch", "cpu", "float32")


def test_auto_takes_the_first_that_serves_and_says_whom_it_passed() -> None:
    choice = choose(ASKED, [offer("a", "too small"), offer("b"), offer("c", "not asked")])
    assert (choice.kernel, choice.refused) == ("b", {"a": "too small", "c": "not asked"})
    assert choice.reason == "the first that serves, after a"
    assert choose(ASKED, [offer("a"), offer("b")]).reason == "preferred"


def test_rank_goes_before_order() -> None:
    offers = [offer("a", rank=lambda request: 1), offer("b")]
    assert choose(ASKED, offers).kernel == "b"


def test_strict_does_not_pass_the_preferred_one() -> None:
    offers = [offer("a", "too small"), offer("c", "too wide"), offer("b")]
    for policy in (Policy("strict"), Policy("strict", {"attention": "sdpa"})):
        with pytest.raises(BackendError, match="'a' cannot serve linear: too small") as caught:
            choose(ASKED, offers, policy)
        assert caught.value.where == f"--kernels {policy}"
        way_out = f"--kernels {policy.naming('linear', 'b')} uses 'b'"
        assert way_out in str(caught.value.fix)
        assert choose(ASKED, offers, policy.naming("linear", "b")).kernel == "b"
    with pytest.raises(BackendError, match="no kernel serves linear"):
        choose(ASKED, offers[:2], Policy("strict"))  # then strict mode is not the obstacle
    elsewhere = offer("gpu", devices=("cuda",))  # never for this device: not the preferred one
    assert choose(ASKED, [elsewhere, offer("b")], Policy("strict")).kernel == "b"


def test_reference_takes_the_plain_one() -> None:
    offers = [offer("a"), offer("b", plain=True)]
    assert choose(ASKED, offers, Policy("reference")).kernel == "b"


@pytest.mark.parametrize("mode", ["auto", "strict", "reference"])
def test_an_op_may_have_its_plain_one_alone(mode: str) -> None:
    offers = [offer("a"), offer("b", plain=True), offer("reference")]
    choice = choose(ASKED, offers, Policy(mode, {"linear": "reference"}))
    assert (choice.kernel, choice.reason) == ("b", "the plain one, by --kernels linear=reference")


@pytest.mark.parametrize("name", ["plain", "reference"])
def test_the_plain_one_goes_by_whatever_name_it_has(name: str) -> None:
    policy = parse_policy("linear=reference")
    assert choose(ASKED, [offer("a"), offer(name, plain=True)], policy).kernel == name


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        ([offer("a"), offer("b")], "linear has no reference on torch"),
        ([offer("a"), offer("m", plain=True, backends=("mlx",))], "has no reference on torch"),
        ([offer("a"), offer("b", "odd", plain=True)], "reference of linear cannot serve: b: odd"),
    ],
)
def test_where_there_is_no_plain_one_those_that_serve_are_named(
    offers: list[Candidate], said: str
) -> None:
    with pytest.raises(BackendError, match=said) as caught:
        choose(ASKED, offers, Policy(named={"linear": "reference"}))
    assert caught.value.where == "--kernels linear=reference"
    able = [c.name for c in offers if c.refusal(ASKED) is None]
    assert caught.value.fix == f"one of: {', '.join(able)}"


def test_a_name_is_insisted_on() -> None:
    offers = [offer("a"), offer("b"), offer("c", "no"), offer("m", backends=("mlx",))]
    assert choose(ASKED, offers, Policy(named={"linear": "b"})).reason == "named by --kernels"
    for name, reason in (
        ("c", "serve linear: no"),
        ("m", "serves mlx, not torch"),
        ("x", "no kernel 'x'"),
    ):
        with pytest.raises(BackendError, match=reason) as caught:
            choose(ASKED, offers, Policy(named={"linear": name}))
        assert str(caught.value.fix).startswith("one of: a, b")
        assert ("--plugins" in str(caught.value.fix)) == (name == "x")  # it may belong to a plugin


def test_outside_the_tolerance_only_by_name() -> None:
    offers = [offer("fp8", within_tolerance=False), offer("a")]
    choice = choose(ASKED, offers)
    assert choice.kernel == "a"
    assert "--kernels linear=fp8" in choice.refused["fp8"]
    assert choose(ASKED, offers, Policy("strict")).kernel == "a"
    assert choose(ASKED, offers, Policy(named={"linear": "fp8"})).kernel == "fp8"
    there_for_it = offer("fp8", within_tolerance=False, disable_option="-fp8_head")
    assert choose(ASKED, [there_for_it, offer("a")]).kernel == "fp8"


@given(offers=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.booleans()), max_size=5))
def test_a_choice_is_always_one_that_serves(offers: list[tuple[bool, int, bool]]) -> None:
    candidates = [
        offer(f"k{i}", None if yes else "no", rank=lambda r, n=rank: n, within_tolerance=within)
        for i, (yes, rank, within) in enumerate(offers)
    ]
    able = [c for c in candidates if c.refusal(ASKED) is None and c.within_tolerance]
    if not able:
        with pytest.raises(BackendError, match="no kernel serves linear"):
            choose(ASKED, candidates)
        return
    choice = choose(ASKED, candidates)
    assert choice.kernel == min(able, key=lambda c: c.rank(ASKED)).name
    assert choice.kernel not in choice.refused


def test_an_op_that_nothing_asks_for_is_refused() -> None:
    with pytest.raises(BackendError, match="no op 'atention'") as caught:
        choose_all([ASKED], [offer("a")], Policy(named={"atention": "sdpa"}))
    assert caught.value.fix == "one of linear"


def test_what_cannot_be_imported_is_an_error_of_its_provider() -> None:
    broken = replace(offer("a"), reference="no_such_module:f", provider="fast_things")
    choices = choose_all([ASKED], [broken])
    with pytest.raises(MinillmError, match="'a' of fast_things for linear cannot be imported"):
        load(choices, [broken], "torch")


def test_load_gives_the_chosen_functions() -> None:
    assert load(choose_all([ASKED], [offer("sqrt")]), [offer("sqrt")], "torch")["linear"](4) == 2


@pytest.mark.parametrize("mode", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("where", ["torch cpu", "torch cuda", "mlx cpu", "mlx metal", "numpy cpu"])
def test_the_core_serves_every_op_everywhere(where: str, dtype: str, mode: str) -> None:
    backend, device = where.split()
    requests = [Request(op, backend, device, dtype) for op in CONTRACTS]
    choices = choose_all(requests, CORE, Policy(mode))
    assert [c.op for c in choices] == list(CONTRACTS)


@pytest.mark.parametrize(
    ("facts", "compiled", "reason"),
    [
        ({}, True, "does not trace"),
        ({"targets": 2}, False, "takes one target, not 2"),
        ({"form": LossForm(cap=TanhCap(15.0), z=1e-4)}, False, "the form's cap, z"),
        ({"weights": "position"}, False, "a weight per position"),
    ],
)
def test_torchs_own_loss_says_what_it_refuses(
    facts: dict[str, Any], compiled: bool, reason: str
) -> None:
    pytest.importorskip("torch", minversion="2.13")  # older versions lack it, with that reason
    asked = replace(LOSS, facts=facts, compiled=compiled)
    assert reason in choose(asked, CORE).refused["torch"]
    with pytest.raises(BackendError, match=reason):
        choose(asked, CORE, parse_policy("linear_cross_entropy=torch"))


def test_mlx_takes_chunks_where_the_logits_are_large() -> None:
    asked = replace(LOSS, backend="mlx", device="metal", facts={"rows": 131_072, "vocab": 50_304})
    assert choose(asked, CORE).kernel == "chunked"
    assert choose(replace(asked, facts={"rows": 512, "vocab": 50_304}), CORE).kernel == "fused"
    refused = choose(replace(asked, facts={"targets": 2}, device="cpu"), CORE)
    assert (refused.kernel, *refused.refused) == ("dense", "fused")


def test_choosing_imports_no_framework() -> None:
    code = (
        "import sys, minillm_core.ops.contract, minillm_core.ops.select; "
        "import minillm_core.backends.candidates, minillm_core.backends.bind; "
        "print([m for m in ('torch', 'mlx') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_an_answer_that_is_no_reason_is_its_provider_s_fault() -> None:
    odd = Candidate(
        "attention", "odd", ("torch",), "m:f", accepts=lambda r: False, provider="trick"
    )
    with pytest.raises(PluginCodeError, match="plugin 'trick' returned bool from") as error:
        odd.refusal(Request("attention", "torch", "cpu", "float32"))
    assert error.value.where == "kernel attention=odd"
