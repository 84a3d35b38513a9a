"""Tests of malicious files: refused with a reason, without side effects.

Their manifests are valid: an attacker who can change a file can change its digest.
"""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors import SafetensorError

from minillm_core import strict
from minillm_core.checkpoint import tensors
from minillm_core.checkpoint.commit import commit
from minillm_core.checkpoint.layout import FILES, MANIFEST, MODEL, STATE
from minillm_core.checkpoint.manifest import encode, verify
from minillm_core.checkpoint.read import newest
from minillm_core.disk import Written, stream

TENSORS = {
    "model.embedding": np.arange(24, dtype=np.float32).reshape(6, 4),
    "model.half": np.ones((3, 2), np.float16),
    "model.count": np.asarray(7, np.int64),
    "model.none": np.zeros((0, 3), np.float32),
    "model.mask": np.asarray([True, False, True]),
}


def fill(data: bytes, offset: int, buffer: memoryview) -> None:
    assert 0 <= offset <= offset + len(buffer) <= len(data), "a read out of range"
    buffer[:] = data[offset : offset + len(buffer)]


def header(data: bytes) -> dict[str, tensors.Stored]:
    return tensors.header(partial(fill, data), len(data))


def load(data: bytes) -> dict[str, np.ndarray]:
    read = partial(fill, data)
    return {name: np.asarray(tensors.read(read, stored)) for name, stored in header(data).items()}


def file_of(header: bytes | dict, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def whole() -> bytes:
    return b"".join(map(bytes, tensors.parts(TENSORS)))


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert (array.dtype, array.shape) == (theirs[name].dtype, theirs[name].shape)
        assert array.tobytes() == theirs[name].tobytes()


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8").filter(str.isprintable), min_size=1, max_size=9),
        st.sampled_from(list(tensors.NAMES)).flatmap(
            lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=4, min_side=0))
        ),
        max_size=5,
    )
)
def test_files_are_those_of_safetensors(state: dict[str, np.ndarray]) -> None:
    ours = b"".join(map(bytes, tensors.parts(state)))
    assert_equal(load(ours), state)
    assert_equal(safetensors.numpy.load(ours), state)
    theirs = safetensors.numpy.save({name: np.array(array) for name, array in state.items()})
    assert_equal(load(theirs), state)


def test_every_tensor_is_aligned() -> None:
    for stored in header(whole()).values():
        assert stored.start % tensors.WIDTHS[stored.dtype] == 0


@pytest.mark.parametrize("order", [">", "<"])
def test_the_order_of_bytes_is_that_of_the_format(order: str) -> None:
    array = np.arange(5).astype(f"{order}i4")
    data = b"".join(map(bytes, tensors.parts({"model.a": array})))
    assert data.endswith(np.arange(5).astype("<i4").tobytes())


@pytest.mark.parametrize(
    "state",
    [
        {"model.a": np.zeros(1, np.complex64)},
        {"model.a": np.asarray(["text"])},
        {"model.\n": np.zeros(1)},
        {"": np.zeros(1)},
        {"__metadata__": np.zeros(1)},
        {"a" * 513: np.zeros(1)},
        {f"{n:0500}": np.zeros(1) for n in range(4500)},
    ],
    ids=range(7),
)
def test_what_could_not_be_read_back_is_not_written(state: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"cannot be saved|too many"):
        list(tensors.parts(state))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
ODD: list[Any] = [-1, 0, 1, 3, 2**31, 2**62, 2**64 - 1, 2**64, 10**30, 1.0, 1.5, True, None, "1"]
ODD += [[], {}, [0], "F32", "F64", "F8_E4M3", "BF16", "", "../x", "\0", "\ud800", "\x1b[31m", [[]]]


def mutated(draw: random.Random) -> bytes:
    """Build a file like ours with a fault in its structure or its bytes."""
    data = whole()
    length = int.from_bytes(data[:8], "little")
    entries, body = json.loads(data[8 : 8 + length]), data[8 + length :]

    def entry() -> dict:
        return entries[draw.choice([name for name in entries if name != "__metadata__"])]

    def odd() -> Any:
        return draw.choice(ODD)

    def change_key() -> None:
        entry()[draw.choice(["dtype", "shape", "data_offsets", "more"])] = odd()

    def change_element() -> None:
        values = entry()[draw.choice(["shape", "data_offsets"])]
        values[draw.randrange(len(values)) if values else slice(0)] = odd() if values else [odd()]

    def scale_shape() -> None:
        entry()["shape"] += [draw.choice([0, 1, 2, 10**9])] * draw.choice([1, 2, 8, 40])

    def shift() -> None:
        by = draw.choice([-8, -1, 1, 4, 8, 1 << 40])
        found = entry()
        found["data_offsets"] = [place + by for place in found["data_offsets"]]

    def swap() -> None:
        one, other = entry(), entry()
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]

    def drop_key() -> None:
        found = entry()
        del found[draw.choice(list(found))]

    def drop() -> None:
        del entries[draw.choice(list(entries))]

    def rename() -> None:
        entries[draw.choice(["", "../x", "a\nb", "\ud800", "x" * 600, "\x1b[0m"])] = entry()

    def set_entry() -> None:
        entries[draw.choice(["model.x", "__metadata__"])] = odd()

    structure = [change_key, change_element, scale_shape, shift, swap, drop_key, drop, rename]
    draw.choice([*structure, set_entry])()
    text = json.dumps(entries)
    if draw.random() < 0.1:  # a duplicate key, invalid numbers, depth
        text = text[:-1] + draw.choice(
            [f', "model.half": {json.dumps(ENTRY)}}}', ', "a": NaN}', ', "a": 1e999}', "}}", ""]
        )
    raw = bytearray(file_of(text.encode("utf-8", "surrogatepass"), body))
    for _ in range(draw.choice([0, 0, 0, 1, 3])):
        raw[draw.randrange(len(raw) - len(body))] = draw.randrange(256)
    return bytes(raw[: draw.choice([len(raw), len(raw), draw.randrange(len(raw))])])


@pytest.mark.parametrize("seed", range(8))
def test_mutated_headers(seed: int) -> None:
    """Either refused with a ValueError, or valid, and then safetensors reads the same from it."""
    draw = random.Random(seed)
    reasons = []
    for _ in range(500):
        data = mutated(draw)
        try:
            ours = load(data)
        except ValueError as error:
            reasons.append(str(error))
        else:
            assert_equal(ours, safetensors.numpy.load(data))
    assert 400 < len(reasons) < 500
    assert all(0 < len(reason) < 1000 for reason in reasons)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80) | st.binary(max_size=60).map(file_of))
def test_noise(data: bytes) -> None:
    try:
        load(data)
    except ValueError:
        return
    safetensors.numpy.load(data)


BAD: dict[str, bytes] = {
    "empty": b"",
    "no header": bytes(7),
    "5 GiB of header": (5 << 30).to_bytes(8, "little") + b"{}",
    "a header without end": (2**64 - 1).to_bytes(8, "little") + b"{}",
    "a header that is longer than the file": (3).to_bytes(8, "little") + b"{}",
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "UTF-16": file_of("{}".encode("utf-16")),
    "a byte order mark": file_of(b"\xef\xbb\xbf{}"),
    "a list": file_of(b"[]"),
    "depth": file_of(b'{"a":' * 100_000),
    "depth of lists": file_of(b'{"a":' + b"[" * 200_000),
    "NaN": file_of(b'{"a": NaN}'),
    "digits": file_of(b'{"a": ' + b"1" * 10_000 + b"}"),
    "a key twice": file_of(b'{"a": 1, "a": 1}'),
    "an entry twice": file_of(b'{"a":%s,"a":%s}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(8)),
    "overlap": file_of({"a": ENTRY, "b": ENTRY}, bytes(8)),
    "a hole": file_of({"a": {**ENTRY, "data_offsets": [8, 16]}}, bytes(16)),
    "a tail": file_of({"a": ENTRY}, bytes(9)),
    "negative": file_of({"a": {**ENTRY, "data_offsets": [-8, 0]}}, bytes(8)),
    "backwards": file_of({"a": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
    "another width": file_of({"a": {**ENTRY, "dtype": "F64"}}, bytes(8)),
    "10^9 elements": file_of({"a": {**ENTRY, "shape": [10**9]}}, bytes(8)),
    "2^64 elements": file_of({"a": {**ENTRY, "shape": [2**32, 2**32]}}, bytes(8)),
    "no elements": file_of(
        {"a": {**ENTRY, "shape": [0, 2**31 - 1, 2**31 - 1], "data_offsets": [0, 0]}}
    ),
    "a dimension that MLX cannot count": file_of(
        {"a": {**ENTRY, "shape": [0, 2**31], "data_offsets": [0, 0]}}
    ),
    "100 dimensions": file_of({"a": {**ENTRY, "shape": [2] + [1] * 99}}, bytes(8)),
    "bfloat16": file_of({"a": {**ENTRY, "dtype": "BF16", "shape": [4]}}, bytes(8)),
    "a truth as a number": file_of({"a": {**ENTRY, "shape": [2, True]}}, bytes(8)),
    "a command for the terminal": file_of({"\x1b[31m": ENTRY}, bytes(8)),
    "a long name": file_of({"a" * 10_000: ENTRY}, bytes(8)),
    "metadata that is none": file_of({"__metadata__": {"a": 1}}),
    "lists in lists": file_of(b'{"a":[' + b"[]," * 650_000 + b"[]]}"),
    "objects in lists": file_of(b'{"a":[' + b'{"":0},' * 260_000 + b"0]}"),
    "a header of 100 MB": file_of(b'{"a":"' + b"a" * 100_000_000 + b'"}'),
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system",
}

BAD_STATE: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "NaN": b'{"a": NaN}',
    "infinite": b'{"a": -Infinity}',
    "too large": b'{"a": 1e999}',
    "twice": b'{"a": 1, "a": 2}',
    "twice, deeper": b'{"a": [{"b": 1, "b": 2}]}',
    "depth": b'{"a":' * 100_000,
    "digits": b'{"a": ' + b"1" * 10_000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "two": b"{}{}",
    "large": b'{"a": "' + b"a" * strict.LARGEST + b'"}',
    "many": b'{"a":[' + b"{}," * 650_000 + b"0]",
}


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes], Path]:
    """Return ``sealed(name, content)``: a checkpoint with that file, and a matching manifest."""
    out = tmp_path_factory.mktemp("hostile")
    good = commit(out, 1, TENSORS, {"tokens": 1})
    bad = commit(out, 2, TENSORS, {"tokens": 2})

    def make(name: str, content: bytes) -> Path:
        shutil.rmtree(bad)
        shutil.copytree(good, bad, ignore=shutil.ignore_patterns(name, MANIFEST))
        written: dict[str, Written] = {}
        for each in FILES:
            data = content if each == name else (bad / each).read_bytes()
            (bad / each).unlink(missing_ok=True)
            written[each] = stream(bad / each, [data])
        (bad / MANIFEST).write_bytes(encode(2, written))
        return bad

    return make


def test_a_sealed_checkpoint_verifies(sealed: Callable[[str, bytes], Path]) -> None:
    assert verify(sealed(MODEL, whole())) == []
    assert verify(sealed(STATE, b'{"a": [1, -2.5e3, null, "\\ud83d\\ude00"]}')) == []


@pytest.mark.broad(12)
@pytest.mark.parametrize(
    ("name", "content"),
    [(MODEL, content) for content in BAD.values()]
    + [(STATE, content) for content in BAD_STATE.values()],
    ids=[*BAD, *(f"state: {kind}" for kind in BAD_STATE)],
)
def test_a_hostile_file_is_refused_although_its_digest_is_right(
    sealed: Callable[[str, bytes], Path], name: str, content: bytes
) -> None:
    path = sealed(name, content)
    tracemalloc.start()
    try:
        (reason,) = verify(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reason.startswith(f"{name}: ")
    assert reason.isprintable()
    assert len(reason) < 1000
    assert peak < len(content) + (256 << 20)
    told: list[str] = []
    found = newest(path.parents[1], told.append)
    assert found is not None
    assert (found.step, len(told)) == (1, 1)


def test_the_reference_refuses_them_too() -> None:
    """Or it is as strict as possible without the expected tensors."""
    ours_alone = {
        "bfloat16",
        "a dimension that MLX cannot count",
        "100 dimensions",
        "a command for the terminal",
        "a long name",
    }
    accepted = set()
    for kind, content in BAD.items():
        try:
            safetensors.deserialize(content)
        except SafetensorError:
            continue
        accepted.add(kind)
    assert accepted - ours_alone == {"no elements", "an entry twice"}
