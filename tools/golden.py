"""Golden records of planning: plans and errors of one commit, compared with those of later commits.

python -m tools.golden                       # compare this checkout with tests/golden
python -m tools.golden --show "--preset tiny"     # the documents of one case, to diff two checkouts
python tools/golden.py --write DIR           # write the records with the minillm_core on PYTHONPATH

A record holds the exit codes of ``plan`` and ``plugins why '*'`` and digests of their documents:
the plan without versions and code digests, which change with every release; the plugins with their
evidence; the export; every report of the slot table, with only the owners of kernels, since the
reasons depend on the framework's version. For a preset the settings themselves are stored. Intended
differences are listed in tests/golden/changes.json with their reasons; a record is never rewritten
for them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from minillm_core.cli.main import main as program
from minillm_core.plan.slots import CORE, LAYER, NOTHING

__all__ = ["CASES", "FOLDER", "compared", "documents", "recorded"]

FOLDER = Path(__file__).parents[1] / "tests" / "golden"

MACHINE = "--backend torch --device cpu"
PRESETS = ("tiny", "small", "gpt2-124m", "350m", "1b", "speedrun")
PLUGINS = (
    *("attn_scale", "backout", "bigram_hash", "cautious_wd", "embed_norm", "embed_skip"),
    *("half_rope", "liger", "moe", "mtp", "muon", "normuon", "paired_heads", "polar_express"),
    *("qk_norm", "relu2", "residual_decay", "role_lr role_lr.embedding=2.0", "smear", "softcap"),
    *("sparse_gate", "unet_skip", "value_embeds", "windows", "xsa", "zero_init"),
)
"""Plugins recorded one by one; without trackers, whose packages may not be installed."""

SETS = (
    *("moe moe.chosen=2 moe.layers=all", "bigram_hash bigram_hash.signs=64"),
    *("muon,normuon", "muon,polar_express", "muon,cautious_wd", "muon,normuon,polar_express"),
    *("paired_heads,value_embeds", "qk_norm,attn_scale,half_rope", "windows,mtp,softcap"),
    *("unet_skip,value_embeds,bigram_hash", "muon,relu2,qk_norm,smear,sparse_gate,backout"),
    *("moe,relu2", "paired_heads,xsa", "moe,relu2 relu2.layers=[0] moe.layers=[1]"),
    *("normuon,polar_express", "nosuchplugin", "muon muon.nosuchoption=1"),
)
RIVALS = (
    *("Rearranged,paired_heads", "First", "Hollow,qk_norm", "Hollow,qk_norm qk_norm.layers=[1]"),
    *("Reader", "Halves,muon", "Hollow"),
)
"""Classes of tests/golden/rivals.py, one per plan: a plugin loaded from a file is named after the file."""


def _rivals(line: str) -> str:
    names, _, settings = line.partition(" ")
    full = (f"rivals.py:{one}" if one[0].isupper() else one for one in names.split(","))
    return f"{','.join(full)} {settings}"


CASES: tuple[str, ...] = (
    *(f"--preset {preset}" for preset in PRESETS),
    "--preset tiny model.layers=6 model.tied=true train.seq_len=64",
    "--preset tiny --plugins muon,qk_norm train.lr=0.01 train.schedule=wsd",
    *(
        f"--preset tiny --plugins {line}".strip()
        for line in chain(PLUGINS, SETS, map(_rivals, RIVALS))
    ),
)


def documents(case: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Plan a case in this process, in tests/golden.

    Args:
        case: flags and command-line settings.

    Returns:
        The exit codes; and the documents in canonical form, without machine-dependent values.
    """
    words = [*shlex.split(case), *MACHINE.split(), "--json"]
    codes, found = {}, {}
    for name, command in (("plan", ["plan"]), ("why", ["plugins", "why", "*"])):
        codes[name], text = _run([*command, *words])
        if text:
            found |= _plan(json.loads(text)) if name == "plan" else _why(json.loads(text))
    return codes, found


def _run(words: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with (
        contextlib.chdir(FOLDER),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return program(words), out.getvalue()


def _plan(document: dict[str, Any]) -> dict[str, Any]:
    plan = document["plan"]
    if _digest(plan) != document["plan_hash"]:
        raise ValueError("the plan's hash is not that of its data")
    for key in ("versions", "digests"):  # keep names, drop their values
        plan[key] = sorted(plan.get(key, ()))
    for plugin in document["plugins"]:
        del plugin["version"], plugin["digest"]
    settings = {key: value for key, value in _leaves(document["settings"]) if value is not None}
    return {
        "plan": plan,
        "plugins": document["plugins"],
        "export": document["export"],
        "settings": settings,
    }


def _leaves(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten settings to setting -> value, without origins."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and {*value} == {"value", "origin"}:
            yield path + key, value["value"]
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")


def _why(document: dict[str, Any]) -> dict[str, Any]:
    reports = document["answers"]
    kernels = {
        one["slot"]: [held["owner"] for held in one["held"]]
        for one in reports
        if one["kind"] == "query"
    }
    slots = [one for one in reports if one["kind"] != "query"]
    return {"slots": slots, "kernels": kernels, "refused": document["plan_refused"]}


def recorded(
    case: str,
    words: Mapping[str, str] | None = None,
    added: Collection[str] = (),
    without: str = "",
    layouts: Collection[str] = (),
) -> dict[str, Any]:
    """Return the record of a case: exit codes, a digest of each document, and a preset's settings.

    Args:
        case: flags and settings.
        words: texts whose wording changed since the record -> the recorded wording.
        added: slots that did not exist in the record, * for a layer; a slot filled by a plugin
            is kept.
        without: flags that remove plugins that a recipe did not yet include.
        layouts: export layouts that did not exist in the record.
    """
    codes, found = documents(f"{case} {without}")
    settings = found.pop("settings", None)
    if "slots" in found:
        found["slots"] = [
            one
            for one in found["slots"]
            if LAYER.sub("*", one["slot"]) not in added
            or any(held["owner"] != CORE and held["what"] != NOTHING for held in one["held"])
        ]
    if "kernels" in found:
        held = found["kernels"].items()
        found["kernels"] = {
            slot: owners for slot, owners in held if slot not in added or owners != ["core"]
        }
    if "export" in found and found["export"]["layout"] in layouts:
        found["export"]["layout"] = None
    for plugin in found.get("plugins", ()):
        plugin["expected"].sort()
    for now, then in (words or {}).items():
        found = json.loads(json.dumps(found).replace(json.dumps(now)[1:-1], json.dumps(then)[1:-1]))
    record: dict[str, Any] = {"exit": codes}
    record |= {name: _digest(part)[:16] for name, part in found.items()}
    if settings and case.removeprefix("--preset ") in PRESETS:
        record["settings"] = settings
    return record


def _digest(data: Any) -> str:
    """Hash canonical JSON with sha256, as for a plan's hash."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def compared(case: str) -> dict[str, tuple[Any, Any]]:
    """Return the unexpected differences of a case's record: name -> (golden, now)."""
    golden = json.loads((FOLDER / "plans.json").read_text())["cases"][case]
    changes = json.loads((FOLDER / "changes.json").read_text())
    words = {one["now"]: one["then"] for one in changes["words"]}
    less = changes["recipes"].get(case, {}).get("without", "")
    now = recorded(case, words, changes["slots"], less, changes["layouts"])
    meant = {part for one in changes["cases"] if one["case"] == case for part in one["parts"]}
    for record in (golden, now):
        for name in changes["settings"]:
            record.get("settings", {}).pop(name, None)
    return {
        name: (golden.get(name), now.get(name))
        for name in {**golden, **now}
        if name not in meant and golden.get(name) != now.get(name)
    }


def write(folder: Path, commit: str) -> None:
    """Write every record, and the full documents of the smallest preset."""
    cases = {case: recorded(case) for case in CASES}
    text = ",\n".join(f"{json.dumps(case)}: {json.dumps(one)}" for case, one in cases.items())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans.json").write_text(f'{{"commit": "{commit}", "cases": {{\n{text}\n}}}}\n')
    _, found = documents("--preset tiny")
    (folder / "tiny.json").write_text(json.dumps(found["plan"], indent=1) + "\n")


def main() -> int:
    """Run the command line: compare, show or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="DIR", help="make the records there")
    parser.add_argument("--commit", default="", help="whose records they are")
    parser.add_argument("--show", metavar="CASE", help="print the documents of a case")
    given = parser.parse_args()
    if given.write:
        write(given.write, given.commit)
        return 0
    if given.show:
        print(json.dumps(documents(given.show), indent=1))
        return 0
    different = {case: found for case in CASES if (found := compared(case))}
    for case, found in different.items():
        print(f"{case}: {found}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
