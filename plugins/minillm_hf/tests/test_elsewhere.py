"""An exported model computes the same in Transformers and mlx-lm, and their models the same here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm_core.backends.base import Model, lone_row
from minillm_core.backends.bind import create_backend
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint.commit import commit
from minillm_core.config.load import load
from minillm_core.data import Tokenizer
from minillm_core.errors import PlanError, Refusal
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import load as load_plugins
from minillm_core.train.record import Record
from minillm_core.train.run import Run
from minillm_core.train.settings import settings
from minillm_hf import fit, read_model_directory

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

VOCAB, ROW = 600, 48
SMALL = {
    **{"model.layers": 2, "model.dim": 64, "model.heads": 4, "model.kv_heads": 2},
    **{"model.hidden": 96, "model.vocab": VOCAB, "model.rope_base": 5000.0},
    **{"model.norm_eps": 0.02, "model.head_dim": 24, "train.seq_len": ROW, "train.rows": 1},
}
QK_NORM = '''
from minillm_core import Module, Param, Plugin, ones

class Norm(Module):
    def __init__(self, geometry, weighted: bool):
        super().__init__()
        shape = (geometry.head_dim,)
        self.q = Param(shape, init=ones, role="norm", wd_mul=0.0) if weighted else None
        self.k = Param(shape, init=ones, role="norm", wd_mul=0.0) if weighted else None

    def forward(self, q, k):
        return self.ops.rms_norm(q, self.q, 0.02), self.ops.rms_norm(k, self.k, 0.02)

class Weighted(Plugin, api=1, export="qwen3"):
    """Norms of queries and keys."""

    def build_attention(self, attn):
        attn.qk.norm(Norm, weighted=True)

class Bare(Plugin, api=1, export="qwen3"):
    """The same without weights."""

    def build_attention(self, attn):
        attn.qk.norm(Norm, weighted=False)
'''


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def planned(values: dict[str, Any], plugin: str | None) -> tuple[Any, Plan]:
    loaded = load(
        preset="tiny",
        plugins=plugin,
        assignments=[f"{key}={json.dumps(value)}" for key, value in (SMALL | values).items()],
        default_preset=lambda: ("tiny", "test"),
    )
    return loaded, build_plan(loaded.config, load_plugins(loaded.specs, loaded.config.plugins))


def random_weights(plan: Plan) -> dict[str, np.ndarray]:
    """Return random weights far from their initial values, norms included."""
    random = np.random.default_rng(3)
    return {
        f"model.{name}": (0.2 * random.standard_normal(info.shape) + (info.role == "norm")).astype(
            np.float32
        )
        for name, info in plan.parameters.items()
    }


@pytest.fixture
def leave_run(tmp_path: Path, tokenizer: Tokenizer | None) -> Callable[..., Path]:
    """Write the run folder that training would leave behind, without training."""

    def leave(plugin: str | None = None, *, tied: bool = True) -> Path:
        loaded, plan = planned({"model.tied": tied}, plugin)
        out = tmp_path / "run"
        out.mkdir()
        digest = None
        if tokenizer:
            tokenizer.save(out / "tokenizer.json")
            digest = sha256((out / "tokenizer.json").read_bytes()).hexdigest()
        commit(out, 7, random_weights(plan), {"tokenizer": digest})
        entries = [
            {"name": one.name, "distribution": one.distribution, "source": plugin}
            for one in plan.plugins
        ]
        document = {"config": settings(loaded), "plan_hash": plan.hash, "plugins": entries}
        Record(out, document)
        return out

    return leave


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the quick brown fox jumps, " * 9, "größer Ωμέγα 漢字 " * 9], VOCAB)


def rows() -> Iterator[np.ndarray]:
    random = np.random.default_rng(5)
    for length in (1, 2, 17, ROW):
        yield random.integers(0, VOCAB, length)


def transformers_logits(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    options = {"local_files_only": True, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    def logits(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(ids)[None]).logits[0, -1].numpy()

    return logits


def mlx_lm_logits(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return lambda ids: np.array(model(mx.array(ids)[None])[0, -1])


def assert_the_same(model: Model, others: list[Callable[[np.ndarray], np.ndarray]]) -> None:
    for ids in rows():
        expected = model.next_logits(lone_row(ids))
        assert np.abs(expected).max() > 0.5
        for other in others:
            np.testing.assert_allclose(other(ids), expected, atol=1e-4, rtol=0)


@pytest.fixture
def qk_norm(tmp_path: Path) -> Callable[[str], str]:
    """A single-file plugin, by its class, as ``--plugins`` names it."""

    def write(name: str) -> str:
        (tmp_path / "qk.py").write_text(QK_NORM)
        return f"{tmp_path}/qk.py:{name}"

    return write


@pytest.mark.broad(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("plugin", [None, "muon", "Weighted", "Bare"])
def test_logits_are_the_same_elsewhere(
    leave_run: Callable[..., Path],
    qk_norm: Callable[[str], str],
    tmp_path: Path,
    tied: bool,
    plugin: str | None,
) -> None:
    file = plugin in ("Weighted", "Bare")
    spec = qk_norm(plugin) if file else plugin
    again = spec if file else None
    out, said = leave_run(spec, tied=tied), []
    options = {"shard_bytes": 50_000} if tied else {}
    run = Run.open(out, plugins=again, device="cpu", backend="torch", say=said.append)
    result = run.export(tmp_path / "to", **options)
    assert result["layout"] == ("qwen3" if file else "llama")
    assert said == []
    model = run._reader()
    assert_the_same(model, [load(tmp_path / "to") for load in (transformers_logits, mlx_lm_logits)])


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_model_of_transformers_is_the_same_here(
    qk_norm: Callable[[str], str],
    tmp_path: Path,
    kind: str,
    tied: bool,
    dtype: str,
    backend: str,
) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        rms_norm_eps=0.02,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
    )
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 5)
    theirs.to(getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    found = read_model_directory(tmp_path / "theirs")
    _, plan = planned(found.settings, qk_norm("Weighted") if kind == "Qwen3" else None)
    fitted = fit(plan, found)
    assert fitted.initial == ()
    model = create_backend(Detected(backend, "cpu", "test"), plan).model(plan, 0)
    model.load(fitted.arrays)
    assert_the_same(model, [transformers_logits(tmp_path / "theirs")])


def lines(count: int) -> list[str]:
    """Return unusual texts: emoji, control characters, many scripts, names of tokens."""
    random = np.random.default_rng(11)
    alphabets = [
        *("abc XYZ 019 .,'!", " \t\n\r\v\f\u00a0\u2003\u200b\ufeff", "äöüßéñçÅ"),
        *("αβγδΩж ИйЁ", "אבג עברית", "ابجد العربية", "हिन्दी क्ष", "漢字かなカナ 한국어", "ไทยภาษา"),
        "".join(map(chr, [*range(32), *range(127, 160)])),
        "😀👩‍👩‍👧‍👦🇩🇪👍🏽❤️🏴‍☠️",
        "e\u0301a\u0308\u202e\u2066\U00010348\U0001d11e\ufffd\U0010ffff",
    ]
    pieces = ["<|endoftext|>", "<|endoftext|", " <|endoftext|> ", "  ", "'s", "\n\n", "<unk>"]
    found = []
    for _ in range(count):
        parts = []
        for _ in range(random.integers(0, 6)):
            if random.random() < 0.3:
                parts.append(pieces[random.integers(len(pieces))])
            else:
                letters = alphabets[random.integers(len(alphabets))]
                chosen = random.integers(0, len(letters), random.integers(1, 9))
                parts.append("".join(letters[i] for i in chosen))
        found.append("".join(parts))
    return found


@pytest.mark.slow
def test_ids_are_the_same_elsewhere(
    leave_run: Callable[..., Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    from transformers import AutoTokenizer

    Run.open(leave_run(), say=print).export(tmp_path / "to")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "to", local_files_only=True)
    texts = lines(10_000)
    assert sum("<|endoftext|>" in text for text in texts) > 1000
    expected = [ids.tolist() for ids in tokenizer.encode(texts)]
    assert theirs(texts)["input_ids"] == [[0, *ids] for ids in expected]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == expected
    for text, ids in zip(texts[:500], expected, strict=False):
        assert theirs.encode(text) == [0, *ids]
        assert theirs.decode(ids) == tokenizer.decode(ids) == text
    assert theirs.bos_token_id == theirs.eos_token_id == theirs.pad_token_id == 0
    assert theirs.unk_token is None
    assert theirs.model_max_length == ROW


def test_mlx_lm_writes_from_what_was_exported(
    leave_run: Callable[..., Path], tmp_path: Path
) -> None:
    from mlx_lm import generate
    from mlx_lm import load as mlx_load

    Run.open(leave_run(), say=print).export(tmp_path / "to")
    model, theirs, *_ = mlx_load(str(tmp_path / "to"))
    assert theirs.eos_token_ids == {0}
    assert isinstance(generate(model, theirs, prompt="the quick", max_tokens=4), str)


@pytest.mark.parametrize("tokenizer", [None])
def test_without_a_tokenizer_that_is_said(leave_run: Callable[..., Path], tmp_path: Path) -> None:
    said: list[str] = []
    result = Run.open(leave_run(), say=said.append).export(tmp_path / "to")
    names = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert list(result["files"]) == names
    assert list(result["loading"]) == ["transformers"]
    assert "no tokenizer" in said[0]
    assert json.loads((tmp_path / "to" / "config.json").read_text())["bos_token_id"] is None


def test_a_run_that_no_program_knows_brings_its_modeling_files(
    leave_run: Callable[..., Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    from transformers import PreTrainedTokenizerFast

    said: list[str] = []
    run = Run.open(leave_run("smear,bigram_hash"), say=said.append)
    result = run.export(tmp_path / "to")
    assert result["layout"] == "own"
    assert {"modeling_minillm.py", "modeling_mlx.py", "tokenizer.json"} <= set(result["files"])
    assert set(result["loading"]) == {"transformers", "mlx-lm"}
    assert said[0].startswith("no layout that other programs know fits bigram_hash and smear")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "to")
    assert theirs("the fox")["input_ids"] == [0, *tokenizer.encode(["the fox"])[0].tolist()]
    with pytest.raises(PlanError, match="but own"):
        run.export(tmp_path / "adapter", layout="peft")


def test_a_model_with_a_layout_is_written_with_its_code_on_request(
    leave_run: Callable[..., Path], tmp_path: Path
) -> None:
    result = Run.open(leave_run(), say=print).export(tmp_path / "to", layout="own")
    assert result["layout"] == "own"
    assert "class Decoder" in (tmp_path / "to" / "modeling_minillm.py").read_text()


UNWRITTEN = '''
from minillm_core import Module, Plugin

class Asks(Module):
    def forward(self, y):
        return y if self.framework else -y

class Unwritten(Plugin, api=1):
    """What only a framework of minillm can compute."""

    def build_attention(self, attn):
        attn.out.gate(Asks)
'''


def test_what_stands_in_the_way_is_named(leave_run: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "unwritten.py").write_text(UNWRITTEN)
    plugin = f"{tmp_path}/unwritten.py:Unwritten"
    out = leave_run(plugin)
    with pytest.raises(
        PlanError, match=r"no modeling file can be written: .*self\.framework"
    ) as found:
        Run.open(out, plugins=plugin, say=print).export(tmp_path / "to")
    assert "unwritten" in str(found.value)
    with pytest.raises(Refusal, match="not empty"):
        Run.open(out, say=print).export(out)
    assert not (tmp_path / "to").exists()
