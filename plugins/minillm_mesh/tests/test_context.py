"""Context parallelism: cuts of rows, refusals of parts that need whole rows, and training as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minillm_core as minillm
from minillm_core.backends.ranks import ALONE, Ranks
from minillm_core.nn.block import COLUMNS
from minillm_core.nn.decoder import ahead
from minillm_kit import small
from minillm_kit.subject import with_stand_ins
from minillm_mesh import step_checks
from minillm_mesh.collectives import require_gradients
from minillm_mesh.context import Columns, HeadsScope
from minillm_mesh.context_checks import check


@given(
    size=st.sampled_from([1, 2, 3, 4, 8]),
    chunk=st.integers(1, 5),
    offset=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_every_column_is_one_processes_and_has_its_labels(
    size: int, chunk: int, offset: int, seed: int
) -> None:
    length, rng = 2 * size * chunk, np.random.default_rng(seed)
    labels = rng.integers(-1, 50, (3, length)).astype(np.int32)
    batch = {"labels": labels, "vectors": rng.random((3, length, 2))}
    cut = [Columns(rank, size).cut(batch, [offset]) for rank in range(size)]
    at = [one[COLUMNS][0] for one in cut]
    assert sorted(np.concatenate(at)) == [*range(length)]
    work = [(own + 1).sum() for own in at]  # pairs of queries and keys
    assert len({*work}) == 1, "all have as much to compute"
    further = np.full_like(labels, -1)
    further[:, : max(0, length - offset + 1)] = labels[:, offset - 1 :]
    for one, own in zip(cut, at, strict=True):
        np.testing.assert_array_equal(one["labels"], labels[:, own])
        np.testing.assert_array_equal(one["vectors"], batch["vectors"][:, own])
        np.testing.assert_array_equal(one[ahead(offset)], further[:, own])
        assert all(field.flags.c_contiguous for field in one.values())


def test_a_part_of_a_row_has_all_methods_of_a_scope() -> None:
    """An attention that reads documents asks its scope for their columns."""
    scope = HeadsScope({}, Columns(0, 2), (1, 4))
    for cls in HeadsScope.__mro__[:-1]:
        assert all(
            callable(getattr(scope, name)) for name, one in vars(cls).items() if callable(one)
        )
    assert scope.columns(None, "documents") == "documents"


def plan_of(**settings: Any) -> minillm.Plan:
    """Build a plan of preset tiny."""
    given = {key.replace("_", ".", 1): value for key, value in settings.items()}
    return minillm.build_plan(minillm.load(preset="tiny", settings=given))


def test_a_torch_whose_collectives_have_no_gradients_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_gradients("mesh.context=2")
    monkeypatch.setattr("torch.__version__", "2.10.1+cu130")
    with pytest.raises(minillm.BackendError, match=r"torch 2\.10\.1\+cu130 cannot") as refused:
        require_gradients("mesh.context=2")
    assert refused.value.where == "mesh.context=2"
    assert refused.value.fix == "pip install 'torch>=2.11'"


def test_rows_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(minillm.ConfigError, match="rows of 30 tokens") as refused:
        check(plan_of(train_seq_len=30), 2)
    assert refused.value.fix == "train.seq_len=32"
    check(plan_of(train_seq_len=32), 2)


class Look(minillm.Module):
    """A node with lookback that counts its input columns."""

    lookback = 1
    statistics: ClassVar = {"seen": "sum"}

    def forward(self, x: Any) -> Any:
        """x (B, T, C) -> (B, T, C), ()."""
        return x, self.ops.sum(x)

    def next_state(self, seen: Any) -> dict[str, Any]:
        """Change nothing."""
        return {}


class Score(minillm.Module):
    """A node that scores by losses."""

    def forward(self, losses: Any) -> Any:
        """Losses (B, T) -> the same."""
        return losses


class Looks(minillm.Plugin, api=1):
    """Looks back."""

    def build_model(self, model):
        model.embed.mix(Look)


class Rows(minillm.Plugin, api=1):
    """Chooses rows."""

    def compute_loss(self, loss):
        loss.rows(Score, keep=0.5)


class Weighs(minillm.Plugin, api=1):
    """Weighs positions."""

    def compute_loss(self, loss):
        loss.weights(Score)


class Refers(minillm.Plugin, api=1):
    """Reads a trained model."""

    def compute_loss(self, loss):
        loss.reference("teacher", minillm.FrozenModel("nowhere"), gives="losses")


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        (Looks(), "emits statistics of what it is given"),
        (Rows(), "chooses rows to train on by the losses of whole rows"),
        (Weighs(), "chooses weights by the losses of whole micro-batches"),
        (Refers(), "chooses fields by another model"),
    ],
)
def test_what_needs_whole_rows_is_refused_by_name(plugin: minillm.Plugin, why: str) -> None:
    plan = small.plan(plugin, seq_len=16)
    name = type(plugin).__name__.lower()
    with pytest.raises(minillm.PlanError, match=f"plugin '{name}' .*{why}") as refused:
        check(with_stand_ins(plan, plan.config), 2)
    assert refused.value.fix == f"--plugins -{name}, or mesh.context=1"


def test_one_process_has_no_others_to_share_with() -> None:
    ALONE.share_rows(1)
    with pytest.raises(
        minillm.BackendError, match="2 processes are to share each row, but there is only one"
    ) as refused:
        ALONE.share_rows(2)
    assert "--gpus 2" in str(refused.value.fix)


class Two(Ranks):
    """Two processes that cannot share rows."""

    size, transport = 2, "pigeons"


def test_processes_that_cannot_share_rows_say_so() -> None:
    with pytest.raises(minillm.BackendError, match="pigeons cannot do that"):
        Two().share_rows(2)
    with pytest.raises(minillm.ConfigError, match=r"4 processes .* groups of 3 ") as refused:
        step_checks.check(plan_of(mesh_context=3), 4)
    assert "product divides 4" in str(refused.value.fix)


def test_the_plan_does_not_depend_on_it() -> None:
    assert plan_of(mesh_context=2).hash == plan_of().hash


BY_COLUMNS = ("plain", "muon", "windows", "value_embeds", "mtp", "paired_heads", "speedrun")
BY_HEADS = (
    "plain",
    "muon",
    "normuon",
    "windows",
    "moe",
    "mtp",
    "value_embeds",
    "traced",
    "speedrun",
)
SHORTER = "train.steps=10"
"""All phases of schedules; test_torch_ranks.py trains the same cases twice as long."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "names", "settings"),
    [
        (2, [*(f"{name}@2x1" for name in BY_COLUMNS), *(f"{name}@1x2" for name in BY_HEADS)], ()),
        (4, ["speedrun@2x1", "speedrun@1x2", "windows@2x2", "value_embeds@1x4"], ()),
        (2, ["windows@2x1", "value_embeds@2x1", "speedrun@2x1"], ("mesh.context_exchange=heads",)),
        (4, ["plain@4x1"], ("model.kv_heads=4",)),
    ],
)
def test_processes_that_share_rows_train_alike(
    size: int,
    names: list[str],
    settings: tuple[str, ...],
    processes: Callable[..., str],
    tmp_path: Path,
) -> None:
    out, how = tmp_path / "found.json", "alone,updates" if size == 2 else "alone,off"
    given = "rows", ",".join(names), how, SHORTER, *settings
    processes(size, "stepped", "torch", str(out), *given)
    found: Mapping[str, Any] = json.loads(out.read_text())
    assert [*found] == names
    for name, met in found.items():
        for how, case in met.items():
            assert case["same"], f"{name}, {how}: the ranks have not the same weights"
            assert case["figures"] < 1e-5, f"{name}, {how}: {case['figures']} from one process"
            assert case["nats"] < 1e-6, f"{name}, {how}: evaluated apart"
