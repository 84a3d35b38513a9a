"""Tensor parallelism: the model of 1 / N of the heads, refusals of plans, and slices of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import minillm_core as minillm
from minillm_core.backends.ranks import ALONE
from minillm_core.inspection import declared, decoder
from minillm_mesh.axes import axes_of
from minillm_mesh.tensor_spec import check, cuts, divided, summed


def plan_of(plugins: str | None = None, **settings: Any) -> minillm.Plan:
    """Build a plan of preset tiny, with as many key-value heads as query heads."""
    given = {key.replace("_", ".", 1): value for key, value in settings.items()}
    return minillm.build_plan(
        minillm.load(preset="tiny", plugins=plugins, settings={"model.kv_heads": 4, **given})
    )


@pytest.mark.parametrize("plugins", [None, "moe", "mla", "value_embeds,sparse_gate,xsa", "lora"])
@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_all_processes_are_each_parameter_once(plugins: str | None, size: int) -> None:
    plan = plan_of(plugins)
    check(plan, size)
    whole, part = decoder(plan.spec), decoder(divided(plan.spec, size))
    found, own = dict(cuts(whole, part)), {name: one.shape for name, _, _, one in declared(part)}
    for name, _, _, one in declared(whole, minillm.Param):
        cut = found.get(name)
        assert math.prod(own[name]) * (cut.parts if cut else 1) == math.prod(one.shape)
        assert cut is None or [cut.place(rank, size) for rank in range(size)] == [*range(size)]
    leaves = summed(whole, part)
    assert "layers.0.attention.o" in leaves
    assert not any(name.endswith((".q", ".gate", ".up")) for name in leaves)


def test_fewer_heads_for_keys_than_processes_are_those_of_several() -> None:
    plan = plan_of(model_kv_heads=2)
    whole, part = decoder(plan.spec), decoder(divided(plan.spec, 4))
    cut = dict(cuts(whole, part))["layers.0.attention.k.weight"]
    assert [cut.place(rank, 4) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("plugins", "why"),
    [
        ("dc_mha", r"has a parameter \(4, 4\) that is \(2, 2\)"),
        ("iha", "and no slice of it"),
        ("gated_delta", "and no slice of it"),
        ("sparse_loss", "gathers the supervised positions"),
        ("jest", "chooses rows to train on"),
        ("rho1", "weighs positions"),
        ("fp8_mlp", "computes the products of its linear layers itself"),
        ("fused_relu2", "computes the products of its linear layers itself"),
        ("fused_swiglu", "computes the products of its linear layers itself"),
    ],
)
def test_what_is_not_divided_is_refused_by_name(plugins: str, why: str) -> None:
    plan = plan_of(plugins)
    with pytest.raises(minillm.PlanError, match=f"plugin '{plugins}' .*{why}") as refused:
        check(plan, 2)
    assert refused.value.fix == f"--plugins -{plugins}, or mesh.tensor=1"
    assert axes_of(plan)["tensor"] == refused.value.what


OWN = '''
import torch
from minillm_core import Linear, Module, Plugin

class Own(Plugin, api=1):
    """An MLP that does not call its last linear layer, as a kernel of its own would."""

    def build_model(self, model):
        model.mlp(1, MLP, hidden=model.hidden)

class MLP(Module):
    """x (B, T, C) -> relu(x Wup^T) Wdown^T (B, T, C)."""

    def __init__(self, geometry, hidden):
        super().__init__()
        self.up = Linear(geometry.dim, hidden, role="mlp.up", axes=("hidden", "dim"))
        self.down = Linear(hidden, geometry.dim, role="mlp.down", axes=("dim", "hidden"))

    def forward(self, x):
        """x (B, T, C) -> (B, T, C)."""
        h = self.ops.relu(self.up(x))
        return self.ops.linear(h, self.down.weight) if WHEN else self.down(h)
'''


@pytest.mark.slow
@pytest.mark.parametrize("when", ["True", "self.training and torch.is_grad_enabled()"])
def test_products_that_pass_over_their_leaves_are_found_before_training(
    when: str, processes: Callable[..., str], tmp_path: Path
) -> None:
    plugin, text = tmp_path / "own.py", tmp_path / "text.txt"
    plugin.write_text(OWN.replace("WHEN", when))
    text.write_text("One and one is two. " * 2000)
    given = ("--preset", "tiny", "--device", "cpu", "--backend", "torch", "--data", str(text))
    sizes = ("model.layers=2", "model.vocab=300", "model.kv_heads=4", "mesh.tensor=2")
    more = ("--plugins", f"{plugin}:Own", "--out", str(tmp_path / "run"), "--steps", "1")
    said = processes(2, "minillm_core", "train", *given, *sizes, *more, code=2)
    words = " ".join(said.split())
    assert "plugin 'own' computes the products of its linear layers itself, without" in words
    assert "so tensor parallelism cannot split it" in words
    assert "--plugins -own, or mesh.tensor=1" in words


def test_numbers_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(minillm.ConfigError, match=r"3 processes cannot share .* of 4") as refused:
        check(plan_of(), 3)
    assert refused.value.fix == "model.heads=6, or a mesh.tensor that divides it"
    with pytest.raises(
        minillm.PlanError, match="'paired_heads' joins 2 heads, but one process has"
    ):
        check(plan_of("paired_heads", model_kv_heads=2), 2)
    with pytest.raises(minillm.PlanError, match="'relu2' is 99 wide inside"):
        check(plan_of("relu2", relu2_hidden=99), 2)


def test_axes_are_refused_one_by_one() -> None:
    free = dict.fromkeys(("data", "weights", "rows", "context", "tensor", "pipeline"))
    assert axes_of(plan_of("muon")) == free
    assert axes_of(plan_of("batch_schedule", train_rows=3)) == free  # numbers are those of a run
    found = axes_of(plan_of("jest"))
    chosen = "the choice of what is trained on needs a whole micro-batch, which cannot be divided"
    assert (found["data"], found["rows"]) == (None, chosen)
    everywhere = {*axes_of(plan_of("sparse_rows,value_embeds")).values()}
    assert len(everywhere) == 1
    assert None not in everywhere


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        ("dc_mha", "'key_scores' and 'key_weights' of all before"),
        ("forgetting_attn", "'faded' of all before"),
        ("gated_delta", "'memory' and 'tail' of all before"),
        ("mla", "'latent' of all before"),
        ("moe", "'balance' of whole rows"),
        ("sparse_loss", "the supervised positions"),
    ],
)
def test_what_columns_refuse_is_said(plugin: str, why: str) -> None:
    assert why in (axes_of(plan_of(plugin))["context"] or "")


def test_a_term_that_looks_back_is_refused_where_columns_are_shared(tmp_path: Path) -> None:
    (tmp_path / "repeats.py").write_text(
        "from minillm_core import Module, Plugin\n"
        "class Repeats(Plugin, api=1):\n"
        "    'A term of each token and the one before.'\n"
        "    def compute_loss(self, loss):\n"
        "        loss.term('repeats', Term)\n"
        "class Term(Module):\n"
        "    lookback = 1\n"
        "    def forward(self, x):\n"
        "        return self.ops.mean(x[:, 1:] * x[:, :-1])\n"
    )
    axes = axes_of(plan_of(f"{tmp_path}/repeats.py:Repeats"))
    assert "plugin 'repeats' reads earlier columns in a loss term" in (axes["context"] or "")
    assert axes["rows"] is None


def test_one_process_has_no_others_to_share_with() -> None:
    with pytest.raises(minillm.BackendError, match="there is only one") as refused:
        ALONE.share_rows(1, 2)
    assert refused.value.where == "mesh.tensor=2"


def test_the_plan_does_not_depend_on_it() -> None:
    assert plan_of(mesh_tensor=2).hash == plan_of().hash
