"""Uploading what a run saves to the Hugging Face hub, through ``huggingface_hub``.

The token comes from the environment (``HF_TOKEN``) or from ``huggingface-cli login``, never from a configuration
file, which ends up in metadata and logs. Access is checked before training starts.

One thread uploads, one path after the other. Training never waits for long: with ``async_upload`` it does not wait at
all, without it at most ``_PATIENCE`` for what it has just saved. A path that still waits is not queued again, and one
that ``save_last_n_steps`` has removed meanwhile is passed over. An upload that fails does not end the run: it is
reported, and tried again with the next one and at the end. There the main process waits for what is left, however long
that takes, when the others have ended. A run that is killed leaves uploads to its owner (``hf upload``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from accelerate import Accelerator
from huggingface_hub import HfApi

from library.config.run_schema import HubConfig
from library.console import Console
from library.errors import UserError, reason_of

_PATIENCE = 60.0  # seconds


def _work(queue: Queue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    """Upload one after the other: the hub refuses commits to one repository at the same time."""
    while True:
        upload, future = queue.get()
        try:
            future.set_result(upload())
        except Exception as error:
            future.set_exception(error)


class HubUpload:
    """Pushes files and folders of one run into one repository."""

    def __init__(self, config: HubConfig, console: Console) -> None:
        """Make sure that the repository exists and can be written to.

        Args:
            config: repository and options.
            console: for warnings.

        Raises:
            UserError: no token, no right to write, or no connection.
        """
        assert config.huggingface_repo_id is not None
        self._repo, self._folder = config.huggingface_repo_id, config.huggingface_path_in_repo or ""
        self._in_background, self._console = config.async_upload, console
        self._api = HfApi()
        self._failed, self._waiting = list[Path](), set[Path]()  # waiting: not begun yet
        self._running: list[tuple[Path, Future[Any]]] = []
        self._queue: Queue[tuple[Callable[[], Any], Future[Any]]] = Queue()
        self._thread: threading.Thread | None = None
        try:
            private = config.huggingface_repo_visibility == "private"
            self._api.create_repo(self._repo, private=private, exist_ok=True)
        except Exception as error:
            raise UserError(
                f"huggingface_repo_id: {self._repo} cannot be written to ({reason_of(error)}); set HF_TOKEN to a token "
                "with write access, or remove the key"
            ) from error

    def push(self, path: Path) -> None:
        """Upload a file or folder, and what failed before."""
        self._collect(0)
        failed, self._failed = self._failed, []
        for one in dict.fromkeys([*failed, path]):
            self._start(one)
        if not self._in_background:
            self._collect(_PATIENCE)

    def finish(self) -> list[Path]:
        """Wait for what is not uploaded, and try once more what failed; return what could not be uploaded.

        Ctrl-C ends the waiting. No other process may wait for this one meanwhile.
        """
        try:
            self._wait()
            failed, self._failed = self._failed, []
            for path in failed:
                self._start(path)
            self._wait()
        except KeyboardInterrupt:
            self._console.print("uploads: not waited for any longer; upload what is missing with hf upload")
        return [*self._failed, *(path for path, _ in self._running)]

    def _wait(self) -> None:
        if self._running:
            (path, _), *others = self._running
            more = f" and {len(others)} more" if others else ""
            self._console.print(f"uploading {path.name}{more} to {self._repo}; Ctrl-C ends the waiting", soft_wrap=True)
        while self._running:
            self._collect(0.5)  # in short steps: on some systems Ctrl-C does not end a wait

    def _start(self, path: Path) -> None:
        if path in self._waiting:
            return
        self._waiting.add(path)
        future = Future[Any]()
        self._running.append((path, future))
        self._queue.put((partial(self._send, path), future))
        if self._thread is None:  # a daemon: no upload keeps a process from ending, as one of HfApi.run_as_future would
            self._thread = threading.Thread(target=_work, args=(self._queue,), daemon=True)
            self._thread.start()

    def _send(self, path: Path) -> None:
        """Upload a file or folder, in the thread; what ``save_last_n_steps`` has removed needs none."""
        self._waiting.discard(path)
        target = f"{self._folder}/{path.name}".lstrip("/")
        if path.is_dir():
            self._api.upload_folder(repo_id=self._repo, folder_path=path, path_in_repo=target)
        elif path.exists():
            self._api.upload_file(repo_id=self._repo, path_or_fileobj=path, path_in_repo=target)

    def _collect(self, seconds: float) -> None:
        """Note which uploads have ended, and which of them failed; wait at most so long for them."""
        wait([future for _, future in self._running], timeout=max(0.0, seconds))
        running, self._running = self._running, []
        for path, future in running:
            if not future.done():
                self._running.append((path, future))
            elif error := future.exception():
                why = reason_of(error)
                self._console.print(f"warning: {path.name} was not uploaded to {self._repo} ({why}); trying again")
                self._failed.append(path)


def build_upload(config: HubConfig, accelerator: Accelerator, console: Console) -> HubUpload | None:
    """Return the run's upload on its main process, or None where none is wanted."""
    if config.huggingface_repo_id is None or not accelerator.is_main_process:
        return None
    return HubUpload(config, console)
