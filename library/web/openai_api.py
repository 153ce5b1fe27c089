"""OpenAI's API over the language models in the page's folders, for clients that speak it.

    /v1/models              models, and LoRAs as "MODEL:LORA"
    /v1/chat/completions    messages to an answer, by the model's chat template
    /v1/completions         a text or tokens to what follows

A request becomes a question to the chat's child process (tools/chat_worker.py), whose events become an answer or a
stream. The format is https://platform.openai.com/docs/api-reference; ``chat_template_kwargs``, ``top_k``, ``min_p`` and
``repetition_penalty`` are vLLM's, ``reasoning_content`` is llama.cpp's. Parameters that would change the answer
elsewhere, but not here, are refused by name.
"""

from __future__ import annotations

import json
import secrets
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path, PureWindowsPath
from typing import Any

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from library.files import read_toml
from library.training.report.run_folder import object_in
from library.web.access import ApiError
from library.web.chat import child
from library.web.loras import weights_in
from library.web.site import Site

Values = dict[str, Any]
_PARAMETERS = read_toml(Path(__file__).with_name("openai_parameters.toml"))[0]
_ONLY = _PARAMETERS["only"]
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_JSON = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_TEXT_TOKENS = 16  # of /v1/completions without max_tokens, as at OpenAI


def route(site: Site) -> Route:
    """Return the route of all calls."""

    async def endpoint(request: Request) -> Response:
        try:
            return await _answer(site, request)
        except ApiError as error:
            return JSONResponse(error.told, error.status)
        except Exception as error:
            traceback.print_exception(error)
            bug = ApiError(f"this is a bug of the page ({type(error).__name__}); the terminal has the rest", 500)
            return JSONResponse(bug.told, bug.status)

    return Route("/v1/{call:path}", endpoint, methods=["GET", "POST"])


async def _answer(site: Site, request: Request) -> Response:
    call, models = f"{request.method} {request.path_params['call']}", await to_thread.run_sync(_models, site)
    if call in ("POST chat/completions", "POST completions"):
        return await _complete(models, request, is_chat=call == "POST chat/completions")
    about = {name: {"id": name, "object": "model", "created": 0, "owned_by": "tandem"} for name in models}
    if call == "GET models":
        return JSONResponse({"object": "list", "data": list(about.values())})
    if not call.startswith("GET models/"):
        raise ApiError(f"{call}: there is no such call here", 404)
    return JSONResponse(about[_named(call.removeprefix("GET models/"), models)])


def _models(site: Site) -> dict[str, tuple[str, str]]:
    """Return model and LoRA by id. A LoRA goes with models that are called like its base; with all if none is."""
    found = weights_in(site)
    names = found["language_model"]
    models = [(model, "") for model in names]
    for lora in found["language_lora"]:
        base = (object_in(Path(lora) / "adapter_config.json") or {}).get("base_model_name_or_path")
        own = [name for name in names if Path(name).name == PureWindowsPath(str(base)).name]  # it splits at / and \\
        models += [(model, lora) for model in own or names]
    return {":".join(Path(path).as_posix() for path in paths if path): paths for paths in models}


def _named(text: str, models: dict[str, tuple[str, str]]) -> str:
    """Return the id that a client means: all of it, or the last part of each path if nothing else is called so."""
    if (name := Path(text).as_posix()) in models:
        return name
    found = [each for each, paths in models.items() if name == ":".join(Path(path).name for path in paths if path)]
    if len(found) != 1:
        raise ApiError(f"model: {text!r} is not at /v1/models, or means several; send an id", 404, "model_not_found")
    return found[0]


async def _complete(models: dict[str, tuple[str, str]], request: Request, is_chat: bool) -> Response:
    try:
        body = dict(await request.json())
    except (ValueError, TypeError, RecursionError, ClientDisconnect):
        raise ApiError("the body is no JSON object, or nested too deeply; correct it") from None
    question = _question(body, is_chat)
    name = _named(body["model"], models)
    question["model"], question["lora"] = models[name]
    answer: Values = {"created": int(time.time()), "model": name}
    answer["id"] = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    answer["object"] = "chat.completion" + ".chunk" * bool(body.get("stream")) if is_chat else "text_completion"
    events = child.ask(question, request.is_disconnected)
    try:
        if (first := await anext(events, {"event": "error"}))[
            "event"
        ] == "error":  # else the model is loaded and the prompt fits
            raise _error(first)
        if body.get("stream"):
            if (body.get("stream_options") or {}).get("include_usage") is True:
                answer["usage"] = None  # of all chunks but the last
            return StreamingResponse(_stream(events, answer, is_chat), media_type="text/event-stream")
        said: Values = {"role": "assistant", "content": ""}
        async for event in events:
            if event["event"] == "error" or await request.is_disconnected():
                raise _error(event)
            for key, value in event["parts"].items():
                said[key] = said[key] + value if key in said else value
    except BaseException:
        await events.aclose()  # the next in line is answered
        raise
    if "tool_calls" in said:
        said["content"] = said["content"] or None
    choice = _choice({"message": said} if is_chat else {"text": said["content"]}, event["finish_reason"])
    return JSONResponse(answer | {"choices": [choice], "usage": event["usage"]})


async def _stream(events: AsyncIterator[Values], answer: Values, is_chat: bool) -> AsyncIterator[str]:
    def line(parts: Values, ending: str | None = None) -> str:
        choice = _choice({"delta": parts} if is_chat else {"text": parts.get("content", "")}, ending)
        return f"data: {json.dumps(answer | {'choices': [choice]})}\n\n"

    if is_chat:
        yield line({"role": "assistant", "content": ""})
    async for event in events:
        if event["event"] == "error":
            yield f"data: {json.dumps(_error(event).told)}\n\n"
            return
        if calls := event["parts"].get("tool_calls"):
            event["parts"]["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        if event["parts"] or event["event"] == "done":
            yield line(event["parts"], event.get("finish_reason"))
    if "usage" in answer:
        yield f"data: {json.dumps(answer | {'choices': [], 'usage': event['usage']})}\n\n"
    yield "data: [DONE]\n\n"


def _error(event: Values) -> ApiError:
    return ApiError(event.get("error", "the client has gone"), event.get("status", 500), event.get("code"))


def _choice(said: Values, ending: str | None) -> Values:
    return {"index": 0, **said, "logprobs": None, "finish_reason": ending}


def _question(body: Values, is_chat: bool) -> Values:
    """Return what the child process is asked, except for the model.

    Raises:
        ApiError: a parameter is missing, of another type, or not one that this server has.
    """
    given = {key: value for key, value in body.items() if value not in (None, [])}
    if given.get("tool_choice") == "none":
        given |= {"tools": [], "tool_choice": "auto"}
    text, types = "messages" if is_chat else "prompt", _PARAMETERS["both"] | _PARAMETERS["chat" if is_chat else "text"]
    for key, value in ({"model": None, text: None} | given).items():
        only, found = _ONLY.get(key), _JSON.get(type(value), "missing or empty")
        if key in _ONLY and (value != only or isinstance(value, bool) != isinstance(only, bool)):
            raise ApiError(f"{key}: only {json.dumps(only)} is supported; remove it", code="unsupported_value")
        if key not in _ONLY and key not in types:
            raise ApiError(f"{key}: this server has no such parameter; remove it", code="unknown_parameter")
        if key in types and found not in types[key]:
            raise ApiError(f"{key}: is {found} and must be {' or '.join(types[key])}", code="invalid_type")
    limit = given.get("max_completion_tokens", given.get("max_tokens", None if is_chat else _TEXT_TOKENS))
    if given.get("max_tokens", limit) != limit or (limit is not None and limit < 1):
        raise ApiError("max_tokens: must be above 0 and agree with max_completion_tokens")
    tools = [tool.get("function") if isinstance(tool, dict) else None for tool in given.get("tools", [])]
    if not all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in tools):
        raise ApiError('tools: each must be {"type": "function", "function": {"name": ...}}')
    stop = [given["stop"]] if isinstance(given.get("stop"), str) else given.get("stop", [])
    if not all(isinstance(string, str) and string for string in stop):
        raise ApiError("stop: must be texts, none of them empty")
    asked = given[text]
    if not is_chat and len(asked) == 1 and isinstance(asked[0], str | list):
        asked = asked[0]
    if not is_chat and not isinstance(asked, str) and not all(type(token) is int and token >= 0 for token in asked):
        raise ApiError("prompt: must be one text or one list of tokens; ask for several one by one")
    settings = {"max_new_tokens": limit, "seed": secrets.randbits(63)}
    settings |= {key: given[key] for key in _SAMPLING if key in given}
    question = {"do": "answer", text: asked, "settings": settings, "stop": stop}
    return question | {"tools": given.get("tools", []), "arguments": given.get("chat_template_kwargs", {})}
