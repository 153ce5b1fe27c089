"""The report's page, of a report made by hand: a model of 500 layers, images with masks, names that are HTML."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor

from library.data.batches import Batch
from library.data.cache import Pixels
from library.fidelity.border import STEP_8BIT, judge_border
from library.fidelity.comparison import Comparison
from library.fidelity.differences import Differences
from library.fidelity.figures import picture_rows
from library.fidelity.findings import Finding
from library.fidelity.intervals import Share
from library.fidelity.layers import LayerRow
from library.fidelity.page import write_report
from library.fidelity.remedies import Remedy, in_order
from library.fidelity.report import Report
from library.fidelity.runs import EvalSet, Outcome
from library.fidelity.server_image import Description, ServerResult
from library.fidelity.tensors import TensorRow
from library.fidelity.verdict import Attribution, Verdict
from tools.precision_report import parser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = '<script>alert("x")</script> & "more"'
LAYERS, IMAGES, SIZE = 500, 3, 128


def layer(number: int) -> LayerRow:
    error = (number * 37 % LAYERS) / 1000  # every error once, in no order
    name = EVIL if number == 3 else f"transformer_blocks.{number}.attn.to_q"
    return LayerRow(name, "e4m3fn row", 4096, error, error, False, "", None, None, None, 1.0, 9.0)


def images(seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.rand(3, SIZE, SIZE, generator=random) - 0.5 for _ in range(IMAGES)]


def differences(masks: bool, errors: list[Tensor]) -> Differences:
    filled = [mask() for error in errors] if masks else []
    border = judge_border(errors[: len(filled)], images(9)[: len(filled)], filled)
    return Differences(0.03, 0.04, 0.05, border)


def mask() -> Tensor:
    filled = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    filled[32:96, 32:96] = True
    return filled


def make(masks: bool = True, steps: int = 4, error: float = 0.01) -> Report:
    """Return a report of ``IMAGES`` samples; without ``steps`` nothing was sampled."""
    shape = (1, 16, 16, 16)
    batch = Batch(torch.zeros(shape), {}, torch.ones(1), None, [1])
    drawn = mask()[None].float() if masks else None
    pixels = [Pixels(torch.zeros(3, SIZE, SIZE), drawn)] * IMAGES
    eval_set = EvalSet([batch] * IMAGES, pixels, [], "fill", (0.2, 0.8), steps, 1.0, 0)
    ours = images(1) if steps else []
    theirs = [image + error for image in ours]
    full = differences(masks and bool(steps), [b - a for a, b in zip(ours, theirs, strict=True)])
    finding = Finding("ruined_layer", 0.9, (EVIL,), f"{EVIL} differs")
    verdict = Verdict((finding, Finding("vae", 0.01, (), "little")), full.border, None)
    tensors = [TensorRow(EVIL, "bias", "bfloat16", 64, 1.0, fault="ruined_layer", diagnosis="zeroed")]
    rows = Comparison([layer(number) for number in range(LAYERS)], tensors, (finding,), 1.0, {})
    causes = [Attribution("weights", "cast", full, full), Attribution("vae", EVIL, full, full)]
    return Report(f"{EVIL}, served as cast", {"deployment": EVIL}, verdict, full, causes, rows,
                  Outcome(images=ours), Outcome(images=theirs), eval_set)  # fmt: skip


def page(report: Report, folder: Path) -> str:
    write_report(report, folder)
    return (folder / "report.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Collects tags with their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_one_file_with_every_layer_and_runs_no_name(tmp_path: Path) -> None:
    text = page(make(), tmp_path)
    read = Tags(text)
    tags = read.tags
    shown = [attributes for tag, attributes in tags if tag == "img"]
    assert len(shown) == 1  # pictures
    assert all(each["alt"] and re.match(r"data:image/png;base64,[\w+/]{200}", each["src"] or "") for each in shown)
    assert not any({"href", "srcset"} & set(attributes) or tag in ("link", "iframe") for tag, attributes in tags)
    assert not [tag for tag, attributes in tags if tag != "img" and "src" in attributes]
    assert "url(" not in text
    assert "http" not in text.replace(json.dumps(EVIL), "")
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json"}
    assert len([tag for tag, _ in read.tags if tag == "script"]) == 1  # the page's own
    assert sum(EVIL in text for text in read.text) >= 6  # title, verdict, finding, layer, tensor, setting
    assert {layer(number).name for number in range(LAYERS)} <= set(read.text)


@pytest.mark.parametrize(
    ("masks", "steps", "absent"),
    [
        (False, 4, ["Along the mask", "The border"]),
        (True, 0, ["Along the mask", "Pictures"]),
        (False, 0, ["Along the mask", "The border", "Pictures"]),
    ],
)
def test_what_was_not_measured_is_not_on_the_page(masks: bool, steps: int, absent: list[str], tmp_path: Path) -> None:
    text = page(make(masks, steps), tmp_path)
    assert not [words for words in absent if words in text]
    assert "nan" not in "".join(Tags(text).text).lower().split()


def test_all_differences_share_one_scale_on_which_the_invisible_is_dark() -> None:
    report = make(error=0.5 * STEP_8BIT)
    report.deployed.images[0][:, 0, 0] += 100 * STEP_8BIT
    figure = picture_rows(report.reference.images, {"served": report.deployed.images}, report.eval_set.border_mask)
    assert figure is not None
    scales = {axis.images[0].get_clim() for axis in figure.axes if axis.images and axis.images[0].get_array().ndim == 2}
    assert scales == {(0, 16)}
    louder = make(error=40 * STEP_8BIT)
    figure = picture_rows(louder.reference.images, {"served": louder.deployed.images, "after": louder.reference.images})
    assert figure is not None
    scales = {
        axis.images[0].get_clim()[1] for axis in figure.axes if axis.images and axis.images[0].get_array().ndim == 2
    }
    assert len(scales) == 1
    assert scales.pop() == pytest.approx(40, abs=0.1)


def test_the_view_of_the_border_shows_where_the_difference_along_it_is_largest() -> None:
    report = make()
    report.deployed.images[1][:, 92:98, 60:66] += 0.3  # on the lower side of the mask
    report.deployed.images[1][:, :6, :6] += 2  # far from the border
    figure = picture_rows(report.reference.images, {"served": report.deployed.images}, report.eval_set.border_mask)
    assert figure is not None
    views = [axis.images[0].get_array() for axis in figure.axes if axis.images and axis.images[0].get_array().ndim == 2]
    zoomed = views[3]  # whole, border, whole, border
    assert zoomed.shape == (64, 64)
    assert zoomed.max() == pytest.approx((0.3 + 0.01) / STEP_8BIT, rel=0.01)


def test_kinds_of_rounding_come_by_their_share_and_flags_that_were_not_given_by_place() -> None:
    parts = Finding("merge", 0.74, (), "by the merge"), Finding("weights", 0.26, (), "by the file")
    found = replace(make(), verdict=Verdict(parts, None, None)).sections()
    assert [re.findall(r"[\d.]+%", line) for line in found["How we know"]] == [["74.0%"], ["26.0%"]]
    assert "eep the LoRA beside the weights" in found["What to do first"][0]
    refit, bypass = (Remedy(text, takes_off=Share(part)) for text, part in (("Refit it.", 0.26), ("Bypass.", 0.74)))
    best = replace(make(), verdict=Verdict(parts, None, None), remedies=in_order([refit, bypass], "merge")).sections()
    assert best["What to do first"][0].endswith("Bypass. It takes off 74% of the error.")
    assert best["What else helps"] == ["Refit it. It takes off 26% of the error."]
    assert "What else was found" not in found
    lines = found["Not looked at"]
    assert lines[1].startswith("Picture and mask: mask invert, mask grow, mask snap, mask blur, blank")
    assert "(--mask_invert, --mask_grow, --mask_snap, --mask_blur, --blank" in lines[1]
    assert "Text encoders and VAE: text (--deploy_text_dtype)." in lines  # the VAE is one of the report's causes
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    assert {*re.findall(r"--\w+", " ".join(lines))} <= flags


def test_a_picture_of_the_server_is_asked_for_only_where_none_was_given(tmp_path: Path) -> None:
    report = make()
    assert report.full.border
    loud = replace(report.full.border.figures[0], times=30.0, low=20.0, high=45.0)
    border = replace(report.full.border, figures=(loud, *report.full.border.figures[1:]), ring_error=5.0)
    assert border.state == "worse"
    report = replace(report, verdict=replace(report.verdict, border=border), full=replace(report.full, border=border))
    grown = Description(({"mask_grow": 4},), 1.0, explained=0.98, images=(images(2)[0],))
    reference = Description(distance=5.0, images=(images(1)[0],))
    server = ServerResult(("a.png",), 4, (images(3)[0],), reference, (grown,), parts=(0.98,))
    asked, painted = "--server_image", "mask grown by 4 px"
    for given in (report, replace(report, server=server)):
        text = page(given, tmp_path)
        words = " ".join(json.loads((tmp_path / "report.json").read_text())["verdict"]["words"])
        assert "No single cause puts it there" in text
        assert (asked in text, asked in words, painted in text) == (
            (False, False, True) if given.server else (True, True, False)
        )


def dump_dom(path: Path) -> str:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout  # type: ignore[arg-type]


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine")
def test_a_click_on_a_heading_sorts_the_layers_and_the_page_fits_a_phone(tmp_path: Path) -> None:
    page(make(), tmp_path)
    script = """
    const found = {}, table = frame.contentDocument.querySelector("#layers table");
    const click = name => [...table.querySelectorAll("th button")].find(each => each.textContent === name).click();
    const state = name => ({ first: table.tBodies[0].rows[0].cells[0].textContent, rows: table.tBodies[0].rows.length,
      sort: [...table.querySelectorAll("th[aria-sort]")].map(each => each.textContent + " " + each.ariaSort) });
    for (const [name, heading] of [["a", "of rounding"], ["b", "of rounding"], ["c", "layer"], ["d", "#"]]) {
      click(heading); found[name] = state();
    }
    const input = frame.contentDocument.querySelector("[data-filters=layers]");
    input.value = "blocks.49"; input.dispatchEvent(new Event("input"));
    found.left = [...table.tBodies[0].rows].filter(row => row.checkVisibility()).length;
    const root = frame.contentDocument.documentElement;
    found.words = frame.contentDocument.body.innerText;
    found.overflow = root.scrollWidth - root.clientWidth;
    out.textContent = JSON.stringify(found);
    """
    outer = tmp_path / "phone.html"
    outer.write_text(
        '<pre id="out"></pre><iframe id="frame" src="report.html#on-screen" width="390" height="800" style="border:0">'
        "</iframe>"
        f'<script>const frame = document.querySelector("#frame"), out = document.querySelector("#out");'
        f'frame.addEventListener("load", () => {{ {script} }})</script>'
    )
    found = json.loads(re.search(r'<pre id="out">(.*?)</pre>', dump_dom(outer), re.S)[1])  # type: ignore[index]
    by_error = sorted(range(LAYERS), key=lambda number: layer(number).expected_output_error)
    assert found["a"] == {"first": layer(by_error[-1]).name, "rows": LAYERS, "sort": ["of rounding descending"]}
    assert found["b"]["first"] == layer(by_error[0]).name
    assert found["b"]["sort"] == ["of rounding ascending"]
    assert found["c"]["first"].replace("&lt;", "<").replace("&gt;", ">").startswith("<script>")
    assert found["d"]["first"] == f"transformer_blocks.{LAYERS - 1}.attn.to_q"
    assert found["left"] == 11  # 49, 490 to 499
    assert found["overflow"] == 0
    assert "Text encoders and VAE: text" in found["words"]
    assert not re.search(r"tools/\w+\.py|--\w", found["words"])  # the page has buttons instead of commands
