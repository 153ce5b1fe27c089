"""``tools/chat.py`` in a terminal, in a pipe and for programs, and the registry that models and LoRAs stand on."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.console import Console
from library.errors import UserError
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizers import load_tokenizer
from library.models.llm.files import load_lm
from library.training.tasks.chat_lora import put_lora_on
from networks.merging.merge import LoraSource
from tests.forked import run_script
from tests.llm.talkers import PAIRS, write_chat_model, write_lora, write_story_model
from tools.chat import chat, parser
from tools.chatting.session import Loading, ModelRegistry, Session, find_loras, find_models
from tools.chatting.terminal import _answer, run_command

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingSettings(max_new_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("models")
    write_chat_model(top / "chat")
    write_story_model(top / "deeper" / "story")
    write_story_model(top / "gpt2", "gpt2", context=160)
    (top / "encoder").mkdir()
    (top / "encoder" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    return top


@pytest.fixture(scope="module")
def loras(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random LoRAs of the chat model, as peft writes them."""
    top = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("first", "second")):
        write_lora(models / "chat", top / name, seed)
    return top


def session(models: Path, settings: SamplingSettings = GREEDY, loras: dict[str, Path] | None = None) -> Session:
    return Session(ModelRegistry(find_models([], models), loras or {}, Loading()), settings)


def say(talk: Session, text: str) -> str:
    return "".join(talk.answer(text))


def piped(models: Path, lines: str, *words: str) -> subprocess.CompletedProcess[str]:
    given = lines.encode(errors="surrogateescape")
    words = ("--models_dir", str(models), *words)
    return run_script(ROOT / "tools/chat.py", words, Path.cwd(), {"COLUMNS": "200"}, given)


def test_bytes_that_are_no_utf8_do_not_end_the_talk(models: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    lines = f"caf\udce9\n/save {tmp_path / 'latin.txt'}\n/save {tmp_path / 'talk.jsonl'}\n"
    done = piped(models, lines, "--max_new_tokens", "3")
    assert done.returncode == 0, done.stderr
    assert "latin.txt: holds something else than text in UTF-8" in done.stdout
    (talk,) = (tmp_path / "talk.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(talk)["messages"][0]["content"] == "caf\ufffd"
    assert (tmp_path / "latin.txt").read_bytes() == b"caf\xe9"


def test_a_pipe_of_lines_is_a_conversation(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    lines = f"hello\n/set temperature 0\nwhat is GQA?\n/save {file}\n/reset\nsay it in Greek\n/save {file}\n"
    done = piped(models, f"{lines}/quit\nnot read\n", "--temperature", "0.5", "--seed", "3")
    assert done.returncode == 0, done.stderr
    answers = [answer for _, answer in (PAIRS[0], PAIRS[2], PAIRS[3])]
    assert [line for line in done.stdout.splitlines() if line in answers] == answers
    assert "not read" not in done.stdout
    saved = [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert [[message["content"] for message in talk] for talk in saved] == [
        [*PAIRS[0], *PAIRS[2]],
        list(PAIRS[3]),
    ]
    assert [message["role"] for message in saved[0]] == ["user", "assistant"] * 2


def test_an_answer_is_tried_again_and_a_message_taken_back(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    lines = f"/retry\nhello\n/set temperature 0\n/retry\nwhat is GQA?\n/undo\nsay it in Greek\n/save {file}\n/quit\n"
    done = piped(models, lines, "--temperature", "5", "--seed", "3", "--max_new_tokens", "20")
    assert done.returncode == 0, done.stderr
    assert "error: nothing was said yet" in done.stdout
    assert f"taken back: {PAIRS[2][0]}" in done.stdout
    (talk,) = [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert [message["content"] for message in talk] == [*PAIRS[0], *PAIRS[3]]  # what was drawn at first is gone


class Terminal:
    """tools/chat.py behind a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self._leader, follower = pty.openpty()
        command = [sys.executable, str(ROOT / "tools/chat.py"), *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "200"}
        streams = {"stdin": follower, "stdout": follower, "stderr": follower}
        self.process = subprocess.Popen(command, env=environment, preexec_fn=_own_terminal, **streams)
        os.close(follower)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Return what was shown up to and with ``text`` since the last call."""
        limit = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < limit, f"no {text!r} in {self.shown!r}"
            os.set_blocking(self._leader, False)
            try:
                self.shown += os.read(self._leader, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._leader)


def _own_terminal() -> None:
    """Make the child leader of a session whose controlling terminal is its stdin, so that ^C reaches it."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_c_stops_the_answer_and_not_the_program(models: Path, tmp_path: Path) -> None:
    history = tmp_path / "history"
    words = ["--model", str(models / "deeper" / "story"), "--max_new_tokens", "8000", "--temperature", "0"]
    terminal = Terminal(*words, "--history_file", str(history))
    try:
        terminal.wait_for("> ")
        terminal.type("the cat\n")
        terminal.wait_for("the dog was glad")
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        assert "tokens in" in terminal.wait_for("known")
        terminal.wait_for("> ")
        terminal.type("half a li\x03")  # at the prompt it clears the line
        terminal.wait_for("(/quit or Ctrl-D leaves)")
        terminal.wait_for("> ")
        terminal.type("/history\n")
        told = terminal.wait_for("> ")
        assert "user: the cat" in told
        assert "assistant:  sat on the mat" in told
        assert "half a li" not in told
        terminal.type("/set max_new_tokens 7\n")
        terminal.wait_for("> ")
        terminal.type("\n")  # nothing: go on
        terminal.wait_for("cut off after 7 tokens (max_new_tokens)")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()
    assert "the cat" in history.read_text()


def test_steering_characters_of_a_model_do_not_reach_the_terminal() -> None:
    pieces = iter(["a\x1b[2Jb\nc", "d\x9be\u202eé🌍"])
    talk = SimpleNamespace(answer=lambda line: (piece for piece in pieces), remarks=list)
    out = io.StringIO()
    _answer(talk, "hello", Console(file=out, highlight=False, markup=False, soft_wrap=True))  # type: ignore[arg-type]
    assert out.getvalue() == "a\\x1b[2Jb\ncd\\x9be\\u202eé🌍\n"


def test_a_lora_comes_and_goes_without_loading_the_base_again(models: Path, loras: Path) -> None:
    talk = session(models, loras=find_loras([], loras))
    talk.choose("chat", None)
    base, plain = talk.registry.model, say(talk, "what is RoPE?")
    weight = base.embedding.weight.data_ptr()
    said = {}
    for name in ("first", "second"):
        run_command(talk, "lora", name)
        talk.conversation.reset()
        said[name] = say(talk, "what is RoPE?")
        tokens = talk.conversation.template.prompt("", [], "what is RoPE?")
        alone = load_lm(models / "chat", torch.float32)
        put_lora_on(alone, loras / name)
        stops = SamplingSettings(24, temperature=0, stop_tokens=load_tokenizer(models / "chat").stop_tokens)
        expected = generate_tokens(alone, [tokens], stops)[0]
        assert said[name] == load_tokenizer(models / "chat").decode(expected, skip_special=True)
    assert len({plain, *said.values()}) == 3
    run_command(talk, "lora", "none")
    talk.conversation.reset()
    assert say(talk, "what is RoPE?") == plain
    assert talk.registry.model is base
    assert base.embedding.weight.data_ptr() == weight


def test_strength_scales_the_lora_from_the_next_answer_on(models: Path, loras: Path) -> None:
    talk = session(models, loras=find_loras([f"{loras / 'first'}:0.5"], None))
    with pytest.raises(UserError, match="no LoRA on the model"):
        run_command(talk, "strength", "1")
    talk.choose("chat", None)
    plain = say(talk, "what is RoPE?")
    run_command(talk, "lora", "first")
    assert "with first at 0.5" in talk.introduction()
    tokenizer = load_tokenizer(models / "chat")
    for strength in (0.5, 2.0):
        run_command(talk, "strength", f"{strength}")
        talk.conversation.reset()
        alone = load_lm(models / "chat", torch.float32)
        put_lora_on(alone, loras / "first", strength)
        tokens = talk.conversation.template.prompt("", [], "what is RoPE?")
        stops = SamplingSettings(24, temperature=0, stop_tokens=tokenizer.stop_tokens)
        expected = tokenizer.decode(generate_tokens(alone, [tokens], stops)[0], skip_special=True)
        assert say(talk, "what is RoPE?") == expected
    run_command(talk, "strength", "0")
    talk.conversation.reset()
    assert say(talk, "what is RoPE?") == plain
    with pytest.raises(UserError, match="no number"):
        run_command(talk, "strength", "much")


def test_a_lora_brings_the_template_that_it_was_trained_with(models: Path, loras: Path, tmp_path: Path) -> None:
    tensors = load_file(loras / "first" / "adapter_model.safetensors")
    (tmp_path / "lora").mkdir()
    shutil.copy(loras / "first" / "adapter_config.json", tmp_path / "lora")
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors", {"tandem.chat_template": "plain"})
    talk = session(models, loras=find_loras([str(tmp_path / "lora")], loras))
    talk.choose("story", None)
    assert not talk.conversation.template.has_turns
    say(talk, "the cat")
    talk.choose("story", "lora")
    assert "talks in turns (template plain)" in talk.introduction()
    assert talk.conversation.turns == []
    assert "begins anew" in talk.remarks()[0]
    say(talk, "the cat?")
    talk.choose("story", "first")  # says nothing about its template
    assert not talk.conversation.template.has_turns


def test_a_lora_that_does_not_fit_leaves_everything_as_it_was(models: Path, loras: Path) -> None:
    talk = session(models, loras=find_loras([], loras))
    talk.choose("chat", "first")
    before = say(talk, "what is RoPE?")
    with pytest.raises(UserError, match="first"):
        talk.choose("gpt2", "first")
    talk.conversation.reset()
    assert say(talk, "what is RoPE?") == before
    assert (talk.model_name, talk.lora_name) == ("chat", "first")


def test_sessions_share_a_registry_and_do_not_mix(models: Path) -> None:
    mine, alone = session(models), session(models)
    yours = mine.begin_another()
    mine.choose("chat", None)
    for talk in (yours, alone):
        talk.choose("story", None)
    for question in ("hello", "say it in Greek"):
        assert say(mine, question) == dict(PAIRS)[question]  # the registry goes to and fro
        assert say(yours, "the cat") == say(alone, "the cat")
    assert [len(talk.conversation.turns) for talk in (mine, yours, alone)] == [2, 2, 2]
    assert mine.conversation.stats is not None
    assert mine.conversation.stats.cached > 0  # the cache outlives the model's absence


def test_models_are_found_and_named(models: Path) -> None:
    assert list(find_models([], models)) == ["chat", "gpt2", "story"]
    assert list(find_models([str(models / "deeper" / "story")], models)) == ["story", "chat", "gpt2"]
    for name in "ab":
        (models / name / "x").mkdir(parents=True)
    assert list(find_models([str(models / "a" / "x"), str(models / "b" / "x")], None)) == ["a/x", "b/x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("set temperatur 1", "no setting 'temperatur'; did you mean 'temperature'"),
        ("set top_k many", "top_k: 'many' is no whole number"),
        ("set top_p 2", "top_p: 2.0 does not fit"),
        ("set temperature off", "temperature: 'off' is no number"),
        ("save", "/save: needs a file's name"),
        ("model nobody", "no model 'nobody'; choose one of chat, gpt2, story"),
        ("lora any", "no LoRA 'any'; there is none"),
    ],
)
def test_commands_name_their_mistakes(models: Path, line: str, message: str) -> None:
    talk = session(models, SamplingSettings(4))
    name, _, rest = line.partition(" ")
    with pytest.raises(UserError, match=message):
        run_command(talk, name, rest)
    assert talk.settings == SamplingSettings(4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model to talk to"),
        (["--model", "x", "--json_lines"], "--model: has no effect with --json_lines"),
        (["--model", "x", "y", "--tokenizer", "t"], "--tokenizer: goes with one --model"),
        (["--models_dir", "nowhere"], "--models_dir: nowhere: no such folder"),
        (["--model", "{models}/chat", "--lora", "nowhere"], "--lora: nowhere: no such file"),
        (["--model", "{models}/gpt2", "--system", "x"], "a system message: this model only continues text"),
        (["--model", "{models}/gpt2", "--context", "200"], "context: 200 does not fit"),
        (["--model", "{models}/gpt2", "--chat_template", "llama3"], "no llama3 chat"),
        (["--json_lines", "--history_file", "h"], "--history_file: has no effect with --json_lines"),
    ],
)
def test_what_does_not_go_together_is_refused(models: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chat(parser().parse_args([word.format(models=models) for word in words]))


class Program:
    """tools/chat.py --json_lines, as the page asks it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools/chat.py"), "--json_lines"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
        )  # fmt: skip

    def ask(self, **request: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def last(self) -> tuple[dict[str, Any], str]:
        """Return the last event of an answer, and the text before it."""
        text = ""
        while (event := self.event())["event"] not in ("done", "error"):
            text += event.get("text", "")
        return event, text


def test_programs_talk_by_lines_of_json(models: Path, loras: Path) -> None:
    program = Program()
    try:
        talk = session(models, loras={"first": LoraSource(loras / "first", 0.5)})  # type: ignore[dict-item]
        talk.choose("chat", "first")
        talk.set_system("be short")
        greedy = {"temperature": 0, "max_new_tokens": 24}
        asked = {"model": str(models / "chat"), "lora": str(loras / "first"), "strength": 0.5, "system": "be short"}
        turns: list[list[Any]] = []
        for i, question in enumerate(("hello", "what is GQA?")):
            program.ask(id=i, do="answer", **asked, turns=turns, message=question, settings=greedy)
            done, text = program.last()
            assert text == done["turn"][1] == say(talk, question)
            turns.append(done["turn"])
        assert turns == [list(map(_listed, astuple(turn))) for turn in talk.conversation.turns]
        assert re.search(r"[1-9]\d* known", done["report"])  # the first turn was not computed again

        story = str(models / "deeper" / "story")
        endless = {"temperature": 0, "max_new_tokens": 8000}
        program.ask(id=5, do="answer", model=story, turns=turns, has_turns=True, message="the cat", settings=endless)
        assert (program.event()["has_turns"], program.event()["event"]) == (False, "piece")  # the turns are left out
        program.ask(do="stop", id=5)
        done, text = program.last()
        assert done["turn"][0] == "the cat"
        assert 0 < len(done["turn"][2]) < 8000

        for wrong, said in (
            ({"model": "nowhere"}, "nowhere: no such folder"),
            ({"model": str(models / "gpt2"), "lora": str(loras / "first")}, "first"),
            ({"model": story, "settings": {"top_p": 2}}, "top_p: 2 does not fit"),
            ({"model": story, "settings": {"of_later": 1}}, "of_later"),
        ):
            program.ask(**{"id": 6, "do": "answer", "turns": [], "message": "x", "settings": greedy} | wrong)
            assert said in program.last()[0]["error"]
        program.ask(id=7, do="answer", model=story, turns=[], message="the cat", settings=endless)
        assert program.event()["event"] == "ready"
        program.process.stdin.close()  # type: ignore[union-attr]  # in the middle of an answer
        assert program.process.wait(timeout=10) == 0
    finally:
        program.process.kill()


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
