"""Tests of the tokenizer: byte round trip, special tokens in text, bytes per token, refusals."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from minillm_core.data import END_OF_TEXT, Tokenizer, bytes_per_token, cutting
from minillm_core.data import tokenizer as module
from minillm_core.errors import DataError

SAMPLE = [
    "the cat sat on the mat and the cat ran",
    "  spaces\n\n\tand täbs it's 1234 今日は 😀",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(SAMPLE * 3, 300)


any_text = st.text(st.characters(exclude_categories=["Cs"]))


@given(any_text)
def test_every_text_comes_back_and_its_bytes_add_up(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode([text])[0]
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert bytes_per_token(tokenizer)[ids].sum() == len(text.encode())


@given(st.lists(any_text, max_size=4), any_text)
def test_the_special_token_written_out_is_text(
    tokenizer: Tokenizer, texts: list[str], between: str
) -> None:
    written = f"{between}{END_OF_TEXT}{between}"
    encoded = tokenizer.encode([*texts, written, END_OF_TEXT])
    assert len(encoded) == len(texts) + 2
    assert not any((ids == tokenizer.end_of_text).any() for ids in encoded)
    assert tokenizer.decode(encoded[-2]) == written


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> Tokenizer:
    """Return the same tokenizer without fastokens."""
    found = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.text()))
    vars(found)["_fastokens"] = None
    return found


@given(st.lists(any_text | st.sampled_from([END_OF_TEXT, "it's  \n\n 1234", "\u0130\u2028 x"])))
def test_fastokens_gives_the_ids_of_tokenizers(
    tokenizer: Tokenizer, plain: Tokenizer, texts: list[str]
) -> None:
    assert tokenizer.encoder == f"fastokens {version('fastokens')}, with the ids of tokenizers"
    for quick, slow in zip(tokenizer.encode(texts), plain.encode(texts), strict=True):
        assert quick.dtype == slow.dtype == np.int32
        assert quick.tolist() == slow.tolist()


def test_without_fastokens_the_way_to_it_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    monkeypatch.setattr(module, "installed_version", lambda name: None)
    slow = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.text()))
    ours, way = slow.encoder.split("; many times as fast: ")
    assert ours == f"tokenizers {tokenizers.__version__}"
    assert way.startswith("pip install 'minillm-core[fast]'")
    assert slow.encode(["a cat"])[0].tolist() == tokenizer.encode(["a cat"])[0].tolist()


@pytest.mark.parametrize(
    "unusual",
    [
        {"model": {"byte_fallback": True}},
        {"model": {"ignore_merges": True}},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
    ],
)
def test_a_tokenizer_of_another_kind_is_left_to_tokenizers(
    tokenizer: Tokenizer, unusual: dict[str, dict]
) -> None:
    data = json.loads(tokenizer.text())
    for key, value in unusual.items():
        data[key] = {**(data[key] or {}), **value}
    other = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)))
    assert other.encoder == f"tokenizers {tokenizers.__version__}"


@given(
    st.lists(
        st.sampled_from([" ", "\n", "  ", "\t", "\x1c", "\x85", "\u2028", "a", "it's", "42", "é",
                         "!?", "...", "界", "\ufeff", END_OF_TEXT]),
        max_size=60,
    ).map("".join),
    st.integers(1, 9),
)  # fmt: skip
def test_long_texts_are_cut_without_a_trace(tokenizer: Tokenizer, text: str, part: int) -> None:
    whole = tokenizer.encode([text])[0]
    before = cutting._PART, module._TOGETHER
    cutting._PART, module._TOGETHER = part, 2 * part
    try:
        first, again = tokenizer.encode([text, text])
    finally:
        cutting._PART, module._TOGETHER = before
    np.testing.assert_array_equal(first, whole)
    np.testing.assert_array_equal(again, whole)


@pytest.mark.parametrize(
    "added", [{"content": "<tool_call>"}, {"content": "<>", "rstrip": True}], ids=str
)
def test_a_token_added_for_texts_is_never_divided(
    tokenizer: Tokenizer, tmp_path: Path, added: dict
) -> None:
    native = tokenizers.Tokenizer.from_str(tokenizer.text())
    native.add_tokens([tokenizers.AddedToken(**added, normalized=False)])
    native.save(str(tmp_path / "t.json"))
    (ids,) = Tokenizer.load(tmp_path / "t.json", 301).encode([(added["content"] + " ") * 9000])
    assert (ids == 300).sum() == 9000
    assert len(ids) == (9000 if "rstrip" in added else 18000)


def test_training_is_repeatable(texts: list[str]) -> None:
    one, two = (Tokenizer.train(iter(texts), 290) for _ in range(2))
    assert one.digest == two.digest
    assert one.digest != Tokenizer.train(texts[1:], 290).digest


def test_end_of_text_is_zero_and_little_text_makes_few_entries(texts: list[str]) -> None:
    assert Tokenizer.train(texts, 270).size == 270
    small = Tokenizer.train(["no pair twice"], 4096)
    assert small.end_of_text == 0
    assert small.size == 257
    assert bytes_per_token(small).tolist() == [0] + [1] * 256
    assert bytes_per_token(small, 300).tolist() == [0] + [1] * 256 + [0] * 43


def test_specials_are_shown_when_asked_for_and_unused_ids_are_nothing(
    tokenizer: Tokenizer,
) -> None:
    ids = [0, *tokenizer.encode(["hi"])[0].tolist(), 299_999]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(np.array(ids), specials=True) == END_OF_TEXT + "hi"


def test_a_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="at least 257 entries"):
        Tokenizer.train(SAMPLE, 256)


def test_saved_and_loaded_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json", 300)
    assert loaded.digest == tokenizer.digest
    assert loaded.encode(SAMPLE)[1].tolist() == tokenizer.encode(SAMPLE)[1].tolist()
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def edited(tokenizer: Tokenizer, path: Path, edit: Callable[[dict], object]) -> Path:
    tokenizer.save(path)
    data = json.loads(path.read_text("utf-8"))
    edit(data)
    path.write_text(json.dumps(data), "utf-8")
    return path


@pytest.mark.parametrize(
    ("edit", "vocab", "said"),
    [
        (lambda data: None, 299, "has 300 entries, more than model.vocab=299"),
        (lambda data: data["added_tokens"][0].update(special=False), 300, "no special token"),
        (lambda data: data["added_tokens"][0].update(content="<eos>"), 300, "no special token"),
        (lambda data: data["model"].update(dropout=0.1), 300, "at random"),
        (lambda data: data.clear(), 300, "cannot be read"),
    ],
)
def test_what_cannot_serve_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, edit: Callable, vocab: int, said: str
) -> None:
    path = edited(tokenizer, tmp_path / "t.json", edit)
    with pytest.raises(DataError) as raised:
        Tokenizer.load(path, vocab)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def test_another_token_begins_documents_where_it_is_named(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def renamed(data: dict) -> None:
        data["added_tokens"][0]["content"] = "</s>"
        data["model"]["vocab"]["</s>"] = data["model"]["vocab"].pop("<|endoftext|>")

    path = edited(tokenizer, tmp_path / "t.json", renamed)
    with pytest.raises(DataError, match="no special token") as raised:
        Tokenizer.load(path, 300)
    assert "data.end_of_text=</s>" in str(raised.value.fix)
    loaded = Tokenizer.load(path, 300, "</s>")
    assert (loaded.end_of_text, loaded.end_of_text_token) == (0, "</s>")
    (written,) = loaded.encode(["a</s>b"])  # the name in a text is plain text
    assert 0 not in written
    assert loaded.decode(written) == "a</s>b"


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", None])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.load(path, 300)


def replaced(content: str, pattern: str = ".") -> dict:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def charsmap(*texts: str) -> str:
    tree = b"\0" * 8
    table = "".join(text + "\0" for text in texts).encode()
    return base64.b64encode(len(tree).to_bytes(4, "little") + tree + table).decode()


@pytest.mark.parametrize(
    ("place", "step", "said"),
    [
        ("normalizer", replaced("x" * 1000), "1,000 times"),
        ("normalizer", {"type": "Sequence", "normalizers": [replaced("xxxxx")] * 3}, "125 times"),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 65}, "65 times"),
        ("decoder", replaced("x" * 65), "65 times"),
        ("normalizer", replaced("\u2581", " "), None),
        ("normalizer", {"type": "Sequence", "normalizers": [replaced("xxxx")] * 3}, None),
    ],
)
def test_a_tokenizer_that_fills_the_memory_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, place: str, step: dict, said: str | None
) -> None:
    path = edited(tokenizer, tmp_path / "t.json", lambda data: data.update({place: step}))
    if said is None:
        Tokenizer.load(path, 300)
        return
    with pytest.raises(DataError, match=said) as raised:
        Tokenizer.load(path, 300)
    assert str(path) in str(raised.value)


def test_the_growth_of_tables_and_suffixes_is_known() -> None:
    table = {"type": "Precompiled", "precompiled_charsmap": charsmap("ab", "x" * 99, "c")}
    plain = dict.fromkeys(("normalizer", "pre_tokenizer", "model", "decoder"))
    assert module._growth({**plain, "normalizer": table}) == 99
    assert module._growth({**plain, "model": {"end_of_word_suffix": "x" * 70}}) == 70
    assert module._growth(plain) == 1


def test_a_tokenizer_is_read_from_a_regular_file_of_bounded_size(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(DataError, match=r"cannot be read: .*(not a regular|directory)"):
            Tokenizer.load(path, 300)
    tokenizer.save(tmp_path / "t.json")
    (tmp_path / "link.json").symlink_to("t.json")
    assert Tokenizer.load(tmp_path / "link.json", 300).digest == tokenizer.digest
    monkeypatch.setattr(module, "LARGEST_TOKENIZER", 1 << 10)
    with pytest.raises(DataError, match="more than"):
        Tokenizer.load(tmp_path / "t.json", 300)


def test_saving_sweeps_what_a_killed_process_left_and_says_what_fails(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "t.json.tmp-0123").write_text("half")
    tokenizer.save(tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        tokenizer.save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "t.json"]


def test_long_texts_of_a_tokenizer_that_cannot_be_divided_are_cut_aloud(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    path = edited(
        tokenizer, tmp_path / "t.json", lambda data: data.update(normalizer={"type": "NFC"})
    )
    loaded, notes = Tokenizer.load(path, 300), Counter()
    text = "the cat sat\n" * 20
    (ids,) = loaded.encode([text], notes)
    assert loaded.decode(ids) == text
    assert notes == {module._DIVIDED: 2}


def test_truncation_and_padding_of_a_file_do_not_change_text(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "t.json")
    native = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    native.enable_truncation(3)
    native.enable_padding(length=8)
    native.save(str(tmp_path / "t.json"))
    loaded = Tokenizer.load(tmp_path / "t.json", 300)
    assert loaded.decode(loaded.encode([SAMPLE[0]])[0]) == SAMPLE[0]


@given(st.lists(st.integers(0, 310), max_size=12))
def test_ids_one_by_one_give_the_text_of_all(tokenizer: Tokenizer, ids: list[int]) -> None:
    step = tokenizer.stream()
    given, all_of_it = "".join(map(step, ids)), tokenizer.decode(ids)
    # an incomplete character at the end is held back
    assert all_of_it in (given, given + "\ufffd", given + "\ufffd\ufffd")


def test_the_ids_in_use(tokenizer: Tokenizer) -> None:
    assert tokenizer.used_ids().tolist() == list(range(300))
    assert tokenizer.used_ids().dtype == np.int32


def test_bytes_of_a_sentencepiece_kind() -> None:
    vocab = {END_OF_TEXT: 0, "<0xE4>": 1, "\u2581the": 2, "ä": 3}
    native = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    native.decoder = decoders.Metaspace()
    native.add_special_tokens([END_OF_TEXT])
    native.add_tokens(["added"])
    tokenizer = Tokenizer(native)
    assert bytes_per_token(tokenizer).tolist() == [0, 1, 4, 2, 5]
    step = tokenizer.stream()
    assert [step(index) for index in (2, 1, 3, 0, 4)] == [" the", "", "\ufffdä", "", "added"]


LLAMA = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
GEMMA = (normalizers.Replace(" ", "\u2581"), pre_tokenizers.Split(" ", "merged_with_previous"))
PATTERN = tokenizers.Regex(r"\s?\w+|\s?[^\s\w]+|\s+")
CL100K = [pre_tokenizers.Split(PATTERN, "removed", True), pre_tokenizers.ByteLevel(False, False)]
IN_FRONT = "Prepend", "Metaspace", "add_prefix_space=True"
T5 = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]


@pytest.mark.parametrize(
    ("normalizer", "words", "model"),
    [
        (LLAMA, None, {"byte_fallback": True}),
        (*GEMMA, {"byte_fallback": True}),
        (None, pre_tokenizers.Metaspace(), "Unigram"),
        (normalizers.Lowercase(), pre_tokenizers.Sequence(T5), "Unigram"),
        (None, pre_tokenizers.Sequence(CL100K), {}),
        (None, pre_tokenizers.ByteLevel(True), {}),
        (normalizers.ByteLevel(), None, {}),
        (None, None, {}),
        (None, pre_tokenizers.Split("", "isolated"), "WordLevel"),
    ],
    ids=str,
)
def test_a_tokenizer_that_spells_texts_serves(
    tmp_path: Path, normalizer: Any, words: Any, model: Any
) -> None:
    native = of_kind(normalizer, words, model)
    native.save(str(tmp_path / "t.json"))
    loaded, text = Tokenizer.load(tmp_path / "t.json", 1000), "the cat, that sat"
    lengths = bytes_per_token(loaded)
    found = lengths[loaded.encode([text])[0]].sum() - len(text)
    assert found == any(one in f"{normalizer} {words}" for one in IN_FRONT)  # the space in front
    assert lengths[loaded.end_of_text] == -found
    begins = loaded.with_start_token("t", "here").start
    assert bytes_per_token(loaded)[[begins, loaded.end_of_text]].tolist() == [1 - found, -found]


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (pre_tokenizers.Whitespace(), {"end_of_word_suffix": "</w>"}),  # GPT
        (pre_tokenizers.Sequence(CL100K), {"end_of_word_suffix": "</w>"}),  # CLIP
        (pre_tokenizers.BertPreTokenizer(), "WordPiece"),
        (pre_tokenizers.Whitespace(), {"byte_fallback": True}),
        (pre_tokenizers.WhitespaceSplit(), "WordLevel"),
    ],
    ids=str,
)
def test_a_tokenizer_whose_ids_do_not_spell_texts_is_refused(
    tmp_path: Path, words: Any, model: Any
) -> None:
    of_kind(None, words, model).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match="ids do not spell a text") as raised:
        Tokenizer.load(tmp_path / "t.json", 1000)
    assert str(tmp_path / "t.json") in str(raised.value.where)


def of_kind(normalizer: Any, words: Any, model: Any) -> tokenizers.Tokenizer:
    """Train a tokenizer of the given parts: a BPE with options, or another model by name."""
    kind = model if isinstance(model, str) else "BPE"
    native = tokenizers.Tokenizer(getattr(models, kind)())
    native.normalizer, native.pre_tokenizer = normalizer, words
    native.train_from_iterator(["the cat sat, that sat"] * 9)
    native.add_special_tokens([END_OF_TEXT])
    for name, value in ({} if kind == model else model).items():
        setattr(native.model, name, value)
    if normalizer is not None and "ByteLevel" in str(normalizer):
        native.decoder = decoders.ByteLevel()
    return native
