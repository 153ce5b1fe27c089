"""The child process behind a screen, here a script that counts for a model that talks; and which models are found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("starlette", reason="the page's packages are not installed (make setup-web)")

from library.web.access import AllowedRoots
from library.web.child import BUSY, Child
from library.web.loras import weights_in
from library.web.site import Site

SCRIPT = """
import json, sys, threading, time
stopped, alone = set(), threading.Lock()
def say(event):
    with alone:
        print(json.dumps(event), flush=True)
def count(request):
    for i in range(request["to"]):
        if request["id"] in stopped:
            break
        say({"event": "piece", "id": request["id"], "text": "x" * 1000})
        time.sleep(request.get("each", 0))
    say({"event": "done", "id": request["id"], "said": i})
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "stop":
        stopped.add(request["id"])
    elif request["do"] == "die":
        sys.exit(7)
    else:
        threading.Thread(target=count, args=(request,)).start()
"""


def in_a_loop(running: Coroutine[Any, Any, Any]) -> Any:
    """Run it in a thread and return what it returns: in this one a browser's loop may be running."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, running).result(timeout=60)


async def all_of(events: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event async for event in events]


@pytest.fixture
def child(tmp_path: Path) -> Child:
    (tmp_path / "count.py").write_text(SCRIPT)
    return Child([str(tmp_path / "count.py")], idle=0.3)


def test_a_reader_that_has_gone_holds_nobody_up_and_leaves_nothing_to_the_next(child: Child) -> None:
    async def run() -> None:
        left = child.ask({"do": "count", "to": 10**9, "each": 0.001})
        await anext(left)
        await asyncio.sleep(0.1)  # more is written meanwhile
        following = asyncio.create_task(all_of(child.ask({"do": "count", "to": 2})))  # a tab that is reloaded asks anew
        await asyncio.sleep(0.3)  # before it is noticed that the old one has gone
        await left.aclose()  # type: ignore[attr-defined]
        events = await asyncio.wait_for(following, 20)
        assert [event["event"] for event in events] == ["piece", "piece", "done"]
        assert {event["id"] for event in events} == {2}
        await child.close()

    in_a_loop(run())


def test_a_reader_that_stands_still_does_not_hold_up_the_process(child: Child) -> None:
    async def run() -> None:
        still = child.ask({"do": "count", "to": 3000})  # 3 MB: more than any pipe holds
        await anext(still)
        await asyncio.sleep(1)
        assert len(await asyncio.wait_for(all_of(still), 20)) == 3000
        await child.close()

    in_a_loop(run())


def test_a_child_refuses_a_second_stops_ends_when_idle_and_comes_back(child: Child) -> None:
    async def run() -> None:
        endless = child.ask({"do": "count", "to": 10**9, "each": 0.001, "name": "mine"})
        assert (await anext(endless))["event"] == "piece"
        assert await all_of(child.ask({"do": "count", "to": 1})) == [{"event": "error", "error": BUSY}]
        assert (await anext(endless))["event"] == "piece"
        await child.stop("mine")
        assert (await all_of(endless))[-1]["said"] > 0
        for name in ({"name": "next"}, {}):  # whose answer a late stop of the one before does not end
            following = child.ask({"do": "count", "to": 20, "each": 0.02, **name})
            await anext(following)
            await child.stop("mine")
            assert (await all_of(following))[-1]["said"] == 19
        assert child._process is not None
        process = psutil.Process(child._process.pid)
        await asyncio.sleep(1)
        assert not child.is_running
        assert not process.is_running()
        (failed,) = await all_of(child.ask({"do": "die"}))
        why = "exit code 7; see the page's terminal"
        assert failed["error"] == f"The model's process ended ({why}). Load it again."
        assert (await all_of(child.ask({"do": "count", "to": 1})))[-1]["event"] == "done"
        await child.close()

    in_a_loop(run())


def test_an_answer_that_takes_longer_than_the_idle_time_is_not_ended(child: Child) -> None:
    async def run() -> None:
        await all_of(child.ask({"do": "count", "to": 1}))
        events = await all_of(child.ask({"do": "count", "to": 8, "each": 0.1}))
        assert [event["event"] for event in events] == ["piece"] * 8 + ["done"]
        await child.close()

    in_a_loop(run())


def test_folders_of_models_and_loras_are_told_by_their_configuration(tmp_path: Path) -> None:
    def write(name: str, **values: object) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(values))

    write("output/run/llama/config.json", model_type="llama")
    write("output/run/answers/adapter_config.json", task_type="CAUSAL_LM", peft_type="LORA")
    write("output/flux/config.json", model_type="t5")
    write("output/.tandem/jobs/config.json", model_type="llama")
    write("elsewhere/model/config.json", model_type="llama")
    write("more/meta/params.json", dim=8)
    (tmp_path / "more/broken").mkdir()
    (tmp_path / "more/broken/config.json").write_text("[" * 5000)
    (tmp_path / "more/link").symlink_to(tmp_path / "elsewhere")
    roots = AllowedRoots.of([tmp_path / "output"], [tmp_path / "more", tmp_path / "output/run"])
    found = weights_in(Site.of(roots))
    assert {Path(name) for name in found["language_model"]} == {tmp_path / "output/run/llama", tmp_path / "more/meta"}
    assert [Path(name) for name in found["language_lora"]] == [tmp_path / "output/run/answers"]
