"""The slots of the optimizer: rules, their stages, and which parameter follows which."""

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
from minillm_core.plugins.slots import Chain, Claim, Claims, way_out
from minillm_core.text import counted, did_you_mean, few, listed

Where = Callable[[str, "ParamInfo"], bool]

DEFAULT_RULE = "adamw"
"""The rule of every parameter that no plugin assigns."""

EVERY = "*"
"""In the place of a rule's name: whatever rules there are."""

ROWS = "rows:"
"""Before a table's name, the evidence of rows that were updated: how many, over all steps; alone, the steps."""

FIELDS = ("lr_mul", "wd_mul", "betas")
"""What ``optimizer.set`` sets."""

FROZEN = "frozen"
"""In the place of a rule's name: none changes the parameter."""


@dataclass(frozen=True)
class ParamInfo:
    """A parameter, as the plan knows it: what ``where(name, info)`` is asked about."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical names, such as ("heads", "dim")
    role: str  # attention.q, mlp.up, embedding.token, head, norm, scalar ...
    init: dict[str, Any]  # its initialiser, as JSON
    owner: str  # core, or the plugin whose module declares it
    lr_mul: float
    wd_mul: float
    rows: str = ""  # the batch field whose ids choose the rows that are read; empty: all are

    @property
    def size(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


@dataclass(frozen=True)
class Joined:
    """A stage in the chain of a rule's gradients."""

    owner: str
    name: str  # the owner's, with a suffix where it joins twice
    draft: Draft

    @property
    def anchor(self) -> str:
        """Its name among the stages of a rule."""
        return f"{GRADIENT}[{self.name}]"


class Blocks(NamedTuple):
    """The claim that a parameter's rows are several matrices."""

    rule: str  # that works on them
    count: int

    def __str__(self) -> str:
        return f"{self.count} matrices of its rows"


class OptimizerSlots:
    """The slots of the optimizer, and their resolution."""

    def __init__(
        self, parameters: Mapping[str, ParamInfo], values: ValueTable, train: Any, heads: Any
    ) -> None:
        self.parameters, self.values, self.train = parameters, values, train
        self.heads: tuple[int, int] = heads  # of queries, of keys and values
        core = ("core", core_rule(train))
        self.rules: dict[str, tuple[str, dict[str, Draft]]] = {DEFAULT_RULE: core}
        self.extensions: Claims[tuple[str, str], Draft] = Claims("opt.extend({}, {})")
        self.joined: list[tuple[str, Joined, tuple[str, ...], tuple[str, ...]]] = []
        self.assigned: Claims[str, str] = Claims("opt.assign[{}]")
        self.over: dict[tuple[str, str], None] = {}  # parameter, plugin whose claim outranks others
        self.outranked: dict[str, set[str]] = {}  # plugin: those whose claims dropped its own
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
        """Resolve to the groups of every parameter; every clash is an error."""
        # also where a plugin replaces AdamW's write: a step's report shows train.lr
        self.values.add("core", "train.lr", Scheduled(self.train.lr))
        for (rule, _), claim in sorted(self.extensions.items()):
            if rule not in (*self.rules, EVERY):
                raise self.lacks(rule, min(claim.held), claim.where)
        for rule, one, _, _ in self.joined:
            if rule not in (*self.rules, EVERY):
                raise self.lacks(rule, one.owner, f"opt.rule[{rule}].{GRADIENT}")
        for claim in self.blocks.values():
            for owner, blocks in claim.held.items():
                if blocks.rule not in self.rules:
                    raise self.lacks(blocks.rule, owner, f"opt.split({blocks.rule})")
        self.pass_over()
        rules = {name: self.rule(name) for name in sorted(self.rules)}
        assigned: dict[str, tuple[Rule, Member]] = {}
        for name, parameter in self.parameters.items():
            rule = self.assigned[name].resolve(DEFAULT_RULE)
            if rule == FROZEN:
                self.check_unset(name)
                continue
            if rule not in rules:
                raise self.lacks(rule, self.assigned[name].owner, f"opt.assign({rule})")
            factors = {}
            for field in ("lr_mul", "wd_mul"):
                held = self.multipliers[name, field].resolve(getattr(parameter, field))
                factors[field] = held.value if isinstance(held, Setting) else held
            claim = self.multipliers[name, "betas"]
            betas = claim.resolve()
            overrides = () if betas is None else (("beta1", betas[0]), ("beta2", betas[1]))
            if overrides and not rules[rule].takes("beta1", "beta2"):
                text = f"plugin '{claim.owner}' sets betas of '{name}', which follows the rule '{rule}'"
                fix = f"leave out '{claim.owner}', or '{rules[rule].owner}' for this parameter (its scope)"
                refusal = PlanError(f"{text}: it has none", where=claim.where, fix=fix)
                raise refusal.concerning(name, claim.where, plugins=(claim.owner,))
            rows = self.tables[name].resolve()
            more = {"overrides": overrides, "rows": rows, "view": self.views[name].resolve()}
            if (blocks := self.blocks[name].resolve()) is not None:
                if blocks.rule != rule or not rules[rule].stacked:
                    raise self.whole(name, rule)
                more["blocks"] = blocks.count
            member = Member(name, parameter.shape, **factors, **more)
            assigned[name] = (rules[rule], member)
        if not assigned and (owners := {self.assigned[name].owner for name in self.parameters}):
            raise PlanError(
                f"every parameter is frozen, by {listed(sorted(owners))}: there is nothing to train",
                where=f"opt.assign[{FROZEN}]",
                fix="leave a part of the model to be trained, or add a plugin that brings one (lora)",
            ).concerning(plugins=tuple(sorted(owners)))
        self.lead(assigned)
        groups = groups_of(assigned)
        self.check_rows(groups)
        return groups

    def lead(self, assigned: dict[str, tuple[Rule, Member]]) -> None:
        """Let parameters follow others: the same rule, and the others' factors until they part.

        Where factors differ both have them as schedules, so that both are updated by the same kernels.
        """
        for name, claim in self.follows.items():
            follow = claim.resolve()
            why = self.apart(name, follow, assigned)
            if why is not None:
                what = f"plugin '{claim.owner}' lets '{name}' follow '{follow.leader}': {why}"
                fix = f"leave out '{claim.owner}', or what tells the two apart"
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

    def apart(
        self, name: str, follow: Follow, assigned: Mapping[str, tuple[Rule, Member]]
    ) -> str | None:
        """Say why a parameter cannot follow another; None: it can."""
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
            return "they have other betas"
        for field in ("lr_mul", "wd_mul"):
            factors = {getattr(own, field), getattr(led, field)}
            if len(factors) > 1 and any(isinstance(factor, str) for factor in factors):
                return f"the {field} of one has a schedule that the other's has not"
        return None

    def pass_over(self) -> None:
        """Drop the claims that others outrank, and note it; two that outrank each other stay a clash."""
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

        Those of a plugin for its own parameters only say how they are trained where they are.
        """
        freezes, rows = self.assigned[name].owner, self.tables[name]
        if rows.held:
            raise _not_by_rows(rows, name, f"'{freezes}' freezes it", (freezes,))
        claims = {f"sets {field}": self.multipliers[name, field] for field in FIELDS}
        for did, claim in (claims | {"splits rows": self.blocks[name]}).items():
            for owner in claim.held.keys() - {self.parameters[name].owner}:
                raise PlanError(
                    f"plugin '{owner}' {did} of '{name}', which '{freezes}' freezes",
                    where=claim.where,
                    fix=f"leave out '{owner}' or '{freezes}'",
                ).concerning(name, claim.where, plugins=(owner, freezes))

    def check_rows(self, groups: Iterable[Group]) -> None:
        """Refuse tables whose rule is none that their rows can follow one at a time."""
        for group in groups:
            if (table := group.members[0].rows) is not None:
                name, owners = group.members[0].name, {owner for _, owner, _ in group.rule.stages}
                why = "a stage of its rule keeps state in fewer bits than float32, or has turns"
                if not any(one.narrow or one.every > 1 for _, _, one in group.rule.stages):
                    why = resolve(table.rule)(group).refuses()
                if why is not None:
                    raise _not_by_rows(self.tables[name], name, why, owners - {"core"})

    def whole(self, name: str, rule: str) -> PlanError:
        """Make the error of blocks of a parameter whose rule sees no matrices."""
        claim = self.blocks[name]
        return PlanError(
            f"plugin '{claim.owner}' splits '{name}' into matrices, and it follows the rule '{rule}'",
            where=claim.where,
            fix=f"leave out '{claim.owner}', or what keeps '{name}' from a rule that works on matrices",
        ).concerning(name, claim.where, plugins=(claim.owner,))

    def lacks(self, rule: str, owner: str, where: str) -> PlanError:
        """Make the error of a plugin that builds on a rule which is not there."""
        return PlanError(
            f"plugin '{owner}' builds on the rule '{rule}', which no active plugin provides",
            where=where,
            fix=f"name the one that provides it too (--plugins {rule},{owner}), or leave out '{owner}'",
        ).concerning(plugins=(owner,))

    def rule(self, name: str) -> Rule:
        """Resolve a rule with its extensions, its values named in the plan."""
        owner, drafts = self.rules[name]
        held = {anchor: (owner, draft) for anchor, draft in drafts.items()}
        for anchor in ANCHORS:
            claim = self.extension(name, anchor)
            if (extension := claim.resolve()) is not None:
                try:
                    drafted = extension.instead_of(held[anchor][1] if anchor in held else None)
                except ValueError as error:
                    text = f"plugin '{claim.owner}', {claim.where}: {error}"
                    refusal = PlanError(text, where=claim.where)
                    raise refusal.concerning(plugins=(claim.owner,)) from error
                state = (
                    [entry for entry, _ in held[anchor][1].stage.state] if anchor in held else []
                )
                if state and (name, anchor) not in self.extensions:  # by "*" alone
                    text = f"replaces {anchor} of every rule: '{name}' keeps no {listed(state)}"
                    self.values.notes[claim.owner, text] = None
                held[anchor] = (claim.owner, drafted)
        (writes, of_write), (looks, _) = held["write"], held.get("lookahead", held["write"])
        if (beside := [entry for entry, _ in of_write.stage.state]) and looks != writes:
            where = f"opt.extend({name}, lookahead)"
            what = (
                f"'{looks}' moves parameters behind the write of '{writes}', which keeps "
                f"{listed(beside)} for where it left them"
            )
            refusal = PlanError(what, where=where, fix=way_out(looks, writes))
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
        """Collect the stages before a rule's own, by the rule's name or as of every rule."""
        chain = Chain(f"opt.rule[{rule}]", (GRADIENT,), shapes=False)
        for named, one, before, after in self.joined:
            if named in (rule, EVERY):
                chain.add(GRADIENT, one, before, after)
        return chain

    def extension(self, rule: str, anchor: str) -> Claim[Draft]:
        """Collect the claims on a rule's stage, by the rule's name or as one of every rule's."""
        claim: Claim[Draft] = Claim(f"opt.extend({rule}, {anchor})")
        for named in (rule, EVERY):
            if (claims := self.extensions.get((named, anchor))) is not None:
                for owner, draft in claims.held.items():
                    claim.add(owner, draft, claims.lines[owner])
        return claim


def core_rule(train: Any) -> dict[str, Draft]:
    """Make AdamW with the run's settings."""
    beta1, beta2 = train.betas
    state = {"m": "like", "v": "like"}
    return {
        "precondition": stage(adam, state=state, beta1=beta1, beta2=beta2, epsilon=train.epsilon),
        "decay": stage(decay, weight_decay=train.weight_decay),
        "write": stage(write, lr=Scheduled(train.lr)),
    }


class OptimizerBuilder(Builder):
    """The optimizer, as one plugin sees it.

    Attributes:
        parameters: name -> ParamInfo, every parameter of the model.
        lr: train.lr.
        betas: train.betas.
        epsilon: train.epsilon.
        weight_decay: train.weight_decay.
        warmup: train.warmup, the share of the run over which its rates rise.
        heads: H.
        kv_heads: K.
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
        """Claim: a rule of this name; decoupled decay and the write are the core's unless given.

        ::

            momentum = stage(nesterov, state={"momentum": "like"}, beta=0.95)
            optimizer.rule("nesterov", lr=scheduled(0.02), momentum=momentum)

        Args:
            name: of the rule.
            lr: its peak learning rate, times the run's schedule; or a schedule of its own.
            weight_decay: of its own; None: train.weight_decay.
            stages: anchor (momentum, orthogonalise, precondition, scale, decay, write, lookahead,
                average) -> stage.

        Raises:
            PlanError: the rule exists, or there is no such anchor.
        """
        provided = {**self._slots.rules, FROZEN: ("core", {})}
        if name in provided:
            what, where = f"rule '{name}' is provided", f"opt.rule[{name}]"
            raise offered_twice(what, provided[name][0], self._owner, where)
        for anchor, draft in stages.items():
            self._stage(anchor, draft)
        self._finite(f"opt.rule({name})", lr=lr)
        for argument, value in (("lr", lr), ("weight_decay", weight_decay)):
            self._dynamic(f"opt.rule({name})", argument, value)
        schedule = lr if isinstance(lr, Schedule) else Scheduled(float(lr))
        shrink = self.weight_decay if weight_decay is None else weight_decay
        defaults = {"decay": stage(decay, weight_decay=shrink), "write": stage(write, lr=schedule)}
        self._slots.rules[name] = (self._owner, defaults | stages)

    def extend(self, rule: str, anchor: str, draft: Draft) -> None:
        """Claim per (rule, anchor): a stage of a rule that another plugin, or the core, provides.

        ::

            optimizer.extend("muon", "scale", stage(normalise, beta=0.95))

        Args:
            rule: its name, or ``"*"``: every rule that there is.
            anchor: which stage; one that the rule has is replaced.
            draft: INHERITED among its arguments is what the replaced stage was given.

        Raises:
            PlanError: while resolving: a lookahead of a rule whose write, another plugin's, has state:
                that would be of parameters which have moved since.
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
        """Chain: gradient (...), clipped by its global norm -> the gradient that the rule's stages are given.

        Its stages run before a rule's first, with state, schedules and ``needs="matrix"`` as any
        stage; none is replaced. What they change, the reported norm of gradients does not show.
        ::

            optimizer.gradient("*", stage(clip_rows, clipping=0.01), before="noise")

        Args:
            rule: its name, or ``"*"``: every rule that there is.
            draft: no INHERITED among its arguments, since no stage is replaced.
            name: a suffix, where a plugin joins twice.
            before: names of other plugins that join the same rule; one that is absent is no matter.
            after: the same.

        Raises:
            PlanError: while resolving: two plugins whose order neither states, a rule that is not there.
        """
        self._draft(GRADIENT, draft)
        if draft.inherited:
            text = f"{draft.inherited[0]}=INHERITED, and no stage is replaced there"
            raise self._refusal("opt.gradient", text)
        full = self._owner if name is None else f"{self._owner}_{name}"
        before, after = ((v,) if isinstance(v, str) else tuple(v) for v in (before, after))
        self._slots.joined.append((rule, Joined(self._owner, full, draft), before, after))

    def assign(self, rule: str, where: Where, *, over: bool = False) -> int:
        """Claim per parameter: those for which ``where(name, info)`` follow ``rule``.

        ::

            optimizer.assign("nesterov", lambda name, p: p.role.startswith("mlp."))

        Args:
            rule: its name.
            where: called with each parameter's name and facts, at once.
            over: where other plugins assign one of them to a rule, or freeze it, they are passed over,
                and a note says so; else that is refused.

        Returns:
            How many they are.

        Raises:
            PlanError: there is no such parameter.
        """
        return self._assigned(f"opt.assign({rule})", rule, where, over)

    def freeze(self, where: Where, *, over: bool = False) -> int:
        """Claim per parameter: those for which ``where(name, info)`` keep their values.

        ::

            optimizer.freeze(lambda name, p: p.role.startswith("embedding."))

        They have no gradient, no optimizer state, and where the compute dtype is narrower than float32
        no float32 copy on the device. Checkpoints hold them in float32, bit by bit as they were. It is
        the claim of ``assign``: another plugin's rule for one of them is refused, and so are factors
        that it sets for what is not its own.

        Args:
            where: called with each parameter's name and facts, at once.
            over: where other plugins assign one of them to a rule they are passed over, and a note
                says so; else that is refused.

        Returns:
            How many they are.

        Raises:
            PlanError: there is no such parameter; while resolving, where every one is frozen.
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
        """Claim per (parameter, field): factors on learning rate and decay; Adam's betas.

        ::

            optimizer.set(lambda name, p: p.role == "head", lr_mul=0.5, betas=(0.9, 0.95))
            optimizer.set(lambda name, p: p.role == "norm", lr_mul=plateaus((0, 0.0), (0.5, 1.0)))

        The second one freezes the norms until half of the run: where the learning rate is 0, so is
        the decay that it multiplies.

        Args:
            where: called with each parameter's name and facts, at once.
            lr_mul: factor on the learning rate: a number, or a schedule (piecewise, cosine,
                scheduled, plateaus), which is an input of the compiled step.
            wd_mul: factor on the weight decay, likewise.
            betas: Adam's, where the parameter follows a rule that has them.

        Returns:
            How many parameters they are.
        """
        fields: dict[str, Any] = {"lr_mul": lr_mul, "wd_mul": wd_mul, "betas": betas}
        self._finite("opt.set", **fields)
        chosen = self._chosen(where, "opt.set")
        if betas is not None and not _is_pair(betas):
            raise self._refusal(
                "opt.set",
                f"betas={betas!r}",
                fix="two numbers, at least 0 and below 1: betas=(0.9, 0.95)",
            )
        for field in ("lr_mul", "wd_mul"):
            if (factor := fields[field]) is not None:
                self._dynamic("opt.set", field, factor)
                held = self._setting(field, factor, chosen[0])  # the name of a second schedule
                fields[field] = held if held.constant is None else held.constant
        for name in chosen:
            for field, value in fields.items():
                if value is not None:
                    self._slots.multipliers[name, field].add(self._owner, value)
        return len(chosen)

    def rates(self, factor: Schedule) -> None:
        """Claim: a factor on the run's schedule, and so on every learning rate that follows it.

        They are train.lr, that of any rule with a number for its rate, and what is ``scheduled``; other
        schedules are as they were. Decoupled decay is multiplied by the rate, so it has the factor too.
        ::

            optimizer.rates(plateaus((0, 1.0), (0.5, 1.4)))

        Args:
            factor: piecewise, cosine or plateaus.

        Raises:
            PlanError: another schedule, or a number: that is train.lr.
        """
        if not isinstance(factor, (Piecewise, Cosine, Plateaus)) or isinstance(factor, Stages):
            fix = "piecewise(...), cosine(...) or plateaus(...)"
            raise self._refusal("opt.rates", f"{factor!r} is no factor over the run", fix=fix)
        self._slots.rates.add(self._owner, factor)

    def rows(self, where: Where, rule: type[RowRule], *, buckets: int = 8) -> int:
        """Claim per parameter: those for which ``where(name, info)`` are updated by the rows that a step sees.

        They are tables that are looked up by a batch field (``rows=`` of their Param). Gradient,
        norm, and the reads and writes of an update are of the rows whose ids are in a step's
        micro-batches; ``rule`` brings the others up to date when they are seen again. Evaluation,
        checkpoints and exports have the whole table up to date.

        Args:
            where: called with each parameter's name and facts, at once.
            rule: says what the parameter's own rule does to rows in between.
            buckets: sizes to which the number of rows is rounded up, by rows that are not seen: each
                is a shape of its own, which torch compiles when it is first met.

        Returns:
            How many they are.

        Raises:
            PlanError: there is no such parameter, or it is not looked up by a batch field; while
                resolving, where ``rule`` refuses its group, or it is frozen.

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
        """Claim: the run's schedule behind its warm-up, in the place of train.schedule.

        Called as ``function(x, **arguments)`` with x from 0, the warm-up's end, to 1, the run's: the
        share of a peak that every ``scheduled`` rate has there, train.lr's among them.
        ::

            optimizer.schedule(falling, power=1.2)  # (1 - x) ** 1.2

        Args:
            function: of a module.
            arguments: its keyword arguments, JSON.

        Raises:
            PlanError: the function cannot be referred to, or gives no number that is finite.
        """
        curve = self._function("opt.schedule", function, arguments)
        for x in (0.0, 0.5, 1.0):
            if not math.isfinite(made := curve.call(x)):
                raise self._refusal("opt.schedule", f"{made} at {x:g} of what follows the warm-up")
        self._slots.schedule.add(self._owner, curve)
        self.note(f"rates follow it, and not train.schedule={self._slots.train.schedule}")

    def split(self, rule: str, where: Where, blocks: int) -> int:
        """Claim per parameter: the rows of those for which ``where(name, info)`` are so many matrices.

        All stages of the rule see each block of rows as a matrix of its own: a parameter (R, C) is a
        stack of (R / blocks, C), which is orthogonalised, normed and measured block by block; its state
        is kept so, (blocks, ...) in a checkpoint.
        ::

            optimizer.split("muon", lambda name, p: p.role == "attention.q", optimizer.heads)

        Args:
            rule: the one that they follow, a stage of which ``needs`` matrices.
            where: called with each parameter's name and facts, at once.
            blocks: how many, 1 or more; they divide the rows.

        Returns:
            How many parameters they are.

        Raises:
            PlanError: there is no such parameter, or its rows cannot be divided so; while resolving,
                where one follows another rule, or one that needs no matrices.
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
        """Claim per parameter: evaluation, samples and exports use ``function``'s result in the place of those for which ``where(name, info)``.

        Training goes on from the parameters themselves, bit by bit. The function is pure, written once
        for all frameworks, and called whenever weights are read: ``(ops, param, state, **arguments) ->
        param``, of one parameter, float32. Its state are the entries of all stages of its rule by
        ``stage.entry`` (``precondition.m``), float32; where no update was made they are 0. A table of
        ``optimizer.rows`` is up to date. A frozen parameter has no view: it is used as it is.

        A checkpoint has both: a run that is resumed, or branched from (``--branch``), takes the
        parameters; ``eval``, ``generate``, ``chat``, ``export`` and ``--init RUN`` take the views, and
        need no plugin for it. It costs their bytes once more in a checkpoint, in float32, and while
        weights are read a copy in the compute dtype.

        Args:
            where: called with each parameter's name and facts, at once.
            function: of a module; returns a float32 array of the parameter's shape.
            arguments: its keyword arguments, JSON.

        Returns:
            How many they are.

        Raises:
            PlanError: there is no such parameter, or the function cannot be referred to.

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
        """Claim per parameter: it is ``leader`` until a share of the run, and goes by itself after it.

        Both begin with the leader's initial values. Until then both get the sum of their gradients,
        which counts once in the norm, and the leader's factors, so that they stay equal bit by bit, as
        one parameter that is used twice; after it each has its own gradient and its own factors, and
        the state of the rule that both had. Where a run begins with other weights (--init, --branch)
        before that share, the leader's take its place, its moments too.

        Args:
            parameter: its name.
            leader: another parameter of that shape, which follows none; both have one rule.
            until: share of the run; 1: to the end.

        Raises:
            PlanError: no such parameters, or a share outside the run; while resolving, where the two
                have other rules or betas, or one is frozen or updated by rows.

        ::

            optimizer.follow("head.weight", "embedding.weight", until=2 / 3)
        """
        slot = f"opt.follow[{parameter}]"
        for name in (parameter, leader):
            if name not in self.parameters:
                fix = f"{did_you_mean(name, self.parameters)}names are such as {few([*self.parameters])}"
                raise self._refusal(slot, f"'{name}' is no parameter", fix=fix)
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
            raise self._refusal(
                slot,
                f"{argument} cannot be stages(...), which compile a step for each of their numbers",
                fix=f"{argument}=plateaus(...) jumps between numbers within one compiled step",
            )

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
            raise PlanError(
                f"plugin '{self._owner}': a rule has no stage '{anchor}'",
                fix=f"{did_you_mean(anchor, ANCHORS)}stages are {', '.join(ANCHORS)}",
            )
        self._draft(anchor, draft)

    def _draft(self, anchor: str, draft: Draft) -> None:
        if not isinstance(draft, Draft):
            raise PlanError(
                f"plugin '{self._owner}', stage {anchor}: {draft!r} is no stage",
                fix="wrap the function: minillm_core.stage(function, ...)",
            )
        for argument, schedule in draft.schedules.items():
            self._dynamic(f"stage {anchor}", argument, schedule)


def _not_by_rows(
    claim: Claim[ByRows], name: str, why: str, others: Iterable[str], fix: str | None = None
) -> PlanError:
    """Make the error of a table that cannot be updated by rows."""
    plugins = (claim.owner, *sorted(others))
    return PlanError(
        f"plugin '{claim.owner}' updates '{name}' by rows: {why}",
        where=claim.where,
        fix=fix or f"leave out {' or '.join(repr(one) for one in plugins)}",
    ).concerning(name, claim.where, plugins=plugins)


def _is_pair(betas: Any) -> bool:
    """Return whether these are two decay rates."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return False
    return all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)
