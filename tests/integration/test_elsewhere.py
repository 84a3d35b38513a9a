"""Tests of reading a run without the plugins that only training needed; model plugins are required."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minillm_core.cli.main import main
from minillm_core.plugins.manager import find

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

SETTINGS = {
    **{"model.vocab": 300, "model.dim": 32, "model.heads": 4, "model.kv_heads": 2},
    **{"model.layers": 2, "model.hidden": 48, "train.rows": 2, "train.seq_len": 16},
    **{"eval.tokens": 100, "eval.samples": 0, "train.warmup": 0},
}
SOURCES = {
    "quick": '''
from minillm_core import Plugin
from minillm_core.ops.select import Candidate


def swiglu(gate, up):
    import torch

    return torch.nn.functional.silu(gate) * up


class Trick(Plugin, api=1):
    """A kernel."""

    def kernel_provider(self, kernels):
        kernels.candidate(
            Candidate("swiglu", "quick", ("torch",), "pkg_quick.trick:swiglu", unless="x=false")
        )
''',
    "watch": '''
from minillm_core import Plugin


class Trick(Plugin, api=1):
    """Watches."""

    def on_event(self, event): ...
''',
    "slow": '''
from minillm_core import Plugin


class Trick(Plugin, api=1):
    """Norms learn slowly."""

    def optimizer_factory(self, optimizer):
        optimizer.set(lambda name, info: info.role == "norm", lr_mul=0.5)
''',
    "gate": '''
from minillm_core import Module, Plugin


class Double(Module):
    def forward(self, y):
        return y + y


class Trick(Plugin, api=1):
    """Twice what attention says."""

    def build_attention(self, attn):
        attn.out.gate(Double)
''',
    "writes": '''
from minillm_core import Plugin


class Trick(Plugin, api=1):
    """A field of the batch."""

    def build_data(self, data):
        data.field("twice", "int32")

    def on_batch(self, batch):
        batch["twice"] = batch["ids"] * 2
        return batch
''',
    "reads": '''
from minillm_core import Plugin


class Trick(Plugin, api=1):
    """Reads another's field."""

    def build_data(self, data):
        data.reads("twice")

    def on_batch(self, batch):
        assert (batch["twice"] == 2 * batch["ids"]).all()
        return batch
''',
}
LIMITS = {
    "quick": 'devices=("cuda",), backends=("torch",)',
    "watch": 'requires=("no-such-thing>=2",)',
    "slow": 'devices=("cuda",)',
    "gate": 'devices=("cuda",)',
}
UNSHAPED = ("quick", "slow", "watch")
TEXT = "It was a dark and stormy night; the rain fell in torrents.\n"


class Machine:
    """A site-packages folder with the plugins of a run, and the run."""

    def __init__(self, folder: Path) -> None:
        self.site, self.out, self.text = folder / "site", folder / "out", folder / "text.txt"
        self.text.write_text(TEXT * 100, "utf-8")

    def install(self, *names: str, limited: bool = False) -> None:
        """Install plugins; ``limited``: as on a machine that they do not support."""
        for name in names:
            limits = f"api=1, {LIMITS[name]}" if limited else "api=1"
            info = self.site / f"dist_{name}-1.0.dist-info"
            package = self.site / f"pkg_{name}"
            for made in (info, package):
                made.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(f"Name: dist-{name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(
                f"[minillm.plugins]\n{name} = pkg_{name}.trick:Trick\n"
            )
            (package / "__init__.py").write_text("")
            (package / "trick.py").write_text(SOURCES[name].replace("api=1", limits))
        self.forget()

    def uninstall(self, name: str) -> None:
        """Uninstall a plugin."""
        (self.site / f"dist_{name}-1.0.dist-info" / "entry_points.txt").unlink()
        self.forget()

    def forget(self) -> None:
        """Forget imported modules."""
        for module in [m for m in sys.modules if m.startswith("pkg_")]:
            del sys.modules[module]
        importlib.invalidate_caches()

    def train(self, *more: str) -> int:
        where = ["--data", str(self.text), "--out", str(self.out), "--steps", "6"]
        machine = ["--backend", "torch", "--device", "cpu"]
        return main(["train", *where, *machine, *more, *(f"{k}={v}" for k, v in SETTINGS.items())])

    def evaluate(self, backend: str = "torch") -> int:
        machine = ["--backend", backend, "--device", "cpu"]
        return main(["eval", str(self.out), "--data", str(self.text), "--json", *machine])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path)
    made.site.mkdir()
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(made.site))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield made
    made.forget()


@pytest.mark.slow
def test_a_run_is_read_without_what_does_not_serve(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.install(*UNSHAPED)
    assert machine.train("--plugins", ",".join(UNSHAPED), "--kernels", "swiglu=quick") == 0
    capsys.readouterr()
    assert machine.evaluate() == 0
    stdout, stderr = capsys.readouterr()
    expected = json.loads(stdout)["val_loss"]
    assert stderr == ""

    machine.install(*UNSHAPED, limited=True)
    said = {
        "torch": "plugin 'quick' does not run on device cpu: only on cuda; the run is read without "
        "it: composed serves swiglu",
        "mlx": "plugin 'quick' does not run on backend mlx: only on torch; the run is read without "
        "it: composed serves swiglu",
    }
    for backend, line in said.items():
        assert machine.evaluate(backend) == 0
        stdout, stderr = capsys.readouterr()
        assert json.loads(stdout)["val_loss"] == pytest.approx(expected, abs=1e-4)
        lines = stderr.splitlines()
        assert line in lines
        policy = (
            "no kernel 'quick' for swiglu; the run's --kernels swiglu=quick is replaced by auto"
        )
        assert policy in lines
        for name in ("slow", "watch"):
            assert len([one for one in lines if f"'{name}'" in one]) == 1

    options = ["--max-tokens", "5", "--temperature", "0", "--device", "cpu", "--backend", "torch"]
    assert main(["generate", str(machine.out), "It was", *options]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout.startswith("It was")
    assert line.replace("backend mlx: only on torch", "device cpu: only on cuda") in stderr
    assert main(["report", str(machine.out)]) == 0
    assert "no sample" not in capsys.readouterr().err

    for more in (["--resume"], []):  # training is still refused
        given = ["--plugins", "quick,slow,watch", *more]
        assert main(["train", "--out", str(machine.out), "--device", "cpu", *given]) == 2
    assert "does not run on device cpu" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_mlp", "fused_relu2", "fused_swiglu"])
def test_layers_with_kernels_of_one_device_are_read_in_their_plain_form(
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    cls = find(name).cls
    with monkeypatch.context() as patch:  # as if the plugin trained on a CPU
        patch.setattr(cls, "manifest", replace(cls.manifest, devices=("cpu",), requires=()))
        assert machine.train("--plugins", name, "train.dtype=bfloat16") == 0
    capsys.readouterr()
    losses = []
    for backend, why in (
        ("torch", "device cpu: only on cuda"),
        ("mlx", "backend mlx: only on torch"),
    ):
        assert machine.evaluate(backend) == 0
        stdout, stderr = capsys.readouterr()
        losses.append(json.loads(stdout)["val_loss"])
        line = f"plugin '{name}' does not run on {why}; the run is read without its kernels"
        assert line in stderr.splitlines()
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.slow
def test_a_run_is_read_without_what_is_not_installed_and_shaped_nothing(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.install(*UNSHAPED, "gate")
    assert machine.train("--plugins", ",".join((*UNSHAPED, "gate"))) == 0
    capsys.readouterr()
    assert machine.evaluate() == 0
    expected = json.loads(capsys.readouterr().out)["val_loss"]
    for name in UNSHAPED:
        machine.uninstall(name)
    assert machine.evaluate() == 0
    stdout, stderr = capsys.readouterr()
    assert json.loads(stdout)["val_loss"] == pytest.approx(expected, abs=1e-5)
    assert [line.split("'")[1] for line in stderr.splitlines()] == sorted(UNSHAPED)
    assert "is not installed here: it shaped neither the model" in stderr

    machine.uninstall("gate")
    assert machine.evaluate() == 2
    assert "there is no plugin 'gate' here" in capsys.readouterr().err


def test_what_another_builds_on_is_needed(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.install("writes", "reads", "watch")
    assert machine.train("--plugins", "writes,reads,watch") == 0
    machine.uninstall("watch")
    machine.uninstall("writes")
    capsys.readouterr()
    assert machine.evaluate() == 2
    assert "there is no plugin 'w" in capsys.readouterr().err


def test_export_needs_no_observer(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.install("quick", "watch")
    assert machine.train("--plugins", "quick,watch") == 0
    machine.uninstall("watch")
    machine.install("quick", limited=True)
    capsys.readouterr()
    assert main(["export", str(machine.out), "--to", str(tmp_path / "to")]) == 0
    assert "plugin 'watch' is not installed here" in capsys.readouterr().err


def test_what_shaped_the_model_is_refused_where_it_does_not_serve(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.install("gate", "watch")
    assert machine.train("--plugins", "gate,watch") == 0
    machine.install("gate", "watch", limited=True)
    capsys.readouterr()
    assert machine.evaluate() == 2
    assert "plugin 'gate' does not run on device cpu: only on cuda" in capsys.readouterr().err
    assert main(["generate", str(machine.out), "It was", "--device", "cpu"]) == 2
    assert "plugin 'gate' does not run on device cpu: only on cuda" in capsys.readouterr().err
