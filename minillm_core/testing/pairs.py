"""Beside others: the plan is made and trains, or is refused by name."""

from __future__ import annotations

import numpy as np

from minillm_core.errors import BackendError, MinillmError, PluginError, Refusal
from minillm_core.plan import build_plan
from minillm_core.plugins.discover import installed_plugins
from minillm_core.plugins.manager import LoadedPlugin, check_support, load
from minillm_core.testing.check import Check, Failed, NotApplicable
from minillm_core.testing.subject import Subject, settings

__all__ = ["CHECKS"]

STEPS = 5


def pairs(subject: Subject) -> str:
    """With each partner: the same plan in either order that trains, or a refusal naming both."""
    trained, refused, absent = [], [], []
    names = [entry.name for entry in installed_plugins() if entry.name != subject.name]
    for name in names[: subject.pairs]:
        backend = subject.backends[0]
        try:
            (other,) = load([name])
            check_support([other], backend, "cpu")
            build_plan(settings(), [other])
        except MinillmError as error:
            absent.append(f"{name} ({error.what})")
            continue
        (trained if _together(subject, other, backend) else refused).append(name)
    if not trained and not refused:
        raise NotApplicable(f"no other plugin can be run here: {', '.join(absent) or 'none'}")
    told = [("trained", trained), ("refused by name", refused), ("not run", absent)]
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in told if names)


def _together(subject: Subject, other: LoadedPlugin, backend: str) -> bool:
    """Whether the pair trains; False where it is refused as it should be."""
    both = [subject.loaded, other]
    try:
        plan = build_plan(settings(), both)
        turned = build_plan(settings(), both[::-1])
    except (BackendError, PluginError):
        raise
    except Refusal as refusal:
        missing = [one.name for one in both if one.name not in str(refusal)]
        if missing:
            raise Failed(
                f"beside {other.name} it is refused without naming {missing[0]}: {refusal.what}",
                cause="name the slot's owner in the error",
            ) from refusal
        return False
    if plan.hash != turned.hash:
        raise Failed(
            f"the plan with {other.name} depends on the order of --plugins",
            cause="a hook looks at what others did before it",
        )
    run = subject.trainer(plan, backend)
    losses = subject.train(run, plan, subject.batches(plan, STEPS, other))
    if not np.all(np.isfinite(losses)):
        raise Failed(f"beside {other.name} the losses are {losses}", cause="see it with --plugins")
    return True


CHECKS = (Check("pairs", "beside others it trains, or is refused by name", pairs, ("trains",)),)
