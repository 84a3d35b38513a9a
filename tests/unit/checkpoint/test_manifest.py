"""Tests that any change of a checkpoint's bytes is detected before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minillm_core.checkpoint.commit import commit
from minillm_core.checkpoint.layout import FILES, MANIFEST
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import newest

NAMES = (*FILES, MANIFEST)


def arrays(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {
        "model.embedding": random.standard_normal((6, 4), dtype=np.float32),
        "model.norm": np.ones(4, np.float32),
        "optimizer.adamw.m.embedding": random.standard_normal((6, 4), dtype=np.float32),
        "state.steps": np.asarray(step, np.int32),
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("original")
    for step in (1, 2):
        commit(out, step, arrays(step), {"tokens": step * 10, "cursor": {"epoch": 0}})
    return out


@pytest.fixture(scope="module")
def copy(original: Path, tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("copies") / "out"

    def fresh() -> Path:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(original, place)
        return place

    return fresh


def newest_folder(out: Path) -> Path:
    return out / "checkpoints" / "step-00000002"


def assert_detected(out: Path) -> None:
    assert verify(newest_folder(out))
    told: list[str] = []
    found = newest(out, told.append)
    assert found is not None
    assert found.step == 1
    assert len(told) == 1
    assert "step-00000002" in told[0]


def test_an_untouched_checkpoint_verifies(original: Path) -> None:
    assert verify(newest_folder(original)) == []
    found = newest(original)
    assert found is not None
    assert (found.step, found.path) == (2, newest_folder(original))


relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@relaxed
@given(name=st.sampled_from(NAMES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(copy, name: str, place: float, bit: int) -> None:
    out = copy()
    path = newest_folder(out) / name
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)
    assert_detected(out)


def test_every_flipped_bit_of_a_manifest_is_noticed(copy) -> None:
    out = copy()
    path = newest_folder(out) / MANIFEST
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in (0, 5):  # bit 5 is the case of a letter, and turns a space into a NUL
            data = bytearray(whole)
            data[place] ^= 1 << bit
            path.write_bytes(data)
            assert verify(newest_folder(out)), (place, bit)


@relaxed
@given(name=st.sampled_from(NAMES), place=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_noticed(copy, name: str, place: float) -> None:
    out = copy()
    path = newest_folder(out) / name
    os.truncate(path, int(place * path.stat().st_size))
    assert_detected(out)


@relaxed
@given(name=st.sampled_from(NAMES), tail=st.binary(min_size=1, max_size=8))
def test_any_appended_byte_is_noticed(copy, name: str, tail: bytes) -> None:
    out = copy()
    with (newest_folder(out) / name).open("ab") as file:
        file.write(tail)
    assert_detected(out)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_noticed(copy, name: str) -> None:
    out = copy()
    (newest_folder(out) / name).unlink()
    assert_detected(out)


@pytest.mark.parametrize("name", [*NAMES, None])
def test_files_of_another_step_are_noticed(copy, name: str | None) -> None:
    out = copy()
    for each in NAMES if name is None else [name]:
        shutil.copy(out / "checkpoints" / "step-00000001" / each, newest_folder(out) / each)
    if name == "state.json":
        assert "state.json: its content changed" in verify(newest_folder(out))[0]
    assert_detected(out)


def test_two_files_swapped_are_noticed(copy) -> None:
    out = copy()
    folder = newest_folder(out)
    (folder / FILES[0]).rename(folder / "x")
    (folder / FILES[1]).rename(folder / FILES[0])
    (folder / "x").rename(folder / FILES[1])
    assert_detected(out)


@pytest.mark.parametrize("name", NAMES)
def test_a_link_or_a_pipe_is_no_file(copy, tmp_path: Path, name: str) -> None:
    out = copy()
    path = newest_folder(out) / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    assert_detected(out)
    path.unlink()
    os.mkfifo(path)  # opening it would block forever
    assert_detected(out)


def forge(folder: Path, document: dict) -> None:
    """Write a manifest whose own digest is right, as an attacker could."""
    import xxhash

    document.pop("xxh3_128", None)
    body = json.dumps(document, indent=1, sort_keys=True).encode()
    document["xxh3_128"] = xxhash.xxh3_128_hexdigest(body)
    data = json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
    (folder / MANIFEST).write_bytes(data)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "", "a/b", "a\\b", "a\0b"])
def test_a_manifest_cannot_point_outside_its_folder(copy, name: str) -> None:
    out = copy()
    folder = newest_folder(out)
    document = json.loads((folder / MANIFEST).read_bytes())
    document["files"].append({"name": name, "size": 0, "xxh3_128": ""})
    forge(folder, document)
    assert "is not a file of a checkpoint" in verify(folder)[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "format 2, this version reads 1"),
        ({"step": 3}, "belongs to step 3"),
        ({"step": -1}, "step"),
        ({"step": "2"}, "step"),
        ({"files": []}, "lists model.safetensors 0 times"),
        ({"files": None}, "files"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_forged_manifest_is_refused_with_its_reason(copy, change: dict, reason: str) -> None:
    folder = newest_folder(copy())
    forge(folder, {**json.loads((folder / MANIFEST).read_bytes()), **change})
    assert reason in verify(folder)[0]


def test_a_manifest_that_lists_a_file_twice_is_refused(copy) -> None:
    folder = newest_folder(copy())
    document = json.loads((folder / MANIFEST).read_bytes())
    document["files"].append(document["files"][0])
    forge(folder, document)
    assert "2 times" in verify(folder)[0]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"step": 1' + b"0" * 5000 + b"}"],
)
def test_a_manifest_that_is_none_is_refused(copy, content: bytes) -> None:
    folder = newest_folder(copy())
    (folder / MANIFEST).write_bytes(content)
    assert MANIFEST in verify(folder)[0]


def test_a_giant_manifest_is_not_read(copy) -> None:
    folder = newest_folder(copy())
    os.truncate(folder / MANIFEST, 1 << 32)  # a sparse file: takes no space
    assert "more than" in verify(folder)[0]


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}',
        b"not json",
    ],
)
def test_a_hostile_header_is_refused_although_its_digest_is_right(copy, header: bytes) -> None:
    import xxhash

    folder = newest_folder(copy())
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / FILES[0]).write_bytes(data)
    document = json.loads((folder / MANIFEST).read_bytes())
    entry = next(each for each in document["files"] if each["name"] == FILES[0])
    entry["size"], entry["xxh3_128"] = len(data), xxhash.xxh3_128_hexdigest(data)
    forge(folder, document)
    assert verify(folder)[0].startswith(FILES[0])
