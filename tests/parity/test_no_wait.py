"""Tests that a compiled step on a GPU is enqueued without synchronisation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from minillm_core import Plugin, stages
from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected

torch = pytest.importorskip("torch")


class Factors(Plugin, api=1):
    """Numbers that the core must make on the device: factors within a stack, weights of targets."""

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.set(lambda name, p: p.role == "attention.q", lr_mul=0.5)

    def compute_loss(self, loss: Any) -> None:
        loss.target(0.5, offset=2)


class Masks(Plugin, api=1):
    """Windows that grow while the steps are watched, and documents: attention by blocks."""

    def build_attention(self, attn: Any) -> None:
        attn.window(stages((0, 16), (0.12, 48)))
        attn.documents()


class Gathers(Plugin, api=1):
    """The head at supervised positions: of two micro-batches the first needs all, the second half."""

    def compute_loss(self, loss: Any) -> None:
        loss.gather(buckets=2)


CASES = {
    "plain": ((), {}, "bfloat16", 1),
    "both": (("muon", "paired_heads"), {}, "bfloat16", 2),
    "masks": ((), {"masks": Masks()}, "bfloat16", 2),
    "gathers": ((), {"gathers": Gathers()}, "bfloat16", 2),
    "rows": (("bigram_hash", "sparse_rows"), {}, "bfloat16", 2),
    "average": (("muon", "ema"), {}, "bfloat16", 2),
    "factors": (("muon",), {"factors": Factors()}, "float16", 1),
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # inductor recommends TF32
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_step_on_cuda_never_waits(lab: Any, case: str) -> None:
    names, plugins, dtype, parts = CASES[case]
    shape = {"model_dim": 64, "model_hidden": 128, "train_seq_len": 64}
    if "sparse_rows" in names:
        shape["sparse_rows.buckets"] = 1  # one size: another would be compiled
    plan = lab.plan(*names, plugins=plugins, train_compile="on", train_dtype=dtype, **shape)
    run = create_backend(Detected("torch", "cuda", "test"), plan).trainer(plan, 0)

    def step(index: int) -> Any:
        batch = lab.batch(plan, index, unsupervised=60 + index)
        micro = lab.split(batch if plugins else lab.completed(plan, batch), parts)
        return run.step(micro, plan.values((index + 1) / 20), lab.supervised(micro))

    for index in range(2):
        run.read(step(index))
    seen = lab.batch(plan)  # reading weights in between changes neither graphs nor queue
    run.evaluate([seen if plugins else lab.completed(plan, seen)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            handles = [step(index) for index in range(2, 5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.isfinite([run.read(handle).loss for handle in handles]).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("room", [True, False])
def test_a_snapshot_on_cuda_waits_where_it_has_no_room_alone(
    lab: Any, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = lab.plan("muon", train_compile="off")
    run = create_backend(Detected("torch", "cuda", "test"), plan).trainer(plan, 0)
    micro = [lab.batch(plan)]

    def step() -> Any:
        return run.step(micro, plan.values(0.5), lab.supervised(micro))

    run.read(step())
    expected, held = run.arrays(), torch.cuda.memory_allocated()
    monkeypatch.setattr(run.snapshots, "_has_room_for", lambda tensors: room)
    torch.cuda.set_sync_debug_mode("error" if room else "default")
    try:
        snapshot = run.snapshot()
        handles = [step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (snapshot.note is None) == room
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(snapshot).result()
    assert all(not run.read(handle).skipped for handle in handles)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes(), name
    assert set(found) >= {"random.torch.cpu", "random.torch.cuda"}
    del handles, snapshot
    assert torch.cuda.memory_allocated() <= held + 2**20  # the clones are freed
