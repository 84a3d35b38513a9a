"""Training speed with MLX: a hand-written compiled step beside ours, plain, in one process.

    python -m benchmarks.mlx_throughput

Both: the shape of gpt2-124m, B=8, T=1,024, AdamW after every batch, bfloat16 copies of float32
master weights, float32 moments, clipping; random token ids. In both, steps are enqueued one ahead, and
the loss is read one step late. MFU as in torch_throughput.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from benchmarks.command import measuring, written
from benchmarks.handwritten import gpt_mlx
from benchmarks.handwritten.shape import GPT2_124M, TINY
from benchmarks.ours import Ours, attempted, bound
from benchmarks.turns import PEAK_FLOPS, Memory, Turns, Variant, ratio, take_turns

MEMORY_LIMIT = 24 << 30  # on CUDA, MLX uses managed memory: far below a GPU's size
BATCHES_OF_DATA = 64  # then it repeats
LEARNING_RATE = 6e-4
START = time.perf_counter()


class MLXMemory(Memory):
    """MLX's allocator."""

    wait = staticmethod(mx.synchronize)
    now = staticmethod(mx.get_active_memory)
    reset = staticmethod(mx.reset_peak_memory)
    peak = staticmethod(mx.get_peak_memory)
    trim = staticmethod(mx.clear_cache)


class HandWritten:
    """The hand-written trainer on rows of ``tokens``."""

    def __init__(
        self, trainer: gpt_mlx.Trainer, tokens: np.ndarray, rows: int, seq_len: int
    ) -> None:
        self.trainer = trainer
        self.batches = self._stream(tokens, rows, seq_len)
        self.loss: mx.array | None = None

    @property
    def multiplied(self) -> int:
        """Parameters in products: all matrices."""
        weights = tree_flatten(self.trainer.state["weights"])
        return sum(weight.size for _, weight in weights if weight.ndim == 2)

    def step(self) -> None:
        """Make one optimizer step; synchronises with the previous one."""
        ids, labels = next(self.batches)
        before = self.loss
        self.loss, _ = self.trainer.step(ids, labels, LEARNING_RATE)
        if before is not None:
            before.item()

    def read(self) -> float:
        """Return the last step's loss; synchronises."""
        assert self.loss is not None
        return self.loss.item()

    def close(self) -> None:
        """Do nothing: no thread runs."""

    def facts(self) -> dict[str, Any]:
        """Describe the variant."""
        return {"of": "hand-written, benchmarks/handwritten/gpt_mlx.py"}

    @staticmethod
    def _stream(
        tokens: np.ndarray, rows: int, seq_len: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids and labels int32 (rows, T), contiguous."""
        size = rows * seq_len
        for at in cycle(range(0, len(tokens) - size, size)):
            part = tokens[at : at + size + 1].astype(np.int32)
            yield part[:-1].reshape(rows, seq_len), part[1:].reshape(rows, seq_len)


def parsed() -> argparse.Namespace:
    parser = measuring(__doc__, "mlx_throughput")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="timed, a turn")
    parser.add_argument("--together", type=int, default=10, help="steps timed as one")
    parser.add_argument("--repeats", type=int, default=4, help="turns of each variant")
    parser.add_argument("--plugins", action="append", default=[], help="one more variant of ours")
    parser.add_argument("--set", action="append", default=[], help="key=value, for all of ours")
    parser.add_argument(
        "--attempt",
        action="append",
        default=[],
        metavar="LABEL:KEY=VALUE;plugins=NAME",
        help="one more variant of ours",
    )
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--tiny", action="store_true", help="try it on a CPU")
    return parser.parse_args()


def main() -> None:
    mx.set_memory_limit(MEMORY_LIMIT)
    arguments = parsed()
    gpu = arguments.device != "cpu"
    if not gpu:
        mx.set_default_device(mx.cpu)
    shape = TINY if arguments.tiny else GPT2_124M
    rows, seq_len = arguments.rows, shape.positions
    tokens = rows * seq_len
    rng = np.random.default_rng(0)
    data = rng.integers(1, shape.vocab, BATCHES_OF_DATA * tokens + 1, dtype=np.uint16)
    sizes = ("layers", "dim", "heads", "kv_heads", "hidden", "vocab")
    settings = [f"model.{name}={getattr(shape, name)}" for name in sizes] + [
        f"train.rows={rows}",
        "train.accumulate=1",
        f"train.seq_len={seq_len}",
        *arguments.set,
    ]

    def by_hand() -> tuple[Variant, int]:
        dtype = mx.bfloat16 if gpu else mx.float32
        return HandWritten(gpt_mlx.Trainer(shape, dtype), data, rows, seq_len), tokens

    def ours(plugins: str = "", more: Sequence[str] = ()) -> tuple[Variant, int]:
        plan, backend = bound([*settings, *more], plugins, "mlx", arguments.device)
        return Ours(plan, backend, data), tokens

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - START:6.1f}] {line}", flush=True)

    makers = {"hand-written": by_hand, "plain": ours}
    makers |= {name: lambda name=name: ours(name) for name in arguments.plugins}
    for attempt in arguments.attempt:
        label, plugins, more = attempted(attempt)
        makers[label] = partial(ours, plugins, more)
    rounds = take_turns(
        makers,
        MLXMemory(),
        steps=arguments.steps,
        repeats=arguments.repeats,
        say=say,
        together=arguments.together,
        warm=2 * arguments.together,
    )
    peak_flops = PEAK_FLOPS if gpu else None
    attention = shape.layers * shape.dim * seq_len
    turns, figures, path = Turns(), {}, None
    for turns in rounds:  # saved after each: a machine may be preempted
        found = turns.measured
        hand = found.get("hand-written")
        figures = {
            "steps_timed_as_one": arguments.together,
            "peak_flops": peak_flops,
            "variants": {name: one.figures(attention, peak_flops) for name, one in found.items()},
            "ratios": {
                f"{name} / hand-written": ratio(one, hand)
                for name, one in found.items()
                if hand is not None and one is not hand
            },
            "failed": turns.failed,
        }
        path = written(arguments, figures)
    for name, figure in figures["variants"].items():
        say(
            f"{name:16} {figure['tokens_per_second']:>9,} tokens/s  mfu {figure['mfu']}  "
            f"peak {figure['peak_bytes'] / 2**30:6.2f} GiB"
        )
    for name, figure in figures["ratios"].items():
        say(f"{name:28} speed {figure['tokens_per_second']}  peak {figure['peak_bytes']}")
    for one in turns.measured.values():
        one.variant.close()
    say(f"wrote {path}")
    raise SystemExit(1 if turns.failed else 0)


if __name__ == "__main__":
    main()
