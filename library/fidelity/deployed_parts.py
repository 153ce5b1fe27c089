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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from library.checksums import weights_fingerprint
from library.errors import UserError, counted, reason_of
from library.fidelity.calibration import Calibration
from library.fidelity.differences import relative_error
from library.fidelity.rounding_laws import same_in_bf16
from library.fidelity.serving import REFERENCE, Models, Served, Variant
from library.fidelity.tensors import module_difference
from library.models.family import Family
from library.models.weights import read_config
from library.precision.checkpoint import WeightFiles

_MOST = 1000
_SAME = 1e-5  # relative rms: a hundredth of what rounding to bf16 changes
# nothing is computed from the VAE's two here; the last is a guidance that is ignored
_NOT_COMPARED = ("sample_size", "force_upcast", "guidance_embeds")
_OF_FILES = ("dtype", "torch_dtype", "transformers_version", "architectures", "model_type")  # of a config, no settings
# beside the dataset's captions: the empty prompt, and what few captions have
_PROBES = (
    "",
    "A RED Cat's 2nd HAT",
    "crème brûlée, Ångström, naïve",
    "a 🦊 in 東京 — ½ price…",
    "one long prompt " * 300,
)


# From files.


def complete(models: Models, variant: Variant) -> Variant:
    """Return ``variant`` with what a deployed pipeline brings besides the transformer, and what it lacks.

    Parts whose files are the reference's, and those that ``variant`` says something of, are no causes; nor are
    encoders with the LoRA merged in. A merged file without text encoders has lost the LoRA's part in them.

    Raises:
        UserError: the pipeline names a tokenizer or a scheduler that is not in it.
    """
    lost = models.deployed.merged and any(name != models.targets.file_prefix for name in models.loras)
    if (folder := models.folder) is not None:
        _check_whole(folder)
        layout, own, files = folder.layout, models.family.files, folder.files
        of_text = [getattr(family, "text_settings", ()) for family in (models.family, folder)]
        pairs = list(zip(layout.text_encoders, own.text_encoders, files.text_encoders, strict=True))
        others = [
            (part.option, str(b)) for part, a, b in pairs if _differ(a, b) or (a != b and of_text[0] != of_text[1])
        ]
        if others and not (variant.text and variant.text.options):
            text = replace(variant.text or Served(), options=tuple(others))
            inside = lost and _holds_the_lora(models, text)
            variant, lost = (variant, False) if inside else (replace(variant, text=text), lost)
        triples = zip(layout.tokenizers, own.tokenizers, files.tokenizers, strict=True)
        if tokenizers := [(part.option, str(b)) for part, a, b in triples if _differ(Path(a), Path(b))]:
            variant = replace(variant, tokenizer=Served(tuple(tokenizers)))
        vae = variant.vae or Served()
        if not vae.options and _differ(own.vae, files.vae):
            variant = replace(variant, vae=replace(vae, options=((layout.vae.option, str(files.vae)),)))
        if variant.shift is None and _schedulers(models):
            variant = replace(variant, shift="deployed")
        if variant.guidance is None and _ignores_guidance(models):
            variant = replace(variant, guidance="ignored")
        if _configs(models):
            variant = replace(variant, configs=True)
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


def _differ(one: Path, other: Path) -> bool:
    """Return whether the files of a part are others: weights, config, or all of a tokenizer's."""
    if one == other:
        return False
    return not one.exists() or weights_fingerprint(one) != weights_fingerprint(other) or _config(one) != _config(other)


def _config(path: Path) -> dict[str, Any]:
    """Return the settings of a folder's config.json, of a text encoder's the language model's; none of a file."""
    known = read_config(path) if (path / "config.json").is_file() else {}
    return _settings(known)


def _settings(known: Mapping[str, Any]) -> dict[str, Any]:
    known = {**known, **(known.get("text_config") or {})}
    return {key: value for key, value in known.items() if not key.startswith("_") and key not in _OF_FILES}


def _holds_the_lora(models: Models, text: Served) -> bool:
    """Return whether the encoders ``text`` are the reference's with the LoRA's part merged in, and nothing else."""
    pairs = zip(*(models.text_encoder(each).models().items() for each in (REFERENCE, Variant(text=text))), strict=True)
    for (component, high), (_, served) in pairs:
        updates = {n.removeprefix(f"{component}."): each for n, each in models.loras.get(component, {}).items()}
        found = dict(served.named_parameters())
        for name, parameter in high.named_parameters():
            update = updates.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            wanted = parameter.detach().float() + (0 if update is None else update.delta().to(parameter.device))
            if name not in found or not same_in_bf16(found[name].detach().float(), wanted):
                return False
    return True


# By what they do.


def captions_of(calibration: Calibration) -> list[str]:
    """Return every caption of the dataset's first thousand images once."""
    train = calibration.data.train
    return list(dict.fromkeys(each for sample in train.samples[:_MOST] for each in train.captions_of(sample)))


def settle(models: Models, variant: Variant, calibration: Calibration, steps: int) -> tuple[Variant, dict[str, str]]:
    """Return ``variant`` without the parts that do nothing to this dataset, and a line about each of those, by cause.

    ``steps``: of the sampling runs; 0 for none. A deployed folder's part that is the reference's has an empty line.

    Raises:
        UserError: a part cannot be used.
    """
    same = dict.fromkeys(("tokenizer", "text", "vae", "shift", "configs"), "") if models.folder is not None else {}
    same = {cause: line for cause, line in same.items() if cause not in variant.changes()}
    effects = {
        "tokenizer": (_reads_alike, "these captions get the same tokens, or tokens that do the same"),
        "text": (_encodes_alike, "these captions get the same embeddings"),
        "vae": (_paints_alike, "these images get the same latents, and back"),
        "shift": (_steps_alike, "these images are sampled at the same noise levels"),
    }
    for cause, (is_same, effect) in effects.items():
        if cause not in variant.changes():
            continue
        with _used(models, variant, cause):
            if is_same(models, variant.only(cause), calibration, steps):
                same[cause] = f"{words(models, variant, cause, captions_of(calibration))}: {effect}"
                variant = variant.without(cause)
    return variant, same


@contextmanager
def _used(models: Models, variant: Variant, cause: str) -> Iterator[None]:
    """Let what makes a part unusable be one line that names the part, and what its config says otherwise."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (UserError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError,
            StrictDataclassError) as error:  # fmt: skip
        said = "; ".join(fields(models, variant, cause)) or "its config is the reference's"
        place = f"{models.deployed.name}: {models.words(cause, getattr(variant, cause))}"
        raise UserError(f"{place} cannot be used ({said}): {reason_of(error)}") from error


def _reads_alike(models: Models, variant: Variant, calibration: Calibration, steps: int) -> bool:
    high, served = (models.text_encoder(each) for each in (REFERENCE, variant))
    found = {caption: (high.ids(caption), served.ids(caption)) for caption in captions_of(calibration)}
    if all(a == b for a, b in found.values()):
        return True
    largest = {name: max(max(ids[name]) for _, ids in found.values()) for name in served.tokenizers}
    for name, encoder in high.models().items():
        if largest[name] >= (known := encoder.get_input_embeddings().num_embeddings):
            raise UserError(f"token {largest[name]} of {known} that {name} knows; give that encoder's own tokenizer")
    others = {
        source.text.caption
        for source in calibration.sources
        if (ids := found.get(source.text.caption)) and ids[0] != ids[1]
    }
    return bool(others) and _encodes_alike(models, variant, calibration, steps)  # filling that nothing sees


def _encodes_alike(models: Models, variant: Variant, calibration: Calibration, steps: int) -> bool:
    jobs = [source.text for source in calibration.sources]
    high, served = (models.texts(each, jobs, changed=True) or [] for each in (REFERENCE, variant))
    return all(_alike([*a.values()], [*b.values()]) for a, b in zip(high, served, strict=True))


def _paints_alike(models: Models, variant: Variant, calibration: Calibration, steps: int) -> bool:
    high, served = (models.image_encoder(each) for each in (REFERENCE, variant))
    for source in calibration.sources:
        image = source.pixels().image[None]
        latents = high.encode(image)
        if not _alike([latents, high.decode(latents)], [served.encode(image), served.decode(latents)]):
            return False
    return True


def _steps_alike(models: Models, variant: Variant, calibration: Calibration, steps: int) -> bool:
    sizes = {batch.latents.shape[-2:].numel() for batch in (*calibration.fit, *calibration.check)}
    levels = [
        [torch.tensor(models.sigmas(each, steps or 4, size // models.family.patch_size**2)) for size in sizes]
        for each in (REFERENCE, variant)
    ]
    return _alike(*levels) and models.timestep_scale(variant) == 1


def _alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    shapes = [[each.shape for each in tensors] for tensors in (one, other)]
    return shapes[0] == shapes[1] and relative_error(one, other) < _SAME


# In words.


def words(models: Models, variant: Variant, cause: str, captions: Sequence[str] = ()) -> str:
    """Return one of a variant's changes in words: what its config says otherwise, and how it differs.

    ``captions``: of the dataset, which a tokenizer is compared on.
    """
    value, said = getattr(variant, cause), fields(models, variant, cause)
    if cause == "configs" or value == "deployed":
        return "; ".join(said)
    text = [models.words(cause, value)]
    if cause == "tokenizer":
        text += _tokens(models, variant, captions)
    elif cause == "text":
        one, other = (models.text_encoder(each) for each in (REFERENCE, variant))
        text += _changed("model_index.json", *({"layers": getattr(each, "layers", ())} for each in (one, other)))
        for (name, high), served in zip(one.models().items(), other.models().values(), strict=True):
            text.append(f"{name}: {module_difference(high, served) or 'the same weights'}")
            text += _changed(f"{name} config", *(_settings(each.config.to_dict()) for each in (high, served)))
        return "; ".join(text)
    elif cause == "vae":
        text.append(module_difference(*(models.image_encoder(each).vae for each in (REFERENCE, variant))))
    return "; ".join(filter(None, [*text, *said]))


def _tokens(models: Models, variant: Variant, captions: Sequence[str]) -> Iterator[str]:
    """Yield how many captions get other tokens, and the first of them, of each tokenizer of ``variant``."""
    high, served = (models.text_encoder(each) for each in (REFERENCE, variant))
    ids = {caption: (high.ids(caption), served.ids(caption)) for caption in (*captions, *_PROBES)}
    for part, name in zip(models.family.layout.tokenizers, served.tokenizers, strict=True):
        others = [caption for caption, (a, b) in ids.items() if a[name] != b[name]]
        if not others:
            continue
        rows = [each[name] for each in ids[others[0]]]
        place = next((i for i, tokens in enumerate(zip(*rows, strict=False)) if len({*tokens}) > 1), None)

        def said(encoder: Any, row: list[int], name: str = name, place: int | None = place) -> str:
            known = encoder.tokenizers[name].convert_ids_to_tokens
            return f"{len(row)} tokens" if place is None else f"{row[place]} ({known(row[place])})"

        number = f"{len({*others} & {*captions})} of {counted(len(captions), 'caption')}"
        where = f"of {others[0][:40]!r}" + (f" token {place}" if place is not None else "")
        yield f"{part.folder}: other tokens for {number}; {where} is {said(served, rows[1])}, not {said(high, rows[0])}"


def fields(models: Models, variant: Variant, cause: str) -> list[str]:
    """Return what the configs of a part say otherwise, key by key; nothing is loaded but tokenizers."""
    own, value = models.family, getattr(variant, cause)
    if cause == "configs":
        return _configs(models)
    if cause == "shift" and value == "deployed":
        return _schedulers(models)
    if cause == "guidance" and value == "ignored" and _ignores_guidance(models):
        return ["transformer config guidance_embeds False instead of True"]
    if cause == "tokenizer":
        pairs = zip(*(models.text_encoder(each).tokenizers.items() for each in (REFERENCE, variant)), strict=True)
        places = zip(own.layout.tokenizers, pairs, strict=True)
        return [each for part, ((_, a), (_, b)) in places for each in _changed(part.folder, *map(_tokenizer, (a, b)))]
    if cause not in ("text", "vae"):
        return []
    served = models.part_family(value)
    if cause == "vae":
        return _of_class("VAE", own.image_encoder.autoencoder, *map(_vae_config, (own, served)))
    triples = zip(own.layout.text_encoders, own.files.text_encoders, served.files.text_encoders, strict=True)
    return [each for part, a, b in triples for each in _changed(f"{part.folder} config", _config(a), _config(b))]


def _ignores_guidance(models: Models) -> bool:
    """Return whether the deployed folder's config says that there is no guidance input, and the reference has one."""
    return models.folder is not None and models.family.guidance_input and not models.folder.guidance_input


def _configs(models: Models) -> list[str]:
    """Return how the deployed folder's config of the transformer differs, key by key."""
    if models.folder is None:
        return []
    high, served = (family.files.transformer_config for family in (models.family, models.folder))
    return _of_class("transformer", models.family.transformer_class, high, served)


def _schedulers(models: Models) -> list[str]:
    """Return how the deployed folder's scheduler differs, key by key."""
    high, served = (_settings(family.scheduler().config) for family in (models.family, models.deployed_family))
    return _changed("scheduler", high, served)


def _of_class(title: str, kind: Any, high: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Return which arguments of a class two configs say otherwise; what one does not say is the default."""
    defaults = {n: p.default for n, p in inspect.signature(kind.__init__).parameters.items() if n != "self"}
    known = {key: value for key, value in defaults.items() if key not in _NOT_COMPARED}
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


def _vae_config(family: Family) -> dict[str, Any]:
    return family.image_encoder.describe(WeightFiles(family.files.vae))[0]
