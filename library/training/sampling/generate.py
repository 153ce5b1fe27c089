"""Images from a base model and any number of LoRAs, in the order that needs least memory.

Text encoders first, freed again, then the transformer with its LoRAs, then one image after the other. Several LoRAs
become one of the summed rank, which is exact (``networks.merging.low_rank``) and costs one pair of small products a
layer; adapters of other kinds stay beside each other (``networks.adapters.combined``). What is to be generated are
:class:`Cell` s: prompts with the LoRAs, and their strength, that each is made with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image
from torch import nn

from library.config.model_types import Blank
from library.console import Console
from library.data.buckets import ControlSizing
from library.data.cache import TextJob, encode_text_batch
from library.errors import counted
from library.models.family import Family
from library.models.layer_names import LoraTargets
from library.models.text import TextEncoder
from library.models.vae import ImageEncoder
from library.precision.recipe import WeightLoader, describe_base
from library.safetensors_io import read_safetensors_header
from library.training.memory.block_swap import swap_blocks, swappable
from library.training.sampling.conditions import PromptImageRules, check_prompt_images, encode_prompt_images, text_jobs
from library.training.sampling.images import generate_image
from library.training.sampling.prompts import SamplePrompt, note_changes
from networks.files.adapters import load_trainable
from networks.files.metadata import TrainedOn, base_mismatch, weight_file
from networks.files.weights import AdapterWeights
from networks.merging.low_rank import combine_loras
from networks.merging.merge import LoraSource
from networks.network import AdapterNetwork, attach_lora


@dataclass(frozen=True)
class Cell:
    """An image to make: the updates of its LoRAs add up, ``strength`` multiplies their own strengths."""

    prompt: SamplePrompt
    loras: tuple[LoraSource, ...] = ()
    strength: float = 1.0


def generate_images(
    family: Family,
    cells: Sequence[Cell],
    dtype: torch.dtype,
    device: torch.device,
    console: Console,
    fp8: WeightLoader | None = None,
    sizing: ControlSizing | None = None,
    blank: Blank | None = None,
    swapped: int | None = 0,
    encoders: tuple[ImageEncoder, TextEncoder] | None = None,
) -> Iterator[tuple[SamplePrompt, Image]]:
    """Yield each cell's prompt with its image; the model is loaded once for all, and the LoRAs in it are exchanged.

    Args:
        family: the base model.
        cells: what to generate; those of the same LoRAs should follow each other.
        dtype, device: where to compute, and in what: weights, and products when it is a 16-bit one.
        console: for what is to be known about model and LoRAs.
        fp8: which weights of the transformer become fp8; what its file has in fp8 stays so.
        sizing: of reference images; by default they get the prompt's width and height.
        blank: what the region to fill is blanked with; by default as the first LoRAs' files say, else grey.
        swapped: without LoRAs, blocks whose weights wait in host memory; None: as many as can.
        encoders: of images and text; by default the family's, of ``dtype``.
    """
    prompts = list(dict.fromkeys(cell.prompt for cell in cells))
    for remark in check_prompt_images(prompts, family.conditioning, family.most_references):
        console.print(f"note: {remark}")
    targets = family.targets
    for lora in dict.fromkeys(lora for cell in cells for lora in cell.loras):
        read_safetensors_header(weight_file(lora.path))  # which says what is wrong with it before anything is loaded
    own = encoders or (family.load_image_encoder(dtype, device), family.load_text_encoder(dtype, device))
    image_encoder, text_encoder = own
    for remark in note_changes(prompts, text_encoder.too_long):
        console.print(f"note: {remark}", soft_wrap=True)
    multiple, blank = image_encoder.pixel_multiple, blank or trained_blank(cells[0].loras)
    rules = PromptImageRules(family.conditioning, sizing or ControlSizing(), multiple, blank)
    if family.conditioning == "fill" and blank != "grey":
        console.print(f"regions to fill are blanked with {blank}")
    embeddings = _encode_each(cells, text_encoder, rules, family, console)
    conditions = {prompt: encode_prompt_images(prompt, image_encoder, rules) for prompt in prompts}
    fp8 = fp8 or WeightLoader()
    transformer = family.load_transformer(dtype, device if swapped == 0 else "cpu", fp8=fp8)
    if (layout := family.quantized_file()) or fp8.recipe:
        console.print(f"base: {describe_base(layout, fp8, dtype)}")
    if swapped != 0:
        blocks = family.blocks(transformer)
        swap_blocks(transformer, blocks, swappable(blocks)[0] if swapped is None else swapped, device)
    network, attached = None, tuple[LoraSource, ...]()
    for cell in cells:
        prompt = cell.prompt
        if cell.loras != attached:
            _put_in(transformer, network, targets, 0.0)
            attached = cell.loras
            layers = read_loras(attached, family, Console(quiet=True)).get(targets.file_prefix)
            network = attach_lora(transformer, layers, targets, _names(attached)) if layers else None
        _put_in(transformer, network, targets, cell.strength)
        found = embeddings[(attached, cell.strength) if (attached, cell.strength) in embeddings else None]
        texts_of_it = {text: found[prompt.text_key(text)] for text in prompt.texts()}
        yield prompt, generate_image(family, transformer, image_encoder, prompt, texts_of_it, conditions[prompt])


def _encode_each(
    cells: Sequence[Cell], text_encoder: TextEncoder, rules: PromptImageRules, family: Family, console: Console
) -> dict[tuple[tuple[LoraSource, ...], float] | None, dict[str, dict[str, torch.Tensor]]]:
    """Return the prompts' embeddings by LoRAs and strength, or by None where no LoRA changes the text encoders."""
    texts: dict[str, TextJob] = {}
    for prompt in dict.fromkeys(cell.prompt for cell in cells):
        texts |= text_jobs(prompt, text_encoder.sees_references, rules)
    embeddings: dict[tuple[tuple[LoraSource, ...], float] | None, dict[str, dict[str, torch.Tensor]]] = {}
    for loras in dict.fromkeys(cell.loras for cell in cells):  # all of them together may be too large for the memory
        strengths = list(dict.fromkeys(cell.strength for cell in cells if cell.loras == loras))
        weights = read_loras(loras, family, console, strengths)
        by_text = any(encoder.name in weights for encoder in family.targets.text_encoders)
        for strength in strengths:
            changed, key = weights if strength else {}, (loras, strength) if by_text else None
            if key not in embeddings:
                names = _names(loras)
                embeddings[key] = encode_with_loras(text_encoder, texts, changed, family.targets, names, strength)
    return embeddings


def _put_in(transformer: nn.Module, network: AdapterNetwork | None, targets: LoraTargets, strength: float) -> None:
    """Put a network's layers into the model at ``strength``; at 0 they are taken out: the base, bit for bit."""
    if network and strength:
        network.set_multiplier(strength)
    for name, layer in network.modules.items() if network else ():
        transformer.set_submodule(targets.path_in_model(name), layer if strength else layer.base)


def _names(loras: Sequence[LoraSource]) -> str:
    return " + ".join(str(lora.path) for lora in loras)


def read_loras(
    loras: Sequence[LoraSource], family: Family, console: Console, strengths: Sequence[float] = (1.0,)
) -> dict[str, dict[str, Any]]:
    """Return component (transformer, text encoders) -> what all LoRAs change there; say what they are.

    ``strengths`` multiply their own, one after the other.
    """
    targets = family.targets
    read = [(source, load_trainable(source.path, targets)) for source in loras]
    fingerprint = family.fingerprint() if any("tandem.base_fingerprint" in lora.metadata for _, lora in read) else None
    for source, lora in read:
        used = ", ".join(f"{source.ratio * strength:g}" for strength in strengths)
        console.print(f"{source.path}: {lora.layout}, {counted(len(lora.weights), 'layer')}, strength {used}")
        if fingerprint and (remark := base_mismatch(lora.metadata, fingerprint)):
            console.print(f"note: {source.path}: {remark}")
        for note in lora.notes:
            console.print(f"note: {note}")
    return targets.by_component(combine_loras([(lora.weights, source.ratio) for source, lora in read]))


def trained_blank(loras: Sequence[LoraSource]) -> Blank:
    """Return what the LoRAs were trained on in place of the region to fill: the first file's that says so, else grey.

    Files of other programs do not say it.
    """
    return (*TrainedOn.read([lora.path for lora in loras]).blanks, "grey")[0]


@torch.no_grad()
def encode_with_loras(
    text_encoder: TextEncoder,
    texts: Mapping[str, TextJob],
    loras: Mapping[str, Mapping[str, AdapterWeights]],
    targets: LoraTargets,
    source: str,
    strength: float = 1.0,
) -> dict[str, dict[str, torch.Tensor]]:
    """Return every text's embeddings by key, without a batch axis, on the CPU, from the encoders with their LoRAs.

    Args:
        text_encoder: is freed afterwards.
        texts: to encode, by ``SamplePrompt.text_key``.
        loras: component -> weights; the transformer's are not used.
        targets: the family's row.
        source: the files' names, for messages.
        strength: of the LoRAs.
    """
    embeddings = {key: encode_text_batch([job], text_encoder)[0] for key, job in texts.items()}
    text_encoder.release()
    for encoder in targets.text_encoders:
        if weights := loras.get(encoder.name):
            module = text_encoder.load_modules([encoder.name])
            attach_lora(module, weights, targets, source).set_multiplier(strength)
            for key, cached in embeddings.items():
                cached |= {name: rows[0].cpu() for name, rows in module([texts[key].caption]).items()}
    return embeddings
