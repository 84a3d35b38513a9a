"""Tests of ``minillm report`` on run folders, and of its pages in a browser."""

from __future__ import annotations

import http.server
import json
import shutil
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minillm_core.cli.main import main

SMALL = (
    *("model.vocab=300", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=2"),
    *("model.hidden=32", "train.rows=2", "train.seq_len=16", "eval.tokens=300", "eval.samples=0"),
)

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"the {n} little cats sat on mat {n * n}" for n in range(400)))
    where = ("--data", str(path), "--preset", "tiny", "--device", "cpu", "--backend", "torch")
    return (*where, "--out", str(tmp_path / "out"), "--steps", "12", *SMALL)


def test_a_run_becomes_a_page_with_what_it_writes(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["train", "--plugins", "muon", *given]) == 0
    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out / "report.html")
    page = (out / "report.html").read_text(encoding="utf-8")
    for part in ("<pre>", "minillm-muon", "stage:muon", "embedding.token", "after step 12"):
        assert part in page
    metrics = out / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])  # truncated, as after a kill
    (out / "run.json").write_text(
        json.dumps({**json.loads((out / "run.json").read_bytes()), "exit": None})
    )
    assert main(["report", str(out), "--no-sample"]) == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "it was killed" in page
    assert "<pre>" not in page


@pytest.mark.slow
def test_an_ablations_page_is_written_anew(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["ablate", "--plugins", "qk_norm", "--seeds", "2", *given]) == 0
    assert "no technique card for qk_norm: one takes 5 pairs" in capsys.readouterr().err
    page = (out / "ablation.html").read_text(encoding="utf-8")
    (out / "ablation.html").unlink()
    assert main(["report", str(out)]) == 0
    assert (out / "ablation.html").read_text(encoding="utf-8")[:9000] == page[:9000]


@pytest.mark.slow
def test_five_pairs_make_a_card_that_is_shown(
    given: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    short = [*given[: given.index("--steps")], "--steps", "2", *SMALL]
    command = ["ablate", "--plugins", "qk_norm", "--with", "relu2", "--seeds", "5", *short]
    assert main(command) == 0
    card = tmp_path / "home" / "minillm" / "cards" / "qk_norm.json"
    assert str(card) in capsys.readouterr().err
    kept = json.loads(card.read_bytes())
    found = json.loads((tmp_path / "out" / "ablation.json").read_bytes())
    assert (kept["effect"], kept["low"]) == (
        found["plugins"]["qk_norm"]["effect"],
        found["plugins"]["qk_norm"]["low"],
    )
    assert (kept["company"], kept["seeds"]) == (["relu2"], [0, 1, 2, 3, 4])
    assert kept["scale"]["parameters"] == found["variants"]["+qk_norm"]["parameters"]
    assert kept["version"] == found["versions"]["minillm-modded"]
    assert not (card.parent / "relu2.json").exists()
    assert main(["plugins", "info", "qk_norm"]) == 0
    assert "5 pairs" in " ".join(capsys.readouterr().out.split())


def test_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds neither a run nor an ablation nor a search" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """Start a server; return its address, and the list of requested paths."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()
        thread.join()


@pytest.fixture
def seen(tmp_path: Path) -> Callable[..., list[bytes]]:
    """Return the PNG-filtered scanlines of a page's screenshot; equal scanlines are effectively blank."""

    def seen(page: str, width: int = 1200, *, dark: bool = False) -> list[bytes]:
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        picture = tmp_path / "page.png"
        picture.unlink(missing_ok=True)
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        )
        quiet = ("--disable-background-networking", "--no-proxy-server")
        nowhere = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
        subprocess.run(
            [
                *(BROWSER, *flags, *quiet, nowhere, f"--user-data-dir={tmp_path / 'profile'}"),
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                *(f"--window-size={width},1500", f"--screenshot={picture}"),
                f"file://{tmp_path / 'page.html'}",
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        return scanlines(picture.read_bytes())

    return seen


def scanlines(png: bytes) -> list[bytes]:
    at, packed, width, kind = 8, b"", 0, 0
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        if name == b"IHDR":
            width, _, _, kind = struct.unpack(">IIBB", body[:10])
        packed += body if name == b"IDAT" else b""
        at += 12 + length
    raw, size = zlib.decompress(packed), 1 + width * {2: 3, 6: 4}[kind]
    return [raw[start : start + size] for start in range(0, len(raw), size)]


@pytest.mark.full
@pytest.mark.skipif(not BROWSER, reason="no Chromium: apt-get install chromium")
def test_pages_are_seen_in_a_browser_and_ask_for_nothing(
    given: tuple[str, ...],
    tmp_path: Path,
    asked: tuple[str, list[str]],
    seen: Callable[..., list[bytes]],
) -> None:
    from minillm_lab.ablation_page import ablation_page

    address, paths = asked
    image = f'<img src="{address}/image">'
    blank = seen(f"<!doctype html><body>{image}")
    assert paths == ["/image"]  # so a request would be noticed
    paths.clear()
    assert main(["ablate", "--plugins", "qk_norm", "--seeds", "2", *given]) == 0
    result = json.loads((tmp_path / "out" / "ablation.json").read_bytes())
    page = ablation_page({**result, "device": f"</p>{image}"})
    light, dark = seen(page), seen(page, dark=True)
    for picture in (light, dark, seen(page, 390)):
        assert len(set(picture)) > 400 > 20 * len(set(blank))
    assert light[0] != dark[0]
    seen(page.replace("<main>", f"<main>{image}<style>@import '{address}/style';</style>"))
    assert not paths
