"""Tests of pairs: a partner that cannot run, or is broken itself, does not fail the plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from minillm_kit import CHECKS, Outcome
from minillm_kit.pairs import chosen
from minillm_kit.subject import Subject

Write = Callable[..., str]

ELSE = """

class Same(Module):
    def forward(self, x):
        return x


class Other(Plugin, api=1):
    \"\"\"Another.\"\"\"
"""
FAR = """
from minillm_core import Module, Plugin


class Same(Module):
    def forward(self, x):
        return x


class Far(Plugin, api=1, devices=("cuda",)):
    \"\"\"Takes the same slot, on another device.\"\"\"

    def build_attention(self, attn):
        attn.out.gate(Same)
"""
STATEMENT = "class Partner(Plugin, api=1, identity_at_init=True):"
FORWARD = "        return x * self.gain"
EXTEND = '        optimizer.extend("plain", "scale", stage(soften, state={"mean": "like"}))'
HOOK = '        model.residual("layers.0.in", "carry", Gain)'


def paired(spec: str, partners: Sequence[str] | None, backend: str = "torch") -> Outcome:
    (check,) = (check for check in CHECKS if check.name == "pairs")
    return check.run(Subject(spec, backend=backend, partners=partners))


def test_with_a_partner_it_trains_on_every_backend(plugin: Write, partner: Write) -> None:
    assert paired(plugin(), [partner()], "both") == Outcome("passed", "trained: partner")


def test_a_partner_of_one_backend_is_tried_there(plugin: Write, partner: Write) -> None:
    other = partner(STATEMENT, STATEMENT.replace("True", "True, backends=('torch',)"))
    assert paired(plugin(), [other], "both").found == "trained: partner (on torch alone)"


@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        (STATEMENT, f"import no_such_package\n\n\n{STATEMENT}", "raised in import"),
        (STATEMENT, STATEMENT.replace("True", "True, devices=('cuda',)"), "on device cpu"),
        (STATEMENT, STATEMENT.replace("True", "True, backends=('mlx',)"), "on backend torch"),
        (HOOK, "        raise OSError('no account')", "raised in build_model"),
        (HOOK, f"{HOOK}\n{HOOK}", "adds model.residual[layers.0.in][carry] twice"),
        (
            FORWARD,
            "        return x[:, :2] * self.gain",
            "raises alone: PluginCodeError: plugin 'partner' returned the coefficient",
        ),
        (FORWARD, "        return x * float('nan')", "its losses alone are [nan"),
    ],
    ids=["package", "device", "backend", "account", "refused alone", "raises alone", "NaN alone"],
)
def test_what_keeps_a_partner_from_running_is_told(
    plugin: Write, partner: Write, right: str, wrong: str, reason: str
) -> None:
    outcome = paired(plugin(), [partner(right, wrong)])
    assert outcome.verdict == "not applicable"
    assert outcome.found.startswith("no other plugin can be run here: partner (")
    assert reason in outcome.found


def test_a_place_that_both_want_is_refused_by_name(plugin: Write, partner: Write) -> None:
    other = partner(
        HOOK, f"{HOOK}\n\n    def build_attention(self, attn):\n        attn.out.gate(Gain)"
    )
    outcome = paired(plugin(), [other])
    assert outcome.verdict == "passed"
    assert outcome.found.startswith("refused by name: partner (")
    assert "attention.out.gate" in outcome.found


def test_those_that_it_may_get_in_the_way_of_come_first(plugin: Write, tmp_path: Path) -> None:
    def written(name: str, body: str) -> str:
        file = tmp_path / f"{name}.py"
        file.write_text(f"from minillm_core import Module, Plugin\n{ELSE}{body}")
        return f"{file}:Other"

    hook = "\n    def build_{0}(self, {1}):\n        {1}.{2}\n".format
    partners = [
        written("abroad", "").replace(":Other", ":Far"),
        written(
            "aloof", "\n    def compute_loss(self, loss):\n        loss.logits(smoothing=0.1)\n"
        ),
        written("broken", "\n    def build_model(self, model):\n        raise OSError\n"),
        written("near", hook("model", "model", "embed.norm(Same)")),
        written("same", hook("model", "model", "embed.mix(Same, before='my_trick')")),
        written("taken", hook("attention", "attn", "out.gate(Same)")),
    ]

    def names(pairs: int | None) -> list[str]:
        subject = Subject(plugin(), backend="torch", partners=partners, pairs=pairs)
        return [Path(spec).stem for spec in chosen(subject)]

    Path(partners[0].rpartition(":")[0]).write_text(FAR)
    assert names(4) == ["taken", "same", "near", "aloof"]
    assert names(5) == ["taken", "same", "near", "aloof", "abroad"]
    assert names(1) == ["taken"]
    assert names(None) == names(6) == ["abroad", "aloof", "broken", "near", "same", "taken"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("raise ValueError('no')", "torch, beside partner: ValueError: no"),
        ("return update * float('nan'), state", "torch, beside partner: losses ["),
    ],
    ids=["raises", "NaN"],
)
def test_what_fails_beside_the_partner_alone_is_the_plugins(
    plugin: Write, partner: Write, body: str, found: str
) -> None:
    spec = plugin(
        EXTEND,
        "        others = {p.owner for p in optimizer.parameters.values()} - {'core', 'my_trick'}\n"
        "        used = spoil if others else soften\n"
        "        optimizer.extend('plain', 'scale', stage(used, state={'mean': 'like'}))\n\n\n"
        f"def spoil(ops, update, param, state):\n    {body}",
    )
    outcome = paired(spec, [partner()])
    assert outcome.verdict == "failed"
    assert outcome.found.startswith(found)
    assert "partner trains without this plugin" in str(outcome.cause)


def test_nobody_to_pair_with(plugin: Write) -> None:
    outcome = paired(plugin(), [])
    assert outcome.verdict == "not applicable"
    assert "none is installed" in outcome.found


def test_no_pair_is_asked_for(plugin: Write, partner: Write) -> None:
    (check,) = (check for check in CHECKS if check.name == "pairs")
    outcome = check.run(Subject(plugin(), backend="torch", pairs=0, partners=[partner()]))
    assert outcome == Outcome("not applicable", "--pairs 0: none asked for")
