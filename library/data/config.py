"""kohya's dataset TOML, read, checked and inherited.

A dataset TOML has an optional ``[general]`` table, ``[[datasets]]`` tables and ``[[datasets.subsets]]`` tables below
each of them. A key is looked for in the subset, then in its dataset, then in ``[general]``; what is found first counts
(the lookup order of sd-scripts' ``config_util.py``). Keys that describe batches and buckets belong to datasets, keys
that say which files to read belong to subsets. musubi-tuner's flat form, a dataset that names its ``image_directory``
itself, is read as a dataset with one subset. A table with ``resolutions`` becomes a dataset for each of them.

Whether a table is musubi-tuner's :func:`is_musubis` alone decides, by the names of its images: sizes are musubi-tuner's
then, and captions whole. Else a caption's first line is trained on, as in sd-scripts; Tandem's own datasets say
``multiline_captions``, and ``validation_split = "auto"``. Whose bucket sizes hold, which many tables of sd-scripts
leave to the defaults, ``Dataset.bucket_rule`` says.

Every table is checked by itself, so a message names the table of the mistake. Keys of either tool that could take no
effect are refused with what to do instead, and so are conditions that the model at hand does not take: a fill model is
given inpainting masks (by files, by the images' own transparency, or generated), an edit model reference images.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from library.config.kohya.flags import FLAGS
from library.config.markers import MOST, MOST_SIDE, Batch, EffectOnly, Fraction, OnlyWith, Seed, is_nothing, split_pairs
from library.config.model_types import Blank, ConditionKind
from library.config.schema import DatasetArguments
from library.data.masks import MASK_KINDS, MaskKind
from library.errors import UserError, did_you_mean, names_in_short
from library.files import broken_link, read_toml, written_path

LEAST_TO_HOLD_OUT = 10  # images, with validation_split = "auto"
DEFAULT_VARIANTS = 4  # generated masks of an image: each costs as much cache and encoding as the image itself
_MASK_SOURCES = ("inpaint_mask_directory", "inpaint_alpha_mask", "inpaint_masks")
INPAINT_KEYS = (*_MASK_SOURCES, "inpaint_mask_variants", "inpaint_blank")
REFERENCE_KEYS = ("control_directory", "control_resolution", "no_resize_control")


def refused_condition_keys(conditioning: ConditionKind) -> dict[str, str]:
    """Return key -> why not and what instead, for the keys that a model of this kind does not take."""
    why = _OF_TRAINERS["conditions"][conditioning]
    kinds = (("fill", INPAINT_KEYS, "a fill"), ("references", REFERENCE_KEYS, "an edit"))
    return {key: why.format(wanted=wanted) for kind, keys, wanted in kinds if kind != conditioning for key in keys}


@dataclass(frozen=True)
class InpaintMasks:
    """Where the masks of a subset's images come from, for a fill model, and what the masked region is blanked with."""

    source: Literal["files", "alpha", "generated"]
    kinds: tuple[MaskKind, ...] = ()  # of generated masks
    variants: int = 1  # masks of an image; each is cached
    by_default: bool = False
    blank: Blank = "grey"

    def describe(self) -> str:
        """Return what the summary says of them."""
        default = " by default" if self.by_default else ""
        text = {
            "files": "inpainting masks",
            "alpha": "inpainting masks from alpha",
            "generated": f"generated masks{default} ({', '.join(self.kinds)}; {self.variants} an image)",
        }[self.source]
        return text if self.blank == "grey" else f"{text}, blanked with {self.blank}"


Interpolation = Literal["lanczos", "area", "box", "bicubic", "cubic", "bilinear", "linear", "nearest"]
Side = Annotated[int, Field(ge=1, le=MOST_SIDE)]
_AsTuple = BeforeValidator(lambda value: tuple(value) if type(value) is list else value)
Sides = Annotated[Side | tuple[Side, Side], _AsTuple]
Word = Annotated[str, StringConstraints(strip_whitespace=True)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_TAGS: dict[str, Any] = {"shuffle_caption": True, "caption_tag_dropout_rate": True}
_JOINED = _TAGS | dict.fromkeys(("keep_tokens_separator", "secondary_separator", "trigger_word", "metadata_file"), True)
_RANDOM_TAGS, _SPLIT = OnlyWith(any_of=True, **_TAGS), OnlyWith(any_of=True, **_JOINED)
_BUCKETED, _BOUNDED = OnlyWith(enable_bucket=True), OnlyWith(enable_bucket=True, bucket_no_upscale=False)


class SubsetSettings(_Table):
    """Keys of ``[[datasets.subsets]]``; those not in :data:`SUBSET_ONLY` may also stand further up."""

    image_dir: str | None = None
    recursive: bool = False
    metadata_file: str | None = None
    conditioning_data_dir: str | None = None
    control_directory: str | None = None
    inpaint_mask_directory: str | None = None
    paired_directory: str | None = None
    inpaint_alpha_mask: bool = False
    inpaint_masks: Annotated[tuple[MaskKind, ...], _AsTuple] | None = None
    inpaint_mask_variants: Annotated[int, Field(ge=1, le=10_000)] | None = None
    inpaint_blank: Blank = "grey"
    is_reg: bool = False
    class_tokens: str | None = None
    num_repeats: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    alpha_mask: bool = False
    flip_aug: bool = False
    random_crop: bool = False
    resize_interpolation: Interpolation | None = None
    caption_extension: str = ".caption"
    caption_separator: Annotated[str, Field(min_length=1), _SPLIT] = ","
    secondary_separator: str | None = None
    enable_wildcard: bool = False
    multiline_captions: bool = False
    shuffle_caption: bool = False
    keep_tokens: Annotated[int, Field(ge=0, le=MOST), _RANDOM_TAGS] = 0
    keep_tokens_separator: str | None = None
    caption_prefix: str | None = None
    caption_suffix: str | None = None
    caption_dropout_rate: Fraction = 0.0
    caption_dropout_every_n_epochs: Annotated[int, Field(ge=0, le=MOST)] = 0
    caption_tag_dropout_rate: Fraction = 0.0
    trigger_word: Word | None = None
    preserve_class: Word | None = None
    validation_split: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 0.0
    validation_seed: Annotated[Seed | None, OnlyWith(validation_split=True)] = None

    def held_out(self, images: int) -> int:
        """Return how many of so many images are held out; "auto": of ten and more one in ten, at most eight.

        One in ten is sd-scripts' example. Eight at five noise levels are 40 passes without gradients, about as long as
        13 training steps: a validation every 250 steps takes 5 % more time.
        """
        if self.validation_split == "auto":
            return min(round(images / 10), 8) if images >= LEAST_TO_HOLD_OUT else 0
        return round(images * self.validation_split)


class DatasetSettings(_Table):
    """Keys of ``[[datasets]]``; all may also stand in ``[general]``."""

    resolution: Sides | None = None
    resolutions: Annotated[tuple[Sides, ...], _AsTuple, Field(min_length=1)] | None = None
    batch_size: Batch = 1
    enable_bucket: bool = False
    bucket_no_upscale: Annotated[bool, _BUCKETED] = False
    bucket_reso_steps: Annotated[Side | None, _BUCKETED] = None  # kohya's: 64
    min_bucket_reso: Annotated[Side | None, _BOUNDED] = None
    max_bucket_reso: Annotated[Side | None, _BOUNDED] = None
    control_resolution: Sides | None = None
    no_resize_control: bool = False
    cache_directory: str | None = None


FIELDS = DatasetSettings.model_fields | SubsetSettings.model_fields  # no key is in both


def idle_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a dataset's or subset's table without effect beside its others, and the reason of each."""
    marks = ((key, mark) for key in values if key in FIELDS for mark in FIELDS[key].metadata)
    return {key: mark.reason(values) for key, mark in marks if isinstance(mark, OnlyWith) and mark.unmet(values)}


_FOLDERS = ("image_dir", "conditioning_data_dir", "control_directory", "inpaint_mask_directory", "paired_directory")
SUBSET_ONLY = frozenset({*_FOLDERS, "metadata_file", "is_reg"})
_RESOLUTIONS = frozenset({"resolution", "resolutions"})
SUBSET_KEYS = frozenset(SubsetSettings.model_fields)
DATASET_KEYS = frozenset(DatasetSettings.model_fields)
BUCKET_SIZE_KEYS = frozenset({"bucket_reso_steps", "min_bucket_reso", "max_bucket_reso"})
BucketRule = Literal["tandem", "kohya", "musubi"] | None  # None: no buckets
_MUSUBI_SOURCES = frozenset({"image_directory", "image_jsonl_file"})
_OF_TRAINERS = read_toml(Path(__file__).with_name("keys_of_trainers.toml"))[0]
OTHER_NAMES: Mapping[str, str] = _OF_TRAINERS["other_names"]
_OF_FLAGS = {key: f"{FLAGS[key].why}; {FLAGS[key].instead}" for key in _OF_TRAINERS["flags"]}
REFUSED_KEYS: dict[str, str] = _OF_FLAGS | _OF_TRAINERS["refused"]
_OPTION_OF = {  # key -> the option that holds where a dataset does not say
    mark.default_of: option
    for option, field in DatasetArguments.model_fields.items()
    for mark in field.metadata
    if isinstance(mark, EffectOnly) and mark.default_of
}


def is_musubis(table: Mapping[str, Any]) -> bool:
    """Return whether a table names its images as musubi-tuner's datasets do, and not as sd-scripts'."""
    return bool(_MUSUBI_SOURCES & table.keys())


@dataclass(frozen=True)
class Subset:
    """One ``[[datasets.subsets]]`` with everything inherited and its paths found."""

    where: str  # "dataset.toml: subset 2", the beginning of messages about it
    settings: SubsetSettings
    written_dir: str  # image_dir or metadata_file as the TOML spells it: part of a sample's identity
    image_dir: Path | None
    metadata_file: Path | None
    mask_dir: Path | None
    control_dir: Path | None = None
    inpaint_mask_dir: Path | None = None
    paired_dir: Path | None = None
    inpainting: InpaintMasks | None = None  # of a fill model
    only: frozenset[str] | None = None  # the images of the folder that are meant; None: all

    @property
    def companion_dirs(self) -> list[Path]:
        """The folders of what belongs to its images."""
        folders = (self.mask_dir, self.control_dir, self.inpaint_mask_dir, self.paired_dir)
        return [path for path in folders if path is not None]


@dataclass(frozen=True)
class Dataset:
    """One ``[[datasets]]`` with its subsets; the resolutions are (width, height) in pixels."""

    where: str
    settings: DatasetSettings
    resolution: tuple[int, int]
    cache_directory: Path | None
    subsets: tuple[Subset, ...]
    control_resolution: tuple[int, int] | None = None
    number: int = 1  # of its table; those of one table with several resolutions share it
    of_musubi: bool = False  # its table names its images as musubi-tuner's do

    @property
    def bucket_rule(self) -> BucketRule:
        """Whose rule finds the sizes: of the program that knows the bucket keys, or the names, of its table."""
        rule: BucketRule = "musubi" if self.of_musubi else "tandem"
        rule = "kohya" if BUCKET_SIZE_KEYS & self.settings.model_fields_set else rule
        return rule if self.settings.enable_bucket else None


@dataclass(frozen=True)
class DatasetConfig:
    """A dataset TOML, read with these arguments for a model that is given this besides a caption.

    ``overridden``: lines on the arguments that were given and that hold in none of its datasets.
    """

    path: Path
    datasets: tuple[Dataset, ...]
    arguments: DatasetArguments
    conditioning: ConditionKind = "none"
    overridden: tuple[str, ...] = ()

    @property
    def largest(self) -> tuple[int, int]:
        """The resolution with the most pixels, as (width, height)."""
        return max((dataset.resolution for dataset in self.datasets), key=prod)

    @property
    def inpaint_blanks(self) -> tuple[Blank, ...]:
        """What a fill model's regions are blanked with, in the order of the subsets, each once; else empty."""
        subsets = (subset for dataset in self.datasets for subset in dataset.subsets)
        return tuple(dict.fromkeys(subset.inpainting.blank for subset in subsets if subset.inpainting is not None))

    def blanked_with(self, blank: Blank) -> DatasetConfig:
        """Return the dataset with all regions blanked with ``blank``."""

        def changed(subset: Subset) -> Subset:
            masks = subset.inpainting
            return subset if masks is None else replace(subset, inpainting=replace(masks, blank=blank))

        datasets = (replace(each, subsets=tuple(map(changed, each.subsets))) for each in self.datasets)
        return replace(self, datasets=tuple(datasets))


@dataclass(frozen=True)
class _File:
    """A dataset TOML, and which of its keys the model at hand does not take, with the reasons."""

    path: Path
    tables: dict[str, Any]
    conditioning: ConditionKind
    refused: Mapping[str, str]


def load_dataset_config(
    path: str | Path, defaults: DatasetArguments, conditioning: ConditionKind = "none"
) -> DatasetConfig:
    """Parse and validate a dataset TOML, or what a folder of sd-scripts' ``train_data_dir`` says.

    Relative paths are looked for in the TOML's folder first, then in the working directory.

    Args:
        path: the TOML, or a folder of folders named ``10_name class``.
        defaults: batch size, cache folder, trigger word and ``dataset_args``, which hold where it names none.
        conditioning: what the model is given besides a caption, which decides which keys are taken.
    """
    found = Path(path).expanduser()
    refused = REFUSED_KEYS | refused_condition_keys(conditioning)
    pairs = split_pairs(defaults.dataset_args, "dataset_args")
    args = {key: dataset_value(OTHER_NAMES.get(key, key), value) for key, value in pairs.items()}
    tables: dict[str, Any]
    if found.is_dir():
        tables = _tables_of_folder(found, {key: args.pop(key) for key in FOLDER_KEYS if key in args})
        args = {**(BUCKET_LIMITS if args.get("enable_bucket") else {}), **args}
    else:
        tables, _ = read_toml(found, "check dataset_config")
    file = _File(found / "*" if found.is_dir() else found, tables, conditioning, refused)
    _check_top_level(file)
    fallback = _checked(replace(file, path=Path("dataset_args")), "", args)
    general = _inherit(fallback, _checked(file, "[general]", file.tables.get("general", {})))
    written = file.tables.get("datasets")
    if isinstance(written, dict):
        raise UserError(f"{file.path}: [datasets] is one table of several; write it in double brackets: [[datasets]]")
    if not isinstance(written, list) or not written or not all(isinstance(table, dict) for table in written):
        raise UserError(f"{file.path}: no [[datasets]] table; add one with a [[datasets.subsets]] below it")
    datasets = [dataset for number in range(len(written)) for dataset in _read_table(file, number, general, defaults)]
    classes = {subset.settings.preserve_class for dataset in datasets for subset in dataset.subsets}
    if any(table.get("preserve_class") for table in (general, *written)) and classes == {None}:
        raise UserError(f"{file.path}: preserve_class: has no effect, no subset has a trigger_word; set one")
    overridden = _overridden(file.path, fallback, defaults, datasets)
    return DatasetConfig(file.path, tuple(datasets), defaults, conditioning, tuple(overridden))


def _overridden(
    path: Path, fallback: Mapping[str, Any], defaults: DatasetArguments, datasets: list[Dataset]
) -> Iterator[str]:
    """Yield a line for each value of ``dataset_args`` (``fallback``: checked) and other options that no dataset has."""
    options = {option: key for key, option in _OPTION_OF.items()} | {"cache_directory": "cache_directory"}
    given = [(f"dataset_args: {key}", key, value) for key, value in fallback.items()]
    for option in options.keys() & defaults.model_fields_set:
        given += [(option, options[option], value)] if (value := getattr(defaults, option)) else []
    tables: list[BaseModel] = [each.settings for each in datasets]
    subsets: list[BaseModel] = [one.settings for each in datasets for one in each.subsets]

    def written(key: str, value: Any) -> str:
        return f"{key} = {json.dumps(value, ensure_ascii=False)}"

    for option, key, value in sorted(given):
        whose = tables if key in DATASET_KEYS else subsets
        wanted, had = getattr(type(whose[0]).model_validate({key: value}), key), [getattr(one, key) for one in whose]
        effect = "no effect"
        if option == "cache_directory":  # text lies there all the same
            wanted, had = written_path(value, option).resolve(), [each.cache_directory for each in datasets]
            effect = "no effect on latents"
        names = sorted(_RESOLUTIONS) if key in _RESOLUTIONS else [key]
        said = {written(name, getattr(one, name)) for one in whose for name in names if name in one.model_fields_set}
        if said and wanted not in had:
            who = "dataset_args" if option in options and said == {written(key, fallback.get(key))} else path
            yield f"{written(option, value)}: {effect}, {who} says {names_in_short(sorted(said), 3)}, which wins"


def dataset_value(key: str, value: Any) -> Any:
    """Return the value of a dataset's key, which flags have as text, with the type that a TOML has.

    Raises:
        UserError: it does not fit.
    """
    field = FIELDS.get(key)
    if key == "resolution" and isinstance(value, str):
        sides = [int(side) for side in value.split(",") if side.strip().isdigit()]
        return sides[0] if len(sides) == 1 else sides
    if key == "resolutions" and isinstance(value, str):  # 512,768x1024
        entries = [[int(side) for side in part.split("x") if side.strip().isdigit()] for part in value.split(",")]
        return [sides[0] if len(sides) == 1 else sides for sides in entries]
    if field is None:
        return value
    try:
        return TypeAdapter(field.rebuild_annotation()).validate_python(value)
    except ValidationError as error:
        if _leaves_unset(key, value):
            return ""
        raise UserError(f"{key}: {value!r} does not fit: {error.errors()[0]['msg']}") from None


# What dataset_args may say of a folder beside keys of [general]; and the limits that sd-scripts then has for buckets,
# where a dataset TOML has none unless it names them.
FOLDER_KEYS = ("reg_data_dir", "in_json", "conditioning_data_dir")
BUCKET_LIMITS = {"min_bucket_reso": 256, "max_bucket_reso": 1024}


def _tables_of_folder(folder: Path, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the tables of what ``train_data_dir`` is in sd-scripts.

    With ``in_json`` it is one folder described by a metadata file. Otherwise each folder in it that is called
    ``10_name class`` is a subset with 10 repeats and the caption "name class" for images without one; those of
    ``reg_data_dir`` are regularisation images. Samples are known by their paths within the folder, wherever that lies.

    Raises:
        UserError: it is no such folder.
    """
    if (listed := given.get("in_json")) and given.get("reg_data_dir"):
        raise UserError("dataset_args: reg_data_dir: has no effect with in_json, as in sd-scripts; remove one of them")
    if listed:
        subsets = [{"image_dir": ".", "metadata_file": str(Path(listed).expanduser().absolute())}]
    else:
        subsets = _dreambooth_subsets("train_data_dir", folder, Path())
        if regular := given.get("reg_data_dir"):
            regular_folder = Path(regular).expanduser().absolute()
            found = _dreambooth_subsets("reg_data_dir", regular_folder, regular_folder)
            subsets += [subset | {"is_reg": True} for subset in found]
    if masks := given.get("conditioning_data_dir"):
        subsets = [subset | {"conditioning_data_dir": str(Path(masks).expanduser().absolute())} for subset in subsets]
    return {"datasets": [{"subsets": subsets}]}


def _dreambooth_subsets(key: str, folder: Path, written: Path) -> list[dict[str, Any]]:
    if not folder.is_dir():
        raise UserError(f"{key}: {folder} is not a folder; run this where the images are")
    subsets: list[dict[str, Any]] = []
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        repeats, _, name = path.name.partition("_")
        if repeats.isdigit() and int(repeats) > 0:
            subset: dict[str, Any] = {"image_dir": str(written / path.name), "num_repeats": int(repeats)}
            subsets.append(subset | ({"class_tokens": name} if name else {}))
    if not subsets:
        named = "'10_name class'; rename the image folders so, or give a dataset TOML"
        raise UserError(f"{folder}: holds no folder named like {named} (tools/suggest_config.py writes one)")
    return subsets


def _check_top_level(file: _File) -> None:
    for key, value in file.tables.items():
        if key in ("general", "datasets"):
            continue
        if key in SUBSET_KEYS | DATASET_KEYS:
            raise UserError(f"{file.path}: {key!r} stands outside every table; put it below [general]")
        kind = "table" if isinstance(value, dict) else "key"
        near = did_you_mean(key, ["general", "datasets"]) or "; tables are [general] and [[datasets]]"
        raise UserError(f"{file.path}: unknown {kind} {key!r}{near}")


def _inherit(outer: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a table's keys over those further up; of ``resolution`` and ``resolutions`` the nearest counts."""
    hidden = _RESOLUTIONS if own.keys() & _RESOLUTIONS else ()
    return {key: value for key, value in outer.items() if key not in hidden} | own


def _read_table(file: _File, number: int, general: dict[str, Any], defaults: DatasetArguments) -> list[Dataset]:
    """Return what a ``[[datasets]]`` table describes: a dataset, or one for each of its ``resolutions``."""
    table = file.tables["datasets"][number]
    name = f"dataset {number + 1}"
    written = {key: value for key, value in table.items() if key != "subsets"}
    subset_tables = table.get("subsets", [])
    if not isinstance(subset_tables, list) or not all(isinstance(subset, dict) for subset in subset_tables):
        raise UserError(f"{file.path}: {name}: subsets must be [[datasets.subsets]] tables; write the double brackets")
    own = _checked(file, name, written, takes_files=not subset_tables)
    outer = {key: getattr(defaults, option) for key, option in _OPTION_OF.items()} | general
    inherited = _inherit(outer, own)
    settings = DatasetSettings.model_validate({k: v for k, v in inherited.items() if k in DATASET_KEYS})
    where = f"{file.path}: {name}" if len(file.tables["datasets"]) > 1 else f"{file.path}"
    sizes = [_both(one) for one in settings.resolutions or (settings.resolution,) if one is not None]
    if not sizes:
        raise UserError(f"{where}: no resolution; write e.g. resolution = 1024 below [[datasets]], or in dataset_args")
    if twice := [size for size in sizes if sizes.count(size) > 1]:
        raise UserError(f"{where}: resolutions: {twice[0][0]}x{twice[0][1]} stands there twice; keep one")
    control = settings.control_resolution
    shared = {key: value for key, value in inherited.items() if key in SUBSET_KEYS}
    if subset_tables:
        subsets = tuple(_read_subset(file, number, i, shared) for i in range(len(subset_tables)))
    elif shared.keys() & {"image_dir", "metadata_file"}:
        subsets = (_build_subset(file, f"{file.path}: {name}", shared, own, is_musubis(table)),)
    else:
        raise UserError(f"{where}: no [[datasets.subsets]]; add one with image_dir or metadata_file")
    cache_directory = None
    if cache := settings.cache_directory:
        refuse_climbing(where, "cache_directory", cache)
        cache_directory = (file.path.parent / written_path(cache, f"{where}: cache_directory")).resolve()
    elif defaults.cache_directory:
        cache_directory = written_path(defaults.cache_directory, "cache_directory").resolve()
    rest = (None if control is None else _both(control), number + 1, is_musubis(table))
    return [  # samples are told apart by their subset: each has copies of its own
        Dataset(where, settings, size, cache_directory, tuple(map(replace, subsets)), *rest) for size in sizes
    ]


def _both(sides: int | tuple[int, int]) -> tuple[int, int]:
    return sides if isinstance(sides, tuple) else (sides, sides)


def _read_subset(file: _File, dataset: int, number: int, inherited: dict[str, Any]) -> Subset:
    tables = file.tables["datasets"]
    name = f"subset {number + 1}" if len(tables) == 1 else f"dataset {dataset + 1}, subset {number + 1}"
    table = tables[dataset]["subsets"][number]
    own = _checked(file, name, table, is_subset=True, takes_files=True)
    return _build_subset(file, f"{file.path}: {name}", inherited | own, own, is_musubis(table))


def _build_subset(file: _File, where: str, values: dict[str, Any], own: dict[str, Any], of_musubi: bool) -> Subset:
    """Return the subset with all its ``values``; ``own`` are those of them that are not inherited."""
    if own.get("recursive") and values.get("metadata_file") and values.keys().isdisjoint(_FOLDERS):
        raise UserError(f"{where}: recursive: has no effect, metadata_file lists the images; remove it")
    values = {"multiline_captions": of_musubi and not values.get("enable_wildcard")} | values
    settings = SubsetSettings.model_validate(_without_idle_words(where, values, own))
    if settings.image_dir is None and settings.metadata_file is None:
        raise UserError(f"{where}: neither image_dir nor metadata_file; name the folder that holds the images")
    if settings.alpha_mask and settings.conditioning_data_dir is not None:
        raise UserError(f"{where}: alpha_mask and conditioning_data_dir both give a mask; keep one of them")

    inpainting = _inpaint_masks(where, settings) if file.conditioning == "fill" else None
    if settings.random_crop and file.conditioning != "none":
        lost = {"fill": "a crop can miss the region to fill", "references": "control images are not cropped along"}
        raise UserError(f"{where}: random_crop: {lost[file.conditioning]}; remove it")

    def found(key: str, is_kind: str) -> Path | None:
        value = getattr(settings, key)
        return None if value is None else _find_path(where, key, value, file.path.parent, is_kind)

    return Subset(
        where,
        settings,
        written_dir=settings.image_dir or settings.metadata_file or "",
        image_dir=found("image_dir", "folder"),
        metadata_file=found("metadata_file", "file"),
        mask_dir=found("conditioning_data_dir", "folder"),
        control_dir=found("control_directory", "folder"),
        inpaint_mask_dir=found("inpaint_mask_directory", "folder"),
        paired_dir=found("paired_directory", "folder"),
        inpainting=inpainting,
    )


def _without_idle_words(where: str, values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` without inherited words that mean nothing to this subset; its own ones are refused."""
    regular, word = values.get("is_reg"), (values.get("trigger_word") or "").strip()
    idle: tuple[str, ...] = () if word else ("preserve_class",)
    idle = ("trigger_word", "preserve_class", "validation_split", "paired_directory") if regular else idle
    if named := [key for key in idle if own.get(key)]:
        why = "on regularisation images, which show other things" if regular else "without trigger_word"
        raise UserError(f"{where}: {named[0]}: has no effect {why}; remove it")
    return {key: value for key, value in values.items() if key not in idle}


def _inpaint_masks(where: str, settings: SubsetSettings) -> InpaintMasks:
    """Return the one source of masks that a subset's keys name; without one, masks of all kinds are generated."""
    if settings.alpha_mask and settings.inpaint_alpha_mask:
        raise UserError(f"{where}: alpha_mask and inpaint_alpha_mask both read the transparency; keep one of them")
    kinds, variants = settings.inpaint_masks, settings.inpaint_mask_variants
    if kinds == ():
        known = ", ".join(MASK_KINDS)
        raise UserError(f"{where}: inpaint_masks = []: names no kind; name some of {known}, or remove it")
    given = {key: getattr(settings, key) for key in _MASK_SOURCES}
    named = [key for key, value in given.items() if value not in (None, False)]
    if len(named) > 1:
        raise UserError(f"{where}: {' and '.join(named)} each say which region to fill; keep one of them")
    if variants is not None and named and not kinds:
        raise UserError(f"{where}: inpaint_mask_variants has no effect with {named[0]}; remove it")
    if named and not kinds:
        return InpaintMasks("alpha" if settings.inpaint_alpha_mask else "files", blank=settings.inpaint_blank)
    drawn, number = kinds or MASK_KINDS, variants or DEFAULT_VARIANTS
    return InpaintMasks("generated", drawn, number, by_default=not kinds, blank=settings.inpaint_blank)


def _checked(
    file: _File, name: str, table: Mapping[str, Any], is_subset: bool = False, takes_files: bool = False
) -> dict[str, Any]:
    """Return one table with musubi's names replaced, after checking its keys and the types of its values."""
    if not isinstance(table, Mapping):
        raise UserError(f"{file.path}: {name} is not a table; write {name} on a line of its own")
    values: dict[str, Any] = {}
    where = f"{file.path}: {name}" if name else f"{file.path}"
    for written, value in table.items():
        key = OTHER_NAMES.get(written, written)
        if key in values:
            raise UserError(f"{where}: {written!r} means {key!r}, which is also given; keep one of them")
        if value == "" and key in SUBSET_ONLY:  # a path
            continue
        if key in file.refused:
            if is_nothing(value, *_OF_TRAINERS["asks_nothing"].get(key, ())):
                continue
            raise UserError(f"{where}: {key!r} is not taken: {file.refused[key]}")
        _check_key(where, written, key, is_subset, takes_files)
        if check_value(where, key, value):
            values[key] = value
    if values.keys() >= _RESOLUTIONS:
        raise UserError(f"{where}: resolution and resolutions both say at which size; keep one of them")
    return values


def _leaves_unset(key: str, value: Any) -> bool:
    """Whether a value that does not fit a key asks for nothing, as the key's default does."""
    return is_nothing(value) and is_nothing(FIELDS[key].get_default())


def _check_key(where: str, written: str, key: str, is_subset: bool, takes_files: bool) -> None:
    if key in SUBSET_ONLY and not takes_files:
        raise UserError(f"{where}: {written!r} belongs to [[datasets.subsets]]; move it down")
    if key in DATASET_KEYS and is_subset:
        raise UserError(f"{where}: {key!r} belongs to [[datasets]]; move it up")
    if key not in SUBSET_KEYS | DATASET_KEYS:
        known = (SUBSET_KEYS if is_subset else SUBSET_KEYS | DATASET_KEYS) | set(OTHER_NAMES)
        near = did_you_mean(key, sorted(known)) or "; remove it, or see docs/dataset.md for the keys"
        raise UserError(f"{where}: unknown key {key!r}{near}")


def check_value(where: str, key: str, value: Any) -> bool:
    """Return whether ``value`` sets a dataset's key; raise a UserError if it does not fit and asks for something."""
    model = SubsetSettings if key in SUBSET_KEYS else DatasetSettings
    try:
        model.model_validate({key: value})
    except ValidationError as error:
        if _leaves_unset(key, value):
            return False
        problem = error.errors()[0]["msg"].replace("Input should be", "should be")
        if key in ("resolution", "resolutions", "control_resolution"):
            entries = "a list, each entry " if key == "resolutions" else ""
            problem = f"should be {entries}a number of pixels or [width, height], each from 1 to {MOST_SIDE}"
        shown = str(value).lower() if isinstance(value, bool) else repr(value)  # as a TOML has it
        raise UserError(f"{where}: {key} = {shown}: {problem}; correct the value") from None
    return True


def refuse_climbing(where: str, key: str, value: str) -> None:
    """Keep relative paths within the folder they start at: a dataset from a stranger names none of the rest."""
    if Path(os.path.normpath(value)).parts[:1] == (os.pardir,):
        raise UserError(f"{where}: {key} {value!r} climbs out of the TOML's folder; write its absolute path")


def _find_path(where: str, key: str, value: str, toml_dir: Path, kind: str) -> Path:
    written = written_path(value, f"{where}: {key}")
    refuse_climbing(where, key, value)
    candidates = [written] if written.is_absolute() else [toml_dir / written, Path.cwd() / written]
    for candidate in candidates:
        if candidate.is_dir() if kind == "folder" else candidate.is_file():
            return candidate.resolve()
        if candidate.exists():
            other = "file" if kind == "folder" else "folder"
            raise UserError(f"{where}: {key} {value!r} is a {other}; name a {kind}")
    parent = next((c.parent for c in candidates if c.parent.is_dir()), None)
    siblings = [str(written.with_name(entry.name)) for entry in parent.iterdir()] if parent else []
    link = next(filter(None, map(broken_link, candidates)), "")
    near = "" if link else did_you_mean(str(written), siblings)
    near = near or f"{link}; it is looked for beside the TOML, then in the working directory"
    raise UserError(f"{where}: {key} {value!r} does not exist{near}")
