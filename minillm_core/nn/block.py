"""One transformer block: attention and MLP, each added to the residual stream at a site.

Blocks are pure: ``f(x, *reads) -> (x, *taps, *streams, *terms, *statistics)``, one flat tuple, sorted
within each kind. A block writes to no outer context and captures no array: activation checkpointing
would drop the gradients of arrays that are neither arguments nor results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minillm_core.errors import PlanError
from minillm_core.nn.attention import TAPPED, UNMASKED, Attention, AttentionSpec, Masks
from minillm_core.nn.layers import RMSNorm, SwiGLU
from minillm_core.nn.module import Module
from minillm_core.nn.node import MASKING, ModelShape, Node, Scope, inputs_of
from minillm_core.nn.residual import Site, SiteSpec

GATHERED = "loss.gather"
"""Batch entry: the positions of the loss, int32 (S,), sorted and distinct. No field can have this name."""

COLUMNS = "row.columns"
"""Batch entry under context parallelism: the position of each column in its row, int32 (B, T)."""

LABELS = "rows.labels"
"""Batch entry if processes divide a micro-batch's rows, float32 (B, T), one number repeated: the number of
labels in the micro-batch, divided by the number of parts."""

PARTS = (COLUMNS, LABELS)
"""Batch entries that exist only if several processes divide a batch; no plan contains them."""

INPUTS = ("attention", "attention.q", "attention.k", "attention.v", "mlp")
"""Parts of a layer whose input may be a separate sum of sources instead of the residual stream."""


@dataclass(frozen=True)
class Omitted:
    """A claim that leaves a module out: no attention, no MLP, no norm."""

    owner: str


@dataclass(frozen=True)
class BlockSpec:
    """One block, resolved."""

    attention: AttentionSpec | Node | Omitted
    mlp: Node | Omitted | None = None  # None: the plain SwiGLU
    attention_norm: Node | Omitted | None = None  # None: RMSNorm
    mlp_norm: Node | Omitted | None = None
    site_in: SiteSpec | None = None  # None: carry alone
    site_mid: SiteSpec | None = None  # None: carry + sublayer
    site_out: SiteSpec | None = None
    taps: tuple[str, ...] = ()  # of this block's "in", "mid", "out", "attention.v" ..., sorted
    apart: tuple[SiteSpec, ...] = ()  # inputs of parts (see INPUTS) that replace the stream
    seen: Masks = UNMASKED  # the masks of a plugin's own attention

    @property
    def core_attention(self) -> AttentionSpec | None:
        """The core's attention with its slots; None: a plugin's own attention, or no attention."""
        return self.attention if isinstance(self.attention, AttentionSpec) else None

    @property
    def computed(self) -> set[str]:
        """The names of the streams that this block computes."""
        sites = filter(None, (self.site_in, self.site_mid, self.site_out, *self.apart))
        return {node.name for site in sites for node in site.computed}

    def reads(self) -> tuple[str, ...]:
        """Return the names of the block's inputs besides x, sorted: exactly those that its parts declare."""
        read = inputs_of(self)
        return tuple(sorted(read | ({MASKING} if "documents" in read else set())))


def norm_of(geometry: ModelShape, claim: Node | Omitted | None) -> Module | None:
    """Build the norm before a sublayer: RMSNorm, a plugin's norm, or none."""
    if isinstance(claim, Omitted):
        return None
    return RMSNorm(geometry) if claim is None else claim.make(geometry)


def normed(norm: Any, x: Any, scope: Scope) -> Any:
    """Normalise x (B, T, C) by the core's norm, a plugin's norm, or not at all."""
    if norm is None:
        return x
    return scope.apply(norm, {"x": x}, like=("x",)) if hasattr(norm, "owner") else norm(x)


def joined(site: Site | None, x: Any, y: Any, scope: Scope) -> Any:
    """Add the sublayer's y (B, T, C), or None, to the stream x (B, T, C) at a site."""
    if site is not None:
        return site(x, y, scope)
    return x if y is None else x + y


class Block(Module):
    """A block: x (B, T, C) and reads -> (x, *taps, *streams, *terms, *statistics)."""

    def __init__(self, geometry: ModelShape, spec: BlockSpec) -> None:
        super().__init__()
        self.inputs = spec.reads()
        self.taps = spec.taps
        self.attention_norm = self.mlp_norm = None
        self.attention = self.mlp = None
        self.plain_attention, self.seen = spec.core_attention is not None, spec.seen
        if not isinstance(spec.attention, Omitted):
            self.attention_norm = norm_of(geometry, spec.attention_norm)
            if isinstance(spec.attention, Node):
                self.attention = spec.attention.make(geometry)
            else:
                inner = tuple(name for name in TAPPED if f"attention.{name}" in spec.taps)
                self.attention = Attention(geometry, spec.attention, inner)
        if not isinstance(spec.mlp, Omitted):
            self.mlp_norm = norm_of(geometry, spec.mlp_norm)
            if spec.mlp is None:
                self.mlp = SwiGLU(geometry)
            else:
                self.mlp = spec.mlp.make(geometry)
        self.plain_mlp = spec.mlp is None
        # by the last part of the name
        self.given = {one.name.rpartition(".")[2]: Site(geometry, one) for one in spec.apart}
        if {*self.given}.intersection("qkv"):
            check_shared(self.attention_norm)
        self.site_in = Site(geometry, spec.site_in) if spec.site_in else None
        self.site_mid = Site(geometry, spec.site_mid) if spec.site_mid else None
        self.site_out = Site(geometry, spec.site_out) if spec.site_out else None

    def forward(self, x: Any, *reads: Any, scope_of: Any = Scope) -> tuple[Any, ...]:
        """Run the block: see the module's docstring.

        Args:
            x: the residual stream.
            reads: the block's other inputs, in the order of ``self.inputs``.
            scope_of: builds the scope from the inputs by name.
        """
        scope = scope_of(dict(zip(self.inputs, reads, strict=True)))
        at = scope.tapped
        at["in"] = x = joined(self.site_in, x, None, scope)
        y = None
        if self.attention is not None:
            a = self.input("attention", x, scope)
            h = normed(self.attention_norm, a, scope)
            if self.plain_attention:
                apart = {one: self.input(one, a, scope) for one in "qkv" if one in self.given}
                for one, given in apart.items():
                    apart[one] = normed(self.attention_norm, given, scope)
                y = self.attention(h, scope, apart)
            else:
                y = scope.apply(self.attention, {"x": h, **self.masks(scope)}, like=("x",))
        at["mid"] = x = joined(self.site_mid, x, y, scope)
        if (rows := scope.reads.get(GATHERED)) is not None:  # an input of the last block only
            x = self.ops.take_rows(self.ops.reshape(x, (-1, x.shape[-1])), rows)  # (S, C)
        y = None
        if self.mlp is not None:
            h = normed(self.mlp_norm, self.input("mlp", x, scope), scope)
            y = self.mlp(h, scope) if self.plain_mlp else scope.apply(self.mlp, {"x": h}, ("x",))
        at["out"] = x = joined(self.site_out, x, y, scope)
        emitted = [scope.emitted[name] for name in (*self.term_names, *self.statistic_names)]
        streams = [scope.reads[name] for name in self.stream_names]
        return (x, *[at[tap] for tap in self.taps], *streams, *emitted)

    def masks(self, scope: Scope) -> dict[str, Any]:
        """Return the masks of a plugin's own attention: the window, and the documents of all columns."""
        window, documents = self.seen.window, None
        if self.seen.documents is not None:
            documents = scope.columns(self.attention, scope.reads["documents"])
        return {"window": window and window.of(scope.reads), "documents": documents}

    def input(self, part: str, x: Any, scope: Scope) -> Any:
        """Return the input of a part before its norm, (B, T, C): x, or a separate sum of sources."""
        return self.given[part](x, None, scope) if part in self.given else x


def check_shared(norm: Any) -> None:
    """Check that a norm can be applied several times, to separate inputs of q, k and v.

    Raises:
        PlanError: the norm looks back, keeps or emits arrays, which would exist several times.
    """
    if norm is not None and any((norm.lookback, norm.keeps, norm.terms, norm.statistics)):
        raise PlanError(
            f"{type(norm).__name__} of plugin '{norm.owner}' is the norm of several inputs, and "
            "looks back, keeps or emits arrays",
            where="model.norm",
            fix="leave out the norm, or the plugin that sets a separate input for q, k or v",
        )
