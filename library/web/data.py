"""The screen of a dataset: its images in their buckets, what was found about them, and their captions.

What there is to know comes from a job, ``tools/check_dataset.py --json``: a *look*. The page shows the newest that has
come, and addresses images by their number in it, so that a request names no file of its own. Captions are read from
disk whenever they are shown. The browser gets empty chunks with their heights, and the cards of those it comes near.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from library.data.caption_edit import Journal, Text, changes_of, read
from library.data.new_dataset import IMAGE_SUFFIXES, add_file, find_bad_start, refusal_of, write_dataset
from library.errors import UserError, counted
from library.files import parse_toml, read_toml
from library.models.captioner import CAPTIONERS, PROMPT
from library.training.report.run_folder import settings_of
from library.web.access import Refused
from library.web.jobs import Job
from library.web.loras import weights_in
from library.web.run import fragment
from library.web.site import Form, Given, Routes, Site, goto, tell_changed, url
from library.web.trash import bring_back_into, move, restore, trash

_MOST_CARDS = 60  # that come together
_MOST_FOLDERS, _MOST_LEVELS = 3000, 5  # that are looked through for datasets
_OUTSIDE = "it lies outside of the folders that this page was given"
_REFRESH = {"hx-refresh": "true"}
_FOR_EVER = {"cache-control": "private, max-age=31536000, immutable"}  # its address names the look


def show(site: Site, request: Request, form: Form) -> Response:
    """Show a dataset, or all there are."""
    if "dataset" not in request.query_params:
        tomls, folders = datasets(site)
        return site.page(request, "data.html", title="Data", tomls=tomls, folders=folders)
    path, toml = _toml(site, request.query_params["dataset"])
    jobs, look = _looks_of(site, path)
    found: dict[str, Any] = _found(site, look.id) if look else {"kinds": [], "buckets": []}
    buckets = [(number, f"{one['name']} ({one['images']})") for number, one in enumerate(found["buckets"])]
    return site.page(
        request,
        "data.html",
        title=path.parent.name if path.stem == "dataset" else path.stem,
        dataset=path,
        toml=toml,
        job=jobs[0] if jobs else None,
        look=look.id if look else "",
        found=found,
        buckets_of=buckets,
        kinds=[(one["kind"], one["title"]) for one in found["kinds"]],
        history=_journal(site, path).next_steps(),
        belongings=_belongings(site, path),
        asked=request.query_params.get("kind", ""),
        changed=look is not None and path.stat().st_mtime > look.created,
    )


def datasets(site: Site) -> tuple[list[tuple[Path, float]], list[tuple[Path, int]]]:
    """Return the dataset TOMLs in the allowed folders with times, newest first; folders of images with their counts."""
    tomls: dict[Path, float] = {}
    folders: dict[Path, int] = {}
    for base in dict.fromkeys((*site.roots.folders, site.roots.outputs[0] / "datasets")):
        for at, inside, names in islice(os.walk(base), _MOST_FOLDERS):
            folder = Path(at)
            deep = len(folder.relative_to(base).parts) >= _MOST_LEVELS
            inside[:] = [] if deep else sorted(name for name in inside if name[0] != ".")
            folders[folder] = sum(Path(name).suffix.lower() in IMAGE_SUFFIXES for name in names)
            for path in (folder / name for name in names if name.endswith(".toml")):
                if _is_inside(site, path) and re.search(r"^[ \t]*\[\[[ \t]*datasets\b", read(path).shown, re.MULTILINE):
                    tomls[path.resolve()] = path.stat().st_mtime
    mine_first = sorted(tomls.items(), key=lambda item: ("configs" in item[0].parts, -item[1]))  # then the templates
    return mine_first, sorted(one for one in folders.items() if one[1])


def make_dataset(site: Site, request: Request, form: Form) -> Response:
    """Write the TOML of a new dataset, or of a folder of images; pictures are sent after."""
    given = Given(form)
    if given.get("folder"):
        folder, image_dir = site.roots.find(given["folder"]), "."
    elif bad := find_bad_start(given.get("name", "")):
        raise UserError(f"Name {given.get('name', '')!r}: {bad}")
    else:
        folders = [*site.roots.folders, site.roots.outputs[0] / "datasets"]
        home = next(folder for folder in folders if folder.name == "datasets")
        folder, image_dir = site.roots.find(str(home / given["name"])), "images"
    path = folder / "dataset.toml"
    if path.exists():
        raise UserError(f"{site.roots.show(path)}: is there already; open it, or choose another name")
    write_dataset(folder, image_dir, given.get("trigger_word", ""), given["resolution"], given["num_repeats"])
    return JSONResponse({"dataset": str(path), "address": url("/data", dataset=path)})


def upload(site: Site, request: Request, form: Form) -> Response:
    """Write a picture or caption into a dataset's first folder of images; none over another."""
    path, _ = _toml(site, str(form.get("dataset", "")))
    named = next((text for key, text in _paths_in(read_toml(path)[0]) if key == "image_dir"), None)
    if named is None:
        raise UserError(f"{site.roots.show(path)}: names no image_dir to put images into; add one")
    folder, file = site.roots.find(str(path.parent / named)), form["file"]
    name = getattr(file, "filename", "")  # of what is no file: refused
    bad = refusal_of(name) or add_file(site.roots.find(str(folder / name)), file.file)
    return JSONResponse({"refused": f"{name}: {bad}" if bad else ""})


def start_look(site: Site, request: Request, form: Form) -> Response:
    """Begin a look at the dataset that a form names; old looks are removed."""
    return look_over(site, _toml(site, str(form.get("dataset", "")))[0])


def look_over(site: Site, path: Path) -> Response:
    """Begin a look at a dataset TOML, unless one is on its way, and have the screen show it."""
    refuse_outside(site, path, read_toml(path)[0])
    jobs, shown = _looks_of(site, path)
    if not jobs or jobs[0] == shown or jobs[0].is_over:
        for job in (job for job in jobs[1:] if job != shown):
            site.jobs.remove(job.id)
        words = ["--json", "{job}/result.json", "--thumbnails", str(_page_folder(site, "thumbs", path))]
        site.jobs.add("data", f"Look over {site.roots.show(path)}", ["tools/check_dataset.py", str(path), *words])
    return Response(headers=_REFRESH)


def refuse_outside(site: Site, path: Path, *tables: Mapping[str, Any]) -> None:
    """Refuse what a dataset TOML says if a place lies outside, beside it or in the working directory as in training."""
    path = site.roots.find(str(path))
    for _, named in _paths_in(list(tables)):
        site.roots.find(named if named.startswith("~") else str(path.parent / named))
        if not (path.parent / named).exists() and Path(named).exists():
            site.roots.find(named)


def _refuse_in_use(site: Site, path: Path) -> None:
    """Raise a UserError if a run or a captioner that goes on or waits reads a dataset."""
    for job in site.jobs.queue():
        named = job.words[1] if job.kind == "captions" else str(settings_of(job.folder).get("dataset_config", ""))
        if named and Path(job.cwd, Path(named).expanduser()).resolve() == path:
            raise UserError(f"{site.roots.show(path)}: is used by {job.title}, which runs or waits; stop it first")


def _belongings(site: Site, path: Path) -> Path:
    """Return what goes with a dataset: its folder, if that holds its TOML and its images alone; else the TOML."""
    with suppress(UserError):
        named, inside = [text for _, text in _paths_in(read_toml(path)[0])], {one.name for one in path.parent.iterdir()}
        if named == ["images"] and inside <= {"dataset.toml", "images"} and path.parent not in site.roots.all:
            return path.parent
    return path


def change_dataset(site: Site, request: Request, form: Form) -> Response:
    """Delete a dataset, into the trash, or rename it."""
    path, _ = _toml(site, str(form.get("dataset", "")))
    place, name = _belongings(site, path), str(form.get("name", "")).strip()
    _refuse_in_use(site, path)
    if form.get("what") == "delete":
        trash(site, place)
        return goto("/data")
    if bad := find_bad_start(name):
        raise UserError(f"Name {name!r}: {bad}")
    new = site.roots.find(str(place.with_name(name if place != path else f"{name.removesuffix('.toml')}.toml")))
    with site.jobs.alone():
        if os.path.lexists(new):
            raise UserError(f"{site.roots.show(new)}: is there already; choose another name")
        move(place, new)
        bring_back_into(site, place, new)
    return goto(url("/data", dataset=new / path.name if place != path else new))


def delete_images(site: Site, request: Request, form: Form) -> Response:
    """Move images into the trash, with those captions, masks and control images that no other image has."""
    found, path = _found(site, str(form["look"])), _toml(site, str(form["dataset"]))[0]
    _refuse_in_use(site, path)
    gone = {image["path"]: image for image in (_image(found, number) for number in str(form["rows"]).split(","))}
    for image in gone.values():
        if image["outside"] or image["why"].startswith("it stands in"):
            raise UserError(f"{image['name']}: is not deleted here: {image['why']}")
    files = _files_of(gone.values()) - _files_of(one for one in found["images"] if one["path"] not in gone)
    if not files:
        raise UserError("these images were deleted already; reload the screen")
    kept_as = trash(site, *map(Path, sorted(files))).folder.name
    _journal(site, path).write(f"deletion of {counted(len(gone), 'image')}", [], trashed=kept_as)
    return look_over(site, path)


def _files_of(images: Iterable[dict[str, Any]]) -> set[str]:
    files = {file for one in images for file in (one["path"], one["caption_file"], *one["companions"])}
    return {file for file in files if file and os.path.lexists(file)}


def _looks_of(site: Site, path: Path) -> tuple[list[Job], Job | None]:
    """Return the looks at a dataset, the newest first, and the newest of those that have a result."""
    looks = (job for job in site.jobs.all() if job.kind == "data" and "--thumbnails" in job.words)  # not an old page's
    jobs = [job for job in looks if job.words[1] == str(path)]
    return jobs, next((job for job in jobs if (job.folder / "result.json").is_file()), None)


def state(site: Site, request: Request, form: Form) -> Response:
    """Tell how far a look is; show what it found once it is there."""
    path, _ = _toml(site, request.query_params["dataset"])
    (jobs, found), look = _looks_of(site, path), request.query_params["look"]
    if found is not None and found.id != look:
        return Response(headers=_REFRESH)
    return site.part("data.html", "state", dataset=path, job=jobs[0] if jobs else None, look=look)


def save_toml(site: Site, request: Request, form: Form) -> Response:
    """Write the TOML and look again, which tells what training would refuse."""
    path, old = _toml(site, str(form.get("dataset", "")))
    if (new := old.changed(str(form.get("text", "")))) is None:
        raise UserError(f"{site.roots.show(path)}: would be empty; write a [[datasets]] table")
    refuse_outside(site, path, parse_toml(new.removeprefix("\ufeff"), path.name))
    change = (str(path), old.raw, new, old.encoding)
    if str(form.get("hash")) != old.hash or _journal(site, path).write(f"change of {path.name}", [change]):
        raise UserError(f"{site.roots.show(path)}: was changed meanwhile; open it again, and change it then")
    return look_over(site, path)


def _toml(site: Site, text: str) -> tuple[Path, Text]:
    path = site.roots.find(text)
    found = read(path)
    if path.suffix != ".toml" or found.raw is None:
        raise UserError(f"{site.roots.show(path)}: {found.why or 'is no dataset TOML'}; choose one of the list")
    return path, found


def _paths_in(value: Any) -> Iterator[tuple[Any, str]]:
    """Yield key and value of all that name files or folders in a dataset TOML."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if not isinstance(inner, str):
            yield from _paths_in(inner)
        elif re.search("(_dir|_directory|_file|^in_json)$", str(key)):
            yield key, inner


def _page_folder(site: Site, kind: str, dataset: Path) -> Path:
    """Return where the page keeps what it has of a dataset: "thumbs", "undo"."""
    return site.roots.state / kind / hashlib.sha256(os.fsencode(dataset)).hexdigest()[:16]


def _journal(site: Site, dataset: Path) -> Journal:
    return Journal(_page_folder(site, "undo", dataset).with_suffix(".json"), site.roots.find)


def _is_inside(site: Site, *paths: str | Path) -> bool:
    with suppress(Refused):
        return all(site.roots.find(str(path)) for path in paths)
    return False


@lru_cache(3)
def _found(site: Site, look: str) -> dict[str, Any]:
    """Return what a look found; what a link has outside the allowed folders is not shown."""
    result = site.jobs.get(look).read("result.json")
    if not result:
        raise UserError("this check of the dataset was removed; check the dataset again")
    for image in result["images"]:
        image["outside"] = not _is_inside(site, image["path"], *image["companions"])
        if image["outside"] or not _is_inside(site, image["caption_file"] or image["path"]):
            image |= {"caption_file": None, "captions": [], "why": _OUTSIDE}
    return result


def _image(found: dict[str, Any], number: str) -> dict[str, Any]:
    with suppress(ValueError, IndexError):
        return dict(found["images"][int(number)])
    raise UserError("there is no such image; check the dataset again")


def _caption(site: Site, image: dict[str, Any]) -> Text:
    """Return an image's caption; one that no file has cannot be edited."""
    if image["caption_file"] is None:
        return Text("\n".join(image["captions"]), why=image["why"])
    with suppress(Refused):
        return read(site.roots.find(image["caption_file"]))
    return Text(None, why=_OUTSIDE)


def _matching(site: Site, found: dict[str, Any], filters: Any) -> list[int]:
    """Return the numbers of the images that the filters leave."""
    words, kind, bucket, only = (str(filters.get(key, "")) for key in ("q", "kind", "bucket", "only"))

    def is_left(image: dict[str, Any]) -> bool:
        text = _caption(site, image).shown if words or only == "without" else ""
        return (
            (not kind or any(one["kind"] == kind for one in image["findings"]))
            and bucket in ("", str(image["bucket"]))
            and (only in ("", *image["marks"]) or (only == "without" and not text.strip()))
            and words.casefold() in f"{image['name']}\n{text}".casefold()
            and os.path.lexists(image["path"])  # not deleted since
        )

    left = [number for number, image in enumerate(found["images"]) if is_left(image)]
    return sorted(left, key=lambda number: found["images"][number]["bucket"] is not None)  # what stops training first


def grid(site: Site, request: Request, form: Form) -> Response:
    """Show the buckets of what the filters leave, as chunks that wait to be filled."""
    look = request.query_params["look"]
    found = _found(site, look)
    shown = _matching(site, found, request.query_params)
    buckets = {bucket: list(inside) for bucket, inside in groupby(shown, lambda n: found["images"][n]["bucket"])}
    there = [found["images"][number] for number in _matching(site, found, {})]
    without = sum(not os.path.lexists(image["caption_file"] or image["path"]) for image in there)
    values = {"shown": shown, "there": len(there), "without": without, "counted": counted, "most": _MOST_CARDS}
    return site.part("data.html", "grid", look=look, found=found, buckets=buckets, **values)


def cards(site: Site, request: Request, form: Form) -> Response:
    """Return the cards of a chunk."""
    look, numbers = request.query_params["look"], request.query_params["rows"].split(",")[:_MOST_CARDS]
    images = [_image(_found(site, look), number) for number in numbers]
    rows = [(number, image, _caption(site, image)) for number, image in zip(numbers, images, strict=True)]
    return site.part("data.html", "cards", look=look, rows=rows, said="", conflict=False)


def picture(site: Site, request: Request, form: Form) -> Response:
    """Send an image's small picture, or that of a mask or control image of it, as a look has made them."""
    look = request.query_params["look"]
    found, name = _found(site, look), re.fullmatch(r"(\d+)(_\d+)?", request.query_params["name"])
    image = _image(found, name[1] if name else "")
    if image["outside"]:
        raise Refused(f"{image['name']}: {_OUTSIDE}")
    if name and name[2]:
        path = site.jobs.get(look).folder / "previews" / f"{name[0]}.jpg"
    else:
        path = _page_folder(site, "thumbs", Path(found["dataset"])) / (image["thumbnail"] or "none")
    return FileResponse(path, headers=_FOR_EVER) if path.is_file() else Response(status_code=404)  # not yet, or never


def save_caption(site: Site, request: Request, form: Form) -> Response:
    """Write one caption, unless it is another than the one that was shown."""
    look, number, text = (str(form[key]) for key in ("look", "number", "text"))
    found = _found(site, look)
    image = _image(found, number)
    old = _caption(site, image)
    if old.why:
        raise UserError(f"{image['name']}: its caption cannot be edited here: {old.why}")
    journal = _journal(site, site.roots.find(found["dataset"]))
    change = (image["caption_file"], old.raw, old.changed(text), old.encoding)
    is_old = old.hash != form["hash"] or bool(journal.write(f"caption of {image['name']}", [change]))
    now = _caption(site, image)
    said = "saved" if now.shown else "saved: no caption, its file is gone"
    if conflict := is_old and now.shown != text.replace("\r\n", "\n"):
        said = f"It was changed elsewhere meanwhile; this is the new text. Yours was not saved: {text}"
    answer = site.part("data.html", "cards", look=look, rows=[(number, image, now)], said=said, conflict=conflict)
    answer.headers.update({"hx-reswap": "outerHTML"} if conflict else {"hx-trigger": "saved"})
    return answer


def history(site: Site, request: Request, form: Form) -> Response:
    """Show what can be undone and redone."""
    dataset, _ = _toml(site, request.query_params["dataset"])
    return site.part("data.html", "history", dataset=dataset, history=_journal(site, dataset).next_steps())


def step(site: Site, request: Request, form: Form) -> Response:
    """Undo or redo a change."""
    dataset, _ = _toml(site, str(form.get("dataset", "")))
    back = form.get("step") == "undo"
    restored = list[str]()
    what, left = _journal(site, dataset).step(back, restored.append)
    if restored:
        restore(site, restored[0])
        return look_over(site, dataset)
    said = f"{'Undone' if back else 'Redone'}: {what}"
    if left:
        said += f"; left alone, as they were changed meanwhile: {counted(len(left), 'file')} ({Path(left[0]).name} ...)"
    answer = site.part("data.html", "said", said=said, kind="warn" if left else "")
    answer.headers["hx-trigger"] = "changed"
    return answer


def bulk(site: Site, request: Request, form: Form) -> Response:
    """Show what a change of many captions would do; do it, if that is what had been shown."""
    found = _found(site, str(form["look"]))
    numbers = _matching(site, found, form) if form.get("scope") == "shown" else range(len(found["images"]))
    images = [found["images"][number] for number in numbers]
    texts = {image["caption_file"]: _caption(site, image) for image in images}
    editable = {path: text for path, text in texts.items() if not text.why}
    changes = changes_of(editable, *(str(form.get(key, "")) for key in ("action", "find", "by")))
    digest = hashlib.sha256(json.dumps(changes).encode()).hexdigest()
    said = "The captions have changed meanwhile; this is how it is now." if "digest" in form else ""
    if is_done := form.get("digest") == digest:
        journal = _journal(site, site.roots.find(found["dataset"]))
        left = journal.write(f"change of {counted(len(changes), 'caption')}", changes)
        said, changes = f"{counted(len(changes) - len(left), 'caption')} changed", []
    pairs = [(Path(path).name, Text(old).shown, Text(new).shown) for path, old, new, _ in changes[:20]]
    shown = {"count": len(changes), "of": len(texts), "pairs": pairs, "locked": len(editable) < len(texts)}
    answer = site.part("data.html", "bulk", said=said, digest=digest, **shown)
    answer.headers.update({"hx-trigger": "changed"} if is_done else {})
    return answer


# ---- Captions that a model writes, by a job of tools/caption_images.py


def captions(site: Site, request: Request, form: Form) -> Response:
    """Show the form that has a model write captions; without ``form`` how far the newest such job is."""
    path, _ = _toml(site, request.query_params["dataset"])
    looks, look = _looks_of(site, path)
    jobs = [job for job in site.jobs.all() if job.kind == "captions" and job.words[1] == str(path)][:1]
    site.jobs.go_on(jobs)
    found: dict[str, Any] = _found(site, look.id) if look else {"images": []}
    asked, made = (jobs[0].read(name) if jobs else {} for name in ("asked.json", "result.json"))
    values: dict[str, Any] = {"dataset": path, "found": found, "counted": counted}
    if "form" in request.query_params:
        values |= {"models": weights_in(site)["captioner"], "known": CAPTIONERS, "prompt": PROMPT}
        without = len(_matching(site, found, {"only": "without"}))
        return site.part("data.html", "captions", asked=asked, without=without, **values)
    values |= {"number_of": {image["path"]: number for number, image in enumerate(found["images"])}}
    values |= {"look": look, "begun": next(iter(looks), None), "job": next(iter(jobs), None)}
    far = re.findall(r"^([\d,]+) of ([\d,]+), (.+?) left: ", jobs[0].log, re.MULTILINE) if jobs else []
    return fragment(site, request, "data.html", "captioning", far=far[-1:], made=made.get("images", []), **values)


def start_captions(site: Site, request: Request, form: Form) -> Response:
    """Queue a job that writes captions, or a preview of some."""
    given, (path, _) = Given(form), _toml(site, str(form.get("dataset", "")))
    refuse_outside(site, path, read_toml(path)[0])
    site.roots.refuse_paths_outside(given["model"], "Model")
    words = ["tools/caption_images.py", str(path), "--json", "{job}/result.json"]
    words += [f"--{key}={given[key]}" for key in ("model", "prompt", "prefix")] + ["--all"] * (given["which"] == "all")
    journal = _page_folder(site, "undo", path).with_suffix(".json")
    words += ["--preview", "4"] if "preview" in given else ["--journal", str(journal)]
    files = {"asked.json": json.dumps(given)}
    site.jobs.add("captions", f"Captions for {site.roots.show(path)}", words, queued=True, files=files)
    return tell_changed()


ROUTES: Routes = {
    "/data": show,
    "/data/new": (None, make_dataset),
    "/data/upload": (None, upload),
    "/data/look": (state, start_look),
    "/data/toml": (None, save_toml),
    "/data/change": (None, change_dataset),
    "/data/delete": (None, delete_images),
    "/data/grid": grid,
    "/data/cards": cards,
    "/data/picture": picture,
    "/data/caption": (None, save_caption),
    "/data/step": (history, step),
    "/data/bulk": (None, bulk),
    "/data/captions": (captions, start_captions),
}
