"""``tools/chat_worker.py``, the process behind the page's chat, asked as the page asks it; and the model it keeps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.errors import UserError
from library.llm.chat_templates import built_in_template
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizer_files import load_tokenizer
from library.models.llm.files import load_lm
from library.training.tasks.chat_lora import put_lora_on
from tests.llm.talkers import Talk, write_chat_model, write_lora, write_story_model
from tools.chat_worker import LoadedModel, prompt_of

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingSettings(max_new_tokens=24, temperature=0)
QUESTION = "what is RoPE?"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("models")
    write_chat_model(top / "chat")
    write_story_model(top / "story")
    write_story_model(top / "gpt2", "gpt2", context=160)
    return top


@pytest.fixture(scope="module")
def loras(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random LoRAs of the chat model, as peft writes them."""
    top = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("first", "second")):
        write_lora(models / "chat", top / name, seed)
    return top


def answer(loaded: LoadedModel, model: Path, lora: Path | None = None, strength: float = 1.0) -> str:
    session = loaded.use(str(model), None if lora is None else str(lora), strength)
    return "".join(session.answer(loaded.model, session.prompt("", [], QUESTION, 24)[0], GREEDY))


def fresh_answer(model: Path, lora: Path | None = None, strength: float = 1.0) -> str:
    """Return what a model that was loaded for this question alone answers."""
    alone, tokenizer = load_lm(model, torch.float32), load_tokenizer(model)
    if lora is not None:
        put_lora_on(alone, lora, strength)
    stops = SamplingSettings(24, temperature=0, stop_tokens=tokenizer.stop_tokens)
    tokens = built_in_template("llama3", tokenizer).prompt("", [], QUESTION)
    return tokenizer.decode(generate_tokens(alone, [tokens], stops)[0], skip_special=True)


def test_a_lora_comes_and_goes_without_loading_the_base_again(models: Path, loras: Path) -> None:
    loaded, chat = LoadedModel(), models / "chat"
    plain = answer(loaded, chat)
    base, weight = loaded.model, loaded.model.embedding.weight.data_ptr()
    answers = [answer(loaded, chat, loras / name) for name in ("first", "second")]
    assert answers == [fresh_answer(chat, loras / name) for name in ("first", "second")]
    assert len({plain, *answers}) == 3
    assert answer(loaded, chat) == plain
    assert loaded.model is base
    assert base.embedding.weight.data_ptr() == weight


def test_strength_scales_the_lora_from_the_next_answer_on(models: Path, loras: Path) -> None:
    loaded, chat, lora = LoadedModel(), models / "chat", loras / "first"
    for strength in (0.5, 2.0):
        assert answer(loaded, chat, lora, strength) == fresh_answer(chat, lora, strength)
    assert f"with {lora} at 2 talks in turns" in loaded.introduction()
    assert answer(loaded, chat, lora, 0.0) == answer(loaded, chat)


def test_a_lora_brings_the_template_that_it_was_trained_with(models: Path, loras: Path, tmp_path: Path) -> None:
    tensors = load_file(loras / "first" / "adapter_model.safetensors")
    shutil.copy(loras / "first" / "adapter_config.json", tmp_path)
    save_file(tensors, tmp_path / "adapter_model.safetensors", {"tandem.chat_template": "plain"})
    loaded = LoadedModel()
    for lora, has_turns in ((None, False), (tmp_path, True), (loras / "first", False)):
        path = None if lora is None else str(lora)
        assert loaded.use(str(models / "story"), path, 1.0).template.has_turns is has_turns
        assert ("talks in turns (template plain)" in loaded.introduction()) is has_turns


@pytest.mark.parametrize("model", ["story", "gpt2"])
def test_models_take_turns_in_memory_and_a_lora_that_does_not_fit_is_left_out(
    models: Path, loras: Path, model: str
) -> None:
    loaded, chat = LoadedModel(), models / "chat"
    plain, with_lora = fresh_answer(chat), fresh_answer(chat, loras / "first")
    for _ in range(2):
        assert answer(loaded, chat) == plain
        if model == "gpt2":
            with pytest.raises(UserError, match="first"):
                loaded.use(str(models / model), str(loras / "first"), 1.0)
        assert answer(loaded, models / model)
        assert answer(loaded, chat, loras / "first") == with_lora


def test_tools_that_the_model_would_not_see_are_refused(models: Path) -> None:
    session = LoadedModel().use(str(models / "chat"), None, 1.0)
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    request = {"messages": [{"role": "user", "content": "hello"}], "tools": tools, "arguments": {}}
    with pytest.raises(UserError, match="tools: .* does not write 'get_weather' into the prompt"):
        prompt_of(session, request, 1)
    system = {"role": "system", "content": f"You may call {tools}"}
    assert prompt_of(session, request | {"messages": [system, *request["messages"]]}, 1)


class Worker:
    """The process, and the events it sends."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "tools/chat_worker.py")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)

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
            text += event.get("parts", {}).get("content", "")
        return event, text


def test_the_page_talks_by_lines_of_json(models: Path, loras: Path) -> None:
    worker = Worker()
    try:
        alone = load_lm(models / "chat", torch.float32)
        put_lora_on(alone, loras / "first", 0.5)
        template = built_in_template("llama3", load_tokenizer(models / "chat"))
        talk = Talk(alone.config, template, "be short")
        greedy = {"temperature": 0, "max_new_tokens": 24, "top_k": 0, "top_p": 1, "min_p": 0}
        asked = {"model": str(models / "chat"), "lora": str(loras / "first"), "strength": 0.5, "system": "be short"}
        turns: list[list[Any]] = []
        for i, question in enumerate(("hello", "what is GQA?")):
            worker.ask(id=i, do="answer", **asked, turns=turns, message=question, settings=greedy)
            done, text = worker.last()
            assert text == done["turn"][1] == "".join(talk.answer(alone, question, GREEDY))
            turns.append(done["turn"])
        assert turns == [list(map(_listed, astuple(turn))) for turn in talk.turns]
        assert re.search(r"[1-9]\d* known", done["report"])  # the first turn was not computed again
        worker.ask(id=4, do="answer", **asked, turns=[], message="hello", settings=greedy | {"max_new_tokens": 2})
        assert worker.last()[0]["remarks"] == ["the answer was cut off after 2 tokens (max_new_tokens)"]

        long = greedy | {"max_new_tokens": 900}
        worker.ask(id=4, do="answer", model=str(models / "gpt2"), turns=[], message="the cat", settings=long)
        done, _ = worker.last()
        length = len(done["turn"][2])
        assert done["remarks"] == [f"the answer was cut off after {length} tokens (context of 160 tokens)"]

        story = str(models / "story")
        endless = {"temperature": 0, "max_new_tokens": 8000}
        worker.ask(id=5, do="answer", model=story, turns=turns, has_turns=True, message="the cat", settings=endless)
        assert (worker.event()["has_turns"], worker.event()["event"]) == (False, "piece")  # the turns are left out
        worker.ask(do="stop", id=5)
        done, text = worker.last()
        assert done["turn"][0] == "the cat"
        assert 0 < len(done["turn"][2]) < 8000

        for wrong, message in (
            ({"model": "nowhere"}, "nowhere: no such folder"),
            ({"model": str(models / "gpt2"), "lora": str(loras / "first")}, "first"),
            ({"model": story, "settings": {"top_p": 2}}, "top_p: 2 does not fit"),
            ({"model": story, "settings": {"of_later": 1}}, "of_later"),
        ):
            worker.ask(**{"id": 6, "do": "answer", "turns": [], "message": "x", "settings": greedy} | wrong)
            assert message in worker.last()[0]["error"]
        worker.ask(id=7, do="answer", model=story, turns=[], message="the cat", settings=endless)
        assert worker.event()["event"] == "ready"
        worker.process.stdin.close()  # type: ignore[union-attr]  # in the middle of an answer
        assert worker.process.wait(timeout=10) == 0
    finally:
        worker.process.kill()


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
