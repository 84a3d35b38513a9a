"""Tests of the rerun command: a shell and the program parse it back to the original arguments."""

from __future__ import annotations

import shlex
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from minillm_core.config.origins import from_assignments
from minillm_kit.runner import as_typed, rerun
from minillm_kit.subject import Subject

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
@example("@file")
def test_a_value_is_read_as_it_was(value: Any) -> None:
    (setting,) = from_assignments([f"my_trick.x={as_typed(value)}"]).settings.values()
    assert setting.value == value
    assert type(setting.value) is type(value)


@given(st.dictionaries(st.sampled_from(["a", "b_c"]), VALUES))
def test_a_shell_gives_the_program_what_was_given(options: dict[str, Any]) -> None:
    subject = Subject("./my plugins/my_trick.py:MyTrick", options, backend="mlx", pairs=None)
    words = shlex.split(rerun(subject, "slopes"))
    count = 4 + len(options)
    assert words[:4] == ["minillm", "plugins", "check", subject.spec]
    read = from_assignments(words[4:count]).settings
    assert {key: one.value for key, one in read.items()} == {
        f"my_trick.{key}": value for key, value in options.items()
    }
    assert words[count:] == ["--backend", "mlx", "--pairs", "all", "--only", "slopes"]


def test_what_is_as_always_is_not_typed() -> None:
    assert rerun(Subject("muon"), "loads") == "minillm plugins check muon --only loads"
    assert as_typed("a b") == "a b"
    assert as_typed(True) == "true"
