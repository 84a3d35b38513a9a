r"""Technique cards: the measured effect of each first-party technique, from paired seeds, on several GPUs.

Measure, on the machine with the GPUs (after a time limit, the same command continues):

    python -m benchmarks.cards --train english_train.jsonl.xz --val english_val.jsonl.xz \
        --tokenizer bpe50k.json --out OUT --gpus 4 --steps 550 --minutes 9.3 --commit HASH

Then, from a checkout anywhere:

    python -m benchmarks.cards --collect OUT

writes ``cards/NAME.json`` beside the module of each plugin that has its five pairs, and keeps the
runs in ``benchmarks/results/cards``. benchmarks/card_table.py defines techniques and company.
The techniques are divided among the GPUs; each GPU trains the reference's seeds for its own. Each plugin
set has one process: --ahead of them compile concurrently, then train one at a time, in the order of the table, so
that timed runs are not disturbed; then the next ones. A process draws its next run's initial values
while another trains. Each finished run is a file; OUT/gpuN/ablation.json and
ablation.html are updated after every run. The reference's runs at equal seconds are last; time is
reserved for them, unless ``--reserve 0`` leaves them to a later call. A call ends within 20 s of
--minutes.

Duration with 25 techniques on four GPUs: compilation, then about nine sets' five runs with
their evaluations on each. 550 steps of 32,768 tokens at 1.1 M tokens/s take 16.4 s.

Exit codes: 0; 75, out of time, the same command continues; 1, a set failed (its log is beside)
or a technique is not available on this machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.card_job import Share
from benchmarks.card_table import AWAITED, REFERENCE, SHAPE, TABLE, Judged, divided
from benchmarks.card_turns import Turns
from benchmarks.command import parser
from benchmarks.environment import RESULTS, environment, keep, own_command
from minillm_core.checkpoint.lock import lock
from minillm_core.config.folders import cache_folder
from minillm_core.errors import MinillmError
from minillm_core.plugins.manager import find
from minillm_lab.ablation import RESULT
from minillm_lab.card import FOLDER, PAIRS, Cost
from minillm_lab.cards import cards_of, write_card
from minillm_lab.variants import side_by_side

__all__ = ["collect", "main", "measure"]

ENVIRONMENT = "environment.json"
KNOWN = {one.plugin: one for one in (*TABLE, *AWAITED)}


def measure(arguments: argparse.Namespace) -> int:
    """Divide, compile, train; return the exit code."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with lock(out):
        about = {"command": own_command(), **environment(arguments.commit)}
        (out / ENVIRONMENT).write_text(json.dumps(about, indent=1) + "\n")
        wanted = set(arguments.only.split(",")) if arguments.only else KNOWN
        judged = [one for name, one in KNOWN.items() if name in wanted]
        shares = [
            _share(arguments, part, number)
            for number, part in enumerate(divided(judged, arguments.gpus))
        ]
        absent: list[str] = []
        checked = [share for one in shares if (share := _checked(one, absent))]
        turns = Turns(
            [(share, _variants(share)) for share in checked],
            seconds=60 * arguments.minutes,
            patience=arguments.patience,
            ahead=arguments.ahead,
            reserve=arguments.reserve,
            say=_say,
        )
        turns.run()
    missing = {"failed": turns.failed, "no time": turns.skipped, "cannot be had here": absent}
    for why, names in missing.items():
        if names:
            _say(f"{why}: {'; '.join(names)}")
    return 1 if turns.failed or absent else 75 if turns.skipped else 0


def collect(
    results: Path, cards: Path | None, kept: Path, untimed: Collection[str] = ()
) -> Iterator[str]:
    """Write the cards of the measured techniques, and keep the runs.

    Args:
        results: the output folder of :func:`measure`.
        cards: folder for all cards; None: beside the plugins' modules.
        kept: folder for the runs, one file per GPU.
        untimed: techniques whose cards have no speed, since other work disturbed their runs.

    Yields:
        Lines on written and on missing cards.
    """
    about = json.loads((results / ENVIRONMENT).read_bytes())
    command = about.pop("command")
    for path in sorted(results.glob(f"*/{RESULT}")):
        result = json.loads(path.read_bytes())
        found, without = cards_of(result)
        for card in found:
            if card.plugin in untimed:
                card = card.model_copy(update={"cost": Cost(peak_bytes=card.cost.peak_bytes)})
            folder = cards or Path(find(card.plugin).origin.file).parent / FOLDER
            yield f"{write_card(folder, card)}"
        if without:
            yield f"{path.parent.name}: {without}"
        share = path.parent.name
        target = kept / f"{share}.json"
        keep(target, f"cards/{share}", _compact(result), command=command, about=about)
        yield f"{target}"


def _share(arguments: argparse.Namespace, judged: Sequence[Judged], number: int) -> Share:
    return Share(
        folder=str(arguments.out / f"gpu{number}"),
        judged=tuple(judged),
        preset=arguments.preset,
        settings=(
            f"data.paths={json.dumps([arguments.train])}",
            f"data.val={arguments.val}",
            f"data.tokenizer={arguments.tokenizer}",
            *SHAPE,
            *arguments.set,
        ),
        steps=arguments.steps,
        seeds=arguments.seeds,
        device=arguments.device,
        cache=str(arguments.cache or cache_folder()),
        commit=arguments.commit,
    )


def _checked(share: Share, absent: list[str]) -> Share | None:
    """Read the text, and drop and print the techniques that cannot run here."""
    Path(share.folder).mkdir(parents=True, exist_ok=True)
    try:
        share.ready()
    except MinillmError as error:
        if len(share.judged) == 1:
            absent.append(share.judged[0].plugin)
            _say(f"{absent[-1]} is not measured: {error}")
            return None
        alone = [_checked(replace(share, judged=(one,)), absent) for one in share.judged]
        left = tuple(one for part in alone if part for one in part.judged)
        if len(left) == len(share.judged):  # each can run alone, but not all together
            raise
        return replace(share, judged=left) if left else None
    return share


def _variants(share: Share) -> list[str]:
    """Return the names of the plugin sets, the reference first."""
    prepared = share.prepared()
    beside = {one.plugin: one.beside for one in share.judged}
    design = side_by_side(prepared.loaded, prepared.plugins, beside, REFERENCE)
    return [one.name for one in design.variants]


def _compact(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result with only the last point of each run's curve."""
    runs = [
        {key: value for key, value in run.items() if key != "curve"}
        | ({"val_loss": run["curve"][-1]["val_loss"]} if "curve" in run else {})
        for run in result["runs"]
    ]
    return {**result, "runs": runs}


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--collect", type=Path, metavar="OUT", help="write the cards of OUT")
    options.add_argument("--cards", type=Path, help="with --collect: where all cards go instead")
    options.add_argument("--kept", type=Path, default=RESULTS / "cards", help="and the runs")
    options.add_argument(
        "--untimed", default="", help="with --collect: techniques whose speed is left out"
    )
    options.add_argument("--train", help="the text to train on")
    options.add_argument("--val", help="the text to validate on")
    options.add_argument("--tokenizer")
    options.add_argument("--out", type=Path)
    options.add_argument("--gpus", type=int, default=1)
    options.add_argument("--steps", type=int, default=550)
    options.add_argument("--seeds", type=int, default=PAIRS)
    options.add_argument("--minutes", type=float, default=600, help="everything ends after them")
    options.add_argument(
        "--patience", type=float, default=150, help="seconds for the compilation of a wave"
    )
    options.add_argument(
        "--ahead",
        type=int,
        default=8,
        help="processes of a wave on a GPU; each holds some 8 GiB of it",
    )
    options.add_argument(
        "--reserve",
        type=float,
        default=1.5,
        help="sets' time kept for equal seconds; 0: a later call makes them",
    )
    options.add_argument(
        "--only", help="techniques, such as muon,relu2; they are divided anew: another --out"
    )
    options.add_argument("--preset", default="small")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--device", default="cuda")
    options.add_argument("--cache", type=Path)
    options.add_argument("--commit")
    arguments = options.parse_args()
    if arguments.collect:
        for line in collect(
            arguments.collect, arguments.cards, arguments.kept, arguments.untimed.split(",")
        ):
            _say(line)
        return 0
    if not all((arguments.train, arguments.val, arguments.tokenizer, arguments.out)):
        options.error("--train, --val, --tokenizer and --out are needed, or --collect")
    if unknown := {*(arguments.only or "").split(",")} - {*KNOWN, ""}:
        options.error(f"--only: {', '.join(sorted(unknown))}: not in benchmarks/card_table.py")
    return measure(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
