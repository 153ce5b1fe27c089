"""Does the precision report name what is wrong? Faults planted one at a time, and clean deployments beside them.

    python -m tests.fidelity.report_faults --json faults.json                 # all of it, two reports at a time
    python -m tests.fidelity.report_faults --only 'scale' 'LoRA' --verbose    # some, with all the verdict says

Every fault is planted in an otherwise honest deployment of the built-in fill model with a LoRA of 60 steps: some in a
file, some declared by flags. The tool runs on it as a user runs it, and its words are judged by an expectation that
stands beside the plant, not by anything the report computes:

- *wholly*: the verdict's first cause is the fault's (a word of it), with its place (layers, how many, the factor) and
  a remedy that mends it. A declared cause that the report measures at under a twentieth of the squared error may stand
  in a later line, for the first one is then rightly another;
- *partly*: the cause without the place or the remedy, or the place under another cause;
- *not*: another cause is blamed, or one that has no words for it;
- *normal*: rounding as the format makes it, nothing else. This must never be;
- *refused*: the tool does not measure; that is as good as *wholly* if its one line names tensor or file.

Clean deployments must be called normal.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.measure import Table, benchmark_parser, finish
from bench.tiny_runs import MODEL, ROOT
from tests.fidelity.planted_faults import (
    CLEAN,
    DEQUANTIZED,
    OTHERS,
    SERVER_STEPS,
    Make,
    Server,
    anew,
    at,
    by_rows,
    changed,
    clip,
    compensated,
    exchanged,
    flush,
    given,
    in_another_order,
    in_e5m2,
    merged,
    merged_with,
    named,
    nibbles,
    noisy,
    other,
    paint,
    permute,
    pipeline,
    prepare,
    quantized,
    quantized_by,
    reorder,
    reverse_merges,
    roll,
    scales_of_columns,
    shift_vocabulary,
    spoilt_tokenizer,
    stored_in_fp8,
    times,
    trained,
    transpose,
    truncate,
    unrotated,
    update_times,
    update_transposed,
    with_part,
    wrapping,
    written,
    written_with_scales_times,
)

RUN = ("--images", "3", "--steps", "4", "--sigmas", "0.6")
LIMIT = 90.0  # seconds that a whole report may take
NORMAL = ("weights", "merge")  # causes that are the format's own cost
ADVICE = "modulation_in_fp8"  # a choice that our own tools make: no defect
SMALL = 0.05  # share of the squared error under which a declared cause need not be the first
FF, OUT = "transformer_blocks.0.ff.net.0.proj", "single_transformer_blocks.2.proj_out"
QUERY, DOWN = "single_transformer_blocks.1.attn.to_q", "transformer_blocks.1.ff.net.2"
IN_FF, IN_OUT, IN_QUERY, IN_DOWN = (re.escape(name) for name in (FF, OUT, QUERY, DOWN))  # as patterns


# -------------------------------------------------------------------------------------------------------- the faults


@dataclass(frozen=True)
class Fault:
    """One fault, and the words that name it.

    Attributes:
        name: for people. make: of the deployment. flags: of the report that belong to it; ``{place}`` is filled in.
        cause: found in the title or evidence of the verdict's cause.
        where: each found in its evidence or layers; the place comes first.
        remedy: found in its remedy.
        lora: the LoRA that is trained and given to the report. strength: it is given at.
        section: "listed" in the issue, "further", "later", or "clean", where all of the words are empty.
        server: paints pictures that the report is given.
    """

    name: str
    make: Make
    cause: str = ""
    where: tuple[str, ...] = ()
    remedy: str = ""
    flags: tuple[str, ...] = ()
    lora: str = "lora"
    strength: float = 1.0
    section: str = "listed"
    server: Server | None = None
    also: tuple[str, tuple[str, ...], str] | None = None  # cause, where and remedy of a second fault, in any finding


_ROW = ("--save_precision", "fp8_row", "--rounding", "nearest")
_REMAKE = r"quantize_model|download|again"
_ALL = r"every layer|all (of )?(the |its )?\d* ?(layers|weights|tensors)|\b5[0-9] (of \d+ )?(layers|tensors|weights)"
_OTHER = r"another (model|fine-tune|base)|not this model|fine-tune"
_LOST, _MISSING, _TWICE = "rounded away|lost", "missing|lacks|without|not (in|merged)", "twice|already|in the file"
_CLIPPED, _ORDER = "clip|outlier|largest|saturat", "order|permut|roll|shift|exchang|swap"
_MIXED = "e5m2|mixed|several formats"
_SINGLE = "single_transformer_blocks"
_MERGED = ("--deploy_merged",)
_TUNED = partial(other, 0.1, 1000)
_EMBEDDERS = r"(x_embedder|context_embedder|time_text_embed.*)\.weight"


IN_FILES = (
    Fault("scale of one layer times 2", changed("tensor", at(f"{IN_FF}.scale_weight", partial(times, 2))),
          "scale", (IN_FF, r"\b2(\.0+)?\b"), _REMAKE),
    Fault("scales of all layers times 1.1", changed("tensor", at(r".*\.scale_weight", partial(times, 1.1))),
          "scale", (_ALL, r"\b1\.10?\b"), _REMAKE),
    Fault("scales of one layer's rows halved", changed("row", at(f"{IN_OUT}.scale_weight", partial(times, 0.5))),
          "scale", (IN_OUT, r"\b0\.50?\b"), _REMAKE),
    Fault("row scales rolled by one", changed("row", at(f"{IN_OUT}.scale_weight", partial(roll, 1))),
          "scale", (IN_OUT, _ORDER), _REMAKE),
    Fault("row scales in another order", changed("row", at(f"{IN_OUT}.scale_weight", permute)),
          "scale", (IN_OUT, _ORDER), _REMAKE),
    Fault("block scales transposed", changed("block", at(f"{IN_DOWN}.scale_weight", transpose)),
          "scale", (IN_DOWN, f"transpos|{_ORDER}"), _REMAKE),
    Fault("weight transposed (square)", changed("cast", at(f"{IN_QUERY}.weight", transpose)),
          "transpos", (IN_QUERY,), _REMAKE),
    Fault("weight transposed (not square)", changed("tensor", at(f"{IN_FF}.weight", transpose)),
          "transpos", (IN_FF,), _REMAKE),
    Fault("rows permuted", changed("cast", at(f"{IN_FF}.weight", permute)), _ORDER, (IN_FF, "row"), _REMAKE),
    Fault("rows rolled by one", changed("row", at(f"{IN_OUT}.weight", partial(roll, 1))),
          _ORDER, (IN_OUT, "row"), _REMAKE),
    Fault("columns rolled by 16", changed("cast", at(f"{IN_DOWN}.weight", lambda x: x.roll(16, 1))),
          _ORDER, (IN_DOWN, "column|input"), _REMAKE),
    Fault("truncated instead of rounded (cast)", changed("cast", anew("", truncate)),
          "truncat|towards? zero", (_ALL,), _REMAKE),
    Fault("truncated instead of rounded (row)", changed("row", anew("", truncate)),
          "truncat|towards? zero", (_ALL,), _REMAKE),
    Fault("subnormals flushed", changed("cast", anew("", flush)), "subnormal|flush|became zero", (_ALL,), _REMAKE),
    Fault("outliers clipped, all layers", changed("cast", anew("", partial(clip, 2.5))), _CLIPPED, (_ALL,), _REMAKE),
    Fault("outliers clipped, one layer", changed("tensor", anew(IN_OUT, partial(clip, 2.0))),
          _CLIPPED, (IN_OUT,), _REMAKE),
    Fault("a quarter in e5m2 (cast)", changed("cast", in_e5m2(4)), _MIXED, (r"\b13\b", "e5m2"), _REMAKE),
    Fault("a quarter in e5m2 (scaled)", changed("tensor", in_e5m2(4)), _MIXED, (r"\b13\b", "e5m2"), _REMAKE),
    Fault("image embedder in fp8", changed("cast", stored_in_fp8(r"x_embedder\.weight")),
          "embedder|bear", ("x_embedder",), "bf16|exclude"),
    Fault("all embedders in fp8", changed("cast", stored_in_fp8(_EMBEDDERS)),
          "embedder|bear", ("x_embedder",), "bf16|exclude"),
    Fault("norms in fp8", changed("row", stored_in_fp8(r".*norm_(q|k|added_q|added_k)\.weight")),
          "norm", (r"norm_(q|k|added_q|added_k)",), "bf16|high precision|again"),
    Fault("biases in fp8", changed("row", stored_in_fp8(r".*\.bias")),
          "bias", (r"bias", r"\d+"), "bf16|high precision|again"),
    Fault("modulation in fp8, the rest not",
          changed("copy", stored_in_fp8(r".*blocks.*norm1?(_context)?\.linear\.weight")),
          "modulation|bear|norm", (r"norm1?(_context)?\.linear",), "bf16|exclude"),
    Fault("a bias zeroed", changed("cast", at(rf"{IN_FF}\.bias", torch.zeros_like)), "bias", (IN_FF, "zero"), _REMAKE),
    Fault("modulation biases zeroed", changed("row", at(r"transformer_blocks.*norm1\.linear\.bias", torch.zeros_like)),
          "bias", (r"norm1\.linear", "zero"), _REMAKE),
    Fault("another fine-tune in one block", changed("row", anew(r"^transformer_blocks\.1\.", _TUNED)),
          _OTHER, (r"transformer_blocks\.1",), "reference|train"),
    Fault("another fine-tune in all blocks", changed("row", anew("", _TUNED)),
          _OTHER, (_ALL,), "reference|train"),
    Fault("LoRA merged at 0.5", merged(*_ROW, "--accept_loss", strength=0.5),
          "strength", (r"0\.50?\b",), "strength", _MERGED),
    Fault("LoRA merged at 1.5", merged(*_ROW, strength=1.5), "strength", (r"1\.50?\b",), "strength", _MERGED),
    Fault("LoRA merged with the other sign", merged(*_ROW, strength=-1.0),
          "strength|sign", (r"-1(\.0+)?\b",), "strength|sign|again", _MERGED),
    Fault("LoRA rounded away in a merged file",
          merged("--rounding", "nearest", "--accept_loss", strength=0.3, clean="cast"),
          _LOST, (r"all 52 weights",), "beside|compensated", _MERGED, strength=0.3),
    Fault("merged without one layer", merged(*_ROW, without=IN_FF), _MISSING, (IN_FF,), "merge", _MERGED),
    Fault("merged without the single blocks", merged(*_ROW, without=_SINGLE),
          _MISSING, (f"{_SINGLE}|single blocks",), "merge", _MERGED),
    Fault("merged without the text encoder", merged("--save_precision", "bf16", lora="text", without="^text_encoder"),
          _MISSING, ("text.encoder",), "merge|LoRA", _MERGED, lora="text"),
    Fault("LoRA in the file and beside it", merged(*_ROW),
          _TWICE, (r"\b(64|52)\b|every layer|all",), "beside|merged|once|remove"),
    Fault("LoRA in the file at 0.5, and beside it", merged(*_ROW, "--accept_loss", strength=0.5),
          _TWICE, (r"0\.50?\b",), "beside|merged|once|remove"),
    Fault("LoRA merged twice", merged(*_ROW, twice=True), "strength|twice", (r"\b2(\.0+)?\b|twice",), "strength|once",
          _MERGED),
    Fault("another sampler shift in the folder",
          pipeline("scheduler", {"use_dynamic_shifting": False, "shift": 1.0}),
          "shift", (r"\b1(\.0+)?\b",), "shift|schedul"),
    Fault("another T5 in the folder", with_part("text_encoder_2", "other_t5"),
          "text", ("t5|text_encoder_2",), "t5|text"),
    Fault("another CLIP in the folder", with_part("text_encoder", "other_clip"),
          "text", ("clip|text_encoder",), "clip|text"),
    Fault("another VAE in the folder", with_part("vae", "other_vae"), "vae", (), "vae"),
)  # fmt: skip

# name, cause, where, remedy, flags; all of them with a plain cast and the LoRA beside it
_FLAGS = (
    ("LoRA at strength 0.5", "strength", (r"0\.50?\b",), "strength", "--deploy_strength 0.5"),
    ("LoRA rounded away", _LOST, (r"\d+ of \d+ layers",), "beside|compensated", "--deploy_lora nearest"),
    ("LoRA left out of one layer", _MISSING, (IN_FF,), "load|layer", f"--deploy_lora_without {FF}"),
    ("LoRA left out of the single blocks", _MISSING, (_SINGLE,), "load|layer", f"--deploy_lora_without {_SINGLE}"),
    ("LoRA left out of the text encoder", _MISSING, ("text.encoder",), "load|text",
     "--deploy_lora_without text_encoder"),
    ("guidance ignored", "guidance", ("ignored|not given",), "guidance", "--deploy_guidance ignored"),
    ("guidance 3.5", "guidance", (r"3\.5",), "guidance", "--deploy_guidance 3.5"),
    ("another T5", "text", ("t5",), "text|t5", "--deploy_t5xxl {place}/other_t5"),
    ("another CLIP", "text", ("clip",), "text|clip", "--deploy_clip_l {place}/other_clip"),
    ("text encoders in fp8", "text", ("fp8",), "bf16", "--deploy_text_dtype fp8"),
    ("text encoders in fp8 blocks", "text", ("fp8",), "bf16", "--deploy_text_dtype fp8_block64"),
    ("text encoders in fp16", "text", ("fp16|float16",), "bf16|fp32", "--deploy_text_dtype fp16"),
    ("text encoders in bf16", "text", ("bf16|bfloat16",), "of training", "--deploy_text_dtype bf16"),
    ("another VAE", "vae", (), "vae", "--deploy_vae {place}/other_vae"),
    ("VAE in fp8", "vae", ("fp8",), "bf16", "--deploy_vae_dtype fp8"),
    ("VAE in fp16", "vae", ("fp16|float16",), "bf16|fp32", "--deploy_vae_dtype fp16"),
    ("VAE in bf16", "vae", ("bf16|bfloat16",), "of training", "--deploy_vae_dtype bf16"),
    ("fp8 attention", "attention", (), "attention", "--attention fp8"),
    ("activations rounded, a scale a row", "activations", (), "bf16|train", "--activations row"),
    ("activations rounded, one scale", "activations", (), "bf16|train", "--activations tensor"),
    ("activations rounded, no scale", "activations", (), "bf16|train|dynamic", "--activations unit"),
    ("timesteps in bf16", "timestep", (), "fp32", "--timestep bf16"),
    ("another sampler shift", "shift", (r"\b1(\.0+)?\b",), "shift|schedul", "--deploy_shift 1"),
    ("known pixels pasted", "past", ("pixels",), "paste|blend|pixels", "--paste pixels"),
    ("known latents composited", "past|composit|latents", ("latents",), "noise.?mask|blend|composit",
     "--paste latents"),
    ("mask grown by 8 pixels", "mask", ("grow", r"\b8\b"), "mask", "--mask_grow 8"),
    ("mask shrunk by 8 pixels", "mask", ("shr[iu]nk|grown by -8", r"\b8\b"), "mask", "--mask_grow -8"),
    ("mask the wrong way round", "mask", ("invert|wrong way|swapped",), "invert", "--mask_invert"),
    ("mask blurred over 6 pixels", "mask", ("blur|soft", r"\b6\b"), "mask", "--mask_blur 6"),
    ("mask snapped to cells", "mask", ("snap",), "mask", "--mask_snap"),
    ("blank black", "blank|region", ("black",), "grey", "--blank black"),
    ("blank white", "blank|region", ("white",), "grey", "--blank white"),
    ("masked latents in fp8", "latents", ("fp8",), "bf16|fp32|high", "--latents_dtype fp8"),
    ("masked latents in bf16", "latents", ("bf16|bfloat16",), "fp32|high", "--latents_dtype bf16"),
)  # fmt: skip
BY_FLAGS = (
    *(Fault(f"{name}, declared", named("cast"), cause, where, remedy, tuple(flags.split()),
            "text" if "text_encoder" in flags else "lora", 0.3 if "nearest" in flags else 1.0)
      for name, cause, where, remedy, flags in _FLAGS),
    Fault("activations rounded, static scales", changed("tensor", given("{}.scale_input", torch.tensor(0.1))),
          "activations", (), "bf16|train|calibrate", ("--activations", "static")),
)  # fmt: skip


def _halved(x: Tensor) -> Tensor:
    return torch.cat([x[: len(x) // 2], torch.zeros_like(x[len(x) // 2 :])])


def _spoilt(codes: Tensor) -> Tensor:
    return torch.where((codes & 0x78) == 0x78, codes, codes ^ 3)  # with the largest exponent a mantissa may spell NaN


def _without(layer: str, tensors: dict[str, Tensor]) -> None:
    for leaf in ("weight", "bias"):
        del tensors[f"{layer}.{leaf}"]


def _black(pixels: Tensor, filled: Tensor) -> Tensor:
    return torch.where(filled, -1.0, pixels)


def _white(pixels: Tensor, filled: Tensor) -> Tensor:
    return torch.where(filled, 1.0, pixels)


def _darker(pixels: Tensor, filled: Tensor) -> Tensor:
    return pixels * 0.7 - 0.3


def _light_grey(pixels: Tensor, filled: Tensor) -> Tensor:
    return torch.where(filled, 0.2, pixels)


_UNEXPLAINED = ("nothing that was tried explains",)
_SERVERS = (  # name, server, what its evidence must hold, its remedy
    ("mask grown by 8", Server(grown=8), ("mask grown by 8",), "mask as it was drawn"),
    ("region blanked black", Server(encoded=_black), ("blanked with black",), "blank"),
    ("LoRA at half its strength", Server(lora=0.5), (r"LoRA at 0\.5",), "strength"),
    ("guidance 3.5", Server(guidance=3.5), (r"guidance 3\.5",), "guidance"),
    ("no LoRA", Server(lora=0.0), ("no LoRA",), "strength"),
    ("pixels pasted", Server(pasted=True), ("pixels pasted",), "blend"),
    ("another seed", Server(seed=77), _UNEXPLAINED, "check seed, number of steps, sampler"),
)
_LATER_SERVERS = (
    ("black, mask grown by 4", Server(encoded=_black, grown=4), ("blanked with black", "mask grown by 4"), "blank"),
    ("white, LoRA at 0.7", Server(encoded=_white, lora=0.7), ("blanked with white", r"LoRA at 0\.7"), "blank"),
    ("mask grown by 5, LoRA at 0.8", Server(grown=5, lora=0.8), ("mask grown by 5", r"LoRA at 0\.8"), "mask as it was"),
    ("a lighter grey", Server(encoded=_light_grey), ("blanked with grey of 153",), "blank"),
    ("mask shrunk by 2", Server(grown=-2), ("mask shrunk by 2",), "mask as it was drawn"),
    ("mask grown by 13", Server(grown=13), ("mask grown by 13",), "mask as it was drawn"),
    ("guidance 12", Server(guidance=12.0), ("guidance 12",), "guidance"),
    ("static shift 2", Server(shift=2.0), (r"static shift 2\b(?!\.)",), "schedul"),
    ("latents normalised twice", Server(normalised=2), ("normalised twice",), "once"),
    ("seed counted up", Server(seed=6), (r"seed \+1",), "server_seed"),
    ("another prompt", Server(prompt="a red car on the beach"), _UNEXPLAINED, "prompt"),
    ("a darker picture", Server(encoded=_darker), _UNEXPLAINED, "picture"),
    ("through a small size", Server(resized=64), _UNEXPLAINED, "resized"),
)
BY_SERVERS = (
    *(Fault(f"painted by diffusers: {name}", named("copy"), "of 255 steps", words, remedy, server=server,
            section="listed" if number < len(_SERVERS) else "later")
      for number, (name, server, words, remedy) in enumerate((*_SERVERS, *_LATER_SERVERS))),
    Fault("painted by diffusers, no fault", named("copy"), section="clean", server=Server()),
    Fault("painted by diffusers, a JPEG of 95 saved as PNG", named("copy"), section="clean", server=Server(quality=95)),
)  # fmt: skip

_BLACK, _TOKENS = {"tandem.inpaint_blank": "black"}, {"tandem.t5xxl_max_token_length": "48"}


def _trained(name: str, says: dict[str, str] | None, cause: str = "", where: tuple[str, ...] = (), remedy: str = "",
             flags: tuple[str, ...] = (), dataset: str = "", clean: str = "cast",
             **more: Any) -> Fault:  # fmt: skip
    file = re.sub(r"\W", "_", name)
    words = ("--dataset_config", f"{{place}}/{file}.toml", *flags)
    return Fault(name, trained(file, says, dataset, clean), cause, where, remedy, words, file, **more)


_REGION, _IN_TRAINING = "blank|region", 'inpaint_blank = "grey"'
BY_TRAINING = (  # what the LoRA or the dataset says of training; a server gives something else by itself
    _trained("trained on black, says the LoRA", _BLACK, _REGION, ("grey", "black"), _IN_TRAINING),
    _trained("trained on white, ComfyUI", {"tandem.inpaint_blank": "white"}, _REGION, ("grey", "white"), _IN_TRAINING,
             ("--server", "comfyui"), clean="row"),
    _trained("trained on noise, in bf16", {"tandem.inpaint_blank": "noise"}, _REGION, ("grey", "noise"),
             _IN_TRAINING, clean="copy"),
    _trained("trained on black, says the dataset", None, _REGION, ("grey", "black"), _IN_TRAINING,
             dataset='inpaint_blank = "black"\n'),
    _trained("trained on black, served on white", _BLACK, _REGION, ("white", "black"), _IN_TRAINING,
             ("--blank", "white")),
    _trained("trained with 48 tokens", _TOKENS, "t5_tokens", ("64", "48"), "token", clean="copy"),
    _trained("trained at guidance 5", {"tandem.guidance_scale": "5"}, "guidance", ("30", "5"), "guidance",
             ("--guidance_scale", "5")),
    _trained("trained on black, a picture of grey and a mask grown by 4", _BLACK, _REGION,
             ("blanked with grey instead of black", "explain 100%"), _IN_TRAINING, clean="copy", server=Server(grown=4),
             also=("the mask is grown", ("mask grown by 4 px",), "mask as it was drawn")),
)  # fmt: skip
FOR_TRAINING = (
    _trained("trained on black, served so", _BLACK, flags=("--blank", "black"), clean="copy"),
    _trained("trained on black, served so in fp8", _BLACK, flags=("--blank", "black")),
    _trained("trained on grey, the dataset is another", {}, dataset='inpaint_blank = "white"\n'),
    _trained("says nothing of its training", None),
    _trained("OneTrainer's", {"ot_revision": "23df3832"}, flags=("--blank", "grey"), clean="row"),
)

_INT8 = ("--save_precision", "int8_convrot", "--rounding", "nearest")
_SIGN, _MOVED = "sign", "of another layer|in another order|exchanged"
_HALVES = at(f"{IN_FF}.scale_weight", partial(times, 0.5))
BY_NAME = (
    Fault("scales of all layers times 0.97", changed("tensor", at(r".*\.scale_weight", partial(times, 0.97))),
          "scale", (_ALL, r"\b0\.97\b"), _REMAKE),
    Fault("scales of all int8 layers times 0.97", quantized("int8_row", at(r".*\.weight_scale", partial(times, 0.97))),
          "scale", (_ALL, r"\b0\.97\b"), _REMAKE),
    Fault("scale of one layer times 0.97", changed("tensor", at(f"{IN_FF}.scale_weight", partial(times, 0.97))),
          "scale", (IN_FF, r"\b0\.97\b"), _REMAKE),
    Fault("merged with attention at half", merged_with(update_times("attn", lambda _: 0.5), *_ROW),
          "strength", ("attention", r"\b0\.(5\d?|49)\b"), "strength", _MERGED),
    Fault("merged with attention at half (int8)", merged_with(update_times("attn", lambda _: 0.5), *_INT8),
          "strength", ("attention", r"\b0\.(5\d?|49)\b"), "strength", _MERGED),
    Fault("merged with alpha forgotten", merged_with(update_times("", lambda _: 4.0), *_ROW),
          "strength", (r"\b(4\.0|3\.9)\d*",), "strength", _MERGED),
    Fault("merged with a sign a layer", merged_with(update_times("", lambda name: (-1) ** len(name)), *_ROW),
          _SIGN, (r"-(1\.0|0\.9)", r"\d+ of 52"), "strength|again", _MERGED),
    Fault("q and k exchanged in the LoRA", merged_with(exchanged("transformer." + QUERY, "transformer."
          + QUERY.replace("to_q", "to_k")), *_ROW), _MOVED, (IN_QUERY, "to_k"), "again", _MERGED),
    Fault("the LoRA's updates in another order", merged_with(in_another_order, *_INT8),
          _MOVED, (_ALL,), "again", _MERGED),
    Fault("the LoRA's updates transposed", merged_with(update_transposed, *_ROW),
          "transposed", (r"attn\.to_q",), "again", _MERGED),
    Fault("scales of columns at the rows", changed("row", scales_of_columns(QUERY)),
          "axis|column", (IN_QUERY,), _REMAKE),
    Fault("one layer not rotated", quantized("int8_convrot", unrotated(OUT)), "rotat", (IN_OUT,), _REMAKE),
    Fault("no layer rotated", quantized("int8_convrot", unrotated("")), "rotat", (_ALL,), _REMAKE),
    Fault("int8 that wraps", quantized("int8_row", wrapping), "wrap|overflow", (_ALL,), _REMAKE),
    Fault("nvfp4 tiles that lie by rows", quantized("nvfp4", at(f"{IN_OUT}.weight_scale", by_rows)),
          "tile|scale that is not positive", (IN_OUT,), _REMAKE),  # those of filled-up rows
    Fault("nvfp4 nibbles exchanged", quantized("nvfp4", at(f"{IN_DOWN}.weight", nibbles)),
          "nibble|byte", (IN_DOWN,), _REMAKE),
    Fault("a scale halved and rows permuted", changed("row", _HALVES, at(f"{IN_OUT}.weight", permute)),
          "scale", (IN_FF, r"\b0\.50?\b"), _REMAKE, also=(_ORDER, (IN_OUT, "row"), _REMAKE)),
    Fault("attention at half and the rest's sign",
          merged_with(update_times("", lambda name: 0.5 if ".attn." in name else -1.0), *_ROW),
          "strength", ("attention", r"\b0\.5"), "strength", _MERGED, also=(_SIGN, (r"-(1\.0|0\.9)",), "again")),
)  # fmt: skip

# the file under judgement has no honest layer left: the format's own grid is what tells
_KINDS = ("Q8_0", "Q4_0", "Q4_K", "nf4")
IN_ALL_LAYERS = (
    *(Fault(f"{kind}: another LoRA in attention", written(kind, "attn", partial(other, 0.2, 8)),
            f"{_OTHER}|LoRA", ("all 28 weights of attention",), "reference|base|train") for kind in _KINDS),
    *(Fault(f"{kind}: another fine-tune", written(kind, "", partial(other, 0.1, 1000)),
            _OTHER, (_ALL,), "reference|train") for kind in _KINDS),
    *(Fault(f"{kind}: a fine-tune of half that size", written(kind, "", partial(other, 0.05, 1000)),
            _OTHER, (_ALL,), "reference|train") for kind in _KINDS),
    *(Fault(f"{kind}: all weights times 1.03", written(kind, "", partial(times, 1.03)),
            "scale", (_ALL, r"\b1\.03\b"), _REMAKE) for kind in _KINDS),
    *(Fault(f"{kind}: all scales times 0.97", written_with_scales_times(kind, 0.97),
            "scale", (_ALL, r"\b0\.97\b"), _REMAKE) for kind in _KINDS),
)  # fmt: skip

_ANY = f"damaged|differ|{_ORDER}"
_FURTHER = (
    Fault("q and k of a block exchanged", changed("cast", exchanged(QUERY, QUERY.replace("to_q", "to_k"))),
          _ANY, (IN_QUERY, "to_k"), _REMAKE),
    Fault("two blocks exchanged", changed("row", exchanged(f"{_SINGLE}.1.", f"{_SINGLE}.2.")),
          _ANY, (rf"{_SINGLE}\.1", rf"{_SINGLE}\.2"), _REMAKE),
    Fault("halves of the final modulation exchanged",
          changed("cast", at(r"norm_out\.linear\.(weight|bias)", partial(roll, 160))),
          _ANY, (r"norm_out\.linear",), _REMAKE),
    Fault("half the rows zeroed", changed("row", at(f"{IN_FF}.weight", _halved)), "zero|damaged", (IN_FF,), _REMAKE),
    Fault("all norm_q and norm_k times 1.1", changed("cast", at(r".*norm_[qk]\.weight", partial(times, 1.1))),
          "norm|factor|scale", (r"norm_[qk]", r"1\.10?\b"), _REMAKE),
    Fault("noise of 8 % on one layer", changed("row", anew(IN_OUT, partial(noisy, 0.08))), _ANY, (IN_OUT,), _REMAKE),
    Fault("sign of a layer flipped", changed("cast", at(f"{IN_QUERY}.weight", lambda x: x ^ 0x80)),
          "sign|factor|scale|damaged", (IN_QUERY, r"-1\b|sign"), _REMAKE),
    Fault("another LoRA merged in as well", changed("row", anew("attn", partial(other, 0.05, 8))),
          f"{_OTHER}|LoRA", (r"attn|\d+ layers|\d+ of \d+",), "reference|train"),
    Fault("input scales too small", changed("tensor", given("{}.scale_input", torch.tensor(1e-4))),
          "scale of the activations|input scale|clip", (r"\d+ layers",), "dynamic|calibrate",
          ("--activations", "static")),
    Fault("bias of another layer",
          changed("cast", exchanged(f"{FF}.bias", f"{FF.replace('ff.', 'ff_context.')}.bias")),
          "bias", (IN_FF, "ff_context"), _REMAKE),
    Fault("mantissa bits of a layer spoilt", changed("row", at(f"{IN_OUT}.weight", _spoilt)),
          _ANY, (IN_OUT,), _REMAKE),
    Fault("a bias of NaN", changed("cast", at(rf"{IN_FF}\.bias", partial(times, float("nan")))),
          "nan|finite", (IN_FF,)),
    Fault("a layer missing", changed("cast", partial(_without, QUERY)), "missing|lacks|no ", (IN_QUERY,)),
    Fault("int8 copy with one layer's rows permuted", changed("int8", at(f"{IN_OUT}.weight", permute)),
          _ORDER, (IN_OUT,), _REMAKE),
    Fault("scale and shift of the VAE changed", pipeline("vae", {"scaling_factor": 1.0, "shift_factor": 0.0}),
          "vae", ("scaling_factor",), "vae|config"),
    Fault("position axes of config.json changed", pipeline("transformer", {"axes_dims_rope": [12, 10, 10]}),
          "config|position", ("axes_dims_rope",), "config|position"),
    Fault("blank white under a merge", named("cast"), "blank|region", ("white",), "grey",
          ("--blank", "white", "--server", "comfyui")),
    Fault("no guidance input in config.json", pipeline("transformer", {"guidance_embeds": False}),
          "config|guidance", ("guidance",), ""),
)  # fmt: skip

_TOKENS = r"16 of 16 captions"
_PARTS = (  # of a whole pipeline, each with the weights that it had
    Fault("CLIP's vocabulary shifted by one", spoilt_tokenizer(shift_vocabulary),
          "tokenizer", (_TOKENS, "vocabulary"), "tokenizer"),
    Fault("CLIP's merges in the other order", spoilt_tokenizer(reverse_merges),
          "tokenizer", (_TOKENS, "merges"), "tokenizer"),
    Fault("CLIP's captions filled up in front", pipeline("tokenizer", {"padding_side": "left"}),
          "tokenizer", (_TOKENS, "padding_side"), "tokenizer"),
    Fault("CLIP's captions cut at 8 tokens", pipeline("tokenizer", {"model_max_length": 8}),
          "tokenizer", (_TOKENS, "model_max_length"), "tokenizer"),
    Fault("T5's captions filled up in front", pipeline("tokenizer_2", {"padding_side": "left"}),
          "tokenizer", (_TOKENS, "tokenizer_2", "padding_side"), "tokenizer"),
    Fault("another activation in CLIP's config", pipeline("text_encoder", {"hidden_act": "relu"}),
          "text", ("hidden_act",), "config"),
    Fault("another eps in T5's config", pipeline("text_encoder_2", {"layer_norm_epsilon": 0.1}),
          "text", ("text_encoder_2", "layer_norm_epsilon"), "config"),
    Fault("a layer less in CLIP's config", pipeline("text_encoder", {"num_hidden_layers": 1}),
          "text_encoder", ("num_hidden_layers",)),
    Fault("noise levels end at 0.3", pipeline("scheduler", {"shift_terminal": 0.3}), "shift", ("0.3",), "schedul"),
    Fault("timesteps of 500", pipeline("scheduler", {"num_train_timesteps": 500}), "shift", ("500",), "schedul"),
    Fault("groups of the VAE's norms", pipeline("vae", {"norm_num_groups": 4}), "vae", ("norm_num_groups",), "config"),
)  # fmt: skip

_SCALES = at(r".*\.scale_weight", lambda x: x.bfloat16())
_MERGES = (  # name, how, strength
    ("row, nearest", merged(*_ROW), 1.0),
    ("row, nearest", merged(*_ROW, strength=0.7), 0.7),
    ("row, stochastic", merged("--save_precision", "fp8_row", "--rounding", "stochastic", "--seed", "4"), 1.0),
    ("block, nearest", merged("--save_precision", "fp8_block64", "--rounding", "nearest", strength=1.3), 1.3),
    ("tensor, stochastic", merged("--save_precision", "fp8_scaled", "--rounding", "stochastic"), 1.0),
    ("cast, stochastic", merged("--save_precision", "fp8", "--rounding", "stochastic", strength=1.4), 1.4),
    ("bf16", merged("--save_precision", "bf16", strength=0.6), 0.6),
    ("bf16, LoRA's text layers too", merged("--save_precision", "bf16", lora="text"), 1.0),
    ("into the row file", merged("--rounding", "stochastic", "--transformer_only", clean="row"), 1.0),
    ("into the plain cast", merged("--rounding", "stochastic", "--transformer_only", clean="cast"), 1.0),
)
_HONEST = (
    *(Fault(name, named(name)) for name in (*CLEAN, *DEQUANTIZED, "block128", "cast:e5m2")),
    Fault("scales in bf16", changed("tensor", _SCALES)),
    Fault("whole pipeline", pipeline()),
    Fault("whole pipeline, a tokenizer saved again", spoilt_tokenizer(reorder)),
    Fault("whole pipeline, a limit that no caption reaches", pipeline("tokenizer", {"model_max_length": 76})),
    Fault("whole pipeline, a static shift that is not used", pipeline("scheduler", {"shift": 1.0})),
    *(
        Fault(
            f"merged: {name} at {strength:g}",
            make,
            flags=_MERGED,
            strength=strength,
            lora="text" if "text" in name else "lora",
        )
        for name, make, strength in _MERGES
    ),
    Fault("stochastic merge, declared", named("row"), flags=("--deploy_lora", "stochastic")),
    *(
        Fault(f"{server} merges into {recipe}", named(recipe), flags=("--server", server), strength=strength)
        for recipe, strength in (("nvfp4", 1.0), ("int8_convrot", 0.5), ("quant", 0.3), ("cast", 0.3))
        for server in ("comfyui", "comfyui-legacy")
    ),
    *(Fault(recipe, named(recipe)) for recipe in ("int8_row", "int8_convrot", "nvfp4")),
    *(Fault(f"a file in {kind}", written(kind)) for kind in ("Q8_0", "Q4_0", "Q4_K", "nf4", "mxfp8")),
    *(
        Fault(f"quantised: {flags}", quantized_by("--scheme", *flags.split()))
        for flags in ("int8_convrot", "nvfp4", "cast --rounding stochastic --seed 5 --layout plain",
                      "block64 --rounding stochastic --seed 6 --layout musubi")
    ),
    Fault("merged: row, compensated", compensated("fp8_row"), flags=_MERGED),
    *(
        Fault(f"{kind}, served by {server}", (written if kind == "Q8_0" else named)(kind), flags=("--server", server))
        for kind, server in (("cast", "comfyui"), ("tensor", "comfyui"), ("tensor", "comfyui-bypass"),
                             ("quant", "comfyui-legacy"), ("int8_convrot", "comfyui-bypass"), ("Q8_0", "gguf"))
    ),
)  # fmt: skip
FAULTS = (
    *IN_FILES,
    *BY_FLAGS,
    *BY_SERVERS,
    *(replace(fault, section="further") for fault in _FURTHER),
    *(replace(fault, section="later") for fault in (*BY_TRAINING, *BY_NAME, *IN_ALL_LAYERS, *_PARTS)),
    *(replace(fault, section="clean", name=f"clean: {fault.name}") for fault in (*_HONEST, *FOR_TRAINING)),
)


# ------------------------------------------------------------------------------------------------- running, judging


@dataclass
class Answer:
    """What the tool said: report.json's ``verdict``, all ``words``, the ``refusal`` if it measured nothing."""

    verdict: dict[str, Any] = field(default_factory=dict)
    words: str = ""
    refusal: str = ""
    seconds: float = 0.0

    @property
    def main(self) -> dict[str, Any]:
        """The finding of the verdict's cause."""
        findings = self.verdict["findings"]
        return next(
            (one for one in findings if one["cause"] == self.verdict["cause"]), {"cause": self.verdict["cause"]}
        )


def words_of(fault: Fault, deploy: object, place: Path, save_to: Path) -> list[str]:
    """Return the tool's command line for a fault whose deployment is ``deploy``."""
    lora = f"{place / fault.lora}.safetensors:{fault.strength}"
    words = ["--model", MODEL, "--model_type", "flux_fill", "--guidance_scale", "1", "--deploy", deploy, "--lora", lora]
    words += ["--dataset_config", place / "dataset.toml", "--cache_directory", place / "cache", "--save_to", save_to]
    words += ["--server", "diffusers"]  # nothing but the fault: the LoRA beside, products in high precision
    return [*map(str, words), *(flag.format(place=place) if "{place}" in flag else flag for flag in fault.flags)]


def ask(fault: Fault, place: Path, folder: Path, size: Sequence[str] = RUN) -> Answer:
    """Plant the fault in ``folder``, run the report on it."""
    from tools.precision_report import main as report

    words = [*words_of(fault, fault.make(place, folder / "deployed"), place, folder / "report"), *size]
    if fault.server:
        pictures = paint(fault.server, place, folder / "painted")
        words += ["--dataset_config", str(place / "masked" / "dataset.toml"), "--images", str(len(pictures))]
        words += ["--server_image", *map(str, pictures), "--server_seed", "5", "--server_steps", str(SERVER_STEPS)]
    printed, errors, began = io.StringIO(), io.StringIO(), time.perf_counter()
    with (
        mock.patch.object(sys, "argv", ["precision_report", *words]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        try:
            report()
        except SystemExit:
            return Answer(refusal=errors.getvalue().strip().splitlines()[-1])
    measured = json.loads((folder / "report" / "report.json").read_text())
    verdict = measured["verdict"]
    return Answer(verdict, "\n".join(verdict["words"]), seconds=time.perf_counter() - began)


def judge(fault: Fault, answer: Answer) -> str:
    """Return wholly, partly, not, normal or refused; for a clean deployment normal or alarm."""
    if answer.refusal:
        named = has(fault.cause, answer.refusal) and all(has(place, answer.refusal) for place in fault.where)
        return "wholly" if fault.section != "clean" and named else "refused"
    main = answer.main
    findings = [one for one in answer.verdict["findings"] if one["cause"] not in NORMAL]
    price = (ADVICE, "activations") if fault.section == "clean" else (ADVICE,)  # none of these declares activations
    defects = [one for one in findings if one["cause"] not in price]
    alarm = bool(defects) or answer.verdict["alarm"]
    if fault.section == "clean":
        return "alarm" if alarm or "Unexplained" in answer.words else "normal"
    if not alarm and main["cause"] in NORMAL:
        return "not" if "Unexplained" in answer.words else "normal"
    aside = [one for one in findings if fault.also or one["share"] < SMALL]
    grades = [grade(fault, one) for one in (main, *aside)]
    if fault.also:
        cause, where, remedy = fault.also
        second = replace(fault, cause=cause, where=where, remedy=remedy)
        grades = ["partly" if all(grade(second, one) != "wholly" for one in findings) else each for each in grades]
    if "wholly" in grades:
        return "wholly"
    return "partly" if any(grade(fault, one) != "not" for one in (main, *findings)) else "not"


def grade(fault: Fault, finding: dict[str, Any]) -> str:
    """Return how far a finding names the fault: wholly, partly, not."""
    said = f"{finding.get('title', '')}: {finding.get('evidence', '')}"
    full = f"{said} {' '.join(finding.get('layers', ()))}"
    cause, where = has(fault.cause, said), [has(place, full) for place in fault.where]
    if cause and all(where) and has(fault.remedy, finding.get("remedy", "")):
        return "wholly"
    placed = any(where[:1]) and re.search("_|[a-z]{4}", fault.where[0])  # a lone number proves little
    return "partly" if cause or placed else "not"


def has(pattern: str, text: str) -> bool:
    """Return whether ``pattern`` is in ``text``."""
    return re.search(pattern, text, re.IGNORECASE) is not None


def examine(fault: Fault, place: Path) -> dict[str, Any]:
    """Plant, ask and judge one fault; return its row."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        try:
            answer = ask(fault, place, Path(folder))
        except (Exception, SystemExit) as error:  # a traceback, or a tool that refused to make the plant
            answer = Answer(refusal=f"{type(error).__name__}: {error}")
            return {"fault": fault.name, "section": fault.section, "judged": "crash", "says": answer.refusal}
    said = answer.refusal or sentence(answer)
    row = {"fault": fault.name, "section": fault.section, "judged": judge(fault, answer), "says": said}
    return row | {"words": answer.words, "seconds": round(answer.seconds, 1)}


def sentence(answer: Answer) -> str:
    """Return the verdict's cause with what speaks for it."""
    return f"{answer.main.get('title', answer.main['cause'])}: {answer.main.get('evidence', '')}"


def rows_of(faults: Sequence[Fault], place: Path, jobs: int) -> Iterator[dict[str, Any]]:
    """Yield the row of each fault, in order."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(_examine_named, [fault.name for fault in faults], [place] * len(faults))


def _examine_named(name: str, place: Path) -> dict[str, Any]:
    return examine(next(fault for fault in FAULTS if fault.name == name), place)


def time_report(place: Path) -> dict[str, float]:
    """Return the time a whole report on a plain cast takes as a command, over the limit."""
    words = words_of(Fault("", named("cast")), place / "cast", place, place / "timed")
    began = time.perf_counter()
    subprocess.run([sys.executable, ROOT / "tools" / "precision_report.py", *words], capture_output=True, check=True)
    return {f"default_report_over_{LIMIT:g}_s": (time.perf_counter() - began) / LIMIT}


def ratios_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the shares that matter."""
    found: dict[str, float] = {}
    for section in ("listed", "further", "later"):
        of = [row["judged"] for row in rows if row["section"] == section]
        if of:
            found[f"{section}_named_wholly"] = of.count("wholly") / len(of)
            found[f"{section}_called_normal"] = of.count("normal") / len(of)
    clean = [row["judged"] for row in rows if row["section"] == "clean"]
    if clean:
        found["false_alarms"] = 1 - clean.count("normal") / len(clean)
    return found


def main() -> None:
    """Prepare, plant, ask, print, write."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="faults whose name or section has one of these in it")
    parser.add_argument("--jobs", type=int, default=2, help="reports at a time, a core each (default: %(default)s)")
    parser.add_argument(
        "--place", type=Path, metavar="DIR", help="keep LoRA, clean files and caches here, or find them"
    )
    parser.add_argument("--verbose", action="store_true", help="print all that each verdict says")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        if not all((place / name).exists() for name in (*CLEAN, *DEQUANTIZED, *OTHERS)):
            prepare(place)
        wanted = options.only or [""]
        faults = [
            fault
            for fault in FAULTS
            if any(text in (fault.name, fault.section) or text in fault.name for text in wanted)
        ]
        table = Table({"section": "<8", "judged": "<8", "seconds": "5", "fault": "<40", "says": "<150.150"})
        for row in rows_of(faults, place, options.jobs):
            table.add(row)
            if options.verbose:
                print(row.get("words", ""))
        found = ratios_of(table.rows) | ({} if options.only else time_report(place))
    finish(table.rows, found, options.json)


if __name__ == "__main__":
    main()
