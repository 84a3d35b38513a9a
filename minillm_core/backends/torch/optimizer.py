"""The optimizer on torch: clipping, the stages of each parameter group, fused AdamW for plain AdamW groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import _foreach_norm as foreach_norm  # pyright: ignore[reportPrivateImportUsage]
from torch.optim.adamw import adamw

from minillm_core.backends.native import Tables
from minillm_core.backends.torch.compiling import own_code
from minillm_core.backends.torch.model import TorchFramework, Weights
from minillm_core.backends.torch.transfer import overwrite
from minillm_core.optim.groups import Group, Member
from minillm_core.optim.rows import groups_of_whole
from minillm_core.optim.stage import BEHIND
from minillm_core.optim.update import (
    State,
    by_parameter,
    clip_factor,
    cycles_of,
    due_at,
    initial_state,
    layer_grad_norms,
    layer_of,
    multiplier,
    update,
)
from minillm_core.optim.views import VIEWED, views_of
from minillm_core.plan import Plan
from minillm_core.text import counted, few

Tensors = Mapping[str, Tensor]


def is_plain_adamw(group: Group) -> bool:
    """Return whether the fused kernel can update a group: AdamW, without a plugin's stage up to the write.

    The kernel takes the learning rate as an array, but the weight decay only as a number.
    """
    rule = group.rule
    constant = not any(isinstance(member.wd_mul, str) for member in group.members)
    return rule.name == "adamw" and constant and not rule.stacked and not _changed(group)


def _changed(group: Group) -> list[str]:
    """Return the plugins with stages in a group's rule, up to the write."""
    return sorted(
        {owner for anchor, owner, _ in group.rule.stages if anchor not in BEHIND} - {"core"}
    )


def _split(group: Group) -> tuple[Group, Group]:
    """Split a group's rule into the stages up to the write, and those after it."""
    parts = [[], []]
    for one in group.rule.stages:
        parts[one[0] in BEHIND].append(one)
    first, behind = (replace(group, rule=replace(group.rule, stages=tuple(p))) for p in parts)
    return first, behind


class Optimizer:
    """The optimizer: its state on the device, and the optimizer step.

    Args:
        plan: the plan, for parameter groups and clipping.
        weights: master weights and parameters; if sharded, this rank's share is updated.
        tables: the tables that are updated by rows.
        framework: the framework object, for ops and witness.
        compiler: compiles the stages of groups without the fused kernel; None: eager mode.
        fused: use torch's fused AdamW for groups that follow plain AdamW.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        framework: TorchFramework,
        tables: TorchTables,
        *,
        compiler: Callable[..., Any] | None,
        fused: bool,
    ) -> None:
        self.weights, self.framework, self.clip = weights, framework, plan.config.train.clip
        every, self.share = groups_of_whole(plan), weights.share
        self.groups = groups = every if self.share is None else {**self.share.groups}
        self.tables = tables
        self.updates = framework.ops.zeros(())
        apart = framework.param_device and self.share is None  # the state is created after sharding
        self.state: State = initial_state({} if apart else groups, framework.ops.zeros)
        split = {k: _split(g) for k, g in groups.items() if fused and is_plain_adamw(g)}
        self.fused = {key: first for key, (first, _) in split.items()}
        self.alike = _alike(self.fused)
        self.staged = {k: g for k, g in groups.items() if k not in self.fused}
        self.behind = {key: last for key, (_, last) in split.items() if last.rule.stages}
        stacked = {} if apart else {k: g for k, g in self.staged.items() if g.rule.stacked}
        self.stacked = {key: [m.name for m in group.members] for key, group in stacked.items()}
        # one array that the graph reads and writes, in place of all its parts
        self.stacks = {key: weights.stack(names) for key, names in self.stacked.items()}
        self.placed: dict[str, Tensor] | None = None  # the trained tensors while views replace them
        self.notes = _notes(every.values()) if fused else ()
        self.cycles = cycles_of(every.values())
        stages = (stage for group in every.values() for _, _, stage in group.rule.stages)
        by_layer = any("layer_grad_norm" in stage.supplied for stage in stages)
        self.layers = sorted({layer_of(name) for name in weights.trained}) if by_layer else []
        self.steps = torch.zeros((), dtype=torch.int64)  # on the host, skipped updates included
        self.compiler, self.compiled = compiler, dict[Set[int], Callable[..., None]]()
        self.by_stages = bool(self.staged or self.behind)
        for group in (*self.staged.values(), *self.behind.values()):
            for _, _, stage in group.rule.stages:
                _ = stage.function  # import it here: a trace cannot

    def widened(self, grads: Iterable[Tensor]) -> list[Tensor]:
        """Copy all gradients to float32; those of a stacked group are parts of one array, as its masters are."""
        wide = {name: grad.float() for name, grad in zip(self.weights.trained, grads, strict=True)}
        for names in self.stacked.values():
            wide.update(zip(names, torch.stack([wide[name] for name in names]), strict=True))
        return [*wide.values()]

    @torch.no_grad()
    def norm(self, grads: Tensors) -> Tensor:
        """Compute the norm of all gradients together, 0-d float32."""
        return torch.linalg.vector_norm(torch.stack(foreach_norm(list(grads.values()))))

    @torch.no_grad()
    def squares(self, grads: Tensors, counted: Tensors) -> dict[str, Tensor]:
        """Compute the squared norms of this rank's gradients, 0-d: of ``counted`` under "", and by layer.

        The layers are all of the plan's if a stage takes ``layer_grad_norm``; else none.
        """
        ops = self.framework.ops
        norms = {"": self.norm(counted)} if counted else {}
        norms |= layer_grad_norms(ops, grads if self.layers else {}, 1.0)
        return {
            layer: norms[layer].square() if layer in norms else ops.zeros(())
            for layer in ("", *self.layers)
        }

    @torch.no_grad()
    def step(
        self,
        grads: Tensors,
        values: Tensors,
        norm: Tensor,
        unscale: Tensor | None,
        found: Tensor,
        norms: Tensors | None = None,
    ) -> None:
        """Update master weights, optimizer state and parameters; never waits.

        Args:
            grads: name -> float32 gradient of the mean loss, times the loss scale.
            values: schedule value -> 0-d float32 on the device.
            norm: 0-d, the gradient norm, unscaled.
            unscale: 0-d, 1 / loss scale; None: 1.
            found: 0-d float32, 1 to skip this update: nothing changes.
            norms: layer -> 0-d, the norm of its gradients; None: compute it from ``grads``, which are whole.
        """
        factor = clip_factor(self.framework.ops, norm, self.clip)
        factor = factor if unscale is None else factor * unscale
        if norms is None and self.layers:  # before the kernel scales gradients in place
            norms = layer_grad_norms(self.framework.ops, grads, 1.0)
        if self.fused:  # before ``updates`` is incremented: the kernel increments its own copy
            self._fused(grads, factor, values, found)
        self.tables.step(grads, factor, self.updates, values, found)
        self.updates.add_(1.0 - found)
        if self.by_stages:
            self._run(self.due, grads, factor, values, found, norms)
        if self.cycles:
            self.steps += 1
        self.weights.refresh()

    @property
    def due(self) -> Set[int]:
        """The cycles (values of ``every``) of the stages that are due in the next step."""
        return due_at(self.cycles, int(self.steps)) if self.cycles else frozenset()

    @torch.no_grad()
    def warm(self, grads: Tensors, values: Tensors, one: Tensor) -> None:
        """Compile the next step's stages without changing anything; ``one`` is 1 as 0-d float32."""
        norms = dict.fromkeys(self.layers, one) if self.layers else None
        self._run(self.due, grads, one, values, one, norms)

    def _run(self, due: Set[int], grads: Tensors, *arguments: Any) -> None:
        """Run the stages; each set of due cycles has a compiled graph of its own."""
        grads = dict(grads)
        for key, names in self.stacked.items():
            whole = grads[names[0]]._base  # see ``widened``
            if whole is None or whole.shape != self.stacks[key].shape:
                whole = torch.stack([grads[name] for name in names])
            grads[key] = whole
        if self.compiler is None:
            return self._stages(due, grads, *arguments)
        if due not in self.compiled:

            def stages(*arguments: Any) -> None:
                self._stages(due, *arguments)

            self.compiled[due] = self.compiler(own_code(stages), fullgraph=True, dynamic=False)
        return self.compiled[due](grads, *arguments)

    def _stages(
        self,
        due: Set[int],
        grads: Tensors,
        factor: Tensor,
        values: Tensors,
        found: Tensor,
        norms: Tensors | None,
    ) -> None:
        masters, of = self.weights.masters | self.stacks, self.framework
        more = (self.state, self.updates, values, of.witness, of.versions, due, norms, torch.clone)
        params, state = update(of.ops, self.staged, masters, grads, factor, *more)
        if self.behind:  # their update is the parameter that the kernel has written
            last, states = update(of.ops, self.behind, masters, masters, 1.0, *more)
            params, state = params | last, state | states
        skip = found > 0
        for name, new in params.items():
            if masters[name] is not new:
                overwrite(masters[name], new, skip)
        for key, anchors in state.items():
            for anchor, entries in anchors.items():
                for entry, new in entries.items():
                    if (old := self.state[key][anchor][entry]) is not new:
                        overwrite(old, new, skip)

    def _fused(self, grads: Tensors, factor: Tensor, values: Tensors, found: Tensor) -> None:
        """Run torch's fused AdamW, once for all groups with the same constants."""
        inverse = 1.0 / factor  # the kernel divides gradients by its scale
        for group in self.fused.values():
            for anchor, _, _ in group.rule.stages:
                self.framework.evidence[f"stage:adamw.{anchor}"] += 1
        for (adam, decay, write, lr_mul, wd_mul), keys in self.alike.items():
            names = [self.groups[key].members[0].name for key in keys]
            state = [self.state[key]["precondition"] for key in keys]
            adam, decay, write = dict(adam), dict(decay), dict(write)
            adamw(
                [self.weights.masters[name] for name in names],
                [grads[name] for name in names],
                [entries["m"] for entries in state],
                [entries["v"] for entries in state],
                [],
                # one step count per parameter, copied: the kernel increments them
                list(self.updates.repeat(len(names)).unbind(0)),
                fused=True,
                grad_scale=inverse,
                found_inf=found,
                amsgrad=False,
                beta1=adam["beta1"],
                beta2=adam["beta2"],
                lr=values[write["lr"]] * multiplier(lr_mul, values),
                weight_decay=decay["weight_decay"] * wd_mul,
                eps=adam["epsilon"],
                maximize=False,
            )

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Compute the views, float32, one by one."""
        tables = self.tables.view_inputs(self.updates)
        return views_of(self.framework, self.groups, self.weights.masters, self.state, tables)

    @torch.no_grad()
    def place_views(self) -> None:
        """Replace parameters by their views, and by whole tables, for evaluation until the next step."""
        self.tables.place_whole(self.updates)
        if self.placed is None:
            self.placed, views = {}, self.views()
            if self.share is not None:
                own = {f"{VIEWED}{name}": view for name, view in views}
                views = self.share.gather_kind(own, VIEWED)
            for name, view in views:
                parameter = self.weights.parameters[name]
                self.placed[name] = parameter.data
                parameter.data = view.to(parameter.dtype)

    def restore_parameters(self) -> None:
        """Restore the trained parameters, and free the memory of views."""
        for name, trained in (self.placed or {}).items():
            self.weights.parameters[name].data = trained
        self.placed = None

    def arrays(self) -> dict[str, Tensor]:
        """Return the optimizer state without that of tables: ``anchor.entry.parameter``, and ``updates`` ().

        If a stage has ``every`` > 1, also ``steps`` (), int64 on the host.
        """
        state = by_parameter(self.groups, self.state)
        counts = {"updates": self.updates} | ({"steps": self.steps} if self.cycles else {})
        return counts | {name: _bits(tensor) for name, tensor in state.items()}


def _bits(tensor: Tensor) -> Tensor:
    """Return bfloat16, which NumPy lacks, as int16 in the same memory."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _notes(groups: Iterable[Group]) -> tuple[str, ...]:
    """Return a note on whether AdamW runs as torch's fused kernel, if any parameter uses AdamW."""
    adamw = [group for group in groups if group.rule.name == "adamw"]
    if not adamw:
        return ()
    if owners := _changed(adamw[0]):  # the same for all of them: they share one rule
        return (f"the rule adamw is not torch's fused kernel: {few(owners)} changed it",)
    apart = sum(not is_plain_adamw(group) for group in adamw)
    which = f"{counted(apart, 'parameter')} whose weight decay has a schedule"
    return (f"the rule adamw is torch's fused kernel{f', but for {which}' if apart else ''}",)


def _alike(fused: Mapping[str, Group]) -> dict[tuple[Any, ...], list[str]]:
    """Group parameter groups by the constants of torch's kernel: one call for each."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for key, group in fused.items():
        member = group.members[0]
        stages = {anchor: stage for anchor, _, stage in group.rule.stages}
        constants = (
            stages["precondition"].arguments,
            stages["decay"].arguments,
            stages["write"].values,
            member.lr_mul,
            member.wd_mul,
        )
        found.setdefault(constants, []).append(key)
    return found


class TorchTables(Tables):
    """The tables, their optimizer state, and the rows of the current step; a table's parameter holds only these.

    Constructed from the rules by table, the plan, the trainer's weights, its framework object, and the
    function that compiles if the binding compiles. ``updates`` is 0-d float32: the number of updates so far.

    Attributes:
        sizes: how many rows of each table the step holds.
        words: the same, as text for messages.
    """

    sizes: tuple[int, ...] = ()
    words: str = ""

    def load_rows(
        self,
        rows: Tensors,
        updates: Tensor,
        values: Tensors,
        compiling: Callable[[str], AbstractContextManager[None]] | None,
    ) -> None:
        """Set the parameters to the rows of the step, brought up to date.

        Args:
            rows: the rows by table, int32 (S,).
            updates: see the class.
            values: schedule value -> 0-d float32.
            compiling: the context to enter, with a text, around a compilation for new sizes; None:
                eager mode.
        """

    def step(
        self, grads: Tensors, factor: Tensor, updates: Tensor, values: Tensors, found: Tensor
    ) -> None:
        """Update the rows of the step, unless ``found`` is 1; bring the rows of ``RowRule.in_turn`` up to date.

        Args:
            grads: name -> float32 gradient, of tables (S, C).
            factor: 0-d float32, multiplies every gradient.
            updates: the number of updates, without this one.
            values: schedule value -> 0-d float32.
            found: 0-d float32, 1 to skip this update.
        """

    def view_inputs(self, updates: Tensor) -> Iterable[tuple[Member, Tensor, Tensors]]:
        """Yield tables that have a view, up to date, one by one: see :func:`minillm_core.optim.views.views_of`."""
        return ()

    def place_whole(self, updates: Tensor) -> None:
        """Set the parameters to whole tables, for evaluation and sampling until the next step."""

    def free_whole(self) -> None:
        """Free the memory of whole tables; the next :meth:`place_whole` computes them again, from the new masters."""

    def arrays(self, updates: Tensor) -> dict[str, Tensor]:
        """Return the arrays of the tables for a snapshot, as :meth:`packed` takes them."""
        return {}

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state on the device, by their names in a checkpoint."""
        return {}
