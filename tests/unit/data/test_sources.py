"""Tests of the files that are read, their order, and messages about the others."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from minillm_core.config.schema import DataConfig
from minillm_core.data import formats, open_corpus
from minillm_core.data.formats import JSONL, SHARD, TEXT
from minillm_core.data.sources import check_weighted, find
from minillm_core.errors import DataError


def quiet(line: str) -> None:
    pytest.fail(f"said: {line}")


@pytest.fixture(autouse=True)
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide further formats of other distributions."""
    monkeypatch.setattr(formats, "entry_points", lambda group: [])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for name in ["b.txt", "a/z.py", "a/b/c.jsonl.gz", "a.md.xz", "A.TXT", "z.bin", "logo.png",
                 "t.bin.gz", "LICENSE", ".hidden.txt", ".git/config.txt", "x.parquet"]:  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def test_a_folder_is_read_sorted_and_the_rest_is_said(folder: Path) -> None:
    said: list[str] = []
    found = find([str(folder)], said.append)
    names = [source.path.relative_to(folder).as_posix() for source in found]
    assert names == ["A.TXT", "a/b/c.jsonl.gz", "a/z.py", "a.md.xz", "b.txt", "z.bin"]
    kinds = [(source.format, source.packing) for source in found]
    assert kinds == [
        (TEXT, ""), (JSONL, ".gz"), (TEXT, ""), (TEXT, ".xz"), (TEXT, ""), (SHARD, "")
    ]  # fmt: skip
    assert len(said) == 1
    assert "6 files are read, 5 are not" in said[0]
    for left_out in (".png", "no suffix", "hidden", ".parquet"):
        assert left_out in said[0] or "other suffixes" in said[0]


def test_a_broken_link_in_a_folder_is_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to("gone.txt")
    (tmp_path / "logo.png").symlink_to("a.txt")
    said: list[str] = []
    assert [one.path.name for one in find([str(tmp_path)], said.append)] == ["a.txt"]
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    find([str(tmp_path)], said.append)
    (tmp_path / "books").symlink_to(tmp_path)  # not followed
    find([str(tmp_path)], said.append)
    assert said == [
        f"{tmp_path}: 1 file is read, 2 are not: 1 broken link, 1 .png",
        f"{tmp_path}: 1 file is read, 3 are not: 2 broken links, 1 .png",
        f"{tmp_path}: 1 file is read, 4 are not: 2 broken links, 1 linked folder, 1 .png",
    ]


@pytest.mark.parametrize("root", [".", "runs"])
def test_the_files_of_runs_are_no_text(tmp_path: Path, root: str) -> None:
    """Neither those of a run below the data, nor those of a run in the same folder."""
    texts = [tmp_path / "a.txt", tmp_path / "runs" / "b.txt"]
    for run in (tmp_path, tmp_path / "runs" / "tiny-1", tmp_path / "runs"):
        run.mkdir(parents=True, exist_ok=True)
        for name in ("run.json", "run.toml", "metrics.jsonl", "tokenizer.json", "report.html"):
            (run / name).write_text("x")
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "note.txt").write_text("x")
    for text in texts:
        text.write_text("x")
    said: list[str] = []
    found = find([str(tmp_path / root)], said.append)
    assert [one.path for one in found] == [texts[root == "runs"]]
    assert said[0].endswith("1 file is read, 2 are not: 2 run folders")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "A.JSON"])
def test_a_json_file_that_is_named_is_read_as_json_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    (source,) = find([str(tmp_path / name)], quiet)
    assert source.format is JSONL


def test_a_missing_path_names_the_end_that_was_read_as_its_weight(tmp_path: Path) -> None:
    (tmp_path / "v2:0.5").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    check_weighted([str(tmp_path / name) for name in ("a.txt:0.5", "v2:0.5:1", "gone")])
    config = DataConfig.model_validate({"paths": [str(tmp_path / "v2:0.5")]})
    with pytest.raises(DataError) as raised:
        open_corpus(config, 300, 8, cache=tmp_path / "cache", say=quiet)
    assert raised.value.where == f"{tmp_path / 'v2'} (:0.5 was read as its weight)"
    assert f"{tmp_path / 'v2:0.5'}:1" in str(raised.value.fix)
    with pytest.raises(DataError, match=r"an empty path \(:0.5 was read as its weight\)"):
        check_weighted([":0.5"])  # an unset variable: it would be the current folder


def test_paths_keep_their_order_and_named_files_are_read_whatever_their_suffix(
    folder: Path,
) -> None:
    paths = [str(folder / name) for name in ("b.txt", "LICENSE", ".hidden.txt", "A.TXT")]
    found = find(paths, quiet)
    assert [str(source.path) for source in found] == paths
    assert {source.format for source in found} == {TEXT}


def test_without_paths_the_standard_library_without_its_tests() -> None:
    found = find((), quiet)
    root = Path(sysconfig.get_path("stdlib"))
    parts = [source.path.relative_to(root).parts for source in found]
    assert len(parts) > 400
    assert parts == sorted(parts)
    assert ("argparse.py",) in parts
    assert all(p[-1].endswith(".py") for p in parts)
    left_out = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not any(left_out & set(p) for p in parts)


def test_a_python_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="without the sources"):
        find((), quiet)


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(DataError, match="a path of the data is empty"):
        find([""], print)


def test_what_is_not_there_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("a.parquet", "a.pdf", "a.csv", "a.csv.gz", "a.tsv", "a.bin.gz"):
        (tmp_path / name).write_bytes(b"PAR1")
    (tmp_path / "link").symlink_to("nowhere")
    for name, said in {
        "gone": "no such file or folder",
        "pictures": "the folder holds no text, only 1 .png",
        "empty": "the folder holds no text",
        "pipe": "neither a file nor a folder",
        "a.parquet": ".parquet files are not read",
        "a.pdf": ".pdf files are not read",
        "a.csv": ".csv files are not read",
        "a.csv.gz": ".csv.gz files are not read",
        "a.tsv": ".tsv files are not read",
        "a.bin.gz": ".bin.gz files are not read",
        "link": "a broken link: its target, nowhere, is not there",
    }.items():
        with pytest.raises(DataError) as raised:
            find([str(tmp_path / name)], quiet)
        assert said in str(raised.value)
        assert raised.value.where == str(tmp_path / name)
        assert raised.value.fix


def test_a_digest_is_of_content_and_kind_not_of_name_or_time(tmp_path: Path) -> None:
    for name, text in {"a.txt": "x", "b.txt": "x", "c.txt": "y", "d.jsonl": "x"}.items():
        (tmp_path / name).write_text(text)
    os.utime(tmp_path / "b.txt", (1, 1))
    a, b, c, d = (source.digest() for source in find([str(tmp_path)], quiet))
    assert a == b
    assert len({a, c, d}) == 3


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("long enough")
    source = find([str(tmp_path / "a.txt")], quiet)[0]
    source.check_unchanged()
    (tmp_path / "a.txt").write_text("longer than before")
    with pytest.raises(DataError, match="changed while it was read"):
        source.check_unchanged()
