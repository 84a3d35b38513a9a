"""Tests of computations on CUDA, against float64 on a CPU: attention, its masks, Liger's kernels, steps.

Small models and few compilations: they take about a minute in total.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected
from minillm_core.ops.contract import CONTRACTS
from minillm_core.plan import stages_of
from minillm_kit import reference

torch = pytest.importorskip("torch")
attention = pytest.importorskip("minillm_core.backends.torch.ops")
blocks = pytest.importorskip("minillm_core.backends.torch.blocks")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("default"),  # inductor recommends TF32
]

DEVICE = "cuda"


def trainer(plan: Any, device: str = DEVICE) -> Any:
    return create_backend(Detected("torch", device, "test"), plan).trainer(plan, 0)


def kernels(run: Any) -> dict[str, str]:
    return {choice.op: choice.kernel for choice in run.binding.kernels}


def documents_of(rows: int, length: int, *, padded: bool = False) -> Any:
    """Draw int32 (rows, length): some documents per row, of uneven lengths; padding at the end is -1."""
    rng = np.random.default_rng(length)
    found = np.cumsum(rng.random((rows, length)) < 0.01, axis=1)
    if padded:
        found[:, -length // 8 :] = -1
    return found.astype(np.int32)


# Attention


@pytest.mark.parametrize("padded", [False, True])
def test_masks_of_blocks_are_the_reference_s(padded: bool) -> None:
    """Compare every position of every block, as read by FlexAttention: full, partial, or absent."""
    for length in (128, 300, 512):
        for window in (None, 1, 128, 200, length):
            for documents in (None, documents_of(2, length, padded=padded)):
                given = None if documents is None else torch.tensor(documents, device=DEVICE)
                mask = blocks.block_mask(length, window, given, torch.device(DEVICE))
                assert mask.kv_indices.device.type == DEVICE
                expected = reference.visible(length, length, window, documents)
                expected = expected.reshape(-1, length, length)
                assert (seen(mask, len(expected)) == expected).all(), (length, window)


def seen(mask: Any, rows: int) -> Any:
    """Return bool (rows, T, T): the positions that a block mask allows."""
    length, size = mask.seq_lengths[0], blocks.BLOCK
    place = torch.arange(length, device=DEVICE)
    every = torch.stack(
        [
            torch.vmap(
                lambda i, b=b: torch.vmap(
                    lambda j, i=i, b=b: mask.mask_mod(torch.tensor(b, device=DEVICE), 0, i, j)
                )(place)
            )(place)
            for b in range(rows)
        ]
    ).cpu()
    found = torch.zeros((rows, length, length), dtype=torch.bool)
    for row in range(rows):
        for whole, counts, which in (
            (False, mask.kv_num_blocks, mask.kv_indices),
            (True, mask.full_kv_num_blocks, mask.full_kv_indices),
        ):
            at = min(row, len(counts) - 1)
            for i, count in enumerate(counts[at, 0].tolist()):
                for j in which[at, 0, i, :count].tolist():
                    tile = (row, slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
                    found[tile] = True if whole else every[tile]
    return found.numpy()


MASKS = {
    "causal": (256, {}),
    "window": (300, {"window": 64}),
    "documents": (300, {"documents": documents_of(2, 300)}),
    "both": (256, {"window": 128, "documents": documents_of(2, 256, padded=True)}),
}


DTYPES = ("bfloat16", "float32")
CASES = [("sdpa", mask, dtype, 0) for mask in MASKS for dtype in DTYPES]
CASES += [("sdpa", "causal", dtype, 128) for dtype in DTYPES]  # the last half of the queries
CASES += [("flex", mask, "bfloat16", 0) for mask in ("documents", "both")]  # each is compiled
CASES += [("flex", "both", "bfloat16", 128)]


@pytest.mark.parametrize(("kernel", "mask", "dtype", "before"), CASES)
def test_attention_is_the_reference_s(
    side: Any, kernel: str, mask: str, dtype: str, before: int
) -> None:
    """Eager, with two query heads per key head; gradients are compared with the formula in float64."""
    length, given = MASKS[mask]
    rng = np.random.default_rng(1)
    floats = [rng.standard_normal((2, length, heads, 32)) for heads in (4, 2, 2, 4)]
    *qkv, upstream = (torch.tensor(x, device=DEVICE).to(getattr(torch, dtype)) for x in floats)
    qkv[0], upstream = qkv[0][:, before:], upstream[:, before:]
    masked = {
        key: torch.tensor(value, device=DEVICE) if key == "documents" else value
        for key, value in given.items()
    }
    results = []
    function = {"sdpa": attention.sdpa, "flex": blocks.flex}[kernel]
    for attend, wide in ((function, False), (attention.attention_composed, True)):
        arrays = [(x.double() if wide else x).detach().requires_grad_() for x in qkv]
        y = attend(*arrays, **masked)
        results.append([y, *torch.autograd.grad(y, arrays, upstream.to(y.dtype))])
    exact = reference.attention(*(x.double().cpu().numpy() for x in qkv), **given)
    np.testing.assert_allclose(results[1][0].detach().cpu().numpy(), exact, atol=1e-12)
    tolerance = CONTRACTS["attention"].tolerance[dtype]
    for got, wanted in zip(*results, strict=True):
        found, expected = (x.detach().double().cpu().numpy() for x in (got, wanted))
        side.assert_close(found, expected, tolerance, "y, q, k or v")


def test_attention_goes_on_from_kept_keys(side: Any) -> None:
    rng = np.random.default_rng(2)
    for queries in (1, 5):
        q, k, v = (rng.standard_normal((1, n, 2, 32)) for n in (queries, 200, 200))
        arrays = [torch.tensor(x, device=DEVICE, dtype=torch.float32) for x in (q, k, v)]
        for window in (None, 64):
            expected = reference.attention(q, k, v, window=window)
            for attend in (attention.sdpa, blocks.flex):
                got = attend(*arrays, window=window).double().cpu().numpy()
                side.assert_close(got, expected, CONTRACTS["attention"].tolerance["float32"], "y")


def test_windows_that_grow_give_what_a_cpu_gives(lab: Any) -> None:
    """Compiled, with documents, one layer of paired heads, and both stages of the window warm-up."""
    options = {
        **{"windows.window": 256, "windows.start": 128, "windows.stages": 2},
        **{"windows.documents": "true", "paired_heads.layers": "[1]", "train.clip": 0},
        **{"model_layers": 3, "model_dim": 64, "train_seq_len": 384, "train_dtype": "float32"},
    }
    plan = lab.plan("windows", "paired_heads", **options, train_compile="on")
    assert [stage["windows.window.long"] for stage in stages_of(plan)] == [128, 256]
    micro = [lab.batch(plan, unsupervised=3)]
    micro[0]["documents"] = documents_of(*micro[0]["ids"].shape)
    run = trainer(plan)
    assert kernels(run)["attention"] == "flex"
    objective, exact = lab.exact_gradients(plan, micro)
    loss, found = lab.gradients(run, plan, micro)
    assert loss == pytest.approx(objective, rel=1e-5)
    assert apart(found, exact) < 1e-4
    other = trainer(lab.plan("windows", "paired_heads", **options, train_compile="off"), "cpu")
    assert kernels(other)["attention"] == "sdpa"
    lab.gradients(other, plan, micro)  # the same first step
    results = []
    for each in (run, other):  # past half of the run: the wider window
        handle = each.step(micro, plan.values(0.9), lab.supervised(micro))
        results.append(each.read(handle).loss)
    assert results[0] == pytest.approx(results[1], rel=1e-3)
    with torch.compiler.set_stance("fail_on_recompile"):  # both were compiled before
        for progress in (0.2, 0.8):
            run.read(run.step(micro, plan.values(progress), lab.supervised(micro)))


def apart(found: Any, exact: Any) -> float:
    """Return the gradients' distance, relative to their norm, over all parameters together."""
    assert found.keys() == exact.keys()
    off = sum(np.linalg.norm(found[name] - exact[name]) ** 2 for name in exact)
    return float(np.sqrt(off / sum(np.linalg.norm(exact[name]) ** 2 for name in exact)))


# Liger


SMALL = {"rms_norm", "rotate", "swiglu"}


@pytest.mark.parametrize(
    ("compile", "dtype", "cap", "limit"),
    [
        ("off", "float32", None, 5e-5),
        ("off", "float32", 15.0, 5e-5),
        ("on", "bfloat16", 15.0, 0.05),
    ],
)
def test_a_step_with_liger_has_the_loss_and_gradients_of_float64(
    lab: Any, compile: str, dtype: str, cap: float | None, limit: float
) -> None:
    pytest.importorskip("liger_kernel")
    names, options = ["liger"], {"train.clip": 0, "model_dim": 64, "train_dtype": dtype}
    if cap is not None:
        names, options = [*names, "softcap"], options | {"softcap.form": "tanh", "softcap.cap": cap}
    plan = lab.plan(*names, **options, train_compile=compile)
    run, micro = trainer(plan), [lab.batch(plan, unsupervised=3)]
    served = {op for op, kernel in kernels(run).items() if kernel == "liger"}
    assert served == {"linear_cross_entropy"} | (SMALL if compile == "off" else set())
    refused = {c.op: c.refused.get("liger") for c in run.binding.kernels if c.op in SMALL}
    assert all(("fuses" in (why or "")) == (compile == "on") for why in refused.values())
    told = [note for note in run.binding.notes if "of plugin liger does not serve" in note]
    assert len(told) == (len(SMALL) if compile == "on" else 0)
    objective, exact = lab.exact_gradients(plan, micro)
    loss, found = lab.gradients(run, plan, micro)
    assert loss == pytest.approx(objective, rel=limit)
    assert apart(found, exact) < limit
    assert {key for key in run.witnesses() if "liger" in key}


# Several GPUs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees one CUDA device")
def test_the_second_gpu_trains_as_the_first(lab: Any) -> None:
    plan, before = lab.plan("muon", train_dtype="float32"), torch.cuda.current_device()
    losses = []
    try:
        for device in ("cuda:0", "cuda:1"):
            steps = [[lab.batch(plan, seed)] for seed in range(3)]
            losses.append(lab.losses(trainer(plan, device), plan, steps))
    finally:
        torch.cuda.set_device(before)
    assert losses[0] == losses[1]
