"""Chat in the browser: a page by gradio around a :class:`~tools.chatting.session.Session` a tab.

Nothing is asked of the internet: fonts and scripts come from gradio's package, its telemetry and history are off.

Every tab has its own conversation; the model is one for all. An answer is made by a thread that holds the model's lock
and knows nothing of the page, which looks at its progress twenty times a second: a tab that is closed while it is being
answered leaves nothing locked, and the model is not slowed down by drawing.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import gradio as gr

from library.errors import UserError, one_line
from library.llm.generation import SamplingSettings
from tools.chatting.session import Session

_LOOK = 0.05  # seconds between looks at an answer's progress
_NO_LORA = "none"
_BUSY = "an answer is being written; stop it first"
_WAITING = "another tab is being answered; this one is next ..."
_FONT = (gr.themes.utils.fonts.LocalFont("IBM Plex Sans", weights=(400, 700)), "system-ui", "sans-serif")
_CSS = """
#introduction p {margin: 0; opacity: 0.7}
#status p {margin: 0; font-size: 0.85em; opacity: 0.7}
"""

Updates = dict[Any, Any]


class GenerationThread(threading.Thread):
    """An answer in the making.

    Attributes:
        text: said so far.
        begun: there was a first token, which may have no text.
        waiting: the model is answering another tab.
        error: a line, if it could not be said.
        finished: nothing more will come.
    """

    def __init__(self, session: Session, lock: threading.Lock, message: str) -> None:
        super().__init__(daemon=True)
        self._session, self._lock, self._message = session, lock, message
        self._stop_asked = threading.Event()
        self.text, self.error, self.begun, self.waiting = "", "", False, False
        self.finished = threading.Event()

    def stop(self) -> None:
        """Say no more than this token."""
        self._stop_asked.set()

    def run(self) -> None:
        """Wait for the model, then answer."""
        try:
            while not self._lock.acquire(timeout=_LOOK):
                self.waiting = True
                if self._stop_asked.is_set():
                    return
            try:
                self.waiting = False
                self._answer()
            finally:
                self._lock.release()
        finally:
            self.finished.set()

    def _answer(self) -> None:
        try:
            with closing(self._session.answer(self._message)) as pieces:
                for piece in pieces:
                    self.begun = True
                    self.text += piece
                    if self._stop_asked.is_set():
                        return
        except UserError as error:
            self.error = one_line(error)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            raise


class Page:
    """The page's components and what happens at each event."""

    def __init__(self, first: Session) -> None:
        """Lay out the page; ``first`` is what every tab begins with."""
        self._first, self._lock = first, threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._threads: dict[str, GenerationThread] = {}
        settings, registry = first.settings, first.registry
        has_turns = first.conversation.template.has_turns
        with gr.Blocks(title="Tandem chat", analytics_enabled=False, fill_height=True, fill_width=True) as self.blocks:
            with gr.Sidebar(width=340):
                self.model = gr.Dropdown(list(registry.models), value=first.model_name, label="Model", elem_id="model")
                self.lora = gr.Dropdown(
                    [_NO_LORA, *registry.loras], value=first.lora_name or _NO_LORA, label="LoRA", elem_id="lora"
                )
                self.strength = gr.Slider(
                    -1, 2, first.strength, step=0.05, label="LoRA strength", elem_id="strength",
                    interactive=first.lora_name is not None,
                )  # fmt: skip
                self.system = gr.Textbox(
                    first.conversation.system, label="System message", lines=2, interactive=has_turns, elem_id="system"
                )
                self._lay_out_settings(settings)
                self.reset = gr.Button("New conversation", elem_id="reset")
            self.introduction = gr.Markdown(first.introduction(), elem_id="introduction")
            self.talk = gr.Chatbot(
                elem_id="talk",
                show_label=False,
                scale=1,
                min_height=320,
                buttons=["copy"],
                feedback_options=None,
                allow_tags=False,
                latex_delimiters=[],
            )
            with gr.Row(equal_height=True):
                self.message = gr.Textbox(
                    show_label=False, placeholder=_placeholder(has_turns), scale=8, autofocus=True, elem_id="message"
                )
                self.send = gr.Button("Send", variant="primary", scale=1, min_width=90, elem_id="send")
                self.stop = gr.Button("Stop", variant="stop", scale=1, min_width=90, interactive=False, elem_id="stop")
            self.status = gr.Markdown("", elem_id="status")
            self._connect()

    def _lay_out_settings(self, settings: SamplingSettings) -> None:
        filters = settings.temperature > 0
        self.temperature = gr.Slider(0, 2, settings.temperature, step=0.05, label="Temperature", elem_id="temperature")
        self.top_k = gr.Slider(
            0, 200, settings.top_k or 0, step=1, label="top-k (0: off)", interactive=filters, elem_id="top_k"
        )
        self.top_p = gr.Slider(
            0.01, 1, settings.top_p or 1, step=0.01, label="top-p (1: off)", interactive=filters, elem_id="top_p"
        )
        self.min_p = gr.Slider(
            0, 1, settings.min_p or 0, step=0.01, label="min-p (0: off)", interactive=filters, elem_id="min_p"
        )
        penalty = settings.repetition_penalty
        self.penalty = gr.Slider(0.5, 2, penalty, step=0.05, label="Repetition (1: off)", elem_id="penalty")
        self.max_tokens = gr.Slider(
            1, max(4096, settings.max_new_tokens), settings.max_new_tokens, step=1, label="Max tokens", elem_id="max"
        )
        self.seed = gr.Number(settings.seed, precision=0, label="Seed", elem_id="seed")

    def _connect(self) -> None:
        choices = [self.system, self.strength, self.temperature, self.top_k, self.top_p, self.min_p]
        choices += [self.penalty, self.max_tokens, self.seed]
        changed = [self.message, self.talk, self.status, self.send, self.stop]
        hidden: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        gr.on(
            [self.message.submit, self.send.click],
            self._send,
            [self.message, self.talk, *choices],
            changed,
            concurrency_limit=None,
            trigger_mode="multiple",  # "once" would drop what is sent right after an empty line
            **hidden,
        )
        self.stop.click(self._stop, None, None, queue=False, **hidden)
        gr.on([self.reset.click, self.talk.clear], self._reset, None, [self.talk, self.status], queue=False, **hidden)
        shown = [
            self.model,
            self.lora,
            self.strength,
            self.system,
            self.introduction,
            self.talk,
            self.status,
            self.message,
        ]
        for chooser in (self.model, self.lora):
            chooser.input(self._choose, [self.model, self.lora], shown, api_visibility="private")
        filters = [self.top_k, self.top_p, self.min_p]
        self.temperature.change(_filters_at, self.temperature, filters, queue=False, **hidden)
        self.blocks.unload(self._leave)

    def _send(
        self, message: str, talk: list[dict], request: gr.Request, system: str, strength: float, *numbers: float
    ) -> Iterator[Updates]:
        """Answer a message; yield what changes on the page."""
        tab, session = self._tab(request), self._session(request)
        if not message.strip() and session.conversation.template.has_turns:
            return
        if tab in self._threads:
            raise gr.Error(_BUSY, print_exception=False)
        try:
            session.settings = _settings(*numbers)
            session.set_system(system.strip())
            if session.lora_name is not None:
                session.set_strength(strength)
        except UserError as error:
            raise gr.Error(one_line(error), print_exception=False) from None
        thread = self._threads[tab] = GenerationThread(session, self._lock, message)
        before = list(talk)
        talk = [*before, {"role": "user", "content": message or "…"}]
        try:
            thread.start()
            yield {
                self.message: "",
                self.talk: talk,
                self.status: "",
                self.send: gr.update(interactive=False),
                self.stop: gr.update(interactive=True),
            }
            while not thread.finished.wait(_LOOK):
                if thread.waiting:
                    yield {self.status: _WAITING}
                elif thread.text:
                    yield {self.talk: [*talk, _said(thread.text)], self.status: ""}
        finally:
            del self._threads[tab]
        yield {self.send: gr.update(interactive=True), self.stop: gr.update(interactive=False)} | self._outcome(
            session, thread, message, before, talk
        )

    def _outcome(self, session: Session, thread: GenerationThread, message: str, before: list, talk: list) -> Updates:
        if thread.error:
            return {self.talk: before, self.message: message, self.status: f"**error: {thread.error}**"}
        if not thread.begun:
            return {self.talk: before, self.message: message, self.status: "stopped before the first word"}
        notes = [session.report(), *session.remarks()]
        return {self.talk: [*talk, _said(thread.text or "(nothing)")], self.status: "\n\n".join(notes)}

    def _stop(self, request: gr.Request) -> None:
        if thread := self._threads.get(self._tab(request)):
            thread.stop()

    def _reset(self, request: gr.Request) -> Updates:
        if self._tab(request) in self._threads:
            raise gr.Error(_BUSY, print_exception=False)
        self._session(request).conversation.reset()
        return {self.talk: [], self.status: ""}

    def _choose(self, model: str, lora: str, request: gr.Request) -> Updates:
        """Take another model or LoRA; what cannot be done is said, and the choice goes back."""
        session = self._session(request)
        error = _BUSY if self._tab(request) in self._threads else ""
        if not error:
            lora_name = None if lora == _NO_LORA or model != session.model_name else lora
            error = self._take(session, model, lora_name)
        if error:
            gr.Warning(error)
        conversation = session.conversation
        has_turns = conversation.template.has_turns
        updates: Updates = {
            self.model: session.model_name,
            self.lora: session.lora_name or _NO_LORA,
            self.strength: gr.update(value=session.strength, interactive=session.lora_name is not None),
            self.introduction: session.introduction(),
            self.message: gr.update(placeholder=_placeholder(has_turns)),
            self.status: "\n\n".join(session.remarks()),
        }
        updates[self.system] = gr.update(interactive=True) if has_turns else gr.update(value="", interactive=False)
        return updates if conversation.turns else updates | {self.talk: []}

    def _take(self, session: Session, model: str, lora: str | None) -> str:
        """Exchange model or LoRA; return why it cannot be, if so."""
        if not self._lock.acquire(timeout=1):
            return "another tab is being answered; choose again afterwards"
        try:
            session.choose(model, lora)
        except UserError as problem:
            return one_line(problem)
        finally:
            self._lock.release()
        return ""

    def _leave(self, request: gr.Request) -> None:
        self._stop(request)
        self._sessions.pop(self._tab(request), None)

    def _tab(self, request: gr.Request) -> str:
        assert request.session_hash is not None
        return request.session_hash

    def _session(self, request: gr.Request) -> Session:
        first, tab = self._first, self._tab(request)
        if tab not in self._sessions:
            self._sessions[tab] = first.begin_another()
        return self._sessions[tab]


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _placeholder(has_turns: bool) -> str:
    return "Message" if has_turns else "Text to go on from; nothing: go on"


def _filters_at(temperature: float) -> list[Any]:
    """Grey out what has no effect on greedy choice."""
    return [gr.update(interactive=temperature > 0)] * 3


def _settings(
    temperature: float, top_k: float, top_p: float, min_p: float, penalty: float, max_tokens: float, seed: float
) -> SamplingSettings:
    """Return the page's settings; at temperature 0 the filters are grey and do not count."""
    drawn = temperature > 0
    return SamplingSettings(
        max_new_tokens=int(max_tokens),
        temperature=temperature,
        top_k=int(top_k) if drawn and top_k else None,
        top_p=top_p if drawn and top_p < 1 else None,
        min_p=min_p if drawn and min_p else None,
        repetition_penalty=penalty,
        seed=int(seed or 0),
    )


def serve(session: Session, host: str, port: int | None) -> None:
    """Serve the page until Ctrl-C.

    Args:
        session: what every tab begins with.
        host: address to bind to.
        port: None or 0 for a free one.
    """
    port = _checked_port(host, port or 0)
    for name in ("no_proxy", "NO_PROXY"):  # gradio asks its own server whether it is up
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost", host]))
    page = Page(session)
    page.blocks.queue(default_concurrency_limit=None)
    page.blocks.launch(
        server_name=host,
        server_port=port,
        quiet=True,
        show_error=True,
        share=False,
        ssr_mode=False,
        run_history=False,
        footer_links=[],
        enable_monitoring=False,
        prevent_thread_lock=True,
        theme=gr.themes.Default(primary_hue="teal", neutral_hue="slate", text_size="sm", spacing_size="sm", font=_FONT),
        css=_CSS,
    )
    print(f"{session.introduction()}\nhttp://{host}:{port} (Ctrl-C ends it)", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    page.blocks.close(verbose=False)


def _checked_port(host: str, port: int) -> int:
    """Return ``port``, or a free one for 0."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise UserError(f"--port: {host}:{port} cannot be used ({error}); choose another, or leave it out") from None
