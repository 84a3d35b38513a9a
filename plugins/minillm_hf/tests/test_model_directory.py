"""Model directories: writing and reading is bit-exact, and an invalid directory is always refused."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from minillm_core import Layers, Linear, State, option
from minillm_core.checkpoint.directories import export_checked, exporting
from minillm_core.cli.main import main
from minillm_core.errors import ConfigError, MinillmError, PlanError, Refusal
from minillm_core.nn.init import ones, zeros
from minillm_core.nn.module import Module
from minillm_core.nn.param import Param
from minillm_core.plan import Plan
from minillm_core.plan.render import exportable
from minillm_core.plugins.plugin import Plugin
from minillm_hf import (
    LAYOUTS,
    HuggingFaceDirectory,
    export_layout,
    exported,
    fit,
    read_model_directory,
    tokenizer_documents,
    write_directory,
)
from minillm_hf import write as hf_write
from minillm_hf.read import stored_tensors
from minillm_hf.write import bfloat16_bits
from minillm_hf.yarn_rope import YarnRope
from minillm_modded.half_rope import HalfRope

Planned = Callable[..., Plan]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
same_folder = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@contextmanager
def refused(said: str | None = None) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    """Expect a refusal that says what is wrong, and what to do."""
    with pytest.raises(Refusal, match=said) as found:
        yield found
    assert found.value.fix, found.value


class Norm(Module):
    """Of queries and keys, with weights."""

    def __init__(self, geometry):
        super().__init__()
        self.q = Param((geometry.head_dim,), init=ones, role="norm")
        self.k = Param((geometry.head_dim,), init=ones, role="norm")

    def forward(self, q, k):
        return self.ops.rms_norm(q, self.q, 1e-5), self.ops.rms_norm(k, self.k, 1e-5)


class BareNorm(Module):
    def forward(self, q, k):
        return q, k


class Gate(Module):
    def __init__(self, geometry):
        super().__init__()
        self.bias = Param((geometry.head_dim,), init=zeros, role="scalar")

    def forward(self, y):
        return y + self.bias


class QK(Plugin, api=1, export="qwen3"):
    """As Qwen3 has it."""

    def build_attention(self, attn):
        attn.qk.norm(Norm)


class BareQK(Plugin, api=1, export="qwen3"):
    """Without weights."""

    def build_attention(self, attn):
        attn.qk.norm(BareNorm)


class HalfQK(Plugin, api=1, export="qwen3"):
    """Says what it is not: one layer has none."""

    def build_attention(self, attn):
        if attn.layer:
            attn.qk.norm(BareNorm)


class Liar(Plugin, api=1, export="llama"):
    """Says what it is not: Llama has no such parameter."""

    def build_attention(self, attn):
        attn.out.gate(Gate)


class Taker(Plugin, api=1, export="llama"):
    """Says what it is not: Llama has an MLP everywhere."""

    def build_model(self, model):
        model.mlp(1, None)


class Blocker(Plugin, api=1):
    """Says nothing."""

    def build_attention(self, attn):
        attn.out.gate(Gate)


class Further(Module):
    """A separate head for the token after the next."""

    def __init__(self, geometry):
        super().__init__()
        self.head = Linear(geometry.dim, geometry.vocab, role="head", axes=("vocab", "dim"))

    def forward(self, x, ids, early):
        logits = self.head(x + early)
        wanted = self.ops.concat([ids[:, 2:], ids[:, :2]], 1)
        found = self.ops.take_along_axis(logits, self.ops.expand_dims(wanted, -1), -1)
        return self.ops.mean(self.ops.logsumexp(logits, -1) - found[..., 0])


class Early(Module):
    """A projection of the embedding, with a state."""

    statistics: dict[str, str] = {"seen": "mean"}  # noqa: RUF012

    def __init__(self, geometry):
        super().__init__()
        self.up = Linear(geometry.dim, geometry.dim, role="gate", axes=("dim", "dim"))
        self.slow = State((geometry.dim,), zeros)

    def forward(self, x0):
        up = self.up(x0)
        return up, self.ops.mean(up, (0, 1))

    def next_state(self, seen):
        return {"slow": seen}


class Heads(Plugin, api=1):
    """A term with parameters, which reads a stream with parameters; nothing else reads either."""

    used: bool = option(False, help="whether the model reads the stream, too")

    def build_model(self, model):
        model.stream("early", Early)
        if self.used:
            model.residual("final", "early", 0.1)

    def compute_loss(self, loss):
        loss.term("further", Further, weight=0.5)


def weights(plan: Plan, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        f"model.{name}": random.standard_normal(info.shape).astype(np.float32)
        for name, info in plan.parameters.items()
    }


def write(folder: Path, plan: Plan, arrays: Mapping[str, Any] | None = None, **options) -> Path:
    layout = export_layout(plan)
    document = layout.document(plan.config.model, positions=16, boundary=0)
    tensors = exported(plan, weights(plan) if arrays is None else arrays)
    write_directory(folder, tensors, {"config.json": document}, **options)
    return folder


@pytest.fixture
def folder(tmp_path: Path, planned: Planned) -> Path:
    """A directory of the small plain model, for a test to damage."""
    return write(tmp_path / "model", planned())


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not ...}))


# write and read


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("shard_bytes", [1, 20_000, 10**9])
@pytest.mark.parametrize("plugins", [{}, {"qk": QK()}], ids=["llama", "qwen3"])
def test_there_and_back(
    tmp_path: Path, planned: Planned, tied: str, shard_bytes: int, plugins: dict
) -> None:
    more = ("model.rope_base=5000", "model.norm_eps=1e-6", "model.head_dim=6")
    plan = planned(f"model.tied={tied}", *more, **plugins)
    arrays = weights(plan)
    folder = write(tmp_path / "a" / "model", plan, arrays, shard_bytes=shard_bytes)
    found = read_model_directory(folder)
    assert found.layout is LAYOUTS["qwen3" if plugins else "llama"]
    assert found.model == plan.config.model
    fitted = fit(plan, found)
    assert fitted.initial == ()
    assert fitted.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.asarray(fitted.arrays[name]).tobytes() == array.tobytes(), name
    files = sorted(folder.glob("*.safetensors"))
    held = [load_file(file) for file in files]
    assert (len(files) > 1) == (shard_bytes < 10**9)
    for shard in held:
        assert len(shard) == 1 or sum(array.nbytes for array in shard.values()) <= shard_bytes
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        size = sum(array.nbytes for array in arrays.values())
        assert index["metadata"]["total_size"] == size
        assert [file.name for file in files] == [
            f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
        ]
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_it_says_what_a_run_must_be_told(folder: Path, planned: Planned) -> None:
    found = read_model_directory(folder)
    model = planned().config.model.model_dump()
    settings = {f"model.{key}": value for key, value in model.items()} | {"train.lr": 3e-4}
    assert found.settings == settings
    assert "would not match the ids" in found.notes[0]
    (folder / "tokenizer.json").write_text("{}")
    found = read_model_directory(folder)
    assert found.settings["data.tokenizer"] == str(folder / "tokenizer.json")
    assert found.notes == ()


def test_the_digest_is_of_every_byte(folder: Path) -> None:
    before = read_model_directory(folder).digest
    assert read_model_directory(folder).digest == before
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert read_model_directory(folder).digest != before


# writing


@pytest.mark.parametrize("step", ["write_file", "stream_file", "sync_path", "rename_path"])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_write, step, full)
    with pytest.raises(MinillmError, match="No space left") as found:
        write(tmp_path / "model", planned())
    assert found.value.exit_code == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_without_permission_is_refused(
    tmp_path: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "model.tmp-0"))

    monkeypatch.setattr(hf_write, "write_file", forbidden)
    with pytest.raises(MinillmError, match="could not be written: Permission denied\n") as found:
        write(tmp_path / "model", planned())
    assert found.value.exit_code == 2


def test_a_place_that_is_taken_is_refused(tmp_path: Path, planned: Planned) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file", "file/below"):
        with pytest.raises(MinillmError):
            write(tmp_path / name, planned())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine"]


def test_a_place_that_is_taken_meanwhile_is_left_alone(
    tmp_path: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "mine").touch()
        source.rename(target)

    monkeypatch.setattr(hf_write, "rename_path", late)
    with pytest.raises(Refusal, match="not empty"):
        write(tmp_path / "model", planned())
    monkeypatch.chdir(tmp_path / "model")
    with pytest.raises(Refusal, match="cannot replace the current folder"):
        write(Path(), planned())
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]


def test_an_empty_folder_is_a_place_and_so_is_a_link_to_it(
    tmp_path: Path, planned: Planned
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", planned())
    assert (tmp_path / "link").is_symlink()
    read_model_directory(tmp_path / "real")


def test_what_killed_exports_left_is_swept_by_the_next(tmp_path: Path, planned: Planned) -> None:
    others = {"model.tmp-mine", "a.model.tmp-0123456789abcdef", "modelx.tmp-0123456789abcdef"}
    for name in (*others, "model.tmp-0123456789abcdef", "model.tmp-fedcba9876543210"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    write(tmp_path / "model", planned())
    assert {path.name for path in tmp_path.iterdir()} == {"model", *others}


@pytest.mark.parametrize(
    ("plugin", "what"),
    [
        (Blocker(), "cannot be exported"),
        (Liar(), r"no place for layers.0.attention.out.odd.bias"),
        (Taker(), r"needs layers.1.mlp"),
        (HalfQK(), "layer 0 has no norm"),
    ],
)
def test_what_fits_no_layout_is_refused_by_the_plugin_s_name(
    planned: Planned, plugin: Plugin, what: str
) -> None:
    with pytest.raises(PlanError, match=what) as found:
        exporting(planned(odd=plugin))
    assert "plugins: odd" in str(found.value)


def test_a_claim_that_does_not_hold_is_said_by_the_plan(planned: Planned) -> None:
    plan = export_checked(planned(odd=Liar()))
    assert (plan.export.layout, plan.export.blocked_by) == ("own", ("odd",))
    said = r"a directory with its own modeling files: the llama layout has no place for layers\.0\.attention\.out\.odd.*plugins: odd"
    assert re.fullmatch(said + r"\)", exportable(plan))
    assert plan.hash == planned(odd=Liar()).hash
    plain = planned()
    assert export_checked(plain) is plain


def test_state_that_is_no_parameter_is_refused(planned: Planned) -> None:
    plan = planned()
    with pytest.raises(PlanError, match=r"no place for state\.bias"):
        exported(plan, weights(plan) | {"state.bias": np.zeros(3, np.float32)})


def test_what_the_loss_alone_reads_is_left_out(planned: Planned) -> None:
    plan, plain = planned(heads=Heads()), planned()
    added = plan.parameters.keys() - plain.parameters.keys()
    assert added == {"streams.early.up.weight", "terms_nodes.further.head.weight"}
    exporting(plan)
    arrays = weights(plan) | {"state.streams.early.slow": np.zeros(32, np.float32)}
    tensors = exported(plan, arrays)
    assert tensors.keys() == exported(plain, weights(plain)).keys()
    assert exportable(plan) == exportable(plain)
    with pytest.raises(PlanError, match=r"'?heads'? has no equivalent"):
        exporting(planned(heads=Heads(used=True)))


# starting from a directory


def test_files_may_be_links_as_in_the_cache_of_a_hub(sharded: Path) -> None:
    whole = read_model_directory(sharded)
    digest, names = whole.digest, whole.arrays().keys()
    snapshot, blobs = sharded.parent / "snapshot", sharded.parent / "blobs"
    sharded.rename(blobs)
    snapshot.mkdir()
    for number, path in enumerate(sorted(blobs.iterdir())):
        (snapshot / path.name).symlink_to(path.rename(blobs / f"{number:040x}"))
    found = read_model_directory(snapshot)
    assert (found.digest, found.arrays().keys()) == (digest, names)


def test_what_a_plugin_adds_keeps_its_initial_value(folder: Path, planned: Planned) -> None:
    fitted = fit(planned(gate=Blocker()), read_model_directory(folder))
    assert set(fitted.initial) == {f"layers.{n}.attention.out.gate.bias" for n in range(4)}


def test_what_a_plugin_takes_away_is_refused(folder: Path, planned: Planned) -> None:
    with pytest.raises(PlanError, match=r"no place for layers\.1\.mlp") as found:
        fit(planned(taker=Taker()), read_model_directory(folder))
    assert "taker" in str(found.value)


@pytest.mark.parametrize(
    "changed",
    ["layers=3", "dim=64", "heads=8", "kv_heads=4", "hidden=40", "head_dim=16", "norm_eps=1e-6"],
)
def test_another_shape_is_refused(folder: Path, planned: Planned, changed: str) -> None:
    with pytest.raises(ConfigError, match=f"model.{changed.partition('=')[0]} is"):
        fit(planned(f"model.{changed}"), read_model_directory(folder))


def test_rotary_scaling_is_not_dropped(folder: Path, planned: Planned) -> None:
    plain = read_model_directory(folder)
    yarn = YarnRope(factor=4.0, original_max_position_embeddings=64)
    assert fit(planned(yarn_rope=yarn), plain).initial == ()  # a longer context, on purpose
    edit(folder / "config.json", rope_scaling=YARN)
    found = read_model_directory(folder)
    assert fit(planned(yarn_rope=yarn), found).initial == ()
    for other in ({}, {"yarn_rope": YarnRope()}, {"half_rope": HalfRope()}):
        with pytest.raises(PlanError, match=r"scales its rotary frequencies \(yarn\)") as refused:
            fit(planned(**other), found)
        assert "yarn_rope.original_max_position_embeddings=64" in str(refused.value.fix)


class Still(Plugin, api=1):
    """Positions turn one pair of features, or none."""

    turning: int = 0

    def build_attention(self, attn):
        attn.rope.frequencies(still, turning=self.turning)


def still(head_dim: int, turning: int) -> np.ndarray:
    return 0.5 ** np.arange(head_dim // 2) * (np.arange(head_dim // 2) < turning)


@pytest.mark.parametrize("turning", [0, 1, 2])
def test_yarn_needs_pairs_that_turn(planned: Planned, turning: int) -> None:
    plugins = {"still": Still(turning=turning), "yarn_rope": YarnRope()}
    if turning == 2:
        assert planned(**plugins)
        return
    with pytest.raises(PlanError, match=f"turn with the position, and {turning} of the") as refused:
        planned(**plugins)
    assert "yarn_rope.layers" in str(refused.value.fix)


@pytest.mark.parametrize(
    ("layers", "plugins"),
    [("every:2", {}), ("all", {"qk": QK()})],
    ids=["some layers", "beside another layout"],
)
def test_rotary_scaling_is_exported_where_all_layers_have_it(
    planned: Planned, layers: str, plugins: dict
) -> None:
    plan = export_checked(planned(yarn_rope=YarnRope(layers=Layers(layers)), **plugins))
    assert plan.export.layout == ("qwen3" if plugins else "own")
    assert plugins or "scaled in some layers, not in others" in exportable(plan)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"eos_token": "</s>", "auto_map": {"AutoTokenizer": ["evil.T", null]}}', "names code"),
        ('{"eos_token": 5}', "which is not a token"),
        ('{"eos_token": {"content": ["</s>"]}}', "which is not a token"),
        ('{"eos_token": ""}', "which is not a token"),
        ('{"eos_token": "a", "eos_token": "b"}', "the same key twice"),
        ("[]", "not an object"),
        ("{" * 100_000, "cannot be read"),
    ],
)
def test_a_hostile_tokenizer_config_is_refused(folder: Path, text: str, said: str) -> None:
    (folder / "tokenizer_config.json").write_text(text)
    with refused(said) as error:
        read_model_directory(folder)
    assert len(str(error.value)) < 600


def test_the_end_of_text_is_that_of_the_tokenizer_s_config(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    for token, known in [
        ("</s>", {"data.end_of_text": "</s>"}),
        ({"content": "<eos>", "lstrip": False}, {"data.end_of_text": "<eos>"}),
        ("<|endoftext|>", {}),
        (None, {}),
    ]:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        found = read_model_directory(folder).settings
        assert {k: v for k, v in found.items() if k == "data.end_of_text"} == known


def test_pickles_beside_safetensors_are_left_alone(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    (folder / "modeling_evil.py").write_text("raise SystemExit('run')")
    found = read_model_directory(folder)
    assert found.arrays()
    assert "pytorch_model.bin" in found.notes[0]


def test_the_rotary_base_may_be_changed(folder: Path, planned: Planned) -> None:
    assert fit(planned("model.rope_base=500000"), read_model_directory(folder)).initial == ()


def test_norms_of_queries_and_keys_are_not_dropped(tmp_path: Path, planned: Planned) -> None:
    found = read_model_directory(write(tmp_path / "qwen", planned(qk=QK())))
    with pytest.raises(PlanError, match="no norm on queries and keys"):
        fit(planned(), found)
    with pytest.raises(PlanError, match=r"no place for layers\.0\.attention\.qk"):
        fit(planned(qk=BareQK()), found)
    bare = planned(qk=BareQK())
    fitted = fit(bare, read_model_directory(write(tmp_path / "bare", bare)))
    assert fitted.arrays.keys() == weights(bare).keys()
    again = fit(planned(other_name=QK()), found)
    assert again.initial == ()
    assert "model.layers.0.attention.qk.other_name.q" in again.arrays


# config.json of others


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": ..., "rope_parameters": ...},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
        {"rope_parameters": ..., "rope_scaling": None},
        {"rope_parameters": ..., "rope_scaling": {"type": "default"}},
        {"head_dim": ..., "model_type": ..., "attention_bias": ..., "hidden_act": ...},
        {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 64},
        {"torch_dtype": "float16", "pretraining_tp": 1, "layer_types": ["full_attention"] * 4},
    ],
)
def test_other_ways_of_saying_the_same(folder: Path, planned: Planned, changes: dict) -> None:
    edit(folder / "config.json", **changes)
    assert read_model_directory(folder).model == planned().config.model


def test_what_llama_leaves_out_has_transformers_defaults(folder: Path, planned: Planned) -> None:
    edit(folder / "config.json", rms_norm_eps=...)
    found = read_model_directory(folder)
    assert found.model.norm_eps == 1e-6
    with pytest.raises(ConfigError, match=r"model\.norm_eps is 1e-05, and the model"):
        fit(planned(), found)
    assert fit(planned("model.norm_eps=1e-6"), found).initial == ()


def test_queries_have_keys_of_their_own_where_nothing_else_is_said(
    tmp_path: Path, planned: Planned
) -> None:
    folder = write(tmp_path / "model", planned("model.kv_heads=4"))
    edit(folder / "config.json", num_key_value_heads=...)
    assert read_model_directory(folder).model.kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "Other"),
        ({"model_type": "mistral"}, "mistral"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "llama3 without low_freq_factor",
        ),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "yarn with"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "yarn with factor 4"),
        ({"rope_scaling": YARN | {"factor": True}}, "yarn with factor True"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "yarn with truncate 1"),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "yarn with 'mscale'"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 1.5}}, "yarn with"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}}, "differ"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "is none of llama3, yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {
                "rope_parameters": YARN,
                "rope_scaling": ...,
                "original_max_position_embeddings": 32,
            },
            "original_max_position_embeddings is 32, and 64 in rope_parameters: Transformers 5",
        ),
        ({"rope_theta": 500000.0}, "rope_theta is both"),
        ({"rope_theta": float("inf"), "rope_parameters": ...}, "Infinity is not JSON"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization": {"bits": 4}}, "quantization"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"head_dim": 7}, "head_dim of 7"),
        ({"head_dim": 16}, r"q_proj.weight has shape \(32, 32\).* says \(64, 32\)"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"num_attention_heads": 3}, "3 heads"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"num_hidden_layers": 5}, "misses the tensor"),
        ({"num_hidden_layers": 3}, "has the tensor"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"vocab_size": 65}, "shape"),
        ({"tie_word_embeddings": False}, "misses the tensor lm_head"),
    ],
)
def test_what_the_decoder_does_not_have_is_refused_by_name(
    folder: Path, changes: dict, named: str
) -> None:
    edit(folder / "config.json", **changes)
    with refused(named) as found:
        read_model_directory(folder)
    assert len(str(found.value)) < 600


def test_qwen3_must_state_what_it_would_have_by_default(tmp_path: Path, planned: Planned) -> None:
    folder = write(tmp_path / "model", planned(qk=QK()))
    edit(folder / "config.json", sliding_window=4096)  # stated, and switched off
    read_model_directory(folder)
    edit(folder / "config.json", head_dim=...)
    with refused("head_dim is missing"):
        read_model_directory(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
) | st.sampled_from([10**400, -1, 2**63, 1e308, {"rope_type": []}, {"rope_theta": 10**400}])
KEYS = [
    *("architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "intermediate_size", "rms_norm_eps"),
    *("rope_theta", "rope_parameters", "rope_scaling", "layer_types", "sliding_window"),
    *("tie_word_embeddings", "hidden_act", "auto_map"),
]


@same_folder
@given(st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_a_mutated_config_is_refused_or_read(folder: Path, changes: dict) -> None:
    path = folder / "config.json"
    before = path.read_text()
    try:
        edit(path, **changes)
        refused_or_read(folder)
    finally:
        path.write_text(before)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff", b"NaN", b"[" * 100_000, b"9" * 5_000, b'{"a": 1} x']
)
def test_what_is_no_json_is_refused(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    with refused(r"config\.json"):
        read_model_directory(folder)


# tensors of others


def raw_file(path: Path, dtype: str, values: np.ndarray) -> None:
    header = json.dumps(
        {"x": {"dtype": dtype, "shape": list(values.shape), "data_offsets": [0, values.nbytes]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())


def test_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    half = bits.view(np.float16)
    half = half[np.isfinite(half)].reshape(2, -1)
    raw_file(tmp_path / "f16", "F16", half)
    found = stored_tensors(tmp_path / "f16")["x"].read()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.astype(np.float16).view("u2"), half.view("u2"))
    brain = bits[(bits & 0x7F80) != 0x7F80].reshape(2, -1)
    raw_file(tmp_path / "bf16", "BF16", brain)
    found = stored_tensors(tmp_path / "bf16")["x"].read()
    expected = [struct.unpack("<f", b"\0\0" + int(b).to_bytes(2, "little"))[0] for b in brain.flat]
    np.testing.assert_array_equal(found.ravel(), np.array(expected, np.float32))
    assert found.shape == brain.shape
    assert found.flags.writeable


@pytest.mark.parametrize(
    ("dtype", "bits"), [("F32", 0x7FC00000), ("BF16", 0x7F80), ("F16", 0x7C00)]
)
def test_what_is_not_finite_is_refused(tmp_path: Path, dtype: str, bits: int) -> None:
    raw_file(tmp_path / "x", dtype, np.array([0, bits], "<u4" if dtype == "F32" else "<u2"))
    with refused("x holds a NaN or an infinity"):
        stored_tensors(tmp_path / "x")["x"].read()


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8])
def test_other_dtypes_are_refused(folder: Path, dtype: type) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
    save_file(tensors, folder / "model.safetensors")
    with refused(r"model\.norm\.weight is of dtype"):
        read_model_directory(folder)


def test_a_head_beside_a_tied_embedding(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    doubled = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    doubled["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(doubled, path)
    assert read_model_directory(folder).arrays().keys() == {
        f"model.{tensor.place}"
        for tensor in LAYOUTS["llama"].tensors(read_model_directory(folder).model).values()
    }
    doubled["lm_head.weight"][0, 0] += 1
    save_file(doubled, path)
    with refused("tied to the embedding"):
        read_model_directory(folder)


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "DIR", "--data", "DIR/text.txt"],
        ["generate", "DIR", "It was"],
        ["export", "DIR", "--to", "DIR/new"],
        ["train", "--init", "DIR", "--data", "DIR/text.txt", "--out", "DIR/out"],
    ],
    ids=lambda words: words[0],
)
def test_weights_without_their_config_are_told_from_a_run(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "text.txt").write_text("It was a dark and stormy night.\n")
    (folder / "config.json").unlink()
    assert main([word.replace("DIR", str(folder)) for word in words]) == 2
    said = capsys.readouterr().err
    assert f"{folder} looks like a model directory, and its config.json is missing" in said
    assert "fix:   copy config.json there" in said
    assert not (folder / "out").exists()
    (folder / "manifest.json").write_text("{}")  # as in the checkpoint of a run
    assert main([word.replace("DIR", str(folder)) for word in words]) == 2
    assert "looks like" not in capsys.readouterr().err


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with refused("neither"):
        read_model_directory(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with refused(r"pytorch_model\.bin is there: a pickle"):
        read_model_directory(folder)


@pytest.fixture
def sharded(tmp_path: Path, planned: Planned) -> Path:
    """A sharded checkpoint, for a test to damage."""
    return write(tmp_path / "model", planned(), shard_bytes=20_000)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b", "..", "", "a\0b", "no", "config.json"]
)
def test_shards_do_not_leave_the_folder(sharded: Path, name: str) -> None:
    path = sharded / "model.safetensors.index.json"
    held = json.loads(path.read_text())["weight_map"]
    save_file({"x": np.ones(1)}, sharded.parent / "model.safetensors")
    edit(path, weight_map=held | {"model.norm.weight": name})
    with refused():
        read_model_directory(sharded)


@pytest.mark.parametrize("held", [None, [], {"x": 1}, {"x": None}, {}, "x"])
def test_an_index_without_names_is_refused(sharded: Path, held: Any) -> None:
    edit(sharded / "model.safetensors.index.json", weight_map=held)
    with refused():
        read_model_directory(sharded)


@pytest.mark.parametrize("change", ["swap", "drop", "invent"])
def test_an_index_that_is_wrong_is_refused(sharded: Path, change: str) -> None:
    path = sharded / "model.safetensors.index.json"
    held = json.loads(path.read_text())["weight_map"]
    name = "model.norm.weight"
    other = next(file for file in held.values() if file != held[name])
    changed = {
        "swap": held | {name: other},
        "drop": {key: file for key, file in held.items() if key != name},
        "invent": held | {"model.more.weight": other},
    }
    edit(path, weight_map=changed[change])
    with refused("disagree about"):
        read_model_directory(sharded)


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with refused("not a file"):
            read_model_directory(folder)


def test_a_file_that_shrinks_is_refused(folder: Path) -> None:
    found = read_model_directory(folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4])
    with refused("ends before"):
        found.arrays()
    with refused("not a sound safetensors file"):
        read_model_directory(folder)


@same_folder
@given(st.data())
def test_a_mutated_header_is_refused_or_read(folder: Path, data: st.DataObject) -> None:
    path = folder / "model.safetensors"
    before = path.read_bytes()
    length = 8 + int.from_bytes(before[:8], "little")
    damaged = bytearray(before)
    places = st.integers(0, 7) | st.integers(0, length - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        path.write_bytes(damaged[: data.draw(st.none() | st.integers(0, len(damaged)))])
        refused_or_read(folder)
    finally:
        path.write_bytes(before)


def refused_or_read(folder: Path) -> None:
    try:
        found = read_model_directory(folder)
        arrays = found.arrays()
    except Refusal:
        return
    assert isinstance(found, HuggingFaceDirectory)
    for array in arrays.values():
        assert array.dtype == np.float32
        assert np.isfinite(array).all()


# the tokenizer


def test_a_text_begins_with_the_boundary_whatever_the_tokenizer_added_by_itself() -> None:
    from tokenizers import Tokenizer, models, processors

    native = Tokenizer(models.BPE({"a": 0, "<|endoftext|>": 1, "[CLS]": 2}, []))
    native.add_special_tokens(["<|endoftext|>", "[CLS]"])
    added = processors.TemplateProcessing(single="[CLS] $A [CLS]", special_tokens=[("[CLS]", 2)])
    for its_own in (None, added):
        native.post_processor = its_own
        documents = tokenizer_documents(native.to_str(), boundary="<|endoftext|>", positions=7)
        assert documents["tokenizer_config.json"]["model_max_length"] == 7
        again = Tokenizer.from_str(json.dumps(documents["tokenizer.json"]))
        assert again.encode("a").ids == [1, 0]
        assert again.encode("a", "a").ids == [1, 0, 0]
        assert again.encode("a", add_special_tokens=False).ids == [0]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bfloat16_is_rounded_as_torch_rounds_it(numbers: list[float]) -> None:
    import torch

    array = np.array(numbers, np.float32)
    theirs = torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bfloat16_bits(array), theirs)


def test_a_directory_in_bfloat16_has_half_the_bytes_and_the_rounded_weights(
    tmp_path: Path, planned: Planned
) -> None:
    plan, sizes = planned(), {}
    arrays = weights(plan)
    for dtype in ("float32", "bfloat16"):
        folder = write(tmp_path / dtype, plan, arrays, dtype=dtype, shard_bytes=20_000)
        sizes[dtype] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        found = read_model_directory(folder).arrays()
        for name, array in arrays.items():
            bits = bfloat16_bits(array).astype(np.uint32) << 16
            expected = array if dtype == "float32" else bits.view(np.float32)
            np.testing.assert_array_equal(found[name], expected)
    assert sizes["bfloat16"] < 0.55 * sizes["float32"] + 2000


def test_a_tokenizer_larger_than_any_is_refused(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(10 << 30)  # a sparse file: it takes no space
    with refused(r"tokenizer\.json has more than"):
        read_model_directory(folder)
