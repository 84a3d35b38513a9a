"""Methods to save and load one training state: minillm's, torch.save, torch.distributed.checkpoint.

All of them hold the same arrays on the same device. minillm's and DCP's wait for the disk (fsync),
``torch.save`` does not, so it is measured with and without. Only minillm's loading verifies every byte.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from minillm_core.backends.base import Trainer
from minillm_core.checkpoint.read import newest_or_refuse
from minillm_core.checkpoint.writer import CheckpointWriter

__all__ = ["Saver", "savers"]

State = dict[str, torch.Tensor]


class Saver(Protocol):
    """One method."""

    def begin(self) -> None:
        """Save the current state; training may continue when this returns."""
        ...

    def end(self) -> None:
        """Wait until the state is saved."""
        ...

    def load(self) -> None:
        """Read the state and move it to the device."""
        ...

    def size(self) -> int:
        """Return the bytes of one save on disk."""
        ...

    def close(self) -> None:
        """Release threads and files."""
        ...


class Ours:
    """A snapshot that a thread commits; loading verifies, reads and resumes.

    Args:
        trainer: whose state is saved.
        out: a folder.
    """

    def __init__(self, trainer: Trainer, out: Path) -> None:
        self.trainer, self.out, self.saved = trainer, out, 0
        out.mkdir()
        self.writer = CheckpointWriter(out, keep=1)

    def begin(self) -> None:
        self.saved += 1
        self.writer.submit(self.saved, self.trainer.snapshot(), {"step": self.saved})

    def end(self) -> None:
        for result in self.writer.wait():
            if result.error:
                raise result.error

    def load(self) -> None:
        self.trainer.resume(newest_or_refuse(self.out).arrays())

    def size(self) -> int:
        return _size(self.out)

    def close(self) -> None:
        self.writer.close()
        shutil.rmtree(self.out)


class TorchSave:
    """torch.save to one path; torch.load(weights_only=True) and a copy into the tensors.

    Args:
        state: the state to save.
        path: the file.
        fsync: wait for the disk.
    """

    def __init__(self, state: State, path: Path, *, fsync: bool) -> None:
        self.state, self.path, self.fsync = state, path, fsync

    def begin(self) -> None:
        with self.path.open("wb") as file:
            torch.save(self.state, file)
            if self.fsync:
                file.flush()
                os.fsync(file.fileno())

    def end(self) -> None:
        pass

    def load(self) -> None:
        device = next(iter(self.state.values())).device
        found = torch.load(self.path, map_location=device, weights_only=True)
        for name, tensor in self.state.items():
            tensor.copy_(found[name])

    def size(self) -> int:
        return self.path.stat().st_size

    def close(self) -> None:
        self.path.unlink()


class Distributed:
    """dcp.save or dcp.async_save in a process group of one; dcp.load into the tensors.

    Args:
        state: the state to save.
        out: the folder, rewritten by each save.
        background: use async_save.
    """

    def __init__(self, state: State, out: Path, *, background: bool) -> None:
        self.state, self.out, self.background = state, out, background
        self.future: Any = None
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def begin(self) -> None:
        if self.background:
            self.end()
            self.future = dcp.async_save(self.state, storage_writer=self._writer())
        else:
            dcp.save(self.state, storage_writer=self._writer())

    def end(self) -> None:
        if self.future is not None:
            self.future.result()
            self.future = None

    def load(self) -> None:
        dcp.load(self.state, storage_reader=dcp.FileSystemReader(self.out))

    def size(self) -> int:
        return _size(self.out)

    def close(self) -> None:
        shutil.rmtree(self.out)

    def _writer(self) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.out, overwrite=True)


def savers(
    trainer: Trainer, device: torch.device, folder: Path
) -> Mapping[str, Callable[[], Saver]]:
    """Map names to factories; the alternatives save copies of the trainer's arrays on its device."""
    state = {name: torch.from_numpy(array).to(device) for name, array in trainer.arrays().items()}
    return {
        "minillm": lambda: Ours(trainer, folder / "ours"),
        "torch.save": lambda: TorchSave(state, folder / "state.pt", fsync=False),
        "torch.save, fsync": lambda: TorchSave(state, folder / "synced.pt", fsync=True),
        "dcp.save": lambda: Distributed(state, folder / "dcp", background=False),
        "dcp.async_save": lambda: Distributed(state, folder / "dcp-async", background=True),
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
