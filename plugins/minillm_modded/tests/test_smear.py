"""Tests of smear against its definition, token by token, across documents and within them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core.errors import PlanError
from minillm_modded.smear import Smear, SmearAcross, SmearWithin

OPTIONS = {"width": 3, "lr_mul": 1.0, "gate_lr_mul": 1.0}


@pytest.mark.parametrize("within", [False, True])
def test_a_token_takes_in_the_one_before(node: Any, lab: Any, rng: Any, within: bool) -> None:
    smear = node(SmearWithin if within else SmearAcross, **OPTIONS)
    x, documents = rng.standard_normal((2, 9, 6)), lab.batch()["documents"]
    assert (documents[:, 1:] != documents[:, :-1]).any()
    got = smear(x, documents) if within else smear(x)
    for b in range(2):
        for t in range(9):
            expected = x[b, t].copy()
            if t and not (within and documents[b, t] != documents[b, t - 1]):
                opened = 1 / (1 + np.exp(-x[b, t, :3] @ smear.gate.weight[0]))
                expected += smear.scalar[0] * opened * x[b, t - 1]
            np.testing.assert_allclose(got[b, t], expected, rtol=1e-12)


@pytest.mark.parametrize("across", [False, True])
def test_it_changes_nothing_at_first(lab: Any, across: bool) -> None:
    batch = lab.batch()
    ours, plain = (lab.model(lab.plan(*p), moved=False) for p in ((Smear(across=across),), ()))
    np.testing.assert_array_equal(ours.hidden(batch), plain.hidden(batch))


def test_documents_are_read_only_where_they_count(lab: Any) -> None:
    fields = [set(lab.plan(Smear(across=across)).fields) for across in (False, True)]
    assert "documents" in fields[0] - fields[1]


def test_the_gate_learns_slowly_and_its_weight_fast(lab: Any) -> None:
    parameters = lab.plan(Smear()).parameters
    found = {
        (p.role, p.shape, p.lr_mul, p.wd_mul) for p in parameters.values() if p.owner == "smear"
    }
    assert found == {("gate", (1, 12), 0.01, 0.0), ("scalar", (1,), 5.0, 0.0)}


def test_it_reads_no_more_than_there_is(lab: Any) -> None:
    with pytest.raises(PlanError, match="smear reads 40 features of a stream of 32"):
        lab.plan(Smear(width=40))
