"""The processes that train one model together: the seam of their communication, and who brings it.

A launcher (``torchrun``, ``mlx.launch``) starts the same command once a process. Entry points of the
group ``minillm.ranks``: the name is a backend's, the value a subclass of :class:`Ranks`. Where no
launcher says otherwise a process is alone, and nothing is imported. Those of ``minillm.forecasts`` say
what several would cost, those of ``minillm.axes`` what a plan refuses of each way to divide it: functions of a
plan, which import no framework.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm_core.backends.detect import Detected, probe
from minillm_core.errors import BackendError, ConfigError
from minillm_core.plugins.discover import offered
from minillm_core.plugins.first_party import installing

if TYPE_CHECKING:
    from minillm_core.plan import Plan

GROUP, FORECASTS, AXES = "minillm.ranks", "minillm.forecasts", "minillm.axes"
FIRST_PARTY = "minillm-mesh"


class Ranks:
    """The processes that train one model together; this class itself is of a process alone.

    Every rank calls the same methods in the same order.

    Attributes:
        rank: of this process, from 0; rank 0 writes and prints.
        size: how many there are.
        context: how many share each row, neighbours by rank; each computes some of its columns.
        tensor: how many share these columns, next neighbours; each computes some heads and hidden units.
        pipeline: how many share the layers; each computes a run of them.
        shard: what trainers made for them divide: ``updates``, ``weights`` too, or nothing.
        device: of this process, as ``--device`` names it; None: that of the command.
        how: what they communicate by, for people.
        scope: makes the scope of a batch with this rank's columns, of what is read; see ``Scope``.
    """

    rank: int = 0
    size: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    device: str | None = None
    how: str = ""
    scope: Callable[[dict[str, Any]], Any] | None = None
    undivided: str = "its processes cannot divide updates"
    """Why :meth:`share` cannot be called; empty: it can."""
    usual: str = "updates"
    """What ``mesh.shard=auto`` divides."""
    shard: str = ""

    @property
    def leads(self) -> bool:
        """This is the rank that writes and prints."""
        return self.rank == 0

    @property
    def data(self) -> tuple[int, int]:
        """How many parts the rows of a step have, and which of them is this rank's, from 0."""
        parts, own = self.held_out
        return parts // self.pipeline, own % (parts // self.pipeline)

    @property
    def held_out(self) -> tuple[int, int]:
        """The same of rows that are evaluated, by whole models."""
        each = self.context * self.tensor
        return self.size // each, self.rank // each

    def divide(self, plan: Plan) -> Sequence[str]:
        """Divide a run among these processes as its settings ask; raises and returns as :meth:`check`."""
        mesh = plan.config.mesh
        self.share_rows(mesh.context, mesh.tensor)
        self.share_layers(mesh.pipeline)
        return self.check(plan)

    def share_rows(self, context: int, tensor: int = 1) -> None:
        """Let neighbours share each row from here on: ``context`` its columns, ``tensor`` these columns' heads.

        Raises:
            BackendError: they cannot, with what to type.
        """
        self._refuse(context, "row", "context")
        self._refuse(tensor, "row", "tensor")

    def share_layers(self, pipeline: int) -> None:
        """Let so many compute the layers of each row one after the other, from here on; as :meth:`share_rows`."""
        self._refuse(pipeline, "row's layers", "pipeline")

    def _refuse(self, processes: int, what: str, setting: str) -> None:
        if processes > 1:
            why = f"those of {self.how} do not" if self.size > 1 else "this one is alone"
            raise BackendError(
                f"{processes} processes are to share each {what}, and {why}",
                where=f"mesh.{setting}={processes}",
                fix=f"mesh.{setting}=1, or processes on torch: --gpus {processes}, torchrun (docs/scale.md)",
            )

    def pipelined(self, trainer: Any, *step: Any) -> Iterator[Any]:
        """Compute the losses of a step's micro-batches, and their gradients, where others share the layers.

        Args:
            trainer: of the framework.
            step: micro-batches, staged and other values, as the trainer has them.

        Returns:
            A loss a micro-batch: of the last stage; sums of 0 elsewhere, and statistics of its own layers.
        """
        raise NotImplementedError

    def check(self, plan: Plan) -> Sequence[str]:
        """Refuse a plan whose model cannot be computed by some columns of its rows, or heads, where these are shared.

        Returns:
            Lines to say of how it will be.

        Raises:
            PlanError: with the plugin and the reason.
            ConfigError: rows cannot be cut.
        """
        return ()

    def columns(self, batch: Any, plan: Plan) -> Any:
        """Take this rank's columns of a batch's rows: all of them, where none are shared."""
        return batch

    def part(self, trainer: Any) -> Any:
        """Make the model that this rank computes, on the arrays of the trainer's: that itself, where no heads are shared.

        Raises:
            PlanError: a node is not computed head by head.
        """
        return trainer.model

    def total(self, arrays: Sequence[Any]) -> list[Any]:
        """Add up arrays of the framework over all ranks, to the same bits on each; does not wait for the device.

        Args:
            arrays: float32, of the same shapes on each rank.
        """
        return list(arrays)

    def largest(self, arrays: Sequence[Any]) -> list[Any]:
        """Take the largest of each number over all ranks; as :meth:`total`."""
        return list(arrays)

    def gathered(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """Bring numbers of every rank together on the host, a tuple a rank. Waits for all ranks."""
        return [tuple(map(float, numbers))]

    def agreed(self, value: Any = None) -> Any:
        """Return rank 0's value, of JSON's types, on every rank. The others wait for it."""
        return value

    def share(self, what: str, groups: Mapping[str, Any], weights: Any, model: Any) -> Any:
        """Divide the updates of a trainer's parameters among the ranks.

        Args:
            what: ``updates``, or ``weights`` too.
            groups: key -> group, of all that is updated.
            weights: the framework's own: masters, and parameters in the compute dtype.
            model: the framework's own, whose parameters they are.

        Returns:
            This rank's share, in the framework's terms: of torch a
            :class:`~minillm_core.backends.torch.share.Share`.
        """
        raise NotImplementedError

    def meeting(self) -> AbstractContextManager[None]:
        """Make of a framework's error inside, where another process has ended, one that says so."""
        return nullcontext()

    def close(self) -> None:
        """End the communication."""


ALONE = Ranks()


def launched() -> tuple[int, int]:
    """Return which process of how many this one is, by the variables of a launcher; (0, 1): alone.

    ``torchrun`` sets RANK and WORLD_SIZE, ``mlx.launch`` MLX_RANK and the hosts' file or their number.
    """
    here = os.environ.get
    rank, size = here("RANK") or here("MLX_RANK"), here("WORLD_SIZE") or here("MLX_WORLD_SIZE")
    if rank and not size and (hosts := here("MLX_HOSTFILE") or here("MLX_IBV_DEVICES")):
        size = str(len(json.loads(Path(hosts).read_text())))
    return (int(rank), int(size)) if rank and size else (0, 1)


def divides(asked: str, ranks: Ranks) -> str:
    """Decide what the ranks divide, by ``mesh.shard``: updates, weights too, or "" for nothing.

    Raises:
        ConfigError: ``asked`` names what these ranks cannot divide.
    """
    why = "one process trains" if ranks.size == 1 else ranks.undivided
    if asked in ("updates", "weights") and why:
        fix = "mesh.shard=auto divides updates where that can be done"
        raise ConfigError(f"{asked} cannot be divided: {why}", where=f"mesh.shard={asked}", fix=fix)
    return "" if asked == "off" or why else asked.replace("auto", ranks.usual)


def said_by() -> str:
    """Return what begins an error's text, so that it says which process it is of; alone: nothing."""
    rank, size = launched()
    return f"rank {rank}: " if size > 1 else ""


def join(detected: Detected) -> Ranks:
    """Join the processes that were launched with this one, if there are others.

    Raises:
        BackendError: no installed distribution brings the communication of the backend.
    """
    if launched()[1] == 1:
        return ALONE
    return engine(detected.backend)(detected)


def launch(detected: Detected, gpus: int, arguments: Sequence[str]) -> int | None:
    """Start a command in a process for each of some GPUs of this machine, unless this is one of them.

    Args:
        detected: the command's backend and device.
        gpus: how many.
        arguments: of the command, ``train`` first.

    Returns:
        Its exit code; None: the command is to run in this process, alone or as one of those.

    Raises:
        BackendError: there are not so many GPUs, or this is one of another number of processes.
    """
    _, size = launched()
    if size > 1 and size != gpus:
        raise BackendError(
            f"--gpus {gpus} in one of {size} processes",
            where=f"--gpus {gpus}",
            fix="leave --gpus out where a launcher has started the processes",
        )
    here = probe().nvidia
    if detected.device != "cuda" or gpus > here:
        raise BackendError(
            f"--gpus {gpus} asks for NVIDIA GPUs, and {here} can be used on {detected.device}",
            where=f"--gpus {gpus}",
            fix="a smaller number; processes on CPUs are started by torchrun, those of MLX by mlx.launch "
            "(docs/scale.md)",
        )
    return engine(detected.backend).launch(gpus, arguments) if gpus > size else None


def engine(backend: str) -> Any:
    """Import the class of a backend's ranks.

    Raises:
        BackendError: no installed distribution brings it.
        PluginError: several do.
    """
    return brought(GROUP, backend, f"training in several processes on {backend}", FIRST_PARTY)


def forecaster(backend: str) -> Any:
    """Import the function of a plan, cards, their kind and dtype that forecasts a run on several cards.

    Raises:
        BackendError: no installed distribution brings it.
        PluginError: several do.
    """
    return brought(FORECASTS, backend, f"a forecast for several GPUs on {backend}", FIRST_PARTY)


def brought(group: str, backend: str, what: str, by: str) -> Any:
    """Import what an installed distribution brings for a backend; ``by`` is the one of minillm's own.

    Raises:
        BackendError: none does.
        PluginError: several do.
    """
    if (found := offered(group, backend, f"bring {what}")) is None:
        raise BackendError(
            f"{what} needs a distribution that is not installed",
            where=f"entry points of {group}",
            fix=installing([by]),
        )
    return found.load()
