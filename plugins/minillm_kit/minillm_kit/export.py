"""The export: the exported tensors give the same logits in the published Llama and Qwen3, or its own modeling file.

The published models are implemented here in NumPy float64 from their definitions, using only tensor names
and keys of config.json: they share no code with the exported models. A model of no layout that others
know is exported with a modeling file made from the plugin's source; that is run by Transformers in a
process that cannot import minillm (elsewhere.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from minillm_core import MinillmError, Plan, PlanError
from minillm_core.commands import pip_line
from minillm_hf import export_layout, exported, scaling_of, write_own
from minillm_kit.check import Failed, NotApplicable
from minillm_kit.elsewhere import BROKEN, logits_elsewhere
from minillm_kit.oracle import Oracle
from minillm_kit.subject import Subject, first_row, states

Arrays = Mapping[str, np.ndarray]

BOUND = 1e-6
"""Largest difference of a logit: a model's rotary tables are float32."""

OWN_BOUND = 1e-4
"""Largest difference of a logit in a modeling file of its own: both are float32."""


def exports(subject: Subject) -> str:
    """Check that the exported tensors give the plugin's logits in the published model of that layout.

    A model of no layout that others know is written with its own modeling file. So is a model that the
    claimed layout refuses because of the plugin's options, if it takes the model of the default options.
    """
    plan, claimed = subject.plan(), subject.found.cls.manifest.export
    if plan.export.layout is None:
        return _own(subject, plan)
    oracle = Oracle(subject, plan)
    row = first_row(subject.batches(plan, 1)[0])
    state = states(subject.trainer(plan, subject.backends[0]).arrays())
    cause = (
        f"export={claimed!r} is claimed of a model that computes something else"
        if claimed
        else "it claims no export, and changes what the plain model computes in a slot that is not "
        "seen to: tell the authors of minillm"
    )
    try:
        layout = export_layout(plan)
        tensors = exported(plan, {f"model.{n}": oracle.get(n) for n in oracle.places} | state)
    except PlanError as error:
        if claimed is None:
            return _own(subject, plan)
        if not subject.options or _refused_by_default(subject):
            raise Failed(error.what, cause=cause) from error
        return f"{_own(subject, plan)} (with these options, {error.what})"
    config = layout.document(
        plan.config.model,
        positions=row["ids"].shape[1],
        boundary=None,
        scaling=scaling_of(plan),
    )
    theirs = logits(tensors, config, row["ids"][0])[-1]
    apart = float(np.abs(oracle.logits(row) - theirs).max())
    if not apart <= BOUND:
        raise Failed(
            f"the published {layout.name} with its weights gives logits {apart:.1e} from its own "
            f"(bound {BOUND:.0e})",
            cause=cause,
        )
    return f"{layout.name}: logits {apart:.0e} apart"


def _refused_by_default(subject: Subject) -> bool:
    """Return whether the claimed layout also refuses the model of the plugin's default options."""
    try:
        plan = Subject(subject.spec).plan()
    except MinillmError:
        return False  # such as where an option is required
    try:
        export_layout(plan)
    except PlanError:
        return True
    return False


def _own(subject: Subject, plan: Plan) -> str:
    """Compare the logits of a directory with its own modeling file, in Transformers, with the plan's on torch."""
    if "torch" not in subject.backends:
        raise NotApplicable("its own modeling file is run on torch, and this is another backend")
    if find_spec("transformers") is None:
        raise NotApplicable(
            f"its own modeling file is run by Transformers, which is not installed: {pip_line('transformers')}"
        )
    run = subject.trainer(plan, "torch", stirred=True)
    row = first_row(subject.batches(plan, 1, phase="decode")[0])
    arrays = {k: v for k, v in run.arrays().items() if k.startswith(("model.", "state."))}
    with TemporaryDirectory(prefix="minillm-") as above:
        folder = Path(above, "model")
        try:
            write_own(folder, plan, arrays)
        except PlanError as error:
            raise NotApplicable(f"it has no export: {error.what}") from error
        theirs = logits_elsewhere(folder, row["ids"][0])
    length = len(theirs)
    ours = np.stack(
        [run.next_logits({k: a[:, : t + 1] for k, a in row.items()}) for t in range(length)]
    )
    apart = float(np.abs(ours - theirs).max())
    if not apart <= OWN_BOUND:
        raise Failed(
            f"without minillm its modeling file gives logits {apart:.1e} from its own "
            f"(bound {OWN_BOUND:.0e})",
            cause=BROKEN,
        )
    return f"its own modeling file: logits {apart:.0e} apart in Transformers"


def logits(tensors: Arrays, config: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
    """Run ``ids`` (T,) through the model of an exported directory; return the logits, (T, V).

    Args:
        tensors: by their names in the directory.
        config: its config.json.
        ids: at positions 0, 1, 2, ...
    """
    weights = {name: array.astype(np.float64) for name, array in tensors.items()}
    epsilon = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        layer = {n.removeprefix(at): w for n, w in weights.items() if n.startswith(at)}
        x = x + _attention(layer, config, _norm(x, layer["input_layernorm.weight"], epsilon))
        x = x + _mlp(layer, _norm(x, layer["post_attention_layernorm.weight"], epsilon))
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return _norm(x, weights["model.norm.weight"], epsilon) @ weights[head].T


def _norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def _mlp(layer: Arrays, x: np.ndarray) -> np.ndarray:
    gate = x @ layer["mlp.gate_proj.weight"].T
    up = x @ layer["mlp.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T


def _attention(layer: Arrays, config: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    """Compute causal attention, x (T, C) -> (T, C); only Qwen3 has weights for norms of queries and keys."""
    width, epsilon = config["head_dim"], config["rms_norm_eps"]
    q, k, v = (
        (
            x @ layer[f"self_attn.{part}_proj.weight"].T
            + layer.get(f"self_attn.{part}_proj.bias", 0.0)
        )
        .reshape(len(x), -1, width)
        .swapaxes(0, 1)
        for part in "qkv"
    )  # (heads, T, D)
    if "self_attn.q_norm.weight" in layer:
        q = _norm(q, layer["self_attn.q_norm.weight"], epsilon)
        k = _norm(k, layer["self_attn.k_norm.weight"], epsilon)
    theta, sharper = _frequencies(config["rope_parameters"], width // 2)
    q, k = (sharper * _rotated(part, theta) for part in (q, k))
    k, v = (np.repeat(part, len(q) // len(part), 0) for part in (k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(width)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (shares / shares.sum(-1, keepdims=True)) @ v
    return mixed.swapaxes(0, 1).reshape(len(x), -1) @ layer["self_attn.o_proj.weight"].T


def _frequencies(rope: Mapping[str, Any], half: int) -> tuple[np.ndarray, float]:
    """Return the radians per position of each pair (D/2,), and the factor applied to q and k."""
    base = rope["rope_theta"]
    theta = base ** (-np.arange(half) / half)
    if rope["rope_type"] == "default":
        return theta, 1.0
    factor, length = rope["factor"], rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":  # by wavelengths, as in the code of Llama 3.1
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        found = []
        for one in theta:
            wave = 2 * np.pi / one
            smooth = (length / wave - low) / (high - low)
            between = (1 - smooth) * one / factor + smooth * one
            slow, fast = wave > length / low, wave < length / high
            found.append(one / factor if slow else one if fast else between)
        return np.array(found), 1.0
    pairs = [  # YaRN, arXiv:2309.00071
        half * np.log(length / (2 * np.pi * turns)) / np.log(base)
        for turns in (rope["beta_fast"], rope["beta_slow"])
    ]
    if rope["truncate"]:
        pairs = [np.floor(pairs[0]), np.ceil(pairs[1])]
    first, last = max(pairs[0], 0), min(pairs[1], 2 * half - 1)
    ramp = np.clip((np.arange(half) - first) / (last - first or 0.001), 0, 1)
    sharper = rope.get("attention_factor", 0.1 * np.log(factor) + 1)
    return theta * (1 - ramp) + theta / factor * ramp, sharper


def _rotated(x: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Rotate the pair (i, i + D/2) of x (heads, T, D) by position * theta_i."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(x.shape[1]), theta)
    a, b = x[..., :half], x[..., half:]
    turned = (a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles))
    return np.concatenate(turned, -1)
