"""A table of wrong plugins: each fails exactly one check, and passes once the line is fixed."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from random import Random

import pytest

import minillm_kit
from minillm_core import text
from minillm_core.nn.init import ones
from minillm_kit import CHECKS
from minillm_kit.check import NOT_FINITE, RAISED
from minillm_kit.runner import Report, run_checks
from minillm_kit.subject import Subject

LEVEL = "# at module level"
CLASS = "    # in the class"
HOOK = "        # in the hook"
MIX = "        mixed = x + (self.scale + self.ops.like(self.level, x)) * self.gate(x) * before"
BEFORE = "        before = self.ops.concat([self.ops.zeros_like(x[:, :1]), x[:, :-1]], 1)"
CLAIM = "        model.embed.mix(Smear, scale=self.scale)"
STAGE = '    return update + 0.1 * mean, {"mean": mean}'
STATEMENT = "class MyTrick(Plugin, api=1, identity_at_init=True):"
EXTEND = '        optimizer.extend("plain", "scale", stage(soften, state={"mean": "like"}))'
SWIGLU = (
    f"{EXTEND}\n\n    def kernel_provider(self, kernels):\n"
    "        from minillm_core import Candidate\n"
    "        at = f'{__name__}:swiglu'\n"
    "        kernels.candidate(Candidate('swiglu', 'mine', ('torch',), at, provider='my_trick'))"
    "\n\n\ndef swiglu(gate, up):\n    y = gate * gate.sigmoid() * up\n"
)
BATCH = "        # for each batch"
FIELDS = '        return {**batch, "parity": batch["ids"] % 2}'
EVENT = "        HEARD.append(event.event)"
NEXT = '        return {"level": 0.9 * self.level + 0.1 * level}'
CALLED = f"    def on_batch(self, batch, phase):\n{BATCH}"
TAKEN = """    def on_batch(self, batch, phase, pieces):
        import numpy as np
        blank = np.array([one.isspace() for one in pieces])[batch["labels"]]
"""
OPEN = "        return y * self.ops.expand_dims(1.0 + self.gate(x), -1)"

WRONG: dict[str, tuple[str, str, str]] = {
    "another hook api": ("api", STATEMENT, STATEMENT.replace("api=1", "api=2")),
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
    "imports a framework": ("import", LEVEL, "import mlx.core"),
    "opens a socket at import": ("import", LEVEL, "import socket\nsocket.socket().close()"),
    "writes at import": ("import", LEVEL, "open(__file__ + '.log', 'w').close()"),
    "prints at import": ("import", LEVEL, "print('loading my trick!')"),
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
    "imports a framework to plan": ("traces", HOOK, "        import mlx.core"),
    "changes a default of the core's": (
        "off",
        HOOK,
        "        from minillm_core.nn.init import ones\n        object.__setattr__(ones, 'value', 1.5)",
    ),
    "writes to another's parameter": (
        "declared",
        EXTEND,
        f"{EXTEND}\n"
        "        object.__setattr__(optimizer.parameters['embedding.weight'], 'lr_mul', 2.0)",
    ),
    "ids beyond the vocabulary": ("batches", BATCH, "        batch['ids'] = batch['ids'] + 97"),
    "writes into the batch": ("batches", BATCH, "        batch['ids'][:, 0] = 0"),
    "writes into the batch's dictionary": (
        "batches",
        FIELDS,
        "        batch['parity'] = batch['ids'] % 2\n        return batch",
    ),
    "drops labels in evaluations": (
        "batches",
        BATCH,
        "        batch = {**batch, 'labels': batch['labels'].clip(max=9) - 10 * (batch['ids'] > 50)}",
    ),
    "reweights evaluations": (
        "batches",
        BATCH,
        "        weights = 0.5 + 0 * batch['ids'].astype('float32')\n"
        "        batch = {**batch, 'weights': weights}",
    ),
    "forgets its field in evaluations": (
        "batches",
        BATCH,
        "        if phase == 'eval':\n            return batch",
    ),
    "random numbers of its own": (
        "batches",
        FIELDS,
        "        import numpy as np\n        draw = np.random.default_rng().integers(2**30)\n"
        "        return {**batch, 'parity': batch['ids'] * 0 + np.int32(draw)}",
    ),
    "a field of another type": ("batches", FIELDS, FIELDS.replace("% 2", "% 2.0")),
    "a field that is not declared": (
        "batches",
        FIELDS,
        FIELDS.replace('"parity": ', '"mine": batch["ids"], "parity": '),
    ),
    "looks at the columns to come": (
        "batches",
        FIELDS,
        FIELDS.replace("% 2", "* 0 + batch['ids'].shape[1]"),
    ),
    "drops blanks without a seed": (
        "batches",
        CALLED,
        f"{TAKEN}        gone = blank & (np.random.default_rng().random(blank.shape) < 0.5)\n"
        "        if phase == 'train':\n"
        "            batch = {**batch, 'labels': np.where(gone, -1, batch['labels'])}",
    ),
    "drops blanks by the calls so far": (
        "batches",
        CALLED,
        f"{TAKEN}        CALLS.append(phase)\n        gone = blank & (len(CALLS) > 6)\n"
        "        if phase == 'train':\n"
        "            batch = {**batch, 'labels': np.where(gone, -1, batch['labels'])}",
    ),
    "drops every label": (
        "batches",
        BATCH,
        "        if phase == 'train':\n"
        "            batch = {**batch, 'labels': batch['labels'] * 0 - 1}",
    ),
    "raises where a figure is None": (
        "events",
        EVENT,
        "        HEARD.append(event.data().get('bits_per_byte', 0.0) / 2)",
    ),
    "raises from the third step on": (
        "events",
        EVENT,
        "        if event.event == 'step' and event.step >= 3:\n"
        "            raise OSError('the disk is full')",
    ),
    "changes an event": (
        "events",
        EVENT,
        "        getattr(event, 'terms', {}).clear()",
    ),
    "a kernel's gradient is a little off": (
        "kernel",
        EXTEND,
        f"{SWIGLU}    return 1.001 * y - 0.001 * y.detach()",
    ),
    "a kernel reads a number": ("kernel", EXTEND, f"{SWIGLU}    return y if y.sum() < 1e9 else y"),
    "a kernel returns nothing": ("kernel", EXTEND, SWIGLU),
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
    "a logarithm of a weight": (
        "forward",
        MIX,
        f"{MIX} + 0.0 * self.ops.sum(self.ops.log(1.0 + 20.0 * self.gate.weight))",
    ),
    "a state that is not cast": (
        "forward",
        MIX,
        MIX.replace("self.ops.like(self.level, x)", "self.level"),
    ),
    "stops a gradient": ("slopes", MIX, MIX.replace("= x +", "= self.ops.stop_gradient(x) +")),
    "another gradient on torch": (
        "parity",
        OPEN,
        "        if self.ops.name == 'torch':\n"
        "            y = y + 1e-4 * (y - self.ops.stop_gradient(y))\n" + OPEN,
    ),
    "a flag of torch's": (
        "clean",
        BATCH,
        "        import sys\n        if 'torch' in sys.modules:\n"
        "            sys.modules['torch'].backends.cudnn.benchmark = True",
    ),
    "seeds torch": (
        "clean",
        BATCH,
        "        import sys\n        if 'torch' in sys.modules:\n"
        "            sys.modules['torch'].manual_seed(7)",
    ),
    "another stage on torch": (
        "updates",
        STAGE,
        STAGE.replace("0.1 *", "(0.11 if ops.name == 'torch' else 0.1) *"),
    ),
    "another state on torch": (
        "alike",
        NEXT,
        NEXT.replace("0.1 *", "(0.11 if self.ops.name == 'torch' else 0.1) *"),
    ),
    "remembers the order of calls": (
        "pure",
        OPEN,
        "        if self.layer == 0:\n            ORDER.clear()\n        ORDER.append(0)\n"
        "        return y * self.ops.expand_dims(1.0 + len(ORDER) * self.gate(x), -1)\n\n\n"
        "ORDER = []",
    ),
    "keeps an array on self": ("pure", OPEN, f"        self.seen = y\n{OPEN}"),
    "keeps a tuple on self": ("pure", OPEN, f"        self._seen = (y,)\n{OPEN}"),
    "refuses others without a name": (
        "pairs",
        EXTEND,
        f"{EXTEND}\n        from minillm_core import PlanError\n"
        "        if {p.owner for p in optimizer.parameters.values()} - {'core', 'my_trick'}:\n"
        "            raise PlanError('there is something else')",
    ),
    "a stage gives NaN": ("trains", STAGE, STAGE.replace("0.1 * mean", "mean * float('nan')")),
    "a parameter without a use": (
        "evidence",
        "        self.scale = scale",
        "        self.scale = scale\n        self.other = Linear(4, 4, role='gate')",
    ),
    "counts at module level": (
        "repeats",
        STAGE,
        "    SEEN.append(1)\n    return update * (1 + 0.1 * len(SEEN)), {'mean': mean}\n\n\nSEEN = []",
    ),
    "scales by the calls so far": (
        "repeats",
        MIX,
        "        CALLS.append(1)\n        scale = self.scale + 0.01 * len(CALLS)\n"
        "        mixed = x + scale * self.gate(x) * before",
    ),
    "raises the second time": (
        "repeats",
        OPEN,
        "        CALLS.append(self.layer)\n        assert CALLS.count(0) < 2\n" + OPEN,
    ),
    "counts the steps of a run at module level": (
        "resumes",
        STAGE,
        "    SEEN[:] = SEEN + [1] if bool((state['mean'] != 0).any()) else []\n"
        "    return update * (1 + 0.1 * len(SEEN)), {'mean': mean}\n\n\nSEEN = []",
    ),
    "sees the next column": (
        "causal",
        BEFORE,
        "        before = self.ops.concat([x[:, 1:], self.ops.zeros_like(x[:, :1])], 1)",
    ),
    "sees a little of the next column": (
        "causal",
        MIX,
        f"{MIX}\n        after = self.ops.concat([x[:, 1:], self.ops.zeros_like(x[:, :1])], 1)\n"
        "        mixed = mixed + 1e-6 * self.gate(x) * after",
    ),
    "no lookback": ("decodes", "    lookback = 1", ""),
    "no such export": (
        "exports",
        STATEMENT,
        STATEMENT.replace("True", "True, export='llama'"),
    ),
    "mixes the rows of a micro-batch": (
        "mesh",
        MIX,
        f"{MIX}\n        mixed = mixed + 0.1 * self.gate(x) * self.ops.mean(x, 0)",
    ),
    "updates by its rank": (
        "mesh",
        STAGE,
        "    import os\n    further = 1 + 0.1 * int(os.environ.get('RANK', '0'))\n"
        "    return update * further + 0.1 * mean, {'mean': mean}",
    ),
    "reads a number while traced": (
        "compiles",
        OPEN,
        "        seen = self.ops.mean(self.ops.mean(self.ops.mean(x, -1), -1))\n"
        "        y = y if seen > -9.0 else -y\n" + OPEN,
    ),
    "an item of an array in a node": (
        "compiles",
        OPEN,
        "        y = y * (1.0 + 0.0 * self.ops.mean(x[0, 0], 0).item())\n" + OPEN,
    ),
    "a float of an array in a stage": (
        "compiles",
        STAGE,
        "    update = update * (1.0 + 0.0 * float(ops.sum(update)))\n" + STAGE,
    ),
}
"""Fault -> the check that finds it, the right line, the wrong line."""

AT_FAULT = "my_trick.py:"
NAN_ON_TORCH = "* (float('nan') if type(self.ops).__name__ == 'TorchOps' else 1.0)"
SAID: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "a claim's lines": ("plans", *WRONG["claims twice"][1:], (AT_FAULT,)),
    "where a stage raises": (
        "forward",
        STAGE,
        "    raise RuntimeError('not here')\n" + STAGE,
        ("RuntimeError: not here", AT_FAULT, " in soften", RAISED),
    ),
    "NaN at the start": (
        "identity",
        OPEN,
        "        y = y * float('nan')\n" + OPEN,
        ("NaN or infinite", NOT_FINITE),
    ),
    "NaN on one framework": (
        "forward",
        MIX,
        f"{MIX}\n        mixed = mixed {NAN_ON_TORCH}",
        ("loss nan", NOT_FINITE),
    ),
    "where a kernel raises": (
        "kernel",
        EXTEND,
        f"{SWIGLU}    raise RuntimeError('not here')",
        ("RuntimeError: not here", AT_FAULT, " in swiglu", "the kernel's code there"),
    ),
    "where a kernel reads a number": (
        "kernel",
        *WRONG["a kernel reads a number"][1:],
        ("read on the host", AT_FAULT, " in swiglu"),
    ),
    "what a kernel returns": (
        "kernel",
        *WRONG["a kernel returns nothing"][1:],
        ("output 0 is of type NoneType",),
    ),
    "the labels lost": ("batches", *WRONG["drops every label"][1:], ("198 labels of 6 batches",)),
    "where a number is read": (
        "compiles",
        *WRONG["an item of an array in a node"][1:],
        ("read on the host", AT_FAULT, " in forward", "ops.where"),
    ),
    "where a choice is by a number": (
        "compiles",
        *WRONG["reads a number while traced"][1:],
        (AT_FAULT, " in forward", "ops.where"),
    ),
}
"""What -> its check, the right line, the wrong line, and what the failure says."""

Write = Callable[..., str]
BOTH = ("parity", "alike")
"""Checks that compare both frameworks; the others need one."""
SLOW = ("clean",)
"""Checks that take seconds, run only with the others."""
SAMPLE = {*Random(18).sample([*WRONG], 6), *(what for what in WRONG if WRONG[what][0] in SLOW)}
"""Faults for which the full tier runs all checks; the nightly tests run all checks for every fault."""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the attributes that wrong plugins change permanently."""
    import torch

    # Set to its current value, so that monkeypatch restores it at the end, whatever replaced it.
    monkeypatch.setattr(text, "nearest", text.nearest)
    yield
    object.__setattr__(ones, "value", 1.0)
    torch.backends.cudnn.benchmark = False
    for name in ("MY_TRICK", "MY_TRICK_2"):
        os.environ.pop(name, None)


def needed(name: str) -> set[str]:
    """Return the dependencies of ``name``, and itself."""
    (check,) = (check for check in CHECKS if check.name == name)
    return {name}.union(*map(needed, check.needs))


def checked(spec: str, partner: str, check: str, only: Container[str]) -> Report:
    subject = Subject(spec, backend="both" if check in BOTH else "torch", partners=(partner,))
    return run_checks(subject, [check for check in CHECKS if check.name in only])


@pytest.mark.broad(4)
@pytest.mark.parametrize("what", [what for what in WRONG if WRONG[what][0] not in SLOW])
def test_its_check_finds_it(plugin: Write, partner: Write, what: str) -> None:
    """Check that this check fails, and none of its dependencies."""
    check, right, wrong = WRONG[what]
    report = checked(plugin(right, wrong), partner(), check, needed(check))
    assert [one.check for one in report.failed] == [check], report.failed
    (failed,) = report.failed
    assert failed.outcome.found
    assert failed.outcome.cause
    assert failed.rerun.endswith(f"--only {check}")


@pytest.mark.broad(4)
@pytest.mark.parametrize("what", SAID)
def test_what_is_said(plugin: Write, what: str) -> None:
    name, right, wrong, said = SAID[what]
    (check,) = (check for check in CHECKS if check.name == name)
    outcome = check.run(Subject(plugin(right, wrong), backend="torch"))
    assert outcome.verdict == "failed"
    text = f"{outcome.found}\n{outcome.cause}"
    assert [part for part in said if part not in text] == [], text


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [what if what in SAMPLE else pytest.param(what, marks=pytest.mark.nightly) for what in WRONG],
)
def test_no_other_check_finds_it(plugin: Write, partner: Write, what: str) -> None:
    check, right, wrong = WRONG[what]
    names = {check.name for check in CHECKS}
    report = checked(plugin(right, wrong), partner(), check, names)
    assert [one.check for one in report.failed] == [check], report.failed


@pytest.mark.slow
def test_the_line_mended_every_check_passes(plugin: Write, partner: Write) -> None:
    report = run_checks(Subject(plugin(), partners=(partner(),)), CHECKS)
    verdicts = {one.check: one.outcome.verdict for one in report.results}
    assert verdicts.pop("kernel") == "not applicable"
    assert set(verdicts.values()) == {"passed"}, report.failed


def test_every_check_is_seen_to_fail() -> None:
    assert {check.name for check in CHECKS} == {check for check, _, _ in WRONG.values()}


def test_every_check_is_described() -> None:
    listed = str(minillm_kit.__doc__)
    assert all(listed.count(f"- ``{check.name}``:") == 1 for check in CHECKS)
