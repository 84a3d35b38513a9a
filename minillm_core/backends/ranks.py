"""Distributed training: the interface of the ranks' communication, and the entry points that provide it.

A launcher (``torchrun``, ``mlx.launch``) starts the same command once per process. Entry points of the
group ``minillm.ranks``: the name is a backend's, the value a subclass of :class:`Ranks`. Without a
launcher the process is alone, and nothing is imported. Entry points of ``minillm.forecasts`` estimate the
cost of a run on several devices, those of ``minillm.axes`` check which kinds of parallelism a plan does
not support: functions of a plan, which import no framework.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm_core.backends.detect import Detected, probe
from minillm_core.errors import BackendError, ConfigError
from minillm_core.plugins.provided import required

if TYPE_CHECKING:
    from minillm_core.plan import Plan

GROUP, FORECASTS, AXES = "minillm.ranks", "minillm.forecasts", "minillm.axes"


class Ranks:
    """The processes that train one model together; this base class is for a single process.

    Every rank calls the same methods in the same order.

    Attributes:
        rank: the rank of this process, from 0; rank 0 writes and prints.
        size: the number of ranks.
        context: context parallelism: how many neighbouring ranks share each row; each computes some columns.
        tensor: tensor parallelism: how many next neighbours share these columns; each computes some heads
            and hidden units.
        pipeline: pipeline parallelism: how many ranks share the layers; each computes consecutive layers.
        shard: what trainers shard: ``updates``, ``weights`` as well, or "" for nothing.
        device: the device of this process, as for ``--device``; None: the device of the command.
        transport: the communication backend, for messages.
        scope_of: builds the scope of a batch with this rank's columns, from the inputs by name; see ``Scope``.
    """

    rank: int = 0
    size: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    device: str | None = None
    transport: str = ""
    scope_of: Callable[[dict[str, Any]], Any] | None = None
    unsharded_reason: str = "its processes cannot divide updates"
    """Why these ranks do not support :meth:`shard_updates`; empty: they do."""
    default_shard: str = "updates"
    """The value that ``mesh.shard=auto`` stands for."""
    shard: str = ""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes and prints, rank 0."""
        return self.rank == 0

    @property
    def data_parallel(self) -> tuple[int, int]:
        """Data parallelism: into how many parts a step's rows are divided, and this rank's part, from 0."""
        parts, own = self.evaluation_part
        return parts // self.pipeline, own % (parts // self.pipeline)

    @property
    def evaluation_part(self) -> tuple[int, int]:
        """The same for evaluation, without pipeline parallelism: each rank computes all layers."""
        each = self.context * self.tensor
        return self.size // each, self.rank // each

    def divide(self, plan: Plan) -> Sequence[str]:
        """Divide a run among the ranks by its ``mesh`` settings; raises and returns as :meth:`check`."""
        mesh = plan.config.mesh
        self.share_rows(mesh.context or 1, mesh.tensor or 1)
        self.share_layers(mesh.pipeline or 1)
        return self.check(plan)

    def share_rows(self, context: int, tensor: int = 1) -> None:
        """Set the degrees of context parallelism (columns of a row) and tensor parallelism (heads).

        Raises:
            BackendError: these ranks do not support it.
        """
        self._refuse(context, "row", "context")
        self._refuse(tensor, "row", "tensor")

    def share_layers(self, pipeline: int) -> None:
        """Set the degree of pipeline parallelism; raises as :meth:`share_rows`."""
        self._refuse(pipeline, "row's layers", "pipeline")

    def _refuse(self, processes: int, what: str, setting: str) -> None:
        if processes > 1:
            why = f"{self.transport} cannot do that" if self.size > 1 else "there is only one"
            raise BackendError(
                f"{processes} processes are to share each {what}, but {why}",
                where=f"mesh.{setting}={processes}",
                fix=f"mesh.{setting}=1, or processes on torch: --gpus {processes}, torchrun (docs/scale.md)",
            )

    def pipeline_losses(self, trainer: Any, *step: Any) -> Iterator[Any]:
        """Compute the losses and gradients of a step's micro-batches under pipeline parallelism.

        Args:
            trainer: the framework's trainer.
            step: micro-batches, staged values and other values, as the trainer has them.

        Returns:
            One loss per micro-batch: on the last pipeline stage the loss, on others sums of 0; each with
            the statistics of its own layers.
        """
        raise NotImplementedError

    def check(self, plan: Plan) -> Sequence[str]:
        """Check that the plan's model supports the ranks' context, tensor and pipeline parallelism.

        Returns:
            Lines to print about how the run is divided.

        Raises:
            PlanError: a plugin does not support it; with the reason.
            ConfigError: rows cannot be divided evenly.
            BackendError: mesh.data demands several processes, and this is the only one.
        """
        self._refuse(plan.config.mesh.data, "step", "data")
        return ()

    def columns(self, batch: Any, plan: Plan) -> Any:
        """Return a batch with this rank's columns only: all columns without context parallelism."""
        return batch

    def model_part(self, trainer: Any) -> Any:
        """Return this rank's part of the trainer's model, on the same arrays; whole without tensor parallelism.

        Raises:
            PlanError: a node does not compute each head independently.
        """
        return trainer.model

    def all_reduce_sum(self, arrays: Sequence[Any]) -> list[Any]:
        """All-reduce arrays by sum, with the same bits on each rank; does not wait for the device.

        Args:
            arrays: the framework's arrays, float32, of the same shapes on each rank.
        """
        return list(arrays)

    def all_reduce_max(self, arrays: Sequence[Any]) -> list[Any]:
        """All-reduce arrays by elementwise maximum; otherwise as :meth:`all_reduce_sum`."""
        return list(arrays)

    def all_gather(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """All-gather numbers on the host: one tuple per rank. Waits for all ranks."""
        return [tuple(map(float, numbers))]

    def broadcast(self, value: Any = None) -> Any:
        """Broadcast rank 0's value, of JSON types, to every rank. The others wait for it."""
        return value

    def shard_updates(self, what: str, trainer: Any) -> Any:
        """Shard the updates of a trainer's parameters over the ranks.

        Args:
            what: ``updates``, or ``weights`` to shard the parameters as well.
            trainer: the framework's trainer, with a whole optimizer.

        Returns:
            This rank's share, of the framework's own type: on torch a
            :class:`~minillm_core.backends.torch.share.Share`.
        """
        raise NotImplementedError

    def collective_errors(self) -> AbstractContextManager[None]:
        """Return a context that converts a framework's error caused by the exit of another process."""
        return nullcontext()

    def close(self) -> None:
        """End the communication."""


ALONE = Ranks()


# SLURM_NTASKS and SLURM_PROCID are also set if only one process runs: in a batch script, a shell, `srun -n 1`
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def launched() -> tuple[int, int]:
    """Return (rank, number of processes) from a launcher's environment variables; (0, 1) without one.

    ``torchrun`` sets RANK and WORLD_SIZE, ``mlx.launch`` MLX_RANK and the hosts' file or their number.

    Raises:
        BackendError: this is one of several processes, without a rank or their number.
    """
    here = os.environ.get
    rank, size = here("RANK") or here("MLX_RANK"), here("WORLD_SIZE") or here("MLX_WORLD_SIZE")
    if rank and not size and (hosts := here("MLX_HOSTFILE") or here("MLX_IBV_DEVICES")):
        size = str(len(json.loads(Path(hosts).read_text())))
    if rank and size and (rank + size).isdecimal():
        return int(rank), int(size)
    names = ("RANK", "MLX_RANK", "WORLD_SIZE", "MLX_WORLD_SIZE", *TASKS)
    given = [(name, value) for name in names if (value := here(name))]
    if lone := [f"{key}={n}" for key, n in given if n != "1" or key.endswith("RANK")]:
        what = "one of several processes would train alone: RANK or WORLD_SIZE is missing or not a number"
        torchrun = "torchrun --nproc-per-node N -m minillm_core train"
        fix = f"{torchrun}, or srun {torchrun} (docs/scale.md); for separate runs unset these"
        raise BackendError(what, where=", ".join(lone), fix=fix)
    return 0, 1


def divides(asked: str, ranks: Ranks) -> str:
    """Return what the ranks shard, by ``mesh.shard``: "updates", "weights", or "" for nothing.

    Raises:
        ConfigError: these ranks cannot shard what ``asked`` names.
    """
    why = "one process trains" if ranks.size == 1 else ranks.unsharded_reason
    if asked in ("updates", "weights") and why:
        fix = "mesh.shard=auto divides updates if that is possible"
        raise ConfigError(f"{asked} cannot be divided: {why}", where=f"mesh.shard={asked}", fix=fix)
    return "" if asked == "off" or why else asked.replace("auto", ranks.default_shard)


def rank_prefix() -> str:
    """Return the prefix of an error's text that names the rank; empty for a single process."""
    with suppress(Exception):  # that it cannot be read is the error itself
        rank, size = launched()
        return f"rank {rank}: " if size > 1 else ""
    return ""


def join(detected: Detected) -> Ranks:
    """Join the processes launched together with this one, if there are others.

    Raises:
        BackendError: no installed distribution provides the backend's communication.
    """
    return engine(detected.backend)(detected) if launched()[1] > 1 else ALONE


def launch(detected: Detected, gpus: int, arguments: Sequence[str]) -> int | None:
    """Start a command in one process per GPU of this machine, unless this is such a process already.

    Args:
        detected: the command's backend and device.
        gpus: the number of GPUs.
        arguments: the command's arguments, ``train`` first.

    Returns:
        The command's exit code; None: the command has to run in this process, alone or as a rank.

    Raises:
        BackendError: there are fewer GPUs, or a launcher started another number of processes.
    """
    (_, size), here, where = launched(), probe().nvidia, f"--gpus {gpus}"
    if size > 1 and size != gpus:
        fix = "leave --gpus out if a launcher has started the processes"
        raise BackendError(f"{where} in one of {size} processes", where=where, fix=fix)
    if detected.device != "cuda" or gpus > here:
        what = f"{where} needs NVIDIA GPUs: {here} found, on device {detected.device}"
        fix = "ask for fewer; on CPUs and MLX: torchrun or mlx.launch, no --gpus (docs/scale.md)"
        raise BackendError(what, where=where, fix=fix)
    return engine(detected.backend).launch(gpus, arguments) if gpus > size else None


def engine(backend: str) -> Any:
    """Import the class of a backend's ranks.

    Raises:
        BackendError: no installed distribution provides it.
        PluginError: several do.
    """
    return required(GROUP, backend, f"training in several processes on {backend}")


def forecaster(backend: str) -> Any:
    """Import the function (plan, number of cards, their kind, dtype) that forecasts a run on several cards.

    Raises:
        BackendError: no installed distribution provides it.
        PluginError: several do.
    """
    return required(FORECASTS, backend, f"a forecast for several GPUs on {backend}")
