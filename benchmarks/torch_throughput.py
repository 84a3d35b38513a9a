"""Training speed on one GPU with PyTorch: nanoGPT's own model and loop beside ours, in one process.

    python -m benchmarks.torch_throughput --nanogpt MODEL_PY

GPT-2 small with a tied head, bfloat16, compiled, T = 1,024, 524,288 tokens per step, on random token
ids. Ours: preset gpt2-124m, plain and with plugins. ``--attempt dense:kernels=...`` measures one
more variant of ours. Tokens/s are medians over all timed steps; MFU is 6 N + 12 L H Q T FLOPs
per token, N the parameters in products, relative to 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import measuring, written
from benchmarks.nanogpt import NanoGPT
from benchmarks.ours import Ours, attempted, bound
from benchmarks.profiling import profiled
from benchmarks.turns import PEAK_FLOPS, Measured, Memory, Turns, Variant, ratio, take_turns

PLUGINS = {
    "plain": "",
    "muon": "muon",
    "paired": "paired_heads",
    "muon_paired": "muon,paired_heads",
}
STEPS_OF_DATA = 8  # then it repeats
START = time.perf_counter()


class CudaMemory(Memory):
    """torch's allocator on the current GPU."""

    wait = staticmethod(torch.cuda.synchronize)
    now = staticmethod(torch.cuda.memory_allocated)
    reset = staticmethod(torch.cuda.reset_peak_memory_stats)
    peak = staticmethod(torch.cuda.max_memory_allocated)
    trim = staticmethod(torch.cuda.empty_cache)


class Scale:
    """The sizes of a measurement: GPT-2 small, or sizes that a CPU runs in seconds."""

    def __init__(self, tiny: bool) -> None:
        self.seq_len = 64 if tiny else 1024
        self.tokens = 512 if tiny else 524_288
        self.vocab = 512 if tiny else 50_304
        self.layers, self.heads, self.dim = (2, 2, 64) if tiny else (12, 12, 768)
        self.settings = (
            [
                f"model.layers={self.layers}",
                f"model.dim={self.dim}",
                f"model.heads={self.heads}",
                f"model.kv_heads={self.heads}",
                "model.hidden=128",
                f"model.vocab={self.vocab}",
                f"train.seq_len={self.seq_len}",
            ]
            if tiny
            else []
        )

    @property
    def nanogpt(self) -> dict[str, int]:
        """nanoGPT's names of the sizes."""
        return {
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_embd": self.dim,
            "vocab_size": self.vocab,
        }

    def accumulate(self, rows: int) -> int:
        """Return the number of micro-batches per step."""
        return self.tokens // (rows * self.seq_len)

    def data(self) -> np.ndarray:
        """Draw ids, uint16 (n,)."""
        rng = np.random.default_rng(0)
        return rng.integers(1, self.vocab, STEPS_OF_DATA * self.tokens + 1, dtype=np.uint16)


def makers(arguments: argparse.Namespace, scale: Scale) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Map names to factories of variants, in the order of the turns."""
    data = scale.data()

    def peer(rows: int) -> tuple[Variant, int]:
        made = NanoGPT(
            arguments.nanogpt,
            data,
            rows=rows,
            accumulate=scale.accumulate(rows),
            seq_len=scale.seq_len,
            device=arguments.device,
            compiled=arguments.device != "cpu",
            shape=scale.nanogpt,
        )
        return made, scale.tokens

    def ours(rows: int, plugins: str, settings: list[str]) -> tuple[Variant, int]:
        shape = [f"train.rows={rows}", f"train.accumulate={scale.accumulate(rows)}"]
        plan, backend = bound(
            [*scale.settings, *shape, *settings], plugins, "torch", arguments.device
        )
        return Ours(plan, backend, data), scale.tokens

    for rows in arguments.rows:
        for name in arguments.variants:
            if name == "nanogpt":
                yield f"nanogpt B={rows}", partial(peer, rows)
            else:
                yield f"{name} B={rows}", partial(ours, rows, PLUGINS[name], arguments.set)
        for attempt in arguments.attempt:
            label, plugins, settings = attempted(attempt)
            yield f"{label} B={rows}", partial(ours, rows, plugins, [*arguments.set, *settings])


def ratios(measured: dict[str, Measured], rows: list[int]) -> dict[str, Any]:
    """Compute ratios of ours to nanoGPT's, and of plugins to plain, at each B."""
    found = {}
    for b in rows:
        at = {
            name.rpartition(" ")[0]: m for name, m in measured.items() if name.endswith(f" B={b}")
        }
        for base in ("nanogpt", "plain"):
            for name, one in at.items():
                if base in at and name not in ("nanogpt", base):
                    found[f"{name} / {base}, B={b}"] = ratio(one, at[base])
    return found


def parsed() -> argparse.Namespace:
    parser = measuring(__doc__, "torch_throughput")
    parser.add_argument("--nanogpt", type=Path, help="nanoGPT's model.py at 3adf61e")
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=["nanogpt", "plain", "muon"],
        help=f"of nanogpt, {', '.join(PLUGINS)}",
    )
    parser.add_argument(
        "--rows", type=lambda text: [int(n) for n in text.split(",")], default=[32, 64]
    )
    parser.add_argument("--steps", type=int, default=5, help="timed, a turn")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each variant")
    parser.add_argument("--set", action="append", default=[], help="key=value, for all of ours")
    parser.add_argument(
        "--attempt",
        action="append",
        default=[],
        metavar="LABEL:KEY=VALUE;plugins=NAME",
        help="one more variant of ours",
    )
    parser.add_argument("--profile", action="store_true", help="and list each one's kernels")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="try it on a CPU")
    arguments = parser.parse_args()
    unknown = set(arguments.variants) - {"nanogpt", *PLUGINS}
    if unknown:
        parser.error(f"no variant {', '.join(sorted(unknown))}")
    if "nanogpt" in arguments.variants and arguments.nanogpt is None:
        parser.error("--nanogpt MODEL_PY, or --variants without nanogpt")
    return arguments


def main() -> None:
    arguments = parsed()
    scale = Scale(arguments.tiny)
    torch._dynamo.config.recompile_limit = 64  # several variants share one forward function
    gpu = arguments.device != "cpu"

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - START:6.1f}] {line}", flush=True)

    rounds = take_turns(
        dict(makers(arguments, scale)),
        CudaMemory() if gpu else Memory(),
        steps=arguments.steps,
        repeats=arguments.repeats,
        together=arguments.steps,  # enqueued, as in both loops
        say=say,
    )
    peak_flops = PEAK_FLOPS if gpu else None
    attention = scale.layers * scale.dim * scale.seq_len

    def save(figures: dict[str, Any]) -> Path:
        return written(arguments, figures)

    turns, figures = Turns(), {}
    for turns in rounds:  # saved after each: a machine may be preempted
        figures = {
            "peak_flops": peak_flops,
            "variants": {n: m.figures(attention, peak_flops) for n, m in turns.measured.items()},
            "ratios": ratios(turns.measured, arguments.rows),
            "failed": turns.failed,
        }
        path = save(figures)
    for name, figure in figures["variants"].items():
        say(
            f"{name:24} {figure['tokens_per_second']:>9,} tokens/s  mfu {figure['mfu']}  "
            f"peak {figure['peak_bytes'] / 2**30:6.2f} GiB"
        )
    for name, figure in figures["ratios"].items():
        say(f"{name:32} speed {figure['tokens_per_second']}  peak {figure['peak_bytes']}")
    if arguments.profile:
        figures["profiles"] = {
            name: profiled(one.variant.step, gpu=gpu) for name, one in turns.measured.items()
        }
        path = save(figures)
    for one in turns.measured.values():
        one.variant.close()
    say(f"wrote {path}")
    raise SystemExit(1 if turns.failed else 0)


if __name__ == "__main__":
    main()
