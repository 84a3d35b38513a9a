"""Generator of the tables of docs/costs.md, from the files in results/ and the technique cards.

python -m benchmarks.costs_page             # check that the page is up to date
python -m benchmarks.costs_page --write     # write it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.card_table import AWAITED, REFERENCE, TABLE
from benchmarks.decoding import PLUGINS, SMALLEST
from benchmarks.environment import RESULTS, ROOT
from benchmarks.page import table
from benchmarks.provenance import machine, unique
from minillm_core.plugins.manager import find
from minillm_lab.card import FOLDER, Card, read_cards
from tools.pages import Page, main

STEPS, PLANNING, DECODING = "step_costs", "planning", "decoding"

MOST = 1.3
"""Ratio of step times above which a technique needs a reason below."""

EXPLANATIONS: Mapping[str, str] = {
    "attn_sink": "attention consists of two products and a softmax in separate kernels: its scores, "
    "rows x heads x T x T numbers per layer, go through memory",
    "dc_mha": "the float32 scores of all heads are composed twice, and the gradients of its weights are sums over keys, "
    "over queries and over heads: separate kernels, each of which passes over rows x heads x T x T numbers",
    "forgetting_attn": "scores go through memory, as with `attn_sink`, and sums of the gates are added to them",
    "gated_delta": "float32 chunks of 64 x 64 and memories of 64 x 64 per head, in separate kernels",
    "hyper_connections": "four lanes of the stream are read and written around each sublayer",
    "iha": "attention over 2 T positions has 4 times the scores, and their products run below the predicted rate; a "
    "window of half the length, as in slowrun, would halve them",
    "prefix_kv": "scores go through memory, as with `attn_sink`",
    "shampoo": "every tenth step takes 20 Newton iterations per root, with products in float32; the prediction assumes "
    "bfloat16's rate",
    "soap": "every tenth step takes 0.3 s more for QR decompositions in float32, which are not matrix products and so "
    "not counted",
    "soap_muon": "QR decompositions, as with `soap`",
}
"""Technique -> the reason why its step time exceeds MOST; shown if it does."""

WITHOUT: Mapping[str, tuple[str, ...]] = {
    "it changes nothing at its defaults; its effect depends on the options that you choose": (
        *("freeze", "role_lr"),
    ),
    "it observes or slows a run, or ends it, and does not change how a step trains": (
        *("early_stop", "tensorboard", "throttle", "trackio", "wandb"),
    ),
    "a kernel: results are the same up to rounding; docs/experiments.md has speeds": (
        *("cute", "fp8_head", "fp8_mlp", "fused_relu2", "fused_swiglu", "metal", "triton"),
    ),
    "it changes the speed and not the loss: it computes the same with less work if few positions or rows are read": (
        *("sparse_loss", "sparse_rows"),
    ),
    "its effect depends on the reference model that it reads, and on how that was trained": (
        *("distill", "jest", "rho1"),
    ),
    "it needs text from several domains or sources, and the text used for cards has only one": (
        *("domain_tokens", "source_weights"),
    ),
    "it is newer than the last measurements on a GPU": (*(one.plugin for one in AWAITED),),
    "it is for infilling, and costs some held-out loss of plain text": ("fim",),
    "it is for models that are already trained: for tuning them, or for computing as a published model does": (
        *("llama3_rope", "lora", "qkv_bias", "sft", "yarn_rope"),
    ),
}
"""Reason -> the first-party plugins that have no card for it; the others are in benchmarks/card_table.py."""

WIDE = 1.1
"""Ratio of the ends of a speed's 95 % interval above which it says little of equal seconds."""

HEAD = (
    "technique",
    "step time",
    "95 %",
    "FLOPs",
    "bytes, fused",
    "bytes, apart",
    "predicted",
    "why",
)

Document = Mapping[str, Any]


def tables(folder: Path = RESULTS, explanations: Mapping[str, str] = EXPLANATIONS) -> str:
    """Generate Markdown: the steps' costs, and the cost of planning.

    Raises:
        SystemExit: a technique above MOST has no explanation.
    """
    steps = folder / f"{STEPS}.json"
    parts = ["No step times have been measured yet."]
    if steps.exists():
        parts = list(costs(json.loads(steps.read_text())["figures"], explanations))
    return "\n".join([*parts, "", *planning(json.loads((folder / f"{PLANNING}.json").read_text()))])


def costs(figures: Document, explanations: Mapping[str, str]) -> Iterator[str]:
    """Tabulate costs by company, and describe what each run was measured on."""
    techniques = figures["techniques"]
    missing = [
        row["technique"]
        for row in techniques
        if row["step_time"]["ratio"] > MOST and row["technique"] not in explanations
    ]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)}: more than {MOST} x the step time of the baseline, and no reason in "
            "EXPLANATIONS of benchmarks/costs_page.py: add the reason there, or make the step faster"
        )
    companies = dict.fromkeys(tuple(row["company"]) for row in techniques)
    for company in companies:
        rows = [_line(row, explanations) for row in techniques if tuple(row["company"]) == company]
        beside = ", ".join(f"`{name}`" for name in company)
        yield f"Beside {beside}:" if company else "Beside the plain model:"
        yield ""
        yield table(HEAD, rows, text=(0, -1))
        yield ""
        for index, without in _companies(techniques, company).items():
            yield f"- The baseline's step{_run(index, figures['measured'], ' in run')}: {_step(without)}."
        yield ""
    for index, measured in enumerate(figures["measured"]):
        yield f"- Measured{_run(index, figures['measured'], ' in run')} with {_measured(measured)}"
    for name, why in figures["left_out"].items():
        yield f"- `{name}` has no figure: {why}"


def planning(document: Document) -> Iterator[str]:
    """Describe the cost of planning."""
    figures = document["figures"]
    parts = figures["parts_median_seconds"]
    of = ", ".join(f"{name} {parts[name]:.3f}" for name in ("settings", "plugins", "hooks", "hash"))
    inside, whole, command = (
        tuple(one["median"] for one in figures[name].values())
        for name in ("planning", "process", "minillm_plan")
    )
    every = figures["planning"]["planning_seconds"]["all"]
    yield (
        f"Planning a run with {figures['plugins']} plugins takes **{inside[0]:.2f} s** (median of "
        f"{figures['repeats']} fresh processes, {min(every):.2f} to {max(every):.2f}; {of}), and "
        f"{inside[1]:.2f} s of CPU time. With the start of Python and the imports of pydantic, NumPy and minillm "
        f"it takes {whole[0]:.2f} s ({whole[1]:.2f} s of CPU time); the command `minillm plan`, "
        f"which also prints tables, takes {command[0]:.2f} s ({command[1]:.2f}). Planning does not import "
        f"{', '.join(figures['looked_for'])}. Measured by `python -m benchmarks.planning` on "
        f"{machine(document)}."
    )
    yield ""


def cards() -> list[Card]:
    """Read the cards of all techniques, in the order of their names."""
    found = []
    for name in sorted(one.plugin for one in TABLE):
        folder = Path(find(name).origin.file).parent / FOLDER
        found.append(read_cards(name, [folder])[0])
    return found


def equal_seconds(shown: Sequence[Card]) -> str:
    """Tabulate the cards without an effect at equal seconds, each with its reason."""
    lacking = [card for card in shown if card.equal_seconds is None]
    rows = [
        (
            f"`{card.plugin}`",
            f"{card.effect:+.3f}",
            f"{1 / card.cost.speed.effect:.3f}" if card.cost.speed else "",
            _reason(card),
        )
        for card in lacking
    ]
    head = ("technique", "loss, equal tokens", "time, equal tokens", "why not at equal seconds")
    said = (
        f"{len(shown) - len(lacking)} of {len(shown)} cards have an effect at equal seconds: if the technique changes "
        "the time of a step, the baseline is trained for the number of steps that it makes in the technique's time. "
        f"The other {len(lacking)} cards have an effect at equal tokens only:"
    )
    return "\n\n".join((said, table(head, rows, text=(0, -1)))) if lacking else said


def _reason(card: Card) -> str:
    """Say why a card has no effect at equal seconds."""
    speed = card.cost.speed
    if speed and speed.high / speed.low > WIDE:
        return (
            "other sets compiled on the same cores while it trained, so its time is only known to lie between "
            f"{1 / speed.high:.2f} and {1 / speed.low:.2f}: too imprecise to choose a number of steps for the baseline"
        )
    if card.company != REFERENCE:
        company = ", ".join(f"`{name}`" for name in card.company) or "the plain model"
        reference = ", ".join(f"`{name}`" for name in REFERENCE)
        return f"its baseline is {company}, and only the baseline {reference} was also trained for other lengths"
    return "a measurement trains the baseline for that length last, and this one ended before"


def without_card() -> str:
    """Tabulate the plugins without a card, by reason."""
    rows = [
        (", ".join(f"`{name}`" for name in sorted(names)), why)
        for why, names in WITHOUT.items()
        if names
    ]
    return table(("no card", "why"), rows, text=(0, 1))


def decoding(document: Document) -> str:
    """Tabulate decoding with a cache beside recomputing, and say where it was measured."""
    rows, other = [], []
    figures = document["figures"]
    for row in figures["rows"]:
        name = row["plugin"]
        rows.append(
            (
                name if name == "plain" else f"`{name}`",
                f"{1000 * row['cached_seconds'] / row['tokens']:.1f}",
                f"{1000 * row['again_seconds'] / row['tokens']:.1f}",
                f"{row['faster']:.1f}",
                f"{row['cache_bytes']:,}",
                f"{row['largest_difference']:.0e}",
            )
        )
        if at := row.get("measured"):
            other.append(
                f"`{name}` was measured beside {at['beside']}, {at['date'][:10]}, commit {at['commit'][:7]}"
            )
    head = (
        *("model", "cached, ms a token", "again, ms a token", "faster"),
        *("bytes a token and layer", "logits apart"),
    )
    tokens = unique(f"{row['tokens']:,}" for row in figures["rows"])
    larger = "" if figures.get("model", SMALLEST) == SMALLEST else f" --model {figures['model']}"
    said = (
        f"`python -m benchmarks.decoding{larger}`, {tokens} tokens, {figures['backend']}: "
        f"{machine(document)}; {document['environment']['date'][:10]}."
    )
    missing = {*PLUGINS} - {"", *(row["plugin"] for row in figures["rows"])}
    if missing and not larger:
        other.append(f"Not measured yet: {', '.join(f'`{name}`' for name in sorted(missing))}")
    return "\n\n".join((table(head, rows), " ".join((said, *(f"{one}." for one in other)))))


def _line(row: Document, explanations: Mapping[str, str]) -> tuple[str, ...]:
    time, bytes_, at = row["step_time"], row["bytes_ratio"], row["predicted_ratio"]
    name = row["technique"]
    return (
        f"`{name}`",
        f"{time['ratio']:.3f}",
        f"{time['low']:.3f} to {time['high']:.3f}",
        f"{row['flops_ratio']:.3f}",
        f"{bytes_['fused']:.3f}",
        f"{bytes_['apart']:.3f}",
        f"{min(at.values()):.2f} to {max(at.values()):.2f}" if at else "",
        explanations[name] if time["ratio"] > MOST else "",
    )


def _companies(techniques: Sequence[Document], company: tuple[str, ...]) -> dict[int, Document]:
    """Map each run to the step time without the technique."""
    rows = sorted(techniques, key=lambda row: row["measured"])
    return {row["measured"]: row["without"] for row in rows if tuple(row["company"]) == company}


def _run(index: int, runs: Sequence[Document], words: str) -> str:
    """Name the run, if there are several."""
    return "" if len(runs) == 1 else f"{words} {index + 1}"


def _step(one: Document) -> str:
    """Format a step's time, and the arithmetic in the denominators."""
    flops, fused, apart = (
        sum(one[key].values()) for key in ("flops", "least_bytes", "apart_bytes")
    )
    at = one["predicted_seconds"]
    told = f" ({1000 * at['fused']:.1f} to {1000 * at['apart']:.1f} ms predicted)" if at else ""
    return (
        f"{1000 * one['step_seconds']:.1f} ms{told}, {flops / 1e12:.2f} TFLOP, {fused / 1e9:.1f} GB "
        f"fused, {apart / 1e9:.1f} GB apart"
    )


def _measured(one: Document) -> str:
    model, versions = one["model"], one["versions"]
    framework = ", ".join(f"{name} {versions[name]}" for name in _frameworks(versions))
    return (
        f"{one['seeds']} seeds of {one['steps']:,} steps: {model['dim']} wide, {model['layers']} "
        f"layers, {model['vocab']:,} tokens, {one['rows'] * one['accumulate']} x {one['seq_len']} "
        f"a step, {one['dtype']}; {one['device']}; Python {versions['python']}, {framework}; "
        f"{one['date']}, commit {(one['commit'] or 'unknown')[:7]}"
    )


def _frameworks(versions: Mapping[str, str | None]) -> Sequence[str]:
    return [name for name in ("torch", "mlx") if versions.get(name)]


def _decoding(name: str) -> str:
    return decoding(json.loads((RESULTS / f"{name}.json").read_text()))


PARTS = {
    "measured": tables,
    "equal_seconds": lambda: equal_seconds(cards()),
    "without_card": without_card,
    "decoding": partial(_decoding, DECODING),
    "decoding_124m": partial(_decoding, f"{DECODING}_124m"),
}
"""Part of the page -> the function that generates it."""

PAGE = Page(ROOT / "docs" / "costs.md", PARTS, others=True)

if __name__ == "__main__":
    main(__doc__, PAGE)
