"""Generator of the tables of docs/reliability.md, from the files in results/.

python -m benchmarks.reliability_page             # check that the page is up to date
python -m benchmarks.reliability_page --write     # write it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, ROOT
from benchmarks.faults import PLACES
from benchmarks.page import table
from benchmarks.provenance import machine
from tools.pages import Page, main

TRIALS = (
    "kills",
    "rank_kills",
    "rank_kills_weights",
    "plugins_killed",
    "kernels_killed",
    "corruptions",
    "pairs",
    "headers",
    "full_disk",
    "faults",
)
HOSTILE, COST = "hostile", "checkpoint_cost"
HEAD = ("trial", "tried", "detected", "bit-equal", "failed")
COST_HEAD = ("way", "MB", "stall, ms", "% of 1,000 steps", "saved, s", "loaded, s")

FAULTS = {
    "exception": "Exception",
    "interrupt": "KeyboardInterrupt",
    "exit": "SystemExit(0)",
    "wrong type": "wrong type",
    "mutated": "changes its arguments",
    "non-finite": "NaN, inf",
    "hang": "hang",
    "signal": "hang, Ctrl-C",
}
"""Kind of fault -> its column heading."""

NAMED = ("plugin", "version", "hook", "step")

Document = Mapping[str, Any]


def tables(folder: Path = RESULTS) -> str:
    """Generate Markdown: the trials with environment and command, and, once measured, the cost."""
    names = [*TRIALS, *([HOSTILE] if (folder / f"{HOSTILE}.json").exists() else [])]
    documents = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    rows = [line for document in documents.values() for line in trials(document)]
    parts = [table(HEAD, rows), "", unnoticed(documents["corruptions"]), ""]
    parts += [made_by(one) for one in documents.values()]
    parts += ["", plugins(documents["plugins_killed"], "a plugin, killed")]
    parts += ["", plugins(documents["kernels_killed"], "a set of kernels, killed"), "", CELLS]
    parts += ["", *faults(documents["faults"])]
    cost = folder / f"{COST}.json"
    if cost.exists():
        parts += ["", *costs(json.loads(cost.read_text()))]
    return "\n".join(parts) + "\n"


def trials(document: Document) -> Iterator[tuple[str, ...]]:
    """Return a line for each row of a result."""
    for row in document["figures"]["rows"]:
        ended = f"{row['bit_equal']:,} of {row['ended']:,}" if row["ended"] else ""
        yield (
            row["what"],
            f"{row['tried']:,}",
            f"{row['detected']:,}",
            ended,
            f"{len(row['failed']):,}",
        )


def unnoticed(document: Document) -> str:
    """Count the damaged checkpoints that load without digest checks."""
    rows = document["figures"]["rows"]
    loaded = sum(row["facts"]["load unnoticed without digests"] for row in rows)
    tried = sum(row["tried"] for row in rows)
    return (
        f"Of the {tried:,} damaged checkpoints, {loaded:,} load without an error if only the formats "
        "(safetensors, JSON) are checked and no digest is compared."
    )


def made_by(document: Document) -> str:
    """Return the command, its seed, and its environment."""
    script, *arguments = document["command"]
    given = [argument for argument in arguments if argument != "--inside"]
    for own in {"--json", "--commit"} & set(given):
        place = given.index(own)
        del given[place : place + 2]
    figures = document["figures"]
    seed = "" if "--seed" in given else f" --seed {figures['seed']}"
    command = " ".join(["python -m benchmarks." + script.removesuffix(".py"), *given]) + seed
    return f"- `{command}`: {figures['seconds']:,.0f} s on {machine(document)}"


CELLS = (
    "Each cell shows how many trials ended bit-equal, and the earliest step, of 24, from which one "
    "of them resumed. Each run was killed after it had saved a checkpoint. A plugin runs together with "
    "the plugins that it builds on."
)


def plugins(document: Document, what: str) -> str:
    """Tabulate kills with each plugin or set of them: a line for each, a column per backend."""
    figures = document["figures"]
    backends = list(dict.fromkeys(name for cell in figures["plugins"].values() for name in cell))
    rows = []
    for plugin, cell in figures["plugins"].items():
        tried = [one for backend in backends for one in cell.get(backend, ())]
        options = dict.fromkeys(f"`{one['options']}`" for one in tried if one["options"])
        rows.append((f"`{plugin}`", *(_equal(cell.get(name, ())) for name in backends)))
        rows[-1] += (", ".join(sorted(options)),)
    rows += [(f"`{name}`", *[""] * len(backends), why) for name, why in figures["left_out"].items()]
    return table((what, *backends, "options tried, or why not tried"), sorted(rows), text=(0, -1))


def _equal(trials: Sequence[Document]) -> str:
    equal = sum(one["equal"] for one in trials)
    return f"{equal} of {len(trials)} · {min(one['resumed_from'] for one in trials)}"


def faults(document: Document) -> Iterator[str]:
    """Tabulate plugin faults: a line per place, a column per kind."""
    figures = document["figures"]
    held = {(cell["place"], cell["kind"]): cell for cell in figures["cells"]}
    head = ("fault in a plugin's", *FAULTS.values())
    rows = [
        (f"`{place}`", *(_cell(held.get((place, kind))) for kind in FAULTS)) for place in PLACES
    ]
    yield table(head, rows, text=range(len(head)))
    yield ""
    yield (
        "Each cell shows the exit code; what the message names (*p* plugin, *v* version, *h* hook or "
        "function, *s* step); and the step of the newest checkpoint, if all checkpoints verify. "
        "`harmless` means that the fault has no effect. Each run has a checkpoint of step 8 and continues to "
        f"step 28. A hang lasts {figures['hang']:.0f} s and is reported while it lasts. After each fault, a run with "
        "the corrected plugin resumed from that checkpoint and reached step 28. Except after exit 5, "
        "it ended bit-equal to a run without the fault."
    )


def _cell(cell: Document | None) -> str:
    if cell is None:
        return ""
    named = "".join(name[0] for name in NAMED if cell[name])
    mended = cell["mended"] == 0 and cell["equal"]
    parts = [str(cell["code"]), named or "harmless", str(cell["kept"])]
    return " · ".join([*parts, *(() if mended else ("**not mended**",))])


def costs(document: Document) -> Iterator[str]:
    """Tabulate the cost of a checkpoint, with its environment."""
    figures = document["figures"]
    rows = [
        (
            f"`{name}`" if name != "minillm" else name,
            f"{one['bytes'] / 1e6:,.0f}",
            f"{1000 * one['median']['stall_seconds']:,.1f}",
            f"{one['stall_percent_every_1000_steps']:.3f}",
            f"{one['median']['save_seconds']:.2f}",
            f"{one['median']['load_seconds']:.2f}",
        )
        for name, one in figures["savers"].items()
    ]
    yield table(COST_HEAD, rows)
    yield ""
    yield (
        f"Preset `{figures['preset']}`, {figures['parameters']:,} parameters, "
        f"{figures['step_seconds']:.3f} s a step; medians, on {machine(document)}."
    )


PAGE = Page(ROOT / "docs" / "reliability.md", {"measured": tables}, others=True)

if __name__ == "__main__":
    main(__doc__, PAGE)
