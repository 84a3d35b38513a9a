"""The tables of docs/scale.md: the cost model beside measurements, and forecasts for unavailable GPUs.

python -m tools.scale_page             # check that the page is up to date
python -m tools.scale_page --write     # write it

A row is a pair of measurements of one program, on few GPUs and on more: the first calibrates the
compute time, the second tests the model. Where the first used several GPUs, the compute time is chosen
such that the model reproduces it. Unmeasured runs are forecast as by ``minillm plan --gpus``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.scale import CASES
from minillm_core import build_plan, load
from minillm_mesh.automatic import forecast
from minillm_mesh.cost import CARDS, Card, Collective, Work, seconds, times
from minillm_mesh.forecast import Forecast
from tools.markdown import table
from tools.pages import Page, main
from tools.repository import ROOT

__all__ = ["PAGE", "POINTS", "Point"]

H200, H100 = CARDS["h200"], CARDS["h100"]
BFLOAT16, FLOAT32 = 2, 4  # bytes


@dataclass(frozen=True)
class Point:
    """Tokens per second and GPU, on few GPUs and on more."""

    what: str
    source: str
    card: Card
    tokens: int  # per GPU and step
    few: tuple[int, float]  # number of GPUs, tokens/s of one GPU
    more: tuple[int, float]
    exchanges: tuple[Collective, ...]
    calibrates: str = ""  # the constant of the model that is calibrated by it

    def predicted(self) -> float:
        """Predict the tokens per second of one GPU among the larger number."""
        (few, rate), (more, _) = self.few, self.more
        flops = self._flops(lambda work: times(work, few, self.card).total, self.tokens / rate)
        return self.tokens / times(Work(flops, exchanges=self.exchanges), more, self.card).total

    def _flops(self, total: Callable[[Work], float], wanted: float) -> float:
        """Find by bisection the FLOPs for which a step takes the measured time."""
        low, high = 0.0, wanted * self.card.flops
        for _ in range(100):
            middle = (low + high) / 2
            longer = total(Work(middle, exchanges=self.exchanges)) > wanted
            low, high = (low, middle) if longer else (middle, high)
        return (low + high) / 2


def ddp(parameters: float, micro_batches: int) -> tuple[Collective, ...]:
    """Return the all-reduces of DDP: float32, in buckets of 25 MiB, overlapped with the last backward pass."""
    size = FLOAT32 * parameters
    turns = max(1, round(size / (25 * 2**20)))
    beside = (1 - 1 / turns) * 2 / 3 / micro_batches  # the last bucket overlaps with nothing
    return (Collective("gradients", "all-reduce", size, turns, beside),)


def fsdp(
    parameters: float, layers: int, micro_batches: int, weight: float
) -> tuple[Collective, ...]:
    """Return the collectives of FSDP2 per block: weights twice, gradients in float32, each micro-batch."""
    turns = layers * micro_batches
    share = 1 - 1 / turns
    return (
        Collective(
            "weights", "all-gather", 2 * weight * parameters * micro_batches, 2 * turns, share
        ),
        Collective(
            "gradients",
            "reduce-scatter",
            FLOAT32 * parameters * micro_batches,
            turns,
            share * 2 / 3,
        ),
    )


OURS = "two H200 of one host, PyTorch 2.11, bfloat16, compiled; one day"
TITAN = "torchtitan, benchmarks/llama3_h100_202412"
NANOGPT = "nanoGPT of 124 M, DDP"

POINTS = (
    Point(
        f"{NANOGPT}, 65,536 tokens a card",
        OURS, H200, 65_536, (1, 546_400), (2, 1_034_100 / 2), ddp(124e6, 1),
    ),
    Point(
        f"{NANOGPT}, 32,768 tokens a card",
        OURS, H200, 32_768, (1, 521_400), (2, 990_000 / 2), ddp(124e6, 1),
    ),
    Point(
        f"{NANOGPT}, 4 x 65,536 tokens a card",
        OURS, H200, 4 * 65_536, (1, 534_800), (2, 1_041_900 / 2), ddp(124e6, 4),
    ),
    Point(
        "GPT of 1.31 B, FSDP2, 2 x 8,192 tokens a card",
        OURS, H200, 16_384, (1, 61_900), (2, 115_700 / 2), fsdp(1.31e9, 24, 2, BFLOAT16), "slowed",
    ),
    Point(
        "Llama 3.1 8B, FSDP2, compiled, 16,384 tokens a card",
        TITAN, H100, 16_384, (8, 6_667), (128, 6_514), fsdp(8.03e9, 32, 1, BFLOAT16), "spread",
    ),
    Point(
        "the same, not compiled",
        TITAN, H100, 16_384, (8, 5_762), (128, 5_605), fsdp(8.03e9, 32, 1, BFLOAT16),
    ),
    Point(
        "the same, compiled, float8",
        TITAN, H100, 16_384, (8, 8_532), (128, 8_380), fsdp(8.03e9, 32, 1, 1),
    ),
    Point(
        "Llama 3.1 8B, FSDP2, compiled, float8, 16,384 tokens a card",
        "torchtitan, benchmarks/llama3_8b_h200_2025-06 (Trainy)",
        H200, 16_384, (32, 10_938), (64, 10_753), fsdp(8.03e9, 32, 1, 1),
    ),
)  # fmt: skip

SIZES = ((1, 0.027e-3), (16, 0.077e-3), (128, 0.47e-3), (512, 1.7e-3))
"""All-reduce over two H200: MiB, seconds."""

MEASURED = {
    "data-65536": "gpt2-124m, muon, 65,536 tokens a card",
    "nanogpt-ddp-65536": "nanoGPT's model under torch's DDP, 65,536 tokens a card",
    "data-32768": "gpt2-124m, muon, 32,768 tokens a card",
    "nanogpt-ddp-32768": "nanoGPT's model under torch's DDP, 32,768 tokens a card",
    "weights-1b": "1b, muon, sharded weights, 32,768 tokens a card",
    "checkpointed-1b": "1b, muon, sharded weights, activations recomputed, 32,768 tokens a card",
    "checkpointed-1b-rows16": "1b, muon, sharded weights, activations recomputed, 65,536 tokens a card",
    "nanogpt-fsdp-1.3b": "nanoGPT's model of 1.31 B under FSDP2 with AdamW, 16,384 tokens a card",
    "context-65536": "gpt2-124m, windows, documents, rows of 65,536 tokens shared by both",
    "context-131072": "gpt2-124m, windows, documents, rows of 131,072 tokens shared by both",
    "recipe-400": "speedrun, 400 steps, 65,536 tokens a step on both",
}
"""Cases of benchmarks/scale.py, and their descriptions."""

RESULTS = (
    "scale",
    "scale_weights",
    "scale_checkpointed",
    "scale_checkpointed_rows16",
    "scale_context",
    "scale_context_long",
    "scale_recipe_h200_stacks",
)
"""Result files of benchmarks/scale.py."""


@dataclass(frozen=True)
class Measured:
    """A measured case on one GPU and on two, and its plan on as many."""

    name: str
    card: Card
    cases: tuple[dict[str, Any], dict[str, Any]]  # as in the result file
    speeds: tuple[float, float]  # tokens/s

    def planned(self, gpus: int) -> Forecast | None:
        """Forecast the run as `minillm plan --gpus` does; None: a peer's, which has no plan."""
        (case,) = (one for one in CASES if (one.name, one.gpus) == (self.name, gpus))
        if case.peer:
            return None
        flags = dict(pairwise(case.arguments))
        pairs = (word.split("=") for word in case.arguments if "=" in word)
        settings = {key: value if value.isalpha() else int(value) for key, value in pairs}
        settings |= {key: value == "true" for key, value in settings.items() if value in BOOLEAN}
        config = load(
            preset=flags["--preset"], plugins=flags.get("--plugins", ""), settings=settings
        )
        return forecast(build_plan(config), gpus, self.card.name, "bfloat16")

    def mfu(self, gpus: int) -> float:
        """Return the model FLOPs utilisation of each GPU."""
        found = self.planned(gpus)
        each = found.plan.estimate().flops_per_token if found else self.cases[0]["flops_per_token"]
        return self.speeds[gpus - 1] / gpus * each / self.card.flops


BOOLEAN = ("true", "false")


def results() -> Iterator[tuple[str, dict[str, Any], list[Measured]]]:
    """Yield each result file: its name, its document, and its cases."""
    for file in RESULTS:
        document = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
        figures, found = document["figures"], []
        (gpu,) = {gpu["name"] for gpu in document["environment"]["hardware"]["gpus"]}
        card = next(card for name, card in CARDS.items() if name.upper() in gpu)
        for name in MEASURED:
            if name in figures["ratios"]:
                one, two = (figures["cases"][f"{name}-{gpus}"] for gpus in (1, 2))
                first, second = (
                    case["tokens_per_step"] / fmean(case["step_seconds"][figures["warm"] :])
                    for case in (one, two)
                )
                found.append(Measured(name, card, (one, two), (first, second)))
        yield file, document, found


def measured() -> str:
    """Return the table of the results of benchmarks/scale.py: tokens/s and memory on one GPU and on two."""
    rows, about = [], []
    for file, document, found in results():
        for one in found:
            rows.append(
                (
                    MEASURED[one.name],
                    *(f"{speed:,.0f}" for speed in one.speeds),
                    f"{one.speeds[1] / one.speeds[0] / 2:.3f}",
                    *(f"{one.mfu(gpus):.3f}" for gpus in (1, 2)),
                    *(f"{case['peak_gib']:.1f}" for case in one.cases),
                )
            )
        environment = document["environment"]
        (gpu,) = {gpu["name"] for gpu in environment["hardware"]["gpus"]}
        about.append(
            f"`{file}.json`: one run on two {gpu} of one host, PyTorch "
            f"{environment['versions']['torch']}, bfloat16, compiled; {environment['date'][:10]}, commit "
            f"{environment['commit'][:7]}; a step is the mean of those after the "
            f"first {document['figures']['warm']}."
        )
    head = (
        "what", "tokens/s, one", "two", "of linear", "MFU, one", "two", "GiB a card, one", "two"
    )  # fmt: skip
    return "\n\n".join((table(head, rows), "`python -m benchmarks.scale`.", *about))


def checked() -> str:
    """Return the table of minillm's own runs on two GPUs: as planned, and as measured."""
    rows = []
    for *_, found in results():
        for one in found:
            if (plan := one.planned(2)) is None:
                continue
            (_, speed), peak = one.speeds, one.cases[1]["peak_gib"]
            planned = plan.data()
            rate, size = planned["tokens_per_second"], planned["bytes"] / 2**30
            numbers = (f"{rate:,.0f}", f"{speed:,.0f}", f"{rate / speed:.2f}")
            sizes = (f"{size:.1f}", f"{peak:.1f}", f"{size / peak:.2f}")
            rows.append((MEASURED[one.name], one.card.name.upper(), *numbers, *sizes))
    head = (
        "what", "card", "tokens/s, planned", "measured", "ratio", "GiB a card, planned", "measured", "ratio"
    )  # fmt: skip
    return table(head, rows)


def predicted() -> str:
    """Return the table: predicted, measured, ratio."""
    rows = []
    for point in POINTS:
        (few, rate), (more, measured) = point.few, point.more
        found = point.predicted()
        rows.append(
            (
                point.what,
                f"{few} to {more} {point.card.name.upper()}",
                f"{rate:,.0f}",
                f"{found:,.0f}",
                f"{measured:,.0f}",
                f"{found / measured:.3f}",
                point.calibrates,
            )
        )
    head = (
        "what", "cards", "tokens/s a card, few", "predicted, more", "measured, more", "ratio", "sets"
    )  # fmt: skip
    reduced = []
    for mib, measured in SIZES:
        found = seconds("all-reduce", mib * 2**20, 2, H200)
        sets = "reached" if mib == 512 else ""
        reduced.append(
            (
                f"{mib} MiB",
                f"{1e3 * found:.3f}",
                f"{1e3 * measured:.3f}",
                f"{found / measured:.3f}",
                sets,
            )
        )
    collectives = table(
        ("all-reduce over 2 H200", "predicted, ms", "measured, ms", "ratio", "sets"), reduced
    )
    sources = "; ".join(dict.fromkeys(point.source for point in POINTS))
    return f"{table(head, rows)}\n\nSources: {sources}.\n\n{collectives}"


@dataclass(frozen=True)
class Run:
    """A run on 4 and on 8 GPUs in command-line form: N in a setting is the number of GPUs."""

    what: str
    preset: str
    plugins: str = ""
    settings: tuple[str, ...] = ()

    def typed(self) -> str:
        """Format its command-line arguments."""
        plugins = f" --plugins {self.plugins}" if self.plugins else ""
        return " ".join((f"--preset {self.preset}{plugins}", *self.settings))

    def settled(self, cards: int) -> dict[str, Any]:
        """Return its settings for a number of GPUs."""
        pairs = (one.split("=") for one in self.settings)
        return {
            key: int(n) if (n := value.replace("N", str(cards))).isdigit() else value
            for key, value in pairs
        }


RUNS = (
    Run(
        "65,536 tokens a card and step",
        "gpt2-124m", "muon", ("train.rows=64", "train.accumulate=N"),
    ),
    Run("the recipe, 65,536 tokens a step", "speedrun"),
    Run(
        "1.1 B, sharded weights",
        "1b", "muon", ("mesh.shard=weights",),
    ),
    Run(
        "rows of 262,144 tokens, shared by all cards",
        "gpt2-124m",
        "muon",
        ("train.rows=1", "train.accumulate=1", "train.seq_len=262144", "mesh.context=N"),
    ),
)  # fmt: skip


def not_measured() -> str:
    """Return the table of runs on 4 and 8 H200, forecast by `minillm plan --gpus`."""
    rows = []
    for run in RUNS:
        for cards in (4, 8):
            config = load(preset=run.preset, plugins=run.plugins, settings=run.settled(cards))
            found = forecast(build_plan(config), cards, "h200", "bfloat16").data()
            rows.append(
                (
                    run.what,
                    str(cards),
                    f"{1e3 * found['seconds']['step']:,.0f}",
                    f"{found['tokens_per_second'] / cards:,.0f}",
                    f"{found['of_linear']:.2f}",
                    f"{100 * found['communication_share']:.1f} %",
                    f"{found['bytes'] / 2**30:.1f}",
                    f"`{run.typed()}`",
                )
            )
    head = (
        "what", "cards", "ms a step", "tokens/s a card", "of linear", "communication", "GiB a card", "run"
    )  # fmt: skip
    return table(head, rows)


PAGE = Page(
    ROOT / "docs" / "scale.md",
    {
        "measured": measured,
        "planned": checked,
        "predicted": predicted,
        "not measured": not_measured,
    },
)

if __name__ == "__main__":
    main(__doc__, PAGE)
