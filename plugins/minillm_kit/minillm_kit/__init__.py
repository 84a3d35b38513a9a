"""The contract kit: conformance checks of a plugin on every backend and beside other plugins.

A plugin's whole conformance test::

    from minillm_kit import conformance

    test_contract = conformance("my_trick")

The public entry points, then the internals:

- :func:`run_module` and :func:`one_step` (helpers.py) are for an author's own tests against a
  reference: a single module, and a training step with all its inputs and outputs, as NumPy arrays.
  ``from minillm_kit import small, stepping``: small plans and their models' outputs (small.py), and
  optimizer updates stage by stage (stepping.py), both in NumPy float64.
- :func:`conformance` (pytest_plugin.py) creates one pytest test per check, so that each can be run
  alone by its name.
- :func:`check_plugin` (runner.py) runs the checks in order, with a callback before each, and returns
  a report. ``minillm plugins check`` (plugins_check.py) prints it.
- ``CHECKS`` (runner.py) is a tuple in the order of cost. A check has a name, a one-line description of
  the property, a function of a subject that returns the numbers it found, or raises ``Failed`` (numbers,
  likely cause) or ``NotApplicable`` (the reason), and the checks that it depends on.
- A ``Subject`` (subject.py) holds the plugin, its options, the backends to check, and a model
  that is small and odd in every size; plans are cached. A reference model
  (``loss.reference``) is replaced by a stand-in of these sizes: no run is needed.
- :class:`NumPyFramework`, :func:`materialise` and :class:`NumPyOps` (oracle.py) are the oracle: a
  plan's model in NumPy float64, forward pass only.

A check that depends on a failed one is not run, with a note: one fault in a plugin gives one
failure. A plugin that extends another plugin's rule is checked beside it; "without it" then means
with that other plugin alone. Each file is one self-contained group of checks:

hygiene.py, before anything is planned
    - ``api``: the class statement names this hook API; read with ``ast``, nothing is imported.
    - ``loads``: it is found, imported, takes its options, and implements a hook.
    - ``manifest``: the manifest that ``plugins list`` reads in the source equals that of the imported class.
    - ``options``: they survive a round trip through JSON and TOML; an unknown one is refused.
    - ``import``: in a fresh process, no framework is imported, nothing is written or printed, no socket
      or process is made, no environment, generator or attribute is changed.
plan.py
    - ``plans``: the small model can be planned with it.
    - ``declared``: parameters, updates, schedules and settings that it does not claim are as
      without it, and no slot is filled in another's name.
    - ``deterministic``: the same plan twice, and in a process with another hash seed.
    - ``traces``: planning changes nothing in a process and imports no framework.
    - ``off``: after a plan with it, the plan without it is byte for byte the plain one.
hooks.py, during training
    - ``batches``: ``on_batch`` in phases train, eval and decode: ids in range, declared fields with
      their dtype and shape and no others, the same again for the same batch, which itself stays as it
      was; only train drops and reweights, and not every label; in decode a column never depends on
      later ones. The bytes of its token ids are like a tokenizer's.
    - ``events``: ``on_event`` takes the events of a run of 12 steps, one of each kind among them,
      with None in every field that may be None, and changes none; ``on_evaluated`` returns a verdict,
      without a tokenizer and with one.
kernels/
    - ``kernel``: each kernel that it brings, alone, on odd sizes, in memory full of NaN and again with
      other inputs: outputs and gradients are the op's in float64, to the contract's tolerance. On
      torch no number of an array is read on the host.
      ``minillm kernels check`` walks over the same cases, on a GPU too.
numbers.py, updates.py: against NumPy in float64, at initial weights perturbed by 0.1, so
that parameters starting at 0 have an effect
    - ``identity``: before the first step the logits are the plain model's, where the plugin declares it.
    - ``forward``: losses and logits of each backend in float32 and bfloat16, a bound for each dtype;
      in a second model with odd sizes, one key-value head and a tied head.
    - ``slopes``: each parameter's gradient is the slope of NumPy's loss along a random direction, by
      central differences; gradients in bfloat16 are those of float32, coarser.
    - ``updates``: from known gradients, a third step changes parameters and state as the same
      stages do in NumPy; in ``forward`` and here a write to an argument is found there, as on torch.
training.py, decoding.py
    - ``repeats``: a forward pass, and the first step of a new model, twice: equal to the bit, so that
      state in a global is named before the numbers that it spoils.
    - ``trains``: five steps, every loss finite.
    - ``evidence``: its parts of the plan are observed to be active.
    - ``clean``: planning and steps leave the per-process state of torch and MLX (default dtype and
      device, seeds, flags, threads, functions and classes) as it was.
    - ``resumes``: saved, loaded and trained on is the uninterrupted run, to the bit.
    - ``causal``: later tokens change nothing earlier: features in float64, one column's loss in
      float32, by more than rounding.
    - ``decodes``: with the KV cache, fed in pieces, the logits are those of the whole sequence.
export.py
    - ``exports``: its exported tensors give its logits in the published Llama or Qwen3; or a model of
      neither, in Transformers by the modeling file that is written for it, in a process that cannot
      import minillm (elsewhere.py; not without torch and transformers).
frameworks.py
    - ``parity``: torch and MLX start from the same bits and have the same gradients.
    - ``pure``: a step sets no attribute of its modules; activation checkpointing of blocks changes
      neither gradients nor state.
    - ``alike``: five steps with its own optimizer are the same on both, state included.
    - ``compiles``: compiled steps are one graph (on a CPU only torch's tracing: aot_eager), which
      reads no number of an array on the host, with the losses and moments of eager steps.
mesh.py
    - ``mesh``: two processes over gloo, with very different numbers of labels, train as one: the same
      losses, updates and State, by whole micro-batches and by rows, or a refusal by name. Skipped
      without minillm-mesh, without torch and outside Linux; MLX's processes are tested in
      minillm-mesh, since its ring may hang.
pairs.py
    - ``pairs``: with each partner the plan is the same in either order and trains five steps on
      every backend, or the refusal names both. First the partners that are likely to conflict:
      refused beside it, in its slots, at its sites. A partner whose package, device or account is
      missing, or that fails without the plugin too, is listed as not run.

Two rules apply. The effects of a plugin's import and on a process are observed in separate
processes (probe.py), since a module is imported for the first time only once. And every number has
an oracle that shares no code with the code under test: NumPy in float64 for losses and updates,
central differences of it for gradients, published definitions for exports, the whole pass for
decoding, the uninterrupted run for a resume. Limits: kernels that need a GPU are checked only where
one is present, MLX's random key may change during steps, and files written by hooks are not checked.

From the core the kit imports :mod:`minillm_core`, :mod:`minillm_core.commands` and
:mod:`minillm_core.inspection`, and nothing beneath them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm_kit.check import Check, Outcome
    from minillm_kit.helpers import GEOMETRY, Step, numpy_ops, one_step, run_module
    from minillm_kit.oracle import NumPyFramework, NumPyOps, last_logits, materialise
    from minillm_kit.pytest_plugin import conformance
    from minillm_kit.runner import CHECKS, Report, check_plugin

__all__ = [
    "CHECKS",
    "GEOMETRY",
    "Check",
    "NumPyFramework",
    "NumPyOps",
    "Outcome",
    "Report",
    "Step",
    "check_plugin",
    "conformance",
    "last_logits",
    "materialise",
    "numpy_ops",
    "one_step",
    "run_module",
]

_HOME = {
    "check": ("Check", "Outcome"),
    "helpers": ("GEOMETRY", "Step", "numpy_ops", "one_step", "run_module"),
    "oracle": ("NumPyFramework", "NumPyOps", "last_logits", "materialise"),
    "pytest_plugin": ("conformance",),
    "runner": ("CHECKS", "Report", "check_plugin"),
}
"""Module -> its public names, imported lazily, as pytest always imports this package."""


def __getattr__(name: str) -> Any:
    """Import a public name.

    Raises:
        AttributeError: the name is not public.
    """
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"minillm_kit.{module}"), name)
    raise AttributeError(f"module 'minillm_kit' has no attribute '{name}'")


def __dir__() -> list[str]:
    """List the public names, for completion."""
    return [*__all__]
