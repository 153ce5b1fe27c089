"""The chat's screen, in a real Chromium with tiny models that were really trained."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from library.llm.chat_templates import Message, built_in_template
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizer_files import load_tokenizer
from library.models.llm.files import load_lm
from library.training.tasks.chat_lora import put_lora_on
from tests.llm.talkers import write_chat_model, write_lora, write_story_model
from tests.tools.test_gguf_tools import in_gguf
from tests.web.page import WAIT, Server, Tab, expect, serve

pytestmark = pytest.mark.slow

ENDLESS = 60_000  # tokens: minutes
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("models")
    write_lora(write_chat_model(top / "chat"), top / "loras" / "other", seed=1)
    write_story_model(top / "story", context=2 * ENDLESS)
    in_gguf(write_chat_model(top / "source", width=64), top / "talker.gguf")
    write_chat_model(top / MARKUP, pairs=[("markup", f"{MARKUP} **{MARKUP}**")])
    return top


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("page"), "--folders", str(models)) as running:
        yield running


class Chat(Tab):
    """The screen in the words of one who talks."""

    def __init__(self, browser: Any, server: Server, size: str = "wide") -> None:
        super().__init__(browser, server, size)
        self.open("/chat")
        if size == "phone" and not self.page.locator("#load").is_visible():
            self.page.click("#choices summary")

    def load(self, model: Path) -> None:
        self.page.select_option("[name=model]", str(model))
        self.page.click("#load")
        expect(self.page.locator("#introduction")).to_contain_text(model.name, timeout=WAIT)
        self.idle()

    def set(self, **values: object) -> None:
        for name, value in values.items():
            self.page.fill(f"[name={name}]", str(value))

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def ask(self, text: str) -> str:
        self.send(text)
        expect(self.page.locator("#status")).to_contain_text("tokens in", timeout=WAIT)
        self.idle()
        return self.answers()[-1]

    def idle(self) -> None:
        expect(self.page.locator("#stop")).to_be_disabled(timeout=WAIT)

    def answers(self) -> list[str]:
        return self.page.locator(".said.model").all_inner_texts()

    def questions(self) -> list[str]:
        return self.page.locator(".said.user").all_inner_texts()

    def status(self, text: str) -> None:
        expect(self.page.locator("#status")).to_contain_text(text, timeout=WAIT)


@pytest.fixture
def tab(browser: Any, server: Server) -> Iterator[Chat]:
    with closing(Chat(browser, server)) as opened:
        yield opened


def expected(folder: Path, messages: list[Message], count: int, lora: tuple[Path, float] | None = None) -> str:
    tokenizer = load_tokenizer(folder)
    settings = SamplingSettings(count, temperature=0, stop_tokens=tokenizer.stop_tokens)
    model = load_lm(folder, torch.float32)
    if lora is not None:
        put_lora_on(model, *lora)
    tokens = built_in_template("llama3", tokenizer).prompt_tokens(messages)
    return tokenizer.decode(generate_tokens(model, [tokens], settings)[0], skip_special=True)


def children_of(server: Server) -> list[psutil.Process]:
    """Return the processes that have a model; jobs' processes that ended may be there too."""
    alive = [child for child in psutil.Process(server.process.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if any(word.endswith("chat_worker.py") for word in child.cmdline())]


def test_nothing_is_loaded_before_one_asks_and_the_page_never_has_torch(
    browser: Any, models: Path, tmp_path: Path
) -> None:
    with serve(tmp_path, "--folders", str(models)) as own:
        page = psutil.Process(own.process.pid)
        with closing(Chat(browser, own)) as tab:
            expect(tab.page.locator("#send")).to_be_disabled()
            assert children_of(own) == []
            tab.load(models / "chat")
            (child,) = children_of(own)
            mapped = {Path(part.path).name for part in page.memory_maps()}
            assert not [name for name in mapped if "torch" in name]
            assert page.memory_info().rss < 200 * 2**20
            child.terminate()  # as the page does when it has been idle
            child.wait(timeout=10)
            tab.load(models / "story")
            tab.set(max_new_tokens=ENDLESS)
            tab.send("the cat")
            expect(tab.page.locator(".writing")).to_contain_text("the", timeout=WAIT)
            (child,) = children_of(own)
            own.kill()  # while it writes
            child.wait(timeout=10)
            tab.bad.clear()  # the connection that broke


def test_ctrl_c_in_the_middle_of_an_answer_ends_both_at_once(browser: Any, models: Path, tmp_path: Path) -> None:
    with serve(tmp_path, "--folders", str(models)) as own, closing(Chat(browser, own)) as tab:
        tab.load(models / "story")
        tab.set(max_new_tokens=ENDLESS)
        tab.send("the cat")
        expect(tab.page.locator(".writing")).to_contain_text("the", timeout=WAIT)
        (child,) = children_of(own)
        own.process.send_signal(signal.SIGINT)
        own.process.wait(timeout=5)
        child.wait(timeout=5)
        tab.status("the page was closed")
        assert len(tab.answers()) == 1


def test_a_talk_is_the_models_own_and_survives_a_reload(browser: Any, server: Server, models: Path, size: str) -> None:
    with closing(Chat(browser, server, size)) as tab:
        tab.load(models / "chat")
        if size == "phone":
            tab.page.click("#choices summary")
        tab.set(temperature=0, max_new_tokens=30, system="be short")
        messages = [Message("system", "be short")]
        for i, question in enumerate(("what is RoPE?", "say it in Greek")):
            messages.append(Message("user", question))
            messages.append(Message("assistant", expected(models / "chat", messages, 30)))
            assert tab.ask(question) == messages[-1].content
            tab.fits()
            tab.page.reload()
            expect(tab.page.locator(".said")).to_have_count(2 * i + 2)
            assert tab.answers()[i] == messages[-1].content
            expect(tab.page.locator("[name=system]")).to_have_value("be short")
            expect(tab.page.locator("[name=max_new_tokens]")).to_have_value("30")


def test_a_base_model_goes_on_grows_and_stops(tab: Chat, models: Path) -> None:
    tab.load(models / "story")
    expect(tab.page.locator("[name=system]")).to_be_disabled()
    tab.set(temperature=0.8, max_new_tokens=ENDLESS)
    tab.send("the cat")
    writing = tab.page.locator(".writing")
    expect(writing).to_contain_text("sat", timeout=WAIT)
    early = len(writing.inner_text())
    tab.page.wait_for_timeout(300)
    assert len(writing.inner_text()) > early
    tab.page.reload()  # what was not answered is given back, and its answer ends
    expect(tab.page.locator("#prompt")).to_have_value("the cat")
    assert tab.answers() == []
    tab.set(temperature=0.8, max_new_tokens=ENDLESS)
    tab.send("the dog")
    expect(writing).to_contain_text("sat", timeout=WAIT)
    tab.page.press("#prompt", "Escape")
    tab.status("tokens in")
    (stopped,) = tab.answers()
    tab.page.wait_for_timeout(300)
    assert tab.answers() == [stopped]
    tab.set(temperature=0, max_new_tokens=5)
    tab.send("")  # nothing: go on
    expect(tab.page.locator(".said.model")).to_have_count(2, timeout=WAIT)
    tab.status("cut off after 5 tokens")
    tab.load(models / "chat")
    tab.status("begins anew")
    assert tab.answers() == []


def test_while_one_tab_is_answered_another_is_refused_and_a_closed_one_holds_nobody_up(
    browser: Any, server: Server, tab: Chat, models: Path
) -> None:
    other = Chat(browser, server)
    other.load(models / "story")
    other.set(max_new_tokens=ENDLESS)
    other.send("the cat")
    expect(other.page.locator(".writing")).to_contain_text("the", timeout=WAIT)
    tab.page.reload()  # a model is loaded, so one may ask
    tab.page.select_option("[name=model]", str(models / "chat"))
    tab.set(temperature=0, max_new_tokens=30)
    tab.send("hello")
    tab.status("the model is answering in another tab or program; stop that first")
    assert (tab.answers(), tab.page.input_value("#prompt")) == ([], "hello")
    expect(other.page.locator("#stop")).to_be_enabled()
    began = time.monotonic()
    other.close()
    while "tokens in" not in tab.page.inner_text("#status"):
        assert time.monotonic() - began < 5
        tab.page.press("#prompt", "Enter")
        tab.page.wait_for_timeout(300)
    assert tab.answers() == [expected(models / "chat", [Message("user", "hello")], 30)]


def test_a_lora_and_its_strength_change_the_answer(tab: Chat, models: Path) -> None:
    tab.load(models / "chat")
    tab.set(temperature=0, max_new_tokens=20)
    said = [tab.ask("what is RoPE?")]
    tab.page.select_option("[name=lora]", str(models / "loras/other"))
    for strength in (1.0, 0.3):
        tab.set(strength=strength)
        tab.page.click("#new")
        said.append(tab.ask("what is RoPE?"))
        lora = (models / "loras/other", strength)
        assert said[-1] == expected(models / "chat", [Message("user", "what is RoPE?")], 20, lora)
    assert len(set(said)) == 3


def test_markup_is_text_in_names_questions_and_answers(tab: Chat, models: Path) -> None:
    tab.load(models / MARKUP)
    tab.set(temperature=0)
    assert tab.ask("markup") == f"{MARKUP} **{MARKUP}**"
    typed = f"# {MARKUP}\n- **{MARKUP}**\n1. `{MARKUP}`\n```{MARKUP}\n{MARKUP}\n```\nx<y & &lt; *"
    tab.ask(typed)
    assert tab.questions()[-1] == typed
    assert tab.page.locator("#chat img, #chat script").count() == 0
    tab.page.wait_for_timeout(200)
    tab.quiet()


def test_again_and_take_back(tab: Chat, models: Path) -> None:
    tab.load(models / "chat")
    tab.set(temperature=2, max_new_tokens=20)
    first = tab.ask("hello")
    tab.page.click("text=Again")
    expect(tab.page.locator("[name=seed]")).to_have_value("1")
    expect(tab.page.locator(".said.model")).not_to_have_text(first, timeout=WAIT)
    tab.idle()
    assert (tab.questions(), len(tab.answers())) == (["hello"], 1)
    tab.set(temperature=0)
    tab.ask("say it in Greek")
    tab.page.click("text=Take back")
    expect(tab.page.locator("#prompt")).to_have_value("say it in Greek")
    tab.page.click("text=Take back")
    expect(tab.page.locator("#prompt")).to_have_value("hello")
    assert tab.answers() == []
    answer = tab.ask("what is RoPE?")
    assert answer == expected(models / "chat", [Message("user", "what is RoPE?")], 20)
    tab.send("the cat sat on the mat " * 200)
    tab.status("shorten the message")
    assert tab.page.input_value("#prompt").startswith("the cat sat")
    assert tab.answers() == [answer]


def test_an_answer_that_is_not_replaced_is_kept(tab: Chat, models: Path) -> None:
    tab.load(models / "story")
    tab.set(temperature=0, max_new_tokens=5)
    answer = tab.ask("the cat")
    tab.set(max_new_tokens=ENDLESS)
    tab.page.fill("#prompt", "a draft")
    tab.page.click("text=Again")
    expect(tab.page.locator(".writing")).to_contain_text("the", timeout=WAIT)
    tab.page.reload()
    assert (tab.answers(), tab.page.input_value("#prompt")) == ([answer], "a draft")


def test_a_child_that_was_killed_is_told_in_one_line_and_loaded_again(tab: Chat, server: Server, models: Path) -> None:
    tab.load(models / "story")
    tab.set(max_new_tokens=ENDLESS)
    tab.send("the cat")
    expect(tab.page.locator(".writing")).to_contain_text("the", timeout=WAIT)
    (child,) = children_of(server)
    child.kill()
    tab.status("The model's process ended (it was killed: out of memory?). Load it again.")
    expect(tab.page.locator("#send")).to_be_disabled()
    assert len(tab.answers()) == 1  # what was written stays
    tab.load(models / "story")
    tab.set(temperature=0, max_new_tokens=5)
    tab.page.click("#new")
    assert tab.ask("the dog")


@pytest.mark.parametrize(
    "kept", ["{", "null", '{"turns": [[1]]}', '{"turns": [], "values": [["model", "gone"], ["temperature", "x"]]}']
)
def test_what_the_browser_kept_is_not_believed(tab: Chat, kept: str) -> None:
    tab.page.add_init_script(f"sessionStorage.setItem('tandem-chat', {json.dumps(kept)})")
    tab.page.reload()
    expect(tab.page.locator("[name=model]")).not_to_have_value("")
    assert tab.answers() == []
    tab.quiet()


def test_models_of_elsewhere_and_other_requests_are_refused(tab: Chat, server: Server) -> None:
    for request, status in (('{"do": "load", "model": "/etc"}', 403), ("[1]", 422), ('{"do": "stop"}', 422)):
        answer = tab.page.request.post(f"{server.address}/chat/ask", form={"request": request})
        assert answer.status == status, answer.text()


def test_a_folder_without_models_says_how_to_get_one(browser: Any, size: str, tmp_path: Path) -> None:
    with serve(tmp_path) as own, closing(Tab(browser, own, size)) as tab:
        tab.open("/chat")
        expect(tab.page.locator(".empty")).to_contain_text("make demo-llm")
        expect(tab.page.locator(".empty")).to_contain_text("FOLDERS")
        tab.fits()


def test_a_gguf_file_is_offered_and_answers_as_it_was_taught(tab: Chat, models: Path) -> None:
    tab.load(models / "talker.gguf")
    tab.set(temperature=0)
    assert tab.ask("what is GQA?").strip() == "queries share keys"
