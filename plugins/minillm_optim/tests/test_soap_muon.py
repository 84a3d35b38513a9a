"""Tests of SOAP-Muon against its formulas in NumPy, matrix by matrix, and with other extensions of Muon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minillm_core import PlanError
from minillm_kit import NumPyOps
from minillm_muon.head_muon import HeadMuon
from minillm_muon.muon import Muon, newton_schulz
from minillm_muon.muon_eq import MuonEq
from minillm_muon.normuon import NorMuon
from minillm_optim.soap import SOAP
from minillm_optim.soap_muon import SOAPMuon

OPS: Any = NumPyOps()
RATES = {"muon.lr": 0.02, "train.lr": 0.01}
Q = "layers.0.attention.q.weight"


def turn(x: np.ndarray, basis: np.ndarray) -> np.ndarray:
    q, r = np.linalg.qr((x + 1e-3 * np.linalg.norm(x) * np.eye(len(x))) @ basis)
    return q * np.where(np.diag(r) < 0, -1, 1)


def by_hand(weight: np.ndarray, grads: list[np.ndarray], every: int, first: int = 1) -> np.ndarray:
    """Apply Muon of 0.95 with decay 0.1, its momentum divided in bases that are updated every k-th time."""
    m, v, left, right = 0.0, 0.0, 0.0, 0.0
    p, q = (np.eye(size) for size in weight.shape)
    tall = max(1, weight.shape[0] / weight.shape[1]) ** 0.5
    for t, grad in enumerate(grads, first - 1):
        left, right = 0.9 * left + 0.1 * grad @ grad.T, 0.9 * right + 0.1 * grad.T @ grad
        if t % every == 0:
            p, q = turn(left, p), turn(right, q)
        m = 0.95 * m + 0.05 * grad
        inner = p.T @ (0.05 * grad + 0.95 * m) @ q
        v = 0.9 * v + 0.1 * inner**2
        even = inner / (np.sqrt(v) + 1e-8 + 1e-4 * np.sqrt(v).max())
        (polar,), _ = newton_schulz(OPS, (p @ even @ q.T)[None], None, {}, steps=5)
        weight = weight - 0.02 * (tall * polar + 0.1 * weight)
    return weight


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("parts", [1, 4])
def test_updates_are_the_formulas(
    planned: Any, drawn: Any, stepped: Any, every: int, parts: int
) -> None:
    heads = {"head_muon": HeadMuon(heads=1, of=("q",))} if parts > 1 else {}
    plan = planned({"muon": Muon(), "soap_muon": SOAPMuon(every=every), **heads})
    rng = np.random.default_rng(3)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(4)]
    got, _ = stepped(plan, params, grads, RATES)
    for name in (Q, "layers.1.mlp.down.weight"):
        count = parts if name == Q else 1
        mine = [np.split(one[name], count) for one in grads]
        want = [
            by_hand(part, [one[index] for one in mine], every)
            for index, part in enumerate(np.split(params[name], count))
        ]
        np.testing.assert_allclose(got[name], np.concatenate(want), rtol=1e-6, atol=1e-8)


def test_a_branch_moves_before_the_bases_are_next_due(
    planned: Any, drawn: Any, stepped: Any
) -> None:
    """A run that branches to it after 4 updates begins with a state of 0, and bases are due at the 11th."""
    plan = planned({"muon": Muon(), "soap_muon": SOAPMuon()})
    rng = np.random.default_rng(4)
    params, grads = drawn(plan, rng), [drawn(plan, rng) for _ in range(2)]
    got, _ = stepped(plan, params, grads, RATES, first=5)
    want = by_hand(params[Q], [one[Q] for one in grads], 10, first=5)
    np.testing.assert_allclose(got[Q], want, rtol=1e-6, atol=1e-8)


def test_what_it_goes_with(planned: Any) -> None:
    planned({"muon": Muon(), "soap_muon": SOAPMuon(), "normuon": NorMuon()})
    with pytest.raises(PlanError, match=r"opt.extend\(muon, momentum\) is claimed by both"):
        planned({"muon": Muon(), "soap_muon": SOAPMuon(), "muon_eq": MuonEq()})
    with pytest.raises(PlanError, match="claimed by both 'muon' and 'soap'"):
        planned({"muon": Muon(), "soap_muon": SOAPMuon(), "soap": SOAP()})
    with pytest.raises(PlanError, match="--plugins muon,soap_muon"):
        planned({"soap_muon": SOAPMuon()})
