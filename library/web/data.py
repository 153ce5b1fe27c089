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
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from library.errors import UserError, counted
from library.files import find_bad_name, read_toml, toml_text, write_text
from library.web.access import Refused
from library.web.captions import Changes, Journal, Text, edited, read
from library.web.jobs import Job
from library.web.site import HERE, Form, Handler, Site, goto, url
from library.web.thumbnails import Thumbnails

IMAGES = {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".jxl", ".bmp", ".dib", ".tif", ".tiff",
          ".gif"}  # fmt: skip # library.data.images, which needs torch
_PATHS = {"image_dir", "image_directory", "metadata_file", "image_jsonl_file", "conditioning_data_dir",
          "cache_directory",
          "control_directory", "inpaint_mask_directory"}  # fmt: skip # keys of a dataset TOML
_CHUNK = 60  # cards that come together
_MOST_FOLDERS, _MOST_LEVELS = 3000, 5  # that are looked through for datasets
_OUTSIDE = "it lies outside of the folders that this page was given"
_looks: dict[str, dict[str, Any]] = {}
_thumbnails: dict[Path, Thumbnails] = {}


def show(site: Site, request: Request, form: Form) -> Response:
    """Show a dataset, or all there are."""
    if "dataset" not in request.query_params:
        tomls, folders = datasets(site)
        return site.page(request, "data.html", title="Data", tomls=tomls, folders=folders)
    path, toml = _toml(site, request.query_params["dataset"])
    jobs = looks_of(site, path)
    look = next((job for job in jobs if (job.folder / "result.json").is_file()), None)
    return site.page(
        request, "data.html", title=path.parent.name if path.stem == "dataset" else path.stem, dataset=path, toml=toml,
        job=jobs[0] if jobs else None, look=look, found=_found(site, look) if look else None, 
        shown=look.id if look else "", history=_history(site, path),
        asked={key: request.query_params.get(key, "") for key in ("q", "tag", "kind", "bucket", "only")},
    )  # fmt: skip


def datasets(site: Site) -> tuple[list[tuple[Path, float]], list[tuple[Path, int]]]:
    """Return the dataset TOMLs in the places with their times, newest first; and folders of images with how many."""
    tomls: dict[Path, float] = {}
    folders: dict[Path, int] = {}
    for folder, names in islice(_walk(site), _MOST_FOLDERS):
        if images := sum(Path(name).suffix.lower() in IMAGES for name in names):
            folders[folder] = images
        for name in names:
            if name.endswith(".toml"):
                with suppress(OSError, UserError):
                    path = site.places.find(str(folder / name))
                    if re.search(r"^\s*\[\[\s*datasets\b", path.read_text(errors="replace")[: 2**16], re.MULTILINE):
                        tomls[path] = path.stat().st_mtime
    return sorted(tomls.items(), key=lambda item: -item[1]), sorted(folders.items())


def _walk(site: Site) -> Iterator[tuple[Path, list[str]]]:
    for base in dict.fromkeys((*site.places.folders, site.places.outputs[0] / "datasets")):
        for folder, inside, names in os.walk(base):
            deep = len(Path(folder).relative_to(base).parts) >= _MOST_LEVELS
            inside[:] = [] if deep else sorted(name for name in inside if name[0] != ".")
            yield Path(folder), names


def make_dataset(site: Site, request: Request, form: Form) -> Response:
    """Write the TOML of a new dataset, or of a folder of images; pictures are sent after."""
    name, folder = str(form.get("name", "")).strip(), str(form.get("folder", "")).strip()
    if folder:
        own, image_dir = site.places.find(folder), "."
        if not own.is_dir():
            raise UserError(f"{folder}: no such folder; choose one of the list")
    else:
        if bad := find_bad_name(name, 5) or ("a dot at its beginning hides it; remove it" if name[0] == "." else None):
            raise UserError(f"Name {name!r}: {bad}")
        own, image_dir = site.places.find(str(_home(site) / name)), "images"
    path = own / "dataset.toml"
    if path.exists():
        raise UserError(f"{site.places.show(path)}: is there already; open it, or choose another name")
    word, sides = str(form.get("trigger_word", "")).strip(), _sides(str(form.get("resolution", "")))
    subset = {"image_dir": image_dir, "num_repeats": _whole(form, "num_repeats")}
    write_text(path, toml_text({
        "general": {"caption_extension": str(form.get("caption_extension") or ".txt"), "enable_bucket": True},
        "datasets": [{**({"resolution": sides[0]} if len(sides) == 1 else {"resolutions": sides}),
                      "batch_size": _whole(form, "batch_size"),
                      "subsets": [subset | ({"trigger_word": word} if word else {})]}],
    }))  # fmt: skip
    (own / image_dir).mkdir(exist_ok=True)
    return JSONResponse({"dataset": str(path), "address": url("/data", dataset=path)})


def _home(site: Site) -> Path:
    """Where new datasets are made."""
    folders = sorted(site.places.folders, key=lambda folder: folder.name != "datasets")
    usable = next((folder for folder in (*folders, *site.places.outputs) if os.access(folder, os.W_OK)), None)
    if usable is None:
        raise UserError("New dataset: no folder can be written to; start the page with --folders and one that can")
    return usable if usable.name == "datasets" else usable / "datasets"


def _whole(form: Form, key: str) -> int:
    text = str(form.get(key) or "1").strip()
    if not (text.isdecimal() and 0 < int(text) < 10**6):
        raise UserError(f"{key} {text[:40]!r}: is no whole number from 1; correct it")
    return int(text)


def _sides(text: str) -> list[int | list[int]]:
    """Read "512, 768x1024"."""
    found = re.fullmatch(r"\s*\d{2,5}(\s*x\s*\d{2,5})?(\s*,\s*\d{2,5}(\s*x\s*\d{2,5})?)*\s*", text)
    if not found:
        raise UserError(f"Resolution {text[:40]!r}: write a side as 1024, or several as 512, 768x1024")
    read = [[int(side) for side in one.split("x")] for one in text.split(",")]
    if all(len(one) == 1 for one in read):
        return [one[0] for one in read]
    return [[one[0], one[-1]] for one in read]  # a TOML's list is of one kind


def upload(site: Site, request: Request, form: Form) -> Response:
    """Write pictures and captions into a dataset's first folder of images; none over another."""
    path, _ = _toml(site, str(form.get("dataset", "")))
    tables = read_toml(path)[0]
    ends = {*IMAGES, ".txt", ".caption"}
    named = next((value for key, value in _paths_in(tables) if key in ("image_dir", "image_directory")), None)
    if named is None:
        raise UserError(f"{site.places.show(path)}: names no image_dir to put pictures into; add one")
    folder, written, refused = site.places.find(str(path.parent / named)), 0, []
    for file in form.getlist("files"):
        if not isinstance(file, UploadFile):
            continue
        name = file.filename or ""
        bad = find_bad_name(name) or ("a dot at its beginning hides it" if name[0] == "." else None)
        if not bad and Path(name).suffix.lower() not in ends:
            bad = "is neither an image nor a caption (.txt, .caption)"
        target = folder / name
        if not bad:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with open(site.places.find(str(target)), "xb") as output:
                    while block := file.file.read(2**20):
                        output.write(block)
                written += 1
            except FileExistsError:
                bad = "there is one of this name already; it was left as it is"
            except OSError as error:
                target.unlink(missing_ok=True)
                bad = f"cannot be written ({error.strerror})"
        if bad:
            refused.append(f"{name}: {bad}")
    return JSONResponse({"written": written, "refused": refused})


def start_look(site: Site, request: Request, form: Form) -> Response:
    """Begin a look at a dataset, unless one is on its way."""
    path, _ = _toml(site, str(form.get("dataset", "")))
    return _state(site, path, begin_look(site, path), str(form.get("shown", "")))


def begin_look(site: Site, path: Path) -> Job:
    """Return the job that looks over a dataset; old ones are removed.

    Raises:
        UserError: the TOML cannot be read, or names a folder outside of the places.
    """
    for _, named in _paths_in(read_toml(path)[0]):
        beside = path.parent / named
        site.places.find(str(beside if beside.exists() else Path(named)))  # as library.data.config looks for it
    jobs = looks_of(site, path)
    if jobs and not jobs[0].is_over and not (jobs[0].folder / "result.json").is_file():
        return jobs[0]
    for job in jobs[2:]:
        site.jobs.remove(job.id)
    words = ["tools/check_dataset.py", str(path), "--json", "{job}/result.json"]
    return site.jobs.add("data", f"Look over {site.places.show(path)}", words)


def looks_of(site: Site, path: Path) -> list[Job]:
    """Return the jobs that look over a dataset, the newest first."""
    return [job for job in site.jobs.all() if job.kind == "data" and job.words[1] == str(path)]


def state(site: Site, request: Request, form: Form) -> Response:
    """Tell how far a look is; show what it found once it is there."""
    path, _ = _toml(site, request.query_params.get("dataset", ""))
    jobs = looks_of(site, path)
    return _state(site, path, jobs[0] if jobs else None, request.query_params.get("shown", ""))


def _state(site: Site, path: Path, job: Job | None, shown: str) -> Response:
    if job is not None and job.id != shown and (job.folder / "result.json").is_file():
        return Response(status_code=200, headers={"hx-refresh": "true"})
    return site.part("data.html", "state", dataset=path, job=job, shown=shown)


def save_toml(site: Site, request: Request, form: Form) -> Response:
    """Write the TOML and look again, which tells what training would refuse."""
    path, old = _toml(site, str(form.get("dataset", "")))
    if str(form.get("hash")) != old.hash:
        raise UserError(f"{site.places.show(path)}: was changed meanwhile; open it again, and change it then")
    if (new := old.changed(str(form.get("text", "")))) is None:
        raise UserError(f"{site.places.show(path)}: would be empty; write a [[datasets]] table")
    _journal(site, path).write(f"change of {path.name}", [(str(path), old.raw, new, old.encoding)])
    begin_look(site, path)
    return goto(url("/data", dataset=path))


def _toml(site: Site, text: str) -> tuple[Path, Text]:
    path = site.places.find(text)
    found = read(path)
    if path.suffix != ".toml" or found.raw is None:
        raise UserError(f"{site.places.show(path)}: {found.why or 'is no dataset TOML'}; choose one of the list")
    return path, found


def _paths_in(value: Any) -> Iterator[tuple[str, str]]:
    """Yield key and value of all that name files or folders in a dataset TOML."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _paths_in(inner)
    if isinstance(value, dict):
        yield from ((key, text) for key, text in value.items() if key in _PATHS and isinstance(text, str))


def _journal(site: Site, dataset: Path) -> Journal:
    return Journal(site.places.state / "undo", dataset, site.places.find)


def _history(site: Site, dataset: Path) -> dict[str, str]:
    done, undone = _journal(site, dataset).stacks()
    return {"undo": done[-1]["what"] if done else "", "redo": undone[-1]["what"] if undone else ""}


def _found(site: Site, job: Job) -> dict[str, Any]:
    """Return what a look found; what a link has outside of the places is not shown."""
    if (known := _looks.get(job.id)) is not None:
        return known
    result: dict[str, Any] = job.result or {}
    if not result:
        raise UserError("this look at the dataset is not there any more; look again")

    def is_inside(path: str) -> bool:
        return any(Path(path).is_relative_to(folder) for folder in (*site.places.outputs, *site.places.folders))

    for image in result["images"]:
        image["outside"] = not all(map(is_inside, (image["path"], *image["companions"])))
        if image["outside"] or not (image["caption_file"] is None or is_inside(image["caption_file"])):
            image |= {"caption_file": None, "captions": [], "why": _OUTSIDE}
    of_images: dict[int, list[dict[str, Any]]] = {}
    for kind in result["kinds"]:
        for finding in kind["findings"]:
            for number in finding["images"]:
                of_images.setdefault(number, []).append(kind | finding | {"findings": ()})
    while len(_looks) > 2:
        _looks.pop(next(iter(_looks)))
    _looks[job.id] = result | {"of_images": of_images}
    return _looks[job.id]


def _asked(site: Site, values: Any) -> tuple[Job, dict[str, Any]]:
    job = site.jobs.get(str(values.get("look", "")))
    return job, _found(site, job)


def _caption(site: Site, image: dict[str, Any]) -> Text:
    """Return an image's caption; one that no file has cannot be edited."""
    if image["caption_file"] is None:
        return Text("\n".join(image["captions"]), why=image["why"])
    try:
        return read(site.places.find(image["caption_file"]))
    except Refused:
        return Text(None, why=_OUTSIDE)


def _matching(site: Site, found: dict[str, Any], asked: Any) -> list[int]:
    """Return the numbers of the images that the filters leave."""
    words, tag, kind = str(asked.get("q", "")).casefold(), asked.get("tag", ""), asked.get("kind", "")
    bucket, only = asked.get("bucket", ""), asked.get("only", "")
    numbers = list(range(len(found["images"])))
    if kind:
        numbers = [n for n in numbers if any(one["kind"] == kind for one in found["of_images"].get(n, ()))]
    left = []
    for number in numbers:
        image = found["images"][number]
        if (bucket and str(image["bucket"]) != bucket) or (only and only != "without" and only not in image["marks"]):
            continue
        if words or tag or only == "without":
            text = _caption(site, image).shown
            if words and words not in image["name"].casefold() and words not in text.casefold():
                continue
            if (tag and tag not in _tags(text)) or (only == "without" and text.strip()):
                continue
        left.append(number)
    return left


def _tags(text: str) -> set[str]:
    return {tag.strip() for tag in text.split("\n")[0].split(",")} - {""}


def grid(site: Site, request: Request, form: Form) -> Response:
    """Show the buckets of what the filters leave, as chunks that wait to be filled."""
    job, found = _asked(site, request.query_params)
    numbers = _matching(site, found, request.query_params)
    chunks: dict[int | None, list[list[int]]] = {}
    for number in numbers:
        chunk = chunks.setdefault(found["images"][number]["bucket"], [[]])
        if len(chunk[-1]) == _CHUNK:
            chunk.append([])
        chunk[-1].append(number)
    return site.part("data.html", "grid", look=job, found=found, shown=len(numbers), chunks=chunks)


def tags(site: Site, request: Request, form: Form) -> Response:
    """Show the most frequent tags."""
    _, found = _asked(site, request.query_params)
    counts = Counter(tag for image in found["images"] for tag in _tags(_caption(site, image).shown) if len(tag) < 60)
    return site.part("data.html", "tags", tags=[(t, n) for t, n in counts.most_common(60) if n > 1])


def cards(site: Site, request: Request, form: Form) -> Response:
    """Return the cards of a chunk."""
    job, found = _asked(site, request.query_params)
    images = [(n, found["images"][n]) for n in _numbers(request.query_params.get("rows", ""), found)[:_CHUNK]]
    rows = [(n, image, _caption(site, image), found["of_images"].get(n, ())) for n, image in images]
    return site.part("data.html", "cards", look=job, rows=rows)


def _numbers(text: str, found: dict[str, Any]) -> list[int]:
    return [int(n) for n in text.split(",") if n.isdecimal() and int(n) < len(found["images"])]


def thumbnail(site: Site, request: Request, form: Form) -> Response:
    """Send an image's small picture, or a sign where it can have none."""
    path = site.places.find(request.query_params.get("path", ""))
    makes = _thumbnails.setdefault(site.places.state, Thumbnails(site.places.state / "thumbs"))
    small = makes.get(path) if path.suffix.lower() in IMAGES else None
    if small is None:
        return FileResponse(HERE / "static/broken.svg")
    return FileResponse(small, headers={"cache-control": "private, max-age=31536000, immutable"})


def preview(site: Site, request: Request, form: Form) -> Response:
    """Send the picture of a mask or control image that a look has drawn."""
    job, found = _asked(site, request.query_params)
    number, _, which = request.query_params.get("name", "").partition("_")
    if not which.isdecimal() or not (numbers := _numbers(number, found)) or found["images"][numbers[0]]["outside"]:
        raise UserError("there is no such picture; look again")
    path = job.folder / "previews" / f"{numbers[0]}_{int(which)}.jpg"
    if not path.is_file():  # not yet, or never
        return Response(status_code=404)
    return FileResponse(path, headers={"cache-control": "private, max-age=31536000, immutable"})


def save_caption(site: Site, request: Request, form: Form) -> Response:
    """Write one caption, unless it is another than the one that was shown."""
    _, found = _asked(site, form)
    dataset = site.places.find(found["dataset"])
    image = found["images"][_numbers(str(form.get("number", "")), found)[0]]
    old = _caption(site, image)
    if image["caption_file"] is None or old.why:
        raise UserError(f"{image['name']}: its caption cannot be edited here: {old.why}")
    left = [""] if old.hash != form.get("hash") else _journal(site, dataset).write(
        f"caption of {image['name']}",
        [(image["caption_file"], old.raw, old.changed(str(form.get("text", ""))), old.encoding)],
    )  # fmt: skip
    now = _caption(site, image)
    return JSONResponse({"conflict": bool(left), "text": now.shown, "hash": now.hash} | _history(site, dataset))


def step(site: Site, request: Request, form: Form) -> Response:
    """Undo or redo a change."""
    dataset, _ = _toml(site, str(form.get("dataset", "")))
    back = form.get("back") == "1"
    what, left = _journal(site, dataset).step(back)
    said = f"{'Undone' if back else 'Redone'}: {what}"
    if left:
        said += f"; left alone, as they were changed meanwhile: {counted(len(left), 'file')} ({Path(left[0]).name} ...)"
    return JSONResponse({"said": said, "left": bool(left)} | _history(site, dataset))


def bulk(site: Site, request: Request, form: Form) -> Response:
    """Show what a change of many captions would do; do it, if that is what had been shown."""
    _, found = _asked(site, form)
    dataset, scope = site.places.find(found["dataset"]), form.get("scope")
    numbers = _numbers(str(form.get("selected", "")), found) if scope == "selected" else (
        _matching(site, found, form) if scope == "shown" else range(len(found["images"])))  # fmt: skip
    files = dict.fromkeys(found["images"][n]["caption_file"] for n in numbers)
    texts = {path: text for path in files if path is not None
             if not (text := _caption(site, {"caption_file": path})).why}  # fmt: skip
    given = {key: str(form.get(key, "")) for key in ("action", "find", "by")}
    new = edited([text.shown for text in texts.values()], **given, regex="regex" in form, case="case" in form,
                 missing="missing" in form)  # fmt: skip
    pairs = [(path, text, after) for (path, text), after in zip(texts.items(), new, strict=True) if after != text.shown]
    changes: Changes = [(path, text.raw, text.changed(after), text.encoding) for path, text, after in pairs]
    digest = hashlib.sha256(json.dumps(changes).encode()).hexdigest()
    values = {"pairs": [(Path(path).name, text.shown, after) for path, text, after in pairs[:20]],
              "count": len(changes), "of": len(files),
              "locked": None in files, "digest": digest, "scope": scope}  # fmt: skip
    if "digest" not in form:
        return site.part("data.html", "bulk", said="", **values)
    if form["digest"] != digest:
        return site.part(
            "data.html", "bulk", said="The captions have changed meanwhile; this is how it is now.", **values
        )
    began = time.monotonic()
    left = _journal(site, dataset).write(f"change of {counted(len(changes), 'caption')}", changes)
    said = f"{counted(len(changes) - len(left), 'caption')} changed in {time.monotonic() - began:.1f} s."
    return site.part("data.html", "bulk", said=said, **values | {"pairs": [], "count": 0, "digest": ""},
                     history=_history(site, dataset))  # fmt: skip


ROUTES: dict[str, Handler | tuple[Handler | None, Handler]] = {
    "/data": show,
    "/data/new": (None, make_dataset),
    "/data/upload": (None, upload),
    "/data/look": (None, start_look),
    "/data/state": state,
    "/data/toml": (None, save_toml),
    "/data/grid": grid,
    "/data/tags": tags,
    "/data/cards": cards,
    "/data/thumb": thumbnail,
    "/data/preview": preview,
    "/data/caption": (None, save_caption),
    "/data/step": (None, step),
    "/data/bulk": (None, bulk),
}
