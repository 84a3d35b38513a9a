"""The slots of the optimizer: update rules, their stages, and the parameter groups of each rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from minillm_core.errors import PlanError
from minillm_core.nn.node import Setting
from minillm_core.nn.reference import Function, reference_of, resolve
from minillm_core.optim.adamw import adam, decay, write
from minillm_core.optim.follow import FOLLOW, Follow
from minillm_core.optim.groups import ByRows, Group, Member, groups_of
from minillm_core.optim.rows import RowRule
from minillm_core.optim.schedules import Cosine, Piecewise, Plateaus, Schedule, Scheduled, Stages
from minillm_core.optim.stage import ANCHORS, GRADIENT, Draft, Rule, stage
from minillm_core.optim.views import VIEW
from minillm_core.plugins.builders.base import Builder, ValueTable, offered_twice
from minillm_core.plugins.slots import Chain, Claim, Claims, Names, clash_fix
from minillm_core.text import counted, did_you_mean, few, listed

Where = Callable[[str, "ParamInfo"], bool]

DEFAULT_RULE = "adamw"
"""The rule of every parameter that no plugin assigns to another."""

EVERY = "*"
"""Used as a rule's name: every rule."""

ROWS = "rows:"
"""Prefix of an evidence key: with a table's name, its rows updated over all steps; alone, the number of steps."""

FIELDS = ("lr_mul", "wd_mul", "betas")
"""The fields of a parameter that ``optimizer.set`` sets."""

FROZEN = "frozen"
"""Used as a rule's name: the parameter is not trained."""


@dataclass(frozen=True)
class ParamInfo:
    """The facts about a parameter in the plan: the second argument of ``where(name, info)``."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical names, such as ("heads", "dim")
    role: str  # attention.q, mlp.up, embedding.token, head, norm, scalar ...
    init: dict[str, Any]  # its initialiser, as JSON
    owner: str  # core, or the plugin whose module declares it
    lr_mul: float
    wd_mul: float
    rows: str = ""  # the batch field whose ids select the rows that are read; empty: all rows

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class ChainedStage:
    """A stage in the gradient chain of a rule."""

    owner: str
    name: str  # the owner's name, with a suffix for a second stage
    draft: Draft

    @property
    def anchor(self) -> str:
        """Its name among the stages of a rule."""
        return f"{GRADIENT}[{self.name}]"


class Blocks(NamedTuple):
    """The claim that splits a parameter's rows into several matrices."""

    rule: str  # the rule that updates them
    count: int

    def __str__(self) -> str:
        return f"{self.count} matrices of its rows"


class OptimizerSlots:
    """The slots of the optimizer, and their resolution."""

    def __init__(
        self, parameters: Mapping[str, ParamInfo], values: ValueTable, train: Any, heads: Any
    ) -> None:
        self.parameters, self.values, self.train = parameters, values, train
        self.heads: tuple[int, int] = heads  # query heads, key-value heads
        core = ("core", core_rule(train))
        self.rules: dict[str, tuple[str, dict[str, Draft]]] = {DEFAULT_RULE: core}
        self.extensions: Claims[tuple[str, str], Draft] = Claims("opt.extend({}, {})")
        self.chained: list[tuple[str, ChainedStage, Names, Names]] = []
        self.assigned: Claims[str, str] = Claims("opt.assign[{}]")
        self.over: dict[tuple[str, str], None] = {}  # parameter, plugin whose claim outranks others
        self.outranked: dict[str, set[str]] = {}  # plugin: those that outrank it
        self.multipliers: Claims[tuple[str, str], Any] = Claims("opt.set[{}].{}")
        self.tables: Claims[str, ByRows] = Claims("opt.rows[{}]", ROWS + "{}", shapes=False)
        self.views: Claims[str, Function] = Claims(
            "opt.view[{}]", VIEW + "{}", shapes=False, heading="opt.view"
        )
        self.blocks: Claims[str, Blocks] = Claims(
            "opt.split[{}]", shapes=False, heading="opt.split"
        )
        self.schedule: Claim[Function] = Claim("opt.schedule")
        self.follows: Claims[str, Follow] = Claims("opt.follow[{}]", FOLLOW + "{}", shapes=False)
        self.rates: Claim[Schedule] = Claim("opt.rates", default="1", shapes=False)

    def resolve(self) -> tuple[Group, ...]:
        """Resolve to the parameter groups of all trained parameters; raise on a conflict."""
        # registered even if a plugin replaces AdamW's write: a step's report shows train.lr
        self.values.add("core", "train.lr", Scheduled(self.train.lr))
        added = [(rule, min(c.held), c.where) for (rule, _), c in sorted(self.extensions.items())]
        added += [(rule, o.owner, f"opt.rule[{rule}].{GRADIENT}") for rule, o, _, _ in self.chained]
        for rule, owner, where in added:
            if rule not in (*self.rules, EVERY):
                raise self.unknown_rule(rule, owner, where)
        for claim in self.blocks.values():
            for owner, blocks in claim.held.items():
                if blocks.rule not in self.rules:
                    raise self.unknown_rule(blocks.rule, owner, f"opt.split({blocks.rule})")
        self.drop_outranked()
        rules = {name: self.rule(name) for name in sorted(self.rules)}
        assigned: dict[str, tuple[Rule, Member]] = {}
        for name, parameter in self.parameters.items():
            rule = self.assigned[name].resolve(DEFAULT_RULE)
            if rule == FROZEN:
                self.check_unset(name)
                continue
            if rule not in rules:
                raise self.unknown_rule(rule, self.assigned[name].owner, f"opt.assign({rule})")
            factors = {}
            for field in ("lr_mul", "wd_mul"):
                held = self.multipliers[name, field].resolve(getattr(parameter, field))
                factors[field] = held.value if isinstance(held, Setting) else held
            claim = self.multipliers[name, "betas"]
            overrides = tuple(zip(("beta1", "beta2"), claim.resolve() or (), strict=False))
            if overrides and not rules[rule].accepts("beta1", "beta2"):
                if claim.owner != parameter.owner:
                    what = f"plugin '{claim.owner}' sets betas of '{name}', which follows the rule '{rule}'"
                    fix = f"leave out '{claim.owner}', or '{rules[rule].owner}' for this parameter (its scope)"
                    refusal = PlanError(f"{what}: it has none", where=claim.where, fix=fix)
                    raise refusal.concerning(name, claim.where, plugins=(claim.owner,))
                text = f"its betas are not used: the rule '{rule}' of its parameters has none of Adam's"
                self.values.notes[claim.owner, text], overrides = None, ()
            rows = self.tables[name].resolve()
            more = {"overrides": overrides, "rows": rows, "view": self.views[name].resolve()}
            if (blocks := self.blocks[name].resolve()) is not None:
                if blocks.rule != rule or not rules[rule].stacked:
                    raise self.split_error(name, rule)
                more["blocks"] = blocks.count
            assigned[name] = (rules[rule], Member(name, parameter.shape, **factors, **more))
        if not assigned and (owners := {self.assigned[name].owner for name in self.parameters}):
            raise PlanError(
                f"every parameter is frozen, by {listed(sorted(owners))}: there is nothing to train",
                where=f"opt.assign[{FROZEN}]",
                fix="leave a part of the model to be trained, or add a plugin that brings one (lora)",
            ).concerning(plugins=tuple(sorted(owners)))
        self.tie(assigned)
        groups = groups_of(assigned)
        self.check_rows(groups)
        if DEFAULT_RULE not in {group.rule.name for group in groups}:
            text = f"no parameter follows '{DEFAULT_RULE}', which train.lr, train.betas and train.epsilon are for"
            self.values.notes[groups[0].rule.owner, text] = None
        return groups

    def tie(self, assigned: dict[str, tuple[Rule, Member]]) -> None:
        """Tie parameters to their leaders: the same rule, and the leader's factors until they separate.

        If a factor differs, it becomes a schedule for both, so that the same kernels update both parameters.
        """
        for name, claim in self.follows.items():
            follow = claim.resolve()
            if (why := self.why_untied(name, follow, assigned)) is not None:
                what = f"plugin '{claim.owner}' lets '{name}' follow '{follow.leader}': {why}"
                fix = f"leave out '{claim.owner}', or what makes the two parameters differ"
                refusal = PlanError(what, where=claim.where, fix=fix)
                raise refusal.concerning(name, claim.where, plugins=(claim.owner,))
            factors: dict[str, dict[str, Any]] = {name: {"follows": follow}, follow.leader: {}}
            for field in ("lr_mul", "wd_mul"):
                own, led = (getattr(assigned[n][1], field) for n in (name, follow.leader))
                if own != led:
                    for one, after in ((name, own), (follow.leader, led)):
                        knots = (0.0, led), (follow.until, after)
                        value = f"{claim.owner}.{one}.{field}"
                        factors[one][field] = self.values.add(claim.owner, value, Plateaus(knots))
            for one, more in factors.items():
                rule, member = assigned[one]
                assigned[one] = (rule, replace(member, **more))

    def why_untied(
        self, name: str, follow: Follow, assigned: Mapping[str, tuple[Rule, Member]]
    ) -> str | None:
        """Return the reason why a parameter cannot follow another; None if it can."""
        for one in (name, follow.leader):
            if one not in assigned:
                return f"'{self.assigned[one].owner}' freezes '{one}'"
            if assigned[one][1].rows:
                return f"'{self.tables[one].owner}' updates '{one}' by rows"
        if follow.leader in self.follows:
            return f"'{follow.leader}' follows another itself"
        (rule, own), (other, led) = assigned[name], assigned[follow.leader]
        if rule.name != other.name:
            return f"they have the rules '{rule.name}' and '{other.name}'"
        if own.overrides != led.overrides:
            return "they have different betas"
        for field in ("lr_mul", "wd_mul"):
            factors = {getattr(own, field), getattr(led, field)}
            if len(factors) > 1 and any(isinstance(factor, str) for factor in factors):
                return f"the {field} of only one of them follows that schedule"
        return None

    def drop_outranked(self) -> None:
        """Drop claims outranked by ``over=True`` and add a note; two claims with ``over`` stay a conflict."""
        passed: Counter[tuple[str, str, str, str]] = Counter()
        for name, owner in self.over:
            held = self.assigned[name].held
            for other in [one for one in held if one != owner and (name, one) not in self.over]:
                passed[owner, held[owner], other, held.pop(other)] += 1
        for (owner, rule, other, left), count in passed.items():
            self.outranked.setdefault(other, set()).add(owner)
            one = count == 1
            now = f"follow{'s' * one} the rule '{rule}'"
            if rule == FROZEN:
                now = "is frozen" if one else "are frozen"
            text = (
                f"{counted(count, 'parameter')} that '{other}' assigns to the rule '{left}' {now}"
            )
            self.values.notes[owner, text] = None

    def check_unset(self, name: str) -> None:
        """Refuse factors and betas of a frozen parameter, which would have no effect.

        A plugin may set them for its own parameters: they apply if the parameter is trained.
        """
        freezes, rows = self.assigned[name].owner, self.tables[name]
        if rows.held:
            raise _not_by_rows(rows, name, f"'{freezes}' freezes it", (freezes,))
        claims = {f"sets {field}": self.multipliers[name, field] for field in FIELDS}
        for did, claim in (claims | {"splits rows": self.blocks[name]}).items():
            for owner in claim.held.keys() - {self.parameters[name].owner}:
                what = f"plugin '{owner}' {did} of '{name}', which '{freezes}' freezes"
                fix, both = f"leave out '{owner}' or '{freezes}'", (owner, freezes)
                refusal = PlanError(what, where=claim.where, fix=fix)
                raise refusal.concerning(name, claim.where, plugins=both)

    def check_rows(self, groups: Iterable[Group]) -> None:
        """Refuse tables whose rule cannot update single rows."""
        for group in groups:
            if (table := group.members[0].rows) is not None:
                name, owners = group.members[0].name, {owner for _, owner, _ in group.rule.stages}
                why = "a stage of its rule keeps state in fewer bits than float32, or runs only every few updates"
                if not any(one.narrow or one.every > 1 for _, _, one in group.rule.stages):
                    why = resolve(table.rule)(group).refuses()
                if why is not None:
                    raise _not_by_rows(self.tables[name], name, why, owners - {"core"})

    def split_error(self, name: str, rule: str) -> PlanError:
        """Return the error for a split parameter whose rule does not work on matrices."""
        claim = self.blocks[name]
        return PlanError(
            f"plugin '{claim.owner}' splits '{name}' into matrices, but it follows the rule '{rule}'",
            where=claim.where,
            fix=f"leave out '{claim.owner}', or the plugin that keeps '{name}' from a rule for matrices",
        ).concerning(name, claim.where, plugins=(claim.owner,))

    def unknown_rule(self, rule: str, owner: str, where: str) -> PlanError:
        """Return the error for a plugin that refers to an unknown rule."""
        add = f"name the plugin that provides it too (--plugins {rule},{owner}), "
        return PlanError(
            f"plugin '{owner}' builds on the rule '{rule}', which no active plugin provides",
            where=where,
            fix=f"{did_you_mean(rule, self.rules) or add}or leave out '{owner}'",
        ).concerning(plugins=(owner,))

    def rule(self, name: str) -> Rule:
        """Resolve a rule with its extensions, and register its schedule values in the plan."""
        owner, drafts = self.rules[name]
        held = {anchor: (owner, draft) for anchor, draft in drafts.items()}
        for anchor in ANCHORS:
            claim = self.extension(name, anchor)
            if (extension := claim.resolve()) is not None:
                try:
                    drafted = extension.inherit_from(held[anchor][1] if anchor in held else None)
                except ValueError as error:
                    text = f"plugin '{claim.owner}', {claim.where}: {error}"
                    refusal = PlanError(text, where=claim.where)
                    raise refusal.concerning(plugins=(claim.owner,)) from error
                before = held[anchor][1].stage.state if anchor in held else ()
                state = [entry for entry, _ in before]
                if state and (name, anchor) not in self.extensions:  # by "*" only
                    text = f"replaces {anchor} of every rule: '{name}' keeps no {listed(state)}"
                    self.values.notes[claim.owner, text] = None
                held[anchor] = (claim.owner, drafted)
        (writes, of_write), (looks, _) = held["write"], held.get("lookahead", held["write"])
        if (beside := [entry for entry, _ in of_write.stage.state]) and looks != writes:
            where = f"opt.extend({name}, lookahead)"
            kept = f"{listed(beside)} for the parameters that it wrote"
            what = f"'{looks}' moves parameters after the write of '{writes}', which keeps {kept}"
            refusal = PlanError(what, where=where, fix=clash_fix(looks, writes))
            raise refusal.concerning(where, plugins=(looks, writes))
        stages = []
        chain = {one.anchor: (one.owner, one.draft) for _, one in self.chain(name).resolve()}
        own = {anchor: held[anchor] for anchor in ANCHORS if anchor in held}
        for anchor, (who, draft) in (chain | own).items():
            prefix = "train" if who == "core" else name if who == owner else f"{name}.{who}"
            for argument, schedule in sorted(draft.schedules.items()):
                self.values.add(who, f"{prefix}.{argument}", schedule)
            stages.append((anchor, who, draft.named(prefix)))
        return Rule(name, owner, tuple(stages))

    def chain(self, rule: str) -> Chain:
        """Return the gradient chain of a rule: stages added by the rule's name or for every rule."""
        chain = Chain(f"opt.rule[{rule}]", (GRADIENT,), shapes=False)
        for named, one, before, after in self.chained:
            if named in (rule, EVERY):
                chain.add(GRADIENT, one, before, after)
        return chain

    def extension(self, rule: str, anchor: str) -> Claim[Draft]:
        """Return the claims on a rule's stage, made by the rule's name or for every rule."""
        claim: Claim[Draft] = Claim(f"opt.extend({rule}, {anchor})")
        for named in (rule, EVERY):
            if (claims := self.extensions.get((named, anchor))) is not None:
                for owner, draft in claims.held.items():
                    claim.add(owner, draft, claims.lines[owner])
        return claim


def core_rule(train: Any) -> dict[str, Draft]:
    """Return the stages of AdamW with the run's settings."""
    beta1, beta2 = train.betas
    state = {"m": "like", "v": "like"}
    return {
        "precondition": stage(adam, state=state, beta1=beta1, beta2=beta2, epsilon=train.epsilon),
        "decay": stage(decay, weight_decay=train.weight_decay),
        "write": stage(write, lr=Scheduled(train.lr)),
    }


class OptimizerBuilder(Builder):
    """The slots of the optimizer, bound to one plugin.

    Attributes:
        parameters: name -> ParamInfo, every parameter of the model.
        lr: train.lr.
        betas: train.betas.
        epsilon: train.epsilon.
        weight_decay: train.weight_decay.
        warmup: train.warmup, the fraction of the run over which the learning rates rise.
        heads: H, the number of query heads.
        kv_heads: K, the number of key-value heads.
    """

    _slots: OptimizerSlots

    def __init__(self, owner: str, values: ValueTable, slots: OptimizerSlots) -> None:
        super().__init__(owner, values, slots)
        self.parameters = dict(slots.parameters)
        self.lr: float = slots.train.lr
        self.betas: tuple[float, float] = slots.train.betas
        self.epsilon: float = slots.train.epsilon
        self.weight_decay: float = slots.train.weight_decay
        self.warmup: float = slots.train.warmup
        self.heads, self.kv_heads = slots.heads

    def rule(
        self,
        name: str,
        *,
        lr: float | Schedule,
        weight_decay: float | Schedule | None = None,
        **stages: Draft,
    ) -> None:
        """Claim: an update rule ``name``; decoupled weight decay and write default to the core's.

        ::

            momentum = stage(nesterov, state={"momentum": "like"}, beta=0.95)
            optimizer.rule("nesterov", lr=scheduled(0.02), momentum=momentum)

        Args:
            name: the rule's name.
            lr: a peak learning rate, multiplied by the run's learning-rate schedule; or its own schedule.
            weight_decay: the rule's weight decay; None: train.weight_decay.
            stages: anchor (momentum, orthogonalise, precondition, scale, decay, write, lookahead,
                average) -> stage.

        Raises:
            PlanError: an existing rule, an unknown anchor, or a negative rate or decay.
        """
        provided = {**self._slots.rules, FROZEN: ("core", {})}
        if name in provided:
            what, where = f"rule '{name}' is provided", f"opt.rule[{name}]"
            raise offered_twice(what, provided[name][0], self._owner, where)
        for anchor, draft in stages.items():
            self._stage(anchor, draft)
        self._finite(f"opt.rule({name})", lr=lr)
        for argument, value in (("lr", lr), ("weight_decay", weight_decay)):
            self._rate(f"opt.rule({name})", argument, value)
        schedule = lr if isinstance(lr, Schedule) else Scheduled(float(lr))
        shrink = self.weight_decay if weight_decay is None else weight_decay
        defaults = {"decay": stage(decay, weight_decay=shrink), "write": stage(write, lr=schedule)}
        self._slots.rules[name] = (self._owner, defaults | stages)

    def extend(self, rule: str, anchor: str, draft: Draft) -> None:
        """Claim per (rule, anchor): a stage of a rule that another plugin or the core provides.

        ::

            optimizer.extend("muon", "scale", stage(normalise, beta=0.95))

        Args:
            rule: the rule's name, or ``"*"`` for every rule.
            anchor: the stage's place; an existing stage there is replaced (``minillm plan`` lists the stages
                of each rule), an empty one is filled.
            draft: the stage; an argument INHERITED takes the replaced stage's value.

        Raises:
            PlanError: while resolving, a lookahead on a rule whose write has state of another plugin:
                the lookahead moves the parameters that this state was computed for.
        """
        if anchor == GRADIENT:
            fix = f"optimizer.gradient({rule!r}, stage(...)), which several plugins may"
            raise self._refusal("opt.extend", f"'{GRADIENT}' is joined, not replaced", fix=fix)
        self._stage(anchor, draft)
        self._slots.extensions[rule, anchor].add(self._owner, draft)

    def gradient(
        self,
        rule: str,
        draft: Draft,
        *,
        name: str | None = None,
        before: str | tuple[str, ...] = (),
        after: str | tuple[str, ...] = (),
    ) -> None:
        """Chain: gradient (...), clipped by its global norm -> the gradient that the rule's stages receive.

        These stages run before a rule's first stage and replace none; state, schedules and
        ``needs="matrix"`` work as in any stage. The logged gradient norm is computed before them.
        ::

            optimizer.gradient("*", stage(clip_rows, clipping=0.01), before="normalise")

        Args:
            rule: the rule's name, or ``"*"`` for every rule.
            draft: the stage, without INHERITED arguments, since no stage is replaced.
            name: a suffix that distinguishes several stages of one plugin.
            before: names of other plugins' stages here that this stage precedes; absent ones are ignored.
            after: names of other plugins' stages here that this stage follows; absent ones are ignored.

        Raises:
            PlanError: while resolving, two plugins whose order neither states, or an unknown rule.
        """
        self._draft(GRADIENT, draft)
        if draft.inherited:
            text = f"{draft.inherited[0]}=INHERITED, and no stage is replaced there"
            raise self._refusal("opt.gradient", text)
        full = self._owner if name is None else f"{self._owner}_{name}"
        self._slots.chained.append((rule, ChainedStage(self._owner, full, draft), before, after))

    def assign(self, rule: str, where: Where, *, over: bool = False) -> int:
        """Claim per parameter: ``rule`` updates the parameters for which ``where(name, info)`` is true.

        ::

            optimizer.assign("nesterov", lambda name, p: p.role.startswith("mlp."))

        Args:
            rule: the rule's name.
            where: predicate on a parameter's name and ParamInfo, evaluated during the call.
            over: override assignments and freezes by other plugins, with a note; otherwise they are
                a conflict.

        Returns:
            The number of parameters.

        Raises:
            PlanError: no parameter matches.
        """
        return self._assigned(f"opt.assign({rule})", rule, where, over)

    def freeze(self, where: Where, *, over: bool = False) -> int:
        """Claim per parameter: parameters for which ``where(name, info)`` is true are frozen.

        ::

            optimizer.freeze(lambda name, p: p.role.startswith("embedding."))

        A frozen parameter has no gradient, no optimizer state and, in mixed precision, no float32 master
        weights on the device. Checkpoints hold its initial float32 value bit by bit. Freezing is the same
        claim as ``assign``: a rule that another plugin assigns is a conflict, and so are factors that
        another plugin sets, except on its own parameters.

        Args:
            where: predicate on a parameter's name and ParamInfo, evaluated during the call.
            over: override assignments by other plugins, with a note; otherwise they are a conflict.

        Returns:
            The number of parameters.

        Raises:
            PlanError: no parameter matches; while resolving, a plan that freezes all parameters.
        """
        return self._assigned("opt.freeze", FROZEN, where, over)

    def set(
        self,
        where: Where,
        *,
        lr_mul: float | Schedule | None = None,
        wd_mul: float | Schedule | None = None,
        betas: tuple[float, float] | None = None,
    ) -> int:
        """Claim per (parameter, field): factors on learning rate and weight decay; Adam's betas.

        ::

            optimizer.set(lambda name, p: p.role == "head", lr_mul=0.5, betas=(0.9, 0.95))
            optimizer.set(lambda name, p: p.role == "norm", lr_mul=plateaus((0, 0.0), (0.5, 1.0)))

        The second call keeps the norms unchanged for the first half of the run: decoupled weight decay is
        multiplied by the learning rate, so a rate of 0 stops both.

        Args:
            where: predicate on a parameter's name and ParamInfo, evaluated during the call.
            lr_mul: factor on the learning rate, at least 0: a number, or a schedule (piecewise, cosine,
                scheduled, plateaus), which is an input of the compiled step. The rate follows the run's own
                schedule as well: for groups with schedules of their own, make that one flat
                (``optimizer.schedule`` or train.schedule=constant), and give each group its factor.
            wd_mul: factor on the weight decay, likewise.
            betas: Adam's betas, for parameters whose rule has a stage with the arguments ``beta1`` and
                ``beta2``. Under another rule those of the plugin's own parameters are not used, with a note,
                and those of other parameters are refused.

        Returns:
            The number of parameters.
        """
        fields: dict[str, Any] = {"lr_mul": lr_mul, "wd_mul": wd_mul, "betas": betas}
        self._finite("opt.set", **fields)
        chosen = self._chosen(where, "opt.set")
        if betas is not None and not _is_pair(betas):
            fix = "two numbers, at least 0 and below 1: betas=(0.9, 0.95)"
            raise self._refusal("opt.set", f"betas={betas!r}", fix=fix)
        for field in ("lr_mul", "wd_mul"):
            if (factor := fields[field]) is not None:
                self._rate("opt.set", field, factor)
                held = self._setting(field, factor, chosen[0])  # names a second schedule
                fields[field] = held if held.constant is None else held.constant
        for name in chosen:
            for field, value in fields.items():
                if value is not None:
                    self._slots.multipliers[name, field].add(self._owner, value)
        return len(chosen)

    def rates(self, factor: Schedule) -> None:
        """Claim: a factor on the run's learning-rate schedule, and on every learning rate that follows it.

        These are train.lr, the rate of any rule whose ``lr`` is a number, and every ``scheduled`` value; other
        schedules do not change. Decoupled weight decay is multiplied by the rate, so the factor applies to it too.
        ::

            optimizer.rates(plateaus((0, 1.0), (0.5, 1.4)))

        Args:
            factor: piecewise, cosine or plateaus.

        Raises:
            PlanError: another kind of schedule, or a number (set train.lr instead).
        """
        if not isinstance(factor, (Piecewise, Cosine, Plateaus)) or isinstance(factor, Stages):
            fix = "piecewise(...), cosine(...) or plateaus(...)"
            raise self._refusal("opt.rates", f"{factor!r} is not a factor over the run", fix=fix)
        self._rate("opt.rates", "factor", factor)
        self._slots.rates.add(self._owner, factor)

    def rows(self, where: Where, rule: type[RowRule], *, buckets: int = 8) -> int:
        """Claim per parameter: sparse updates: a step updates only the looked-up rows of the matching tables.

        A table is a parameter that is looked up by a batch field (``rows=`` of its Param). Gradient, norm
        and update touch only the rows whose ids occur in a step's micro-batches; ``rule`` applies the
        skipped updates when a row is seen again. Evaluation, checkpoints and exports use the whole table
        up to date.

        Args:
            where: predicate on a parameter's name and ParamInfo, evaluated during the call.
            rule: computes the effect of the parameter's own update rule on a row over the skipped steps.
            buckets: the number of sizes to which the row count is padded, with rows that are not in the
                step; torch compiles each size when it first occurs.

        Returns:
            The number of parameters.

        Raises:
            PlanError: no parameter matches, or one is not looked up by a batch field; while resolving, a
                parameter whose group ``rule`` refuses, or a frozen one.

        ::

            optimizer.rows(lambda name, p: p.role == "embedding.bigram", LazyAdamW)
        """
        if buckets < 1:
            raise self._refusal("opt.rows", f"buckets={buckets}", fix="1 or more, such as 8")
        chosen = self._chosen(where, "opt.rows")
        for name in chosen:
            field, claim = self.parameters[name].rows, self._slots.tables[name]
            claim.add(self._owner, ByRows(self._owner, field, reference_of(rule), buckets))
            if not field:
                why = "its module does not say that its rows are looked up by a batch field alone"
                fix = "Param(..., rows='ids') in a module of model.stream, or leave it out"
                raise _not_by_rows(claim, name, why, (), fix=fix)
        return len(chosen)

    def schedule(self, function: Callable[..., float], **arguments: Any) -> None:
        """Claim: the learning-rate schedule after warm-up, instead of train.schedule.

        The function is called as ``function(x, **arguments)``, x from 0 (end of warm-up) to 1 (end of the
        run), and returns the fraction of the peak for every ``scheduled`` rate, train.lr included.
        ::

            optimizer.schedule(falling, power=1.2)  # (1 - x) ** 1.2

        Args:
            function: a module-level function.
            arguments: its keyword arguments, JSON values.

        Raises:
            PlanError: the function is not at module level, or returns NaN, infinity or a number below 0.
        """
        curve = self._function("opt.schedule", function, arguments)
        for x in (0.0, 0.5, 1.0):
            if not 0 <= (made := curve.call(x)) < math.inf:
                raise self._refusal("opt.schedule", f"{made} at {x:g} of what follows the warm-up")
        self._slots.schedule.add(self._owner, curve)
        self.note(f"rates follow it, and not train.schedule={self._slots.train.schedule}")

    def split(self, rule: str, where: Where, blocks: int) -> int:
        """Claim per parameter: the rule treats the matching parameters as ``blocks`` stacked matrices.

        All stages of the rule see each block of rows as a separate matrix: a parameter (R, C) is a stack
        of ``blocks`` matrices (R / blocks, C), orthogonalised, normalised and measured block by block. The
        optimizer state has the same layout, (blocks, ...) in a checkpoint.
        ::

            optimizer.split("muon", lambda name, p: p.role == "attention.q", optimizer.heads)

        Args:
            rule: the rule that updates them; one of its stages ``needs`` matrices.
            where: predicate on a parameter's name and ParamInfo, evaluated during the call.
            blocks: the number of matrices, 1 or more; it divides the number of rows.

        Returns:
            The number of parameters.

        Raises:
            PlanError: no parameter matches, or its rows are not divisible; while resolving, a parameter
                with another rule, or a rule that needs no matrices.
        """
        chosen = self._chosen(where, "opt.split")
        for name in chosen:
            shape = self.parameters[name].shape
            if blocks < 1 or len(shape) != 2 or shape[0] % blocks:
                what = f"'{name}' of shape {shape} in {blocks} blocks of rows"
                raise self._refusal("opt.split", what, fix="a number that divides a matrix's rows")
            self._slots.blocks[name].add(self._owner, Blocks(rule, blocks))
        return len(chosen)

    def view(self, where: Where, function: Callable[..., Any], **arguments: Any) -> int:
        """Claim per parameter: evaluation, samples and exports use weights that ``function`` computes (an EMA).

        Training continues from the parameters themselves, bit by bit. The function is pure, written once
        for all frameworks, and called whenever weights are read: ``(ops, param, state, **arguments) ->
        param``, for one parameter, float32. ``state`` holds the optimizer state of all stages of its rule,
        keyed ``stage.entry`` (``precondition.m``), float32, 0 before the first update. A table of
        ``optimizer.rows`` is up to date. A frozen parameter has no view: its own value is used.

        A checkpoint holds both. A run that is resumed or branched from (``--branch``) uses the
        parameters; ``eval``, ``generate``, ``chat``, ``export`` and ``--init RUN`` use the views, without
        the plugin. Cost: a second float32 copy in each checkpoint and, while weights are read, a copy in
        the compute dtype.

        Args:
            where: predicate on a parameter's name and ParamInfo, evaluated during the call.
            function: a module-level function; returns a float32 array of the parameter's shape.
            arguments: its keyword arguments, JSON values.

        Returns:
            The number of parameters.

        Raises:
            PlanError: no parameter matches, or the function is not at module level.

        ::

            mean = stage(average, state={"mean": "like"}, decay=0.999)
            optimizer.extend("*", "average", mean)
            optimizer.view(lambda name, p: True, averaged)  # state["average.mean"]
        """
        viewed = self._function("opt.view", function, arguments)
        chosen = self._chosen(where, "opt.view")
        for name in chosen:
            self._slots.views[name].add(self._owner, viewed)
        return len(chosen)

    def follow(self, parameter: str, leader: str, *, until: float = 1.0) -> None:
        """Claim per parameter: ``parameter`` is tied to ``leader`` until a fraction of the run, then separate.

        Both start from the leader's initial values. While tied, both receive the sum of their gradients
        (counted once in the gradient norm) and the leader's factors, so that they stay equal bit by bit,
        like one parameter used twice. Afterwards each has its own gradient and factors, and starts from the
        shared optimizer state. If a run starts from other weights (--init, --branch) while tied, the
        leader's values and moments replace the parameter's.

        Args:
            parameter: the tied parameter's name.
            leader: another parameter of the same shape and rule, which is not tied itself.
            until: fraction of the run; 1: to the end.

        Raises:
            PlanError: an unknown parameter, or a fraction outside the run; while resolving, different
                rules or betas, or a parameter that is frozen or updated by rows.

        ::

            optimizer.follow("head.weight", "embedding.weight", until=2 / 3)
        """
        slot = f"opt.follow[{parameter}]"
        for name in (parameter, leader):
            if name not in self.parameters:
                fix = f"{did_you_mean(name, self.parameters)}names are such as {few([*self.parameters])}"
                raise self._refusal(slot, f"'{name}' is not a parameter", fix=fix)
        shapes = [self.parameters[name].shape for name in (parameter, leader)]
        if parameter == leader or shapes[0] != shapes[1]:
            what = f"'{leader}' {shapes[1]} cannot stand for '{parameter}' {shapes[0]}"
            raise self._refusal(slot, what, fix="another parameter, of the same shape")
        if not 0 < until <= 1:
            raise self._refusal(slot, f"until={until}", fix="a share of the run, such as 2 / 3")
        together = Plateaus(((0.0, 1.0), (float(until), 0.0)))
        value = self._values.add(self._owner, f"{self._owner}.{parameter}.tied", together)
        self._slots.follows[parameter].add(
            self._owner, Follow(self._owner, leader, float(until), value)
        )

    def _assigned(self, slot: str, rule: str, where: Where, over: bool) -> int:
        chosen = self._chosen(where, slot)
        for name in chosen:
            self._slots.assigned[name].add(self._owner, rule)
            self._slots.over |= {(name, self._owner): None} if over else {}
        return len(chosen)

    def _dynamic(self, slot: str, argument: str, value: Any) -> None:
        """Refuse stages: an update is compiled once, for the whole run."""
        if isinstance(value, Stages):
            what = (
                f"{argument} cannot be stages(...), which compile a step for each of their numbers"
            )
            fix = f"{argument}=plateaus(...) jumps between numbers within one compiled step"
            raise self._refusal(slot, what, fix=fix)

    def _rate(self, slot: str, argument: str, value: Any) -> None:
        """Refuse stages, and negative numbers: a negative rate increases the loss, a negative decay the weights."""
        self._dynamic(slot, argument, value)
        least = value.least if isinstance(value, Schedule) else value
        if isinstance(least, (int, float)) and least < 0:
            raise self._refusal(slot, f"{argument}={least} is negative", fix="0 or more")

    def _chosen(self, where: Where, slot: str) -> list[str]:
        chosen = [name for name, info in self.parameters.items() if where(name, info)]
        if not chosen:
            roles = sorted({info.role for info in self.parameters.values()})
            own = sorted({info.owner for info in self.parameters.values()} - {"core"})
            raise PlanError(
                f"plugin '{self._owner}', {slot}: no parameter fits",
                where=f"parameters of their own have {', '.join(own)}" if own else None,
                fix=f"roles are {', '.join(roles)}; names are such as {few([*self.parameters])}",
            )
        return chosen

    def _stage(self, anchor: str, draft: Draft) -> None:
        if anchor not in ANCHORS:
            what = f"plugin '{self._owner}': a rule has no stage '{anchor}'"
            fix = f"{did_you_mean(anchor, ANCHORS)}stages are {', '.join(ANCHORS)}"
            raise PlanError(what, fix=fix)
        self._draft(anchor, draft)

    def _draft(self, anchor: str, draft: Draft) -> None:
        if not isinstance(draft, Draft):
            what = f"plugin '{self._owner}', stage {anchor}: {draft!r} is not a stage"
            raise PlanError(what, fix="wrap the function: minillm_core.stage(function, ...)")
        for argument, schedule in draft.schedules.items():
            self._dynamic(f"stage {anchor}", argument, schedule)


def _not_by_rows(
    claim: Claim[ByRows], name: str, why: str, others: Iterable[str], fix: str | None = None
) -> PlanError:
    """Return the error for a table that cannot be updated by rows."""
    plugins = (claim.owner, *sorted(others))
    return PlanError(
        f"plugin '{claim.owner}' updates '{name}' by rows: {why}",
        where=claim.where,
        fix=fix or f"leave out {' or '.join(repr(one) for one in plugins)}",
    ).concerning(name, claim.where, plugins=plugins)


def _is_pair(betas: Any) -> bool:
    """Return whether ``betas`` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return False
    return all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)
