"""Pictures that the base paints of general prompts: to train on beside the subject, and to see what changes there.

A set of prompts is painted once by the model as it is before training, with the guidance and steps of the run's own
samples, into a folder named by all that they follow from besides the prompt, in files named by the prompt. What is
there already, byte for byte as it was painted, is not painted again: an interrupted run goes on, the next run on the
same base starts at once, and of further prompts only those are painted. Each picture has its prompt beside it as a
caption: pictures are a subset like any other, whose images and captions are cached and batched as the others are.

``general`` names prompts that come with Tandem (``general_prompts.toml``): 16 to train on, 8 others, which nobody
trains on, to measure by. Pictures have half the sides of the dataset's largest resolution, but a square of 512 at least
where the dataset has as much, and are trained on at that size: 24 pictures of 512 have less than a fifth of the pixels
of 34 (24 and 10 prompts) of 1024.

How many are worth it was measured on the tiny model (``bench/preservation.py``, subject zorbo, one seed, 100 steps): of
the change elsewhere without preservation (0.170) 8 prompts leave 0.041, 16 leave 0.037, 24 leave 0.030 and 48 leave
0.032. From 16 on the difference, 0.04 of the whole, is within what three subjects and seeds differ by (0.08).
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from library.accelerator import release
from library.checksums import checksum, read_checked_json, write_checked_json
from library.config.schema import TrainConfig
from library.console import Console
from library.data.config import DatasetConfig
from library.data.dataset import Painted
from library.data.samples import cache_folder
from library.data.sources import generated_record
from library.errors import UserError, counted, names_in_short
from library.files import make_way, read_toml, write_text
from library.models.family import Family
from library.models.text import TextEncoder
from library.models.vae import ImageEncoder
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import WeightLoader, plan_base
from library.processes import agreed
from library.training.memory.budget import GIB, available_bytes
from library.training.plan import base_dtype
from library.training.report.progress import counting
from library.training.sampling.generate import Cell, generate_images
from library.training.sampling.images import save_image
from library.training.sampling.prompts import SamplePrompt, read_prompts, usual_prompt
from networks.merging.merge import BaseWeights

Encoders = tuple[ImageEncoder, TextEncoder]
GENERAL = Path(__file__).with_name("general_prompts.toml")
PAINTING = "generating images from prompts"
_VERSION = 2  # of how pictures are made; counted up where the same prompt gives another picture
_LEAST_SIDE = 512  # of a square as large as a picture, which every family has been trained on
_ROOM = 4 * GIB  # beside the weights, for a picture's activations and the autoencoder


@dataclass(frozen=True)
class PaintedSet:
    """Prompts, and the folder of their pictures."""

    folder: Path
    prompts: Sequence[SamplePrompt]

    @property
    def pictures(self) -> list[tuple[Path, SamplePrompt]]:
        """Where each prompt's picture lies, and the prompt."""
        return [(self.folder / f"{_digest(prompt.line())}.png", prompt) for prompt in self.prompts]

    @property
    def paths(self) -> list[Path]:
        """The pictures, in the order of the prompts."""
        return [path for path, _ in self.pictures]


def painted_sets(
    config: TrainConfig,
    dataset: DatasetConfig,
    family: Family,
    base_weights: BaseWeights,
    encoders: Encoders,
    samples: Sequence[SamplePrompt],
) -> dict[str, PaintedSet]:
    """Return what is to be painted for a run, by the key that names the prompts; nothing is painted yet.

    Args:
        config: of the run, its preservation :func:`resolve_preservation`.
        dataset: of the run.
        family: its model.
        base_weights: LoRAs that are merged into it.
        encoders: its own, as the run has them.
        samples: the run's sample prompts, of which the first says how pictures of this model are made.

    Raises:
        UserError: a prompt file cannot be read, or the model does not paint from text alone.
    """
    preservation = config.preservation
    measured = None if preservation.general_prompts == "none" else preservation.general_prompts
    files = {"preserve_prompts": preservation.preserve_prompts, "general_prompts": measured}
    if not (keys := [key for key, path in files.items() if path]):
        return {}
    if family.conditioning != "none":
        raise UserError(
            f"{keys[0]}: this model is given images to change, so nothing can be painted from prompts alone; remove it "
            "(for preservation set preserve_blank, or add an is_reg subset)"
        )
    pixel_multiple = encoders[0].pixel_multiple
    usual = replace(samples[0], prompt="") if samples else usual_prompt(family)
    width, height = painted_size([dataset.largest], pixel_multiple)
    usual = replace(usual, width=width, height=height, control_images=(), mask_image=None)
    first = dataset.datasets[0]
    cache = Path(config.dataset.cache_directory or cache_folder(first, first.subsets[0])).expanduser()
    prompts = {key: _read(key, str(files[key]), config.training.seed, pixel_multiple, usual) for key in keys}
    trained, held_out = ({prompt.prompt for prompt in prompts.get(key, ())} for key in files)
    if both := sorted(trained & held_out):
        raise UserError(
            f"general_prompts: {both[0]!r} is one of preserve_prompts too, and what is trained on is no measure of the "
            "rest; give other prompts to one of them"
        )
    return {key: painted_set(config, family, base_weights, encoders, cache, each) for key, each in prompts.items()}


def painted_set(
    config: TrainConfig,
    family: Family,
    base_weights: BaseWeights,
    encoders: Encoders,
    cache: Path,
    prompts: Sequence[SamplePrompt],
) -> PaintedSet:
    """Return the pictures of ``prompts``, in a folder below ``cache`` whose name says what they follow from."""
    scheduler = sorted(item for item in family.scheduler().config.items() if not item[0].startswith("_"))
    made_by = [*family.identity(), scheduler, base_weights.fingerprint(), *(one.fingerprint for one in encoders)]
    precision = sorted(config.precision.model_dump().items()), config.model.base_dtype, config.training.mixed_precision
    return PaintedSet(cache / "painted" / _digest((_VERSION, made_by, *precision)), prompts)


def painted_size(resolutions: Iterable[tuple[int, int]], pixel_multiple: int) -> tuple[int, int]:
    """Return width and height of the pictures for a dataset of these resolutions."""
    width, height = max(resolutions, key=math.prod)
    scale = min(1.0, max(0.5, _LEAST_SIDE / math.sqrt(width * height)))
    units = (max(1, int(side * scale / pixel_multiple)) for side in (width, height))
    return next(units) * pixel_multiple, next(units) * pixel_multiple


def _read(key: str, path: str, seed: int, pixel_multiple: int, usual: SamplePrompt) -> list[SamplePrompt]:
    """Return the prompts of a file, or those of ``general``; seeds count up from the run's."""
    if path != "general":
        return read_prompts(path, seed, pixel_multiple, usual, key)
    texts = read_toml(GENERAL)[0][key]
    return [replace(usual, prompt=text, seed=seed + number) for number, text in enumerate(texts)]


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def paint(
    sets: Mapping[str, PaintedSet],
    config: TrainConfig,
    family: Family,
    base_weights: BaseWeights,
    encoders: Encoders,
    accelerator: Accelerator,
    console: Console,
) -> Painted:
    """Paint what is missing of ``sets``, each process its share; return the pictures.

    The model is loaded for it and freed again, its encoders before it.

    Raises:
        UserError: the model is split among processes, of which none can paint alone; what ``generate_images`` says.
    """
    if config.parallel.splits_model and missing_of(sets):
        raise UserError(
            "preserve_prompts, general_prompts: their pictures are painted by one process, and the model is split; "
            "paint them in one process first: tools/cache_dataset.py --tp 1 --pp 1 --shard 1 with this configuration"
        )
    with agreed(PAINTING):
        if todo := missing_of(sets, accelerator.process_index, accelerator.num_processes):
            loader = plan_base(config.precision, family.quantized_file(), config.training.seed, accelerator.device)
            loader.changes = base_weights.changes(family.targets)
            dtype = base_dtype(config.model, config.training)
            swapped = _swapped(config, family, loader, accelerator.device)
            images = generate_images(
                family, [Cell(prompt) for _, prompt in todo], dtype, accelerator.device, console, loader,
                swapped=swapped, encoders=encoders,
            )  # fmt: skip
            with counting(console) as progress:
                advance = progress(PAINTING, len(todo))
                for (path, _), (prompt, image) in zip(todo, images, strict=True):
                    make_way(path)
                    save_image(image, path, {"prompt": prompt.line()})
                    write_checked_json(generated_record(path), _described(path, prompt))
                    advance(1)
            encoders[0].release()
            release()
    return pictures_of(sets)


def pictures_of(sets: Mapping[str, PaintedSet], but: Container[Path] = ()) -> Painted:
    """Return the pictures of ``sets``, without those in ``but``."""
    found = {key: [path for path in each.paths if path not in but] for key, each in sets.items()}
    return Painted(found.get("preserve_prompts", ()), found.get("general_prompts", ()))


def describe(prompts: Sequence[SamplePrompt]) -> str:
    """Return how many images, of what size and in how many passes: "24 images of 512 x 512, 480 passes"."""
    sizes = dict.fromkeys(f"{prompt.width} x {prompt.height}" for prompt in prompts)
    named = names_in_short([*sizes], 2)
    return f"{counted(len(prompts), 'image')} of {named}, {passes_of(prompts):,} passes of the model"


def passes_of(prompts: Iterable[SamplePrompt]) -> int:
    """Return how often the model is run for pictures: once a step, twice with a negative prompt."""
    return sum(prompt.steps * len(prompt.texts()) for prompt in prompts)


def missing_of(sets: Mapping[str, PaintedSet], rank: int = 0, world: int = 1) -> list[tuple[Path, SamplePrompt]]:
    """Return path and prompt of the pictures that one of ``world`` processes has to paint.

    Which are its own does not follow from what is there: others may be painting when it looks.
    """
    every = [picture for each in sets.values() for picture in each.pictures]
    return [(path, prompt) for path, prompt in every[rank::world] if not _is_painted(path, prompt)]


def restore_captions(sets: Mapping[str, PaintedSet], console: Console) -> None:
    """Write each picture's prompt beside it, before the picture: none is without its caption; say what was changed."""
    changed = [path for path, _ in missing_of(sets) if path.exists()]
    for path, prompt in (picture for each in sets.values() for picture in each.pictures):
        caption, text, found = path.with_suffix(".txt"), prompt.prompt + "\n", ""
        with suppress(OSError):
            found = checksum(caption)
        if found != f"{zlib.crc32(text.encode()):08x}":
            changed += [caption] * caption.exists()
            make_way(caption)
            write_text(caption, text)
    if changed:
        names = names_in_short([path.name for path in changed])
        console.print(f"note: {changed[0].parent}: not as they were made, and made again: {names}", soft_wrap=True)


def _is_painted(path: Path, prompt: SamplePrompt) -> bool:
    """Whether a file is the picture that was painted of ``prompt``, to the bit."""
    try:
        return read_checked_json(generated_record(path)) == _described(path, prompt)
    except (OSError, ValueError):
        return False


def _described(path: Path, prompt: SamplePrompt) -> list[str]:
    """Return a picture's content and what it follows from; the folder's name says what painted it."""
    return [checksum(path), path.parent.name, prompt.line()]


def _swapped(config: TrainConfig, family: Family, loader: WeightLoader, device: torch.device) -> int | None:
    """Return how many blocks wait in host memory while pictures are painted; None: as many as can.

    With ``memory = "auto"`` nobody has said it, and nothing is known yet but the size of the files.
    """
    if config.training.memory == "manual" or device.type == "cpu":
        return config.training.blocks_to_swap
    files = {entry.file for entry in WeightFiles(family.files.transformer).entries.values()}
    nbytes = sum(file.stat().st_size for file in files) // (1 if loader.recipe is None else 2)
    return 0 if nbytes + _ROOM < available_bytes(device) else None
