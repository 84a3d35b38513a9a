"""Distributed training on torch: NCCL between GPUs, gloo between CPUs.

Communication between machines uses torch alone: torchrun connects the processes, torch.distributed runs
the collectives. FSDP and torch's pipelines are imported if a run needs them: each takes as long as torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from minillm_core import BackendError, Plan
from minillm_core.commands import counted
from minillm_core.inspection import Detected, Ranks
from minillm_mesh import context as rows
from minillm_mesh import context_checks, stages, step_checks, tensor_spec, weight_checks
from minillm_mesh.automatic import resolved
from minillm_mesh.collectives import Ended, met, require_gradients
from minillm_mesh.cost import CARDS, DEFAULT, Card
from minillm_mesh.exchange import HEADS, chosen
from minillm_mesh.forecast import Forecast
from minillm_mesh.heartbeat import Watch, meet
from minillm_mesh.part_writer import PartWriter
from minillm_mesh.tensor import Share
from minillm_mesh.torch_share import ShardedArrays, TorchShare

TIMEOUT = timedelta(hours=24)
"""Timeout of host collectives: rank 0 may write a checkpoint or a long sample. The heartbeat is quicker."""

ADDRESS: Mapping[str, str] = {"MASTER_ADDR": "address", "MASTER_PORT": "port"}
"""The environment variables of the meeting point -> what they hold."""

Layout = list[tuple[torch.Size, int]]


class TorchRanks(Ranks):
    """The processes started by torchrun.

    Args:
        detected: the command's backend and device; each process uses the GPU of its local rank.

    Raises:
        BackendError: the environment does not say where the processes meet, or which GPU is this one's.
    """

    unsharded_reason = ""
    memory = 0.0
    """Bytes of the GPU with the least memory; 0 on CPUs."""

    def __init__(self, detected: Detected) -> None:
        if missing := [name for name in ADDRESS if not os.environ.get(name)]:
            raise BackendError(
                f"RANK and WORLD_SIZE are set, but {missing[0]}, the {ADDRESS[missing[0]]} where the "
                "processes meet, is not",
                where=f"{', '.join(missing)} in the environment",
                fix="start them with torchrun, which sets all four: torchrun --nproc-per-node 2 "
                "-m minillm_core train (docs/scale.md); to train alone, unset RANK and WORLD_SIZE",
            )
        kind = detected.device.partition(":")[0]
        if kind == "cuda":
            local = _local_rank()
            self.device = f"cuda:{local}"
            torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        with met():
            store, self.rank, self.size = next(rendezvous("env://"))
            watched = PrefixStore("minillm", next(rendezvous("env://"))[0])
            meet(watched, self.rank, self.size)
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT
            )
            saving = PrefixStore("minillm-saves", next(rendezvous("env://"))[0])
        self._watch = Watch(watched, self.rank, self.size)
        self._saves = PartWriter(saving, self.rank, self.size)
        self.transport = "NCCL" if kind == "cuda" else "gloo"
        if self.device:
            own = torch.cuda.mem_get_info(self.device)[1]
            self.memory = min(each for (each,) in self.all_gather([own]))

    def share_rows(self, context: int, tensor: int = 1) -> None:
        """Set up tensor parallelism over ``tensor`` adjacent ranks, and context parallelism over ``context``."""
        if (context, tensor) == (self.context, self.tensor):
            return
        require_gradients(f"mesh.context={context} mesh.tensor={tensor}")
        self.context, self.tensor = context, tensor
        self._columns = rows.Columns(*self._neighbours(tensor, context))
        self._heads = Share(*self._neighbours(1, tensor))

    def _neighbours(self, step: int, size: int) -> tuple[int, int, dist.ProcessGroup | None]:
        """Return this process's rank among ``size`` ranks that are ``step`` apart, their number and group."""
        own = None
        for first in range(self.size):  # every rank must create all groups, in one order
            if size > 1 and first // step % size == 0:
                members = [first + step * place for place in range(size)]
                group = dist.new_group(members, timeout=TIMEOUT)
                own = group if self.rank in members else own
        return self.rank // step % size, size, own

    def share_layers(self, pipeline: int) -> None:
        """Set up pipeline parallelism over ``pipeline`` ranks, each with consecutive layers."""
        if pipeline == self.pipeline:
            return
        from minillm_mesh.pipeline import Pipeline

        self.pipeline = pipeline
        parts = self.size // pipeline
        groups: list[Any] = [  # every rank must create all of them, in one order
            dist.new_group([*range(part, self.size, parts)], timeout=TIMEOUT)
            for part in range(parts)
        ]
        self._stages = Pipeline(self.rank // parts, pipeline, groups[self.rank % parts])

    def pipeline_losses(self, trainer: Any, *step: Any) -> Iterator[Any]:
        """Compute the losses of a step's micro-batches: see :mod:`minillm_mesh.pipeline`."""
        return self._stages.losses(trainer, *step)

    def divide(self, plan: Plan) -> Sequence[str]:
        """Set up the division of a run; its steps must be divisible by the number of processes."""
        found = resolved(plan, self.size, self._card, _dtype(plan))
        step_checks.check(found.plan, self.size)
        notes = super().divide(found.plan)
        return (found.note, *notes) if found.note else notes

    @property
    def _card(self) -> Card:
        """The GPUs, as the cost model takes them."""
        return replace(CARDS[DEFAULT], memory=self.memory)

    def check(self, plan: Plan) -> Sequence[str]:
        """Check that a plan's model supports the parallelism; choose the exchange of context parallelism."""
        notes = self._shards(plan)
        if self.pipeline > 1:
            stages.check(plan, self.pipeline, self.data_parallel[0])
        if self.tensor > 1:
            tensor_spec.check(plan, self.tensor)
        if self.context == 1:
            return notes
        context_checks.check(plan, self.context)
        choice = chosen(plan, self.context)
        self._scope = rows.HeadsScope if choice.way == HEADS else rows.ContextScope
        return (*notes, choice.note) if choice.note else notes

    def _shards(self, plan: Plan) -> tuple[str, ...]:
        """Check that weights can be sharded; resolve mesh.shard=auto by the GPU's memory."""
        mesh, notes = plan.config.mesh, []
        if self.size > 1 and mesh.shard == "weights":
            weight_checks.check(plan)
        if mesh.shard == "auto" and self.memory:
            self.default_shard = Forecast(plan, self.size, self._card, _dtype(plan)).shard
            if self.default_shard == "weights":
                notes.append(
                    "mesh.shard=weights: by the estimate a card cannot hold all weights and its updates"
                )
        if mesh.unit > 1 and mesh.shard.replace("auto", self.default_shard) != "weights":
            notes.append(f"mesh.unit={mesh.unit} has no effect without mesh.shard=weights")
        return tuple(notes)

    def model_part(self, trainer: Any) -> Any:
        """Build the model of this rank's heads and hidden units, and validate it."""
        return self._heads.of(trainer) if self.tensor > 1 else trainer.model

    def columns(self, batch: Mapping[str, np.ndarray], plan: Plan) -> Mapping[str, np.ndarray]:
        """Select this rank's columns of a batch's rows."""
        if self.context == 1:
            return batch
        offsets = [one.offset for one in plan.spec.loss.targets if one.offset is not None]
        return self._columns.cut(batch, offsets)

    def scope_of(self, reads: dict[str, Any]) -> rows.ContextScope:
        """Build the scope of a batch of this rank's columns."""
        batch, columns = reads["ids"].shape
        return self._scope(reads, self._columns, (batch, columns))

    def all_reduce_sum(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """All-reduce arrays (sum) over all ranks, in one flat float32 buffer."""
        return self._reduced(arrays, dist.ReduceOp.SUM)

    def all_reduce_max(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """All-reduce arrays (elementwise maximum) over all ranks."""
        return self._reduced(arrays, dist.ReduceOp.MAX)

    def _reduced(self, arrays: Sequence[Tensor], how: dist.ReduceOp.RedOpType) -> list[Tensor]:
        flat = torch.cat([one.reshape(-1) for one in arrays])  # (N,)
        with met():
            dist.all_reduce(flat, how)
        parts = flat.split([one.numel() for one in arrays])
        return [part.view(one.shape) for part, one in zip(parts, arrays, strict=True)]

    def all_gather(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """All-gather numbers of every rank, by gloo."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        each = [torch.empty_like(mine) for _ in range(self.size)]
        with met():
            dist.all_gather(each, mine)
        return [tuple(one.tolist()) for one in each]

    def broadcast(self, value: Any = None) -> Any:
        """Broadcast rank 0's value, as JSON, and return it."""
        text = json.dumps(value).encode() if self.is_main else b""
        size = torch.tensor([len(text)])
        with met():
            dist.broadcast(size, 0)
            sent = torch.empty(int(size), dtype=torch.uint8)
            if self.is_main:
                sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            dist.broadcast(sent, 0)
        return json.loads(sent.numpy().tobytes())

    def shard_updates(self, what: str, trainer: Any) -> ShardedArrays:
        """Shard the updates, or weights too: see :mod:`minillm_mesh.layout`."""
        groups, weights = trainer.optimizer.groups, trainer.weights
        if what == "weights":
            from minillm_mesh.torch_weights import TorchWeights

            unit = trainer.plan.config.mesh.unit
            return TorchWeights(groups, weights, trainer.model, self, self._saves, unit)
        return TorchShare(
            groups, weights.trained, self.rank, self.size, self._saves, trainer.compiled
        )

    @contextmanager
    def collective_errors(self) -> Iterator[None]:
        """Convert a collective's error into "another process has ended", for those of FSDP and attention."""
        try:
            with met():
                yield
        except Ended:
            self._saves.give_up()  # else it would wait for the part of an ended process
            raise

    def close(self) -> None:
        """Leave the process group."""
        self._saves.close()
        self._watch.close()
        dist.destroy_process_group()

    @staticmethod
    def launch(processes: int, arguments: Sequence[str]) -> int:
        """Start ``minillm`` with these arguments in several processes on this machine.

        Args:
            processes: number of processes.
            arguments: of the command, ``train`` first.

        Returns:
            The exit code of the run: see :func:`minillm_mesh.launcher.launch`.
        """
        from minillm_mesh.launcher import launch

        return launch(processes, ["-m", "minillm_core", *arguments])


def _local_rank() -> int:
    """Return this process's place on its machine, which is the index of its GPU.

    Raises:
        BackendError: the launcher does not state it, or there are fewer GPUs.
    """
    given, gpus = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if not given.isdecimal():
        raise BackendError(
            "RANK and WORLD_SIZE are set, but LOCAL_RANK, the index of this process's GPU, is not",
            where="LOCAL_RANK in the environment",
            fix="start them with torchrun, which sets all of them; otherwise set LOCAL_RANK to 0, 1, ... "
            "on each machine",
        )
    if int(given) >= gpus:
        raise BackendError(
            f"this is process {int(given) + 1} of its machine, and torch sees {counted(gpus, 'GPU')} there",
            where=f"LOCAL_RANK={given}",
            fix=f"at most {gpus} processes on each machine (--nproc-per-node), or more GPUs in "
            "CUDA_VISIBLE_DEVICES",
        )
    return int(given)


def _dtype(plan: Plan) -> str:
    """Return a run's compute dtype on GPUs."""
    return plan.config.train.dtype.replace("auto", "bfloat16")


__all__ = ["TorchRanks"]
