"""A first configuration for a LoRA: of published presets, counted memory, and what the images are like.

``presets.toml`` (beside the schema) holds what other trainers publish for each family, with the file where it stands,
and which settings fit into which card, with the memory that ``memory.dry_run`` counts for them. Nothing else decides a
number here: values come from there with their sources as comments, resolution, validation and captions follow from the
images. :func:`find_model_type` and :func:`summarise_dataset` read them, :func:`suggest` returns the files' texts.
"""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from library.config.family_defaults import preset_group, presets, tables
from library.config.kinds import kind_of, model_type_of, refuse_no_model, titles
from library.config.model_layouts import pipeline_of
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.published_models import MODEL, Fit, find_published, fit, fits, named_distilled
from library.config.schema import DatasetArguments, ModelConfig
from library.data.config import SubsetSettings, load_dataset_config
from library.data.lint import refuse_damaged
from library.data.samples import Sample, scan
from library.data.sources import usual_extension
from library.errors import UserError, printable
from library.files import read_toml, toml_text
from library.models.captioner import CAPTIONERS
from library.models.family_by_name import family_class, model_family
from library.models.files import transformer_arguments
from library.models.hub import find_model, index_on_hub
from library.training.memory.budget import GIB
from library.training.sampling import painting
from library.training.sampling.prompts import SamplePrompt, not_above, usual_prompt

Kind = Literal["subject", "style", "edit"]


@dataclass(frozen=True)
class Answers:
    """What the user gave.

    Attributes:
        model: file, folder, or name on the hub. parts: key -> path of what a single file needs beside it.
        images: folder or dataset TOML. controls: folder of what an edit model is given.
        gpu_memory: bytes; None: trained on the CPU.
    """

    kind: Kind
    model: str
    model_type: str
    parts: Mapping[str, str]
    images: Path
    controls: Path | None
    trigger: str | None
    class_word: str | None
    gpu_memory: int | None
    save_to: Path
    network_type: Literal["lora", "lokr"] = "lora"

    @property
    def presets(self) -> dict[str, tuple[Any, str]]:
        """Key -> value and comment, as ``presets.toml`` has them for the family and the kind of adapter."""
        return presets(preset_group(self.model_type, network_type=self.network_type))


@dataclass(frozen=True)
class DatasetSummary:
    """A dataset: its samples, the side of a square as large as the median image, how many lack a caption.

    Attributes:
        resolution: width and height of the largest that is trained on; of a folder, what its dataset TOML gets.
        caption_extension: of a folder, that of most captions.
        other_captions: how many images have a caption of another extension alone.
        notes: what training would say of it.
    """

    samples: Sequence[Sample]
    side: int
    resolution: tuple[int, int]
    without_caption: int
    held_out: int
    caption_extension: str
    other_captions: int
    notes: Sequence[str]


def find_model_type(model: str, kind: Kind, given: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """Return the ``model_type`` for ``kind``, and the transformer's arguments as far as the model is here.

    Args:
        given: needed where ``model`` is neither here nor known by its name.

    Raises:
        UserError: it is not trained for this kind, or of another family than ``given``.
    """
    path, found = Path(model).expanduser(), kind_of(model, None if given else index_on_hub)
    names = dict.fromkeys((*found.likely, *found.possible, *([given] if given and not found.possible else ())))
    able = [name for name in IMAGE_MODELS if (MODEL_TYPES[name].conditioning == "references") == (kind == "edit")]
    suited = [name for name in names if name in able]
    if not (fitting := [name for name in suited if given in (None, name)]):
        raise _not_for(model, kind, given, list(names), suited, able)
    here = find_model(path, "--model") if path.exists() else path
    return fitting[0], transformer_arguments(pipeline_of(here) or here, fitting[0]) if here.exists() else {}


def _not_for(
    model: str, kind: Kind, given: str | None, names: Sequence[str], suited: Sequence[str], able: Sequence[str]
) -> UserError:
    """Return the error on a model that may be ``names``, of which ``suited`` are for ``kind``, as all of ``able``."""
    if not names:
        refuse_no_model(model)
        return UserError(
            f"--model {model}: nothing tells what kind it is; set --model_type to one of {', '.join(able)}"
        )
    if suited:
        why = f"is {' or '.join(names)}, not {given}" if given not in names else f"is not trained as {given} for {kind}"
        return UserError(f"--model_type {given}: {model} {why}; set --model_type {suited[0]}, or leave it out")
    other = "--kind subject or style" if kind == "edit" else "--kind edit"
    other += ", leave --model_type out" * (given not in (None, *names))
    return UserError(
        f"--kind {kind}: {model} is {names[0]}, which is not for it; take {other}, or a model of {titles(able)}"
    )


def choose_memory(
    model_type: str, model: str, arguments: Mapping[str, Any], gpu_memory: int | None, network_type: str = "lora"
) -> Fit:
    """Return the settings of the ready configuration with the most memory that fits.

    Raises:
        UserError: none fits.
    """
    if gpu_memory is None:
        return Fit()
    size = "9b" if "9b" in Path(model).name.lower() or arguments.get("joint_attention_dim") == 12288 else "4b"
    if (found := fit(model_type, size, gpu_memory / GIB, network_type)) is None:
        least, other = fits(model_type, size, network_type)[-1], min(tables()["memory"], key=lambda row: row["gib"])
        factor = "train a LoKr of a larger factor, " if least.lokr else ""
        takes = least.gib + least.lokr + least.samples
        raise UserError(
            f"--gpu_memory {gpu_memory / GIB:g}: {model_type} takes at least {takes:.3g} GiB and 1 "
            f"for CUDA itself (tools/plan_memory.py {least.count}); take a larger card, {factor}or a smaller model: "
            f"{other['models'][0]} takes {other['gib']}"
        )
    blocks = sum(number for key, number in arguments.items() if key.endswith("layers") and isinstance(number, int))
    few = 0 < blocks <= found.settings.get("blocks_to_swap", 0)  # a smaller model than the published one
    return replace(found, settings={k: v for k, v in found.settings.items() if k != "blocks_to_swap" or not few})


def summarise_dataset(answers: Answers) -> DatasetSummary:
    """Read headers and captions as a training does, and summarise them.

    Raises:
        UserError: there is none, or training would refuse it.
    """
    family, path, ending, others = family_class(answers.model_type), answers.images, ".txt", set[str]()
    unit = MODEL_TYPES[answers.model_type].pixel_multiple
    with tempfile.TemporaryDirectory() as scratch:
        if path.is_dir():
            ending, others = usual_extension(path)
            subset: dict[str, object] = {"image_dir": str(path.resolve()), "class_tokens": ""}
            subset |= {"caption_extension": ending, "multiline_captions": True}
            if answers.controls:
                subset["control_directory"] = str(answers.controls.resolve())
            path, table = Path(scratch, "dataset.toml"), {"resolution": 1024, "cache_directory": scratch}
            path.write_text(toml_text({"datasets": [{**table, "subsets": [subset]}]}), encoding="utf-8")
        defaults = DatasetArguments(dataset_config=str(path), trigger_word=answers.trigger)

        def said(line: str) -> str:  # not of a file that is gone by now
            return line.replace(f"{path}: subset 1", f"{path}").replace(f"{path}", f"--images {answers.images}")

        try:
            config = load_dataset_config(path, defaults, family.conditioning)
            refuse_damaged(config, lambda *_: lambda _: None)
            found = scan(config, 0, unit)
        except UserError as error:
            raise UserError(*map(said, str(error).split("\n"))) from None
    samples = [sample for sample in [*found.train, *found.held_out] if not sample.settings.is_reg]
    sides = [(sample.image.size[0] * sample.image.size[1]) ** 0.5 for sample in samples if sample.image.size]
    without = sum(not sample.caption for sample in samples) - len(others)
    notes, side, trained = list(map(said, found.warnings)), round(median(sides)), config.largest
    if answers.images.is_dir():
        published = presets(answers.model_type)["resolution"][0]
        trained = (min((one for one in published if one >= side), default=max(published)),) * 2
    return DatasetSummary(samples, side, trained, without, len(found.held_out), ending, len(others), notes)


def remarks(answers: Answers) -> list[str]:
    """Return lines on a distilled model.

    Raises:
        UserError: it cannot be trained.
    """
    return model_type_of({MODEL: answers.model, "model_type": answers.model_type})[1]


def usual_sample(answers: Answers, found: DatasetSummary) -> SamplePrompt:
    """Return how the run samples what its prompts leave open: read from the model's files, or known by its name."""
    places = {MODEL: answers.model, **answers.parts}
    usual = usual_prompt(family_class(answers.model_type), named_distilled(answers.model))
    if all(Path(place).expanduser().exists() for place in places.values()):
        with suppress(UserError):  # training says it
            usual = usual_prompt(model_family(ModelConfig(model_type=answers.model_type, **places)))
    return not_above(usual, found.resolution)


def painted_first(answers: Answers, found: DatasetSummary) -> str:
    """Return what the base paints before the first step, in the words of the run; empty if nothing."""
    if answers.kind != "subject":
        return ""
    width, height = painting.painted_size([found.resolution], MODEL_TYPES[answers.model_type].pixel_multiple)
    usual = replace(usual_sample(answers, found), width=width, height=height)
    pictures = painting.describe([usual] * sum(map(len, read_toml(painting.GENERAL)[0].values())))
    return f"{painting.PAINTING}: {pictures}; once for this base, they are kept"


def captioner(images: Path) -> str:
    """Return the command that has a vision language model write the captions of a folder or dataset."""
    named = printable(quote(images.as_posix()))
    return f"python tools/caption_images.py {named} --model {next(iter(CAPTIONERS))}"


def suggest(answers: Answers, found: DatasetSummary, memory: Fit) -> dict[str, str]:
    """Return file name -> text: the dataset TOML of a folder, and the configuration."""
    values, folder = answers.presets, answers.images.is_dir()
    usual = SubsetSettings(validation_split="auto").held_out(len(found.samples))
    held_out = usual if folder else found.held_out
    pairs = [one for one in found.samples if one.caption and " --" not in one.caption][:3]  # options begin with it
    # a sample of a fill model needs an image and a mask
    sampled = bool(pairs) if answers.kind == "edit" else family_class(answers.model_type).conditioning != "fill"

    def lines(values: Mapping[str, tuple[Any, str]], *keys: str) -> str:
        return "\n".join(f"{_comment(values[k][1])}\n{k} = {_toml(values[k][0])}" for k in keys if k in values)

    sample, known = usual_sample(answers, found), find_published(answers.model)
    is_distilled = sample.steps != values["sample_steps"][0]
    chosen = {key: (value, memory.describe()) for key, value in memory.settings.items()}
    context = {
        "answers": answers, "found": found, "chosen": chosen, "values": values, "folder": folder, "held_out": held_out,
        "trained": len(found.samples) - held_out, "sampled": sampled, "pairs": pairs,
        "captioner": captioner(answers.images),
        "title": MODEL_TYPES[answers.model_type].title, "lines": lines, "name": answers.save_to.resolve().name,
        "is_tiny": "tiny-" in answers.model,  # built in, not made for the family's size
        "painted": painted_first(answers, found), "remarks": remarks(answers), "usual": sample,
        "is_distilled": is_distilled,
        "steps_from": "what it is distilled to" if is_distilled else values["sample_steps"][1],
        "sample_model": known.sample_model if known else "",
        "place": lambda name: (answers.save_to / name).as_posix(),
    }  # fmt: skip
    wanted = [*["dataset.toml"] * folder, "config.toml"]
    return {name: _JINJA.get_template(f"suggested_{Path(name).stem}.jinja").render(context) for name in wanted}


def _toml(value: Any) -> str:
    return toml_text({"value": value}).removeprefix("value = ").strip()


def _comment(text: str) -> str:
    how: Any = {"initial_indent": "# ", "subsequent_indent": "# ", "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(line for part in text.splitlines() for line in textwrap.wrap(part, 118, **how))


_HOW: Any = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
_JINJA = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, **_HOW)
_JINJA.filters |= {"toml": _toml, "comment": _comment}
