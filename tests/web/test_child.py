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

from library.web.access import Places
from library.web.chat import find_models
from library.web.child import Child

SCRIPT = """
import json, sys, threading, time
stopped = set()
def count(request):
    for i in range(request["to"]):
        if request["id"] in stopped:
            break
        print(json.dumps({"event": "piece", "text": "x" * 1000}), flush=True)
        time.sleep(request.get("each", 0))
    print(json.dumps({"event": "done", "said": i}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "stop":
        stopped.add(request["id"])
    elif request["do"] == "die":
        sys.exit(7)
    else:
        threading.Thread(target=count, args=(request,)).start()
"""


def in_a_loop(running: Coroutine[Any, Any, None]) -> None:
    """Run it in a thread: in this one a browser's loop may be running."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, running).result(timeout=60)


async def here() -> bool:
    return False


async def gone() -> bool:
    return True


async def all_of(events: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event async for event in events]


@pytest.fixture
def child(tmp_path: Path) -> Child:
    (tmp_path / "count.py").write_text(SCRIPT)
    return Child([str(tmp_path / "count.py")], idle=0.3)


def test_a_reader_that_stands_still_and_one_that_has_gone_hold_nobody_up(child: Child) -> None:
    async def run() -> None:
        still = child.ask({"do": "count", "to": 3000}, here)  # 3 MB: more than any pipe holds
        await anext(still)
        left = child.ask({"do": "count", "to": 10**9, "each": 0.001}, gone)
        await anext(left)
        events = await asyncio.wait_for(all_of(child.ask({"do": "count", "to": 2}, here)), 20)
        assert [event["event"] for event in events] == ["begun", "waiting", "piece", "piece", "done"]
        assert len(await all_of(still)) == 3001
        await child.close()

    in_a_loop(run())


def test_a_child_stops_waits_ends_when_idle_and_comes_back(child: Child) -> None:
    async def run() -> None:
        endless = child.ask({"do": "count", "to": 10**9, "each": 0.001}, here)
        first = await anext(endless)
        assert (await anext(endless))["event"] == "piece"
        waits = child.ask({"do": "count", "to": 1}, here)
        waiting = await anext(waits)
        await asyncio.sleep(0)
        await child.stop(waiting["id"])  # of the two it ends this
        assert [event["event"] for event in await all_of(waits)] == ["waiting"]
        assert child.is_busy
        await child.stop(first["id"])
        assert (await all_of(endless))[-1]["said"] > 0
        assert child._process is not None
        process = psutil.Process(child._process.pid)
        await asyncio.sleep(1)
        assert not child.is_running
        assert not process.is_running()
        (_, failed) = await all_of(child.ask({"do": "die"}, here))
        why = "exit code 7; see the page's terminal"
        assert failed["error"] == f"The model's process has ended ({why}). Press Load to start it again."
        assert (await all_of(child.ask({"do": "count", "to": 1}, here)))[-1]["event"] == "done"
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
    places = Places.of([tmp_path / "output"], [tmp_path / "more", tmp_path / "output/run"])
    models, loras = find_models(places)
    assert [str(Path(name).relative_to(tmp_path)) for name in models] == ["output/run/llama", "more/meta"]
    assert [str(Path(name).relative_to(tmp_path)) for name in loras] == ["output/run/answers"]
