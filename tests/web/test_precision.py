"""The report, and the files that its remedies make, from the browser."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.web.page import ROOT, Server, Tab, expect
from tests.web.test_generate import lora_server  # noqa: F401  (the fixture)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(browser: Any, server: Server) -> str:
    """Run a report from the form; return its address."""
    tab = Tab(browser, server)
    tab.open("/precision")
    tab.page.get_by_label("LoRA", exact=True).fill("output/zorbo/zorbo.safetensors")
    tab.page.get_by_role("button", name="Choose").click()
    tab.page.get_by_text("More", exact=True).click()
    tab.page.get_by_label("Images").fill("1")
    tab.page.get_by_label("Sampling steps").fill("2")
    tab.page.get_by_role("button", name="Run the report").click()
    tab.page.wait_for_url("**job=*")
    expect(tab.page.locator("iframe.report")).to_be_visible()
    address = tab.page.url.removeprefix(server.address)
    tab.close()
    return address


def measured(server: Server, report: str) -> dict[str, Any]:
    job = report.rpartition("=")[2]
    return json.loads((server.output / ".tandem/jobs" / job / "report/report.json").read_text())


def test_the_verdict_is_the_reports(tab: Tab, server: Server, size: str, report: str) -> None:
    tab.open(report)
    found = measured(server, report)
    shown = tab.page.frame_locator("iframe.report")
    verdict = shown.locator(".verdict")
    assert not found["verdict"]["alarm"]
    assert "alarm" not in verdict.get_attribute("class").split()
    expect(verdict).to_contain_text("Nothing is broken")
    expect(verdict).to_contain_text(f"{found['deployment']['image']:.2%}")
    expect(shown.locator("h1")).to_have_text(found["title"])
    worst = max(found["layers"], key=lambda row: row["output_error"])
    expect(shown.locator("body")).to_contain_text(worst["name"])
    expect(tab.page.locator(".remedies > li")).to_have_count(len(found["remedies"]))
    tab.fits()
    with tab.context.expect_page() as opened:
        tab.page.get_by_role("link", name="In a window of its own").click()
    expect(opened.value.locator("h1")).to_have_text(found["title"])


def test_a_remedy_makes_a_new_file_each_time_and_is_measured(tab: Tab, server: Server, report: str) -> None:
    tab.open(report)
    number = next(i for i, each in enumerate(measured(server, report)["remedies"]) if each["name"] == "refitted")
    remedy = tab.page.locator(".remedies > li").nth(number)
    original = (server.output / "zorbo/zorbo.safetensors").read_bytes()
    for number in (1, 2):
        remedy.get_by_role("button", name="Refit the LoRA").click()
        expect(remedy.locator(".made > b")).to_have_count(number)
    made = ["zorbo-refitted.safetensors", "zorbo-refitted-2.safetensors"]
    assert remedy.locator(".made > b").all_inner_texts() == made
    remedy.get_by_role("button", name="Stop").last.click()
    expect(remedy.locator("code")).to_have_text(["output/zorbo/zorbo-refitted.safetensors"])
    assert (server.output / "zorbo/zorbo.safetensors").read_bytes() == original
    words = [sys.executable, str(ROOT / "tools/inspect_model.py"), str(server.output / "zorbo" / made[0])]
    read = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    assert "LoRA" in read.stdout
    remedy.get_by_role("button", name="Measure again with it").first.click()
    before, result = measured(server, report), tab.page.locator("#result")
    expect(result).to_contain_text(f"before, it was {100 * before['deployment']['image']:.2f} %")
    after = measured(server, tab.page.url)
    expect(result).to_contain_text(f"{100 * after['deployment']['image']:.2f} %")
    assert after["deployment"]["image"] < before["deployment"]["image"]


def test_what_a_remedy_made_is_found_among_what_it_needed(tmp_path: Path) -> None:
    from library.web.precision import _made

    for name in ("fix/fixes/refitted.safetensors", "fix/fixes/taught_refitted/taught.safetensors",
                 "fix/fixes/taught_refitted/teacher/0/1/cached.safetensors", "int8/config.json"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in _made(tmp_path / "fix")] == ["refitted.safetensors", "taught.safetensors"]
    assert _made(tmp_path / "int8") == [tmp_path / "int8"]
    assert _made(tmp_path / "not_there") == []


def test_loras_of_language_models_are_left_out(tmp_path: Path) -> None:
    from library.web.access import AllowedRoots
    from library.web.loras import weights_in
    from library.web.site import Site

    def write(name: str, header: dict[str, Any]) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = json.dumps(header).encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text)

    key = {"model.layers.0.q_proj.lora_A.weight": {}}
    write("output/flux.safetensors", {"blocks.0.lora_A.weight": {}, "__metadata__": {"ss_network_dim": "4"}})
    write("output/base.safetensors", {"blocks.0.weight": {}})
    write("output/stated.safetensors", key | {"__metadata__": {"config": json.dumps({"task_type": "CAUSAL_LM"})}})
    write("peft/adapter_model.safetensors", key)
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps({"task_type": "CAUSAL_LM"}))
    found = weights_in(Site.of(AllowedRoots.of([tmp_path / "output"], [tmp_path / "peft"])))
    assert [Path(path).name for path in found["lora"]] == ["flux.safetensors"]
    assert [Path(path).name for path in found["model"]] == ["base.safetensors"]
