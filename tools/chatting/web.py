"""Chat in the browser: a page by gradio around a :class:`~tools.chatting.session.Session` a tab.

Nothing is asked of the internet: fonts and scripts come from gradio's package, its telemetry and history are off.

Every tab has its own conversation; the model is one for all. An answer is made by a thread that holds the model's lock
and knows nothing of the page, which looks at its progress twenty times a second: the model is not slowed down by
drawing, and an answer that no page looks at any more is stopped. What needs the model waits for the lock.

A tab keeps its talk in the browser (``sessionStorage``: for as long as the tab lives), so a reload, or another start of
the server, goes on with it. What comes back from there is checked like any input.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import gradio as gr
from pydantic import BaseModel, ValidationError

from library.errors import UserError, one_line
from library.llm.chat_templates import Turn
from library.llm.generation import SamplingSettings
from tools.chatting.session import ANOTHER_SEED, Session

_LOOK = 0.05  # seconds between looks at an answer's progress
_NO_LORA = "none"
_BUSY = "an answer is being written; stop it first"
_CHOOSING = "the model or LoRA that was chosen is not there yet; wait for it"
_WAITING = "another tab is being answered; this one is next ..."
_FONT = (gr.themes.utils.fonts.LocalFont("IBM Plex Sans", weights=(400, 700)), "system-ui", "sans-serif")
_CSS = """
#introduction p {margin: 0; opacity: 0.7}
#status p {margin: 0; font-size: 0.85em; opacity: 0.7}
#talk .message-markdown-disabled .md {white-space: pre-wrap; overflow-wrap: anywhere}
@media (max-width: 768px) {
  #introduction {padding-left: 2.5rem}
  #talk {min-height: 45vh}
  main.contain {padding: 0.5rem !important}
}
"""
_JOINER = "\u2060"  # shows nothing; after < and & it makes them what they are to a reader, and no markup
_KEY = "tandem-chat"
_KEEP = f"(talk) => {{ try {{ sessionStorage.setItem('{_KEY}', talk) }} catch (error) {{ console.warn(error) }} }}"
# what is copied has no joiners; the settings lie beside the talk where there is room, and out of its way on a phone
_FETCH = f"""() => {{
  const toggle = document.querySelector('.sidebar .toggle-button');
  const write = navigator.clipboard?.writeText.bind(navigator.clipboard);
  if (write) navigator.clipboard.writeText = (text) => write(text.replaceAll('{_JOINER}', ''));
  document.addEventListener('copy', (event) => {{
    if (event.target.matches?.('input, textarea')) return;
    event.clipboardData.setData('text/plain', document.getSelection().toString().replaceAll('{_JOINER}', ''));
    event.preventDefault();
  }});
  if (window.innerWidth > 768 && toggle && !document.querySelector('.sidebar.open')) toggle.click();
  return [sessionStorage.getItem('{_KEY}') || ''];
}}"""
_DOWNLOAD = """(talk) => {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([talk], {type: 'application/jsonl'}));
  link.download = 'chat.jsonl';
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}"""

Updates = dict[Any, Any]


class SavedTalk(BaseModel):
    """What a tab keeps: the talk, what it was had with, and a message that was being answered."""

    model: str
    lora: str | None
    strength: float
    system: str
    settings: SamplingSettings
    turns: list[tuple[str, str, list[int], bool]]
    message: str = ""


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
        self._choosing: set[str] = set()  # tabs that wait for a model or LoRA
        self._tries: dict[str, int] = {}  # of the newest answer
        settings, registry = first.settings, first.registry
        has_turns = first.conversation.template.has_turns
        with gr.Blocks(title="Tandem chat", analytics_enabled=False, fill_height=True, fill_width=True) as self.blocks:
            with gr.Sidebar(width=340, open=False):  # see _FETCH
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
                self.markdown = gr.Checkbox(False, label="Render Markdown", elem_id="markdown")
                self.export = gr.Button("Export as JSON Lines", elem_id="export")
                self.reset = gr.Button("New conversation", elem_id="reset")
            self.introduction = gr.Markdown(first.introduction(), elem_id="introduction")
            self.talk = gr.Chatbot(
                elem_id="talk",
                show_label=False,
                scale=1,
                min_height=320,
                buttons=["copy", "copy_all"],
                editable="user",
                render_markdown=False,  # what was said, as it was said
                feedback_options=None,
                allow_tags=False,
                latex_delimiters=[],
            )
            with gr.Row(equal_height=True):
                self.message = gr.Textbox(
                    show_label=False, placeholder=_placeholder(has_turns), scale=8, autofocus=True, elem_id="message"
                )
                self.send = gr.Button("Send", variant="primary", scale=1, min_width=64, elem_id="send")
                self.stop = gr.Button("Stop", variant="stop", scale=1, min_width=64, interactive=False, elem_id="stop")
            self.status = gr.Markdown("", elem_id="status")
            self.saved = gr.Textbox(visible="hidden")  # on its way to the browser's storage, or from it
            self.exported = gr.Textbox(visible="hidden")
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
        settings = [self.temperature, self.top_k, self.top_p, self.min_p, self.penalty, self.max_tokens, self.seed]
        choices = [self.system, self.strength, *settings]
        changed = [self.message, self.talk, self.status, self.send, self.stop, self.saved]
        hidden: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        long: dict[str, Any] = {"concurrency_limit": None, **hidden}
        gr.on(
            [self.message.submit, self.send.click],
            self._send,
            [self.message, *choices],
            changed,
            trigger_mode="multiple",  # "once" would drop what is sent right after an empty line
            **long,
        )
        self.talk.retry(self._retry, choices, changed, **long)
        self.talk.edit(self._edit, choices, changed, **long)
        self.talk.undo(self._undo, None, changed, queue=False, **hidden)
        self.stop.click(self._stop, None, None, queue=False, **hidden)
        shown = [self.talk, self.status, self.saved]
        gr.on([self.reset.click, self.talk.clear], self._reset, None, shown, queue=False, **hidden)
        shown += [self.model, self.lora, self.strength, self.system, self.introduction, self.message]
        for chooser in (self.model, self.lora):
            chooser.input(self._choose, [self.model, self.lora], shown, api_visibility="private")
        filters = [self.top_k, self.top_p, self.min_p]
        self.temperature.change(_filters_at, self.temperature, filters, queue=False, **hidden)
        self.markdown.change(_render_markdown, self.markdown, self.talk, queue=False, **hidden)
        self.export.click(self._export, None, self.exported, queue=False, **hidden).then(
            None, self.exported, None, js=_DOWNLOAD
        )
        self.saved.change(None, self.saved, None, js=_KEEP)
        # not in gradio's queue: its client never shows what is begun just before it reads that the last event is done
        self.blocks.load(self._restore, self.saved, [*shown, *settings], js=_FETCH, queue=False, **hidden)
        self.blocks.unload(self._leave)

    def _send(
        self, message: str, request: gr.Request, system: str, strength: float, *numbers: float
    ) -> Iterator[Updates]:
        """Answer a message; yield what changes on the page."""
        session = self._session(request)
        if message.strip() or not session.conversation.template.has_turns:
            self._tries.pop(self._tab(request), None)
            yield from self._answer(request, len(session.conversation.turns), message, system, strength, numbers)

    def _retry(self, request: gr.Request, system: str, strength: float, *numbers: float) -> Iterator[Updates]:
        """Answer the newest message again, with other numbers drawn."""
        tab, turns = self._tab(request), self._session(request).conversation.turns
        if turns:
            self._tries[tab] = self._tries.get(tab, 0) + 1
            yield from self._answer(request, len(turns) - 1, turns[-1].question, system, strength, numbers)

    def _edit(
        self, edit: gr.EditData, request: gr.Request, system: str, strength: float, *numbers: float
    ) -> Iterator[Updates]:
        """Go back to a message, and answer what it says now."""
        index = edit.index if isinstance(edit.index, int) else edit.index[0]
        session = self._session(request)
        if not edit.value.strip() and session.conversation.template.has_turns:
            yield {self.talk: _talk(session)}  # as it was
            return
        self._tries.pop(self._tab(request), None)
        message = edit.value.replace(_JOINER, "")
        yield from self._answer(request, index // 2, message, system, strength, numbers)

    def _undo(self, request: gr.Request) -> Updates:
        """Take the newest message back into the line where it was typed."""
        self._refuse_while_busy(request)
        session = self._session(request)
        if not (turns := session.conversation.turns):
            return {self.status: ""}
        message = turns[-1].question
        session.conversation.take_back(len(turns) - 1)
        return {self.message: message, self.talk: _talk(session), self.status: "", self.saved: _saved(session)}

    def _answer(
        self, request: gr.Request, turn: int, message: str, system: str, strength: float, numbers: tuple[float, ...]
    ) -> Iterator[Updates]:
        """Answer ``message`` as turn number ``turn``; those from there on are given up for it, unless that fails."""
        self._refuse_while_busy(request)
        tab, session = self._tab(request), self._session(request)
        try:
            session.settings = settings = _settings(*numbers)
            session.set_system(system.strip())
            if session.lora_name is not None:
                session.set_strength(strength)
        except UserError as error:
            raise gr.Error(one_line(error), print_exception=False) from None
        given_up = session.conversation.turns[turn:]
        session.conversation.take_back(turn)
        talk, saved = [*_talk(session), _message("user", message or "…")], _saved(session, message)
        session.settings = replace(settings, seed=settings.seed + ANOTHER_SEED * self._tries.get(tab, 0))
        thread = self._threads[tab] = GenerationThread(session, self._lock, message)
        try:
            thread.start()
            yield {
                self.message: "",
                self.talk: talk,
                self.status: "",
                self.send: gr.update(interactive=False),
                self.stop: gr.update(interactive=True),
                self.saved: saved,
            }
            while not thread.finished.wait(_LOOK):
                if thread.waiting:
                    yield {self.status: _WAITING}
                elif thread.text:
                    yield {self.talk: [*talk, _message("assistant", thread.text)], self.status: ""}
        finally:  # of a tab that went away gradio closes this generator, often before it calls _leave
            thread.stop()
            self._threads.pop(tab, None)
        done: Updates = {self.send: gr.update(interactive=True), self.stop: gr.update(interactive=False)}
        if thread.error or not thread.begun:
            session.conversation.restore([*session.conversation.turns, *given_up])
            done[self.message] = "" if given_up else message
            done[self.status] = f"**error: {thread.error}**" if thread.error else "stopped before the first word"
        else:
            done[self.status] = "\n\n".join([session.report(), *session.remarks(), *self._same_again(tab, settings)])
        session.settings = settings
        yield done | {self.talk: _talk(session), self.saved: _saved(session)}

    def _same_again(self, tab: str, settings: SamplingSettings) -> list[str]:
        again = tab in self._tries and settings.temperature == 0
        return ["at temperature 0 every try gives the same answer; raise it for another"] if again else []

    def _refuse_while_busy(self, request: gr.Request) -> None:
        tab = self._tab(request)
        if tab in self._choosing or tab in self._threads:
            raise gr.Error(_CHOOSING if tab in self._choosing else _BUSY, print_exception=False)

    def _stop(self, request: gr.Request) -> None:
        if thread := self._threads.get(self._tab(request)):
            thread.stop()

    def _reset(self, request: gr.Request) -> Updates:
        self._refuse_while_busy(request)
        session = self._session(request)
        session.conversation.reset()
        return {self.talk: [], self.status: "", self.saved: _saved(session)}

    def _export(self, request: gr.Request) -> str:
        return json.dumps(self._session(request).record(), ensure_ascii=False) + "\n"

    def _restore(self, saved: str, request: gr.Request) -> Updates:
        """Show a tab that was reloaded what it was; ``saved``: what the browser kept."""
        session = self._session(request)
        try:
            talk = SavedTalk.model_validate_json(saved)
        except ValidationError:  # nothing, or of another version: the page stays as it was laid out
            return {self.status: ""}
        error = ""
        if (talk.model, talk.lora) != (session.model_name, session.lora_name):
            error = self._take(request, talk.model, talk.lora)
        with suppress(UserError):
            session.set_system(talk.system)
        if session.lora_name is not None and session.lora_name == talk.lora:
            session.set_strength(talk.strength)
        session.settings = talk.settings
        same = not error
        session.conversation.restore([Turn(q, a, tuple(said) if same else (), end) for q, a, said, end in talk.turns])
        updates = self._shown(session)
        if error:
            updates[self.status] = f"**{error}**"
        if talk.message:  # otherwise what was typed meanwhile stays
            updates[self.message]["value"] = talk.message
        return updates | {self.system: session.conversation.system} | self._settings_shown(talk.settings)

    def _choose(self, model: str, lora: str, request: gr.Request) -> Iterator[Updates]:
        """Take another model or LoRA; what cannot be done is said, and the choice goes back."""
        tab, session = self._tab(request), self._session(request)
        error = _BUSY if tab in self._threads else ""
        if not error:  # a choice under way is no reason: gradio tells of every choice twice
            lora_name = None if lora == _NO_LORA or model != session.model_name else lora
            self._choosing.add(tab)
            try:
                while self._lock.locked():
                    yield {self.status: _WAITING}
                    time.sleep(_LOOK)
                error = self._take(request, model, lora_name)
            finally:
                self._choosing.discard(tab)
        if error:
            gr.Warning(error)
        yield self._shown(session)

    def _shown(self, session: Session) -> Updates:
        """Return the page of a session but for its settings."""
        conversation = session.conversation
        has_turns = conversation.template.has_turns
        return {
            self.model: session.model_name,
            self.lora: session.lora_name or _NO_LORA,
            self.strength: gr.update(value=session.strength, interactive=session.lora_name is not None),
            self.introduction: session.introduction(),
            self.message: gr.update(placeholder=_placeholder(has_turns)),
            self.status: "\n\n".join(session.remarks()),
            self.system: gr.update(interactive=True) if has_turns else gr.update(value="", interactive=False),
            self.talk: _talk(session),
            self.saved: _saved(session),
        }

    def _settings_shown(self, settings: SamplingSettings) -> Updates:
        """Return the sliders at ``settings``; the other way round: :func:`_settings`."""
        return {
            self.temperature: settings.temperature,
            self.top_k: settings.top_k or 0,
            self.top_p: settings.top_p or 1,
            self.min_p: settings.min_p or 0,
            self.penalty: settings.repetition_penalty,
            self.max_tokens: settings.max_new_tokens,
            self.seed: settings.seed,
        }

    def _take(self, request: gr.Request, model: str, lora: str | None) -> str:
        """Exchange model or LoRA once no other tab is being answered; return why it cannot be, if so."""
        session = self._session(request)
        if model not in self._first.registry.models:
            return f"{model} is not among the models of this server; the talk goes on with {session.model_name}"
        self._choosing.add(self._tab(request))
        try:
            with self._lock:
                session.choose(model, lora)
        except UserError as problem:
            return one_line(problem)
        finally:
            self._choosing.discard(self._tab(request))
        return ""

    def _leave(self, request: gr.Request) -> None:
        self._stop(request)
        self._sessions.pop(self._tab(request), None)
        self._tries.pop(self._tab(request), None)

    def _tab(self, request: gr.Request) -> str:
        assert request.session_hash is not None
        return request.session_hash

    def _session(self, request: gr.Request) -> Session:
        first, tab = self._first, self._tab(request)
        if tab not in self._sessions:
            self._sessions[tab] = first.begin_another()
        return self._sessions[tab]


def _message(role: str, text: str) -> dict[str, str]:
    """Return a message as it is shown: Gradio takes any text for HTML."""
    return {"role": role, "content": text.replace("<", f"<{_JOINER}").replace("&", f"&{_JOINER}")}


def _talk(session: Session) -> list[dict[str, str]]:
    """Return all turns as the page shows them."""
    turns = session.conversation.turns
    pairs = [(_message("user", t.question or "…"), _message("assistant", t.answer or "(nothing)")) for t in turns]
    return [message for pair in pairs for message in pair]


def _saved(session: Session, message: str = "") -> str:
    """Return what a tab keeps; ``message``: one that is being answered."""
    return SavedTalk(
        model=session.model_name,
        lora=session.lora_name,
        strength=session.strength,
        system=session.conversation.system,
        settings=session.settings,
        turns=[(turn.question, turn.answer, list(turn.said), turn.ended) for turn in session.conversation.turns],
        message=message,
    ).model_dump_json()


def _render_markdown(wanted: bool) -> Any:
    return gr.update(render_markdown=wanted)


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
