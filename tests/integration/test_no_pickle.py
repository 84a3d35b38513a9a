"""Tests that no pickle is ever loaded: the program runs with all loading functions replaced by raising ones.

They are replaced before anything else is imported, so that a library which keeps a reference to a
function has the raising one. There are no exceptions: pickles may be written (``copy`` and
``multiprocessing`` do), but no library used by a run needs to load one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_PICKLE = """
import _pickle, functools, json, pickle, sys, traceback

loaded = []  # where; a library could swallow what is raised

def refuse(*args, **kwargs):
    loaded.append("".join(traceback.format_stack(limit=8)))
    raise RuntimeError("a pickle was to be loaded")

class Unpickler:
    __new__ = refuse  # subclasses too, whatever their __init__ does
    load = refuse  # dill, which torch imports where it is installed, copies its docstring

for module in (pickle, _pickle):
    for name in ("load", "loads", "_load", "_loads"):
        setattr(module, name, refuse)
    module.Unpickler = module._Unpickler = Unpickler

import numpy as np

def without_pickle(read):
    @functools.wraps(read)
    def checked(*args, allow_pickle=False, **kwargs):
        return refuse() if allow_pickle else read(*args, allow_pickle=False, **kwargs)
    return checked

np.load = without_pickle(np.load)
np.lib.format.read_array = without_pickle(np.lib.format.read_array)

import torch

torch.load = torch.serialization.load = torch.jit.load = refuse
"""

RUN = """
from minillm_core.cli.main import main

codes = [main(command) for command in json.loads(sys.argv[1])]
print(*loaded, sep="\\n", file=sys.stderr)
sys.exit(bool(any(codes) or loaded))
"""

PLANT = """
import io, os
from pathlib import Path

folder = Path(sys.argv[1])
raw = pickle.dumps({"a": [1]})
(folder / "p").write_bytes(raw)
torch.save({"w": torch.ones(2)}, folder / "t.pt")
np.save(folder / "o.npy", np.array([{}], object), allow_pickle=True)

class Mine(pickle._Unpickler):
    def __init__(self, file):
        pass

ways = [
    lambda: pickle.loads(raw),
    lambda: _pickle.loads(raw),
    lambda: pickle.load((folder / "p").open("rb")),
    lambda: pickle.Unpickler(io.BytesIO(raw)).load(),
    lambda: _pickle.Unpickler(io.BytesIO(raw)).load(),
    lambda: Mine(io.BytesIO(raw)),
    lambda: torch.load(folder / "t.pt"),
    lambda: torch.load(folder / "t.pt", weights_only=True),
    lambda: np.load(folder / "o.npy", allow_pickle=True),
]
for way in ways:
    try:
        way()
    except RuntimeError as error:
        assert str(error) == "a pickle was to be loaded"
assert len(loaded) == len(ways)
"""

BACKENDS = ("torch", "mlx")
MODEL = (
    *("model.vocab=300", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2"),
    "model.hidden=32",
)
FEW = (
    "train.rows=2",
    "train.seq_len=16",
    "eval.tokens=100",
    "eval.samples=0",
    "eval.every=2",
    "checkpoint.every=2",
)


def without_pickle(script: str, argument: str) -> None:
    command = [sys.executable, "-c", WITHOUT_PICKLE + script, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_every_command_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night; the räin fell.\n" * 100, "utf-8")
    commands = [one for backend in BACKENDS for one in commands_of(backend, tmp_path, str(text))]
    without_pickle(RUN, json.dumps(commands))
    for backend in BACKENDS:
        assert (tmp_path / backend / "checkpoints" / "step-00000005").is_dir()
        assert (tmp_path / f"{backend}-2" / "checkpoints" / "step-00000002").is_dir()


def commands_of(backend: str, folder: Path, text: str) -> list[list[str]]:
    """List every command that reads or writes a model, in command-line form."""
    out, model = str(folder / backend), str(folder / f"{backend}-model")
    here = ["--backend", backend, "--device", "cpu"]
    start = ["train", "--preset", "tiny", "--data", text, *here]
    return [
        [*start, "--out", out, "--steps", "3", "--plugins", "muon", *MODEL, *FEW],
        ["train", "--resume", "--out", out, "--steps", "5"],
        ["eval", out, "--data", text, *here],
        ["generate", out, "It was", "--max-tokens", "3", "--seed", "0", *here],
        ["export", out, "--to", model],
        [*start, "--out", f"{out}-2", "--steps", "2", "--init", model, *FEW],
    ]


@pytest.mark.slow
def test_each_way_is_taken_away(tmp_path: Path) -> None:
    without_pickle(PLANT, str(tmp_path))
