"""The trash: what goes in comes back byte for byte; what a run uses, or is not the page's, stays where it is."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the page's packages are not installed (make setup-web)")
from starlette.datastructures import FormData
from starlette.requests import Request

from library.config.edit import read as read_config
from library.errors import UserError
from library.folder_lock import FolderLock
from library.training.report.run_folder import Checkpoint, checkpoints_of, chosen_of, name_to_keep
from library.web import generate
from library.web.access import AllowedRoots
from library.web.data import change_dataset
from library.web.jobs import Job, Jobs
from library.web.new_run import _train_on
from library.web.site import Site
from library.web.trash import delete, keep, rename_run, restore, trash, trashed
from tests.web.page import ROOT, Tab, expect, serve, until
from tests.web.test_runs import add_run

LETTERS = st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",))
NAMES = st.text(LETTERS, min_size=1, max_size=40).filter(
    lambda name: name not in (".", "..", ".tandem") and len(name.encode()) < 250
)
TREES = st.recursive(st.binary(max_size=30), lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=8)
Tree = bytes | dict[str, "Tree"]


def write(path: Path, tree: Tree) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, inner in tree.items():
        write(path / name, inner)


def read(path: Path) -> Tree:
    return path.read_bytes() if path.is_file() else {each.name: read(each) for each in path.iterdir()}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.of(AllowedRoots.of([tmp_path / "output"], [tmp_path]))


def another_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be renamed into or out of the trash, as among two disks."""

    def rename(source: Path, target: Path) -> None:
        if (".tandem" in source.parts) != (".tandem" in target.parts):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        source.rename(target)

    monkeypatch.setattr("library.web.trash.rename", rename)


@pytest.mark.parametrize("disks", [1, 2])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees=st.dictionaries(NAMES, TREES, min_size=1, max_size=3))
def test_what_is_deleted_comes_back(
    trees: dict[str, Tree], disks: int, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = site.roots.outputs[0] / "some" / "datä"
    shutil.rmtree(place.parent, ignore_errors=True)
    place.mkdir(parents=True)
    for name, tree in trees.items():
        write(place / name, tree)
    before = read(place)
    with monkeypatch.context() as patched:
        if disks == 2:
            another_disk(patched)
        found = trash(site, *(place / name for name in trees))
        assert read(place) == {}
        assert [each.folder for each in trashed(site)] == [found.folder]
        assert sorted(path.name for _, path in found.kept) == sorted(trees)
        # nothing is written over what has the name meanwhile, and all stays in the trash
        taken = place / next(iter(trees))
        taken.write_text("new")
        with pytest.raises(UserError, match="another one has this name"):
            restore(site, found.folder.name)
        assert (read(place), len(trashed(site)[0].kept)) == ({taken.name: b"new"}, len(trees))
        taken.unlink()
        shutil.rmtree(place.parent)
        restore(site, found.folder.name)
    assert read(place) == before
    assert trashed(site) == []


def test_a_copy_to_another_disk_that_fails_loses_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site.roots.outputs[0] / "run"
    write(folder, {"one": b"1", "inner": {"two": b"2"}})
    os.mkfifo(folder / "inner/pipe")  # cannot be copied
    another_disk(monkeypatch)
    with pytest.raises((OSError, UserError)):
        trash(site, folder)
    assert (folder / "one").read_bytes() + (folder / "inner/two").read_bytes() == b"12"
    assert trashed(site) == []


def test_a_link_is_moved_and_not_what_it_leads_to(site: Site, tmp_path: Path) -> None:
    write(tmp_path / "photos", {"a.png": b"a"})
    link = site.roots.outputs[0] / "photos"
    link.symlink_to(tmp_path / "photos")
    found = trash(site, link)
    assert (os.path.lexists(link), read(tmp_path / "photos")) == (False, {"a.png": b"a"})
    restore(site, found.folder.name)
    assert link.readlink() == tmp_path / "photos"


def _held(site: Site, run: Path) -> FolderLock:
    lock = FolderLock(run, "it")
    lock.acquire()
    return lock  # which is given back with the last reference to it


def _waits(site: Site, run: Path) -> Job:
    site.jobs.begin = lambda name=None: None  # type: ignore[method-assign]
    return site.jobs.add("train", "it", ["-c", "pass"], queued=True, output=str(run))


@pytest.mark.parametrize("uses", [_held, _waits])
def test_a_folder_that_a_run_uses_stays(uses: Callable[[Site, Path], object], site: Site) -> None:
    run = site.roots.outputs[0] / "many/run"
    for place in ("samples", "it-state"):
        (run / place).mkdir(parents=True)
    kept = uses(site, run)
    for path in (run, run.parent, run / "it-state"):
        with pytest.raises(UserError, match="running or waiting run uses"):
            trash(site, path)
        assert path.is_dir()
    (run / "old.safetensors").write_text("")
    trash(site, run / "old.safetensors")  # a file alone may go
    del kept


def test_what_the_page_needs_or_was_not_given_stays(site: Site, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (tmp_path / "way").symlink_to(outside)
    (outside / "a").write_text("a")
    output = site.roots.outputs[0]
    (output / ".tandem").mkdir(exist_ok=True)
    for path in (tmp_path, output, output / ".tandem", output / ".tandem/jobs", tmp_path / "way/a", outside,
                 output / "x/..", output / "nothing", Path("/"), Path()):  # fmt: skip
        with pytest.raises(UserError):
            trash(site, path)
    assert (outside / "a").read_text() == "a"
    with pytest.raises(UserError):
        restore(site, "../../outside")


def test_what_images_wait_to_be_made_with_stays(site: Site) -> None:
    run = _saved_run(site, "r")
    site.jobs.begin = lambda name=None: None  # type: ignore[method-assign]
    words = [
        "tools/generate.py",
        "grid",
        "--run",
        os.path.relpath(run),
        "--lora",
        str(run / "a-step00000002.safetensors"),
    ]
    job = site.jobs.add("generate", "a grid", words, queued=True)
    for path in (run, run / "a-step00000002.safetensors"):
        with pytest.raises(UserError, match="is used by a grid"):
            trash(site, path)
    trash(site, run / "a-step00000001.safetensors")
    site.jobs.stop(job.id)
    trash(site, run)


def test_every_refusal_to_delete_is_said(site: Site) -> None:
    names = [str(site.roots.outputs[0] / name) for name in ("one", "two")]
    with pytest.raises(UserError, match=r"(?s)one: no such.*two: no such"):
        delete(site, None, FormData([("path", name) for name in names]))
    with pytest.raises(UserError, match="nothing is chosen"):
        delete(site, None, FormData())


def test_images_come_back_into_a_dataset_that_was_renamed(site: Site, tmp_path: Path) -> None:
    dataset = tmp_path / "cat"
    toml = b'[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = "images"\n'
    write(dataset, {"dataset.toml": toml, "images": {"a.png": b"a", "b.png": b"b"}})
    thrown = trash(site, dataset / "images/a.png")
    change_dataset(site, None, FormData({"dataset": str(dataset / "dataset.toml"), "name": "dog"}))
    restore(site, thrown.folder.name)
    assert read(tmp_path / "dog") == {"dataset.toml": toml, "images": {"a.png": b"a", "b.png": b"b"}}
    assert not dataset.exists()


def _saved_run(site: Site, name: str) -> Path:
    run = site.roots.outputs[0] / name
    run.mkdir(parents=True)
    text = f'output_dir = "output/{name}"\noutput_name = "a"\ntraining_comment = "~5 hours\\u0000"\n'
    (run / "config.toml").write_text(text)
    for number in (1, 2):
        (run / f"a-step{number:08d}.safetensors").write_bytes(bytes([number]))
    return run


@pytest.mark.parametrize("name", ["a", "a-best", "a-000002", "a-step00000002", "a-step00000009.safetensors"])
def test_a_saved_step_gets_no_name_that_training_gives_to_another_file(name: str, site: Site) -> None:
    run = _saved_run(site, "r")
    before = read(run)
    (run / "a.safetensors").symlink_to("nowhere")  # taken, if by a link
    with pytest.raises(UserError, match="cannot be given"):
        rename_run(site, run / "a-step00000001.safetensors", name)
    (run / "a.safetensors").unlink()
    assert read(run) == before
    kept = rename_run(site, run / "a-step00000001.safetensors", "mine.safetensors")
    assert (kept.name, kept.read_bytes()) == ("mine.safetensors", b"\1")
    with pytest.raises(UserError, match="no such file"):  # another page was faster
        rename_run(site, run / "a-step00000001.safetensors", "other")


def test_what_was_deleted_in_a_run_comes_back_into_it_under_its_new_name(site: Site) -> None:
    run = _saved_run(site, "r")
    deleted = trash(site, run / "a-step00000001.safetensors")
    damaged = site.roots.state / "trash/damaged"
    damaged.mkdir()
    (damaged / "origin.json").write_text('{"at": 1}')
    new = rename_run(site, run, "s")
    restore(site, deleted.folder.name)
    assert (new / "a-step00000001.safetensors").read_bytes() == b"\1"
    assert not run.exists()
    assert 'training_comment = "~5 hours' in (new / "config.toml").read_text()


@pytest.mark.parametrize("what", ["write_text", "move"])
def test_a_run_that_cannot_be_renamed_is_as_it_was(what: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _saved_run(site, "r")
    before = read(run)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"library.web.trash.{what}", fail)
    with pytest.raises(OSError, match="No space"):
        rename_run(site, run, "s")
    assert read(run) == before
    assert not run.with_name("s").exists()


def run_with_checkpoints(site: Site, **settings: Any) -> Path:
    """Write a run with two checkpoints as the trainer writes them, and what it ended with; return its folder."""
    import torch

    from library.safetensors_io import write_safetensors
    from networks.files.metadata import hash_metadata

    run = site.roots.outputs[0] / "anna"
    run.mkdir()
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in {"output_name": "anna", **settings}.items()]
    (run / "config.toml").write_text("[saving]\n" + "".join(lines))
    for step, name in ((4, "anna-step00000004"), (8, "anna-step00000008"), (12, "anna")):
        tensors = {"a.lora_A.weight": torch.randn(4, 8), "a.lora_B.weight": torch.randn(8, 4).bfloat16()}
        about = {"ss_steps": f"{step}", "ss_output_name": "anna", "modelspec.title": "anna", "tandem.settings": "{}"}
        write_safetensors(run / f"{name}.safetensors", tensors, about | hash_metadata(tensors, about))
    (run / "metrics.jsonl").write_text('{"step": 4, "val_loss": 0.5}\n{"step": 8, "val_loss": 0.25}\n')
    return run


def keep_as(site: Site, path: Path, name: str) -> str:
    """Return what the page says."""
    return keep(site, None, FormData({"path": str(path), "name": name})).body.decode()


def test_a_kept_copy_has_the_same_tensors_and_its_own_name_and_the_mark_moves(site: Site) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    from networks.files.metadata import hash_metadata

    run = run_with_checkpoints(site)
    before = read(run)
    assert chosen_of(run) is None
    assert name_to_keep(run) == "anna-chosen"
    assert "step 4, held-out loss 0.5000" in keep_as(site, run / "anna-step00000004.safetensors", name_to_keep(run))
    assert chosen_of(run) == Checkpoint(run / "anna-chosen.safetensors", 4, "step 4, held-out loss 0.5000")
    said = keep_as(site, run / "anna-step00000008.safetensors", "größe 8")
    assert "anna-chosen.safetensors was it before; that file stays." in said
    assert chosen_of(run) == Checkpoint(run / "größe 8.safetensors", 8, "step 8, held-out loss 0.2500")
    assert name_to_keep(run) == "anna-chosen-2"
    for source, name in (("anna-step00000004", "anna-chosen"), ("anna-step00000008", "größe 8")):
        old, new = run / f"{source}.safetensors", run / f"{name}.safetensors"
        tensors = load_file(new)
        assert tensors.keys() == load_file(old).keys()
        assert all(
            (tensors[key].view(torch.uint8) == value.view(torch.uint8)).all() for key, value in load_file(old).items()
        )
        with safe_open(old, "pt") as file, safe_open(new, "pt") as copy:
            was, about = file.metadata(), copy.metadata()
        named = {"ss_output_name": name, "modelspec.title": name, "tandem.kept": source}
        assert about == {key: value for key, value in was.items() if key != "sshs_legacy_hash"} | named
        assert about["sshs_model_hash"] == hash_metadata(tensors, {})["sshs_model_hash"]
    after = read(run)
    assert {key: after[key] for key in before} == before  # what was there stays as it was
    # the mark follows a new name, and comes back with its file
    rename_run(site, run / "größe 8.safetensors", "anna 9")
    assert chosen_of(run).path == run / "anna 9.safetensors"
    thrown = trash(site, run / "anna 9.safetensors")
    assert chosen_of(run) is None
    restore(site, thrown.folder.name)
    assert chosen_of(run).step == 8


def test_nothing_is_kept_over_a_file_or_under_a_name_that_the_run_saves(site: Site) -> None:
    run = run_with_checkpoints(site)
    source = run / "anna-step00000004.safetensors"
    (run / "there.safetensors").write_text("mine")
    (run / "broken.safetensors").write_text("no header")
    shutil.copy(run / "broken.safetensors", run / "anna-step00000006.safetensors")
    before = read(run)
    for name in ("there", "there.safetensors", "anna", "ANNA", "anna-step00000004", "anna-step00000099", "anna-000002",
                 "anna-best", "", "a/b", "../b", ".b", "x-state", "con", "a\0b"):  # fmt: skip
        with pytest.raises(UserError):
            keep_as(site, source, name)
    for other in ("there", "broken", "anna-step00000006", "nothing"):
        with pytest.raises(UserError, match="is no whole checkpoint"):
            keep_as(site, run / f"{other}.safetensors", "kept")
    assert read(run) == before


def test_a_training_goes_on_from_the_last_step_and_not_from_a_copy_of_an_early_one(site: Site) -> None:
    run = run_with_checkpoints(site)
    keep_as(site, run / "anna-step00000004.safetensors", "anna-chosen")
    changes, _ = _train_on(site, run, *read_config("", False))
    assert Path(changes["network_weights"]) == run / "anna.safetensors"


def test_a_lora_whose_name_ends_as_a_saved_steps_does_is_generated_with_itself(site: Site) -> None:
    run = run_with_checkpoints(site)
    keep_as(site, run / "anna-step00000004.safetensors", "best-anna")
    query = urlencode({"lora": run / "best-anna.safetensors"}).encode()
    asked = Request({"type": "http", "path": "/generate", "headers": [], "query_string": query})
    shown = generate.show(site, asked, FormData()).body.decode()
    boxes = re.findall(r'<input type="checkbox" name="saved"[^>]*>', shown)
    assert len(boxes) == 3
    assert not any("checked" in box for box in boxes)


def test_a_training_does_not_replace_a_kept_file(site: Site) -> None:
    from library.training.checkpoint.output_folder import refuse_kept

    run = run_with_checkpoints(site)
    keep_as(site, run / "anna-step00000004.safetensors", "anna-chosen")
    assert [each.path.stem for each in checkpoints_of(run)] == ["anna-step00000004", "anna-step00000008", "anna"]
    refuse_kept(run / "anna.safetensors")
    refuse_kept(run / "nothing.safetensors")
    with pytest.raises(UserError, match="was kept from a run; rename it"):
        refuse_kept(run / "anna-chosen.safetensors")


@pytest.mark.slow
def test_a_run_is_renamed_trained_on_deleted_and_restored(tmp_path: Path, browser: Any) -> None:
    with serve(tmp_path, "--folders", str(tmp_path), str(ROOT / "assets")) as server:
        run, jobs = server.output / "tiny", Jobs(server.output / ".tandem")
        add_run(server, tmp_path, "tiny", steps=2)
        until(lambda: jobs.all()[0].is_over)
        tab = Tab(browser, server)
        page = tab.page
        tab.open(f"/run?path={run}")
        page.locator("#overview summary", has_text="Rename or delete").click()
        name = page.get_by_label("New name of tiny").first
        name.fill("a/b")
        page.locator("#overview").get_by_role("button", name="Rename").click()
        expect(page.locator("#message")).to_contain_text("cannot be given")
        name.fill("größer & schöner")
        page.locator("#overview").get_by_role("button", name="Rename").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("größer & schöner")
        expect(page.locator("#overview .tag").first).to_have_text("done")  # its job came along
        new = server.output / "größer & schöner"
        assert not run.exists()
        # a terminal goes on in the folder of the new name, from its last state
        words = ["--config_file", str(new / "config.toml"), "--resume", "auto", "--max_train_steps", "3"]
        subprocess.run([sys.executable, ROOT / "train_lora.py", *words], cwd=tmp_path, check=True, capture_output=True)
        steps = [json.loads(line) for line in (new / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in steps if "loss" in line] == [1, 2, 3]
        assert not run.exists()
        # what the page fills in to train on is taken by the page, and begins where the run ended
        page.reload()
        page.get_by_role("link", name="Train on").click()
        expect(page.locator("#message")).to_contain_text("to twice its length (max_train_steps = 6)")
        expect(page.locator("#against")).to_contain_text("Complete")
        page.locator("#start").click()
        page.wait_for_url("**/run?path=*")
        more = server.output / "größer & schöner-2"
        until(lambda: jobs.all()[0].is_over)
        steps = [json.loads(line) for line in (more / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in steps if "loss" in line] == [4, 5, 6]
        assert (more / "größer & schöner-2.safetensors").is_file()
        before = read(new)
        tab.open()
        page.locator(f"input[value='{new}']").check()
        page.get_by_role("button", name="Delete chosen").click()
        expect(page.locator(".run")).to_have_count(1)
        assert not new.exists()
        page.get_by_role("link", name="Trash").click()
        expect(page.locator("article")).to_contain_text("output/größer & schöner")
        tab.fits()
        page.get_by_role("button", name="Restore").click()
        expect(page.get_by_text("The trash is empty.")).to_be_visible()
        assert read(new) == before
        tab.open()
        expect(page.locator(".run .who .tag")).to_have_text(["done", "done"])
        tab.close()
