"""Plan + machine -> Binding: dtype, compilation, and the kernel of every op with the reason.

:func:`verdicts` chooses the kernels and finds the reasons to refuse a run. :func:`bind` raises them,
``minillm plan`` checks them without a device, and ``minillm plugins why`` prints them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from minillm_core.backends.base import Backend, Binding, Trainer
from minillm_core.backends.candidates import CORE
from minillm_core.backends.detect import Detected
from minillm_core.backends.ranks import ALONE, Ranks
from minillm_core.config.kernels import Policy, parse_policy
from minillm_core.errors import BackendError
from minillm_core.nn.node import Node, Setting, calls_of
from minillm_core.ops.contract import CONTRACTS
from minillm_core.ops.select import Candidate, Choice, Request, check_named_ops, choose
from minillm_core.plan.slots import Holder, Refused, SlotReport
from minillm_core.plugins.attribution import attribute_errors

if TYPE_CHECKING:
    from minillm_core.plan import Plan

Offers = Sequence[tuple[str, Candidate]]
"""Kernels of plugins: (plugin, candidate)."""


def bind(detected: Detected, plan: Plan) -> tuple[Binding, tuple[Candidate, ...]]:
    """Make every decision that is not part of the plan's hash, without importing a framework.

    Raises:
        BackendError: no kernel can serve an op, a kernel named by ``--kernels`` cannot, no kernel of a
            plugin can, or the framework has no deterministic mode on this device.
    """
    config, kind = plan.config, detected.device.partition(":")[0]
    if config.deterministic and detected.backend == "mlx" and kind != "cpu":
        what = "MLX has no deterministic mode on a GPU: two runs differ in the last bits"
        fix = "--backend torch, --device cpu, or leave --deterministic out"
        raise BackendError(what, where="--deterministic", fix=fix)
    found = verdicts(plan, detected)
    binding = Binding(
        backend=detected.backend,
        device=detected.device,
        device_name=detected.device,
        reason=detected.reason,
        dtype=found.requests[0].dtype,
        compile=found.requests[0].compiled,
        checkpointing=config.train.checkpointing,
        deterministic=config.deterministic,
        kernels=found.choices(),
        inputs=found.inputs(plan),
        host_masks=any(one.host_masks for one in found.attention()),
        notes=found.notes,
    )
    return binding, found.candidates


def create_backend(
    detected: Detected, plan: Plan, *, compiler: Callable[..., Any] | None = None
) -> Backend:
    """Bind the plan and create the framework's backend, which imports the framework.

    Args:
        detected: the backend and device.
        plan: the plan to bind.
        compiler: replaces ``torch.compile`` for compiled steps; torch only.

    Raises:
        BackendError: as :func:`bind`, or the framework finds no such device.
    """
    binding, candidates = bind(detected, plan)
    if detected.backend == "torch":
        if detected.device == "cpu":
            # Read once, when torch loads OpenMP. By default its threads spin while they wait for the
            # slowest thread: when another process held a core, that cut the remaining speed to a
            # sixth (docs/experiments.md).
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from minillm_core.backends.torch.backend import TorchBackend

        return TorchBackend(binding, candidates, compiler=compiler)
    from minillm_core.backends.mlx.backend import MLXBackend

    return MLXBackend(binding, candidates)


def create_trainer(
    plan: Plan,
    backend: str,
    *,
    seed: int = 0,
    device: str = "cpu",
    compiler: Callable[..., Any] | None = None,
    ranks: Ranks = ALONE,
) -> Trainer:
    """Create a plan's model and optimizer on a device, for a custom training loop.

    ::

        run = trainer(plan, "torch")
        values = plan.values(0.5)  # of the schedule, half way
        result = run.read(run.step([batch], values, supervised=int((batch["labels"] >= 0).sum())))
        run.arrays()["model.head.weight"]  # float32 (V, C)

    Batches hold int32 (B, T) arrays ``ids``, ``labels``, ``documents`` and ``positions``, and what
    the plan's ``batch_fields`` declare.

    Args:
        plan: the plan.
        backend: ``torch`` or ``mlx``; it is imported.
        seed: the seed of the initial values.
        device: ``cpu``, ``cuda``, ``mps`` or ``gpu``.
        compiler: as for :func:`create_backend`.
        ranks: the processes that train together, each of which calls this: see ``Backend.trainer``.

    Raises:
        BackendError: no kernel can serve an op here, or the framework finds no such device.
    """
    return create_backend(Detected(backend, device, "inspection"), plan, compiler=compiler).trainer(
        plan, seed, ranks=ranks
    )


# The decision


class Conflict(NamedTuple):
    """A plugin's kernels because of which a run is refused."""

    owner: str
    ops: tuple[str, ...]
    error: BackendError


@dataclass(frozen=True)
class Verdicts:
    """The kernel of each op of a plan on a machine, and the reasons to refuse a run there."""

    requests: tuple[Request, ...]
    candidates: tuple[Candidate, ...]  # of the plugins, then of the core
    policy: Policy
    outcomes: Mapping[str, Choice | BackendError]  # by op
    conflict: Conflict | None  # the first one, if every op has a kernel
    notes: tuple[str, ...]  # one for each kernel of a plugin that is passed over

    def choices(self) -> tuple[Choice, ...]:
        """Return the kernel of every op.

        Raises:
            BackendError: the first reason to refuse a run.
        """
        check_named_ops(self.policy, self.requests)
        conflicts = (self.conflict.error,) if self.conflict else ()
        for outcome in (*self.outcomes.values(), *conflicts):
            if isinstance(outcome, BackendError):
                raise outcome
        return tuple(one for one in self.outcomes.values() if isinstance(one, Choice))

    def attention(self) -> list[Candidate]:
        """Return the kernel that was chosen for attention; empty if the plan has none."""
        chosen = {one.kernel for one in self.choices() if one.op == "attention"}
        return [c for c in self.candidates if c.op == "attention" and c.name in chosen]

    def inputs(self, plan: Plan) -> tuple[str, ...]:
        """Return the staged windows that are inputs of torch's compiled step, so that stages share a graph.

        These are the windows that only kernels read, if the attention kernel accepts a window that changes
        between steps. MLX traces within a second, and its kernels are faster with a constant.
        """
        asked = [one for one in self.requests if one.op == "attention" and one.backend == "torch"]
        changing = [replace(one, facts={**one.facts, "window": "dynamic"}) for one in asked]
        takes = any(k.host_masks or not k.refusal(r) for k in self.attention() for r in changing)
        read = [(s.window.value, s.core) for s in plan.spec.attentions.values() if s.window]
        ours = {value for value, _ in read if takes} - {value for value, core in read if core}
        return tuple(name for name in plan.staged if name in ours)


def verdicts(plan: Plan, machine: Detected, *, installed: bool = True) -> Verdicts:
    """Choose the kernel of each op of the plan on a machine; report conflicts instead of raising them.

    Args:
        plan: the plan, with the kernels that its plugins offer and its ``--kernels``.
        machine: the backend and device to run on.
        installed: whether to check the distributions that kernels require; False: assume that they
            are installed, since a plan may be for another machine.

    Raises:
        ConfigError: ``--kernels`` is not a valid policy.
    """
    requests, candidates = requests_here(machine, plan)
    offers: Offers = plan.candidates
    if not installed:
        candidates = tuple(map(_as_installed, candidates))
        offers = [(owner, _as_installed(candidate)) for owner, candidate in offers]
    policy = parse_policy(plan.config.kernels)
    outcomes: dict[str, Choice | BackendError] = {}
    for request in requests:
        try:
            outcomes[request.op] = choose(request, candidates, policy)
        except BackendError as error:
            outcomes[request.op] = error
    choices = [outcome for outcome in outcomes.values() if isinstance(outcome, Choice)]
    conflict, notes = None, ()
    if len(choices) == len(requests):
        conflict = next(kernel_conflicts(offers, CORE[machine.backend], requests, choices), None)
        notes = () if conflict else kernel_notes(offers, requests, choices)
    return Verdicts(requests, candidates, policy, outcomes, conflict, notes)


def kernel_preflight(plan: Plan, detected: Detected | None = None) -> tuple[str, ...]:
    """Check a plan's kernels in a dry run, as binding does, but without requiring installed packages.

    Args:
        plan: the plan.
        detected: the backend and device to run on; None: unknown, so that only required kernels are
            checked, each on the device that it is for.

    Returns:
        A note for each kernel of a plugin that would be passed over.

    Raises:
        BackendError: no kernel can serve an op, a kernel named by ``--kernels`` cannot or is unknown,
            no kernel of a plugin can, or a required kernel cannot.
    """
    with attribute_errors(plan.active, "while kernels are chosen"):
        for owner, candidate in plan.candidates:
            if candidate.disable_option:
                _check_required_kernel(plan, owner, candidate)
        if detected is None:
            return ()
        found = verdicts(plan, detected, installed=False)
        found.choices()
        return found.notes


def _check_required_kernel(plan: Plan, owner: str, candidate: Candidate) -> None:
    """Check that a required kernel can serve on the device that it is for; raises BackendError."""
    train, backend = plan.config.train, candidate.backends[0]
    requests = requests_of(
        plan,
        backend=backend,
        device=candidate.devices[0],
        dtype="bfloat16" if train.dtype == "auto" else train.dtype,
        compiled=train.compile != "off",
    )
    asked = {request.op: request for request in requests}
    if candidate.op not in asked:
        raise _unused_op_error(owner, candidate)
    if reason := candidate.accepts(asked[candidate.op]):
        others = any(
            choose(asked[one.op], (_as_installed(one), *CORE[backend])).kernel == one.name
            for plugin, one in plan.candidates
            if plugin == owner and one.op in asked and one is not candidate
        )
        instead = choose(asked[candidate.op], CORE[backend]).kernel
        raise _required_kernel_error(owner, candidate, reason, instead, others=others)


def _as_installed(candidate: Candidate) -> Candidate:
    return replace(candidate, requires=())


# Kernels of plugins: each one that does not serve is reported


def kernel_conflicts(
    offers: Offers,
    core: Sequence[Candidate],
    requests: Sequence[Request],
    choices: Sequence[Choice],
) -> Iterator[Conflict]:
    """Yield the conflicts of plugins' kernels because of which a run is refused.

    A required kernel for an op that the plan does not use; a kernel with the name of a core kernel; a
    required kernel that cannot serve; and a plugin of which no kernel serves, so that it would have no
    effect.

    Args:
        offers: the plugins' candidates.
        core: the core's candidates.
        requests: the plan's requests.
        choices: the kernel chosen for each request.
    """
    asked = {request.op: request for request in requests}
    chosen = {choice.op: choice for choice in choices}
    taken = {(candidate.op, candidate.name) for candidate in core}
    serving = {owner for owner, c in offers if c.op in chosen and chosen[c.op].kernel == c.name}
    idle: dict[str, list[Candidate]] = {}
    for owner, candidate in offers:
        op, error = candidate.op, None
        if op not in asked and candidate.disable_option:
            error = _unused_op_error(owner, candidate)
        elif (op, candidate.name) in taken:
            error = BackendError(
                f"plugin '{owner}' provides a kernel with the name of a core kernel",
                where=_key(candidate),
                fix="its authors should give it another name; or leave the plugin out",
            )
        elif candidate.disable_option and (reason := candidate.refusal(asked[op])):
            instead, others = chosen[op].kernel, owner in serving
            error = _required_kernel_error(owner, candidate, reason, instead, others=others)
        elif op not in chosen or chosen[op].kernel != candidate.name:
            idle.setdefault(owner, []).append(candidate)
        if error:
            yield Conflict(owner, (op,), error)
    for owner, kernels in idle.items():
        if owner not in serving:
            ops = tuple(candidate.op for candidate in kernels)
            yield Conflict(owner, ops, _idle_plugin_error(owner, kernels, asked, chosen))


def kernel_notes(
    offers: Offers, requests: Sequence[Request], choices: Sequence[Choice]
) -> tuple[str, ...]:
    """Return a note for each kernel of a plugin that was passed over for a kernel of another one."""
    asked = {request.op: request for request in requests}
    chosen = {choice.op: choice for choice in choices}
    serving = {(o, c.op) for o, c in offers if c.op in chosen and chosen[c.op].kernel == c.name}
    idle = sorted(
        (owner, _key(c), _idle_reason(c, asked, chosen))
        for owner, c in offers
        if (owner, c.op) not in serving
    )
    return tuple(
        f"kernel {key} of plugin {owner} does not serve: {why}" for owner, key, why in idle
    )


def _key(candidate: Candidate) -> str:
    """Return a kernel's name as in ``--kernels``: op=name."""
    return f"{candidate.op}={candidate.name}"


def _required_kernel_error(
    owner: str, candidate: Candidate, reason: str, instead: str, *, others: bool
) -> BackendError:
    """Return the error for a required kernel that cannot serve.

    Args:
        owner: the plugin.
        candidate: its kernel.
        reason: why the kernel cannot serve.
        instead: the kernel that would serve without it.
        others: whether other kernels of the plugin serve, so that this one can be disabled alone.
    """
    remedy = (
        f"{owner}.{candidate.disable_option} leaves the op to '{instead}'; or leave the plugin out"
    )
    alone = f"leave the plugin out: '{instead}' serves instead; none of its kernels can"
    return BackendError(
        f"plugin '{owner}' must serve {candidate.op}, but cannot: {reason}",
        where=_key(candidate),
        fix=remedy if others else alone,
    )


def _unused_op_error(owner: str, candidate: Candidate) -> BackendError:
    option = candidate.disable_option
    remedy = "" if option.startswith("-") else f"{owner}.{option}, or "
    return BackendError(
        f"plugin '{owner}' brings a kernel for '{candidate.op}', an op that this plan does not use",
        where=_key(candidate),
        fix=f"{remedy}leave the plugin out",
    )


def _idle_reason(
    candidate: Candidate, asked: Mapping[str, Request], chosen: Mapping[str, Choice]
) -> str:
    if candidate.op not in asked:
        return "no part of this plan computes the op"
    choice = chosen[candidate.op]
    return candidate.refusal(asked[candidate.op]) or f"{choice.kernel} does, {choice.reason}"


def _idle_plugin_error(
    owner: str,
    kernels: Sequence[Candidate],
    asked: Mapping[str, Request],
    chosen: Mapping[str, Choice],
) -> BackendError:
    """Return the error for a plugin of which no kernel serves."""
    reasons = {_key(c): _idle_reason(c, asked, chosen) for c in kernels}
    able = [_key(c) for c in kernels if c.op in asked and c.refusal(asked[c.op]) is None]
    ops = dict.fromkeys(c.op for c in kernels if c.op in chosen)
    served = ", ".join(f"{op} by {chosen[op].kernel}" for op in ops)
    name = f"name one, as in --kernels {able[0]}, or " if able else ""
    return BackendError(
        f"none of the kernels that plugin '{owner}' brings {'serves' if able else 'can serve'}",
        where="; ".join(f"{key}: {reason}" for key, reason in reasons.items()),
        fix=f"{name}leave the plugin out{served and f': without it, {served}'}",
    )


# The plan's requests, for a known device


def requests_here(
    detected: Detected, plan: Plan
) -> tuple[tuple[Request, ...], tuple[Candidate, ...]]:
    """Return the plan's requests on this device, and all candidates: plugins', then the core's."""
    train, kind = plan.config.train, detected.device.partition(":")[0]
    fast = kind != "cpu"
    dtype = ("bfloat16" if fast else "float32") if train.dtype == "auto" else train.dtype
    # By default but on a CPU with torch, where inductor takes a minute to start.
    compiled = {"on": True, "off": False}.get(train.compile, fast or detected.backend != "torch")
    if detected.backend == "mlx" and kind == "gpu":  # kernels name the kind of GPU
        kind = "metal" if sys.platform == "darwin" else "cuda"
    requests = requests_of(
        plan, backend=detected.backend, device=kind, dtype=dtype, compiled=compiled
    )
    return requests, (*(c for _, c in plan.candidates), *CORE[detected.backend])


def requests_of(
    plan: Plan,
    *,
    backend: str = "numpy",
    device: str = "cpu",
    dtype: str = "float32",
    compiled: bool = False,
) -> tuple[Request, ...]:
    """Build one request per op, with the facts of the most demanding layer.

    Args:
        plan: the plan.
        backend: torch, mlx or numpy.
        device: the kind of device: cpu, cuda, mps, metal.
        dtype: the compute dtype.
        compiled: whether the step is compiled.
    """
    loss, geometry = plan.spec.loss, plan.spec.geometry
    specs = list(plan.spec.attentions.values())
    asking = [spec for spec in specs if spec.core is None or "attention" in calls_of(spec.core)]
    masked = [*asking, *(block.seen for block in plan.spec.blocks)]
    windows = {_window(plan, spec.window) for spec in masked if spec.window is not None}
    by_position = (
        any(one.name in plan.on_batch and not one.plugin.manifest.unweighted for one in plan.active)
        or loss.weights
        or any(one.weight_field for one in loss.targets)
        or any(one.name == "weights" for one in plan.sourcing.fields)
    )
    facts: dict[str, dict[str, Any]] = {op: {} for op in CONTRACTS}  # logits are for generation
    facts |= {
        "rotate": {"positions": "batch" if any(spec.rope.positions for spec in specs) else None},
        "attention": {
            "window": min(windows, default=None),  # "dynamic" if any layer's is
            "documents": any(spec.documents is not None for spec in masked),
            "grouped": geometry.kv_heads != geometry.heads,
            "head_dim": geometry.head_dim,
            "length": geometry.positions,
        },
        "linear_cross_entropy": {
            "targets": 1 + len(loss.targets),
            "form": loss.form,
            "weights": "position" if by_position else "target" if loss.targets else None,
            "rows": max(shape.rows * shape.seq_len for shape in plan.course),
            "width": plan.config.model.dim,
            "vocab": plan.config.model.vocab,
        },
        "gram": {
            "matrices": any(
                stage.needs == "matrix" for one in plan.groups for _, _, stage in one.rule.stages
            )
        },
    }
    if not asking and not any(isinstance(one.attention, Node) for one in plan.spec.blocks):
        del facts["attention"]
    return tuple(Request(op, backend, device, dtype, compiled, its) for op, its in facts.items())


def _window(plan: Plan, window: Setting) -> str:
    """Return the kind of a window for a request; a staged one counts as static, since it can be baked in."""
    return "static" if window.value is None or window.value in plan.staged else "dynamic"


# The same decisions, for ``plugins why``


def kernel_answers(plan: Plan, detected: Detected | None) -> tuple[SlotReport, ...]:
    """Return a report of each op's kernel as a slot, ``kernel[op]``: its holder, and the refused candidates.

    Args:
        plan: the plan with the ops.
        detected: the backend and device to run on; None: no backend is installed, so nothing is chosen.

    Raises:
        ConfigError: ``kernels`` is not a valid policy.
    """
    if detected is None:
        unknown = Holder("core", "not chosen", "no backend is installed here")
        return tuple(_report(request.op, unknown) for request in requests_of(plan))
    found = verdicts(plan, detected)
    owners = {(c.op, c.name): owner for owner, c in plan.candidates}
    reports = []
    for op, outcome in found.outcomes.items():
        offers = [c for c in found.candidates if c.op == op and detected.backend in c.backends]
        if isinstance(outcome, BackendError):
            reports.append(_report(op, None, _clash(sorted(c.name for c in offers), outcome)))
            continue
        holder = Holder(owners.get((op, outcome.kernel), "core"), outcome.kernel, outcome.reason)
        refused = [*_others(outcome, offers, found.policy)]
        if found.conflict and op in found.conflict.ops:
            refused.append(_clash([found.conflict.owner], found.conflict.error))
        reports.append(_report(op, holder, *refused))
    return tuple(reports)


def _report(op: str, holder: Holder | None, *refused: Refused) -> SlotReport:
    also, held = (op, f"kernels[{op}]"), (holder,) if holder else ()
    return SlotReport(f"kernel[{op}]", "query", held, refused, also=also)


def _clash(names: Sequence[str], error: BackendError) -> Refused:
    return Refused(tuple(names), f"{error.what} ({error.where or ''})", error.fix)


def _others(choice: Choice, offers: Sequence[Candidate], policy: Policy) -> Iterator[Refused]:
    """Yield the candidates that do not serve, each with its reason."""
    why = "another was named" if choice.op in policy.named else f"{choice.kernel} is preferred"
    for candidate in offers:
        if candidate.name in choice.refused:
            yield Refused((candidate.name,), choice.refused[candidate.name], how="cannot serve")
        elif candidate.name != choice.kernel:
            yield Refused((candidate.name,), f"usable, but {why}", how="passed over")
