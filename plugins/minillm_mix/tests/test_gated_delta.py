"""Tests of the gated delta rule against its recurrence, token by token, in chunks and continued."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import Layers, PlanError
from minillm_mix.gated_delta import TAPS, GatedDelta, Memory
from minillm_modded.windows import Windows

LENGTH, DIM, HEADS, SIZE = 11, 10, 3, 4


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def definition(x: np.ndarray, node: Any) -> np.ndarray:
    """Apply the rule to x (T, C) -> (T, C), one token after the other."""
    flat = np.concatenate([x @ leaf.weight.T for leaf in (node.q, node.k, node.v)], -1)
    behind = np.concatenate([np.zeros((TAPS - 1, flat.shape[1])), flat])
    mixed = np.stack([(behind[t : t + TAPS] * node.taps).sum(0) for t in range(len(x))])
    mixed = mixed * sigmoid(mixed)
    q, k, v = (one.reshape(len(x), HEADS, SIZE) for one in np.split(mixed, 3, -1))
    q, k = (one / np.sqrt((one**2).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
    decay = np.log1p(np.exp(x @ node.decay.weight.T + node.bias)) * -np.exp(node.rate)
    a, b = np.exp(decay), sigmoid(x @ node.write.weight.T)
    memory, found = np.zeros((HEADS, SIZE, SIZE)), np.zeros((len(x), HEADS, SIZE))
    for t in range(len(x)):
        for h in range(HEADS):
            erase = np.eye(SIZE) - b[t, h] * np.outer(k[t, h], k[t, h])
            memory[h] = a[t, h] * memory[h] @ erase + b[t, h] * np.outer(v[t, h], k[t, h])
            found[t, h] = memory[h] @ q[t, h]
    found = found / np.sqrt((found**2).mean(-1, keepdims=True) + 1e-5) * node.norm
    gate = (x @ node.gate.weight.T).reshape(found.shape)
    return (found * gate * sigmoid(gate)).reshape(len(x), -1) @ node.o.weight.T


@pytest.mark.parametrize("chunk", [1, 4, 5, 32])
@pytest.mark.parametrize("cuts", [(LENGTH,), (1, 5, LENGTH), (3, 4, 10, LENGTH)])
def test_chunks_are_the_recurrence_whole_and_continued(
    node: Any, rng: Any, seen: Any, chunk: int, cuts: tuple[int, ...]
) -> None:
    made = node(Memory, geometry=seen.geometry(HEADS, 1, SIZE, dim=DIM), chunk=chunk)
    x = rng.standard_normal((2, LENGTH, DIM))
    memory = tail = None
    found, at = [], 0
    for end in cuts:
        y, memory, tail = made(x[:, at:end], None, memory, tail)
        assert memory.shape == (2, HEADS, SIZE, SIZE)
        assert tail.shape == (2, TAPS - 1, 3 * HEADS * SIZE)
        found.append(y)
        at = end
    y = np.concatenate(found, 1)
    for row in range(2):
        np.testing.assert_allclose(y[row], definition(x[row], made), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 4, 32])
@pytest.mark.parametrize("cuts", [(LENGTH,), (1, 5, LENGTH), (3, 4, 10, LENGTH)])
def test_a_document_begins_with_nothing(
    node: Any, rng: Any, seen: Any, chunk: int, cuts: tuple[int, ...]
) -> None:
    """A repeated id is a new document, as in the recurrence."""
    made = node(Memory, geometry=seen.geometry(HEADS, 1, SIZE, dim=DIM), chunk=chunk)
    x = rng.standard_normal((2, LENGTH, DIM))
    lengths = ((4, 1, 6), (2, 2, 7))
    documents = np.array([np.repeat((5, 2, 5), each) for each in lengths], np.int32)
    memory = tail = None
    found, at = [], 0
    for end in cuts:
        y, memory, tail = made(x[:, at:end], documents[:, :end], memory, tail)
        found.append(y)
        at = end
    y = np.concatenate(found, 1)
    for row, each in enumerate(lengths):
        pieces = np.split(x[row], np.cumsum(each)[:-1])
        expected = np.concatenate([definition(one, made) for one in pieces])
        np.testing.assert_allclose(y[row], expected, rtol=1e-9, atol=1e-9)


def test_what_decoding_keeps_does_not_grow(lab: Any, decoded: Any) -> None:
    plan = lab.plan(GatedDelta(chunk=4), seq_len=12)
    batch = {"ids": lab.batch(1, 9)["ids"]}
    for kept in decoded(plan, lab.model(plan).net, batch, 1e-6):
        held = kept["layers.0.attention"]
        assert sum(array.size for array in held) == 4 * 8 * 8 + 3 * (3 * 4 * 8)


def test_a_text_continues_within_its_document(lab: Any, decoded: Any) -> None:
    """Where attention separates documents, whole rows equal decoding."""
    masked = Windows(start=4, window=4, block=4, documents=True)
    plan = lab.plan(GatedDelta(chunk=4, layers=Layers([1])), masked, seq_len=12)
    assert plan.notes == (
        "gateddelta: its attention in layer 1 has no slots: windows is in the other layers",
    )
    model, batch = lab.model(plan), lab.batch(rows=1)
    assert len([*decoded(plan, model.net, batch, 1e-9)]) == batch["ids"].shape[1]
    assert len(np.unique(batch["documents"])) > 1
    blind = {**batch, "documents": np.zeros_like(batch["documents"])}
    assert np.abs(model.hidden(blind) - model.hidden(batch)).max() > 0.01


def test_a_recurrent_array_is_one_that_is_kept(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "recurrent", ("memory", "gone"))
    with pytest.raises(PlanError, match="recurrent names 'gone', which it does not keep"):
        lab.plan(GatedDelta())
