"""Tests of the loss by its contract, on a replacement of Triton that checks every access."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minillm_core import BackendError, LossForm, SigmoidCap, TanhCap
from minillm_core.ops.contract import CONTRACTS

torch = pytest.importorskip("torch")

from minillm_core.backends.torch import loss as core_loss  # noqa: E402  (needs torch)

CAPS = [None, TanhCap(1.5), TanhCap(15.0), TanhCap(60.0), SigmoidCap(23.0, 5.0, 7.5)]
FORMS = st.builds(
    LossForm,
    cap=st.sampled_from(CAPS),
    scale=st.sampled_from([1.0, 0.25]),
    smoothing=st.sampled_from([0.0, 0.1]),
    z=st.sampled_from([0.0, 0.01]),
)
SMALL = {"TILE": 8, "CHUNK_BYTES": 1, "FP8_CHUNK_BYTES": 1, "BLOCK": 16, "PROGRAMS": 3}
Case = tuple[int, int, int, int, int, str | None, LossForm]  # N, C, V, K, seed, weights, form


@pytest.fixture(autouse=True)
def fresh_memory_is_no_number() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills the memory of torch.empty
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def module(kernels: Any) -> Any:
    """Load the kernel with small sizes: chunks of eight rows or one tile, blocks of 16 logits, three programs."""
    found = kernels("loss")
    with pytest.MonkeyPatch.context() as patch:
        for name, small in SMALL.items():
            patch.setattr(found, name, small)
        yield found


def arguments(case: Case) -> tuple[Any, ...]:
    """Draw (hidden, weight, targets, weights, form)."""
    N, C, V, K, seed, weighted, form = case
    rng = np.random.default_rng(seed)
    hidden, weight = (rng.standard_normal(shape, np.float32) for shape in ((N, C), (V, C)))
    targets = rng.integers(-1, V, (K, N)).astype(np.int32)
    targets[:, rng.random(N) < 0.2] = -100  # rows without supervision
    shape = {None: None, "target": (K,), "position": (K, N)}[weighted]
    drawn = None if shape is None else rng.uniform(-1.0, 1.0, shape).astype(np.float32)
    weights = None if drawn is None else torch.from_numpy(drawn)
    given_ = [torch.from_numpy(x).requires_grad_() for x in (hidden, weight)]
    return *given_, torch.from_numpy(targets), weights, form


def results(kernel: Any, hidden: Any, weight: Any, *rest: Any) -> list[np.ndarray]:
    """Compute outputs and gradients."""
    total, sums, count = kernel(hidden, weight, *rest)
    assert not sums.requires_grad
    grads = torch.autograd.grad(total, [hidden, weight], torch.tensor(0.375, dtype=total.dtype))
    return [x.detach().double().numpy() for x in (total, sums, count, *grads)]


CASES = st.tuples(
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from([None, "target", "position"]),
    FORMS,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(CASES)
@example((17, 4, 32, 1, 0, None, LossForm()))  # whole blocks; three chunks, the last of one row
@example((3, 2, 7, 2, 1, "position", LossForm(smoothing=0.1, z=0.01)))  # less than one block
@example((1, 1, 2, 1, 36, None, LossForm(cap=TanhCap(60.0), scale=0.25)))  # small under a large cap
def test_the_loss_keeps_its_contract(module: Any, case: Case) -> None:
    hidden, weight, *rest = arguments(case)
    with torch.no_grad():
        without = module.linear_cross_entropy(hidden, weight, *rest)
    ours = results(module.linear_cross_entropy, hidden, weight, *rest)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    tolerance = CONTRACTS["linear_cross_entropy"].tolerance["float32"]
    for mine, theirs in zip(ours, results(core_loss.dense, *exact, *rest), strict=True):
        off = np.linalg.norm(mine - theirs)
        assert off <= tolerance * max(np.linalg.norm(theirs), theirs.size**0.5)
    for mine, same in zip(ours, without, strict=False):
        np.testing.assert_allclose(same.numpy(), mine, rtol=1e-6)


def test_rows_without_a_target_are_not_read(module: Any) -> None:
    hidden, weight, targets, *rest = arguments((16, 4, 40, 1, 0, None, LossForm()))
    targets[0, 8:] = -1
    with torch.no_grad():
        hidden[8:] = torch.nan  # so are the logits, and reading them is a fault
    total, _, count = module.linear_cross_entropy(hidden, weight, targets, *rest)
    (of_hidden,) = torch.autograd.grad(total, [hidden])
    assert count.item() == (targets >= 0).sum()
    assert torch.isfinite(total)
    assert not of_hidden[8:].any()
    assert torch.isfinite(of_hidden).all()


def test_a_frozen_head_has_no_gradient_and_no_room_for_one(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, *rest = arguments((9, 4, 40, 1, 0, None, LossForm()))
    monkeypatch.setattr(module._Products, "add_weight_gradient", None)
    total, _, _ = module.linear_cross_entropy(hidden, weight.detach(), *rest)
    (alone,) = torch.autograd.grad(total, [hidden])
    monkeypatch.undo()
    total, _, _ = module.linear_cross_entropy(hidden, weight, *rest)
    torch.testing.assert_close(alone, torch.autograd.grad(total, [hidden])[0])


def test_chunks_are_whole_tiles_within_their_bytes(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE", 128)
    monkeypatch.setattr(module, "CHUNK_BYTES", 200 * 2**20)
    hidden = torch.empty(1, 1, dtype=torch.bfloat16)
    for V, rows in ((50_304, 16 * 128), (151_936, 5 * 128), (2**30, 128)):  # at least one tile
        assert module.chunk_rows(hidden, torch.empty(1, 1).expand(V, 1), module.CHUNK_BYTES) == rows


@settings(max_examples=30, deadline=None)
@given(CASES)
@example((19, 2, 3, 2, 5, "position", LossForm(cap=SigmoidCap(23.0, 5.0, 7.5), scale=0.25)))
def test_fp8_is_what_its_rounded_operands_give(module: Any, case: Case) -> None:
    """Compare all three products with float64 of the rounded operands."""
    N, C, V, *rest = case
    given_ = arguments((N, 16 * C, 16 * ((V + 15) // 16), *rest))
    hidden, weight, targets, *more = given_
    ours = results(module.fp8_linear_cross_entropy, hidden, weight, targets, *more)

    def rounded(x: Any) -> Any:
        most = x.detach().abs().amax() / 448.0
        by = torch.exp2(torch.ceil(torch.log2(most)))
        return (x.detach() / by).to(torch.float8_e4m3fn).double() * by.double()

    h, w = (rounded(x).requires_grad_() for x in (hidden, weight))
    exact = results(core_loss.dense, h, w, targets, *more)
    scale = max(1.0, float(np.abs(exact[0])))
    np.testing.assert_allclose(ours[0], exact[0], atol=2e-5 * scale)
    # e5m2 has two mantissa bits: each gradient of a logit is off by at most an eighth
    logits, one = (h @ w.T).detach().requires_grad_(), torch.eye(len(w)).double().requires_grad_()
    of_logits = results(core_loss.dense, logits, one, targets, *more)[3]
    for index, other in (
        (3, np.abs(of_logits) @ np.abs(w.detach().numpy())),
        (4, np.abs(of_logits).T @ np.abs(h.detach().numpy())),
    ):
        assert (np.abs(ours[index] - exact[index]) <= other / 8.0 + 1e-6).all()
    with torch.no_grad():  # as in evaluation: nothing is rounded to 8 bits
        without = module.fp8_linear_cross_entropy(hidden, weight, targets, *more)
        plain = module.linear_cross_entropy(hidden, weight, targets, *more)
    assert all(torch.equal(one, other) for one, other in zip(without, plain, strict=True))


def test_fp8_is_evaluated_on_any_gpu(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*about: Any) -> None:
        raise BackendError("cannot multiply 8-bit numbers", where="a GPU", fix="another")

    monkeypatch.setattr(module, "check_device", refused)
    given_ = arguments((9, 16, 32, 1, 0, None, LossForm()))
    with torch.no_grad():
        module.fp8_linear_cross_entropy(*given_)
    with pytest.raises(BackendError):
        module.fp8_linear_cross_entropy(*given_)


# Faulty kernels: name -> (original code, replacement)
FAULTS = {
    "writes past a row's end": (
        "tl.store(here + first + columns, d.to(product.dtype), mask=inside)",
        "tl.store(here + first + columns, d.to(product.dtype))",
    ),
    "reads past a row's end": ("full + columns < V", "full + columns <= V"),
    "one row too many": ("range(tl.program_id(0), n,", "range(tl.program_id(0), n + 1,"),
    "rows that no program takes": ("n, tl.num_programs(0))", "n, 2 * tl.num_programs(0))"),
    "every program takes the first rows": (
        "range(tl.program_id(0), n, tl.num_programs(0))",
        "range(0, n, tl.num_programs(0))",
    ),
    "the tail is left out": ("            if full < V:", "            if full > V:"),
    "rows without a target keep their products": (
        "tl.store(here + first + columns, nothing,",
        "tl.load(here + first + columns,",
    ),
    "rows without a target keep an old loss": (
        "tl.store(losses_at + k * N + position, 0.0)",
        "tl.load(targets_at)",
    ),
    "lanes are added as if one maximum were theirs": (
        "tl.sum(sums * tl.exp(largest - top), 0)",
        "tl.sum(sums, 0)",
    ),
    "a new maximum leaves earlier sums as they are": (
        "sums *= tl.exp(largest - fresh)",
        "sums *= 1.0",
    ),
    "the second chunk reads the first's targets": (
        "position = start + row",
        "position = start * 0 + row",
    ),
    "the cap has no slope": ("d *= 1.0 - (x / a) * (x / a)", "d *= 1.0"),
    "the last target alone is subtracted": (
        "d -= tl.where",
        "d = factor * tl.exp(x - lse) - tl.where",
    ),
    "a target's logit is read after it was overwritten": (
        "lse = top + tl.log",
        "tl.store(here, 0.0); lse = top + tl.log",
    ),
}


@pytest.mark.broad(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_caught(kernels: Any, fault: str) -> None:
    wrong = kernels("loss", *FAULTS[fault])
    for name, small in SMALL.items():
        setattr(wrong, name, small)
    caught = False
    for seed in range(2):
        for form in (LossForm(), LossForm(cap=TanhCap(1.5))):
            case = (19, 4, 45, 3, seed, "position", form)
            try:
                test_the_loss_keeps_its_contract.hypothesis.inner_test(wrong, case)
            except AssertionError:  # a wrong value, or an invalid access
                caught = True
    assert caught
