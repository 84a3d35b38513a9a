"""Step times of tables updated by rows, of whole tables, and without tables, in turns in one process.

    python -m benchmarks.sparse_rows [--tokens 65536,16384] [--tables bigram_hash,value_embeds]
        [--set key=value ...] [--backend torch] [--steps 20] [--repeats 7] [--tiny]

For each number of tokens per step: the plain model, each plugin with whole tables, and each by rows
(``sparse_rows``), 6 layers of 512 with 50,304 ids unless --set changes them. Tokens are drawn by Zipf's law
(exponent 1), which looks up more rows of a table than text does. ``cost`` is the fraction of a step due to a
plugin, 1 - plain / with it, from the medians of all steps, with the lowest and highest of the turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.command import measuring, written
from benchmarks.ours import PROGRESS, activated
from benchmarks.turns import Measured, Memory, take_turns
from minillm_core.inspection import batch_hook

LEAST = 0.05
"""Maximum fraction of a step that bigram_hash by rows may cost at width 512."""

WIDE = ("model.layers=6", "model.dim=512", "model.heads=8", "model.kv_heads=8", "model.vocab=50304")
TINY = ("model.layers=2", "model.dim=64", "model.heads=2", "model.kv_heads=2", "model.vocab=4096")
BATCHES = 16
"""Number of steps' batches, built before timing and reused."""


class Stepped:
    """A trainer stepped on prebuilt batches.

    Args:
        settings: ``key=value``.
        plugins: their names.
        backend: torch, mlx or auto.
        preset: the base settings.
    """

    def __init__(self, settings: Sequence[str], plugins: str, backend: str, preset: str) -> None:
        self.plan, made, active = activated(settings, plugins, backend, preset=preset)
        self.binding = made.binding
        self.trainer, self.values = made.trainer(self.plan, 0), self.plan.values(PROGRESS)
        train, vocab = self.plan.config.train, self.plan.config.model.vocab
        hook = batch_hook(self.plan, active) or (lambda batch, phase: batch)
        drawn = zipf(vocab, (BATCHES, train.accumulate, train.rows, train.seq_len + 1))
        steps = [[hook(batch_of(ids), "train") for ids in step] for step in drawn]
        self.batches: Iterator[Any] = cycle(steps)
        self.tokens = train.accumulate * train.rows * train.seq_len
        self.handle: Any = None
        self.steps = 0

    @property
    def multiplied(self) -> int:
        """Parameters in products."""
        return self.plan.estimate().multiplied

    def step(self) -> None:
        """Make one optimizer step; reads the previous one, as in the training loop."""
        before, self.steps = self.handle, self.steps + 1
        self.handle = self.trainer.step(next(self.batches), self.values, self.tokens)
        if before is not None:
            self.trainer.read(before)

    def read(self) -> float:
        """Return the loss of the last step; synchronises."""
        return self.trainer.read(self.handle).loss

    def close(self) -> None:
        """Do nothing: no thread runs."""

    def facts(self) -> dict[str, Any]:
        """Return plan, binding, and the number of rows in a step."""
        rows = {
            key: round(count / self.steps)
            for key, count in self.trainer.witnesses().items()
            if key.startswith("rows:") and key != "rows:"
        }
        bound = {key: getattr(self.binding, key) for key in ("device_name", "dtype", "compile")}
        plugins = [plugin.name for plugin in self.plan.plugins]
        return {"plan": self.plan.hash, "plugins": plugins, "rows_per_step": rows, **bound}


def zipf(vocab: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw ids by Zipf's law, int32: id n with a probability of 1 / (n + 1)."""
    totals = np.cumsum(1.0 / np.arange(1, vocab + 1))
    drawn = np.random.default_rng(0).random(shape) * totals[-1]
    return np.minimum(np.searchsorted(totals, drawn), vocab - 1).astype(np.int32)


def batch_of(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Build a batch of ids int32 (B, T + 1)."""
    rows, length = ids.shape[0], ids.shape[1] - 1
    return {
        "ids": ids[:, :-1].copy(),
        "labels": ids[:, 1:].copy(),
        "documents": np.zeros((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }


def cost(plain: Measured, other: Measured) -> dict[str, Any]:
    """Return the fraction of ``other``'s step that exceeds ``plain``'s."""

    def share(a: Sequence[float], b: Sequence[float]) -> float:
        return round(1 - statistics.median(a) / statistics.median(b), 4)

    turns = [share(a, b) for a, b in zip(plain.seconds, other.seconds, strict=True)]
    return {"cost": share(plain.steps, other.steps), "low": min(turns), "high": max(turns)}


def compared(
    tokens: int, tables: Sequence[str], settings: Sequence[str], given: Any, memory: Memory
) -> dict[str, Any]:
    """Time all variants at one number of tokens per step."""
    length = 64 if given.tiny else 1024
    sized = (*settings, f"train.seq_len={length}", f"train.rows={max(1, tokens // length)}")
    sets = {"plain": ""}
    for table in tables:
        sets |= {table: table, f"{table} by rows": f"{table},sparse_rows"}

    def maker(plugins: str) -> Callable[[], tuple[Stepped, int]]:
        def make() -> tuple[Stepped, int]:
            made = Stepped((*sized, "train.accumulate=1"), plugins, given.backend, given.preset)
            return made, made.tokens

        return make

    makers: dict[str, Any] = {name: maker(plugins) for name, plugins in sets.items()}
    counts = {"steps": given.steps, "repeats": given.repeats}
    *_, turns = take_turns(makers, memory, say=print, warm=BATCHES + 1, together=5, **counts)
    plain, found = turns.measured.get("plain"), {}
    for name, one in turns.measured.items():
        found[name] = {
            "step_ms": round(1000 * statistics.median(one.steps), 3),
            "peak_bytes": one.peak,
            **one.variant.facts(),
            **(cost(plain, one) if plain and one is not plain else {}),
        }
    return {"tokens": tokens, "sets": found, "failed": turns.failed}


def main() -> None:
    """Measure every number of tokens, write the result file, and print a table."""
    parser = measuring(__doc__, "sparse_rows")
    parser.add_argument("--tokens", default="65536,16384", help="of a step, in one micro-batch")
    parser.add_argument("--tables", default="bigram_hash,value_embeds", help="plugins")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    given = parser.parse_args()
    settings = (*(TINY if given.tiny else WIDE), *given.set)
    found = []
    for tokens in map(int, given.tokens.split(",")):
        one = compared(tokens, given.tables.split(","), settings, given, memory_of(given.backend))
        found.append(one)
        print(written(given, {"settings": [*settings], "least": LEAST, "sizes": found}))
    for one in found:
        for name, figures in one["sets"].items():
            share = f", {figures['cost']:+.1%} of a step" if "cost" in figures else ""
            spread = f" [{figures['low']:+.1%}, {figures['high']:+.1%}]" if share else ""
            rows = f", {figures['rows_per_step']}" if figures["rows_per_step"] else ""
            print(f"{one['tokens']:,} tokens, {name}: {figures['step_ms']} ms{share}{spread}{rows}")
        for name in one["failed"]:
            print(f"{one['tokens']:,} tokens, {name}: FAILED")


def memory_of(backend: str) -> Memory:
    """Return the counter of a GPU's memory, if torch uses one."""
    import torch

    if backend == "mlx" or not torch.cuda.is_available():
        return Memory()
    from benchmarks.torch_throughput import CudaMemory

    return CudaMemory()


if __name__ == "__main__":
    main()
