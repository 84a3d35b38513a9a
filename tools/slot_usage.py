"""Techniques implemented with the slots: the slots that each uses, and its lines of code.

Lines are lines of code of the implementing file (:mod:`tools.size`), including imports and options.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tools.markdown import table
from tools.size import count


class Usage(NamedTuple):
    """A technique, the slots that it uses, and its source."""

    technique: str
    slots: str
    where: str = ""  # a module, or "title=" of an example on the page; empty: not shipped


YES: tuple[Usage, ...] = (
    Usage("Value residual", "`model.tap`, `attn.v`", "minillm_mix.value_residual"),
    Usage("Differential attention", "`attn.core`", "minillm_mix.diff_attn"),
    Usage("Attention sinks, softmax-off-by-one", "`attn.core`", "minillm_mix.attn_sink"),
    Usage("Prefix tuning, persistent memory", "`attn.core`", "minillm_mix.prefix_kv"),
    Usage("Forgetting attention", "`attn.core`, `keeps`", "minillm_mix.forgetting_attn"),
    Usage("Scores composed across heads (DC-MHA)", "`attn.core`, `keeps`", "minillm_modded.dc_mha"),
    Usage("Layers that run several times", "`model.loop`", "minillm_mix.layer_loop"),
    Usage("Interleaved heads (IHA)", "`attn.layout`", "minillm_mix.iha"),
    Usage("MLA", "`model.attention`, `keeps`, `window`", "minillm_mix.mla"),
    Usage(
        "Gated delta rule", "`model.attention`, `recurrent`, `documents`", "minillm_mix.gated_delta"
    ),
    Usage("Another attention in some layers", "`model.attention`, beside any preset"),
    Usage("Key offset", "`attn.qk.shift`, `attn.rope.expects`", "minillm_modded.key_offset"),
    Usage(
        "MUDD, with separate inputs of q, k, v and the stream",
        "`model.stream(at=)`, `model.input`, `model.tap`, `model.residual`",
        "minillm_modded.mudd",
    ),
    Usage("T5's relative position bias", "`attn.core` with `distance`"),
    Usage("Linear attention", "`model.attention`, `recurrent`"),
    Usage("A norm after each sublayer (Peri-LN)", '`model.residual(site, "sublayer", cls)`'),
    Usage("An MLP that two layers share", "`optimizer.follow`"),
    Usage("DenseFormer", "`model.tap`, `model.residual`"),
    Usage(
        "Hyper-connections, static and dynamic",
        "`model.stream(at=)`, `model.input`, `model.residual`",
        "minillm_mix.hyper_connections",
    ),
    Usage(
        "Later layers' attention reads one earlier stream",
        "`model.tap`, `model.input`",
        "minillm_modded.cached_stream",
    ),
    Usage("LoRA, and its merged export", "`model.linear`, `folded`", "minillm_hf.lora"),
    Usage("Freezing layers", "`optimizer.freeze`", "minillm_optim.freeze"),
    Usage(
        "Freezing from a fraction of the run on, or until then",
        "`optimizer.set(lr_mul=plateaus(...))`",
        "minillm_optim.freeze",
    ),
    Usage("A schedule of the run's rates", "`optimizer.schedule`", "minillm_optim.power_cooldown"),
    Usage(
        "Untying the head at a fraction of the run",
        "`optimizer.follow`",
        "minillm_modded.untie_head",
    ),
    Usage(
        "Batches that grow, with their rates",
        "`data.shapes`, `optimizer.rates`",
        "minillm_modded.batch_schedule",
    ),
    Usage(
        "Layers without attention or MLP",
        "`model.attention(layer, None)`",
        "minillm_modded.layer_drop",
    ),
    Usage("Lion", "`optimizer.rule`", "minillm_optim.lion"),
    Usage("Adafactor", "`optimizer.rule`, `needs=`", "minillm_optim.adafactor"),
    Usage("Shampoo", "`optimizer.rule`, `every=`", "minillm_optim.shampoo"),
    Usage("SOAP", "`optimizer.rule`, `every=`", "minillm_optim.soap"),
    Usage("SOAP before Muon's orthogonalisation", "`optimizer.extend`", "minillm_optim.soap_muon"),
    Usage("Muon by heads or pairs of heads", "`optimizer.split`", "minillm_muon.head_muon"),
    Usage(
        "A lower bound on updates, relative to the weights' norm",
        "`optimizer.extend`",
        "minillm_muon.uw_floor",
    ),
    Usage(
        "Tables that are updated every second step",
        "`every=`, `due`",
        "minillm_muon.two_step_embed",
    ),
    Usage("GaLore", "`every=`, state of a shape by `rank`", "minillm_optim.galore"),
    Usage("Sign of the momentum, with row norms", "`optimizer.rule`"),
    Usage("Lookahead, an outer Nesterov step (Snoo)", "`lookahead`", "minillm_optim.snoo"),
    Usage(
        "Gradients at a point other than the evaluated one (EMA-Nesterov)",
        "`lookahead`, `optimizer.view`",
        "minillm_optim.ema_nesterov",
    ),
    Usage("Schedule-free AdamW", "`optimizer.view`", "minillm_optim.schedule_free"),
    Usage("EMA of the weights", "`optimizer.view`, `average`", "minillm_optim.ema"),
    Usage("SWA, LAWA", "`optimizer.view`, `average`", "minillm_optim.swa"),
    Usage("A slow mean added to gradients (Grokfast)", "`optimizer.gradient`"),
    Usage(
        "A schedule for a single parameter group", "`optimizer.schedule`, `optimizer.set(lr_mul=)`"
    ),
    Usage("Clipping a parameter's gradient", "`optimizer.gradient`", "minillm_optim.agc"),
    Usage(
        "Clipping by the norm of a layer",
        "`optimizer.gradient`, `layer_grad_norm`",
        "minillm_optim.layer_clip",
    ),
    Usage(
        "Shrinking the embedding's gradient", "`model.embed.mix`", "minillm_optim.embed_grad_shrink"
    ),
    Usage(
        "AdamW with moments of 8 or 16 bits", '`state={"m": "like:int8"}`', "minillm_optim.adam8bit"
    ),
    Usage("Cautious AdamW", "`optimizer.rule`", "minillm_optim.cautious_adam"),
    Usage(
        "Tokens selected by their loss and a reference's (Rho-1)",
        "`loss.weights`",
        "minillm_data.rho1",
    ),
    Usage("Focal weights", "`loss.weights`"),
    Usage("Unlikelihood of recent tokens", "`loss.term`, `on_batch`"),
    Usage(
        "Rows selected by their loss and a reference's (JEST)", "`loss.rows`", "minillm_data.jest"
    ),
    Usage("Distillation", "`loss.reference`, `loss.term`", "minillm_data.distill"),
    Usage("Contrast between a row's tokens (SimCTG)", "`loss.term`", "minillm_data.simctg"),
    Usage("Predicting further tokens with the same head", "`loss.target`", "minillm_modded.mtp"),
    Usage(
        "Predicting a token that is a prefix of the next one",
        "`loss.target`, `pieces` of `on_batch`",
        "minillm_modded.prefix_tokens",
    ),
    Usage(
        "Predicting further tokens with separate heads", "`loss.term`, which an export leaves out"
    ),
    Usage("Token weights from the data", "`data.source(fields=)`", "title=answers.py"),
    Usage("Best-fit packing", "`data.packer`", "minillm_data.best_fit"),
    Usage("Length curriculum", "`data.shapes`", "minillm_data.length_curriculum"),
    Usage("Batches that grow", "`data.shapes`, or train.stages", "title=growing.py"),
    Usage("Training on answers", "`data.source`, `data.special`", "minillm_chat.sft"),
    Usage(
        "Stochastic depth",
        '`model.residual(site, "sublayer", cls)`, `on_batch`',
        "minillm_mix.stochastic_depth",
    ),
    Usage("Fill in the middle", "`data.special`, `on_batch`", "minillm_data.fim"),
    Usage("Tokens dropped or reordered", "`on_batch`"),
    Usage("Quantisation-aware training", "`model.linear`, `surrogate=True`", "minillm_hf.qat"),
    Usage("A kernel for one device", "`kernels.candidate`", "minillm_triton.triton"),
    Usage("Another evaluation", "`on_evaluated`", "title=hard_words.py"),
    Usage("Early stopping", "`on_evaluated`", "minillm_optim.early_stop"),
)
"""Techniques that are implemented without loss."""

PARTLY: tuple[tuple[str, str], ...] = (
    (
        "Mamba, RWKV",
        "linear attention and delta rules can be written as products over chunks; a true scan over tokens can only "
        "use `ops.scan`, which the compiled step unrolls",
    ),
)
"""Techniques that can be implemented in part."""

NOT: tuple[tuple[str, str], ...] = (
    ("Sharding", "the core decides how a run is divided among devices"),
    (
        "Activation offload",
        "a step's forward pass is one graph, so saved arrays can leave the device only at its end, after the peak "
        "(docs/experiments.md); train.checkpointing recomputes blocks, --memory splits rows",
    ),
    (
        "Data selected by the observed loss",
        "batches are made ahead of their step, and a resumed run must make the same ones",
    ),
)
"""Techniques that cannot be implemented."""


AS_IT_IS, IN_PART, NOT_AT_ALL = "as it is", "partly", "not"


class Tried(NamedTuple):
    """A technique of a paper or a record, tried as a stranger would: from the docs alone."""

    technique: str
    where: tuple[str, ...] = ()  # modules or examples, as in Usage; empty: none is shipped
    sayable: str = AS_IT_IS
    under: str = ""  # not sayable as it is: the heading of its paragraph in authoring.md
    why: str = ""  # not sayable as it is: the reason


TRIED: tuple[Tried, ...] = (
    Tried("Value residual (ResFormer)", ("minillm_mix.value_residual",)),
    Tried("Scores composed across heads (DC-MHA)", ("minillm_modded.dc_mha",)),
    Tried("MUDD or DenseFormer, one input a block", ("minillm_modded.mudd",)),
    Tried("MUDD, with separate inputs of q, k, v and the stream", ("minillm_modded.mudd",)),
    Tried("Hyper-connections, static", ("minillm_mix.hyper_connections",)),
    Tried("Hyper-connections, dynamic, n lanes", ("minillm_mix.hyper_connections",)),
    Tried("Differential attention", ("minillm_mix.diff_attn",)),
    Tried("MLA, with a cache of latents", ("minillm_mix.mla",)),
    Tried("Gated linear attention, chunked, with a recurrent state", ("minillm_mix.gated_delta",)),
    Tried(
        "Mamba, RWKV",
        (),
        IN_PART,
        "Recurrences over tokens",
        "only those that can be written as products over chunks, such as linear attention and delta rules; a true scan "
        "can only use `ops.scan`, which the compiled step unrolls",
    ),
    Tried("A different token mixer in some layers, with any preset", ("minillm_mix.gated_delta",)),
    Tried("LoRA on a trained model", ("minillm_hf.lora",)),
    Tried("LoRA, exported merged", ("minillm_hf.lora",)),
    Tried("Freezing layers", ("minillm_optim.freeze",)),
    Tried("Freezing from a fraction of the run on", ("minillm_optim.freeze",)),
    Tried("Gradual unfreezing, learning rates by layer and time", ("minillm_optim.freeze",)),
    Tried("Lion", ("minillm_optim.lion",)),
    Tried("Adafactor", ("minillm_optim.adafactor",)),
    Tried("SOAP, Shampoo", ("minillm_optim.soap", "minillm_optim.shampoo")),
    Tried("Sign of the momentum, with row norms"),
    Tried("Schedule-free AdamW, evaluated at its average", ("minillm_optim.schedule_free",)),
    Tried("EMA of the weights, evaluated and exported", ("minillm_optim.ema",)),
    Tried(
        "Clipping by parameter or layer, before any rule",
        ("minillm_optim.agc", "minillm_optim.layer_clip"),
    ),
    Tried("AdamW with moments of 8 or 16 bits", ("minillm_optim.adam8bit",)),
    Tried(
        "Cautious AdamW, GaLore; optimizer state sharded among GPUs",
        ("minillm_optim.cautious_adam", "minillm_optim.galore"),
        IN_PART,
        "Placement",
        "both rules can be written; where their state is held is a setting (`mesh.*`), the same for every rule",
    ),
    Tried("Rho-1, by the losses of a reference and of the model", ("minillm_data.rho1",)),
    Tried("Token weights by a reference only", ("minillm_data.rho1",)),
    Tried("A frozen second model in the step", ("title=distil.py",)),
    Tried("Distillation from logits", ("minillm_data.distill",)),
    Tried("Multi-token prediction with separate heads"),
    Tried("Contrastive losses, prefix tokens", ("minillm_data.simctg", "minillm_mix.prefix_kv")),
    Tried("Label weights from the data, by token", ("title=answers.py",)),
    Tried("A source of documents", ("title=answers.py",)),
    Tried("Best-fit packing", ("minillm_data.best_fit",)),
    Tried("A curriculum of lengths", ("minillm_data.length_curriculum",)),
    Tried("A schedule of batch sizes", ("minillm_modded.batch_schedule",)),
    Tried("Training on answers (SFT)", ("minillm_chat.sft",)),
    Tried("Fill in the middle", ("minillm_data.fim",)),
    Tried("Tokens dropped or reordered"),
    Tried("Quantisation-aware training", ("minillm_hf.qat",)),
    Tried("A kernel that cannot run on this machine", ("minillm_triton.triton",)),
    Tried(
        "FSDP or DDP, activation offload",
        (),
        NOT_AT_ALL,
        "Placement",
        "settings, not slots, decide which process or device holds what (`mesh.*`, `train.checkpointing`)",
    ),
    Tried("Untying the head at two thirds", ("minillm_modded.untie_head",)),
    Tried("A custom evaluation", ("title=hard_words.py",)),
    Tried("Early stopping", ("minillm_optim.early_stop",)),
    Tried(
        "A curriculum driven by the observed loss",
        (),
        NOT_AT_ALL,
        "The loop",
        "batches are made ahead of their step, and a resumed run must make the same ones; `loss.rows` selects among the "
        "rows of its own step",
    ),
)
"""The techniques that were tried first, in the order in which they were."""


def lines_of(where: str, page: str) -> str:
    """Count the lines of code of a module, or of an example on the page."""
    if where.startswith("title="):
        text = page.partition(f"```python {where}\n")[2].partition("```")[0]
        return str(count(where, text).code)
    spec = find_spec(where)
    assert spec is not None, where
    assert spec.origin is not None, where
    return str(count(where, Path(spec.origin).read_text("utf-8")).code)


def usage_tables(page: str) -> str:
    """Generate the tables."""
    rows = [
        (
            one.technique,
            one.slots,
            _shown(one.where) if one.where else "not shipped",
            lines_of(one.where, page) if one.where else "",
        )
        for one in YES
    ]
    return "\n\n".join(
        (
            table(("technique", "slots", "plugin, or example here", "lines"), rows),
            table(("partly", "what can be expressed, and what cannot"), PARTLY),
            table(("not possible", "why"), NOT),
            "### The techniques that were tried first",
            tried_summary(),
            table(HEAD, [_tried(number, one, page) for number, one in enumerate(TRIED, 1)]),
        )
    )


HEAD = (
    *("", "technique", "expressible", "plugin, or example here", "lines"),
    "what cannot be expressed, and why",
)


def tried_summary() -> str:
    """Say how many of the techniques that were tried first can be expressed."""
    as_it_is, in_part, not_at_all = (
        sum(one.sayable == verdict for one in TRIED) for verdict in (AS_IT_IS, IN_PART, NOT_AT_ALL)
    )
    unshipped = sum(one.sayable == AS_IT_IS and not one.where for one in TRIED)
    return (
        f"{len(TRIED)} techniques from papers and records were tried as a newcomer would, with nothing but the "
        "documentation, before most of these slots existed; 12 could be expressed then. Now "
        f"**{as_it_is} can be expressed as they are, {in_part} partly and {not_at_all} not**. {unshipped} of the "
        f"{as_it_is} are not shipped."
    )


def _tried(number: int, one: Tried, page: str) -> tuple[str, ...]:
    """Make the row of a technique that was tried first."""
    link = f"[{one.under}](authoring.md#what-a-plugin-cannot-say): " if one.under else ""
    return (
        str(number),
        one.technique,
        one.sayable,
        ", ".join(map(_shown, one.where)) or "not shipped" * (one.sayable == AS_IT_IS),
        ", ".join(lines_of(where, page) for where in one.where),
        link + one.why,
    )


def _shown(where: str) -> str:
    """Return the name of a plugin, or of an example on the page."""
    return f"`{where.removeprefix('title=') if '=' in where else where.rpartition('.')[2]}`"
