# pyright: reportUndefinedVariable=false
# ruff: noqa: F821
"""Parts of modeling files for Transformers, besides the model: whole definitions are copied from here.

Never imported: ``copying.py`` reads it as text after parts_both.py, and copies the parts that a model uses.
Names and arguments are those of ``minillm_core``, so that a plugin's modules work with either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

SIZES: dict[str, Any] = {}
GEOMETRY: Any = None
Decoder: Any = None
# placeholders: these three are generated for each model


class Ops:
    """The array functions that the parts of the model call."""

    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    sqrt = staticmethod(torch.sqrt)
    square = staticmethod(torch.square)
    abs = staticmethod(torch.abs)
    sign = staticmethod(torch.sign)
    round = staticmethod(torch.round)
    sin = staticmethod(torch.sin)
    cos = staticmethod(torch.cos)
    clip = staticmethod(torch.clamp)
    tril = staticmethod(torch.tril)
    tanh = staticmethod(torch.tanh)
    sigmoid = staticmethod(torch.sigmoid)
    silu = staticmethod(F.silu)
    relu = staticmethod(F.relu)
    where = staticmethod(torch.where)
    zeros_like = staticmethod(torch.zeros_like)
    ones_like = staticmethod(torch.ones_like)
    full_like = staticmethod(torch.full_like)
    linear = staticmethod(F.linear)
    embedding = staticmethod(F.embedding)

    @staticmethod
    def like(number, x):
        return number.to(x.dtype) if isinstance(number, torch.Tensor) else number

    @staticmethod
    def constant(numbers, shape):
        return torch.tensor([float(one) for one in numbers]).reshape(tuple(shape))

    @staticmethod
    def scalar(number):
        if isinstance(number, torch.Tensor):
            return number.float().reshape(())
        return torch.tensor(float(number))

    @staticmethod
    def maximum(x, y):
        return torch.maximum(x, y) if isinstance(y, torch.Tensor) else x.clamp(min=y)

    @staticmethod
    def minimum(x, y):
        return torch.minimum(x, y) if isinstance(y, torch.Tensor) else x.clamp(max=y)

    @staticmethod
    def reshape(x, shape):
        return x.reshape(tuple(shape))

    @staticmethod
    def permute_dims(x, axes):
        return x.permute(tuple(axes))

    @staticmethod
    def matrix_transpose(x):
        return x.transpose(-1, -2)

    @staticmethod
    def concat(arrays, axis=0):
        return torch.cat(list(arrays), dim=axis)

    @staticmethod
    def stack(arrays, axis=0):
        return torch.stack(list(arrays), dim=axis)

    @staticmethod
    def split(x, parts, axis=-1):
        if isinstance(parts, int):
            return x.split(x.shape[axis] // parts, dim=axis)
        return x.split(list(parts), dim=axis)

    @staticmethod
    def take(x, indices, axis):
        rows = x.index_select(axis, indices.reshape(-1))
        return rows if indices.ndim else rows.squeeze(axis)

    @staticmethod
    def take_rows(x, indices):
        return x.index_select(0, indices)

    @staticmethod
    def take_along_axis(x, indices, axis):
        return torch.take_along_dim(x, indices.long(), axis)

    @staticmethod
    def argsort(x, axis=-1):
        return x.argsort(dim=axis).int()

    @staticmethod
    def cumsum(x, axis):
        return x.float().cumsum(axis).to(x.dtype) if x.is_floating_point() else x.cumsum(axis)

    @staticmethod
    def scan(step, carry, arrays):
        """Run ``carry, y = step(carry, slices)`` along axis 1; return the last carry and all y."""
        found = []
        for turn in range(arrays[0].shape[1]):
            carry, y = step(carry, tuple(x[:, turn] for x in arrays))
            found.append(y)
        return carry, torch.stack(found, dim=1)

    @staticmethod
    def expand_dims(x, axis):
        return x.unsqueeze(axis)

    @staticmethod
    def broadcast_to(x, shape):
        return x.expand(tuple(shape))

    @staticmethod
    def zeros(shape, dtype="float32"):
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype))

    @staticmethod
    def ones(shape, dtype="float32"):
        return torch.ones(tuple(shape), dtype=getattr(torch, dtype))

    @staticmethod
    def arange(n, dtype="int32"):
        return torch.arange(n, dtype=getattr(torch, dtype))

    @staticmethod
    def astype(x, dtype):
        return x.to(getattr(torch, dtype))

    @staticmethod
    def astype_like(x, y):
        return x.to(y.dtype)

    @staticmethod
    def sum(x, axis=None, keepdims=False):
        return x.sum(axis, keepdim=keepdims)

    @staticmethod
    def mean(x, axis=None, keepdims=False):
        return x.mean(axis, keepdim=keepdims)

    @staticmethod
    def max(x, axis=None, keepdims=False):
        return x.amax(tuple(range(x.ndim)) if axis is None else axis, keepdim=keepdims)

    @staticmethod
    def logsumexp(x, axis=-1, keepdims=False):
        return x.logsumexp(axis, keepdim=keepdims)

    @staticmethod
    def stop_gradient(x):
        return x.detach()

    @staticmethod
    def from_numpy(array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(torch.get_default_device())

    @staticmethod
    def to_numpy(x):
        return x.cpu().numpy()

    @staticmethod
    def rms_norm(x, weight, eps):
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, float32 inside."""
        weight = None if weight is None else weight.to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    @staticmethod
    def swiglu(gate, up):
        return F.silu(gate) * up

    @staticmethod
    def rotate(q, k, table):
        """Rotate each pair (a, b) = (x[i], x[i + D/2]) to [a cos - b sin, b cos + a sin]."""
        if table.positions is None:
            cos, sin = table.cos[: q.shape[1]], table.sin[: q.shape[1]]
        else:
            cos, sin = table.cos[table.positions], table.sin[table.positions]
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (T, 1, D/2) or (B, T, 1, D/2)
        return turned(q, cos, sin), turned(k, cos, sin)

    @staticmethod
    def attention(q, k, v, *, scale=None, window=None, documents=None):
        """softmax(scale q k^T) v, causal: q (B, T, H, D), k and v (B, S, K, D) -> (B, T, H, D).

        The queries are the last T of the S positions; each sees ``window`` keys, itself included.
        """
        queries, keys = q.shape[1], k.shape[1]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        mask = distance >= 0
        if window is not None:
            mask = mask & (distance < window)
        if documents is not None:
            own = documents[:, None, keys - queries :, None] == documents[:, None, None, :]
            mask = mask & own
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return y.transpose(1, 2)


def turned(x, cos, sin):
    """Rotate the pairs of x (B, T, H, D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@dataclass(frozen=True)
class Geometry:
    """The sizes of the model, and the index of a layer."""

    layers: int
    dim: int  # C
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    hidden: int
    vocab: int  # V
    positions: int  # in the longest row
    norm_eps: float
    layer: int | None = None


class Buffer:
    """A constant float32 array, built by a function on each device that uses it."""

    def __init__(self, shape, fn: Callable[[], np.ndarray]):
        self.fn, self.made = fn, {}

    def tensor(self):
        device = torch.get_default_device()
        if device not in self.made:
            self.made[device] = torch.from_numpy(np.ascontiguousarray(self.fn())).to(device)
        return self.made[device]


class Module(nn.Module):
    """The base class of all parts: declared arrays become torch's parameters and buffers."""

    ops = Ops()
    lookback = 0

    def __setattr__(self, name, value):
        if isinstance(value, Param):
            value = nn.Parameter(torch.empty(value.shape))
        elif isinstance(value, State):
            self.register_buffer(name, torch.zeros(value.shape))
            return
        elif isinstance(value, Buffer):
            self.__dict__.setdefault("_constants", {})[name] = value
            return
        elif isinstance(value, list) and any(isinstance(one, nn.Module) for one in value):
            value = nn.ModuleList(value)
        elif isinstance(value, dict) and any(isinstance(one, nn.Module) for one in value.values()):
            held = nn.ModuleDict()
            for key, module in value.items():  # ModuleDict itself refuses names of its methods
                setattr(held, key, module)
            value = held
        super().__setattr__(name, value)

    def __getattr__(self, name):
        if (constant := self.__dict__.get("_constants", {}).get(name)) is not None:
            return constant.tensor()
        return super().__getattr__(name)


class Embedding(nn.Embedding):
    """ids (B, T) -> (B, T, C)."""

    def as_linear(self, x):
        return F.linear(x, self.weight)


class Columns(Cache):
    """The KV cache: keys and values of earlier columns, and columns that other parts read again."""

    def __init__(self):
        super().__init__(layers=[])
        self.columns = 0
        self.kept = {}

    def at(self, name):
        """Return the arrays kept under a name; None: nothing yet."""
        return self.kept.get(name)

    def extend(self, name, arrays, keep=EVERYTHING):
        """Append arrays (B, T, ...) to the columns kept under a name; return all, keep the last ``keep``."""
        earlier = self.kept.get(name, [None] * len(arrays))
        together = [
            new if old is None or new is None else torch.cat([old, new], dim=1)
            for old, new in zip(earlier, arrays, strict=True)
        ]
        self.kept[name] = [
            None if one is None else one[:, max(0, one.shape[1] - keep) :] for one in together
        ]
        return together

    def get_seq_length(self, layer_idx=0):
        return self.columns

    def reorder_cache(self, beam_idx):
        for arrays in self.kept.values():
            arrays[:] = [
                None if one is None else one.index_select(0, beam_idx.to(one.device))
                for one in arrays
            ]

    def crop(self, max_length):
        raise NotImplementedError(
            "this model's cache cannot be shortened: parts of it look back on columns that would be "
            "gone. Generate without an assistant model"
        )


def check_sizes(config, sizes):
    """Refuse a config.json whose sizes differ from this file's."""
    for name, size in sizes.items():
        if getattr(config, name, size) != size:
            raise ValueError(
                f"config.json says {name}={getattr(config, name)!r}, and this file is of a model with "
                f"{size!r}: export the model again"
            )
    longest = config.max_position_embeddings
    if type(longest) is not int or not 0 < longest <= 1 << 24:
        raise ValueError(
            f"max_position_embeddings={longest!r} in config.json is not a length of a row"
        )


class MinillmConfig(PretrainedConfig):
    """config.json: sizes, which must equal this file's, and the longest row."""

    model_type = "minillm"


class MinillmForCausalLM(PreTrainedModel, GenerationMixin):
    """The model for Transformers. Rows begin at position 0, without padding on the left."""

    config_class = MinillmConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        check_sizes(config, SIZES)
        self.model = Decoder(replace(GEOMETRY, positions=config.max_position_embeddings))
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embedding

    def get_output_embeddings(self):
        return getattr(self.model, "head", None)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        use_cache=None,
        labels=None,
        logits_to_keep=0,
        return_dict=None,
    ):
        """input_ids (B, T) -> logits float32 (B, T, V); only of the last ``logits_to_keep`` columns, if set."""
        cache = past_key_values if isinstance(past_key_values, Columns) else None
        if cache is None and past_key_values is not None:
            check_empty(past_key_values)
        if cache is None and use_cache:
            cache = Columns()
        started = 0 if cache is None else cache.columns
        longest = self.config.max_position_embeddings
        if started + input_ids.shape[1] > longest:
            raise ValueError(
                f"a row of {started + input_ids.shape[1]} tokens, but the model has {longest} positions: "
                "give fewer, or from_pretrained(..., max_position_embeddings=...)"
            )
        if attention_mask is not None and not started:
            check_mask(attention_mask, cached=cache is not None)
        with input_ids.device:
            hidden = self.model.hidden(input_ids.int(), cache)
            logits = self.model.logits(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if return_dict is False:
            return tuple(one for one in (loss, logits, cache) if one is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)


def check_empty(cache):
    """Refuse any cache except the empty one that ``generate`` begins with, which Columns replaces."""
    if type(cache) is not DynamicCache or cache.get_seq_length() or getattr(cache, "offloading", 0):
        raise ValueError(
            "this model keeps its columns in a cache of its own: leave cache_implementation out, and "
            "pass past_key_values that it returned"
        )


def check_mask(mask, cached):
    """Refuse padding on the left, which would shift positions, or inside a row."""
    whole = mask.bool()
    if mask.ndim != 2 or not (whole[:, :-1] | ~whole[:, 1:]).all():
        raise ValueError(
            "attention_mask hides tokens before or inside a row: this model reads rows from their "
            "beginning, so pad on the right (tokenizer.padding_side='right')"
        )
    if cached and not whole.all():
        raise ValueError(
            "attention_mask hides the end of a row, after which nothing can be generated: generate "
            "from prompts of one length, or one at a time"
        )
