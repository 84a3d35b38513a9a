"""The contract kit: is this plugin right, on every backend, and beside every other plugin?

A plugin's whole conformance test::

    from minillm_core.testing import conformance

    test_contract = conformance("my_trick")

What there is, from the outside in:

- :func:`run_module` and :func:`one_step` are for tests of an author's own, against a reference: a
  module alone, and a training step with all that goes in and comes out, as NumPy arrays.
- :func:`conformance` makes one pytest test a check, so that each can be run alone by its name.
- :func:`check_plugin` runs the checks in order, tells a callback of each, and gives a report: data.
- ``CHECKS`` (registry.py) is a tuple in the order of cost. A check is a name, one line of what it
  proves, the checks that it builds on, and a function of a subject that returns the numbers it
  found, or raises ``Failed`` (numbers, likely cause) or ``NotApplicable`` (the reason).
- A ``Subject`` (subject.py) is the plugin, its options, the backends to check it on, and a model
  that is small and odd in every size; plans are made once and kept.

One file a group of checks, each read on its own: hygiene, plan, numbers, training, state,
decoding, export, frameworks, pairs. Where a check builds on one that failed it is not run and says so: one fault in a
plugin shows as one failure.

Two rules hold within. What a plugin does on import and to a process is looked at in processes of
their own (probe.py), since one can import a thing for the first time only once. And every number
has an oracle that shares no code with what it judges: NumPy in float64 for losses, central
differences of it for gradients, the whole pass for decoding, the uninterrupted run for a resume.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm_core.testing.check import Check, Outcome
    from minillm_core.testing.contract import conformance
    from minillm_core.testing.modules import GEOMETRY, numpy_ops, run_module
    from minillm_core.testing.registry import CHECKS
    from minillm_core.testing.runner import Report, check_plugin
    from minillm_core.testing.steps import Step, one_step

__all__ = [
    "CHECKS",
    "GEOMETRY",
    "Check",
    "Outcome",
    "Report",
    "Step",
    "check_plugin",
    "conformance",
    "numpy_ops",
    "one_step",
    "run_module",
]

_HOME = {
    "CHECKS": "registry",
    "GEOMETRY": "modules",
    "Check": "check",
    "Outcome": "check",
    "Report": "runner",
    "Step": "steps",
    "check_plugin": "runner",
    "conformance": "contract",
    "numpy_ops": "modules",
    "one_step": "steps",
    "run_module": "modules",
}
"""Public name -> its module, imported when it is first used: pytest imports this package always."""


def __getattr__(name: str) -> Any:
    """Import a public name.

    Raises:
        AttributeError: the name is not public.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'minillm_core.testing' has no attribute '{name}'")
    return getattr(import_module(f"minillm_core.testing.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*__all__]
