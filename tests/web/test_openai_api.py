"""OpenAI's API, asked by OpenAI's client, with tiny models that were really trained, beside transformers' answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.llm.talkers import write_lora, write_story_model, write_tool_model
from tests.web.page import Server, request, serve

openai = pytest.importorskip("openai", reason="openai is not installed (requirements/web-dev.txt)")
pytestmark = pytest.mark.slow

PARIS = [{"role": "user", "content": "weather in Paris?"}]
COUNT = [{"role": "user", "content": "count"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("models")
    lora = write_lora(write_tool_model(top / "chat", [WEATHER]), top / "loras/other", seed=1) / "adapter_config.json"
    lora.write_text(json.dumps(json.loads(lora.read_text()) | {"base_model_name_or_path": r"C:\models\chat"}))
    write_story_model(top / "story", context=60_000)
    return top


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("page"), "--folders", str(models)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def chat(client: Any, models: Path) -> Any:
    """Ask for an answer to messages; the likeliest one if nothing else is said."""

    def ask(messages: Any, **given: Any) -> Any:
        given = {"temperature": 0, "model": str(models / "chat"), **given}
        return client.chat.completions.create(messages=messages, **given)

    return ask


def expected(folder: Path, messages: Any, tools: Any = None, **arguments: Any) -> tuple[int, str]:
    """Return the number of the prompt's tokens and the likeliest answer, both by transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=False, **arguments
    )
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    with torch.inference_mode():
        made = model.generate(prompt, max_new_tokens=80, do_sample=False, eos_token_id=end, pad_token_id=end)
    return prompt.shape[1], tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)


def streamed(stream: Any) -> tuple[str, list[Any]]:
    """Return the content of a stream, and its chunks."""
    chunks = list(stream)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


def test_models_are_listed_and_their_names_can_be_sent_back(client: Any, chat: Any, models: Path) -> None:
    ids = [model.id for model in client.models.list()]
    model, lora = str(models / "chat"), f"{models / 'chat'}:{models / 'loras/other'}"
    assert sorted(ids) == sorted([model, lora, str(models / "story")])
    assert client.models.retrieve(lora).id == lora
    answers = {name: chat(COUNT, model=name) for name in (model, lora, f"{model}/", "chat", "chat:other")}
    texts = [answer.choices[0].message.content for answer in answers.values()]
    assert texts[0] == texts[2] == texts[3] == expected(models / "chat", COUNT)[1]
    assert texts[1] == texts[4] != texts[0]
    assert [answer.model for answer in answers.values()] == [model, lora, model, model, lora]
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.models.retrieve("nothing")


def test_an_answer_is_transformers_own_in_one_piece_and_streamed(chat: Any, models: Path) -> None:
    messages = [{"role": "system", "content": "be short"}, *COUNT]
    for _ in range(2):
        length, text = expected(models / "chat", messages)
        whole = chat(messages)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, "stop")
        assert whole.usage.prompt_tokens == length
        assert whole.usage.total_tokens == length + whole.usage.completion_tokens
        pieces, chunks = streamed(chat(messages, stream=True, stream_options={"include_usage": True}))
        assert pieces == text
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == length - 1
        messages += [
            whole.choices[0].message.model_dump(),
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ]
        messages = [{key: value for key, value in message.items() if value} for message in messages]
        messages[-1]["content"] = "hi"


@pytest.mark.parametrize("stop", ["four", [" t", "three"], ["e f"], "one"])
def test_stop_strings_are_never_sent(chat: Any, stop: Any) -> None:
    text = chat(COUNT).choices[0].message.content
    assert text == "one two three four five"
    first = min(text.index(each) for each in ([stop] if isinstance(stop, str) else stop))
    for limit in ({"max_tokens": 40}, {"max_completion_tokens": 40}):
        answer = chat(COUNT, stop=stop, **limit).choices[0]
        assert (answer.message.content, answer.finish_reason) == (text[:first], "stop")
    assert streamed(chat(COUNT, stop=stop, stream=True))[0] == text[:first]
    cut = chat(COUNT, max_tokens=2)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)


def test_a_seed_gives_the_same_answer_again(chat: Any) -> None:
    def ask(**given: Any) -> str:
        return str(chat(COUNT, temperature=1.8, max_tokens=12, **given).choices[0].message.content)

    assert ask(seed=5) == ask(seed=5, top_p=1.0, n=1, user="me", extra_body={"top_k": 0})
    assert len({ask() for _ in range(5)}) > 1
    assert ask(extra_body={"top_k": 1}) == "one two three four five"[: len(ask(extra_body={"top_k": 1}))]


def test_a_tool_is_called_and_its_result_answered(chat: Any, models: Path) -> None:
    length, text = expected(models / "chat", PARIS, [WEATHER])
    assert text.startswith("<tool_call>")
    answer = chat(PARIS, tools=[WEATHER])
    assert answer.usage.prompt_tokens == length
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Paris"},
    )
    content, chunks = streamed(chat(PARIS, tools=[WEATHER], stream=True))
    (delta,) = [chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices[0].delta.tool_calls]
    assert (content, delta[0].index) == ("", 0)
    assert delta[0].function.model_dump() == call.function.model_dump()
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    said = answer.choices[0].message.model_dump(exclude_none=True)
    length, text = expected(
        models / "chat",
        [*PARIS, {**said, "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}]}, result],
        [WEATHER],
    )
    answer = chat([*PARIS, said, result], tools=[WEATHER])
    assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == (length, text)
    assert text == "it is sunny in Paris"
    answer = chat(PARIS, tools=[WEATHER], tool_choice="none").choices[0].message
    assert answer.tool_calls is None


def test_thinking_stands_apart_and_can_be_turned_off(chat: Any, models: Path) -> None:
    messages = [{"role": "user", "content": "think"}]
    message = chat(messages).choices[0].message
    assert (message.reasoning_content, message.content) == ("the cat sat", "a mat")
    chunks = list(chat(messages, stream=True))
    thought = "".join(getattr(chunk.choices[0].delta, "reasoning_content", "") for chunk in chunks)
    assert thought == "the cat sat"
    off = {"enable_thinking": False}
    answer = chat(messages, extra_body={"chat_template_kwargs": off})
    length, text = expected(models / "chat", messages, **off)
    assert (answer.usage.prompt_tokens, answer.choices[0].message.content) == (length, text)


def test_a_text_or_its_tokens_are_continued(client: Any, models: Path) -> None:
    folder = models / "story"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("the cat sat", return_tensors="pt").input_ids
    with torch.inference_mode():
        made = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    for given in ("the cat sat", ["the cat sat"], prompt[0].tolist(), prompt.tolist()):
        answer = client.completions.create(model=str(folder), prompt=given, temperature=0)
        assert answer.choices[0].text == tokenizer.decode(made)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 16)
        assert answer.usage.prompt_tokens == prompt.shape[1]
    stream = client.completions.create(model=str(folder), prompt="the cat sat", temperature=0, stream=True, stop="mat")
    assert "".join(chunk.choices[0].text for chunk in stream) == tokenizer.decode(made).partition("mat")[0]


@pytest.mark.parametrize(
    ("given", "status", "param"),
    [
        ({"model": "nothing"}, 404, "model"),
        ({"model": "/etc"}, 404, "model"),
        ({"model": 7}, 400, "model"),
        ({"n": 2}, 400, "n"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"best_of_all": 1}, 400, "best_of_all"),
        ({"prompt": "x"}, 400, "prompt"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": 1, "top_p": 2}, 400, "top_p"),
        ({"top_k": True}, 400, "top_k"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
        ({"stop": ["x", ""]}, 400, "stop"),
        ({"stream": "yes"}, 400, "stream"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tools": [WEATHER], "model": "story"}, 400, "model"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": ["hello"]}, 400, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x", "mood": "bad"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "the cat " * 400}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, 400, "messages"),
        ({"temperature": 10**400}, 400, "temperature"),
        ({"temperature": 1, "top_p": -(10**400)}, 400, "top_p"),
        ({"tools": [{"type": "function", "function": {"name": "weather", "parameters": nested(500)}}]}, 400, None),
        ({"chat_template_kwargs": {"x": nested(900)}}, 400, None),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: Server, models: Path, given: dict[str, Any], status: int, param: str
) -> None:
    body = {"model": str(models / "chat"), "messages": COUNT, "temperature": 0} | given
    if body["model"] == "story":
        body["model"] = str(models / "story")
    for more in ({}, {"stream": True}) if "stream" not in given else ({},):
        found, _, text = request(server, "POST", "/v1/chat/completions", json.dumps(body | more))
        error = json.loads(text)["error"]
        assert (found, error["param"], error["type"]) == (status, param, "invalid_request_error"), text


def test_bodies_and_calls_that_are_none_get_errors_of_the_same_form(server: Server) -> None:
    for method, path, body, status in (
        ("POST", "/v1/chat/completions", "{", 400),
        ("POST", "/v1/chat/completions", "[1]", 400),
        ("POST", "/v1/completions", "[" * 100_000, 400),
        ("POST", "/v1/embeddings", "{}", 404),
        ("GET", "/v1/models/nothing", None, 404),
        ("DELETE", "/v1/models/nothing", None, 405),
    ):
        found, _, text = request(server, method, path, body)
        assert (found, sorted(json.loads(text)["error"])) == (status, ["code", "message", "param", "type"])


def test_who_goes_away_is_answered_no_longer_and_others_wait_in_line(client: Any, chat: Any, models: Path) -> None:
    chat(COUNT)
    endless = {"model": str(models / "story"), "prompt": "the cat", "max_tokens": 50_000, "temperature": 0}
    stream = client.completions.create(**endless, stream=True)
    next(iter(stream))
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(chat, COUNT) for _ in range(3)]
        with pytest.raises(openai.APITimeoutError):  # waits too, and goes away before its turn
            client.with_options(timeout=0.5).completions.create(**endless)
        assert not any(each.done() for each in waiting)
        stream.close()
        began = time.monotonic()
        for each in waiting:
            assert each.result(timeout=30).choices[0].message.content == "one two three four five"
        with pytest.raises(openai.APITimeoutError):  # in the middle of an answer in one piece
            client.with_options(timeout=2).completions.create(**endless)
        assert chat(COUNT).choices[0].finish_reason == "stop"
        assert time.monotonic() - began < 40


def test_other_machines_need_the_token_and_other_sites_have_no_access(server: Server, tmp_path: Path) -> None:
    status, _, text = request(server, "GET", "/v1/models", headers={"Origin": "http://evil.example"})
    assert (status, json.loads(text)["error"]["type"]) == (403, "invalid_request_error")
    with serve(tmp_path, "--host", "0.0.0.0") as running:
        token = (tmp_path / "page.log").read_text().split("?token=")[1].split()[0]
        address = f"{running.address}/v1"
        assert list(openai.OpenAI(base_url=address, api_key=token).models.list()) == []
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=address, api_key="wrong").models.list()
        assert request(running, "GET", "/v1/models", headers={"Authorization": f"Basic {token}"})[0] == 401
