"""A table of wrong plugins: for each of them exactly one check fails, and mending the line mends it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minillm_core.testing import CHECKS, check_plugin

LEVEL = "# at module level"
CLASS = "    # in the class"
HOOK = "        # in the hook"
MIX = "        mixed = x + self.scale * self.gate(x) * before"
BEFORE = "        before = self.ops.concat([self.ops.zeros_like(x[:, :1]), x[:, :-1]], 1)"
CLAIM = "        model.embed.mix(Smear, scale=self.scale)"
STAGE = '    return update + 0.1 * mean, {"mean": mean}'
STATEMENT = "class MyTrick(Plugin, api=1, identity_at_init=True):"
EXTEND = '        optimizer.extend("adamw", "scale", stage(soften, state={"mean": "like"}))'
OPEN = "        return y * self.ops.expand_dims(1.0 + self.gate(x), -1)"

WRONG: dict[str, tuple[str, str, str]] = {
    "misspelt hook": ("loads", CLASS, "    def build_modell(self, model): ..."),
    "raises at import": ("loads", LEVEL, "1 / 0"),
    "no docstring": ("manifest", '    """A gate mixes each column with the one before it."""', ""),
    "manifest set by code": (
        "manifest",
        EXTEND,
        EXTEND + "\n\nfrom minillm_core.plugins.manifest import Manifest\n"
        "MyTrick.manifest = Manifest(1, ('torch', 'mlx'), identity_at_init=True)",
    ),
    "validator that doubles": (
        "options",
        CLASS,
        "    @field_validator('scale')\n    @classmethod\n    def _twice(cls, v): return 2 * v",
    ),
    "imports a framework": ("import", LEVEL, "import torch"),
    "opens a socket at import": ("import", LEVEL, "import socket\nsocket.socket().close()"),
    "writes at import": ("import", LEVEL, "open(__file__ + '.log', 'w').close()"),
    "environment at import": ("import", LEVEL, "import os\nos.environ['MY_TRICK'] = '1'"),
    "claims twice": (
        "plans",
        HOOK,
        "        model.mlp(0, Smear, scale=1.0); model.mlp(0, Smear, scale=1.0)",
    ),
    "hash of a string": (
        "deterministic",
        CLAIM,
        "        model.embed.mix(Smear, scale=0.5 + hash('x') % 1000 / 1000)",
    ),
    "environment in a hook": (
        "traces",
        HOOK,
        "        import os; os.environ['MY_TRICK_2'] = str(id(model))",
    ),
    "seeds numpy": ("traces", HOOK, "        import numpy; numpy.random.seed(1)"),
    "patches the core": (
        "traces",
        HOOK,
        "        import minillm_core.text as t; t.nearest = lambda *a, **k: None",
    ),
    "not the identity": (
        "identity",
        'Linear(geometry.dim, 1, role="gate", init=zeros)',
        'Linear(geometry.dim, 1, role="gate")',
    ),
    "another number on torch": (
        "forward",
        MIX,
        MIX + "\n        mixed = mixed * (1.01 if type(self.ops).__name__ == 'TorchOps' else 1.0)",
    ),
    "stops a gradient": ("slopes", MIX, MIX.replace("= x +", "= self.ops.stop_gradient(x) +")),
    "a stage gives NaN": ("trains", STAGE, STAGE.replace("0.1 * mean", "mean * float('nan')")),
    "a parameter without a use": (
        "evidence",
        "        self.scale = scale",
        "        self.scale = scale\n        self.other = Linear(4, 4, role='gate')",
    ),
    "counts at module level": (
        "resumes",
        STAGE,
        "    SEEN.append(1)\n    return update * (1 + 0.1 * len(SEEN)), {'mean': mean}\n\n\nSEEN = []",
    ),
    "sees the next column": (
        "causal",
        BEFORE,
        "        before = self.ops.concat([x[:, 1:], self.ops.zeros_like(x[:, :1])], 1)",
    ),
    "no lookback": ("decodes", "    lookback = 1", ""),
    "no such export": (
        "exports",
        STATEMENT,
        STATEMENT.replace("True", "True, export='llama'"),
    ),
    "reads a number while traced": (
        "compiles",
        OPEN,
        "        seen = self.ops.mean(self.ops.mean(self.ops.mean(x, -1), -1))\n"
        "        y = y if seen > -9.0 else -y\n" + OPEN,
    ),
}
"""What is wrong -> the check that finds it, the right line, the wrong one."""

Write = Callable[..., str]


@pytest.mark.slow
def test_the_right_plugin_passes_every_check_that_applies(plugin: Write) -> None:
    report = check_plugin(plugin())
    verdicts = {one.check: one.outcome.verdict for one in report.results}
    assert verdicts.pop("exports") == "not applicable"
    assert set(verdicts.values()) == {"passed"}, report.failed


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_exactly_one_check_finds_it(plugin: Write, what: str) -> None:
    check, right, wrong = WRONG[what]
    report = check_plugin(plugin(right, wrong), backend="torch")
    assert [one.check for one in report.failed] == [check], report.failed
    (failed,) = report.failed
    assert failed.outcome.found
    assert failed.outcome.cause
    assert failed.rerun.endswith(f"--only {check}")


def test_every_check_is_seen_to_fail() -> None:
    caught = {check for check, _, _ in WRONG.values()}
    unseen = {check.name for check in CHECKS} - caught
    assert unseen == {"api", "declared", "off", "parity", "pure", "alike", "pairs"}
