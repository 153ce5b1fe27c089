"""How deployments of the built-in fill model are spoilt, for ``report_faults`` and the tests of the report.

:func:`prepare` trains a LoRA and makes clean deployments with our own tools. A fault is planted in a copy of one of
them (:func:`changed`, a change at a time), or by merging the LoRA as it should not be (:func:`merged`), or in another
part of the pipeline (:func:`pipeline`). Changes are plain tensor operations on what the file holds; none of them knows
what the report looks at.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader
from PIL import Image, ImageDraw, ImageOps
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.served_formats import write_format
from bench.tiny_runs import MODEL, ROOT, run

WEIGHTS = "diffusion_pytorch_model.safetensors"
IMAGES = ROOT / "assets" / "demo_dataset" / "images"
CLEAN = {  # folder of a clean deployment -> flags of tools/quantize_model.py
    "cast": ("--layout", "plain"),
    "tensor": ("--layout", "comfy_scaled"),
    "quant": ("--layout", "comfy_quant"),
    "row": ("--layout", "musubi", "--scheme", "row"),
    "block": ("--layout", "musubi", "--scheme", "block64"),
    "stochastic": ("--layout", "musubi", "--scheme", "row", "--rounding", "stochastic", "--seed", "3"),
    "kept": ("--layout", "plain", "--exclude", "embedders,modulation,final"),
}
DEQUANTIZED = {"copy": 0, "int8": 8, "int4": 4}  # folder of a bf16 copy -> bits that its matrices went through
OTHERS = {"other_t5": "text_encoder_2", "other_clip": "text_encoder", "other_vae": "vae"}  # spoilt copies

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], None]
Make = Callable[[Path, Path], Path | str]  # (folder with the clean files, folder to write into) -> what --deploy gets

# ---------------------------------------------------------------------------------------------- changes to a file


@cache
def reference() -> Tensors:
    """Return the reference's transformer, name -> tensor."""
    return load_file(MODEL / "transformer" / WEIGHTS)


def changed(clean: str, *changes: Change) -> Make:
    """Return how to make a copy of a clean deployment with tensors changed in place."""

    def make(place: Path, folder: Path) -> Path:
        shutil.copytree(place / clean, folder)
        file = next(path for path in (folder / "transformer" / WEIGHTS, folder / WEIGHTS) if path.exists())
        edit(file, file, *changes)
        return folder

    return make


def edit(source: Path, target: Path, *changes: Change) -> None:
    """Write ``source`` with its tensors changed to ``target``, with the same metadata."""
    with safe_open(source, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(source)
    for change in changes:
        change(tensors)
    target.unlink(missing_ok=True)  # the old one may be mapped
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, metadata)


def at(pattern: str, how: Callable[[Tensor], Tensor]) -> Change:
    """Return the change that applies ``how`` to every tensor whose whole name matches, fp8 as its codes."""

    def change(tensors: Tensors) -> None:
        found = [name for name in tensors if re.fullmatch(pattern, name)]
        assert found, f"{pattern}: names no tensor"
        for name in found:
            tensor = tensors[name]
            if tensor.dtype.itemsize == 1:
                tensors[name] = how(tensor.view(torch.uint8).clone()).contiguous().view(tensor.dtype)
            else:
                tensors[name] = how(tensor.clone())

    return change


def anew(pattern: str, how: Callable[[Tensor], Tensor]) -> Change:
    """Return the change that makes fp8 weights again from the reference's, in units of their scale, by ``how``."""

    def change(tensors: Tensors) -> None:
        found = [name for name in weights_in(tensors) if re.search(pattern, name)]
        assert found, f"{pattern}: names no fp8 weight"
        for name in found:
            made = how(reference()[name].float() / scale_of(tensors, name))
            tensors[name] = made.clamp(-448, 448).to(tensors[name].dtype) if made.dtype == torch.float32 else made

    return change


def weights_in(tensors: Tensors) -> list[str]:
    """Return the names of all fp8 weights."""
    return [name for name, t in tensors.items() if name.endswith(".weight") and str(t.dtype).startswith("torch.float8")]


def scale_of(tensors: Tensors, weight: str) -> Tensor:
    """Return what an fp8 weight's values are multiplied with, one number for each."""
    layer = weight.removesuffix(".weight")
    scale = next(
        (tensors[f"{layer}.{leaf}"] for leaf in ("scale_weight", "weight_scale") if f"{layer}.{leaf}" in tensors), None
    )
    if scale is None:
        return torch.ones(())
    scale = scale.float()
    return (
        scale.flatten(1).repeat_interleave(tensors[weight].shape[1] // scale.shape[1], 1) if scale.ndim == 3 else scale
    )


def truncate(x: Tensor) -> Tensor:
    """Return e4m3fn numbers next to ``x`` on the side of zero."""
    nearest = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = nearest.view(torch.uint8)
    return torch.where(nearest.float().abs() > x.abs(), codes - 1, codes).view(torch.float8_e4m3fn)


def flush(x: Tensor) -> Tensor:
    """Return ``x`` without what e4m3fn holds as subnormals."""
    return torch.where(x.abs() < 2**-6, 0.0, x)


def clip(deviations: float, x: Tensor) -> Tensor:
    """Return ``x`` with nothing beyond so many standard deviations."""
    return x.clamp(-deviations * x.std(), deviations * x.std())


def other(size: float, rank: int, x: Tensor) -> Tensor:
    """Return ``x`` as another fine-tune has it: plus an update of a falling spectrum, ``size`` of its norm."""
    random = torch.Generator().manual_seed(x.numel())
    down = torch.randn(min(rank, *x.shape), x.shape[1], generator=random)
    up = torch.randn(x.shape[0], len(down), generator=random) * torch.arange(1, len(down) + 1) ** -0.25
    return x + up @ down * (size * x.norm() / (up @ down).norm())


def noisy(size: float, x: Tensor) -> Tensor:
    """Return ``x`` plus white noise, ``size`` of its norm."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel()))
    return (x + noise * (size * x.norm() / noise.norm())).to(x.dtype)


def cast(x: Tensor) -> Tensor:
    """Return ``x`` rounded to e4m3fn."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)


def to_integers(bits: int, x: Tensor) -> Tensor:
    """Return ``x`` rounded to integers of so many bits with a scale for each 32 inputs, and back."""
    if x.ndim < 2:
        return x
    groups = x.float().unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((groups / scale).round() * scale).flatten(1).to(x.dtype)


def stored_in_fp8(pattern: str) -> Change:
    """Return the change that stores tensors of any kind in fp8, as a plain cast of all of them does."""

    def change(tensors: Tensors) -> None:
        found = [name for name in tensors if re.fullmatch(pattern, name)]
        assert found, f"{pattern}: names no tensor"
        tensors |= {name: cast(reference()[name]) for name in found}

    return change


def in_e5m2(share: int) -> Change:
    """Return the change that gives every ``share``-th fp8 weight the format e5m2."""

    def change(tensors: Tensors) -> None:
        for name in weights_in(tensors)[::share]:
            layer, weight = name.removesuffix(".weight"), reference()[name].float()
            leaf = next((leaf for leaf in ("scale_weight", "weight_scale") if f"{layer}.{leaf}" in tensors), None)
            scale = weight.abs().max() / 57344 if leaf else torch.ones(())
            if leaf:
                tensors[f"{layer}.{leaf}"] = scale.reshape(tensors[f"{layer}.{leaf}"].shape)
            tensors[name] = (weight / scale).to(torch.float8_e5m2)

    return change


def exchanged(one: str, two: str) -> Change:
    """Return the change that exchanges whatever begins with ``one`` and with ``two``."""

    def change(tensors: Tensors) -> None:
        pairs = [(name, two + name.removeprefix(one)) for name in tensors if name.startswith(one)]
        assert pairs
        tensors |= {a: tensors[b] for a, b in pairs} | {b: tensors[a] for a, b in pairs}

    return change


def given(name: str, tensor: Tensor) -> Change:
    """Return the change that puts ``tensor`` under every name that ``name`` makes of an fp8 layer's."""

    def change(tensors: Tensors) -> None:
        tensors |= {name.format(weight.removesuffix(".weight")): tensor.clone() for weight in weights_in(tensors)}

    return change


def roll(rows: int, x: Tensor) -> Tensor:
    """Return ``x`` with its first dimension rolled."""
    return x.roll(rows, 0)


def permute(x: Tensor) -> Tensor:
    """Return ``x`` with its rows in another order."""
    return x[torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(7))]


def transpose(x: Tensor) -> Tensor:
    """Return the bytes of ``x`` transposed in its own shape."""
    return x.flatten(1).T.reshape(x.shape)


def times(factor: float, x: Tensor) -> Tensor:
    """Return ``factor * x``."""
    return x * factor


# --------------------------------------------------------------------------------------------- deployments by tools


def call(tool: str, *words: object) -> None:
    """Run ``tools/<tool>.py`` in this process, with nothing printed."""
    module = importlib.import_module(f"tools.{tool}")
    with mock.patch.object(sys, "argv", [tool, *map(str, words)]), contextlib.redirect_stdout(io.StringIO()):
        module.main()


def merged(*flags: str, strength: float = 1.0, without: str | None = None, twice: bool = False, clean: str = "",
           lora: str = "lora") -> Make:  # fmt: skip
    """Return how to merge the LoRA with ``tools/merge_lora.py``, perhaps ``without`` layers of it."""

    def make(place: Path, folder: Path) -> Path:
        file = place / f"{lora}.safetensors"
        if without is not None:
            file = folder.with_suffix(".safetensors")

            def drop(tensors: Tensors) -> None:
                gone = [name for name in tensors if re.search(without, name)]
                assert gone, f"{without}: names no layer of the LoRA"
                for name in gone:
                    del tensors[name]

            edit(place / f"{lora}.safetensors", file, drop)
        loras = [f"{file}:{strength}"] * (2 if twice else 1)
        model = place / clean if clean else MODEL
        words = ["--model", model, "--model_type", "flux_fill", "--lora", *loras, "--save_to", folder, *flags]
        call("merge_lora", *words)
        return folder

    return make


def pipeline(part: str = "", values: Mapping[str, object] | None = None, clean: str = "cast") -> Make:
    """Return how to serve a clean deployment as a whole pipeline, with values of one part's configuration changed."""

    def make(place: Path, folder: Path) -> Path:
        shutil.copytree(MODEL, folder)
        shutil.copytree(place / clean, folder / "transformer", dirs_exist_ok=True)
        if part:
            config = next((folder / part).glob("*config.json"))
            config.write_text(json.dumps(json.loads(config.read_text()) | (values or {})))
        return folder

    return make


def quantized(scheme: str, *changes: Change) -> Make:
    """Return how to make a deployment of a ``scheme`` with ``tools/quantize_model.py``, its tensors changed."""

    def make(_place: Path, folder: Path) -> Path:
        call("quantize_model", "--model", MODEL, "--save_to", folder, "--scheme", scheme)
        file = next(folder.rglob(WEIGHTS))
        edit(file, file, *changes)
        return folder

    return make


def merged_with(how: Change, *flags: str) -> Make:
    """Return how to merge the LoRA with ``tools/merge_lora.py`` after its tensors were changed."""

    def make(place: Path, folder: Path) -> Path:
        file = folder.with_suffix(".safetensors")
        edit(place / "lora.safetensors", file, how)
        words = ["--model", MODEL, "--model_type", "flux_fill", "--lora", file, "--save_to", folder]
        call("merge_lora", *words, *flags, "--accept_loss")
        return folder

    return make


def update_times(pattern: str, factor: Callable[[str], float]) -> Change:
    """Return the change that multiplies the LoRA's updates of the layers that ``pattern`` is found in."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if "lora_B" in name and re.search(pattern, name)]:
            tensors[name] = tensors[name] * factor(name)

    return change


def update_transposed(tensors: Tensors) -> None:
    """Exchange up and down of the LoRA's square layers."""
    for up in [name for name in tensors if "lora_B" in name]:
        down = up.replace("lora_B", "lora_A")
        if tensors[up].shape[0] == tensors[down].shape[1]:
            tensors[up], tensors[down] = tensors[down].T, tensors[up].T


def in_another_order(tensors: Tensors) -> None:
    """Give every layer of the LoRA the update of the next one of its shape."""
    downs = [name for name in tensors if "lora_A" in name]
    before = dict(tensors)
    for down in downs:
        shapes = {name: (before[name].shape, before[name.replace("lora_A", "lora_B")].shape) for name in downs}
        alike = [name for name in downs if shapes[name] == shapes[down]]
        other = alike[(alike.index(down) + 1) % len(alike)]
        for a, b in ((down, other), (down.replace("lora_A", "lora_B"), other.replace("lora_A", "lora_B"))):
            tensors[a] = before[b]


def nibbles(codes: Tensor) -> Tensor:
    """Return bytes with their halves exchanged."""
    return codes << 4 | codes >> 4


def by_rows(scales: Tensor) -> Tensor:
    """Return block scales in the order of rows, in the tensor where those in cuBLAS's tiles were."""
    rows, runs = scales.shape
    tiles = scales.reshape(rows // 128, runs // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, runs)


def unrotated(pattern: str) -> Change:
    """Return the change that rounds the reference's weights to int8 rows under a marker that says rotated."""

    def change(tensors: Tensors) -> None:
        names = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8 and re.search(pattern, name)]
        assert names, f"{pattern}: names no int8 weight"
        for name in names:
            weight, scale = reference()[name].float(), f"{name.removesuffix('.weight')}.weight_scale"
            tensors[scale] = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / tensors[scale]).round().to(torch.int8)

    return change


def wrapping(tensors: Tensors) -> None:
    """Round to int8 rows with 127.6 steps to the largest number, as C's cast does: 128 becomes -128."""
    for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
        weight, scale = reference()[name].float(), f"{name.removesuffix('.weight')}.weight_scale"
        tensors[scale] = weight.abs().amax(1, keepdim=True) / 127.6
        codes = (weight / tensors[scale]).round().to(torch.int16)
        tensors[name] = torch.where(codes > 127, codes - 256, codes).to(torch.int8)


def scales_of_columns(layer: str) -> Change:
    """Return the change that gives a square layer of a file of row scales those of its columns, in their place."""

    def change(tensors: Tensors) -> None:
        weight = reference()[f"{layer}.weight"].float()
        scale = weight.abs().amax(0) / 448
        tensors[f"{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{layer}.scale_weight"] = scale.reshape(tensors[f"{layer}.scale_weight"].shape)

    return change


def spoilt_tokenizer(how: Callable[[dict[str, Any]], None], part: str = "tokenizer") -> Make:
    """Return how to serve a whole pipeline whose ``tokenizer.json`` was changed by ``how``."""

    def make(place: Path, folder: Path) -> Path:
        pipeline()(place, folder)
        file = folder / part / "tokenizer.json"
        known = json.loads(file.read_text())
        how(known)
        file.write_text(json.dumps(known))
        return folder

    return make


def shift_vocabulary(tokenizer: dict[str, Any]) -> None:
    """Give every piece but special ones the number of the next."""
    vocabulary, special = tokenizer["model"]["vocab"], {each["content"] for each in tokenizer["added_tokens"]}
    names = [name for name in vocabulary if name not in special]
    numbers = [vocabulary[name] for name in names]
    vocabulary.update(zip(names, numbers[1:] + numbers[:1], strict=True))


def reverse_merges(tokenizer: dict[str, Any]) -> None:
    """Let the rarest pairs be merged first."""
    tokenizer["model"]["merges"].reverse()


def reorder(tokenizer: dict[str, Any]) -> None:
    """Write the vocabulary in another order, which changes nothing."""
    tokenizer["model"]["vocab"] = dict(reversed(tokenizer["model"]["vocab"].items()))


def quantized_by(*flags: str) -> Make:
    """Return how to make a clean deployment with ``tools/quantize_model.py`` and these flags."""

    def make(_place: Path, folder: Path) -> Path:
        call("quantize_model", "--model", MODEL, "--save_to", folder, *flags)
        return folder

    return make


def written(kind: str, pattern: str = "", how: Callable[[Tensor], Tensor] | None = None) -> Make:
    """Return how to write the model in a ``kind`` of ``bench/served_formats.py``: GGUF, nf4, mxfp8.

    Weights of blocks whose names ``pattern`` is found in are changed by ``how`` before.
    """

    def make(_place: Path, folder: Path) -> Path:
        weights = {name: tensor for name, tensor in reference().items() if "blocks" in name and tensor.ndim == 2}
        found = {name: tensor for name, tensor in weights.items() if how and re.search(pattern, name)}
        assert found or not how, f"{pattern}: names no weight"
        return write_format(kind, folder, {name: how(tensor.float()) for name, tensor in found.items()} if how else {})

    return make


def written_with_scales_times(kind: str, factor: float) -> Make:
    """Return how to write the model in a ``kind`` of GGUF or in nf4, all scales in the file multiplied."""

    def make(_place: Path, folder: Path) -> Path:
        file = write_format(kind, folder)
        if kind == "nf4":  # of absmax itself in 8 bits: its own scales, and what is added to it
            edit(file, file, at(r".*\.nested_absmax", partial(times, factor)), partial(_offsets_times, factor))
            return file
        for tensor in GGUFReader(file, "r+").tensors:
            if tensor.tensor_type.name.startswith("Q"):  # a block begins with its scale, and with its minimum in Q4_1
                blocks = tensor.data.reshape(-1, GGML_QUANT_SIZES[tensor.tensor_type][1])
                scales = blocks[:, : 4 if tensor.tensor_type.name == "Q4_1" else 2]
                scales[:] = (scales.copy().view(np.float16) * np.float16(factor)).view(np.uint8)
        return file

    return make


def _offsets_times(factor: float, tensors: Tensors) -> None:
    for name in [name for name in tensors if ".quant_state." in name]:
        state = json.loads(bytes(tensors[name].tolist()))
        state["nested_offset"] *= factor
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def compensated(precision: str) -> Make:
    """Return how to merge the LoRA with rounding that looks at the dataset's activations."""

    def make(place: Path, folder: Path) -> Path:
        data = ("--dataset_config", str(place / "dataset.toml"), "--cache_directory", str(place / "cache"))
        how = ("--save_precision", precision, "--rounding", "compensated", "--calibration_images", "2")
        return Path(merged(*how, *data)(place, folder))

    return make


def with_part(part: str, other: str, clean: str = "cast") -> Make:
    """Return how to serve a clean deployment as a whole pipeline, with a part that is another model's."""

    def make(place: Path, folder: Path) -> Path:
        pipeline(clean=clean)(place, folder)
        shutil.copytree(place / other, folder / part, dirs_exist_ok=True)
        return folder

    return make


def named(recipe: str) -> Make:
    """Return the deployment of a clean file by its folder's name, or of a recipe."""
    return lambda place, _folder: place / recipe if (place / recipe).exists() else recipe


def trained(name: str, says: Mapping[str, str] | None, dataset: str = "", clean: str = "cast") -> Make:
    """Return the deployment of a clean file, and how to write ``name``.safetensors and ``name``.toml beside it.

    The LoRA's file ``says`` other things of its training (None: nothing at all); the dataset has the lines ``dataset``.
    """

    def make(place: Path, _folder: Path) -> Path:
        with safe_open(place / "lora.safetensors", framework="pt") as opened:
            metadata = {} if says is None else opened.metadata() | says
        new = _folder.parent / "new"
        save_file(load_file(place / "lora.safetensors"), new, {"format": "pt"} | metadata)
        new.replace(place / f"{name}.safetensors")
        (place / f"{name}.toml").write_text((place / "dataset.toml").read_text() + dataset)
        return place / clean

    return make


def prepare(place: Path, steps: int = 60) -> None:
    """Make in ``place`` a LoRA with text encoder layers and one without, the clean files and the dataset.

    Args:
        place: a folder, made if it is not there.
        steps: that the LoRA is trained for; with 0 it is random, which is as good where pictures do not matter.
    """
    shutil.copytree(IMAGES, place / "images", dirs_exist_ok=True)  # their masks follow from the path as the TOML has it
    (place / "dataset.toml").write_text(
        '[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = 128\nbatch_size = 1\n'
        '[[datasets.subsets]]\nimage_dir = "images"\ninpaint_mask_variants = 4\n'
    )
    if steps:
        training = ["--config_file", "configs/demo_fp8.toml", "--text_encoder_lr", "2e-3", "--max_train_steps", steps]
        folders = ["--output_dir", place / "run", "--cache_directory", place / "run"]
        run("train_lora.py", *training, *folders, "--output_name", "text")
        shutil.copyfile(place / "run" / "text.safetensors", place / "text.safetensors")
    else:
        save_file(_random_lora(), place / "text.safetensors", {"format": "pt"})

    def of_transformer(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("text_encoder.")]:
            del tensors[name]

    edit(place / "text.safetensors", place / "lora.safetensors", of_transformer)
    for name, flags in CLEAN.items():
        call("quantize_model", "--model", MODEL, "--save_to", place / name, *flags)
    for name, part in OTHERS.items():
        shutil.copytree(MODEL / part, place / name)
        file = next((place / name).glob("*.safetensors"))
        edit(file, file, at(r".*\.weight", partial(noisy, 0.1)))
    write_masked(place / "masked")
    for name, bits in DEQUANTIZED.items():
        shutil.copytree(MODEL / "transformer", place / name)
        changes = [at(r".*blocks.*\.weight", partial(to_integers, bits))] if bits else []
        edit(MODEL / "transformer" / WEIGHTS, place / name / WEIGHTS, *changes)


@dataclass(frozen=True)
class Server:
    """What diffusers' own Fill pipeline is given and does otherwise when it paints as a server.

    Attributes:
        grown: pixels that the mask is grown by. guidance, seed, tokens: of the run. lora: strength, 0 for none.
        encoded: done to the picture [1, 3, H, W] and the mask before the VAE encodes it.
        pasted: the known pixels are put back in the end. normalised: how many times the given latents are.
        prompt: instead of the caption. resized: sides of the picture, before it is brought to the model's size.
        shift: of a static schedule. quality: of a JPEG that the picture went through.
    """

    grown: int = 0
    guidance: float = 1.0
    seed: int = 5
    tokens: int = 64
    lora: float = 1.0
    encoded: Callable[[Tensor, Tensor], Tensor] = lambda pixels, mask: pixels
    pasted: bool = False
    normalised: int = 1
    prompt: str = ""
    resized: int = 128
    shift: float | None = None
    quality: int = 100


SERVER_STEPS, SERVER_IMAGES = 6, 2
MASK = (33, 29, 90, 85)  # left, top, right, bottom, the last pixels included; no multiples of a latent cell


def paint(server: Server, place: Path, folder: Path) -> list[Path]:
    """Paint the dataset ``place``/masked as ``server`` does, with diffusers alone; return the pictures."""
    from diffusers import FluxFillPipeline

    with contextlib.redirect_stderr(io.StringIO()):  # bars and advice that are not about this
        pipeline = FluxFillPipeline.from_pretrained(MODEL, torch_dtype=torch.float32).to(torch.float32)
        if server.lora:
            pipeline.load_lora_weights(place / "lora.safetensors", adapter_name="lora")
            pipeline.set_adapters(["lora"], [server.lora])
    pipeline.set_progress_bar_config(disable=True)
    if server.shift is not None:
        changed = {"use_dynamic_shifting": False, "shift": server.shift}
        pipeline.scheduler = type(pipeline.scheduler).from_config({**pipeline.scheduler.config, **changed})
    left, top, right, bottom = MASK
    mask = Image.new("L", (128, 128))
    box = (left - server.grown, top - server.grown, right + server.grown, bottom + server.grown)
    ImageDraw.Draw(mask).rectangle(box, fill=255)
    filled = torch.from_numpy(np.asarray(mask).copy())[None, None] > 0
    encode = pipeline.vae.encode

    def as_server(pixels: Tensor) -> Any:
        encoded = encode(server.encoded(pixels, filled))
        mean = encoded.latent_dist.mode()
        for _ in range(1, server.normalised):
            mean = (mean - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
        if not server.normalised:
            mean = mean / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor
        encoded.latent_dist.sample = lambda generator=None: mean  # the mean, as in training
        return encoded

    pipeline.vae.encode = as_server
    folder.mkdir()
    paths = []
    for source in sorted((place / "masked" / "images").glob("*.png")):
        picture = Image.open(source).resize((server.resized, server.resized)).resize((128, 128))
        caption = server.prompt or source.with_suffix(".txt").read_text().strip()
        painted = pipeline(
            caption, image=picture, mask_image=mask, height=128, width=128,
            guidance_scale=server.guidance, num_inference_steps=SERVER_STEPS,
            generator=torch.Generator().manual_seed(server.seed), max_sequence_length=server.tokens,
        ).images[0]  # fmt: skip
        if server.pasted:
            painted.paste(picture, mask=ImageOps.invert(mask))
        if server.quality < 100:
            painted.save(folder / "painted.jpg", quality=server.quality)
            painted = Image.open(folder / "painted.jpg")
        paths.append(folder / source.name)
        painted.save(paths[-1])
    return paths


def write_masked(folder: Path) -> None:
    """Write a dataset of a few images with one mask, which a server can be given."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for source in sorted(IMAGES.glob("*.png"))[:SERVER_IMAGES]:
        Image.open(source).convert("RGB").resize((128, 128)).save(folder / "images" / source.name)
        shutil.copyfile(source.with_suffix(".txt"), folder / "images" / f"{source.stem}.txt")
        mask = Image.new("L", (128, 128))
        ImageDraw.Draw(mask).rectangle(MASK, fill=255)
        mask.save(folder / "masks" / source.name)
    (folder / "dataset.toml").write_text(
        '[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = 128\nbatch_size = 1\n'
        f'[[datasets.subsets]]\nimage_dir = "{folder}/images"\ninpaint_mask_directory = "{folder}/masks"\n'
    )


def _random_lora(rank: int = 8, size: float = 0.1) -> Tensors:
    """Return a LoRA in diffusers' layout for all blocks and CLIP, each update ``size`` of its weight's norm."""
    random = torch.Generator().manual_seed(2)
    tensors: Tensors = {}
    clip = load_file(next((MODEL / "text_encoder").glob("*.safetensors")))
    weights = {f"transformer.{name}": tensor for name, tensor in reference().items() if "blocks." in name}
    weights |= {f"text_encoder.{name}": tensor for name, tensor in clip.items() if "layers." in name}
    for name, weight in weights.items():
        if weight.ndim == 2:
            down = torch.randn(rank, weight.shape[1], generator=random)
            up = torch.randn(weight.shape[0], rank, generator=random)
            up *= size * weight.float().norm() / (up @ down).norm()
            layer = name.removesuffix(".weight")
            tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    return tensors
