"""nanoGPT's own model in its own loop (github.com/karpathy/nanoGPT at 3adf61e, MIT), restated.

The model is read from a file supplied by the caller: none of it is in this repository. The loop of its
``train.py`` on one GPU is restated here, without logging: bfloat16 autocast, torch.compile,
fused AdamW, gradients averaged over micro-batches, clipping, the next batch prefetched while the
device computes. TF32, which it allows, is unchanged: under autocast no product is in float32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["LEARNING_RATE", "NanoGPT", "module_of"]

COMMIT = "3adf61e"
LEARNING_RATE = 6e-4


class NanoGPT:
    """GPT-2 small, head tied, without biases and dropout.

    Args:
        path: nanoGPT's ``model.py``.
        tokens: uint16 (n,), read contiguously and repeatedly.
        rows: per micro-batch.
        accumulate: micro-batches per step.
        seq_len: tokens per row.
        device: ``cuda`` or ``cpu``.
        compiled: compile it, as in its ``train.py``.
        shape: sizes of the model.
    """

    def __init__(
        self,
        path: Path,
        tokens: np.ndarray,
        *,
        rows: int,
        accumulate: int,
        seq_len: int,
        device: str,
        compiled: bool,
        shape: dict[str, int],
    ) -> None:
        source = module_of(path)
        torch.manual_seed(1337)
        config = source.GPTConfig(block_size=seq_len, dropout=0.0, bias=False, **shape)
        self.raw = source.GPT(config).to(device)
        self.model = torch.compile(self.raw, dynamic=False) if compiled else self.raw
        self.optimizer = self.raw.configure_optimizers(0.1, LEARNING_RATE, (0.9, 0.95), device)
        self.context = torch.amp.autocast(device_type=device, dtype=torch.bfloat16)
        self.accumulate, self.device = accumulate, device
        self.batches = self._stream(tokens, rows, seq_len)
        self.next = next(self.batches)
        self.loss: Tensor | None = None

    @property
    def multiplied(self) -> int:
        """Parameters in products: all matrices but the position table."""
        positions = self.raw.transformer.wpe.weight
        return sum(p.numel() for p in self.raw.parameters() if p.ndim == 2 and p is not positions)

    def step(self) -> None:
        """Make one optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        ids, labels = self.next
        for _ in range(self.accumulate):
            with self.context:
                _, loss = self.model(ids, labels)
                loss = loss / self.accumulate
            ids, labels = next(self.batches)
            loss.backward()
        self.next = ids, labels
        torch.nn.utils.clip_grad_norm_(self.raw.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach() * self.accumulate

    def read(self) -> float:
        """Return the loss of the last step's last micro-batch; synchronises."""
        assert self.loss is not None
        return float(self.loss)

    def close(self) -> None:
        """Do nothing: no thread runs."""

    def facts(self) -> dict[str, Any]:
        """Describe the variant."""
        return {"of": f"nanoGPT {COMMIT}", "learning_rate": LEARNING_RATE}

    def _stream(
        self, tokens: np.ndarray, rows: int, seq_len: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids and labels int64 (rows, T), contiguous."""
        size = rows * seq_len
        while True:
            for at in range(0, len(tokens) - size, size):
                part = torch.from_numpy(tokens[at : at + size + 1].astype(np.int64))
                if self.device == "cuda":
                    part = part.pin_memory().to(self.device, non_blocking=True)
                yield part[:-1].view(rows, seq_len), part[1:].view(rows, seq_len)


def module_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file; give nanoGPT's model.py ({COMMIT})")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
