r"""Speed on one GPU and on two: ``minillm train`` as a user starts it, beside plain DDP and FSDP2.

    python -m benchmarks.scale --train train.jsonl.xz --val val.jsonl.xz --tokenizer bpe.json \
        --nanogpt MODEL_PY --work runs

Each case is a process of its own, or two of them: ``minillm train`` with one GPU or ``--gpus 2``, or a peer
(benchmarks/scale_peer.py), nanoGPT's model under torch's DDP or FSDP2. Two cases that need one GPU each run at once,
on different GPUs; a case of two GPUs has both. ``figures.cases`` has each step's seconds, losses and the peak of the
first process (of a peer: of the fullest); tokens/s are of the mean step after --warm. ``figures.ratios`` divides tokens/s a GPU on two GPUs
by that on one (``of_linear``), and peak memory.

``--steps 6 --warm 3`` tries everything, and fills Inductor's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.card_child import visible
from benchmarks.command import add_text, measuring, written
from minillm_core.backends.torch.backend import PEAK_FLOPS
from minillm_core.train.metrics import METRICS

__all__ = ["CASES", "Case", "main", "ratios"]

WINDOWS = (
    "windows.window=1024",
    "windows.start=1024",
    "windows.stages=1",
    "windows.documents=true",
)
LAYERS24 = ("--layers", "24", "--dim", "2048", "--heads", "16")


@dataclass(frozen=True)
class Case:
    """A run that is timed.

    Args:
        name: the same for its runs on one GPU and on several.
        gpus: number of GPUs.
        tokens: per step.
        arguments: of ``minillm train``, or of the peer.
        peer: train a peer's model.
        steps: its own number of steps; None: --steps.
        predictions: of the evaluation at the end of a run.
    """

    name: str
    gpus: int
    tokens: int
    arguments: tuple[str, ...]
    peer: bool = False
    steps: int | None = None
    predictions: int = 131_072

    @property
    def label(self) -> str:
        """Its name in messages, and that of its folder."""
        return f"{self.name}-{self.gpus}"


def _data(rows: int, gpus: int) -> Case:
    shape = (f"train.rows={rows}", f"train.accumulate={gpus}")
    small = ("--preset", "gpt2-124m", "--plugins", "muon")
    return Case(f"data-{rows * 1024}", gpus, rows * 1024 * gpus, (*small, *shape))


def _ddp(rows: int, gpus: int) -> Case:
    given = ("ddp", "--rows", str(rows))
    return Case(f"nanogpt-ddp-{rows * 1024}", gpus, rows * 1024 * gpus, given, peer=True)


def _weights(
    gpus: int, checkpointing: str = "false", *, rows: int = 8, unit: int = 1, fused: bool = False
) -> Case:
    """``rows`` other than the preset's are in the name: the more of them, the less of a step is communication.

    Fewer keep fewer activations, of as many tokens a step in more micro-batches.
    ``unit``: layers that are gathered together, on several GPUs.
    ``fused``: with the kernels of minillm-cute and fused SwiGLU, which keep fewer activations.
    """
    plugins = "muon,cute,fused_swiglu" if fused else "muon"
    micro = max(2, 16 // rows)  # for each GPU
    large = ("--preset", "1b", "--plugins", plugins, f"train.accumulate={micro * gpus}")
    wide = () if rows == 8 else (f"train.rows={rows}",)
    shard = ("mesh.shard=weights", f"mesh.unit={unit}") if gpus > 1 else ()
    again = () if checkpointing == "false" else (f"train.checkpointing={checkpointing}",)
    kind = {"false": "weights", "true": "checkpointed", "selective": "selective"}[checkpointing]
    sizes = [f"rows{rows}"] * bool(wide) + [f"unit{unit}"] * (unit > 1)
    name = "-".join(("fused-" * fused + kind, "1b", *sizes))
    return Case(name, gpus, rows * 2048 * micro * gpus, (*large, *wide, *shard, *again))


def _fsdp(gpus: int) -> Case:
    given = ("fsdp", "--rows", "8", "--accumulate", "2", *LAYERS24)
    return Case("nanogpt-fsdp-1.3b", gpus, 8 * 1024 * 2 * gpus, given, peer=True)


def _context(tokens: int, gpus: int) -> Case:
    row = ("train.rows=1", "train.accumulate=1", f"train.seq_len={tokens}", *WINDOWS)
    small = ("--preset", "gpt2-124m", "--plugins", "muon,windows")
    shared = ("mesh.context=2",) if gpus > 1 else ()
    return Case(f"context-{tokens}", gpus, tokens, (*small, *row, *shared))


def _recipe(steps: int, gpus: int) -> Case:
    given = ("--preset", "speedrun")
    return Case(f"recipe-{steps}", gpus, 65_536, given, steps=steps, predictions=1_048_576)


ROUNDS: tuple[tuple[Case, ...], ...] = (
    (_data(64, 1), _ddp(64, 1)),
    (_data(64, 2),),
    (_ddp(64, 2),),
    (_data(32, 1), _ddp(32, 1)),
    (_data(32, 2),),
    (_ddp(32, 2),),
    (_weights(1), _fsdp(1)),
    (_weights(2),),
    (_fsdp(2),),
    (_weights(1, "true"), _weights(1, "true", rows=16)),
    (_weights(2, "true"),),
    (_weights(2, "true", rows=16),),
    (_weights(1, "selective", fused=True), _weights(1, "true", fused=True)),
    (_weights(2, "selective", fused=True),),
    (_weights(2, "true", fused=True),),
    (_weights(1, "selective", fused=True, rows=2), _weights(1, "selective", fused=True, rows=4)),
    (_weights(2, "selective", fused=True, rows=2),),
    (_weights(2, "selective", fused=True, rows=4),),
    tuple(_weights(1, "selective", fused=True, rows=4, unit=unit) for unit in (2, 4)),
    (_weights(2, "selective", fused=True, rows=4, unit=2),),
    (_weights(2, "selective", fused=True, rows=4, unit=4),),
    (_context(65_536, 1), _context(131_072, 1)),
    (_context(65_536, 2),),
    (_context(131_072, 2),),
    (_recipe(175, 1), _recipe(400, 1)),
    (_recipe(175, 2),),
    (_recipe(400, 2),),
)
"""Cases that run at once, in the order of their runs: of one GPU two, since a GPU is slower while its
neighbour works, as it does in the cases of two."""

CASES = tuple(case for cases in ROUNDS for case in cases)


def main() -> None:
    parser = measuring(__doc__, "scale")
    add_text(parser)
    parser.add_argument("--nanogpt", type=Path, help="nanoGPT's model.py at 3adf61e")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=60, help="of each case")
    parser.add_argument("--warm", type=int, default=20, help="steps that are not timed")
    parser.add_argument("--only", default="", help="beginnings of names, such as data,context")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a case")
    parser.add_argument("--minutes", type=float, default=60, help="start no case after them")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    wanted = tuple(given.only.split(","))
    for cases in ROUNDS:
        chosen = [case for case in cases if case.name.startswith(wanted)]
        if not chosen:
            continue
        if time.monotonic() - began > 60 * given.minutes:
            print("out of time: not run:", ", ".join(case.label for case in chosen))
            continue
        for label, figures in side_by_side(chosen, given):
            found[label] = figures
            short = {key: figures.get(key) for key in ("tokens_per_second", "peak_gib", "mfu")}
            print(
                f"[{time.monotonic() - began:6.1f}] {label}: {figures.get('failed') or short}",
                flush=True,
            )
        written(given, {"cases": found, "ratios": ratios(found), "warm": given.warm})
    for name, ratio in ratios(found).items():
        print(name, ratio)
    raise SystemExit(any("failed" in one for one in found.values()))


def side_by_side(
    cases: Sequence[Case], given: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run cases at once, each on the next free GPUs; yield their labels and figures."""
    started, first = [], 0
    for case in cases:
        folder: Path = given.work / case.label
        shutil.rmtree(folder, ignore_errors=True)
        devices = ",".join(visible(first + at) for at in range(case.gpus))
        first += case.gpus
        log = (given.work / f"{case.label}.log").open("w")
        steps = _steps(case, given)
        command = _peer(case, given, steps) if case.peer else _train(case, given, steps, folder)
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": devices, "PYTHONUNBUFFERED": "1"},
        )
        started.append((case, process, folder, began))
    for case, process, folder, began in started:
        try:
            code = process.wait(max(1.0, began + given.limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                code = process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        figures: dict[str, Any] = {"gpus": case.gpus, "tokens_per_step": case.tokens}
        figures |= {"seconds": round(time.monotonic() - began, 1), "arguments": case.arguments}
        text = (given.work / f"{case.label}.log").read_text(errors="replace")
        if code:
            figures["failed"] = f"exit {code}: " + "\n".join(text.splitlines()[-12:])[-1500:]
        else:
            figures |= _of_peer(text) if case.peer else _of_run(folder / METRICS)
            figures |= _speed(figures, case, given)
        yield case.label, figures


def _steps(case: Case, given: argparse.Namespace) -> int:
    return given.steps if case.steps is None or given.steps < 20 else case.steps


def _train(case: Case, given: argparse.Namespace, steps: int, folder: Path) -> list[str]:
    """Return the command line of a run."""
    return [
        *(sys.executable, "-m", "minillm_core", "train", *case.arguments),
        *(("--gpus", str(case.gpus)) if case.gpus > 1 else ()),
        *("--steps", str(steps), "--out", str(folder)),
        f"data.paths={json.dumps([given.train])}",
        *(f"data.val={given.val}", f"data.tokenizer={given.tokenizer}"),
        *("eval.samples=0", f"eval.tokens={case.predictions}", "eval.every=0"),
        *("log.every=1", "checkpoint.every=0"),
    ]


def _peer(case: Case, given: argparse.Namespace, steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(case.gpus), "-m", "benchmarks.scale_peer"),
        *(*case.arguments, "--nanogpt", str(given.nanogpt)),
        *("--steps", str(steps), "--warm", str(min(given.warm, steps - 1))),
    ]


def _of_run(metrics: Path) -> dict[str, Any]:
    """Read a run's steps."""
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [one for one in events if one["event"] == "step"]
    return {
        "step_seconds": [round(one["step_seconds"], 5) for one in steps],
        "losses": [one["loss"] for one in steps],
        "val_losses": [[e["step"], e["val_loss"]] for e in events if e["event"] == "eval"],
        "mfu": steps[-1]["mfu"],
        "peak_gib": round(max(one["peak_bytes"] for one in steps) / 2**30, 2),
    }


def _of_peer(text: str) -> dict[str, Any]:
    """Read a peer's figures, the last line that is JSON."""
    found = next(line for line in reversed(text.splitlines()) if line.startswith("{"))
    return json.loads(found)


def _speed(figures: Mapping[str, Any], case: Case, given: argparse.Namespace) -> dict[str, Any]:
    timed = figures["step_seconds"][given.warm :] or figures["step_seconds"][-1:]
    speed = case.tokens / fmean(timed)
    found: dict[str, Any] = {"tokens_per_second": round(speed)}
    if "flops_per_token" in figures:
        of_cards = PEAK_FLOPS["H100"] * case.gpus
        found["mfu"] = round(speed * figures["flops_per_token"] / of_cards, 4)
    return found


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Compare each case on several GPUs with that on one.

    Args:
        found: label -> figures.

    Returns:
        Name -> ``of_linear``, tokens/s a GPU over those on one; ``step_time``; ``peak``, as in the cases.
    """
    usable = {label: one for label, one in found.items() if "failed" not in one}
    compared = {}
    for label, many in usable.items():
        name, _, gpus = label.rpartition("-")
        if many["gpus"] > 1 and (one := usable.get(f"{name}-1")):
            faster = many["tokens_per_second"] / one["tokens_per_second"]
            linear = faster * one["gpus"] / int(gpus)
            step = many["tokens_per_step"] / one["tokens_per_step"] / faster
            compared[name] = {
                "of_linear": round(linear, 4),
                "step_time": round(step, 4),
                "peak": round(many["peak_gib"] / one["peak_gib"], 3),
            }
    return compared


if __name__ == "__main__":
    main()
