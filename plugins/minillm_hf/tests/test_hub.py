"""Models of the hub: fetched from a local server by huggingface_hub itself, into its cache."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import minillm_core as minillm
from minillm_core import Refusal, build_plan
from minillm_core.cli.main import main
from minillm_core.train.initial import initial_layer
from minillm_hf.adapter import read_adapter
from minillm_hf.hub import fetch, published

constants = pytest.importorskip(
    "huggingface_hub.constants", reason="models of the hub need huggingface_hub"
)

NAME, COMMITS = "someone/a-model", ["1" * 40, "2" * 40]
SMALL = {
    **{"model.layers": 1, "model.dim": 32, "model.heads": 2, "model.vocab": 300},
    **{"train.seq_len": 16, "train.rows": 2, "train.steps": 2},
    **{"eval.samples": 0, "eval.tokens": 200},
}


class Hub:
    """A hub server for huggingface_hub's requests: a model's commit, its list of files, and each file.

    Attributes:
        files: commit -> name -> bytes.
        head: the commit of the branch main.
        asked: paths of the requests so far.
        status: the HTTP status of every response; 0: normal responses.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.head, self.asked, self.status = COMMITS[0], list[str](), 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, to: BaseHTTPRequestHandler, *, body: bool = True) -> None:
        path = unquote(urlsplit(to.path).path)
        self.asked.append(path)
        headers, content = dict[str, str](), b""
        status = self.status
        if status:
            known = {403: "GatedRepo", 404: "RepoNotFound"}
            headers |= {"X-Error-Code": known[status]} if status in known else {}
        elif path.startswith(f"/api/models/{NAME}"):
            status, found = self.described(path.removeprefix(f"/api/models/{NAME}").strip("/"))
            content, headers["Content-Type"] = json.dumps(found).encode(), "application/json"
            if status == 404:
                headers["X-Error-Code"] = "RevisionNotFound"
        elif path.startswith(f"/{NAME}/resolve/"):
            commit, _, name = path.removeprefix(f"/{NAME}/resolve/").partition("/")
            content, status = self.files[commit][name], 200
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            headers["X-Repo-Commit"] = commit
        else:
            status, headers["X-Error-Code"] = 404, "RepoNotFound"
        to.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            to.send_header(key, value)
        to.end_headers()
        if body:
            to.wfile.write(content)

    def described(self, path: str) -> tuple[int, Any]:
        kind, _, revision = path.partition("/")
        commit = {"": self.head, "main": self.head}.get(revision, revision)
        if commit not in self.files:
            return 404, {}
        files = self.files[commit].items()
        if kind == "tree":
            oid = hashlib.sha1
            return 200, [
                {"type": "file", "path": name, "size": len(data), "oid": oid(data).hexdigest()}
                for name, data in files
            ]
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files]
        return 200, {"id": NAME, "modelId": NAME, "sha": commit, "siblings": siblings}

    def fetched(self) -> list[str]:
        """Return the names of the files requested since the last call."""
        names = {path.rpartition("/")[2] for path in self.asked if "/resolve/" in path}
        self.asked.clear()
        return sorted(names)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a model that minillm exported."""
    folder = tmp_path_factory.mktemp("exported")
    text = folder / "text.txt"
    text.write_text("It was a dark and stormy night; the räin fell.\n" * 200, "utf-8")
    loaded = minillm.load("tiny", data=text, settings=SMALL)
    run = minillm.Run(build_plan(loaded), cache=folder / "cache").train()
    run.export(folder / "model", shard_bytes=20_000)
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    return {path.name: path.read_bytes() for path in (folder / "model").iterdir()}


@pytest.fixture
def hub(model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with the model and files that are never fetched; huggingface_hub uses it, with an empty cache."""
    made = Hub()
    others = {"pytorch_model.bin": b"pickle", "modeling_it.py": b"code", "onnx/model.onnx": b"?"}
    made.files[COMMITS[0]] = {**model, **others}
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_config_tokenizer_and_safetensors_are_fetched_and_nothing_else(
    hub: Hub, model: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    tokens = {name: b"{}" for name in ("special_tokens_map.json", "added_tokens.json")}
    hub.files[COMMITS[0]] |= tokens
    folder = fetch(NAME, said.append)
    assert folder is not None
    wanted = {name: data for name, data in (model | tokens).items() if name != "README.md"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    assert not {"pytorch_model.bin", "modeling_it.py", "model.onnx"} & {*hub.fetched()}
    assert published(folder) == f"{NAME}@{COMMITS[0]}"
    assert said == [f"{NAME} of the hub at commit {COMMITS[0]}, in {folder}"]
    assert f"fetching {NAME} of the hub at commit 111111111111" in capfd.readouterr().err
    assert fetch(NAME, said.append) == folder
    assert hub.fetched() == []
    assert "fetching" not in capfd.readouterr().err


def test_a_run_is_recorded_with_the_commit_that_it_started_from(
    hub: Hub, tmp_path: Path, model: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("It was a dark and stormy night.\n" * 100)
    longer = json.loads(model["config.json"]) | {"max_position_embeddings": 8192}
    hub.files[COMMITS[0]]["config.json"] = json.dumps(longer).encode()
    words = ["--data", str(text), "--steps", "1", "train.rows=2", "eval.samples=0"]
    words += ["--plugins", "lora"]
    code = main(["train", "--init", NAME, "--out", str(out), *words, "train.seq_len=16"])
    said = capsys.readouterr().err
    assert code == 0, said
    assert f"note: {NAME} of the hub at commit {COMMITS[0]}" in said
    assert f"the weights come from {NAME}@{COMMITS[0]}" in said
    record = json.loads((out / "run.json").read_text())
    assert record["initial"]["published"] == f"{NAME}@{COMMITS[0]}"
    folder = record["initial"]["directory"]
    assert record["config"]["init"]["value"] == folder
    # main is another commit now: the recorded settings still start from the first
    hub.head, hub.files[COMMITS[1]] = COMMITS[1], {**model, "config.json": b"{}"}
    assert main(["plan", "-c", str(out / "run.toml")]) == 0
    run = minillm.Run.open(out)
    run.export(tmp_path / "exported")
    assert f"{NAME}@{COMMITS[0]}" in (tmp_path / "exported" / "README.md").read_text()
    written = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    assert json.loads(written["config.json"])["max_position_embeddings"] == 8192
    assert json.loads(written["tokenizer_config.json"])["model_max_length"] == 8192
    run.export(tmp_path / "adapter", layout="peft")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (NAME, COMMITS[0])
    hub.asked.clear()
    base = read_adapter(path.parent).base
    assert base is not None
    assert (str(base.path), hub.asked) == (folder, [])
    path.write_text(json.dumps(config | {"revision": None}))
    with pytest.raises(Refusal, match="no model of architecture"):
        read_adapter(path.parent)
    assert any(COMMITS[1] in asked for asked in hub.asked)


@pytest.mark.slow
def test_main_is_looked_up_again_and_a_commit_is_not(hub: Hub, model: dict[str, bytes]) -> None:
    first = fetch(NAME, print)
    hub.files[COMMITS[1]], hub.head = {**model, "tokenizer_config.json": b"{}"}, COMMITS[1]
    second = fetch(f"{NAME}@main", print)
    assert first is not None
    assert second is not None
    assert (first.name, second.name) == (*COMMITS,)
    assert (second / "tokenizer_config.json").read_bytes() == b"{}"
    assert set(hub.fetched()) >= {"config.json", "tokenizer_config.json"}
    assert fetch(f"{NAME}@{COMMITS[0]}", print) == first
    assert hub.asked == []


def test_offline_the_copy_that_is_here_is_used_and_that_is_said(
    hub: Hub, offline: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = fetch(NAME, print), list[str]()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert fetch(NAME, said.append) == folder
    offline()
    assert fetch(NAME, said.append) == folder
    assert fetch(f"{NAME}@{COMMITS[0]}", said.append) == folder
    refused, off = said
    assert refused.startswith("the hub cannot be reached (")
    assert off == (
        f"the hub cannot be reached (HF_HUB_OFFLINE is set): {NAME} is the copy that is here, of "
        f"commit {COMMITS[0]}"
    )
    with pytest.raises(Refusal, match=r"no whole copy of some/other is here"):
        fetch("some/other", print)


@pytest.mark.broad(2)
@pytest.mark.parametrize("lost", ["config.json", "model-00002-of-", "model.safetensors.index.json"])
@pytest.mark.parametrize("known", [True, False])
def test_a_part_of_a_model_is_no_copy(
    hub: Hub, offline: Callable[[], None], tmp_path: Path, lost: str, known: bool
) -> None:
    folder = fetch(NAME, print)
    assert folder is not None
    next(path for path in folder.iterdir() if path.name.startswith(lost)).unlink()
    if not known:  # older versions of huggingface_hub do not cache the list of a commit's files
        for path in (tmp_path / "hub").glob("*/trees/*"):
            path.unlink()
    offline()
    with pytest.raises(Refusal, match="no whole copy"):
        fetch(NAME, print)


def test_a_download_that_breaks_off_is_continued(
    hub: Hub, offline: Callable[[], None], model: dict[str, bytes]
) -> None:
    answer = hub.answer

    def broken(to: BaseHTTPRequestHandler, *, body: bool = True) -> None:
        if "00002-of" in to.path:
            to.send_error(404)
        else:
            answer(to, body=body)

    hub.answer = broken  # type: ignore[method-assign]
    with pytest.raises(Refusal, match="could not be fetched") as refused:
        fetch(NAME, print)
    assert "the same command" in str(refused.value)
    hub.answer = answer  # type: ignore[method-assign]
    hub.fetched()
    folder = fetch(NAME, print)
    assert folder is not None
    assert {path.name for path in folder.iterdir()} == model.keys() - {"README.md"}
    assert "model-00002-of" in " ".join(hub.fetched())


@pytest.mark.parametrize(
    ("status", "said", "fix"),
    [
        (404, "neither a folder here nor a model of the hub", "check the name"),
        (403, "a gated model: its terms must be accepted first", "accept them on its page"),
        (400, "the hub cannot be reached, and no whole copy", "connect"),
    ],
)
def test_what_cannot_be_fetched_is_refused(hub: Hub, status: int, said: str, fix: str) -> None:
    hub.status = status
    with pytest.raises(Refusal) as refused:
        fetch(NAME, print)
    assert said in str(refused.value)
    assert fix in str(refused.value)
    assert (refused.value.exit_code, len(str(refused.value).splitlines()) <= 12) == (2, True)


def test_a_revision_that_is_none_is_refused(hub: Hub) -> None:
    with pytest.raises(Refusal, match="no such revision"):
        fetch(f"{NAME}@nosuch", print)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"config.json"}, "neither model.safetensors nor"),
        ({"config.json", "pytorch_model.bin"}, "only pytorch_model.bin: a pickle"),
        ({"model.safetensors"}, "no config.json"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_before_it_is_fetched(
    hub: Hub, names: set[str], said: str
) -> None:
    hub.files[COMMITS[0]] = dict.fromkeys(names, b"{}")
    with pytest.raises(Refusal) as refused:
        fetch(NAME, print)
    assert said in str(refused.value)
    assert hub.fetched() == []


def test_a_local_folder_of_that_name_wins(
    hub: Hub, model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / NAME
    folder.mkdir(parents=True)
    with pytest.raises(Refusal, match="not a model directory"):
        initial_layer(NAME)
    for name, data in model.items():
        (folder / name).write_bytes(data)
    assert initial_layer(NAME)[1] == NAME
    assert hub.asked == []
    assert published(folder) is None


@pytest.mark.parametrize("step", ["3", "best"])
@pytest.mark.parametrize("held", ["config.json", "model.safetensors", "adapter_config.json"])
def test_a_model_directory_has_no_steps_and_the_hub_is_not_asked(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str, step: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / held).write_text("{}")
    for place in (NAME, str(tmp_path / NAME)):
        with pytest.raises(Refusal, match="is a model directory, which has no steps") as refused:
            initial_layer(f"{place}@{step}")
        assert refused.value.fix == f"--init {place}"
    assert hub.asked == []


def test_a_revision_of_a_model_beside_a_folder_of_its_name_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / "config.json").write_text("{}")
    assert published(Path(initial_layer(f"{NAME}@main")[1])) == f"{NAME}@{COMMITS[0]}"


@pytest.mark.parametrize(
    "given", ["name", "a/b/c", "/a/b", "./a", "a/b@", "a b/c", "~/x", "a/b@c d"]
)
def test_what_is_no_name_of_the_hub_is_a_folder_that_is_not_there(hub: Hub, given: str) -> None:
    with pytest.raises(Refusal, match="not a model directory"):
        initial_layer(given)
    assert hub.asked == []


def test_without_the_extra_the_pip_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Refusal, match="needs huggingface_hub") as refused:
        fetch(NAME, print)
    assert "minillm-hf[hub]" in str(refused.value)


@pytest.mark.slow
def test_the_command_reads_the_variables_of_huggingface_hub(hub: Hub, tmp_path: Path) -> None:
    variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    words = [sys.executable, "-m", "minillm_core", "plan", "--init", NAME, "--json"]

    def plan(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, capture_output=True, text=True, env={**variables, **more})

    online = plan()
    assert online.returncode == 0, online.stderr
    away = plan(HF_HUB_OFFLINE="1")
    assert away.returncode == 0, away.stderr
    assert "HF_HUB_OFFLINE is set" in away.stderr
    assert json.loads(away.stdout) == json.loads(online.stdout)
