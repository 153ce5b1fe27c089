"""Tiny random FLUX models for tests: real classes and real file layouts, built in well under a second.

``tiny_flux_transformer()`` gives a module; ``tiny_flux_pipeline(folder)`` writes a whole diffusers pipeline
folder; ``save_single_files(pipeline_folder, folder)`` writes the same weights as BFL and ComfyUI publish
them. The weights are random, so nothing here paints; they are scaled so that outputs depend on every input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from library.config.model_types import MODEL_TYPES
from library.config.schema import ModelConfig

TEXT_WIDTH = 64
FLUX_PIPELINES = {"flux": FluxPipeline, "flux_fill": FluxFillPipeline, "flux_kontext": FluxKontextPipeline}
Module = TypeVar("Module", bound=nn.Module)
T5_LENGTH = 24  # tokens per caption, from the tokenizer's model_max_length


def tiny_flux_transformer(
    guidance: bool = True,
    double_blocks: int = 1,
    single_blocks: int = 2,
    heads: int = 2,
    head_dim: int = 32,
    seed: int = 0,
    fill: bool = False,
) -> FluxTransformer2DModel:
    """Return diffusers' own FLUX transformer, random, fp32; width = heads * head_dim. ``fill``: with Fill's inputs."""
    first = max(8, head_dim // 8)
    transformer = _seeded(
        lambda: FluxTransformer2DModel(
            in_channels=384 if fill else 64,
            out_channels=64,
            num_layers=double_blocks,
            num_single_layers=single_blocks,
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            guidance_embeds=guidance,
            axes_dims_rope=(first, (head_dim - first) // 2, (head_dim - first) // 2),
        ),
        seed,
    )
    _enliven(transformer, seed)
    return transformer


def tiny_flux_inputs(batch: int = 2, side: int = 8, tokens: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Return random ``latents`` [B, 16, side, side], ``sigmas`` [B] and random text embeddings."""
    random = torch.Generator().manual_seed(seed)
    inputs = random_inputs(batch, (16, side, side), (tokens, TEXT_WIDTH), random)
    return inputs | {"pooled_prompt_embeds": torch.randn(batch, TEXT_WIDTH, generator=random)}


def random_inputs(
    batch: int, latents: tuple[int, ...], text: tuple[int, ...], random: torch.Generator | None = None
) -> dict[str, Tensor]:
    """Return random ``latents`` [B, *latents], ``sigmas`` [B] and ``prompt_embeds`` [B, *text]."""
    random = random or torch.Generator().manual_seed(0)
    return {
        "latents": torch.randn(batch, *latents, generator=random),
        "sigmas": torch.rand(batch, generator=random) * 0.9 + 0.05,
        "prompt_embeds": torch.randn(batch, *text, generator=random),
    }


def tiny_vae(seed: int = 0) -> AutoencoderKL:
    """Return a VAE of FLUX's geometry (8 x smaller, 16 channels, attention in the middle), random."""
    channels = (8, 8, 16, 32)  # unequal neighbours, so that shortcuts exist
    return _seeded(
        lambda: AutoencoderKL(
            block_out_channels=channels,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=16,
            norm_num_groups=8,
            layers_per_block=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        ),
        seed,
    )


def tiny_tokenizers() -> tuple[CLIPTokenizer, T5TokenizerFast]:
    """Return tokenizers over single characters, made without a download."""
    characters = [chr(code) for code in range(33, 127)]
    pieces = [*characters, *(f"{character}</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    clip = CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=16)
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((c, -3.0) for c in characters)]
    t5 = T5TokenizerFast(vocab=scores, extra_ids=0, model_max_length=T5_LENGTH)
    return clip, t5


def tiny_text_encoders(clip_vocabulary: int, t5_vocabulary: int, seed: int = 0) -> tuple[CLIPTextModel, T5EncoderModel]:
    """Return random CLIP and T5 encoders, 64 wide, two layers each."""
    clip_config = CLIPTextConfig(
        vocab_size=clip_vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=128,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=16,
        bos_token_id=clip_vocabulary - 2,
        eos_token_id=clip_vocabulary - 1,
        pad_token_id=clip_vocabulary - 1,
    )
    t5_config = T5Config(
        vocab_size=t5_vocabulary,
        d_model=TEXT_WIDTH,
        d_kv=32,
        d_ff=128,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    clip = _seeded(lambda: CLIPTextModel(clip_config), seed)
    return clip.eval(), _seeded(lambda: T5EncoderModel(t5_config), seed + 1).eval()


def tiny_flux_pipeline(
    folder: str | Path,
    guidance: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    model_type: str = "flux",
    **transformer: int,
) -> Path:
    """Write a complete random FLUX pipeline in diffusers' layout to ``folder``; return it.

    ``model_type`` chooses the variant; keyword arguments beyond those named go to :func:`tiny_flux_transformer`.
    """
    clip_tokenizer, t5_tokenizer = tiny_tokenizers()
    clip, t5 = tiny_text_encoders(len(clip_tokenizer), len(t5_tokenizer), seed)
    network = tiny_flux_transformer(guidance, seed=seed, fill=model_type == "flux_fill", **transformer)
    pipeline = FLUX_PIPELINES[model_type](
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance),
        vae=tiny_vae(seed).to(dtype),
        text_encoder=clip.to(dtype),
        tokenizer=clip_tokenizer,
        text_encoder_2=t5.to(dtype),
        tokenizer_2=t5_tokenizer,
        transformer=network.to(dtype),
    )
    pipeline.save_pretrained(folder)
    return Path(folder)


@dataclass(frozen=True)
class SingleFiles:
    """Files as BFL and ComfyUI publish them, and local tokenizer folders."""

    transformer: Path  # BFL's flux1-dev.safetensors
    comfy_transformer: Path  # the same under model.diffusion_model.
    ae: Path
    clip_l: Path
    t5xxl: Path
    clip_l_tokenizer: Path
    t5xxl_tokenizer: Path

    def model_config(self, comfy: bool = False, **changes: object) -> ModelConfig:
        """Return the ``[model]`` section that reads these files."""
        settings: dict[str, object] = {
            "pretrained_model_name_or_path": str(self.comfy_transformer if comfy else self.transformer),
            "ae": str(self.ae),
            "clip_l": str(self.clip_l),
            "t5xxl": str(self.t5xxl),
            "clip_l_tokenizer": str(self.clip_l_tokenizer),
            "t5xxl_tokenizer": str(self.t5xxl_tokenizer),
        }
        return ModelConfig(**(settings | changes))  # type: ignore[arg-type]


def save_single_files(pipeline_folder: Path, folder: Path) -> SingleFiles:
    """Write the weights of a tiny pipeline folder in the layouts of BFL and ComfyUI."""
    folder.mkdir(parents=True, exist_ok=True)
    transformer = bfl_state_dict(load_file(pipeline_folder / "transformer" / "diffusion_pytorch_model.safetensors"))
    save_file(transformer, folder / "flux1.safetensors")
    save_file({f"model.diffusion_model.{k}": v for k, v in transformer.items()}, folder / "flux1_comfy.safetensors")
    vae = load_file(pipeline_folder / "vae" / "diffusion_pytorch_model.safetensors")
    save_file(bfl_vae_state_dict(vae), folder / "ae.safetensors")
    clip = load_file(pipeline_folder / "text_encoder" / "model.safetensors")
    clip = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in clip.items()}
    save_file(clip | {"text_projection.weight": torch.eye(TEXT_WIDTH)}, folder / "clip_l.safetensors")
    t5 = load_file(pipeline_folder / "text_encoder_2" / "model.safetensors")
    t5.pop("encoder.embed_tokens.weight", None)
    save_file(t5, folder / "t5xxl.safetensors")
    return SingleFiles(
        transformer=folder / "flux1.safetensors",
        comfy_transformer=folder / "flux1_comfy.safetensors",
        ae=folder / "ae.safetensors",
        clip_l=folder / "clip_l.safetensors",
        t5xxl=folder / "t5xxl.safetensors",
        clip_l_tokenizer=pipeline_folder / "tokenizer",
        t5xxl_tokenizer=pipeline_folder / "tokenizer_2",
    )


# BFL's names, written out from https://github.com/black-forest-labs/flux/blob/main/src/flux/model.py and
# modules/layers.py, independently of the table that the loader uses.
def bfl_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a diffusers FLUX state dict in BFL's layout."""
    result: dict[str, Tensor] = {}

    def put(theirs: str, *ours: str) -> None:
        for kind in ("weight", "bias"):
            result[f"{theirs}.{kind}"] = torch.cat([state[f"{name}.{kind}"] for name in ours])

    for theirs, ours in {
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "final_layer.linear": "proj_out",
    }.items():
        put(theirs, ours)
    for theirs, ours in {"time_in": "timestep", "vector_in": "text", "guidance_in": "guidance"}.items():
        if f"time_text_embed.{ours}_embedder.linear_1.weight" in state:
            put(f"{theirs}.in_layer", f"time_text_embed.{ours}_embedder.linear_1")
            put(f"{theirs}.out_layer", f"time_text_embed.{ours}_embedder.linear_2")
    for kind in ("weight", "bias"):
        scale, shift = state[f"norm_out.linear.{kind}"].chunk(2)
        result[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat([shift, scale])
    for i in range(_blocks(state, "transformer_blocks.")):
        block, out = f"transformer_blocks.{i}", f"double_blocks.{i}"
        streams = (
            ("img", "norm1", ["to_q", "to_k", "to_v"], "to_out.0", "norm_q", "norm_k", "ff"),
            ("txt", "norm1_context", [f"add_{x}_proj" for x in "qkv"], "to_add_out", "norm_added_q",
            "norm_added_k",
             "ff_context"),
        )  # fmt: skip
        for stream, norm, qkv, to_out, norm_q, norm_k, ff in streams:
            put(f"{out}.{stream}_mod.lin", f"{block}.{norm}.linear")
            put(f"{out}.{stream}_attn.qkv", *(f"{block}.attn.{name}" for name in qkv))
            put(f"{out}.{stream}_attn.proj", f"{block}.attn.{to_out}")
            result[f"{out}.{stream}_attn.norm.query_norm.scale"] = state[f"{block}.attn.{norm_q}.weight"]
            result[f"{out}.{stream}_attn.norm.key_norm.scale"] = state[f"{block}.attn.{norm_k}.weight"]
            put(f"{out}.{stream}_mlp.0", f"{block}.{ff}.net.0.proj")
            put(f"{out}.{stream}_mlp.2", f"{block}.{ff}.net.2")
    for i in range(_blocks(state, "single_transformer_blocks.")):
        block, out = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        put(f"{out}.modulation.lin", f"{block}.norm.linear")
        put(f"{out}.linear1", *(f"{block}.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")))
        put(f"{out}.linear2", f"{block}.proj_out")
        result[f"{out}.norm.query_norm.scale"] = state[f"{block}.attn.norm_q.weight"]
        result[f"{out}.norm.key_norm.scale"] = state[f"{block}.attn.norm_k.weight"]
    return result


def bfl_vae_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a diffusers VAE state dict in the layout of BFL's ae.safetensors (modules/autoencoder.py)."""
    levels = _blocks(state, "encoder.down_blocks.")
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if len(parts) > 3 and parts[1] == "mid_block":
            if parts[2] == "resnets":
                parts[1:4] = ["mid", f"block_{int(parts[3]) + 1}"]
            else:
                kind = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out": "proj_out"}[parts[4]]
                if kind != "norm" and parts[-1] == "weight":
                    tensor = tensor[:, :, None, None]  # a 1 x 1 convolution there
                parts = [parts[0], "mid", "attn_1", kind, parts[-1]]
        elif parts[1] in ("down_blocks", "up_blocks"):
            up = parts[1] == "up_blocks"
            level = str(levels - 1 - int(parts[2])) if up else parts[2]
            kinds = {"resnets": "block", "downsamplers": "downsample", "upsamplers": "upsample"}
            rest = parts[4:] if parts[3] == "resnets" else parts[5:]
            number = [parts[4]] if parts[3] == "resnets" else []
            rest = rest[1:] if parts[3] == "resnets" else rest
            parts = [parts[0], "up" if up else "down", level, kinds[parts[3]], *number, *rest]
        name = ".".join(parts).replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        result[name] = tensor.contiguous()
    return result


def tiny_text_model(build: Callable[[], Module], seed: int, factor: float) -> Module:
    """Return a random text encoder, its matrices times ``factor``: as initialised, words would hardly differ in it."""
    model = _seeded(build, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor) if parameter.ndim > 1 else None
    _enliven(model, seed)
    return model.eval()


@dataclass(frozen=True)
class SplitFiles:
    """Files as ComfyUI publishes them, and a local tokenizer folder."""

    model_type: str
    transformer: Path
    vae: Path
    text_encoder: Path
    tokenizer: Path

    def model_config(self, **changes: object) -> ModelConfig:
        """Return the ``[model]`` section that reads these files."""
        settings: dict[str, object] = {
            "model_type": self.model_type,
            "pretrained_model_name_or_path": str(self.transformer),
            "vae": str(self.vae),
            "text_encoder": str(self.text_encoder),
            next(iter(MODEL_TYPES[self.model_type].tokenizers)): str(self.tokenizer),
        }
        return ModelConfig(**(settings | changes))  # type: ignore[arg-type]


State = dict[str, Tensor]
Converted = tuple[str, Callable[[State], State]]  # a file's name, and its tensors from diffusers' ones


def save_parts(
    model_type: str,
    pipeline_folder: Path,
    folder: Path,
    transformer: Converted,
    vae: Converted,
    text_encoder: Converted,
    prefix: str = "",
    tokenizer: str = "tokenizer",
) -> SplitFiles:
    """Write the parts of a tiny pipeline folder as single files, ``prefix`` before the transformer's names."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"transformer": transformer, "vae": vae, "text_encoder": text_encoder}
    for part, (name, convert) in parts.items():
        (source,) = (pipeline_folder / part).glob("*.safetensors")
        begin = prefix if part == "transformer" else ""
        save_file({begin + key: tensor for key, tensor in convert(load_file(source)).items()}, folder / name)
    files = (folder / name for name, _ in parts.values())
    return SplitFiles(model_type, *files, pipeline_folder / tokenizer)


def _blocks(state: dict[str, Tensor], prefix: str) -> int:
    return 1 + max(int(name[len(prefix) :].split(".")[0]) for name in state if name.startswith(prefix))


def _seeded(build: Callable[[], Module], seed: int) -> Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


def _enliven(module: nn.Module, seed: int) -> None:
    """Give biases and norm weights random values too: as initialised, many inputs would not matter."""
    random = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
