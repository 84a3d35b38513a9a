"""Tests of the check ``exports`` on models that are written with their own modeling file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minillm_kit import export
from minillm_kit.check import Failed, NotApplicable
from minillm_kit.elsewhere import logits_elsewhere
from minillm_kit.subject import Subject

PLUGIN = '''
"""y <- GAIN y, and a part of the values of the token before."""

from minillm_core import Module, Param, Plugin, zeros

GAIN = [0.5]


class Tail(Module):
    """y (B, T, H, D) -> the same."""

    lookback = 1

    def __init__(self, geometry):
        super().__init__()
        self.part = Param((geometry.heads, 1), init=zeros, role="scalar")

    def forward(self, y):
        before = self.ops.concat([self.ops.zeros_like(y[:, :1]), y[:, :-1]], 1)
        return GAIN[0] * y + self.part * before


class P(Plugin, api=1):
    """Attention's output is smaller, with a tail."""

    def build_attention(self, attn):
        # in the hook
        attn.out.gate(Tail)
'''


def subject(tmp_path: Path, right: str = "", wrong: str = "", backend: str = "torch") -> Subject:
    file = tmp_path / "p.py"
    file.write_text(PLUGIN.replace(right, wrong) if right else PLUGIN)
    return Subject(f"{file}:P", backend=backend)


@pytest.fixture
def _transformers() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.usefixtures("_transformers")
def test_a_third_party_s_model_is_the_same_in_transformers(tmp_path: Path) -> None:
    found = export.exports(subject(tmp_path))
    assert found.startswith("its own modeling file: logits ")


@pytest.mark.slow
@pytest.mark.usefixtures("_transformers")
def test_a_file_that_computes_something_else_is_seen(tmp_path: Path) -> None:
    changed = subject(tmp_path, "        # in the hook", "        GAIN[0] = 0.6")
    with pytest.raises(Failed, match="without minillm its modeling file gives logits "):
        export.exports(changed)


@pytest.mark.slow
@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize("default", [" = False", " = True", ""])
def test_options_that_the_claimed_layout_refuses(tmp_path: Path, default: str) -> None:
    claimed = PLUGIN.replace("Param, Plugin", "Param, Plugin, option")
    claimed = claimed.replace("api=1", "api=1, export='llama'")
    claimed = claimed.replace('with a tail."""', f'with a tail."""\n\n    tail: bool{default}')
    claimed = claimed.replace("# in the hook", "if self.tail:").replace("attn.out", "    attn.out")
    (tmp_path / "p.py").write_text(claimed)
    asked = Subject(f"{tmp_path}/p.py:P", {"tail": True}, backend="torch")
    if default == " = True":  # no option of the plugin satisfies the claim
        with pytest.raises(Failed, match="no place"):
            export.exports(asked)
        return
    found = export.exports(asked)
    assert found.startswith("its own modeling file: logits ")
    assert "(with these options, " in found


@pytest.mark.slow
@pytest.mark.usefixtures("_transformers")
def test_a_file_that_raises_or_needs_minillm_is_seen(tmp_path: Path) -> None:
    for line, said in (("1 / 0", "division by zero"), ("import minillm_core", "is not here")):
        (tmp_path / "modeling_minillm.py").write_text(line)
        with pytest.raises(Failed, match=said):
            logits_elsewhere(tmp_path, np.arange(3))


def test_what_cannot_be_written_is_not_applicable_with_the_reason(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    odd = subject(tmp_path, "return GAIN[0] * y", "return (1 if self.framework else 1) * y")
    with pytest.raises(NotApplicable, match=r"no modeling file can be written: .*self\.framework"):
        export.exports(odd)


def test_without_transformers_it_is_not_applicable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(NotApplicable, match="Transformers, which is not installed: pip install"):
        export.exports(subject(tmp_path))


def test_on_mlx_alone_it_is_not_applicable(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    with pytest.raises(NotApplicable, match="is run on torch"):
        export.exports(subject(tmp_path, backend="mlx"))
