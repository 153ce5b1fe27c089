"""The images, captions and masks of one subset, found but not opened.

Two ways to say which images: a folder (kohya's DreamBooth form: each image with a caption file of the same
stem, else ``class_tokens``) or a metadata file (kohya's fine-tuning form): JSON ``{image: {"caption",
"tags"}}`` or JSON lines ``{"image_path", "caption", "tags"}``. Relative image paths in a metadata file
start at ``image_dir``, without one at the metadata file's folder, and may not leave it. An entry may name its control
image as ``control_path``, or several as ``control_path_0``, ``control_path_1``, ...; such paths start at
``control_directory``, without one at the metadata file's folder.

Masks, control images and the other image of a pair belong to an image by its name: a file of the image's stem in a
folder of its own, ``photos/cat.jpg`` has ``masks/cat.png``. Of control images there may be several: ``cat_0.png``,
``cat_1.png`` (or with leading zeros), counted from 0. With ``recursive`` the folders inside ``image_dir`` belong to it,
and the other folders have the same folders inside: ``photos/paris/cat.jpg`` has ``masks/paris/cat.png``.

Of a caption's lines all are trained on with ``multiline_captions``, one at a time with ``enable_wildcard`` (lines that
are in none of the variants are counted in a note), else the first, as in sd-scripts (whose ``read_caption`` takes it
even where it is empty; here the first with words). Keys of a metadata file that nothing reads are named.

What lies in a folder and is not trained on is named, with the reason; files that systems and trainers leave there
(``Thumbs.db``, caches) are not.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from library.config.markers import is_nothing
from library.config.model_types import ConditionKind
from library.data.captions import MARKS, never_drawn, trigger_is_added
from library.data.config import Subset, SubsetSettings, refused_condition_keys
from library.data.file_index import FileIndex, SourceFile, Stats, files_inside, list_folder
from library.data.new_dataset import IMAGE_SUFFIXES
from library.errors import UserError, counted, did_you_mean, gathering, names_in_short
from library.files import MOST_DATA_BYTES, parse_json, read_json_lines, read_text, written_path

_NUMBERED = re.compile(r"(.+)_(\d+)")
_CONTROL_KEY = re.compile(r"control_path(?:_(\d+))?")
_ENTRY_KEYS = ("image_path", "caption", "tags", "image_size")  # the last is sd-scripts'; here images are measured

_CAPTIONS = (".txt", ".caption", ".cap", ".tags")
_OF_TRAINERS = (".npz", ".safetensors", ".json", ".jsonl", ".toml", ".yaml")  # caches, and what describes datasets
_LABELS = ("-masklabel", "-condlabel")  # OneTrainer's, beside an image: its mask, and what a fill model is shown
_BY = ("caption_extension", "metadata_file", "image_dir")  # what says which captions are read
_MOST_NAMED = 3
_Listing = tuple[Path, dict[str, Stats], dict[str, list[str]]]  # of _list_images


@dataclass(frozen=True, slots=True)
class Source:
    """One image; ``name`` is its path relative to the subset's folder, ``caption`` its raw text.

    ``more_lines``: whether its caption has lines that are not trained on. ``is_refused``: whether training refuses it.
    """

    name: str
    image: SourceFile
    caption: str
    mask: SourceFile | None = None  # weighs the loss
    inpaint_mask: SourceFile | None = None
    control_images: tuple[SourceFile, ...] = ()
    paired: SourceFile | None = None
    more_lines: bool = False
    caption_file: str | None = None
    is_refused: bool = False

    @property
    def files(self) -> list[SourceFile]:
        """The image, its masks and control images, and the other image of a pair."""
        files = (self.image, self.mask, self.inpaint_mask, self.paired, *self.control_images)
        return [file for file in files if file is not None]


def find_sources(
    subset: Subset, index: FileIndex, warnings: list[str], conditioning: ConditionKind = "none", variants: int = 1
) -> list[Source]:
    """List a subset's images with captions, masks, control images and pairs, sorted by name.

    Args:
        subset: where to look.
        index: memory of the subset's cache folder.
        warnings: lines are added about images without a caption and masks without an image.
        conditioning: what the model is given; of an edit model every image must have a control image.
        variants: how many are drawn of a caption.
    """
    found = find_images(subset, index, warnings, conditioning, None)
    companions = zip(*(_find_companions(subset, key, found, index, warnings) for key in _COMPANIONS), strict=True)
    found = [
        replace(source, mask=mask, inpaint_mask=fill, paired=paired)
        for source, (mask, fill, paired) in zip(found, companions, strict=True)
    ]
    alike = {one.name: (one.image, one.paired) for one in found if one.paired and one.paired.bytes == one.image.bytes}
    index.hash_contents(file for both in alike.values() for file in both)
    if same := [name for name, (image, other) in alike.items() if image.content == other.content]:
        some = _some_of(same, len(found))
        warnings.append(f"{subset.where}: both of a pair are the same file, which teaches nothing: {some}")
    _note_trigger(subset, found, warnings, variants)
    if conditioning == "references":
        found = _with_control_images(subset, found, index, warnings)
    return found


def find_images(
    subset: Subset, index: FileIndex, warnings: list[str], conditioning: ConditionKind, refusals: list[str] | None
) -> list[Source]:
    """List a subset's images with captions alone; with ``refusals``, what is wrong with one is added there."""
    if subset.metadata_file:
        return _from_metadata(subset, index, warnings, conditioning, refusals)
    return _from_folder(subset, index, warnings, refusals)


def _note_trigger(subset: Subset, found: list[Source], warnings: list[str], variants: int) -> None:
    """Say where the trigger word is put in; its mark without a word would be learnt as text, so it is refused."""
    settings, where = subset.settings, subset.where
    if word := settings.trigger_word:
        bare = sum(trigger_is_added(source.caption, settings, variants) for source in found)
        done = f"put in front of {bare} of {counted(len(found), 'caption')}" if bare else "in every caption"
        known_as = f" (preserve_class {settings.preserve_class!r})" if settings.preserve_class else ""
        warnings.append(f"{where}: trigger word {word!r}{known_as} {done}")
        return
    added, mark = f"{settings.caption_prefix}{settings.caption_suffix}", MARKS[0]
    if marked := [source.name for source in found if mark in f"{source.caption}{added}"]:
        remedy = "write captions without it, as is_reg has no trigger word" if settings.is_reg else "set trigger_word"
        raise UserError(f"{where}: {mark} in the captions of {_some_of(marked, len(found))}; {remedy}")


def _with_control_images(subset: Subset, found: list[Source], index: FileIndex, warnings: list[str]) -> list[Source]:
    if subset.control_dir is not None:
        without = [source for source in found if not source.control_images]
        notes = warnings if len(without) == len(found) else []  # what control_path names may lie there too
        stems, recursive = [_companion(subset, source) for source in without], subset.settings.recursive
        controls = _find_control_images(subset.where, subset.control_dir, recursive, stems, index, notes)
        of_folder = {source.name: files for source, files in zip(without, controls, strict=True)}
        found = [replace(source, control_images=source.control_images or of_folder[source.name]) for source in found]
    missing = [source.name for source in found if not source.control_images]
    if missing:
        place = f" in control_directory {subset.control_dir}" if subset.control_dir else ""
        raise UserError(
            f"{subset.where}: no control image{place} for {_some_of(missing, len(found))}; "
            "an edit model needs one for each: add one of the same name, or control_path keys"
        )
    return found


_COMPANIONS = {  # key -> what is known of the folder that it names, and what to do about an image without one there
    "conditioning_data_dir": ("mask_dir", "add one of the same name, or put images that count whole in another subset"),
    "inpaint_mask_directory": ("inpaint_mask_dir", "add an image of the same name, white where to fill"),
    "paired_directory": ("paired_dir", "add the other image of the pair, of the same name"),
}


def _find_companions(
    subset: Subset, key: str, sources: Sequence[Source], index: FileIndex, warnings: list[str]
) -> Sequence[SourceFile | None]:
    """Return of every image the one of its name in the folder that ``key`` names: its mask, or the other of a pair."""
    (attribute, remedy), what = _COMPANIONS[key], "image" if key == "paired_directory" else "mask"
    folder: Path | None = getattr(subset, attribute)
    if folder is None:
        return [None] * len(sources)
    recursive, beside = subset.settings.recursive, folder == subset.image_dir
    if beside and what == "image":
        raise UserError(f"{subset.where}: {key} is image_dir itself; name the folder of the other images")
    files = list_folder(folder, recursive)
    files = {name: files[name] for name in _masks_among(subset, files)} if beside else files
    by_stem = defaultdict[str, list[str]](list)
    for name in filter(is_image, files):
        by_stem[stem(name).removesuffix(_LABELS[0])].append(name)
    stems = [_companion(subset, source) for source in sources]
    meant, holder = _alike(stems, by_stem), f"{subset.where}: {key} {folder}"
    found = [[name for one in meant[its_stem] for name in by_stem[one]] for its_stem in stems]
    if missing := [source.name for names, source in zip(found, sources, strict=True) if not names]:
        some = _some_of(missing, len(sources))
        if not beside or subset.inpainting is not None:
            raise UserError(f"{subset.where}: no {what} in {key} {folder} for {some}; {remedy}")
        warnings.append(f"{subset.where}: no {_LABELS[0]} file for {some}, which count whole, as in OneTrainer")
    used = [_only(names, holder) if names else None for names in found]
    _note_unused(subset.where, f"{what}s", folder, files, set(filter(None, used)), warnings)
    return [None if name is None else index.image(f"{folder}{os.sep}{name}", files[name]) for name in used]


def _find_control_images(
    where: str, folder: Path, recursive: bool, stems: Sequence[str], index: FileIndex, warnings: list[str]
) -> list[tuple[SourceFile, ...]]:
    """Return the control images of every image's stem in their order; none for an image without."""
    files = list_folder(folder, recursive)
    names = list(filter(is_image, files))
    numbered = {name: match for name in names if (match := _NUMBERED.fullmatch(stem(name)))}
    there = {*map(stem, names), *(match[1] for match in numbered.values())}
    meant, used = {one: owner for owner, alike in _alike(stems, there).items() for one in alike}, set[str]()
    of_image: dict[str, dict[int, str]] = defaultdict(dict)  # stem -> number -> name; -1: of the image's own name
    for name in names:
        match = None if stem(name) in meant else numbered.get(name)
        owner, number = (meant.get(match[1]), int(match[2])) if match else (meant.get(stem(name)), -1)
        if owner is not None:
            used.add(name)
            other = of_image[owner].setdefault(number, name)
            _only(sorted({other, name}), f"{where}: control_directory {folder}", "number" if match else "name")
    found: list[tuple[SourceFile, ...]] = []
    for its_stem in stems:
        ordered = dict(sorted(of_image.get(its_stem, {}).items()))
        if -1 in ordered and len(ordered) > 1:
            both = " and ".join([*ordered.values()][:2])
            raise UserError(f"{where}: control_directory {folder} holds {both}; number all of an image's or none")
        missing = next((n for n in range(len(ordered)) if n not in ordered), None)
        if missing is not None and -1 not in ordered:
            named = f"{its_stem}_{missing}"
            raise UserError(f"{where}: control_directory {folder} holds no {named} but higher numbers; count from 0")
        found.append(tuple(index.image(f"{folder}{os.sep}{name}", files[name]) for name in ordered.values()))
    _note_unused(where, "control images", folder, files, used, warnings)
    return found


def _companion(subset: Subset, source: Source) -> str:
    """The stem of what belongs to an image: with its folders where those are mirrored."""
    base = subset.image_dir or (subset.metadata_file or Path()).parent
    inside = stem(source.image.path).removeprefix(f"{base}{os.sep}")
    return inside if subset.settings.recursive else PurePath(inside).name


def _list_images(folder: Path) -> _Listing:
    """Return a folder as it is spelled, its files, and names and stems, :func:`_folded`, -> its images."""
    folder = _as_spelled(folder)
    files = list_folder(folder) if folder.is_dir() else {}
    folded = defaultdict[str, list[str]](list)
    for name in filter(is_image, files):
        folded[_folded(name)].append(name)
        folded[_folded(stem(name))].append(name)
    return folder, files, folded


def _as_spelled(folder: Path) -> Path:
    """Return the folder that is there, where a name on its path differs in case or in Unicode's form alone."""
    if folder.is_dir() or not folder.name:
        return folder
    parent = _as_spelled(folder.parent)
    near = [one for one in parent.iterdir() if _folded(one.name) == _folded(folder.name)] if parent.is_dir() else []
    return near[0] if len(near) == 1 else parent / folder.name


def _only(names: Sequence[str], holder: str, what: str = "name", remedy: str = "remove one") -> str:
    """Return the only one of ``names``; which of several is meant nobody can tell."""
    if len(names) > 1:
        raise UserError(f"{holder} holds {names[0]} and {names[1]}, of one {what}; {remedy}")
    return names[0]


def _note_unused(
    where: str, what: str, folder: Path, files: Collection[str], used: set[str], warnings: list[str]
) -> None:
    images = list(filter(is_image, files))
    if unused := sorted(set(images) - used):
        named = names_in_short(unused, _MOST_NAMED)
        warnings.append(f"{where}: {len(unused)} {what} in {folder} belong to no image, left out ({named})")
    if others := left_out(files, images, by=_BY[2]):
        warnings.append(f"{where}: in {folder} {others}")


def generated_record(path: Path) -> Path:
    """Return the file that says how the base generated an image; hidden, so it is no part of a dataset."""
    return path.with_name(f".{path.stem}.json")


def _from_folder(subset: Subset, index: FileIndex, warnings: list[str], refusals: list[str] | None) -> list[Source]:
    folder = subset.image_dir
    assert folder is not None
    recursive, others = subset.settings.recursive, dict[str, bool]()
    besides = [path for path in (*subset.companion_dirs, index.folder) if path != folder]
    files = list_folder(folder, recursive, besides, others)
    if subset.only is not None:
        stems = {*map(stem, subset.only)}
        unlisted = [name for name in files if is_image(name) and name not in subset.only]
        # one with a record of its own is of another prompt
        if strange := [one for one in unlisted if stem(one) in stems or not generated_record(folder / one).exists()]:
            warnings.append(f"{subset.where}: left out, as the base has not generated them: {names_in_short(strange)}")
        kept = {*subset.only, *(name for name in files if stem(name) in stems and not is_image(name))}  # captions too
        files = {name: stats for name, stats in files.items() if name in kept}
    names = _pictures(files)
    inside = [] if recursive else _pictures(files_inside(folder, besides))
    if not names:
        where = f"{len(inside)} in the folders inside ({inside[0]}, ...); " if inside else ""
        remedy = f"{where}{'name one of them, or set recursive = true' if inside else 'name the folder that does'}"
        kinds = "png, jpg, webp, avif, bmp, tiff, gif"
        raise UserError(f"{subset.where}: image_dir {str(folder)!r} holds no images ({kinds}); {remedy}")
    if inside:
        warnings.append(
            f"{subset.where}: {counted(len(inside), 'image')} in folders inside {folder} left out "
            f"({names_in_short(inside, _MOST_NAMED)}); set recursive = true to train on them"
        )
    captions = captions_beside([*files, *others], caption_suffix(subset), subset.where if refusals is None else None)
    if unread := left_out(files, {*names, *captions.values(), *_masks_among(subset, files)}, others):
        warnings.append(f"{subset.where}: {unread}")
    found: list[Source] = []
    without: list[str] = []
    for name in names:
        with gathering(refusals):
            image = index.image(f"{folder}{os.sep}{name}", files[name])
            if (beside := captions.get(name)) is None:
                without.append(name)
                found.append(Source(name, image, subset.settings.class_tokens or ""))
                continue
            path = f"{folder}{os.sep}{beside}"
            found.append(Source(name, image, "", caption_file=path, is_refused=True))  # until it is read
            caption, more = lines_read(index.caption(path, files.get(beside, (0, 0, 0))), subset.settings)
            if not caption:
                raise UserError(f"{path}: empty caption; write one, or delete the file to use class_tokens")
            found[-1] = replace(found[-1], caption=caption, more_lines=more, is_refused=False)
    with gathering(refusals):
        if without and subset.settings.class_tokens is None:
            _complain_about_missing_captions(subset, files, without, len(names), warnings)
        return found
    return [replace(source, is_refused=True) for source in found]


def captions_beside(files: Collection[str], suffix: str, where: str | None = None) -> dict[str, str]:
    """Return image -> its caption, of those ``files`` of a folder that are images and have one.

    That is the file of the image's stem, or one that is alike, as :func:`_alike` has it.

    Raises:
        UserError: with ``where``, several files could be an image's caption.
    """
    wanted = {name: stem(name) + suffix for name in files if is_image(name)}
    meant = _alike(wanted.values(), set(files) - wanted.keys())
    if several := next((name for name, caption in wanted.items() if where and len(meant[caption]) > 1), None):
        near = names_in_short(meant[wanted[several]])
        raise UserError(f"{where}: {near} could all be the caption of {several}; keep one")
    return {name: meant[caption][0] for name, caption in wanted.items() if meant[caption]}


def captioned(files: Collection[str]) -> dict[str, set[str]]:
    """Return usual endings of captions -> the images among the ``files`` of a folder that have one of it."""
    return {suffix: set(captions_beside(files, suffix)) for suffix in _CAPTIONS}


def usual_extension(folder: Path) -> tuple[str, set[str]]:
    """Return the extension of most captions in a folder of images, and the images that have one of another alone."""
    by_ending = captioned(list_folder(folder))
    usual = max(by_ending, key=lambda suffix: len(by_ending[suffix]))
    return usual, set[str]().union(*by_ending.values()) - by_ending[usual]


def _alike(wanted: Collection[str], there: Collection[str]) -> dict[str, list[str]]:
    """Return which of the names ``there`` each of the ``wanted`` means.

    That is the same one. Without it those that differ from it in upper and lower case or in Unicode's form alone ("É"
    may be one character or two), if no other of the ``wanted`` could mean them.
    """
    known, near = set(there), defaultdict[str, list[str]](list)
    for name in sorted(known.difference(wanted)):
        near[_folded(name)].append(name)
    rivals = Counter(map(_folded, {*wanted} - known))
    return {name: [name] if name in known else near[_folded(name)] * (rivals[_folded(name)] == 1) for name in wanted}


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def uncaptioned(subset: Subset, captioned_too: bool = False) -> dict[Path, Path]:
    """Return the images of a subset with an ``image_dir`` that have no caption, with the files that one belongs in.

    ``captioned_too``: also those that have one, with its file.
    """
    folder, suffix = subset.image_dir, caption_suffix(subset)
    assert folder is not None
    if is_image(f"x{suffix}"):
        raise UserError(f"{subset.where}: caption_extension {suffix!r} is that of an image; name another, as '.txt'")
    besides, others = [path for path in subset.companion_dirs if path != folder], dict[str, bool]()
    files = list_folder(folder, subset.settings.recursive, besides, others)
    captions = captions_beside([*files, *others], suffix, subset.where)
    for caption in set(captions.values()) - files.keys():
        read_text(folder / caption)  # which tells what lies there instead of a file
    found = [name for name in _pictures(files) if captioned_too or name not in captions]
    return {folder / name: folder / captions.get(name, stem(name) + suffix) for name in found}


def caption_suffix(subset: Subset) -> str:
    """Return what follows an image's stem in the name of its caption's file; the dot may be left out in the TOML."""
    suffix = subset.settings.caption_extension
    return suffix if not suffix or suffix.startswith(".") else f".{suffix}"


def lines_read(text: str, settings: SubsetSettings) -> tuple[str, bool]:
    """Return what of a caption's text is trained on, and whether it has more lines than that."""
    text = re.sub("\r\n?", "\n", text).strip()
    if settings.multiline_captions:
        return text, False
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    read = lines if settings.enable_wildcard else lines[:1]
    return "\n".join(read), len(lines) > len(read)


def note_lines(subset: Subset, sources: Sequence[Source], variants: int) -> list[tuple[list[Source], str]]:
    """Return notes on captions of which parts are not trained on, with the images that have them.

    Those are all lines but the first, or lines and choices of wildcards that are in none of a caption's ``variants``.
    """
    drawn, total = sources if subset.settings.enable_wildcard else [], len(sources)
    few = [never_drawn(source.caption, subset.settings, variants) for source in drawn]
    missed, enough = sum(count for count, _ in few), max((enough for count, enough in few if count), default=0)
    why = f" are in none of its {variants} variants, and not trained on: caption_variants = {enough} draws all"
    read = "; the first of each is trained on, as in sd-scripts: set multiline_captions = true to train on all of it"
    some = [
        ("several lines", [source for source in sources if source.more_lines], read),
        (f"{missed} lines or choices", [one for one, (count, _) in zip(drawn, few, strict=True) if count], why),
    ]
    named = [(f"{what} in the captions of {_some_of([s.name for s in of], total)}", of, why) for what, of, why in some]
    return [(of, f"{subset.where}: {what}{why}") for what, of, why in named if of]


def _complain_about_missing_captions(
    subset: Subset, files: dict[str, Stats], without: list[str], total: int, warnings: list[str]
) -> None:
    suffix = caption_suffix(subset)
    word = subset.settings.trigger_word
    beside = [end for end, names in captioned(files).items() if not names.isdisjoint(without)]
    if len(without) < total or (word and not beside):
        text = "the trigger word alone" if word else "an empty caption"
        warnings.append(
            f"{subset.where}: no {suffix} file for {_some_of(without, total)}, trained with {text}; "
            "write captions or set class_tokens"
        )
        return
    if beside:
        remedy = f"set caption_extension = '{beside[0]}'"
    else:
        remedy = 'write captions, or set class_tokens to one caption for all ("" for none)'
    raise UserError(f"{subset.where}: no {suffix} file for any of {counted(total, 'image')}; {remedy}")


def _from_metadata(
    subset: Subset, index: FileIndex, warnings: list[str], conditioning: ConditionKind, refusals: list[str] | None
) -> list[Source]:
    file = subset.metadata_file
    assert file is not None
    base = subset.image_dir or file.parent
    folders: dict[Path, _Listing] = {}
    found: list[Source] = []
    unknown: Counter[str] = Counter()
    refused = refused_condition_keys(conditioning).get("control_directory")
    for where, name, entry in _metadata_entries(file, refusals):
        with gathering(refusals):
            image = _listed_file(base, name, "image", where, folders, index)
            control_names = _control_paths(entry, refused, where)
            start = subset.control_dir or file.parent
            controls = tuple(_listed_file(start, c, "control image", where, folders, index) for c in control_names)
            caption, more = _metadata_caption(subset, entry, where)
            found.append(Source(name, image, caption, control_images=controls, more_lines=more))
            unknown.update(key for key in entry if key not in _ENTRY_KEYS and not _CONTROL_KEY.fullmatch(key))
    if not found and not refusals:
        raise UserError(f"{file}: no images in it; write one entry an image")
    if unknown:
        said = [f"{key!r} ({n} of {len(found)}){did_you_mean(key, _ENTRY_KEYS)}" for key, n in unknown.items()]
        warnings.append(f"{file}: keys that nothing reads: {names_in_short(said, 20)}")
    if subset.image_dir is not None:
        paths, within = [file.path for source in found for file in source.files], f"{base}{os.sep}"
        listed = [path.removeprefix(within) for path in paths if path.startswith(within)]
        recursive = subset.settings.recursive or any(os.sep in name for name in listed)
        besides, others = [path for path in subset.companion_dirs if path != base], dict[str, bool]()
        files = list_folder(base, recursive, besides, others)
        if unread := left_out(files, [*listed, *_masks_among(subset, files)], others, _BY[1]):
            warnings.append(f"{subset.where}: {unread}")
    return sorted(found, key=lambda source: source.name)


def _listed_file(
    base: Path, name: str, what: str, where: str, folders: dict[Path, _Listing], index: FileIndex
) -> SourceFile:
    """The record of an image that a metadata entry names; a relative path must stay below ``base``.

    ``folders`` remembers what was listed.
    """
    path = written_path(name, f"{where}: {what}")
    full = Path(os.path.normpath(base / path))
    if full.parent not in folders:
        folders[full.parent] = _list_images(full.parent)
    (folder, files, folded), written = folders[full.parent], full.name
    real = os.path.realpath(folder / written)
    if not path.is_absolute() and not real.startswith(os.path.realpath(base) + os.sep):
        raise UserError(f"{where}: {what} {name!r} lies outside {base}; write its absolute path")
    near = folded.get(_folded(written), [])
    alike = [written] if written in files else [each for each in near if stem(each) == written] or near
    if not alike:
        remedy = did_you_mean(written, files) or f"; it is looked for in {folder}"
        raise UserError(f"{where}: {what} {name!r} does not exist{remedy}")
    file_name = _only(alike, f"{where}: {folder}", remedy="write which, with its ending")
    return index.image(f"{folder}{os.sep}{file_name}", files[file_name])


def _control_paths(entry: dict[str, Any], refused: str | None, where: str) -> list[str]:
    """The control images of a metadata entry as written, in their order."""
    named: dict[int, str] = {}
    for key, value in entry.items():
        match = _CONTROL_KEY.fullmatch(key)
        if not match or is_nothing(value):
            continue
        if refused is not None:
            raise UserError(f"{where}: {key!r} is not taken: {refused}")
        if not isinstance(value, str):
            raise UserError(f"{where}: {key!r} is not a string; write the image's path in quotes")
        number = int(match[1] or 0)
        if number in named:
            raise UserError(f"{where}: {key!r} repeats what another key sets; keep one")
        named[number] = value
    missing = next((n for n in range(len(named)) if n not in named), None)
    if missing is not None:
        raise UserError(f"{where}: no 'control_path_{missing}' but higher numbers; count from 0")
    return [named[number] for number in sorted(named)]


def names_controls(file: Path) -> bool:
    """Whether an entry of a metadata file names a control image, as those for an edit model do."""
    with gathering([]):  # what is wrong with the file is said by find_sources()
        keys = (item for _, _, entry in _metadata_entries(file, []) for item in entry.items())
        return any(_CONTROL_KEY.fullmatch(key) and not is_nothing(value) for key, value in keys)
    return False


def _metadata_entries(file: Path, refusals: list[str] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (place for messages, image path as written, its entry) of a JSON or JSON lines file."""
    if file.suffix.lower() == ".jsonl":
        for where, entry in read_json_lines(file, refusals):
            with gathering(refusals):
                if not isinstance(entry, dict) or not isinstance(entry.get("image_path"), str):
                    raise UserError(f'{where}: no "image_path"; write {{"image_path": ..., "caption": ...}}')
                yield where, entry["image_path"], entry
        return
    entries = parse_json(read_text(file, most=MOST_DATA_BYTES), str(file))
    if not isinstance(entries, dict):
        raise UserError(f'{file}: not an object; write {{"image.png": {{"caption": ...}}}}, or name the file .jsonl')
    for name, entry in entries.items():
        with gathering(refusals):
            if not isinstance(entry, dict):
                raise UserError(f'{file}: entry {name!r} is not an object; write {{"caption": ...}}')
            yield f"{file}: {name!r}", name, entry


def _metadata_caption(subset: Subset, entry: dict[str, Any], where: str) -> tuple[str, bool]:
    caption, tags = entry.get("caption"), entry.get("tags")
    for key, value in (("caption", caption), ("tags", tags)):
        if value is not None and not isinstance(value, str):
            raise UserError(f"{where}: {key!r} is not a string; write it in quotes")
    glue = f"{subset.settings.caption_separator.strip()} "
    text, more = lines_read(caption or "", subset.settings)
    lines = [text] if subset.settings.multiline_captions else text.split("\n")
    one_line_of_tags = glue.join(tag.strip() for tag in re.split("[\r\n]", tags or "") if tag.strip())
    if one_line_of_tags:
        lines = [f"{line}{glue}{one_line_of_tags}" if line else one_line_of_tags for line in lines]
    other = subset.settings.trigger_word or subset.settings.class_tokens
    if caption is None and tags is None and other is None:
        raise UserError(f'{where}: neither "caption" nor "tags"; add one, or set class_tokens')
    return "\n".join(lines) or (subset.settings.class_tokens or "" if caption is None else ""), more


def left_out(
    files: Collection[str], used: Collection[str], others: Mapping[str, bool] | None = None, by: str = _BY[0]
) -> str:
    """Return "2 files left out: b.txt (captions without an image)"; "" where there is none worth naming.

    ``used``: what is not; ``others``: as :func:`list_folder` found them; ``by``: what says which captions are read.
    """
    reasons: dict[str, list[str]] = defaultdict(list)
    stems = set(map(stem, used if by == _BY[0] else filter(is_image, files)))
    for name in sorted({*files}.difference(used)):
        suffix = f".{name.rpartition('.')[2].lower()}"
        if suffix in _CAPTIONS:
            unread = f"captions that are not read; {by} says which are"
            unread = unread if by != _BY[2] else "captions, which are read in image_dir alone"
            reasons[unread if stem(name) in stems or by == _BY[2] else "captions without an image"].append(name)
        elif suffix in IMAGE_SUFFIXES and stem(name).endswith(_LABELS):
            reasons[f"of OneTrainer; conditioning_data_dir = image_dir takes {_LABELS[0]} files as masks"].append(name)
        elif suffix in IMAGE_SUFFIXES:
            reasons[f"not in {by}" if by == _BY[1] else "images in no folder called like '10_name'"].append(name)
        elif suffix not in _OF_TRAINERS:
            reasons["not read; save pictures as PNG or JPEG"].append(name)
    nowhere = sorted(name for name, is_folder in (others or {}).items() if not is_folder and name not in used)
    reasons["pipes, devices, or links that lead nowhere"] += nowhere
    parts = [f"{names_in_short(names, _MOST_NAMED)} ({why})" for why, names in reasons.items() if names]
    return f"{counted(sum(map(len, reasons.values())), 'file')} left out: {'; '.join(parts)}" if parts else ""


def _masks_among(subset: Subset, files: Iterable[str]) -> list[str]:
    """Return the masks among the ``files`` of a subset's folder, if it is the folder of its masks too."""
    is_theirs = subset.image_dir in (subset.mask_dir, subset.inpaint_mask_dir)
    return [name for name in files if is_theirs and is_image(name) and stem(name).endswith(_LABELS[0])]


def _some_of(names: Sequence[str], total: int) -> str:
    """Return "2 of 9 images (a.png, b.png)"."""
    return f"{len(names)} of {counted(total, 'image')} ({names_in_short(names, _MOST_NAMED)})"


def note_frames(where: str, sources: Sequence[Source]) -> list[str]:
    """Return a note on the images of which only the first of several frames or pages is used, if there are any."""
    many = [f"{source.name}: {source.image.frames}" for source in sources if source.image.frames > 1]
    text = f"{where}: several frames or pages in {_some_of(many, len(sources))}; the first of each is trained on"
    return [text] if many else []


def is_image(name: str) -> bool:
    """Whether a file name has the suffix of a format that can be read."""
    return f".{name.rpartition('.')[2].lower()}" in IMAGE_SUFFIXES  # pathlib takes seconds for 100,000 names


def _pictures(files: Iterable[str]) -> list[str]:
    """Return the names of images that are no masks or conditions as OneTrainer has them beside images."""
    return [name for name in files if is_image(name) and not stem(name).endswith(_LABELS)]


def stem(name: str) -> str:
    """Return a file name without its suffix."""
    return name.rpartition(".")[0]
