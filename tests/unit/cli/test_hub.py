"""Names of the Hugging Face hub in settings, against a stand-in of the hub on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

from slime_core.cli.activation import resolve
from slime_core.cli.hub import Downloads
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = {file.name: file.read_bytes() for file in (ARITHMETIC / "model").iterdir()}
ROW = b'{"prompt": "1+1=", "label": "2"}\n'
PROMPTS = {
    "README.md": b"",
    "main/train-00000.jsonl": ROW * 3,
    "main/train-00001.jsonl": ROW * 4,
    "main/test.jsonl": ROW * 5,
    "main/testing.jsonl": ROW,
    "socratic/train.jsonl": ROW,
}
REPOSITORIES: dict[str, Mapping[str, bytes]] = {
    "models/org/tiny": {**MODEL, "original/model.safetensors": b"x", "pytorch_model.bin": b"x"},
    "models/org/gated": MODEL,
    "datasets/org/sums": PROMPTS,
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does to what huggingface_hub asks for a snapshot."""

    fetched: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "api":
            self.describe("/".join(parts[1:4]), parts[4:])
        else:
            kind, parts = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
            self.send_file(f"{kind}/{parts[0]}/{parts[1]}", "/".join(parts[4:]))

    def describe(self, repository: str, request: list[str]) -> None:
        files = REPOSITORIES.get(repository)
        if files is None:
            self.refuse(401, "RepoNotFound")
        elif repository.endswith("gated"):
            self.refuse(403, "GatedRepo")
        elif request[:1] == ["revision"] and request[1] not in ("main", COMMIT, COMMIT[:7]):
            self.refuse(404, "RevisionNotFound")
        elif request[:1] == ["tree"]:
            self.answer(
                [{"type": "file", "path": name, "size": len(data), "oid": oid(data)} for name, data in files.items()]
            )
        else:
            siblings = [{"rfilename": name} for name in files]
            self.answer({"id": repository.partition("/")[2], "sha": COMMIT, "siblings": siblings})

    def send_file(self, repository: str, name: str) -> None:
        data = REPOSITORIES[repository][name]
        if self.command == "GET":
            Hub.fetched.append(name)
        self.send_response(200)
        for key, value in {"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT, "Content-Length": len(data)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


def oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache of a machine that reaches the stand-in."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    reach(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    Hub.fetched.clear()
    yield tmp_path / "cache"
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()


def reach(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    # The library reads the environment when it is imported.
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)


def local(*argv: str) -> dict[str, Any]:
    downloads = Downloads(argv)
    downloads.finish()
    resolved, _ = resolve(["--plugin", "grpo", *downloads.argv])
    return {
        "model": resolved.config.model.hf_checkpoint,
        "prompts": resolved.config.data.prompt_data,
        "eval": resolved.config.eval.eval_prompt_data,
    }


def test_a_model_by_its_name_is_a_folder_of_its_commit_without_other_weights(hub: Path) -> None:
    folder = local("--hf-checkpoint", "org/tiny")["model"]
    assert folder.name == COMMIT
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == MODEL
    Hub.fetched.clear()
    assert local("--hf-checkpoint", f"org/tiny@{COMMIT}")["model"] == folder
    assert Hub.fetched == []


def test_weights_are_downloaded_after_the_settings_were_checked(hub: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["--plugin", "grpo", "--hf-checkpoint", "org/tiny", "--lr", "x", "--n-samples-per-prompt", "0"])
    assert len(caught.value.mistakes) == 2
    assert "model.safetensors" not in Hub.fetched
    assert "config.json" in Hub.fetched


def test_a_folder_of_this_machine_comes_first(hub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    assert Downloads(["--hf-checkpoint", "org/tiny"]).argv == ["--hf-checkpoint", "org/tiny"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.toml").write_text('[model]\nhf_checkpoint = "../org/tiny"\n')
    assert Downloads(["--config", "sub/run.toml"]).argv == ["--config", "sub/run.toml"]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("hub:org/sums/main:train", 7),
        ("hub:org/sums/main:test", 5),
        (f"hub:org/sums@{COMMIT[:7]}/main:train@[:2]", 2),
        ("hub:org/sums/socratic", 1),
    ],
)
def test_prompts_of_a_data_set_are_the_files_of_a_split(hub: Path, name: str, rows: int) -> None:
    from slime_datasets.formats import open_rows

    assert open_rows(local("--prompt-data", name)["prompts"]).total() == rows
    assert [file for file in Hub.fetched if "README" in file] == []


def test_names_in_a_file_are_replaced_too(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_bytes(ROW)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.toml").write_text(
        '[model]\nhf_checkpoint = "org/tiny"\n[data]\nprompt_data = "hub:org/sums/main:train"\n'
        '[eval]\neval_interval = 1\neval_prompt_data = [["a", "hub:org/sums/main:test"], ["b", "../own.jsonl"]]\n'
    )
    found = local("--config", "sub/run.toml")
    assert found["model"].name == COMMIT
    assert [(name, path.name) for name, path in found["eval"]] == [("a", "test.jsonl"), ("b", "own.jsonl")]
    assert found["eval"][1][1].resolve() == (tmp_path / "own.jsonl").resolve()


def test_a_recorded_path_that_the_cache_has_lost_is_downloaded_again(hub: Path, tmp_path: Path) -> None:
    elsewhere = f"/nowhere/hub/models--org--tiny/snapshots/{COMMIT}"
    assert local("--hf-checkpoint", elsewhere)["model"] == hub / f"models--org--tiny/snapshots/{COMMIT}"
    prompts = f"/nowhere/hub/datasets--org--sums/snapshots/{COMMIT}/main/train*.jsonl"
    assert str(local("--prompt-data", prompts)["prompts"]).startswith(str(hub / "datasets--org--sums"))
    # What is there stays, without a request.
    there = str(hub / f"models--org--tiny/snapshots/{COMMIT}")
    assert Downloads(["--hf-checkpoint", there]).argv == ["--hf-checkpoint", there]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--hf-checkpoint org/none", "HF_TOKEN"),
        ("--hf-checkpoint org/gated", "hf auth login"),
        ("--hf-checkpoint org/tiny@none", "revision"),
        ("--prompt-data hub:org/none:train", "HF_TOKEN"),
        ("--prompt-data hub:org/sums:train", "socratic/train.jsonl"),
        ("--prompt-data hub:org/sums/main:validation", "main/test.jsonl"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_mistake(hub: Path, words: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Downloads(words.split())
    message = str(caught.value)
    assert message.startswith(words)
    assert named in message


def test_without_the_hub_the_cache_counts(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local("--hf-checkpoint", "org/tiny")["model"]
    prompts = local("--prompt-data", "hub:org/sums/main:train")["prompts"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local("--hf-checkpoint", "org/tiny")["model"] == folder
    assert local("--prompt-data", "hub:org/sums/main:train")["prompts"] == prompts
    with pytest.raises(ConfigError) as caught:
        Downloads(["--hf-checkpoint", "org/other"])
    assert "org/tiny" in str(caught.value)
