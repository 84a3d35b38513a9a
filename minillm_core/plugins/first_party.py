"""First-party plugins, commands and parts outside the core, and the pip requirement of each."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from minillm_core.errors import PluginError
from minillm_core.install import installed_version, pip_line

if TYPE_CHECKING:
    from minillm_core.plugins.discover import Offer

CORE = "minillm-core"

_OFFERED = {
    "minillm-chat": "sft sparse_loss",
    "minillm-cute[cuda]": "cute fused_relu2 fused_swiglu",
    "minillm-data": (
        "best_fit distill domain_tokens eos_align fim jest length_buckets length_curriculum rho1 shuffle_rows "
        "simctg source_weights"
    ),
    "minillm-hf": "llama3_rope lora qat qkv_bias yarn_rope",
    "minillm-liger[cuda]": "liger",
    "minillm-metal": "metal",
    "minillm-mix": (
        "attn_sink diff_attn forgetting_attn gated_delta hyper_connections iha layer_loop mla prefix_kv "
        "stochastic_depth value_residual"
    ),
    "minillm-modded": (
        "attn_scale backout batch_schedule bigram_hash cached_stream dc_mha embed_norm embed_skip half_rope "
        "key_offset layer_drop logit_rescale moe mtp mudd paired_heads prefix_tokens qk_norm relu2 "
        "residual_decay seq_schedule smear softcap sparse_gate sparse_rows unet_skip "
        "untie_head value_embeds value_init windows xsa zero_init"
    ),
    "minillm-muon": (
        "cautious_wd head_muon muon muon_eq normuon polar_express role_lr two_step_embed uw_floor"
    ),
    "minillm-optim": (
        "adafactor adam8bit ademamix agc cautious_adam early_stop ema ema_nesterov "
        "embed_grad_shrink freeze galore infinite_lr layer_clip lion mars power_cooldown "
        "schedule_free shampoo snoo soap soap_muon swa"
    ),
    "minillm-track": "throttle",
    "minillm-track[tensorboard]": "tensorboard",
    "minillm-track[trackio]": "trackio",
    "minillm-track[wandb]": "wandb",
    "minillm-triton[cuda]": "fp8_head fp8_mlp triton",
}

FIRST_PARTY: Mapping[str, str] = {
    name: requirement for requirement, names in _OFFERED.items() for name in names.split()
}
"""Plugin -> its pip requirement, with an extra if the plugin needs another package to run."""

_COMMANDS = {
    "minillm-chat": "chat",
    "minillm-data": (
        "data.tokenize data.train-tokenizer data.inspect data.dedup data.filter data.mix "
        "data.cache.list data.cache.clear"
    ),
    "minillm-kit": "plugins.new plugins.check kernels.list kernels.check kernels.bench",
    "minillm-lab": "ablate report bench doctor search tune",
}

FIRST_PARTY_COMMANDS: Mapping[str, str] = {
    name: distribution for distribution, names in _COMMANDS.items() for name in names.split()
}
"""Command, named as its entry point -> its pip requirement."""

PROVIDERS: Mapping[str, str] = {
    "minillm.axes": "minillm-mesh",
    "minillm.directories": "minillm-hf",
    "minillm.forecasts": "minillm-mesh",
    "minillm.measured": "minillm-lab",
    "minillm.questions": "minillm-chat",
    "minillm.ranks": "minillm-mesh",
    "minillm.tables": "minillm-modded",
    "minillm.tuning": "minillm-chat",
}
"""Group of entry points through which the core uses a part that it lacks -> the distribution with that part."""

DISTRIBUTIONS = frozenset(
    {
        *(CORE, "minillm-eval", "minillm-mesh"),
        *(one.partition("[")[0] for one in (*_OFFERED, *_COMMANDS)),
    }
)
"""Distributions that carry one version and work only beside others of the same version."""


def check_versions(active: Iterable[str | None]) -> None:
    """Refuse a run whose first-party distributions are not all of the core's version.

    A mix would fail later and less clearly: names that one version moved, options that another lacks.
    Distributions that the run does not use are not checked.

    Args:
        active: the distributions of the run; third-party ones, and None for a file, are ignored.

    Raises:
        PluginError: one is of another version than the core; the fix upgrades all that are installed.
    """
    ours = DISTRIBUTIONS.intersection(active)
    mixed = (
        ours and version_mix(_installed({CORE, *ours})) and version_mix(_installed(DISTRIBUTIONS))
    )
    if mixed:
        what, fix = mixed
        raise PluginError(what, where=f"installed for {sys.executable}", fix=fix)


def version_mix(versions: Mapping[str, str]) -> tuple[str, str] | None:
    """Describe a mismatch of first-party versions.

    Args:
        versions: distribution -> installed version; nothing is compared unless the core is included.

    Returns:
        The mismatch in words, and the pip line that fixes it; None if all versions are equal. The
        line names every distribution given, since any left out would not match afterwards.
    """
    core = versions.get(CORE)
    others = {name: here for name, here in versions.items() if core not in (None, here)}
    if not others:
        return None
    listed = ", ".join(f"{name} {here}" for name, here in sorted(others.items()))
    what = f"{listed} beside {CORE} {core}: they work only with their own version"
    return what, pip_line(CORE, *sorted(versions.keys() - {CORE}), upgrade=True)


def _installed(names: Iterable[str]) -> dict[str, str]:
    found = {name: installed_version(name) for name in names}
    return {name: here for name, here in found.items() if here is not None}


def missing_plugins(missing: Collection[str]) -> PluginError:
    """Return the error for first-party plugins that are not installed, with one pip line for all.

    Args:
        missing: names of :data:`FIRST_PARTY` that no installed distribution offers.
    """
    return PluginError(
        f"{len(missing)} plugins of this run are not installed: {', '.join(sorted(missing))}",
        where=f"looked among the plugins installed for {sys.executable}",
        fix=installing(FIRST_PARTY[name] for name in missing),
    )


def installing(requirements: Iterable[str]) -> str:
    """Return the pip line for first-party distributions; an installed one that lacks the name is too old."""
    needed = sorted(set(requirements))
    old = any(installed_version(requirement.partition("[")[0]) for requirement in needed)
    return pip_line(*needed, upgrade=old)


def unusable(kind: str, name: str, offers: Sequence[Offer], requirement: str) -> PluginError | None:
    """Return the error for an unusable name, from metadata and source; None if it can be imported.

    Args:
        kind: ``plugin`` or ``command``.
        name: the name as typed.
        offers: the entry points of that name, at least one.
        requirement: the pip requirement of the first-party one, which the fix never uninstalls.
    """
    ours, distributions = requirement.partition("[")[0], {one.distribution for one in offers}
    (first, *more) = offers
    if more:
        others = sorted(distributions - {ours}) or [one.file or one.value for one in offers]
        known = f" (minillm's own '{name}' comes from {ours})" if ours in distributions else ""
        return PluginError(
            f"{kind} '{name}' is offered by {' and '.join(one.offered_by for one in offers)}",
            where=", ".join(one.value for one in offers),
            fix=f"uninstall the distribution that you do not need: {' or '.join(others)}{known}",
        )
    if first.broken and not first.unparsable:  # Python's own error shows line and caret
        return PluginError(
            f"{kind} '{name}' of {first.offered_by} cannot be used: {first.broken}",
            where=first.file or first.value,
            fix=pip_line(first.distribution, upgrade=True),
        )
    return None
