"""The sharding chosen by ``mesh.shard``, resolved by torch's ranks as in a session before loading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import minillm_core as minillm
from minillm_core.backends.ranks import divides
from minillm_core.inspection import Detected
from minillm_mesh.collectives import Ended
from minillm_mesh.part_writer import PartWriter
from minillm_mesh.torch_ranks import TorchRanks


def planned(plugins: str = "muon", **settings: object) -> minillm.Plan:
    given = {key.replace("_", ".", 1): value for key, value in settings.items()}
    given = {"train.rows": 64, **given}
    return minillm.build_plan(minillm.load(preset="gpt2-124m", plugins=plugins, settings=given))


@pytest.fixture
def ranks() -> TorchRanks:
    """Eight ranks without a process group."""
    made = object.__new__(TorchRanks)
    made.size = 8
    made._saves = PartWriter(HashStore(), 0, 8)
    return made


@pytest.mark.parametrize(("memory", "shard"), [(20.5, "weights"), (30, "updates")])
def test_auto_looks_at_the_memory_of_the_card(ranks: TorchRanks, memory: float, shard: str) -> None:
    ranks.memory = memory * 1e9
    (*notes,) = ranks.check(planned())
    assert [note.partition(":")[0] for note in notes] == ["mesh.shard=weights"] * (
        shard == "weights"
    )
    assert divides("auto", ranks) == shard
    assert ranks.check(planned(mesh_shard="updates")) == ()


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    ("memory", "settings", "shared", "said"),
    [
        (18, {}, [2, 1, 1], "mesh.context=2: without it a step takes"),
        (18, {"mesh_context": 1}, [1, 2, 1], "mesh.tensor=2: without it a step takes"),
        (30, {}, [1, 1, 1], None),
        (0, {}, [1, 1, 1], None),  # on CPUs
        (0, {"train_rows": 1, "train_accumulate": 2}, [4, 1, 1], "a step has 2 rows"),
    ],
)
def test_open_sizes_of_the_mesh_are_resolved_by_memory_and_rows(
    ranks: TorchRanks,
    memory: float,
    settings: dict[str, Any],
    shared: list[int],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks choose by the smallest memory of their GPUs; nothing is sent for it."""
    set_up: list[int] = []
    monkeypatch.setattr(ranks, "share_rows", lambda *sizes: set_up.extend(sizes))
    monkeypatch.setattr(ranks, "share_layers", set_up.append)
    ranks.memory = memory * 1e9
    notes = ranks.divide(planned(**settings))
    assert set_up == shared
    assert len(notes) == (said is not None)
    assert all(said in note for note in notes if said)


def test_auto_divides_updates_on_a_cpu(ranks: TorchRanks) -> None:
    assert ranks.check(planned()) == ()
    assert divides("auto", ranks) == "updates"


@pytest.mark.parametrize("setting", ["tensor", "pipeline"])
def test_weights_are_refused_beside_shared_layers(ranks: TorchRanks, setting: str) -> None:
    given: dict[str, Any] = {"mesh_shard": "weights", f"mesh_{setting}": 2}
    with pytest.raises(
        minillm.ConfigError, match=rf"beside mesh\.{setting}: a process comp"
    ) as caught:
        ranks.check(planned(**given))
    assert caught.value.fix == f"mesh.shard=updates, or mesh.{setting}=1"


def test_units_of_several_layers_need_weights_and_one_call_of_each(ranks: TorchRanks) -> None:
    note = "mesh.unit=2 has no effect without mesh.shard=weights"
    assert ranks.check(planned(mesh_unit=2)) == (note,)
    assert ranks.check(planned(mesh_unit=2, mesh_shard="weights")) == ()
    with pytest.raises(
        minillm.ConfigError, match=r"mesh\.unit=2 beside plugin 'layer_loop'"
    ) as caught:
        ranks.check(planned("layer_loop", mesh_unit=2, mesh_shard="weights"))
    assert caught.value.fix == "mesh.unit=1, or leave out 'layer_loop'"


SCALAR = '''
from minillm_core import Module, Param, Plugin, zeros

class Adds(Plugin, api=1):
    """Adds a learned number to each."""

    def build_attention(self, attn):
        attn.out.gate(Number)

class Number(Module):
    """y (B, T, H, D) -> y + a."""

    def __init__(self):
        super().__init__()
        self.a = Param((), init=zeros, role="scalar", wd_mul=0.0)

    def forward(self, y):
        """y (B, T, H, D) -> (B, T, H, D)."""
        return y + self.a
'''


def test_a_scalar_is_refused_by_name(ranks: TorchRanks, tmp_path: Path) -> None:
    file = tmp_path / "adds.py"
    file.write_text(SCALAR)
    plan = planned(f"{file}:Adds", mesh_shard="weights")
    with pytest.raises(
        minillm.PlanError, match=r"parameter '.*adds\.a' of .* is a scalar"
    ) as caught:
        ranks.check(plan)
    assert caught.value.fix == "mesh.shard=updates, or a parameter of shape (1,)"


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (RuntimeError("gloo/transport/tcp/pair.cc:553: Connection closed by peer [::1]"), True),
        (RuntimeError("writev [127.0.0.1]:31337: Broken pipe"), True),
        (RuntimeError("shapes differ"), False),
        (dist.DistStoreError("wait timeout after 1000ms"), True),
        (dist.DistBackendError("ncclRemoteError: ... or a remote process exiting"), True),
        (dist.DistBackendError("NCCL: socketProgress: Connection closed by remote peer"), True),
        (dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected"), False),
        (dist.DistBackendError("Cuda failure 'peer access is not supported'"), False),
    ],
)
def test_the_end_of_another_process_is_told_from_other_errors(
    ranks: TorchRanks, error: RuntimeError, ended: bool
) -> None:
    with pytest.raises((minillm.MinillmError, RuntimeError)) as raised, ranks.collective_errors():
        raise error
    said = "another process of the run has ended"
    assert (said in str(raised.value)) == isinstance(raised.value, Ended) == ended


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        (None, "but LOCAL_RANK, the index of this process's GPU, is not", "torchrun"),
        ("2", "this is process 3 of its machine, and torch sees 2 GPUs there", "at most 2"),
    ],
)
def test_a_process_without_a_gpu_of_its_own_is_refused(
    given: str | None, what: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    named = {"MASTER_ADDR": "h", "MASTER_PORT": "1"} | ({"LOCAL_RANK": given} if given else {})
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(minillm.BackendError, match=what) as refused:
        TorchRanks(Detected("torch", "cuda", "named"))
    assert fix in (refused.value.fix or "")


@pytest.mark.slow
def test_a_start_imports_neither_fsdp_nor_pipelines() -> None:
    """Each takes as long as torch, and most runs have neither."""
    late = {"torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"}
    script = f"import sys, minillm_mesh.torch_ranks; print({late} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr
