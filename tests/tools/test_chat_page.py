"""The page of ``chat.py --web``, driven in a real headless Chromium against a server of its own.

Needs requirements-web.txt, requirements-web-dev.txt and a Chromium on this machine; make test-web installs the first
two and runs it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from library.llm.chat_batches import read_chats
from library.llm.chat_templates import Message, built_in_template
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizers import load_tokenizer
from library.models.llm.files import load_lm
from library.training.tasks.chat_lora import put_lora_on
from tests.chat_page import CHROMIUM, WAIT, Tab, expect, open_browser, serve_chat, words
from tests.llm.talkers import write_chat_model, write_lora, write_story_model
from tools.chatting.session import Loading, ModelRegistry, Session
from tools.chatting.web import Page, gr  # which may be missing, as tests.chat_page says

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine")]

ENDLESS = 60_000  # tokens: minutes


def prompt_of(models: Path, messages: list[Message]) -> list[int]:
    return built_in_template("llama3", load_tokenizer(models / "chat")).tokens(messages, answer_next=True)[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("models")
    write_lora(write_chat_model(top / "chat"), top / "loras" / "other", seed=1)
    write_story_model(top / "story", context=2 * ENDLESS)
    return top


@pytest.fixture(scope="module")
def address(models: Path) -> Iterator[str]:
    where = ["--models_dir", str(models), "--loras_dir", str(models / "loras")]
    with serve_chat(*where, "--temperature", "0.8", "--max_new_tokens", str(ENDLESS)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with open_browser() as running:
        yield running


@pytest.fixture
def tab(browser: object, address: str) -> Iterator[Tab]:
    opened = Tab(browser, address)
    yield opened
    opened.page.close()


def expected(folder: Path, tokens: list[int], count: int, lora: Path | None = None) -> str:
    tokenizer = load_tokenizer(folder)
    settings = SamplingSettings(count, temperature=0, stop_tokens=tokenizer.stop_tokens)
    model = load_lm(folder, torch.float32)
    if lora is not None:
        put_lora_on(model, lora)
    (made,) = generate_tokens(model, [tokens], settings)
    return words(tokenizer.decode(made, skip_special=True))


def ask(tab: Tab, models: Path, messages: list[Message], question: str) -> str:
    """Ask the model "chat" after ``messages``, which grow by both; return its answer, 30 tokens of the model."""
    messages.append(Message("user", question))
    asked = sum(message.role == "user" for message in messages)
    tab.send(question)
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(asked, timeout=WAIT)
    tab.wait_idle()
    answer = expected(models / "chat", prompt_of(models, messages), 30)
    assert tab.answers()[asked - 1] == answer
    messages.append(Message("assistant", answer))
    return answer


def test_a_talk_from_streaming_to_another_model(tab: Tab, models: Path) -> None:
    tokenizer = load_tokenizer(models / "story")
    assert "chat talks in turns (template llama3)" in tab.page.inner_text("#introduction")

    tab.choose("model", "story")
    expect(tab.page.locator("#introduction")).to_contain_text("story is a base model", timeout=WAIT)
    expect(tab.page.locator("#system textarea")).to_be_disabled()
    tab.send("the cat")
    lengths: list[int] = []
    limit = time.monotonic() + WAIT / 1000
    while len(set(lengths)) < 4:  # the text grows before one's eyes
        lengths += [len(answer) for answer in tab.answers()]
        assert time.monotonic() < limit, lengths
        time.sleep(0.02)
    assert lengths == sorted(lengths)
    tab.page.click("#stop")
    tab.wait_idle()
    (stopped,) = tab.answers()
    count = int(re.match(r"(\d+) tokens in", tab.status())[1])  # type: ignore[index]
    assert 4 < count < ENDLESS
    assert len(stopped) >= lengths[-1]
    time.sleep(0.5)
    assert tab.answers() == [stopped]

    tab.page.click("#reset")
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(0)
    tab.set_number("temperature", 0)
    expect(tab.page.locator("#top_p input[type=number]")).to_be_disabled(timeout=WAIT)
    tab.set_number("max", 30)
    tab.send("the dog")
    expect(tab.page.locator("#status")).to_contain_text("cut off after 30 tokens", timeout=WAIT)
    tab.wait_idle()
    assert tab.answers() == [expected(models / "story", [tokenizer.bos, *tokenizer.encode("the dog")], 30)]

    tab.choose("model", "chat")
    expect(tab.page.locator("#introduction")).to_contain_text("talks in turns", timeout=WAIT)
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(0)  # a text is no conversation
    tab.page.fill("#system textarea", "be short")
    messages = [Message("system", "be short")]
    for question in ("what is RoPE?", "say it in Greek"):
        ask(tab, models, messages, question)
    known = int(re.search(r"(\d+) known", tab.status())[1])  # type: ignore[index]
    assert known > 20  # the first turn was not computed again
    assert tab.elsewhere == []  # no font, script or count of visitors from anywhere but here


def test_tabs_wait_for_each_other_and_a_closed_one_holds_nobody_up(
    browser: object, address: str, tab: Tab, models: Path
) -> None:
    other = Tab(browser, address)
    other.choose("model", "story")
    expect(other.page.locator("#introduction")).to_contain_text("story is a base model", timeout=WAIT)
    other.send("the cat")
    expect(other.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
    other.set_number("temperature", 1)
    other.choose("model", "chat")  # not now
    expect(other.page.locator("body")).to_contain_text("an answer is being written; stop it", timeout=WAIT)
    tab.set_number("temperature", 0)
    tab.set_number("max", 30)
    tab.send("hello")
    expect(tab.page.locator("#status")).to_contain_text("another tab is being answered", timeout=WAIT)
    other.page.close()
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
    tab.wait_idle()
    tokens = prompt_of(models, [Message("user", "hello")])
    assert tab.answers() == [expected(models / "chat", tokens, 30)]


def test_a_choice_and_a_reload_wait_for_another_tab_and_nothing_is_lost(
    browser: object, address: str, tab: Tab
) -> None:
    other = Tab(browser, address)
    other.choose("model", "story")
    expect(other.page.locator("#introduction")).to_contain_text("story is a base model", timeout=WAIT)

    def reload() -> None:
        with tab.page.expect_request("**/run/**"):
            tab.page.reload()

    for begin, introduced in (
        (lambda: tab.choose("model", "story"), "story is a base model"),
        (reload, "story is a base model"),
        (lambda: tab.choose("model", "chat"), "chat talks in turns"),
    ):
        other.send("the cat")
        expect(other.page.locator("#stop")).to_be_enabled(timeout=WAIT)
        begin()
        tab.page.wait_for_timeout(500)  # nothing tells that the server knows
        tab.send("too early")
        expect(tab.page.locator("body")).to_contain_text("is not there yet; wait for it", timeout=WAIT)
        other.page.click("#stop")
        expect(tab.page.locator("#introduction")).to_contain_text(introduced, timeout=WAIT)
        expect(tab.page.locator("#status")).to_have_text("", timeout=WAIT)
        assert tab.page.input_value("#message textarea") == "too early"
        assert tab.answers() == []
        other.wait_idle()
    other.page.close()


_LATE = """
const now = window.fetch;
window.fetch = async (...asked) => {
  const answer = await now(...asked);
  if (!String(asked[0].url ?? asked[0]).includes('/queue/data')) return answer;
  const late = new TransformStream({async transform(piece, out) {
    await new Promise((done) => setTimeout(done, 1500));
    out.enqueue(piece);
  }});
  return new Response(answer.body.pipeThrough(late), answer);
};"""


def test_a_choice_right_after_loading_arrives_on_a_slow_line(browser: object, address: str) -> None:
    with closing(browser.new_context()) as context:  # type: ignore[attr-defined]
        context.add_init_script(_LATE)
        tab = Tab(context, address)
        tab.choose("model", "story")
        expect(tab.page.locator("#introduction")).to_contain_text("story is a base model", timeout=WAIT)


def test_an_answer_ends_when_its_page_looks_away_before_the_tab_is_reported_gone(models: Path) -> None:
    session = Session(ModelRegistry({"story": models / "story"}, {}, Loading()), SamplingSettings(ENDLESS))
    page = Page(session)
    shown = page._send("the cat", gr.Request(session_hash="tab"), "", 1, 0.8, 0, 1, 0, 1, ENDLESS, 0)
    while len(next(shown).get(page.talk, [])) < 2:
        pass  # not a word so far
    (thread,) = page._threads.values()
    shown.close()  # as gradio does
    assert thread.finished.wait(WAIT / 1000)


def test_a_lora_is_chosen_and_put_away_again(tab: Tab, models: Path) -> None:
    tokens = built_in_template("llama3", load_tokenizer(models / "chat")).tokens(
        [Message("user", "what is RoPE?")], answer_next=True
    )[0]
    plain = expected(models / "chat", tokens, 30)
    changed = expected(models / "chat", tokens, 30, models / "loras" / "other")
    assert plain != changed
    tab.set_number("temperature", 0)
    tab.set_number("max", 30)
    for lora, answer, introduced in (("other", changed, "chat with other talks"), ("none", plain, "chat talks")):
        tab.choose("lora", lora)
        expect(tab.page.locator("#introduction")).to_contain_text(introduced, timeout=WAIT)
        tab.send("what is RoPE?")
        expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
        tab.wait_idle()
        assert tab.answers() == [answer]
        tab.page.click("#reset")
        expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(0)


def test_a_message_that_cannot_be_is_given_back(tab: Tab) -> None:
    tab.send("")  # nothing happens
    tab.page.wait_for_timeout(1500)  # gradio may lose what is sent while an event that gives nothing is under way
    tab.send("the cat sat on the mat " * 200)
    expect(tab.page.locator("#status")).to_contain_text("shorten the message", timeout=WAIT)
    tab.wait_idle()
    assert tab.answers() == []
    assert tab.page.input_value("#message textarea").startswith("the cat sat")


TYPED = 'x<y and y>z: 2*3*4 & &lt; <div onclick="alert(1)">hi</div>\n  # two\n- three'


def test_a_message_is_shown_as_it_was_typed_and_copied_as_it_was(tab: Tab) -> None:
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.set_number("max", 10)
    tab.page.fill("#message textarea", TYPED)
    tab.page.click("#send")
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
    tab.wait_idle()
    (shown,) = tab.page.locator("#talk [data-testid=user]").all_inner_texts()
    assert shown.replace("\u2060", "") == TYPED
    assert tab.page.locator("#talk [data-testid=user] div[onclick]").count() == 0
    tab.page.locator("#talk [aria-label='Copy message']").first.click()
    tab.page.wait_for_timeout(200)
    assert tab.page.evaluate("navigator.clipboard.readText()") == TYPED
    tab.page.click("#markdown input")  # what is markup to a browser is text in Markdown, too
    expect(tab.page.locator("#talk [data-testid=user] li")).to_have_count(1, timeout=WAIT)
    assert tab.page.locator("#talk [data-testid=user] div[onclick]").count() == 0


def test_a_talk_survives_a_reload_and_goes_on(tab: Tab, models: Path) -> None:
    tab.page.fill("#system textarea", "be short")
    tab.set_number("temperature", 0)
    tab.set_number("max", 30)
    messages = [Message("system", "be short")]
    for i, question in enumerate(("what is RoPE?", "say it in Greek")):
        answer = ask(tab, models, messages, question)
        tab.page.reload()
        expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(i + 1, timeout=WAIT)
        assert tab.answers()[i] == answer
        expect(tab.page.locator("#system textarea")).to_have_value("be short", timeout=WAIT)
        expect(tab.page.locator("#max input[type=number]")).to_have_value("30", timeout=WAIT)


def test_a_message_that_was_being_answered_is_given_back_by_a_reload(tab: Tab) -> None:
    tab.choose("model", "story")
    expect(tab.page.locator("#introduction")).to_contain_text("story is a base model", timeout=WAIT)
    tab.send("the cat")
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
    tab.page.reload()
    expect(tab.page.locator("#message textarea")).to_have_value("the cat", timeout=WAIT)
    expect(tab.page.locator("#introduction")).to_contain_text("story is a base model", timeout=WAIT)
    assert tab.answers() == []


@pytest.mark.parametrize("kept", ["", "{", '{"model": 1}', "null", '{"turns": [[1]]}', "[" * 5000])
def test_what_the_browser_kept_is_not_believed(tab: Tab, kept: str) -> None:
    tab.page.evaluate("(kept) => sessionStorage.setItem('tandem-chat', kept)", kept)
    tab.page.reload()
    expect(tab.page.locator("#introduction")).to_contain_text("chat talks in turns", timeout=WAIT)
    assert tab.answers() == []


def test_retry_edit_and_undo_of_the_newest_and_of_an_earlier_message(tab: Tab, models: Path) -> None:
    tab.set_number("temperature", 2)
    tab.set_number("max", 20)
    tab.send("hello")
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
    tab.wait_idle()
    (first,) = tab.answers()
    tab.page.click("#talk [aria-label=Retry]")
    tab.page.wait_for_timeout(500)
    tab.wait_idle()
    (second,) = tab.answers()
    assert second != first  # other numbers were drawn
    tab.set_number("temperature", 0)
    tab.send("say it in Greek")
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(2, timeout=WAIT)
    tab.wait_idle()

    tab.page.locator("#talk [aria-label=Edit]").first.click()
    tab.page.locator("#talk textarea").fill("what is RoPE?")
    tab.page.click("#talk [aria-label=Submit]")
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
    expect(tab.page.locator("#talk [data-testid=user]")).to_have_text("what is RoPE?", timeout=WAIT)
    tab.wait_idle()
    assert tab.answers() == [expected(models / "chat", prompt_of(models, [Message("user", "what is RoPE?")]), 20)]

    tab.page.click("#talk [aria-label=Undo]")
    expect(tab.page.locator("#message textarea")).to_have_value("what is RoPE?", timeout=WAIT)
    assert tab.answers() == []


def test_a_talk_is_exported_as_training_reads_it(tab: Tab, tmp_path: Path) -> None:
    tab.set_number("temperature", 0)
    tab.set_number("max", 30)
    tab.page.fill("#system textarea", "be short")
    tab.send("what is RoPE?")
    expect(tab.page.locator("#talk [data-testid=bot]")).to_have_count(1, timeout=WAIT)
    tab.wait_idle()
    with tab.page.expect_download() as download:
        tab.page.click("#export")
    file = tmp_path / "chat.jsonl"
    download.value.save_as(file)
    (chat,) = read_chats([file])
    assert [message.role for message in chat.messages] == ["system", "user", "assistant"]
    assert [message.content for message in chat.messages][:2] == ["be short", "what is RoPE?"]
    assert words(chat.messages[2].content) == tab.answers()[0]


def test_a_phone_opens_on_the_talk(browser: object, address: str) -> None:
    phone = Tab(browser, address, width=390, height=844)
    phone.page.wait_for_timeout(1500)  # whatever opens would have by now
    for place in ("#message textarea", "#send", "#talk"):
        box = phone.page.locator(place).bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
        assert box["y"] + box["height"] <= 844
        middle = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
        on_top = "([place, x, y]) => document.querySelector(place).contains(document.elementFromPoint(x, y))"
        assert phone.page.evaluate(on_top, [place, *middle]), place
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
    phone.page.close()
