"""The plain model: Llama's layout."""

from __future__ import annotations

from minillm_core.checkpoint.directory.layout import Layout, Leaf

__all__ = ["LLAMA"]

LLAMA = Layout(
    name="llama",
    architecture="LlamaForCausalLM",
    leaves={
        "model.embed_tokens.weight": Leaf("embedding.weight", ("vocab", "dim")),
        "model.norm.weight": Leaf("norm.weight", ("dim",)),
    },
    head=("lm_head.weight", Leaf("head.weight", ("vocab", "dim"))),
    layer={
        "input_layernorm.weight": Leaf("attention_norm.weight", ("dim",)),
        "self_attn.q_proj.weight": Leaf("attention.q.weight", ("queries", "dim")),
        "self_attn.k_proj.weight": Leaf("attention.k.weight", ("keys", "dim")),
        "self_attn.v_proj.weight": Leaf("attention.v.weight", ("keys", "dim")),
        "self_attn.o_proj.weight": Leaf("attention.o.weight", ("dim", "queries")),
        "post_attention_layernorm.weight": Leaf("mlp_norm.weight", ("dim",)),
        "mlp.gate_proj.weight": Leaf("mlp.gate.weight", ("hidden", "dim")),
        "mlp.up_proj.weight": Leaf("mlp.up.weight", ("hidden", "dim")),
        "mlp.down_proj.weight": Leaf("mlp.down.weight", ("dim", "hidden")),
    },
    settings={"mlp_bias": False},
)
