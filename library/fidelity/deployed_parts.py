"""What a deployed pipeline brings besides its transformer's weights, by what it does to this dataset.

Tokenizers are compared by the ids that they give its captions, text encoders by their embeddings, VAEs by latents and
pixels of its images, schedulers by the noise levels of a sampling run; each with its config. Files may differ in bytes
and be the same in effect (saved again, in shards, with keys in another order), and the same weights do something else
with another config. So :func:`complete` takes every part whose files differ, and :func:`settle` leaves out what does
nothing here; what is left is a cause, whose share of the error is measured. :func:`words` names the field.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from library.checksums import weights_fingerprint
from library.errors import UserError, counted, reason_of
from library.fidelity.calibration import Calibration
from library.fidelity.serving import REFERENCE, Models, Served, Variant
from library.fidelity.tensors import module_difference
from library.models.family import Family
from library.models.weights import read_config
from library.precision.checkpoint import WeightFiles

_MOST = 1000
_SAME = 1e-5  # relative rms: a hundredth of what rounding to bf16 changes
_MERGED = 1e-2  # of embeddings by encoders that a LoRA was merged into, and rounded to bf16
# nothing is computed from the VAE's two here; the last is a guidance that is ignored
_NOT_COMPARED = ("sample_size", "force_upcast", "guidance_embeds")
_OF_FILES = ("dtype", "torch_dtype", "transformers_version", "architectures", "model_type")  # of a config, no settings
_SAME_EFFECTS = {
    "tokenizer": "these captions get the same tokens, or tokens that do the same",
    "text": "these captions get the same embeddings",
    "t5_tokens": "these captions get the same embeddings",
    "vae": "these images get the same latents, and back",
    "shift": "these images are sampled at the same noise levels",
}
# what Euler's noise levels follow from
_NOISE_LEVELS = {*inspect.signature(FlowMatchEulerDiscreteScheduler).parameters} - {"stochastic_sampling"}
_USUAL_STEPS = 28  # of a sampling run; with a few, schedules that differ may be alike


# From files.


def complete(models: Models, variant: Variant) -> Variant:
    """Return ``variant`` with what a deployed pipeline brings besides the transformer, and what it lacks.

    Parts whose files are the reference's, and those that ``variant`` says something of, are no causes. A merged file
    without text encoders of its own has lost the LoRA's part in them.

    Raises:
        UserError: the pipeline names a tokenizer or a scheduler that is not in it.
    """
    lost = models.deployed.merged and any(name != models.targets.file_prefix for name in models.loras)
    if (folder := models.folder) is not None:
        _check_whole(folder)
        layout, own, files = folder.layout, models.family.files, folder.files
        settings = [getattr(family, "text_settings", ()) for family in (models.family, folder)]
        others = {
            "text": _others(layout.text_encoders, own.text_encoders, files.text_encoders, settings[0] != settings[1]),
            "tokenizer": _others(layout.tokenizers, own.tokenizers, files.tokenizers),
            "vae": _others([layout.vae], [own.vae], [files.vae]),
        }
        for cause, options in others.items():
            said: Served = getattr(variant, cause) or Served()
            served = replace(said, options=options)
            if not options or said.options:
                continue
            lost = lost and cause != "text"
            variant = replace(variant, **cast(Any, {cause: served}))
        for change in ({"shift": "deployed"}, {"guidance": "ignored"}, {"configs": True}):
            (cause,), changed = change, replace(variant, **cast(Any, change))
            if cause not in variant.changes() and fields(models, changed, cause):
                variant = changed
    if lost and variant.text is None and not variant.lora_without:
        variant = replace(variant, lora_without=("^text_encoder",))
    return variant


def _check_whole(folder: Family) -> None:
    """Refuse a pipeline without a tokenizer or a scheduler that it names."""
    assert folder.files.index is not None
    root, named = folder.files.index.parent, read_config(folder.files.index.parent, folder.files.index.name)
    for name in ("scheduler", *(part.folder for part in folder.layout.tokenizers)):
        part, where = named.get(name) or [None, None], "pretrained_model_name_or_path"  # of a modular pipeline's
        if part != [None, None] and not (part[2:] and part[2].get(where)) and not (root / name).is_dir():
            raise UserError(f"{root / name}: not there, and {folder.files.index.name} names it; copy it from the model")


def _others(
    parts: Sequence[Any], own: Sequence[Any], served: Sequence[Any], read_otherwise: bool = False
) -> tuple[tuple[str, str], ...]:
    """Return option and place of those ``parts`` whose files differ: weights, config, or all of a tokenizer's."""

    def differ(one: Path, other: Path) -> bool:
        if one == other or read_otherwise or not one.exists():
            return one != other
        return weights_fingerprint(one) != weights_fingerprint(other) or _config(one) != _config(other)

    triples = zip(parts, own, served, strict=True)
    return tuple((part.option, str(b)) for part, a, b in triples if differ(Path(a), Path(b)))


def _config(path: Path) -> dict[str, Any]:
    """Return the settings of a folder's config.json, of a text encoder's the language model's; none of a file."""
    return _settings(read_config(path) if (path / "config.json").is_file() else {})


def _settings(known: Mapping[str, Any]) -> dict[str, Any]:
    known = {**known, **(known.get("text_config") or {})}
    return {key: value for key, value in known.items() if not key.startswith("_") and key not in _OF_FILES}


# By what they do.


def captions_of(calibration: Calibration) -> list[str]:
    """Return every caption of the dataset's first thousand images once."""
    train = calibration.data.train
    return list(dict.fromkeys(each for sample in train.samples[:_MOST] for each in train.captions_of(sample)))


def settle(models: Models, variant: Variant, calibration: Calibration, steps: int) -> tuple[Variant, dict[str, str]]:
    """Return ``variant`` without the parts that do nothing to this dataset, and a line about each of those, by cause.

    ``steps``: of the sampling runs; 0 for none. A deployed folder's part that is the reference's has an empty line.

    Raises:
        UserError: a part cannot be used; it names the part, and what its config says otherwise.
    """
    same = dict.fromkeys((*_SAME_EFFECTS, "configs"), "") if models.folder is not None else {}
    same = {cause: line for cause, line in same.items() if cause not in variant.changes()}
    for cause in (each for each in _SAME_EFFECTS if each in variant.changes()):
        try:
            unseen = cause == "shift" and not steps
            if unseen or _does_alike(models, variant.only(cause), cause, calibration, steps):
                effect = "not looked at, because nothing is sampled (--steps 0)" if unseen else _SAME_EFFECTS[cause]
                usual = cause == "shift" and _does_alike(models, variant.only(cause), cause, calibration, _USUAL_STEPS)
                if cause == "shift" and not unseen and not usual:
                    effect += f" in {counted(steps, 'step')}, but not in {_USUAL_STEPS} (--steps)"
                same[cause] = f"{words(models, variant, cause, captions_of(calibration))}: {effect}"
                variant = variant.without(cause)
            if cause == "shift" and models.folder and (sampler := _scheduler_fields(models, _NOISE_LEVELS)):
                effect = "another sampler, which is not looked at: the report samples by Euler's method"
                same[cause] = "; ".join(filter(None, [same.get(cause), f"{', '.join(sampler)}: {effect}"]))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever transformers, diffusers and torch raise for a config
            said = "; ".join(fields(models, variant, cause)) or "its config is the reference's"
            place = f"{models.deployed.name}: {models.words(cause, getattr(variant, cause))}"
            raise UserError(f"{place} cannot be used ({said}): {reason_of(error)}") from error
    return variant, same


def _does_alike(models: Models, variant: Variant, cause: str, calibration: Calibration, steps: int) -> bool:
    if cause == "tokenizer":
        others, measured = _read_otherwise(models, variant, calibration), {s.text.caption for s in calibration.sources}
        if not others or not others & measured:  # else it may be filling that nothing sees
            return not others
    high, served = (_made(models, each, cause, calibration, steps) for each in (REFERENCE, variant))
    pairs = [(a.double(), b.double()) for a, b in zip(high, served, strict=True)]
    most = _MERGED if cause == "text" and models.deployed.merged else _SAME
    return all(a.shape == b.shape and (b - a).norm() <= most * a.norm() for a, b in pairs)


def _read_otherwise(models: Models, variant: Variant, calibration: Calibration) -> set[str]:
    """Return the captions that get other tokens.

    Raises:
        UserError: a token that the encoder does not know.
    """
    high, served = (models.text_encoder(each) for each in (REFERENCE, variant))
    others = {each: ids for each in captions_of(calibration) if (ids := served.ids(each)) != high.ids(each)}
    for name, encoder in high.models().items() if others else ():
        largest = max(max(ids[name]) for ids in others.values())
        if largest >= (known := encoder.get_input_embeddings().num_embeddings):
            told = f"has a token number {largest}; {name} ends at {known - 1}"
            raise UserError(f"{told}; give that encoder's own tokenizer")
    return {*others}


def _made(models: Models, variant: Variant, cause: str, calibration: Calibration, steps: int) -> list[Tensor]:
    """Return what a part makes of the calibration's images: latents and pixels, noise levels, or embeddings."""
    if cause == "vae":
        encoder = models.image_encoder(variant)
        latents = [encoder.encode(source.pixels().image[None]) for source in calibration.sources]
        return [*latents, *map(encoder.decode, latents)]
    if cause == "shift":
        sizes = sorted({batch.latents.shape[-2:].numel() for batch in (*calibration.fit, *calibration.check)})
        levels = (models.sigmas(variant, steps or 4, size // models.family.patch_size**2) for size in sizes)
        return [torch.tensor(models.timestep_scale(variant)), *map(torch.tensor, levels)]
    found = models.texts(variant, [source.text for source in calibration.sources], changed=True) or []
    return [tensor for each in found for tensor in each.values()]


# In words.


def words(models: Models, variant: Variant, cause: str, captions: Sequence[str] = ()) -> str:
    """Return one of a variant's changes in words: what its config says otherwise, and how it differs.

    ``captions``: of the dataset, which a tokenizer is compared on.
    """
    value, said = getattr(variant, cause), fields(models, variant, cause)
    text = [] if cause == "configs" or value == "deployed" else [models.words(cause, value)]
    if cause == "tokenizer":
        text += _tokens(models, variant, captions)
    elif cause == "vae":
        text.append(module_difference(*(models.image_encoder(each).vae for each in (REFERENCE, variant))))
    elif cause == "text":
        one, other = (models.text_encoder(each) for each in (REFERENCE, variant))
        said = _changed("model_index.json", *({"layers": getattr(each, "layers", ())} for each in (one, other)))
        for (name, high), served in zip(one.models().items(), other.models().values(), strict=True):
            said.append(f"{name}: {module_difference(high, served) or 'the same weights'}")
            said += _changed(f"{name} config", *(_settings(each.config.to_dict()) for each in (high, served)))
    return "; ".join(filter(None, [*text, *said]))


def _tokens(models: Models, variant: Variant, captions: Sequence[str]) -> Iterator[str]:
    """Yield how many captions get other tokens, and the first of them, of each tokenizer of ``variant``."""
    encoders = [models.text_encoder(each) for each in (REFERENCE, variant)]
    ids = {caption: [each.ids(caption) for each in encoders] for caption in captions}
    for part, name in zip(models.family.layout.tokenizers, encoders[1].tokenizers, strict=True):
        others = [caption for caption, (a, b) in ids.items() if a[name] != b[name]]
        if not others:
            continue
        rows = zip_longest(*(each[name] for each in ids[others[0]]))
        place, tokens = next((place, tokens) for place, tokens in enumerate(rows) if tokens[0] != tokens[1])
        own, found = (
            "none" if token is None else f"{token} ({encoder.tokenizers[name].convert_ids_to_tokens(token)})"
            for encoder, token in zip(encoders, tokens, strict=True)
        )
        number = f"{len(others)} of {counted(len(captions), 'caption')}"
        where = f"of {others[0][:40]!r} token {place}"
        yield f"{part.folder}: other tokens for {number}; {where} is {found}, not {own}"


def fields(models: Models, variant: Variant, cause: str) -> list[str]:
    """Return what the configs of a part say otherwise, key by key; nothing is loaded but tokenizers."""
    own, folder, value = models.family, models.folder, getattr(variant, cause)
    if folder is not None and cause == "configs":
        configs = (family.files.transformer_config for family in (own, folder))
        return _of_class("transformer", own.transformer_class, *configs)
    if folder is not None and value == "deployed":
        return _scheduler_fields(models)
    if folder is not None and value == "ignored" and own.guidance_input and not folder.guidance_input:
        return ["transformer config guidance_embeds False instead of True"]
    if cause == "tokenizer":
        pairs = zip(*(models.text_encoder(each).tokenizers.values() for each in (REFERENCE, variant)), strict=True)
        places = zip(own.layout.tokenizers, pairs, strict=True)
        return [each for part, pair in places for each in _changed(part.folder, *map(_tokenizer, pair))]
    if cause not in ("text", "vae"):
        return []
    served = models.part_family(value)
    if cause == "vae":
        described = (each.image_encoder.describe(WeightFiles(each.files.vae))[0] for each in (own, served))
        return _of_class("VAE", own.image_encoder.autoencoder, *described)
    triples = zip(own.layout.text_encoders, own.files.text_encoders, served.files.text_encoders, strict=True)
    return [each for part, a, b in triples for each in _changed(f"{part.folder} config", _config(a), _config(b))]


def _scheduler(family: Family) -> dict[str, Any]:
    """Return a scheduler's class and settings; the settings as Euler's method, the usual class, reads them."""
    found = read_config(family.files.scheduler, "scheduler_config.json") if family.files.scheduler else {}
    usual = family.scheduler()
    return {"class": found.get("_class_name", type(usual).__name__), **_settings(found), **_settings(usual.config)}


def _scheduler_fields(models: Models, unread: Collection[str] = ()) -> list[str]:
    """Return which settings a deployed scheduler has otherwise, one that only one of the two has too.

    ``unread``: those that are left out.
    """
    assert models.folder is not None
    settings = [_scheduler(each) for each in (models.family, models.folder)]
    keys = [key for key in dict.fromkeys((*settings[1], *settings[0])) if key not in unread]
    return _changed("scheduler", *({key: each.get(key) for key in keys} for each in settings))


def _of_class(title: str, kind: Any, high: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Return which arguments of a class two configs say otherwise; what one does not say is the default."""
    known = {key: each.default for key, each in inspect.signature(kind).parameters.items() if key not in _NOT_COMPARED}
    return _changed(title, *({key: each.get(key, known[key]) for key in known} for each in (high, served)))


def _changed(title: str, high: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Return which keys that both have differ, with their values where these are short."""
    found = []
    for key in (key for key in served if key in high):
        one, other = (list(each) if isinstance(each, tuple) else each for each in (high[key], served[key]))
        if one != other:
            short = len(f"{one}{other}") < 80
            found.append(f"{title} {key}" + (f" {other} instead of {one}" if short else ""))
    return found


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return all by which a tokenizer turns text into tokens."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    rules = {key: backend[key] for key in ("normalizer", "pre_tokenizer", "post_processor", "added_tokens")}
    sizes = {key: getattr(tokenizer, key) for key in ("padding_side", "truncation_side", "model_max_length")}
    model = {"vocabulary": backend["model"].get("vocab"), "merges": backend["model"].get("merges")}
    return model | rules | sizes | {key: str(each) for key, each in tokenizer.special_tokens_map.items()}
