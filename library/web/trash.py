"""Delete, rename and keep. What is deleted on the page can be restored until the trash is emptied.

What was deleted together is one folder ``<output>/.tandem/trash/<time>-<name>/``: ``origin.json`` says when, and where
each path was; the file or folder itself is ``0/<its name>``, a second one ``1/<its name>``. The record is written
first, so that whatever is interrupted can be restored. From another disk a whole copy is made before anything goes.

A checkpoint is kept as a copy in its run's folder, under a name that the run does not use. The copy's metadata say its
own name and, as ``tandem.kept``, which file it is a copy of; its tensors are the same bytes. ``chosen.json`` beside it
says which copy was made last: the chosen one of the run.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from library.config.edit import edited
from library.errors import UserError, gathering, names_in_short, printable
from library.files import atomic_folder, atomic_path, discard, find_bad_name, rename, write_text
from library.folder_lock import HOLDER, is_held
from library.training.report import run_folder
from library.web.access import STATE, Refused
from library.web.jobs import Jobs, read_object
from library.web.site import Form, Given, Routes, Site, goto, url


@dataclass(frozen=True)
class Trashed:
    """What was deleted together: where it is kept, when it was deleted, and where each path was."""

    folder: Path
    at: float
    origins: tuple[Path, ...]

    @property
    def kept(self) -> list[tuple[Path, Path]]:
        """Where each path is kept and where it was, of those that are in the trash."""
        places = [(self.folder / str(i) / path.name, path) for i, path in enumerate(self.origins)]
        return [(kept, path) for kept, path in places if os.path.lexists(kept)]

    @property
    def nbytes(self) -> int:
        """How much disk it takes."""
        files = (Path(folder) / name for folder, _, names in os.walk(self.folder) for name in names)
        return sum(file.lstat().st_size for file in files)


def trash(site: Site, *paths: Path) -> Trashed:
    """Move files and folders into the trash, as one thing to restore; of a run's folder its jobs go along.

    Raises:
        UserError: one is not there, is no file of the allowed folders, or a run uses it; then nothing is moved.
    """
    with site.jobs.alone():
        places = [movable(site, path) for path in paths]
        jobs = [job.folder for job in site.jobs.all() if job.output and Path(job.output) in places]
        _refuse_missing(site, () if jobs else places)
        name = re.sub(r"\W+", "_", places[0].name)[:40]
        folder = _folder(site) / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}-{name}"
        found = Trashed(folder, time.time(), (*places, *jobs))
        folder.mkdir(parents=True)
        _record(found)
        for i, place in enumerate(found.origins):
            if os.path.lexists(place):  # a run that failed at once has only a job
                move(place, folder / str(i) / place.name)
    return found


def restore(site: Site, name: str) -> Trashed:
    """Move what is in the trash under ``name`` back to where it was.

    Raises:
        UserError: it is not in the trash, or something has its place meanwhile; then nothing is moved.
    """
    with site.jobs.alone():
        found = next((each for each in trashed(site) if each.folder.name == name), None)
        if found is None:
            raise UserError(f"{printable(name[:200])}: is not in the trash; reload the screen")
        for _, path in found.kept:
            site.roots.find(str(path.parent), own=path.is_relative_to(site.jobs.folder))
            if os.path.lexists(path):
                raise UserError(f"{site.roots.show(path)}: another one has this name now; rename or delete it first")
        for kept, path in found.kept:
            move(kept, path)
        discard(found.folder)
    return found


def trashed(site: Site) -> list[Trashed]:
    """Return what is in the trash, the newest first."""
    found = []
    for file in sorted(_folder(site).glob("*/origin.json"), reverse=True):
        with suppress(LookupError, TypeError, ValueError):  # a damaged record hides no other
            record = read_object(file) or {}
            found.append(Trashed(file.parent, float(record["at"]), tuple(map(Path, record["from"]))))
    return [each for each in found if each.kept]


def _record(found: Trashed) -> None:
    write_text(found.folder / "origin.json", json.dumps({"at": found.at, "from": [*map(str, found.origins)]}))


def move(source: Path, target: Path) -> None:
    """Move a file or folder to a name that is free; to another disk as a copy that is whole before ``source`` goes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        if source.is_dir() and not source.is_symlink():
            with atomic_folder(target) as copy:
                shutil.copytree(source, copy, symlinks=True, dirs_exist_ok=True)
        else:
            with atomic_path(target) as copy:
                shutil.copy2(source, copy, follow_symlinks=False)
        if sys.platform != "win32":
            os.sync()
        discard(source)


def refuse_busy(jobs: Jobs, path: Path) -> None:
    """Raise a UserError if a job that runs or waits names ``path`` or what is in it, or a run has the folder."""
    jobs_now = jobs.queue()
    for job in jobs_now:
        if any(Path(job.cwd, word).is_relative_to(path) for word in job.words[1:]):
            raise UserError(f"{path}: is used by {job.title}, which runs or waits; stop it first")
    if path.is_file() or path.is_symlink():
        return
    outputs = [Path(job.output) for job in jobs_now if job.output]
    inside = [Path(folder) for folder, _, files in os.walk(path) if HOLDER in files]
    outputs += filter(is_held, (*inside, *path.parents))
    if busy := [each for each in outputs if each.is_relative_to(path) or path.is_relative_to(each)]:
        raise UserError(f"{busy[0]}: a running or waiting run uses this folder; stop it first")


def movable(site: Site, path: Path) -> Path:
    """Return ``path`` with the links above it resolved; raises a UserError if it may not be moved now."""
    place, shown = site.roots.find(str(path.absolute().parent)) / path.name, site.roots.show(path)
    if path.name in ("", "..", STATE) or any(root.is_relative_to(place) for root in site.roots.all):
        raise Refused(f"{shown}: this page was given it, or needs it; delete or rename what is in it")
    refuse_busy(site.jobs, place)
    return place


def _refuse_missing(site: Site, places: Iterable[Path]) -> None:
    if missing := [place for place in places if not os.path.lexists(place)]:
        raise UserError(f"{site.roots.show(missing[0])}: no such file or folder; it may have been moved or deleted")


def _folder(site: Site) -> Path:
    return site.roots.state / "trash"


def rename_run(site: Site, path: Path, name: str) -> Path:
    """Give a run's folder, or a file, which keeps its ending, another name; return its new path.

    Of a run, its config.toml says the new folder where it said the old one, and so do the page's jobs and the trash.
    Other runs' configurations that name a file of it, and a dataset's TOML that lies in it, are left as they are.

    Raises:
        UserError: the name is taken or no name, or one that the run gives to another file; a run uses it.
    """
    with site.jobs.alone():
        old = movable(site, path)
        _refuse_missing(site, [old])
        new, chosen = free_path(old, name), read_object(old.with_name(run_folder.CHOSEN)) or {}
        text, before = _settings_in(site, old, new) if old.is_dir() else "", run_folder.text_of(old / "config.toml")
        try:
            if text:  # first, as a full disk is noticed by it
                write_text(old / "config.toml", text)
            move(old, new)
        except BaseException:
            if text and run_folder.text_of(old / "config.toml") != before:
                write_text(old / "config.toml", before or "")
            raise
        if chosen.get("file") == old.name:
            write_text(new.with_name(run_folder.CHOSEN), json.dumps(chosen | {"file": new.name}))
        site.jobs.rename(old, new)
        bring_back_into(site, old, new)
    return new


def bring_back_into(site: Site, old: Path, new: Path) -> None:
    """Have what was deleted in a folder that was renamed come back into it."""
    for each in trashed(site):
        inside = (new / path.relative_to(old) if old in path.parents else path for path in each.origins)
        if (moved := replace(each, origins=tuple(inside))) != each:
            _record(moved)


def free_path(old: Path, name: str) -> Path:
    """Return the path of a run or file under another name, which is checked; see :func:`rename_run`."""
    ending = "" if old.is_dir() else old.suffix
    name, own = name.removesuffix(ending), run_folder.own_names(old.parent)
    why = find_bad_name(name, 72)  # more bytes, as output_name has it
    if run_folder.NO_RUNS.fullmatch(name):
        why = "it begins with a dot, is samples, or ends in -state"
    new = old if why else old.with_name(f"{name}{ending}")
    why = why or ("it is taken" if os.path.lexists(new) else None)
    if not why and own.fullmatch(old.name) and own.fullmatch(new.name):
        why = "the run gives it to a file of its own, which would replace this one"
    if why:
        raise UserError(f"name: {name[:80]!r} cannot be given ({why}); choose another")
    return new


def _settings_in(site: Site, old: Path, new: Path) -> str:
    """Return the configuration of a run, with paths in its folder as they are once it is renamed."""
    text, settings = run_folder.text_of(old / "config.toml") or "", run_folder.settings_of(old)
    script = run_folder.script_of(settings)
    for key, value in settings.items():
        path = place = Path()
        with suppress(RuntimeError, ValueError):  # a text that is no path, such as "~5 hours"
            path = Path(value).expanduser() if isinstance(value, str) else path
            place = path.resolve()
        if key == "output_dir" and path.name == old.name:  # relative to wherever it was started
            text = edited(text, key, str(path.with_name(new.name)), script)
        elif path.name != value and place.is_relative_to(old):  # a word alone is a name
            text = edited(text, key, site.roots.show(new / place.relative_to(old)), script)
    return text


def delete(site: Site, request: Request, form: Form) -> Response:
    """Move runs and LoRA files to the trash; one that cannot be moved keeps no other from it."""
    refused, paths = list[str](), list(map(str, form.getlist("path")))
    for path in paths:
        with gathering(refused):
            site.roots.find(path, output=True)
            trash(site, Path(path))
    if refused or not paths:
        raise UserError(*refused or ["nothing is chosen; tick what is to be deleted"])
    moved = names_in_short([Path(path).name for path in paths], 2)
    return goto("/") if "own" in form else _changed(site, f"In the trash now, until you empty it: {moved}.")


def _changed(site: Site, said: str) -> Response:
    """Return an answer that says what was done, and has the screen's live parts look at it."""
    answer = site.part("base.html", "notice", notice=said, notice_kind="good")
    answer.headers.update({"hx-retarget": "#message", "hx-reswap": "innerHTML", "hx-trigger": "changed"})
    return answer


def change_name(site: Site, request: Request, form: Form) -> Response:
    """Rename a run or a LoRA file."""
    path = site.roots.find(str(form.get("path", "")), output=True)
    new = rename_run(site, path, str(form.get("name", "")).strip())
    if new.is_dir():
        return goto(url("/run", path=new))
    return _changed(site, f"{path.name} is {new.name} now.")


def keep(site: Site, request: Request, form: Form) -> Response:
    """Copy a checkpoint to the name that the form gives, and mark the copy as the chosen one of its run."""
    given = Given(form)
    path, name = site.roots.find(given["path"], output=True), given["name"]
    found = next((each for each in run_folder.checkpoints_of(path.parent) if each.path == path), None)
    if not (found and run_folder.header_of(path)):
        raise UserError(f"{site.roots.show(path)}: is no whole checkpoint of this run; choose one from its list")
    with site.jobs.alone():
        new, before = free_path(path, name), run_folder.chosen_of(path.parent)
        copy_as(path, new)
        record = {"file": new.name, "step": found.step, "about": found.about.replace("lowest ", "")}
        write_text(path.with_name(run_folder.CHOSEN), json.dumps(record))
    said = f"Kept: {site.roots.show(new)} ({found.about}). Copy it into ComfyUI's models/loras."
    if before:
        said += f"\nIt is the chosen one of this run now. {before.path.name} was it before; that file stays."
    return _changed(site, said)


def copy_as(path: Path, new: Path) -> None:
    """Copy a LoRA to ``new``, which is free; its metadata get the new name, and say what it is a copy of.

    A title that a person gave stays. sd-scripts' older hash is left out, as it depends on the length of the header.
    """
    header = run_folder.header_of(path) or {}
    about = dict(header.get("__metadata__") or {})
    old = about.get("ss_output_name")
    about |= {key: new.stem for key in ("ss_output_name", "modelspec.title") if old and about.get(key) == old}
    about.pop("sshs_legacy_hash", None)
    text = json.dumps(header | {"__metadata__": about | {run_folder.KEPT: path.stem}}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "rb") as file, atomic_path(new) as temporary, open(temporary, "wb") as output:
        file.seek(int.from_bytes(file.read(8), "little"), os.SEEK_CUR)
        output.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(file, output, 2**20)


def show(site: Site, request: Request, form: Form) -> Response:
    """Show what is in the trash; the jobs of a run that went along are not named."""
    jobs = site.jobs.folder
    things = [(each, [path for path in each.origins if not path.is_relative_to(jobs)]) for each in trashed(site)]
    return site.page(request, "trash.html", things=things)


def change(site: Site, request: Request, form: Form) -> Response:
    """Restore what the form names; or, where it names nothing, delete all that is in the trash for good."""
    if name := str(form.get("name", "")):
        restore(site, name)
    else:
        with site.jobs.alone():
            for each in trashed(site):
                discard(each.folder)
    return goto("/trash")


ROUTES: Routes = {
    "/trash": (show, change),
    "/delete": (None, delete),
    "/rename": (None, change_name),
    "/keep": (None, keep),
}
