"""Tests of gathered positions: all supervised ones, distinct, in few sizes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minillm_core.backends.steps import supervised_positions
from minillm_core.nn.decoder import Gathering, LossSpec, Target
from minillm_core.nn.node import Setting

FIELD = Target("other", "test", Setting("test", constant=1.0), field="other", stage="there")


def ahead(offset: int) -> Target:
    return Target(f"offset{offset}", "test", Setting("test", constant=1.0), offset=offset)


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    buckets=st.integers(2, 40),
    offsets=st.sets(st.integers(2, 12), max_size=2),
    there=st.booleans(),
    data=st.data(),
)
def test_they_are_where_anything_is_predicted_and_fill_a_bucket(
    shape: tuple[int, int], buckets: int, offsets: set[int], there: bool, data: st.DataObject
) -> None:
    labels, other = (
        data.draw(arrays(np.int32, shape, elements=st.sampled_from([-1, -1, 3]))) for _ in range(2)
    )
    host, targets = {"labels": labels, "other": other}, (*map(ahead, sorted(offsets)), FIELD)
    before = {name: one.copy() for name, one in host.items()}
    spec = LossSpec(targets=targets, gather=Gathering("test", buckets))
    found = supervised_positions(spec, host, {"there": int(there)})
    assert all(np.array_equal(host[name], one) for name, one in before.items())
    wanted = set()
    for row, column in np.ndindex(shape):
        places = [column, *(column + offset - 1 for offset in offsets)]
        here = any(place < shape[1] and labels[row, place] >= 0 for place in places)
        if here or (there and other[row, column] >= 0):
            wanted.add(row * shape[1] + column)
    size, count = -(-labels.size // buckets), labels.size
    if found is None:
        assert -(-max(1, len(wanted)) // size) * size >= count
        return
    assert found.dtype == np.int32
    assert (np.diff(found) > 0).all()  # sorted and distinct
    assert wanted <= set(found.tolist())
    assert 0 <= found[0] <= found[-1] < count
    assert len(found) % size == 0
    assert 0 <= len(found) - len(wanted) <= (size if not wanted else size - 1)
