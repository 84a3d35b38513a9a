"""The documents of a run: run.json, and run.toml, whose settings repeat it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minillm_core.config.presets import plugins_of
from minillm_core.config.schema import Config
from minillm_core.text import plain, quoted
from minillm_core.train.budget import Position
from minillm_core.train.events import Evaluated
from minillm_core.train.evidence import Evidence
from minillm_core.train.initial import BRANCHED_FROM, Branch, Initial
from minillm_core.train.job import Job
from minillm_core.train.record import hardware, versions
from minillm_core.train.restore import described
from minillm_core.train.run_folder import RunFolder
from minillm_core.train.settings import settings

MOMENTS = ("command", "started", "ended", "seconds", "git")
"""Entries of run.json that describe one process of the run; ``resumed`` has those of earlier ones."""


def document(
    job: Job, earlier: RunFolder | None, position: Position, tokenizer: str | None
) -> dict[str, Any]:
    """Build run.json at the start of one process of the run.

    Args:
        job: the run.
        earlier: the run folder as the process before left it.
        position: where this process begins.
        tokenizer: sha256 of the run's tokenizer.json; None: it is trained on ids.
    """
    binding = job.trainer.binding
    distributions = [one.distribution for one in job.plugins if one.distribution]
    return {
        "command": list(job.loaded.command) or None,
        "started": job.started.isoformat(timespec="seconds"),
        "ended": None,
        "seconds": None,
        "git": git(Path()),
        "config": settings(job.loaded),
        "plan": job.plan.data(),
        "plan_hash": job.plan.hash,
        "binding": asdict(binding),
        "ranks": job.ranks.size,
        "shard": "updates" if job.ranks.shard else "off",
        "plugins": [one.data() | {"evidence": None} for one in job.plugins],
        "versions": versions(binding.backend, distributions),
        "hardware": hardware(binding.device_name),
        "seed": job.config.seed,
        "data": {"fingerprint": job.corpus.fingerprint, "description": job.corpus.description},
        "tokenizer": {"sha256": tokenizer} if tokenizer else None,
        "references": described(job.plan),
        "resumed": _resumes(earlier, position),
        "initial": _inherited("initial", job.initial, earlier or job.branch),
        BRANCHED_FROM: _inherited(BRANCHED_FROM, job.branch, earlier),
    }


def plugin_records(job: Job, evidence: Evidence) -> list[dict[str, Any]]:
    """List the plugins, with the evidence that they took part."""
    shown = evidence.records()
    return [one.data() | {"evidence": shown.get(one.name)} for one in job.plugins]


def _inherited(
    key: str, source: Initial | Branch | None, earlier: RunFolder | None
) -> dict[str, Any] | None:
    """Describe the origin of the initial weights, in whichever process of the run; None: new ones."""
    if source is not None:
        return source.data()
    return (dict(earlier.part(key)) or None) if earlier else None


def _resumes(earlier: RunFolder | None, position: Position) -> list[dict[str, Any]]:
    """List each resume of the run: its step, and the record of the process before it."""
    if earlier is None:
        return []
    return [
        *(earlier.record.get("resumed") or ()),
        {
            "step": position.step,
            "exit_before": earlier.record.get("exit"),
            "versions_before": earlier.record.get("versions"),
            "hardware_before": earlier.record.get("hardware"),
            **{f"{name}_before": earlier.record.get(name) for name in MOMENTS},
        },
    ]


def ended(job: Job, last: Evaluated | None = None) -> dict[str, Any]:
    """Return the entries of run.json that are known once a process of the run ends."""
    now = datetime.now(UTC)
    seconds = (now - job.started).total_seconds()
    found: dict[str, Any] = {
        "ended": now.isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }
    if last is not None and last.verdicts:
        found["verdicts"] = dict(last.verdicts)
    if last is not None and last.stop:
        found["stopped"] = f"after step {last.step:,} by {last.stop}"
    return found


def git(folder: Path) -> dict[str, Any] | None:
    """Find a folder's Git commit, and whether files changed since; None outside a repository.

    No hook and no file-system monitor of the repository runs.
    """
    quiet = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")

    def ask(*words: str) -> str | None:
        command = ["git", *quiet, "-C", str(folder), *words]
        try:
            found = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            )
        except (OSError, ValueError, subprocess.SubprocessError):  # no git, no repository, too slow
            return None
        return found.stdout.strip()

    commit = ask("rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changed = ask("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def settings_file(config: Config, remarks: Iterable[str]) -> str:
    """Format all settings as TOML for ``-c``; settings without a value are left out.

    Args:
        config: the settings.
        remarks: lines of comment for the top.
    """
    settings = config.model_dump(mode="json")
    plugins = settings.pop("plugins")
    lines = [f"# {line}" for line in remarks]
    tables = {name: table for name, table in settings.items() if isinstance(table, dict)}
    top = {name: value for name, value in settings.items() if name not in tables}
    lines += ["", *_pairs(top)]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_pairs(table)]
    if absent := sorted(set(plugins_of(config.preset)) - set(plugins)):
        lines += [
            "",
            "[plugins]  # the preset names these",
            *(f"{name} = false" for name in absent),
        ]
    for name, options in plugins.items():
        lines += ["", f"[plugins.{name}]", *_pairs(options)]
    return "\n".join(lines) + "\n"


def remarks(job: Job, earlier: RunFolder | None) -> Iterator[str]:
    """Yield how to repeat the run, and its versions and hardware."""
    files = [one for one in job.plugins if one.distribution is None]
    specs = ",".join(str(Path(one.origin.source).absolute()) for one in files)
    branched = _inherited(BRANCHED_FROM, job.branch, earlier)
    words = ["minillm", "train", "-c", "run.toml"]
    if branched is not None:
        flag = "--init" if branched.get("weights_only") else "--branch"
        words += [flag, f"{branched['out']}@{branched['step']}"]
    if specs:
        words += ["--plugins", specs]
    yield f"All settings of a run. To repeat it: {plain(quoted(*words), 2000)}"
    if job.loaded.command:
        yield f"command: {plain(quoted(*job.loaded.command), 2000)}"
    held = versions(job.trainer.binding.backend)
    installed = ", ".join(f"{name} {number}" for name, number in held.items() if number)
    yield f"{job.started:%Y-%m-%d %H:%M} UTC; plan {job.plan.hash[:12]}; {installed}"


def _pairs(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_key(name)} = {_toml(value)}" for name, value in table.items() if value is not None)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """Format a JSON value as TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(_pairs(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):  # TOML shares JSON's escapes, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
