"""Checks one by one: what they say where they do not apply, and of plugins that build on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minillm_core.testing import processes
from minillm_core.testing.check import Outcome
from minillm_core.testing.registry import CHECKS
from minillm_core.testing.runner import run_checks
from minillm_core.testing.subject import Subject

Write = Callable[..., str]
RULES = '''
from minillm_core import Plugin, stage


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


def test_an_import_that_hangs_is_ended(plugin: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 0.01)
    found = outcomes(Subject(plugin()), "import")["import"]
    assert found.verdict == "failed"
    assert "not done after" in found.found
