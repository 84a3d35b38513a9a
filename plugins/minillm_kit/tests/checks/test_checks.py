"""Tests of single checks: reasons for not applying, and plugins that build on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minillm_kit import CHECKS, Outcome, probe
from minillm_kit.runner import run_checks
from minillm_kit.subject import Subject

Write = Callable[..., str]
RULES = '''
from minillm_core import INHERITED, Linear, Module, Plugin, plateaus, stage


class Rule(Plugin, api=1, export="llama"):
    """An update rule by the sign of the gradient."""

    def optimizer_factory(self, optimizer):
        optimizer.rule("rule", lr=1e-3, precondition=stage(sign))
        optimizer.assign("rule", lambda name, p: len(p.shape) == 2)


def sign(ops, update, param, state):
    return update / (ops.sqrt(ops.square(update)) + 1e-8), state


class Half(Plugin, api=1):
    """Half of what the rule does."""

    def optimizer_factory(self, optimizer):
        optimizer.extend("rule", "scale", stage(halve))


def halve(ops, update, param, state):
    return 0.5 * update, state


class Torch(Rule, api=1, backends=("torch",)):
    """The same on one backend."""


class Cuda(Rule, api=1, devices=("cuda",)):
    """The same on one kind of device."""


class Idle(Plugin, api=1):
    """No hook at all."""


class Own(Plugin, api=1):
    """Writes in AdamW's place; the norms stay as they are for half of the run."""

    def optimizer_factory(self, optimizer):
        own = stage(written, state={"mean": "like"}, lr=INHERITED)
        optimizer.extend("adamw", "write", own)
        frozen = plateaus((0, 0.0), (0.5, 1.0))
        optimizer.set(lambda name, p: p.role == "norm", lr_mul=frozen, wd_mul=frozen)


def written(ops, update, param, state, *, lr, lr_mul):
    moved = param - update * (lr * lr_mul)
    return moved, {"mean": 0.5 * state["mean"] + 0.5 * moved}


class Narrow(Plugin, api=1):
    """Keeps a mean in bfloat16."""

    def optimizer_factory(self, optimizer):
        optimizer.extend("adamw", "scale", stage(narrow, state={"mean": "like"}))


def narrow(ops, update, param, state):
    return update, {"mean": ops.astype(state["mean"] + update, "bfloat16")}


class Head(Module):
    """A further head, which serves training alone."""

    def __init__(self, geometry):
        super().__init__()
        self.head = Linear(geometry.dim, geometry.dim, role="head")

    def forward(self, x):
        return self.ops.mean(self.ops.square(self.head(x)))


class Heads(Plugin, api=1):
    """A term of the loss with parameters of its own."""

    def compute_loss(self, loss):
        loss.term("size", Head, weight=0.1)
'''


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    file = tmp_path / "rule.py"
    file.write_text(RULES)
    return file


def outcomes(subject: Subject, *names: str) -> dict[str, Outcome]:
    report = run_checks(subject, [check for check in CHECKS if check.name in names])
    return {one.check: one.outcome for one in report.results}


def test_a_class_without_a_hook_does_nothing(rule: Path) -> None:
    found = outcomes(Subject(f"{rule}:Idle"), "api", "loads", "plans")
    assert found["api"].verdict == "passed"
    assert found["loads"].found == "it implements no hook"
    assert found["plans"] == Outcome("not run", "needs 'loads'")


@pytest.mark.parametrize("spec", ["no_such_plugin", "./no_such_file.py:Trick", "{}:NoSuchClass"])
def test_what_cannot_be_read_is_said_by_loads(rule: Path, spec: str) -> None:
    found = outcomes(Subject(spec.format(rule)), "api", "loads")
    assert found["api"].verdict == "not applicable"
    assert found["api"].found.endswith("see the next check")
    assert found["loads"].verdict == "failed"


def test_checks_that_do_not_apply_say_why(rule: Path) -> None:
    names = ("identity", "batches", "events", "parity")
    found = outcomes(Subject(f"{rule}:Torch"), *names)
    assert {one.verdict for one in found.values()} == {"not applicable"}
    assert found["identity"].found == "identity_at_init is not declared"
    assert found["batches"].found == "it has no on_batch"
    assert found["events"].found == "it has no on_event"
    assert found["parity"].found == "torch alone: the plugin does not support mlx"


VERDICT = """
from minillm_core import Plugin, Verdict


class Judge(Plugin, api=1):
    \"\"\"Judges evaluations.\"\"\"

    def on_evaluated(self, evaluated, history, model):
        BODY
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", None),
        ("return Verdict({'seen': len(history)}, stop='' if history else 'done')", None),
        (
            "ids = model.tokenizer.encode(['a text']) if model.tokenizer else [[*range(50)]]\n"
            "        return Verdict({'nats': model.losses(ids)[0].mean()})",
            None,
        ),
        ("return Verdict({'x': 'high'})", "a verdict with the figure 'x': 'high'"),
        ("return Verdict({'x': float('nan')})", "a verdict with the figure 'x': nan"),
        ("return Verdict({'a b': 1.0})", "a verdict with the figure 'a b': 1.0"),
        ("return {'x': 1.0}", "on_evaluated returns {'x': 1.0}"),
        ("return Verdict({}, stop=True)", "a verdict with stop=True"),
        ("return Verdict({'x': model.losses([[1]])[0][0]})", "a row of 1 ids"),
        ("return Verdict({'x': 1 / len(history)})", "ZeroDivisionError"),
    ],
)
def test_verdicts_are_looked_at(tmp_path: Path, body: str, said: str | None) -> None:
    file = tmp_path / "judge.py"
    file.write_text(VERDICT.replace("BODY", body))
    (found,) = outcomes(Subject(f"{file}:Judge", backend="torch"), "events").values()
    assert found.verdict == ("failed" if said else "passed"), found
    assert (said or "2 evaluations with") in found.found


def test_a_plugin_of_another_device_is_not_run(rule: Path) -> None:
    found = outcomes(Subject(f"{rule}:Cuda"), "trains", "plans")
    assert found["plans"].verdict == "passed"
    assert found["trains"].found == "the plugin runs on cuda alone, this is a CPU"


def test_a_plugin_is_checked_beside_what_it_builds_on(rule: Path) -> None:
    other = rule.with_name("half.py")
    other.write_text(RULES)
    found = outcomes(Subject(f"{other}:Half", backend="torch"), "plans")
    assert "builds on the rule 'rule'" in found["plans"].found
    spec = f"{rule}:Rule"
    beside = Subject(f"{other}:Half", backend="torch", beside=[spec])
    found = outcomes(beside, "plans", "declared", "off", "evidence", "updates", "exports")
    assert found.pop("exports").verdict == "passed"
    assert {one.verdict for one in found.values()} == {"passed"}, found
    assert found["plans"].found.endswith("beside rule, which it builds on")
    assert found["updates"].found.startswith("rule.scale:")


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_write_and_factors_of_its_own_are_checked(rule: Path, backend: str) -> None:
    names = ("plans", "declared", "forward", "slopes", "updates", "trains", "resumes", "evidence")
    found = outcomes(Subject(f"{rule}:Own", backend=backend), *names)
    assert {one.verdict for one in found.values()} == {"passed"}, found


FOCAL = """
from minillm_core import Module, Plugin


class P(Plugin, api=1):
    \"\"\"Positions that are predicted well weigh less; every head's output is gated by itself.\"\"\"

    def build_attention(self, attn):
        attn.out.gate(Gate)

    def compute_loss(self, loss):
        loss.weights(Weights)


class Gate(Module):
    def forward(self, y):
        return y * self.ops.sigmoid(y)


class Weights(Module):
    def forward(self, losses):
        return 1.0 - self.ops.exp(-losses)
"""


def test_weights_of_positions_are_held_in_slopes_and_nothing_else_is(tmp_path: Path) -> None:
    (file := tmp_path / "focal.py").write_text(FOCAL)
    assert outcomes(Subject(f"{file}:P"), "slopes")["slopes"].verdict == "passed"
    file.write_text(FOCAL.replace("sigmoid(y)", "sigmoid(self.ops.stop_gradient(y))"))
    found = outcomes(Subject(f"{file}:P"), "slopes")["slopes"]
    assert "by the gradient" in found.found


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_state_of_another_dtype_is_found(rule: Path, backend: str) -> None:
    found = outcomes(Subject(f"{rule}:Narrow", backend=backend), "plans", "trains")
    assert found["trains"].verdict == "failed"
    assert "returned state 'mean' of bfloat16 from narrow" in found["trains"].found


INPLACE = """
from minillm_core import Module, Plugin, stage


class P(Plugin, api=1, backends=BACKENDS):
    \"\"\"Writes in place.\"\"\"

    HOOK


class Node(Module):
    def forward(self, y):
        LINE
        return y


def own(ops, update, param, state):
    LINE
    return update, state
"""
GATE = "def build_attention(self, attn): attn.out.gate(Node)"
STAGE = (
    "def optimizer_factory(self, optimizer): "
    "optimizer.extend('adamw', 'scale', stage(own, state={'m': 'like'}))"
)
EVERY = ("torch", "mlx", "numpy")


@pytest.mark.parametrize(
    ("hook", "line", "backends", "check"),
    [
        (GATE, "y[:, 0] = 0", EVERY, "forward"),
        (GATE, "y *= 2", EVERY, "forward"),
        (GATE, "y *= 2", ("mlx",), "pure"),
        (STAGE, "param *= 0.5", EVERY, "updates"),
        (STAGE, "state['m'] += update", EVERY, "updates"),
    ],
)
def test_writes_in_place_are_found_on_mlx(
    tmp_path: Path, hook: str, line: str, backends: tuple[str, ...], check: str
) -> None:
    file = tmp_path / "p.py"
    text = INPLACE.replace("HOOK", hook).replace("BACKENDS", repr(backends))
    node = text.replace("LINE", line, 1).replace("LINE", "pass")
    rule = text.replace("LINE", "pass", 1).replace("LINE", line)
    file.write_text(node if hook == GATE else rule)
    (found,) = outcomes(Subject(f"{file}:P", backend="mlx"), check).values()
    assert found.verdict == "failed"
    assert "plugin 'p' changed " in found.found
    assert "in place in" in found.found


def test_what_the_loss_alone_reads_is_left_out_of_an_export(rule: Path) -> None:
    found = outcomes(Subject(f"{rule}:Heads", backend="torch"), "plans", "forward", "exports")
    assert found["exports"].verdict == "passed"
    assert found["exports"].found.startswith("llama: logits")


def test_an_import_that_hangs_is_ended(plugin: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATIENCE", 0)
    found = outcomes(Subject(plugin()), "import")["import"]
    assert found.verdict == "failed"
    assert "not done after" in found.found


PACKER = """
import numpy as np
from minillm_core import Packer, Plugin


class Rows(Plugin, api=1):
    \"\"\"Lays out rows.\"\"\"

    def build_data(self, data):
        data.packer(Own)


class Own(Packer):
    rows = 0

    def row(self, take):
        ROW
"""


SOURCE = """
import numpy as np
from minillm_core import Plugin
from minillm_core.documents import Segment


class Made(Plugin, api=1):
    \"\"\"Makes documents.\"\"\"

    def build_data(self, data):
        data.source(made, fields={"place": "int32"}, files=False)


def made(files, reading):
    rng = np.random.default_rng(SEED)
    for n in range(COUNT):
        ids = rng.integers(0, reading.vocab, 5)
        yield [Segment(ids, {"place": np.arange(5)}), Segment(f"text {n}")]
"""


@pytest.mark.parametrize(
    ("seed", "count", "said"),
    [
        ("7", "20", None),
        ("", "20", "other documents the second time"),
        ("7", "0", "no document"),
        ("7", "2 // 0", "ZeroDivisionError"),
    ],
)
def test_a_sources_documents_are_read_twice(
    tmp_path: Path, seed: str, count: str, said: str | None
) -> None:
    file = tmp_path / "made.py"
    file.write_text(SOURCE.replace("SEED", seed).replace("COUNT", count))
    (found,) = outcomes(Subject(f"{file}:Made"), "batches").values()
    if said is None:
        assert found == Outcome("passed", "source: 20 documents, the same again")
    else:
        assert found.verdict == "failed"
        assert said in found.found


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("return [take().part(0, self.capacity)]", None),
        (
            "self.state = (self.state or 0) + 1\n        return [take().part(0, self.state % 7 + 1)]",
            None,
        ),
        (
            "self.rows += 1\n        return [take().part(0, self.rows % 7 + 1)]",
            "resumed after step 1, 'documents' of the same rows differs",
        ),
        (
            "return [take().part(0, np.random.default_rng().integers(1, 9).item())]",
            "a second time, 'documents' of the same rows differs",
        ),
        ("return []", "plugin 'rows' broke the rows in Own: [] is not a row"),
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_packers_rows_are_read_twice_and_resumed(
    tmp_path: Path, row: str, said: str | None
) -> None:
    file = tmp_path / "rows.py"
    file.write_text(PACKER.replace("ROW", row))
    (found,) = outcomes(Subject(f"{file}:Rows"), "batches").values()
    if said is None:
        assert found == Outcome("passed", "packer: 8 steps, the same again and resumed after each")
    else:
        assert found.verdict == "failed"
        assert said in found.found


def test_several_processes_are_left_out_where_nobody_brings_them(
    rule: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm_kit.mesh.entry_points", lambda group: ())
    (found,) = outcomes(Subject(f"{rule}:Rule", backend="torch"), "mesh").values()
    assert found.verdict == "not applicable"
    assert found.found.startswith("minillm-mesh is not installed: pip install")
    (found,) = outcomes(Subject(f"{rule}:Rule", backend="mlx"), "mesh").values()
    assert found.found.startswith("processes of torch alone are tried, over gloo")


MIXES = '''
from minillm_core import Module, Param, Plugin, zeros

class Mixes(Plugin, api=1):
    """Adds the mean of all heads to each, as far as learned."""

    def build_attention(self, attn):
        attn.out.gate(Mean)

class Mean(Module):
    """y (B, T, H, D) -> y and its mean over H."""

    def __init__(self):
        super().__init__()
        self.gate = Param((1,), init=zeros, role="scalar", wd_mul=0.0)

    def forward(self, y):
        """y (B, T, H, D) -> (B, T, H, D)."""
        return y + self.gate * self.ops.mean(y, 2, keepdims=True)
'''


@pytest.mark.slow
def test_a_node_that_mixes_heads_is_refused_where_they_are_divided(tmp_path: Path) -> None:
    file = tmp_path / "mixes.py"
    file.write_text(MIXES)
    (found,) = outcomes(Subject(f"{file}:Mixes", backend="torch"), "mesh").values()
    assert found.verdict == "passed"
    assert "tensor: refused, plugin 'mixes' gives a different result for a subset" in found.found


RAISES = '''
import os

from minillm_core import Module, Plugin

class Raises(Plugin, api=1):
    """Raises in the second process alone."""

    def build_model(self, model):
        model.residual("layers.0.out", "sublayer", Whole)

class Whole(Module):
    """Return its input."""

    def forward(self, x):
        """x (B, T, C) -> the same."""
        if os.environ.get("RANK") == "1":
            raise ValueError("whole batches only")
        return x
'''


@pytest.mark.slow
def test_the_error_of_the_process_that_raised_is_shown_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "raises.py"
    file.write_text(RAISES)
    (found,) = outcomes(Subject(f"{file}:Raises", backend="torch"), "mesh").values()
    assert found.verdict == "failed"
    assert found.found == f"ValueError along data: whole batches only\n{file}:18 in forward"


@pytest.mark.slow
def test_a_plugin_that_several_processes_refuse_says_so_along_each_axis() -> None:
    (found,) = outcomes(Subject("sparse_rows", backend="torch"), "mesh").values()
    assert found.verdict == "not applicable"
    assert found.found.startswith(
        "refused along data, shard, weights, rows, context, tensor, pipeline: tables that are updated"
    )
    (found,) = outcomes(Subject("jest", backend="torch"), "mesh").values()
    assert found.verdict == "passed"
    assert found.found.startswith(
        "torch, data: equal to the bit; shard: equal to the bit; weights: equal to the bit; "
        "rows: refused, the choice of what"
    )
