"""Fixtures: the program, and a fake study whose losses and speeds are formulas of plan and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minillm_core import (
    FrozenModel,
    Interrupted,
    NonFinite,
    Plugin,
    PluginCodeError,
    option,
    scheduled,
    stage,
)
from minillm_core.cli.main import main
from minillm_core.config.load import Loaded, load
from minillm_core.plugins.manager import LoadedPlugin
from minillm_lab.study import Point, Trained


def halved(ops: Any, update: Any, param: Any, state: dict[str, Any]) -> Any:
    return update * 0.5, state


class Rule(Plugin, api=1):
    """A rule for the head."""

    lr: float = option(0.01, gt=0, help="its rate")

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.rule("rule", lr=scheduled(self.lr), scale=stage(halved))
        optimizer.assign("rule", lambda name, p: p.role == "head")


class Extension(Plugin, api=1):
    """Builds on the rule."""

    def optimizer_factory(self, optimizer: Any) -> None:
        optimizer.extend("rule", "precondition", stage(halved))


class Scale(Plugin, api=1):
    """Attention's scale."""

    def build_attention(self, attn: Any) -> None:
        attn.scale(0.5)


def half_of(step: int, steps: int, seed: int) -> int:
    return int(2 * step > steps)


class Small(Plugin, api=1):
    """Half of the rows in the first half of the run."""

    def build_data(self, data: Any) -> None:
        data.shapes(half_of, [(data.rows // 2, data.seq_len), (data.rows, data.seq_len)])


class Compared(Plugin, api=1):
    """Reads the losses of a trained model, whose folder does not exist."""

    def compute_loss(self, loss: Any) -> None:
        loss.reference("compared", FrozenModel("no/such/run"), gives="losses")


class Watcher(Plugin, api=1):
    """Is called with events, and changes nothing."""

    def on_event(self, event: Any) -> None:
        pass


class FakeStudy:
    """A fake study: each plugin lowers the loss by ``gain`` and multiplies the step time by ``cost``."""

    def __init__(self, gain: dict[str, float], cost: dict[str, float] | None = None) -> None:
        self.gain, self.cost = gain, cost or {}
        self.made: list[tuple[tuple[str, ...], int, int]] = []
        self.stop_after: int | None = None
        self.diverges: set[tuple[str, int]] = set()
        self.breaks: tuple[str, int] | None = None

    def train(
        self,
        plan: Any,
        seed: int,
        *,
        evaluations: int = 10,
        watch: Callable[[float], None] = lambda progress: None,
    ) -> Trained:
        names, steps = tuple(one.name for one in plan.active), plan.config.train.steps
        if self.stop_after is not None and len(self.made) >= self.stop_after:
            raise Interrupted("ended by SIGTERM after step 3; nothing was saved")
        self.made.append((names, seed, steps))
        if self.diverges & {(name, seed) for name in names}:
            raise NonFinite("10 of the last 100 steps were not finite")
        if self.breaks in {(name, seed) for name in names}:
            raise PluginCodeError("rule", "on_batch", where="rule.py:3")
        watch(1.0)
        seconds = steps * 0.1
        loss = 5.0 + 0.1 * seed - 0.01 * steps
        for name in names:
            seconds *= self.cost.get(name, 1.0)
            loss -= self.gain.get(name, 0.0) + 0.001 * ((seed * 7) % 3)
        tokens = steps * plan.tokens_per_step
        curve = (Point(steps, tokens, seconds, loss, None),)
        return Trained(seed, steps, tokens, seconds, tokens / seconds, 1000, curve)

    def keeps(self, plan: Any) -> bool:
        return bool(self.made) and self.made[-1][0] == tuple(one.name for one in plan.active)

    def step_seconds(self, plan: Any, seed: int) -> float:
        return 0.1


PLUGINS = {
    **{"rule": Rule, "extension": Extension, "scale": Scale},
    **{"small": Small, "watcher": Watcher, "compared": Compared},
}


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the program in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def rigged() -> type[FakeStudy]:
    return FakeStudy


@pytest.fixture
def asked() -> Callable[..., tuple[Loaded, tuple[LoadedPlugin, ...]]]:
    def asked(
        *names: str, steps: int = 100, settings: Sequence[str] = ()
    ) -> tuple[Loaded, tuple[LoadedPlugin, ...]]:
        loaded = load(
            preset="tiny",
            assignments=[f"train.steps={steps}", *settings],
            plugins=",".join(names) or None,
            default_preset=lambda: ("tiny", "the test"),
        )
        return loaded, tuple(LoadedPlugin.of(name, PLUGINS[name]()) for name in sorted(names))

    return asked
