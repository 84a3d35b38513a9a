"""Kernel selection: a request, the candidates' answers and the user's ``--kernels`` policy -> a choice.

Nothing falls back silently: a choice records its reason and the reason of each candidate that refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minillm_core.config.kernels import AUTO, REFERENCE, Policy
from minillm_core.errors import BackendError, PluginCodeError
from minillm_core.install import pip_line, unmet


@dataclass(frozen=True)
class Request:
    """What a plan, bound to a device, requires of an op's kernel.

    Facts, each missing while it is unknown:
        attention: ``window`` None, "static" or "dynamic"; ``documents`` bool; ``adjacent`` bool,
            False if a document's tokens may lie apart, which never happens in batches;
            ``grouped`` bool; ``head_dim`` and ``length`` int
        rotate: ``positions`` None, "row" (T,) or "batch" (B, T)
        linear_cross_entropy: ``targets`` int K; ``form`` LossForm; ``weights`` None, "target"
            (K,) or "position" (K, N); ``rows`` N, ``width`` C and ``vocab`` V, int
    """

    op: str
    backend: str  # "torch", "mlx", "numpy"
    device: str  # its kind: "cpu", "cuda", "mps", "metal"
    dtype: str  # compute dtype: "float32", "bfloat16", "float16"
    compiled: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


def serves_all(request: Request) -> str | None:
    """Accept every request."""
    return None


def first(request: Request) -> int:
    """Return 0, the default rank: candidates keep their order."""
    return 0


def lacking(requirement: str) -> str | None:
    """Return why the installed distributions do not meet a requirement, from metadata; None: they do."""
    reason = unmet((requirement,)).get(requirement)
    return reason and f"needs {requirement}: {reason} ({pip_line(requirement)})"


@dataclass(frozen=True)
class Candidate:
    """A kernel that is offered for an op."""

    op: str
    name: str  # as in --kernels op=name
    backends: tuple[str, ...]
    reference: str  # "package.module:function" or f"{__name__}:function", with the op's signature
    devices: tuple[str, ...] = ("cpu", "cuda", "mps", "metal")  # metal, cuda: MLX's GPU too
    accepts: Callable[[Request], str | None] = serves_all  # None: accepted; else the reason
    rank: Callable[[Request], int] = first  # lower is preferred; equal ranks keep their order
    plain: bool = False  # composed of array functions: for --kernels reference and op=reference
    within_tolerance: bool = True  # False: used only if the kernel, or its plugin, is named
    host_masks: bool = False  # attention: documents, and windows that change, may be on the CPU
    requires: tuple[str, ...] = ()  # distributions, as in a pyproject.toml: "liger-kernel>=0.8.5"
    # the option that disables it ("loss=false"), or "-NAME" if it is all that its plugin does; a kernel
    # with such an option is required: a run is refused if it cannot serve
    disable_option: str = ""
    provider: str = "core"
    unless: str = field(default="", repr=False)  # deprecated alias of disable_option

    def __post_init__(self) -> None:
        """Set ``disable_option`` and its alias to the same value."""
        option = self.disable_option or self.unless
        object.__setattr__(self, "disable_option", option)
        object.__setattr__(self, "unless", option)

    @property
    def offered(self) -> bool:
        """Whether it may serve without being named by ``--kernels``."""
        return self.within_tolerance or bool(self.disable_option)

    def of(self, plugin: str) -> Candidate:
        """Return the candidate with its plugin as provider, unless it names one."""
        return replace(self, provider=plugin) if self.provider == "core" else self

    def refusal(self, request: Request) -> str | None:
        """Return why this candidate cannot serve the request; None: it can.

        Raises:
            PluginCodeError: ``accepts`` returned neither None nor a string.
        """
        if request.backend not in self.backends:
            return f"serves {' and '.join(self.backends)}, not {request.backend}"
        if request.device not in self.devices:
            return f"serves {', '.join(self.devices)}, not {request.device}"
        reason = self.accepts(request)
        if not (reason is None or isinstance(reason, str)):
            raise PluginCodeError(
                self.provider,
                self.accepts.__name__,
                did=f"returned {type(reason).__name__} from",
                where=f"kernel {self.op}={self.name}",
                fix="return None if it serves, else the reason why it does not, as a string",
            )
        return reason or next(filter(None, map(lacking, self.requires)), None)

    def load(self) -> Callable[..., Any]:
        """Import the function.

        Raises:
            BackendError: the module or its function cannot be imported.
        """
        module, _, function = self.reference.partition(":")
        try:
            return getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise BackendError(
                f"kernel '{self.name}' of {self.provider} for {self.op} cannot be imported: {error}",
                where=self.reference,
                fix=f"install its requirements, or --kernels {self.op}=<another>",
            ) from error


@dataclass(frozen=True)
class Choice:
    """The kernel chosen for an op, and why the others do not serve."""

    op: str
    kernel: str
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)  # candidate -> its reason


def choose(request: Request, candidates: Iterable[Candidate], policy: Policy = AUTO) -> Choice:
    """Choose a kernel: the one named by the policy, else by the policy's mode.

    ``auto`` takes the first in order of preference that can serve; ``strict`` raises if the preferred
    kernel cannot; ``reference``, as the mode or as the kernel of an op, takes the plain one. Order of
    preference: rank, then the order given.

    Raises:
        BackendError: the named kernel cannot serve, or no kernel can.
    """
    offers = [c for c in candidates if c.op == request.op]
    ours = sorted(
        (c for c in offers if request.backend in c.backends), key=lambda c: c.rank(request)
    )
    refused = {c.name: reason for c in ours if (reason := c.refusal(request)) is not None}
    if policy.named.get(request.op) == REFERENCE:
        return _plain(request, ours, refused)
    if request.op in policy.named:
        return _named(request, [*ours, *offers], policy.named[request.op], refused)
    for c in ours:
        if not c.offered:
            refused.setdefault(
                c.name, f"outside {request.dtype}'s tolerance: only as --kernels {c.op}={c.name}"
            )
    return _by_mode(request, ours, policy, refused)


def choose_all(
    requests: Sequence[Request], candidates: Sequence[Candidate], policy: Policy = AUTO
) -> tuple[Choice, ...]:
    """Choose a kernel for every request.

    Raises:
        BackendError: as :func:`choose` and :func:`check_named_ops`.
    """
    check_named_ops(policy, requests)
    return tuple(choose(request, candidates, policy) for request in requests)


def check_named_ops(policy: Policy, requests: Iterable[Request]) -> None:
    """Check that the policy names only ops that the plan uses.

    Raises:
        BackendError: it names another op.
    """
    asked = sorted(request.op for request in requests)
    for op, name in policy.named.items():
        if op not in asked:
            what = f"no op '{op}' in this plan, so kernel '{name}' cannot serve it"
            raise BackendError(what, where="--kernels", fix=f"one of {', '.join(asked)}")


def load(
    choices: Iterable[Choice], candidates: Sequence[Candidate], backend: str
) -> dict[str, Callable[..., Any]]:
    """Import the chosen kernels: op -> function, as the ops objects take them.

    Raises:
        BackendError: a function cannot be imported.
    """
    by_name = {(c.op, c.name): c for c in reversed(candidates) if backend in c.backends}
    return {choice.op: by_name[choice.op, choice.kernel].load() for choice in choices}


def _named(
    request: Request, offers: Sequence[Candidate], name: str, refused: Mapping[str, str]
) -> Choice:
    chosen = next((c for c in offers if c.name == name), None)
    where, fix = f"--kernels {request.op}={name}", _those_that_serve(request, offers)
    if chosen is None:
        raise BackendError(
            f"no kernel '{name}' for {request.op}",
            where=where,
            fix=f"{fix}; to use a plugin's kernel, name the plugin in --plugins",
        )
    reason = chosen.refusal(request)
    if reason is not None:
        raise BackendError(
            f"kernel '{name}' cannot serve {request.op}: {reason}", where=where, fix=fix
        )
    return Choice(request.op, name, "named by --kernels", dict(refused))


def _plain(request: Request, ours: Sequence[Candidate], refused: Mapping[str, str]) -> Choice:
    """Choose the plain implementation, for ``op=reference``."""
    where = f"--kernels {request.op}={REFERENCE}"
    plain = [c for c in ours if c.plain]
    for c in plain:
        if c.name not in refused:
            return Choice(request.op, c.name, f"the plain one, by {where}", dict(refused))
    what = f"{request.op} has no reference on {request.backend}"
    if plain:
        answers = "; ".join(f"{c.name}: {refused[c.name]}" for c in plain)
        what = f"the reference of {request.op} cannot serve: {answers}"
    raise BackendError(what, where=where, fix=_those_that_serve(request, ours))


def _those_that_serve(request: Request, offers: Sequence[Candidate]) -> str:
    names = ", ".join(dict.fromkeys(c.name for c in offers if c.refusal(request) is None))
    return f"one of: {names or 'none serves'}"


def _by_mode(
    request: Request, ours: Sequence[Candidate], policy: Policy, refused: Mapping[str, str]
) -> Choice:
    ours = [c for c in ours if request.device in c.devices]
    if policy.mode == REFERENCE:
        ours, reason = [c for c in ours if c.plain], "the plain implementation"
    else:
        ours, reason = [c for c in ours if c.offered], "preferred"
    able = next((c.name for c in ours if c.name not in refused), None)
    if policy.mode == "strict" and able and ours[0].name in refused:
        preferred, named = ours[0].name, policy.naming(request.op, able)
        raise BackendError(
            f"the preferred kernel '{preferred}' cannot serve {request.op}: {refused[preferred]}",
            where=f"--kernels {policy}",
            fix=f"--kernels {named} uses '{able}' for this op; "
            f"--kernels {Policy('auto', policy.named)} uses the first that serves, for every op",
        )
    for c in ours:
        if c.name not in refused:
            past = [name for name in refused if name in {o.name for o in ours[: ours.index(c)]}]
            reason = f"the first that serves, after {', '.join(past)}" if past else reason
            return Choice(request.op, c.name, reason, dict(refused))
    answers = "; ".join(f"{name}: {why}" for name, why in refused.items()) or "none is offered"
    raise BackendError(
        f"no kernel serves {request.op} in {request.dtype} on {request.backend}, {request.device}",
        where=answers,
        fix="another dtype, device or backend, or a plugin with a kernel for it",
    )
