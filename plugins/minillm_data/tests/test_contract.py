"""Every plugin of this distribution under the contract kit, each check a test of its own."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from minillm_kit import conformance

pytestmark = pytest.mark.slow

test_best_fit = conformance("best_fit")
test_domain_tokens = conformance("domain_tokens", {"domains": ["code", "wiki"], "cooldown": 0.5})
test_distill = conformance("distill", {"direction": "reverse"}, pairs=2)
test_eos_align = conformance("eos_align", {"max_document": 7})
test_fim = conformance("fim", {"rate": 1.0})
test_length_buckets = conformance("length_buckets", {"documents": 5})
test_jest = conformance("jest")
test_rho1 = conformance("rho1", {"share": 0.4})
test_simctg = conformance("simctg")
test_length_curriculum = conformance("length_curriculum", {"least": 2, "buffer": 9})
test_shuffle_rows = conformance("shuffle_rows")
test_source_weights = conformance("source_weights")


def test_no_plugin_is_left_out() -> None:
    ours = {
        entry.name
        for entry in entry_points(group="minillm.plugins")
        if entry.dist is not None and entry.dist.name == "minillm-data"
    }
    checked = {getattr(test, "checks_plugin", None) for test in globals().values()}
    assert ours <= checked
