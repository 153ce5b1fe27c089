"""Uploads, against a local stand-in of the hub's HTTP interface (https://huggingface.co/docs/hub/api)."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from rich.console import Console

from library.config.run_schema import HubConfig
from library.errors import UserError
from library.training import run as training_run
from library.training.checkpoint.hub import HubUpload
from tests.pretraining_runs import run as pretrain
from tests.runs import arguments, run, train_flags
from tests.worker_group import run_in_group


class _Hub(BaseHTTPRequestHandler):
    """Creates repositories, tells every file to go through git LFS, stores what is put, notes what is committed."""

    stored: dict[str, bytes]
    committed: dict[str, str]
    refuse_commits: int

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        here = f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer hf_good":
            self._answer({"error": "no right to write"}, 403)
        elif self.path == "/api/repos/create":
            self._answer({"url": f"{here}/me/loras"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer({"files": [{"path": f["path"], "uploadMode": "lfs", "shouldIgnore": False} for f in files]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for item in objects:
                item["actions"] = {"upload": {"href": f"{here}/store/{item['oid']}"}}
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            if self.server.hub["refuse"] > 0:  # type: ignore[attr-defined]
                self.server.hub["refuse"] -= 1  # type: ignore[attr-defined]
                self._answer({"error": "try later"}, 400)
                return
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "lfsFile":
                    self.server.hub["committed"][entry["value"]["path"]] = entry["value"]["oid"]  # type: ignore[attr-defined]
                elif entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.server.hub["committed"][entry["value"]["path"]] = content  # type: ignore[attr-defined]
            self._answer({"commitUrl": f"{here}/me/loras/commit/0", "commitOid": "0" * 40})
        else:
            self._answer({"error": self.path}, 404)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.hub["stored"][self.path.rsplit("/", 1)[-1]] = body  # type: ignore[attr-defined]
        self._answer({})

    def _answer(self, content: dict[str, object], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """A running stand-in; gives what it stored and committed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.hub = {"stored": {}, "committed": {}, "refuse": 0}  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server.hub  # type: ignore[attr-defined]
    server.shutdown()


def _uploaded(hub: dict[str, object], name: str) -> bytes:
    oid = hub["committed"][name]  # type: ignore[index]
    return oid if isinstance(oid, bytes) else hub["stored"][oid]  # type: ignore[index]


def test_every_saved_lora_and_state_is_uploaded(
    hub: dict[str, object], base: Path, dataset: Path, tmp_path: Path
) -> None:
    settings = {"save_every_n_steps": 2, "save_state": True, "save_state_to_huggingface": True, "async_upload": True}
    run(base, dataset, tmp_path, **settings, huggingface_repo_id="me/loras", huggingface_path_in_repo="cat")
    for name in ("lora-step00000002.safetensors", "lora-step00000004.safetensors", "lora.safetensors"):
        assert _uploaded(hub, f"cat/{name}") == (tmp_path / name).read_bytes()
    state = tmp_path / "lora-state"
    assert _uploaded(hub, "cat/lora-state/weights.safetensors") == (state / "weights.safetensors").read_bytes()
    assert "hf_good" not in (tmp_path / "config.toml").read_text()


def test_pretraining_uploads_its_models(hub: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    pretrain(corpus, tmp_path, max_train_steps=3, save_every_n_steps=2, huggingface_repo_id="me/models")
    for name in ("model-step00000002", "model"):
        written = (tmp_path / name / "model.safetensors").read_bytes()
        assert _uploaded(hub, f"{name}/model.safetensors") == written


def test_a_failed_upload_is_told_and_tried_again(hub: dict[str, object], tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    upload = HubUpload(HubConfig(huggingface_repo_id="me/loras"), console)
    hub["refuse"] = 1
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(name.encode())
        upload.push(tmp_path / name)
    assert "warning: first was not uploaded to me/loras" in console.export_text()
    assert upload.finish() == []
    assert _uploaded(hub, "first") == b"first"
    assert _uploaded(hub, "second") == b"second"


@pytest.mark.parametrize("in_background", [True, False])
def test_training_does_not_wait_for_an_upload_that_is_under_way_its_end_does(
    in_background: bool, hub: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("library.training.checkpoint.hub._PATIENCE", 0.05)
    goes_on, console = threading.Event(), Console(record=True, width=200)
    upload = HubUpload(HubConfig(huggingface_repo_id="me/loras", async_upload=in_background), console)
    sent, send = list[str](), upload._api.upload_file

    def upload_file(**what: Any) -> None:
        sent.append(what["path_in_repo"])
        assert goes_on.wait(60)
        send(**what)

    monkeypatch.setattr(upload._api, "upload_file", upload_file)
    begun, names = time.monotonic(), ("first", "best", "gone", "best")
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
        upload.push(tmp_path / name)
    assert time.monotonic() - begun < 20
    (tmp_path / "gone").unlink()  # by save_last_n_steps
    (tmp_path / "best").write_bytes(b"better")
    threading.Timer(0.3, goes_on.set).start()
    assert upload.finish() == []
    assert "uploading first and 2 more to me/loras; Ctrl-C ends the waiting" in console.export_text()
    assert sent == ["first", "best"]  # a path that waits is not queued twice
    assert [_uploaded(hub, name) for name in sent] == [b"first", b"better"]


def test_ctrl_c_ends_the_waiting_and_names_the_rest(
    hub: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(record=True, width=200)
    upload = HubUpload(HubConfig(huggingface_repo_id="me/loras", async_upload=True), console)
    monkeypatch.setattr(upload._api, "upload_file", lambda **_: threading.Event().wait(60))
    (tmp_path / "lora").write_bytes(b"lora")
    upload.push(tmp_path / "lora")

    def press_ctrl_c() -> None:
        while "Ctrl-C ends the waiting" not in console.export_text(clear=False):  # earlier, it would end the test
            time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=press_ctrl_c, daemon=True).start()
    assert upload.finish() == [tmp_path / "lora"]
    assert "upload what is missing with hf upload" in console.export_text()


class _SlowUpload:
    """An upload of which the last takes a second and a half."""

    push = staticmethod(lambda _: None)

    def finish(self) -> list[Path]:
        time.sleep(1.5)
        return []


def train_with_a_slow_upload(flags: list[str], folder: Path) -> None:
    rank = int(os.environ["RANK"])
    training_run.build_upload = lambda *_: None if rank else _SlowUpload()  # type: ignore[assignment,return-value]
    train_flags(flags)
    (folder / f"{rank}.txt").write_text(str(time.time()))


def test_no_process_stands_in_a_barrier_while_the_last_uploads_are_waited_for(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    flags = arguments(base, dataset, tmp_path / "out", max_train_steps=1)
    assert run_in_group([("two", train_with_a_slow_upload, (flags, tmp_path))], tmp_path) == {"two": ""}
    main, other = (float((tmp_path / f"{rank}.txt").read_text()) for rank in range(2))
    assert main - other > 1


def test_a_token_without_rights_is_refused_before_training(
    hub: dict[str, object], base: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(UserError, match="huggingface_repo_id: me/loras cannot be written to .*; set HF_TOKEN"):
        run(base, dataset, tmp_path, huggingface_repo_id="me/loras")
    assert not (tmp_path / "lora.safetensors").exists()
