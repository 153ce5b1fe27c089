"""Datasets in the browser: buckets as training has them, captions on disk byte for byte, pictures sent and shown."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.web.page import ROOT, WAIT, Server, Tab, expect, post, serve, until

pytestmark = pytest.mark.slow

HTML = '<img src=x onerror="alert(1)">"\'</textarea><script>alert(2)</script> \u202eevil'
NAMES = {  # name -> the bytes of its caption, None for no file
    "plain.png": b"a red square, small",
    "crlf.png": b"a green square, big\r\nsecond line\r\n",
    "mark.png": b"\xef\xbb\xbfa blue square, small\n",
    "wide.png": "a yellow square, small".encode("utf-16"),
    "<img src=x onerror=alert(3)>'\".png": HTML.encode(),
    "turned\u202egnp.png": b"x, small",
    "two\nlines.png": b"y, small",
    "none.png": None,
}
TOML = """[general]
caption_extension = ".txt"
enable_bucket = true
[[datasets]]
resolution = 128
bucket_reso_steps = 16
min_bucket_reso = 64
max_bucket_reso = 256
validation_split = 0.2
  [[datasets.subsets]]
  image_dir = "images"
  num_repeats = 3
"""


def make(folder: Path, captions: dict[str, bytes | None] = NAMES) -> Path:
    """Write a dataset of images of chance sizes; return its TOML."""
    rng = random.Random(5)
    (folder / "images").mkdir(parents=True)
    for n, (name, caption) in enumerate(captions.items()):
        size = rng.randrange(70, 300), rng.randrange(70, 300)
        Image.effect_mandelbrot(size, (-2, -1.5, 1 + n / 9, 1.5), 20).convert("RGB").save(folder / "images" / name)
        if caption is not None:
            caption_of(folder, name).write_bytes(caption)
    (folder / "dataset.toml").write_text(TOML)
    return folder / "dataset.toml"


def caption_of(folder: Path, name: str) -> Path:
    return folder / "images" / f"{name.rpartition('.')[0]}.txt"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "datasets").mkdir()
    shutil.copytree(ROOT / "assets/demo_dataset", folder / "datasets/demo", ignore=shutil.ignore_patterns(".*"))
    with serve(folder) as running:
        yield running


def opened(tab: Tab, toml: Path) -> Any:
    tab.open(f"/data?{urllib.parse.urlencode({'dataset': toml})}")
    expect(tab.page.locator(".picture textarea").first).to_be_visible(timeout=WAIT)
    return tab.page


def area(page: Any, name: str) -> Any:
    """Scroll to an image and return its caption's field."""
    number = [image["name"] for image in look_of(page)["images"]].index(name)
    rows = f"[...document.querySelectorAll('.chunk')].find(c => c.dataset.rows.split(',').includes('{number}'))"
    expect(page.locator(".chunk").first).to_be_attached()
    page.evaluate(f"{rows}.scrollIntoView({{block: 'center'}})")
    return page.get_by_label(f"Caption of {name}", exact=True)


def ask(server: Server, path: str, files: list[tuple[str, bytes]] = (), **fields: str) -> Any:  # type: ignore[assignment]
    """Send a form as a program does, names of files as they are."""
    parts = [(f'form-data; name="{key}"', value.encode()) for key, value in fields.items()]
    parts += [(f'form-data; name="file"; filename="{name}"', data) for name, data in files]
    body = b"".join(b"--X\r\nContent-Disposition: " + h.encode() + b"\r\n\r\n" + data + b"\r\n" for h, data in parts)
    request = urllib.request.Request(server.address + path, body + b"--X--\r\n")
    request.add_header("Content-Type", "multipart/form-data; boundary=X")
    return json.load(urllib.request.urlopen(request))


def look_of(page: Any) -> dict[str, Any]:
    name = page.locator("#grid").get_attribute("data-look")
    jobs = Path(page.locator("#does").get_attribute("data-dataset"))
    state = next(parent for parent in jobs.parents if (parent / "output/.tandem").is_dir())
    found: dict[str, Any] = json.loads((state / "output/.tandem/jobs" / name / "result.json").read_text())
    return found


@pytest.mark.parametrize("which", ["demo", "random"])
def test_buckets_and_crops_are_those_of_training(which: str, server: Server, tab: Tab, size: str) -> None:
    from library.config.schema import DatasetArguments
    from library.data.config import load_dataset_config
    from library.data.samples import scan

    folder = server.folder / "datasets" / (which if which == "demo" else f"random-{size}")
    toml = folder / "dataset.toml" if which == "demo" else make(folder)
    page = opened(tab, toml)
    tab.fits()
    for chunk in page.locator(".chunk").all():
        chunk.scroll_into_view_if_needed()
        expect(chunk.locator(".picture").first).to_be_attached()
    shown = {}
    for n, image in enumerate(look_of(page)["images"]):
        page.locator(f".chunk[data-rows~='{n}'], .chunk").first.wait_for(state="attached")
        shown[image["name"]] = (image["size"], image["box"], image["repeats"])
    samples = scan(load_dataset_config(toml, DatasetArguments(dataset_config=str(toml))), 0, 16)
    expected, buckets = {}, []
    for sample in (*samples.train, *samples.held_out):
        fit = sample.fit
        (wide, high), (left, top), (w, h) = fit.resized, fit.offset, fit.bucket
        expected[sample.identity.split("\n", 1)[1]] = (list(sample.image.size or ()), sample.repeats)
        box = [100 * left / wide, 100 * top / high, 100 * w / wide, 100 * h / high]  # the encoded size is the bucket's
        assert shown[sample.identity.split("\n", 1)[1]][1] == pytest.approx(box)
        buckets.append(f"{w}x{h}")
    assert {name: (value[0], value[2]) for name, value in shown.items()} == expected
    headings = [re.match(r"\d+x\d+", text)[0] for text in page.locator(".bucket").all_inner_texts()]  # type: ignore[index]
    assert sorted(headings) == sorted(set(buckets))
    card = page.locator(".picture", has=page.locator(".crop")).first
    drawn = card.locator(".crop").get_attribute("style")
    left, top, width, height = look_of(page)["images"][int(json.loads(card.get_attribute("hx-vals"))["number"])]["box"]
    assert drawn == f"left:{left}%;top:{top}%;width:{width}%;height:{height}%"


def test_an_edited_caption_keeps_encoding_and_line_ends(server: Server, tab: Tab, size: str) -> None:
    folder = server.folder / "datasets" / f"edit-{size}"
    page = opened(tab, make(folder))
    wanted = {
        "crlf.png": ("a green tree\nsecond line", b"a green tree\r\nsecond line\r\n"),
        "mark.png": ("a blue tree", b"\xef\xbb\xbfa blue tree\n"),
        "wide.png": ("a tree \u00e9", "a tree \u00e9".encode("utf-16")),
        "none.png": ("a new one", b"a new one"),
    }
    for name, (text, data) in wanted.items():
        area(page, name).fill(text)
        area(page, name).press("Control+Enter" if name == "mark.png" else "Shift+Tab")
        expect(page.locator(".picture", has=area(page, name)).locator(".said")).to_have_text("saved")
        assert caption_of(folder, name).read_bytes() == data
    untouched = {n: c for n, c in NAMES.items() if n not in wanted and c is not None}
    assert {n: caption_of(folder, n).read_bytes() for n in untouched} == untouched
    for _ in wanted:
        page.locator("[name='undo']").click()
        expect(page.locator("#message")).to_contain_text("Undone")
        page.locator("#message [data-close]").click()
    assert {n: caption_of(folder, n).read_bytes() for n, c in NAMES.items() if c is not None} == {
        n: c for n, c in NAMES.items() if c is not None
    }
    assert not caption_of(folder, "none.png").exists()
    expect(page.locator("[name='undo']")).to_be_disabled()


def test_tab_goes_to_the_next_caption(server: Server, tab: Tab) -> None:
    page = opened(tab, server.folder / "datasets/demo/dataset.toml")
    names = [image["name"] for image in look_of(page)["images"]]
    area(page, names[0]).focus()
    for name in names[1:4]:
        expect(area(page, name)).to_be_visible()  # its chunk may not have been filled yet
        page.keyboard.press("Tab")
        expect(area(page, name)).to_be_focused()


def test_bulk_undo_redo_and_a_restart(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    folder = tmp_path / "datasets/bulk"
    toml = make(folder)
    before = {n: c for n, c in NAMES.items() if c is not None}
    after = {
        n: c.replace(b"small", rb"\1 tiny") if n != "wide.png" else "a yellow square, \\1 tiny".encode("utf-16")
        for n, c in before.items()
    }
    changed = sum(before[n] != after[n] for n in before)

    def on_disk() -> dict[str, bytes]:
        return {n: caption_of(folder, n).read_bytes() for n in before}

    with serve(tmp_path) as server:
        tab = Tab(browser, server)
        page = opened(tab, toml)
        page.get_by_text("Change many captions").click()
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#message")).to_contain_text("nothing to look for")
        page.get_by_label("Find", exact=True).fill("small")
        page.get_by_label("Replace by").fill(r"\1 tiny")
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#bulk-said")).to_contain_text(f"{changed} of {len(NAMES)} captions change")
        assert on_disk() == before
        page.get_by_role("button", name=f"Change {changed}").click()
        expect(page.locator("#bulk-said")).to_contain_text(f"{changed} captions changed")
        assert on_disk() == after
        page.locator("[name='undo']").click()
        expect(page.locator("#message")).to_contain_text("Undone")
        assert on_disk() == before
        page.locator("[name='redo']").click()
        expect(page.locator("#message")).to_contain_text("Redone")
        assert on_disk() == after
        tab.close()
        server.kill()
    with serve(tmp_path) as server:
        tab = Tab(browser, server)
        page = opened(tab, toml)
        page.locator("[name='undo']").click()
        expect(page.locator("#message")).to_contain_text("Undone")
        assert on_disk() == before
        tab.close()


def test_two_tabs_do_not_overwrite_each_other(server: Server, browser: Any) -> None:
    folder = server.folder / "datasets/tabs"
    toml = make(folder)
    one, other = Tab(browser, server), Tab(browser, server)
    first, second = opened(one, toml), opened(other, toml)
    expect(area(second, "plain.png")).to_have_value("a red square, small")
    area(first, "plain.png").fill("from the first")
    area(first, "plain.png").press("Control+Enter")
    expect(first.locator(".said", has_text="saved")).to_be_visible()
    area(second, "plain.png").fill("from the second")
    area(second, "plain.png").press("Control+Enter")
    expect(second.locator(".said", has_text="changed elsewhere")).to_contain_text("from the second")
    expect(area(second, "plain.png")).to_have_value("from the first")
    assert caption_of(folder, "plain.png").read_bytes() == b"from the first"
    caption_of(folder, "plain.png").write_text("by hand")  # an undo leaves it alone, too
    first.locator("[name='undo']").click()
    expect(first.locator("#message")).to_contain_text("left alone")
    assert caption_of(folder, "plain.png").read_bytes() == b"by hand"
    one.close()
    other.close()


def test_html_of_names_and_captions_is_shown_as_it_is(server: Server, tab: Tab, size: str) -> None:
    folder = server.folder / "datasets" / f"html-{size}"
    page = opened(tab, make(folder))
    name = next(name for name in NAMES if name.startswith("<img"))
    expect(area(page, name)).to_have_value(HTML)
    expect(page.get_by_text(name, exact=True).first).to_be_visible()
    area(page, name).fill(f"{HTML}!")
    area(page, name).press("Control+Enter")
    expect(page.locator(".said", has_text="saved")).to_be_visible()
    assert caption_of(folder, name).read_text() == f"{HTML}!"
    page.get_by_label("Search captions and names").fill("ONERROR")
    expect(page.locator("#grid .note").first).to_have_text(f"1 of {len(NAMES)} images")
    page.locator("summary", has_text="Change many captions").click()
    page.get_by_label("Find", exact=True).fill("onerror")
    page.get_by_label("Replace by").fill("<b onclick=alert(4)>")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("#bulk-said ins")).to_have_text(f"{HTML}!".replace("onerror", "<b onclick=alert(4)>"))
    assert page.locator("script:not([src]), [onerror], [onclick]").count() == 0
    tab.fits()


def test_uploaded_names_stay_in_the_folder_and_overwrite_nothing(server: Server, browser: Any, size: str) -> None:
    tab = Tab(browser, server, size)
    tab.open("/data")
    tab.fits()
    page, png = tab.page, io.BytesIO()
    Image.new("RGB", (90, 80), "red").save(png, "PNG")
    files = [{"name": f"{n}.png", "mimeType": "image/png", "buffer": png.getvalue()} for n in "ab"]
    page.locator("#new [type=file]").set_input_files([*files, {"name": "a.txt", "mimeType": "text/plain",
                                                               "buffer": b"a red square"}])  # fmt: skip
    page.get_by_label("Name", exact=True).fill(f"sent {size}")
    page.get_by_label("Resolution").fill("64")
    page.get_by_label("Trigger word").fill("ohwx")
    page.get_by_role("button", name="Make dataset").click()
    expect(page.locator(".picture textarea")).to_have_count(2)
    page.locator("summary", has_text="dataset.toml").click()
    expect(page.get_by_label("dataset.toml")).to_have_value(re.compile("resolution = 64\nbatch_size = 1\n"))
    tab.close()
    folder = server.folder / "datasets" / f"sent {size}"
    assert (folder / "images/a.png").read_bytes() == png.getvalue()
    kept = {path.relative_to(server.folder) for path in server.folder.rglob("*") if ".tandem" not in str(path)}
    bad = ["../../x.png", "..\\x.png", "/tmp/x.png", "a.png.exe", "a.png", "b.PNG", "b.PNG", ".h.png", "con.png", ""]
    toml = str(folder / "dataset.toml")
    refused = [ask(server, "/data/upload", [(name, b"other")], dataset=toml)["refused"] for name in bad]
    assert [name for name, why in zip(bad, refused, strict=True) if not why] == ["b.PNG"]  # the first
    now = {path.relative_to(server.folder) for path in server.folder.rglob("*") if ".tandem" not in str(path)}
    assert {str(path) for path in now - kept} == {f"datasets/sent {size}/images/b.PNG"}
    assert (folder / "images/a.png").read_bytes() == png.getvalue()
    for wrong in ("../x", "a/b", "con", ".x", ""):
        with pytest.raises(urllib.error.HTTPError, match="422"):
            ask(server, "/data/new", name=wrong, resolution="64")


def test_what_links_lead_out_of_the_folders_is_not_shown(server: Server, tab: Tab, tmp_path: Path) -> None:
    folder = server.folder / "datasets/links"
    toml = make(folder, {"a.png": b"inside", "b.png": b"inside too", "c.png": None})
    Image.new("RGB", (100, 100)).save(tmp_path / "secret.png")
    (tmp_path / "secret.txt").write_text("a secret text")
    (folder / "images/d.png").symlink_to(tmp_path / "secret.png")
    (folder / "images/c.txt").symlink_to(tmp_path / "secret.txt")
    page = opened(tab, toml)
    expect(page.locator(".frame", has_text="lies outside")).to_have_count(1)
    assert "a secret text" not in page.content()
    expect(area(page, "c.png")).to_have_attribute("readonly", "")
    look, images = page.locator("#grid").get_attribute("data-look"), look_of(page)["images"]
    (secret,) = [number for number, image in enumerate(images) if image["name"] == "d.png"]
    assert images[secret]["thumbnail"]  # the look, which knows nothing of the page's folders, has made it
    for name in (f"{secret}", f"{secret}_0"):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{server.address}/data/picture?look={look}&name={name}")
    toml.write_text(TOML.replace('"images"', f'"{tmp_path}"'))
    page.get_by_role("button", name="Look again").click()
    expect(page.locator("#message")).to_contain_text("lies outside of")


def test_the_toml_is_refused_in_the_trainers_words(server: Server, tab: Tab) -> None:
    toml = make(server.folder / "datasets/toml")
    page = opened(tab, toml)
    page.locator("summary", has_text="dataset.toml").click()
    page.get_by_label("dataset.toml").fill(TOML.replace("num_repeats", "num_repeat"))
    page.get_by_role("button", name="Save and look again").click()
    expect(page.locator("#state")).to_contain_text("num_repeats")  # did you mean
    page.locator("[name='undo']").click()
    expect(page.locator("#message")).to_contain_text("Undone")
    assert toml.read_text() == TOML


def test_a_refused_split_hides_no_images_and_a_changed_toml_is_said(server: Server, tab: Tab) -> None:
    toml = make(server.folder / "datasets/split", {"a.png": b"one", "b.png": b"two"})  # 0.2 of two images is none
    page = opened(tab, toml)
    expect(page.locator(".message.bad")).to_contain_text("validation_split 0.2 holds out none")
    expect(page.locator(".bucket", has_text="seen an epoch")).not_to_have_count(0)
    expect(page.locator(".picture")).to_have_count(2)
    toml.write_text(TOML.replace("validation_split = 0.2\n", ""))
    tab.open(page.url.removeprefix(server.address))
    expect(page.locator(".message.warn")).to_contain_text("look again")
    page.get_by_role("button", name="Look again").click()
    expect(page.locator(".message")).to_have_count(0)


def test_pictures_come_where_the_script_is_late(server: Server, tab: Tab) -> None:
    toml = make(server.folder / "datasets/late", {"a.png": b"one", "b.png": b"two"})

    def late(route: Any) -> None:
        tab.page.wait_for_timeout(1500)  # htmx has asked for the grid by then
        route.continue_()

    tab.page.route("**/static/data.js", late)
    page = opened(tab, toml)
    expect(page.locator(".picture")).to_have_count(2)


def test_paths_of_a_toml_are_seen_from_it_as_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from library.files import read_toml
    from library.web.access import AllowedRoots, Refused
    from library.web.data import refuse_outside
    from library.web.site import Site

    (tmp_path / "sets/deep").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    site = Site.of(AllowedRoots.of([tmp_path / "output"], [tmp_path / "sets"]))
    toml = tmp_path / "sets/deep/dataset.toml"
    toml.write_text('[general]\nimage_dir = "../images"')  # outside only as seen from the working directory
    refuse_outside(site, toml, read_toml(toml)[0])
    toml.write_text('[general]\nimage_dir = "../../images"')
    with pytest.raises(Refused):
        refuse_outside(site, toml, read_toml(toml)[0])
    for said in ({"reg_data_dir": "/elsewhere"}, {"datasets": [{"subsets": [{"in_json": "~/x.json"}]}]}):
        with pytest.raises(Refused):
            refuse_outside(site, toml, said)
    (tmp_path / "here/images").mkdir()
    toml.write_text('[general]\nimage_dir = "images"')  # which training finds in the working directory
    with pytest.raises(Refused):
        refuse_outside(site, toml, read_toml(toml)[0])


def test_a_card_shows_the_picture_that_the_look_made(server: Server, tab: Tab) -> None:
    folder = server.folder / "datasets/pictures"
    toml = make(folder, {"a.png": b"one", "b.png": b"two", "c.png": b"three"})
    (folder / "images/c.png").write_bytes((folder / "images/c.png").read_bytes()[:60])
    page = opened(tab, toml)
    expect(page.locator(".picture")).to_have_count(3)
    until(lambda: page.evaluate("[...document.querySelectorAll('.picture img')].every(i => i.naturalWidth > 0)"))
    assert page.locator(".picture img").count() == 2
    expect(page.locator(".picture", has_text="No image").locator(".name")).to_have_text("c.png")
    look = page.locator("#grid").get_attribute("data-look")
    shown = [image["thumbnail"] for image in look_of(page)["images"]]
    assert [name is None for name in shown] == [False, False, True]
    for number, status in ((2, 404), (3, 422), ("0_0", 404), ("0_0/../../x", 422), ("../x", 422), ("", 422)):
        with pytest.raises(urllib.error.HTTPError, match=str(status)):
            urllib.request.urlopen(f"{server.address}/data/picture?look={look}&name={number}")
    with urllib.request.urlopen(f"{server.address}/data/picture?look={look}&name=0") as answer:
        assert "immutable" in answer.headers["cache-control"]
        assert Image.open(io.BytesIO(answer.read())).format == "JPEG"
    (kept,) = {path.parent for path in (server.output / ".tandem/thumbs").glob(f"*/{shown[0]}")}
    assert {path.name for path in kept.iterdir()} == set(shown[:2])


def photos() -> dict[str, bytes]:
    """Return what people drop: names and contents, good, odd and broken."""

    def saved(kind: str, size: tuple[int, int] = (256, 256), mode: str = "RGB", **how: Any) -> bytes:
        data = io.BytesIO()
        Image.effect_mandelbrot(size, (-2, -1.5, 1, 1.5), 20).convert("RGB").convert(mode).save(data, kind, **how)
        return data.getvalue()

    lying = Image.Exif()
    lying[0x112] = 6
    good = {f"{n}.jpg": saved("JPEG", (256, 250 + n)) for n in range(5)}
    odd = {"turned.JPG": saved("JPEG", (384, 192), exif=lying), "tiny.png": saved("PNG", (20, 40)),
           "clear.png": saved("PNG", mode="RGBA"), "print.jpg": saved("JPEG", mode="CMYK"), "anim.gif": saved("GIF"),
           "copy.jpg": good["1.jpg"], "4.png": saved("PNG", (384, 192))}  # fmt: skip
    bad = {"cut.jpg": good["0.jpg"][:2000], "words.png": b"no image", "empty.webp": b""}
    texts = {"1.txt": b"a red square", "4.txt": b"one text for two", "2.txt": b" \n"}
    return good | odd | bad | texts | {"IMG_1.HEIC": b"\0\0\0\x18ftypheic", "notes.pdf": b"%PDF"}


def test_dropped_photos_are_taken_or_named_and_deleted_ones_come_back(server: Server, tab: Tab) -> None:
    page, folder, sent = tab.page, server.folder / "datasets/dropped", photos()
    tab.open("/data")
    files = [{"name": name, "mimeType": "", "buffer": data} for name, data in sent.items()]
    page.locator("#new [type=file]").set_input_files(files)
    page.get_by_label("Name", exact=True).fill("dropped")
    page.get_by_label("Resolution").fill("256")
    page.get_by_role("button", name="Make dataset").click()
    expect(page.locator(".picture").first).to_be_visible()
    refused = {line.partition(": ")[0] for line in page.locator("#message p").all_inner_texts()}
    assert refused == {"2.txt", "IMG_1.HEIC", "notes.pdf"}  # still said when the look has come
    images = folder / "images"

    def names() -> set[str]:
        return {path.name for path in images.iterdir()} - {".tandem_cache"}

    assert names() == sent.keys() - refused
    said = {"cut.jpg": "broken", "words.png": "broken", "empty.webp": "broken", "tiny.png": "too small",
            "copy.jpg": "duplicate of 1.jpg", "turned.JPG": "turned upright (EXIF)", "3.jpg": "no caption",
            "4.png": "same caption as 4.jpg"}  # fmt: skip
    for name, words in said.items():  # each on the card of its image
        expect(page.locator(".picture", has=area(page, name)).locator(".facts")).to_contain_text(words)
    expect(page.locator(".picture", has=area(page, "cut.jpg")).locator(".frame")).to_contain_text("truncated")
    small = [one.bounding_box()["y"] for one in page.locator(".in-bucket:has(.chunk:only-of-type)").all()]
    assert len(set(small)) < len(small), "buckets of few images share a row"
    page.get_by_role("button", name="Delete these 3").click()
    expect(page.locator(".finding", has_text="Unreadable")).to_have_count(0)
    assert names() == sent.keys() - refused - {"cut.jpg", "words.png", "empty.webp"}
    for name in ("4.png", "1.jpg"):
        area(page, name).scroll_into_view_if_needed()
        page.get_by_label(f"Select {name}").check()
    page.locator("[data-delete]").click()
    expect(page.locator(".finding", has_text="The same file twice")).to_have_count(0)
    assert {"4.txt", "4.jpg"} <= names()  # the text is that of another image too
    assert not {"4.png", "1.jpg", "1.txt"} & names()
    expect(page.locator("#state progress")).to_have_count(0)
    page.get_by_label("Search captions and names").fill("print.j")
    page.get_by_role("button", name="Delete this one").click()
    expect(page.locator("[name='undo']")).to_have_attribute("title", "deletion of 1 image")
    assert "print.jpg" not in names()
    for next_undo in ("deletion of 2 images", "deletion of 3 images", ""):
        expect(page.locator("#state progress")).to_have_count(0)  # which loads the screen anew
        expect(page.locator(".picture").first).to_be_visible()
        page.locator("[name='undo']").click()
        expect(page.locator("[name='undo']")).to_have_attribute("title", next_undo)
    assert {name: (images / name).read_bytes() for name in names()} == {n: sent[n] for n in sent.keys() - refused}
    page.set_viewport_size({"width": 390, "height": 844})
    tab.fits()
    page.get_by_role("button", name="Rename or delete").click()
    expect(page.locator("#change")).to_contain_text("with all images")
    page.get_by_label("New name").fill("renamed")
    page.get_by_role("button", name="Rename", exact=True).click()
    expect(page.locator("h1")).to_have_text("renamed")
    expect(page.locator(".picture").first).to_be_visible()
    assert not folder.exists()
    page.get_by_role("button", name="Rename or delete").click()
    page.get_by_role("button", name="Move the folder to the trash").click()
    expect(page.locator("h1")).to_have_text("Data")
    assert not (server.folder / "datasets/renamed").exists()
    page.goto(f"{server.address}/trash")
    page.get_by_role("button", name="Restore").first.click()
    expect(page.get_by_text("The trash is empty")).to_be_visible()
    assert (server.folder / "datasets/renamed/images/1.txt").read_bytes() == sent["1.txt"]


def test_a_dataset_over_a_folder_of_ones_own_loses_its_toml_alone(server: Server) -> None:
    toml = make(server.folder / "datasets/mine", {"a.png": b"one"})
    toml.write_text(TOML.replace('"images"', '"../mine/images"'))
    post(server, "/data/change", dataset=str(toml), what="rename", name="other")
    assert toml.with_name("other.toml").exists()
    for name in ("../x", "other", ".x", ""):
        assert (
            post(server, "/data/change", dataset=str(toml.with_name("other.toml")), what="rename", name=name)[0] == 422
        )
    assert post(server, "/data/change", dataset=str(toml.with_name("other.toml")), what="delete")[0] == 204
    assert [path.name for path in toml.parent.iterdir()] == ["images"]
