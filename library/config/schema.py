"""Every option of ``train_lora.py`` on images, once, and what the other schemas share with it.

Each class is a section: a table in the TOML file and a group in ``--help``. Sections are for reading; the keys
are unique across them and carry the names kohya's sd-scripts gave them, so a key is found under any table
heading. A field's type is checked, its description is its help text, its default is the default everywhere; what
else concerns it alone is described by markers (``library.config.markers``). The matrix in
``library.config.layout_rules`` says which options and layouts exclude each other. Code that needs settings takes a
section, never all.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

import library.config.run_schema as run_schema
from library.config.family_defaults import FAMILY, KIND
from library.config.kinds import likely_type
from library.config.markers import (
    MOST,
    MOST_GUIDANCE,
    MOST_WORKERS,
    MUST_MATCH,
    SAME_RESULT,
    Batch,
    EffectOnly,
    Fraction,
    MustMatch,
    NotNegative,
    OnlyWith,
    Pairs,
    Positive,
    Rate,
    Section,
    Seed,
    Size,
    StepsOrShare,
    sorted_pairs,
)
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.run_schema import IMAGES


def _lasting_arguments(pairs: list[str]) -> list[str]:
    """Return the network arguments a state goes on with; dropouts and ratios of rates hold from the next step on."""
    names = ((pair, pair.split("=")[0]) for pair in sorted_pairs(pairs))
    # that there are two rates lasts: their groups are the optimizer's
    return [name if "loraplus" in name else pair for pair, name in names if name not in _DROPOUTS]


def _trained_encoders(rates: list[Any]) -> list[str]:
    """Return which text encoders have a rate other than 0; of what it has returned, the same."""
    trained = ["not trained" if rate in (0, "not trained") else "trained" for rate in rates]
    return [word for i, word in enumerate(trained) if "trained" in trained[i:]]


_DROPOUTS = ("rank_dropout", "module_dropout")
# of these a state goes on with a part; one of an earlier version has saved them in full
LASTING_PARTS = {"network_args": _lasting_arguments, "text_encoder_lr": _trained_encoders}


# Schedules whose decay ends, and all that end lower than they began.
ENDING = ("linear", "cosine", "cosine_with_restarts", "polynomial", "rex", "warmup_stable_decay")
DECAYING = (*ENDING, "inverse_sqrt")
Scheduler = Literal[("constant", "constant_with_warmup", *DECAYING)]  # type: ignore[valid-type]
_WARMING = OnlyWith(lr_scheduler=("constant_with_warmup", *DECAYING))
WarmUp = Annotated[StepsOrShare, _WARMING]
LeastRate = Annotated[Fraction, OnlyWith(lr_scheduler=DECAYING)]
_CHECKPOINTED = OnlyWith(gradient_checkpointing=True)
_QUANTISED = OnlyWith(any_of=True, fp8_base=True, fp8_scaled=True)
PREFERENCES = OnlyWith(train_on=("preferences",))
_PRESERVED = OnlyWith(preserve=("prior",))
_RANDOM_CAPTIONS = EffectOnly(where=("shuffle_caption", "caption_tag_dropout_rate", "enable_wildcard"))
_SIGMOIDS = ("sigmoid", "shift", "flux_shift", "flux2_shift", "qwen_shift", "krea2_shift")  # of timestep_sampling
_MIXED = ("qinglong_flux", "qinglong_qwen")
_NORMAL = OnlyWith(any_of=True, weighting_scheme=("logit_normal",), timestep_sampling=("logsnr", "qinglong_flux"))
GUIDED = tuple(name for name, row in MODEL_TYPES.items() if row.takes_guidance)
_SWAPPED = {
    title: dict.fromkeys(str(row.swappable_blocks) for row in MODEL_TYPES.values() if row.title == title)
    for title in dict.fromkeys(row.title for row in MODEL_TYPES.values() if row.swappable_blocks)
}
_SWAPPABLE = ", ".join(f"{' or '.join(most)} of {title}" for title, most in _SWAPPED.items())
_NOT_FROM_FILE = OnlyWith(
    ", which takes layers, ranks and alphas from the file", overridden=True, dim_from_weights=False
)
NOT_IN_EPOCHS = OnlyWith(", which wins, as in sd-scripts", overridden=True, max_train_epochs=False)


class ModelConfig(Section):
    """The base model and where its parts lie."""

    model_type: Literal[IMAGE_MODELS] = Field(  # type: ignore[valid-type]
        KIND, description="architecture family, which follows from the model; flux: FLUX.1 dev and schnell"
    )
    pretrained_model_name_or_path: str = Field(
        description="diffusers folder or its transformer folder, a transformer file (BFL's flux1-dev.safetensors or "
        "ComfyUI's split file), or a name on the Hugging Face hub, black-forest-labs/FLUX.1-dev"
    )
    ae: str | None = Field(
        None, description="VAE: file (BFL's ae.safetensors), diffusers folder or hub name, with a transformer alone"
    )
    clip_l: str | None = Field(None, description="CLIP-L: file, folder or hub name, with a transformer alone")
    t5xxl: str | None = Field(None, description="T5-XXL encoder: file, folder or hub name, with a transformer alone")
    clip_l_tokenizer: str = Field(
        "openai/clip-vit-large-patch14", description="tokenizer folder or hub name, with a single clip_l file"
    )
    t5xxl_tokenizer: str = Field(
        "google/t5-v1_1-xxl", description="tokenizer folder or hub name, with a single t5xxl file"
    )
    t5xxl_max_token_length: Size | None = Field(
        None, description="T5 tokens per caption; default 512 for dev, 256 for schnell, less if the model says so"
    )
    vae: str | None = Field(None, description="VAE: file, folder or hub name, with a transformer alone")
    text_encoder: str | None = Field(
        None,
        description="text encoder: file, folder or hub name, with a transformer alone; docs/choose.md names "
        "each model's",
    )
    qwen_tokenizer: str | None = Field(
        None,
        description="tokenizer folder or hub name of a Qwen text encoder, with a single file; default: the published "
        "encoder's",
    )
    mistral_tokenizer: str | None = Field(
        None,
        description="FLUX.2 dev, ERNIE-Image: tokenizer folder or hub name, with a single file; default: the published "
        "encoder's",
    )
    zero_cond_t: bool | None = Field(
        None,
        description="qwen_image_edit_plus: reference images are modulated as at timestep 0, as Edit-2511 was trained "
        "with; default: as the model's files say",
    )
    base_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="dtype of the frozen weights; auto follows mixed_precision"
    )
    vae_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="dtype in which images are encoded and decoded on a GPU; auto follows base_dtype"
    )

    @model_validator(mode="after")
    def _has_kind(self) -> ModelConfig:
        """Set an unset ``model_type`` as the model alone tells it; a whole configuration also asks its dataset."""
        if self.model_type is KIND:
            self.__dict__["model_type"] = likely_type(self.pretrained_model_name_or_path)
        return self


class PrecisionConfig(Section):
    """fp8 weights of the base. What its files hold in fp8 is trained on as it is, with none of these keys."""

    fp8_base: Annotated[bool, MUST_MATCH] = Field(
        False, description="cast the transformer's linear weights to fp8 as it is loaded, no scales"
    )
    fp8_scaled: Annotated[bool, MUST_MATCH] = Field(
        False, description="quantise the transformer's linear weights to fp8 with scales"
    )
    fp8_granularity: Annotated[
        Literal["tensor", "row", "block64", "block128"], MUST_MATCH, OnlyWith(fp8_scaled=True)
    ] = Field(
        "block64",
        description="what shares a scale of fp8_scaled: the matrix, an output's row, a run of 64 or 128 inputs",
    )
    fp8_format: Annotated[Literal["e4m3fn", "e5m2"], MUST_MATCH, _QUANTISED] = Field(
        "e4m3fn", description="fp8 format that weights are rounded to"
    )
    fp8_exclude: Annotated[list[Literal["embedders", "modulation", "final"]], MustMatch(sorted), _QUANTISED, IMAGES] = (
        Field(["embedders", "final"], description="kinds of linear layers that stay in high precision")
    )
    fp8_exclude_patterns: Annotated[list[str], MustMatch(sorted), _QUANTISED] = Field(
        [], description="regular expressions; a layer stays in high precision if one is found in its name"
    )
    fp8_rounding: Annotated[Literal["nearest", "stochastic"], MUST_MATCH, _QUANTISED] = Field(
        "nearest", description="how weights are rounded to fp8; stochastic follows seed"
    )
    quantised_compute: Literal["auto", "dequant", "quantised"] = Field(
        "auto",
        description="products with quantised weights: dequantised to the compute dtype; as they are stored, which "
        "rounds activations too (fp8 on Ada, Hopper or newer, with one scale a tensor or row; int8 with comfy-kitchen "
        "on Turing or newer); auto takes these where GPU and weight allow, int8's on A100, RTX 30 and RTX 40",
    )
    quantised_activations: Literal["none", "auto", "row", "tensor", "unit", "static", "int8", "nvfp4", "mxfp8"] = Field(
        "none",
        description="round what quantised layers are given as the server's products will, with the gradient passed "
        "through: auto as the server of the base's file does, layer by layer; to fp8 with a scale a token (row), an "
        "input (tensor), none (unit, ComfyUI) or the file's input_scale (static); to int8, nvfp4 or mxfp8",
    )
    fp8_text_encoder: Annotated[bool, IMAGES] = Field(
        False, description="quantise T5, Qwen2.5-VL, Qwen3-VL or Qwen3 to fp8, block64, as it is loaded"
    )


class DistillationConfig(Section):
    """Training on an fp8 base towards the bf16 model's predictions, so that both generate the same image."""

    distill_from: str | None = Field(
        None, description="bf16 model, folder or file, whose velocity the LoRA learns on this base"
    )
    distill_lora: Annotated[str | None, OnlyWith(distill_from=True)] = Field(
        None, description="LoRA beside the teacher; default: network_weights"
    )
    distill_effect: Annotated[bool, OnlyWith(distill_from=True)] = Field(
        False, description="learn what the LoRA adds to the teacher's answers, not these: where this base is distilled"
    )
    distill_weight: Annotated[float, Field(gt=0, le=1), OnlyWith(distill_from=True)] = Field(
        1.0, description="weight of the teacher's velocity against the data's; 1 learns from the teacher alone"
    )
    distill_cache: Annotated[str | None, OnlyWith(distill_from=True), SAME_RESULT] = Field(
        None, description="folder for the teacher's answers; default: teacher in output_dir"
    )


class DatasetArguments(Section):
    """Where the dataset is described and how its caches are made."""

    dataset_config: str = Field(
        description="dataset TOML (kohya's format), or a folder of image folders named 10_name class"
    )
    dataset_args: Annotated[list[str], EffectOnly(default_of="")] = Field(
        [], description="key=value pairs that hold where the dataset TOML does not say: resolution=1024, flip_aug=true"
    )
    cache_directory: Annotated[str | None, SAME_RESULT] = Field(
        None, description="folder for cached latents and text; default .tandem_cache beside the images"
    )
    caption_variants: Annotated[int, Field(gt=0, le=10_000), _RANDOM_CAPTIONS] = Field(
        8, description="cached variants per caption where shuffling or tag dropout asks for more than one"
    )
    vae_batch_size: Annotated[Batch, SAME_RESULT] = Field(1, description="images encoded at once while caching")
    text_encoder_batch_size: Annotated[Batch, SAME_RESULT] = Field(
        4, description="captions encoded at once while caching"
    )
    train_batch_size: Annotated[Batch, EffectOnly(default_of="batch_size")] = Field(
        1, description="batch size where the dataset TOML names none"
    )
    max_data_loader_n_workers: Annotated[int, Field(ge=0, le=MOST_WORKERS), SAME_RESULT] = Field(
        2, description="worker processes that read caches"
    )
    trigger_word: Annotated[str | None, EffectOnly(default_of="trigger_word")] = Field(
        None, description="word that calls up the subject, in subsets that name none"
    )
    caption_command: Annotated[str | None, SAME_RESULT] = Field(
        None, description='run for each image without a caption, which it prints: "my_captioner --image {image}"'
    )


class PreservationConfig(Section):
    """What a LoRA is to leave as it is: there the frozen model's own answers are the targets (docs/preservation.md)."""

    preserve: Literal["none", "prior"] = Field(
        "none",
        description="prior: a share of the samples teaches the model to answer, with the LoRA, what it answers without "
        "it: to regularisation images (is_reg), and to what the keys below name; without any, to preserve_prompts = "
        "general",
    )
    preserve_share: Annotated[float, Field(gt=0, lt=1), _PRESERVED] = Field(
        0.4, description="share of an epoch's samples that preserve, divided evenly among the kinds of them"
    )
    preserve_class: Annotated[str | None, _PRESERVED] = Field(
        None,
        description="word for what the subject is (person); images are seen with it in place of the trigger word too, "
        "and the frozen model's answer to that is kept",
    )
    preserve_blank: Annotated[bool, _PRESERVED] = Field(False, description="likewise with an empty caption")
    preserve_prompts: Annotated[str | None, _PRESERVED] = Field(
        None,
        description="prompts, general (those that come with Tandem) or a file like sample_prompts, of which the base "
        "generates regularisation images, once: they are kept in cache_directory",
    )
    preserve_directions: Annotated[int, Field(ge=0, le=1024), _PRESERVED, MUST_MATCH] = Field(
        32,
        description="of each layer's inputs on regularisation images, generated ones too, so many leading directions "
        "are learnt least in, which takes no time; 0: none. For lora and dora",
    )
    preserve_outside_mask: Annotated[bool, _PRESERVED, OnlyWith(masked_loss=True)] = Field(
        False, description="outside of a mask the frozen model's answer is the target"
    )
    general_prompts: str = Field(
        "auto",
        description="prompts (general, a file or none) that are not trained on: with them validations measure what the "
        "LoRA changes elsewhere, and their images are generated at the end; auto: general with preserve, else none",
    )


class PairsConfig(Section):
    """Learning from pairs of images or of prompts, instead of single images (docs/sliders_and_pairs.md)."""

    train_on: Annotated[Literal["images", "preferences", "slider"], MUST_MATCH] = Field(
        "images",
        description="images: each image of the dataset; preferences: pairs of a chosen and a rejected image of one "
        "prompt (DPO), of which paired_directory in the dataset TOML names the rejected ones; slider: a direction, of "
        "slider_prompts, or from the images in paired_directory (strength -1) to those of the dataset (strength 1)",
    )
    slider_prompts: Annotated[str | list[str] | None, MUST_MATCH, OnlyWith(train_on=("slider",))] = Field(
        None,
        description="the direction as prompts: a list, or a file of them (text, TOML or JSON): "
        '"a person --p an old person --n a young person"; of several each image takes one; the dataset\'s captions are '
        "not used then",
    )
    slider_guidance: Annotated[float, Field(gt=0), MUST_MATCH, OnlyWith(slider_prompts=True)] = Field(
        3.0, description="how far strength 1 goes along the direction of slider_prompts (Concept Sliders' eta)"
    )
    dpo_beta: Annotated[float, Field(gt=0), MUST_MATCH, PREFERENCES] = Field(
        2000.0, description="DPO's beta: the higher, the nearer the model stays to its base"
    )


_NO_LONGER_TRAINED = {
    **dict.fromkeys(("oft", "boft"), "it is no longer trained; use lora, dora, lokr or loha"),
    "olora": "this start is gone; use pissa, or default",
}


class NetworkConfig(Section):
    """The LoRA, or another kind of adapter."""

    network_type: Annotated[Literal["lora", "dora", "lokr", "loha"], MUST_MATCH, _NOT_FROM_FILE] = Field(
        "lora",
        description="kind of adapter; dora loads in diffusers or ComfyUI; lokr and loha in ComfyUI, with some families "
        "in musubi-tuner or (lokr) diffusers too",
    )
    network_dim: Annotated[Size, MUST_MATCH, _NOT_FROM_FILE] = Field(FAMILY, description="rank")
    network_alpha: Annotated[float, Field(gt=0, le=1_000_000), MUST_MATCH, _NOT_FROM_FILE] = Field(
        FAMILY, description="scale is alpha / rank; unset it is the rank"
    )
    use_rslora: Annotated[bool, MUST_MATCH, _NOT_FROM_FILE] = Field(
        False, description="scale is alpha / sqrt(rank) instead (rsLoRA); lora and dora"
    )
    init_lora_weights: Annotated[Literal["default", "pissa"], MUST_MATCH, _NOT_FROM_FILE] = Field(
        "default",
        description="initial weights: random, or the base weights' largest singular directions (pissa), whose file "
        "has twice the rank",
    )
    network_dropout: Annotated[Fraction, _NOT_FROM_FILE] = Field(
        0.0, description="neuron dropout: on the down-projection's output"
    )
    network_args: Annotated[list[str], MustMatch(_lasting_arguments), _NOT_FROM_FILE] = Field(
        [],
        description="key=value pairs: rank_dropout, module_dropout, loraplus_lr_ratio, loraplus_unet_lr_ratio, "
        "loraplus_text_encoder_lr_ratio, train_t5xxl, include_patterns, exclude_patterns, img_attn_dim, txt_attn_dim, "
        "img_mlp_dim, txt_mlp_dim, img_mod_dim, txt_mod_dim, single_dim, single_mod_dim, in_dims, attn_dim, mlp_dim, "
        "mod_dim, refiner_dim (Z-Image), img_dim, txt_dim, ref_dim, ref_mod_dim (FLUX.3), "
        "txt_fusion_dim, projector_dim, final_dim (Krea 2, ERNIE-Image), q_proj_dim, k_proj_dim, "
        "v_proj_dim, o_proj_dim, gate_proj_dim, up_proj_dim, down_proj_dim (Llama), c_attn_dim, attn_c_proj_dim, "
        "c_fc_dim, mlp_c_proj_dim (GPT-2), train_double_block_indices, train_mode_block_indices (FLUX.3), "
        "train_single_block_indices, train_block_indices (Qwen-Image, Z-Image, Krea 2, ERNIE-Image, Llama, GPT-2); "
        "factor, <kind>_factor (as <kind>_dim), full_matrix, decompose_both (lokr), split_qkv (lora), "
        "trainable_token_indices (Llama, GPT-2)",
    )
    scale_weight_norms: Annotated[
        NotNegative,
        OnlyWith(network_type=("lora",)),
        OnlyWith(init_lora_weights=("default",)),
    ] = Field(
        0.0,
        description="after each step a layer whose update alpha/rank * B A is larger than this (Frobenius norm) is "
        "scaled down to it; 0: no limit",
    )
    base_weights: Annotated[list[str], IMAGES] = Field(
        [], description="LoRA files merged into the transformer as it is loaded, before it becomes fp8"
    )
    base_weights_multiplier: Annotated[
        list[Annotated[float, Field(allow_inf_nan=False)]], OnlyWith(base_weights=True), IMAGES
    ] = Field([], description="their strengths; those not given are 1")
    network_weights: str | None = Field(None, description="LoRA file to go on from")
    dim_from_weights: Annotated[bool, MUST_MATCH, OnlyWith(", the file to take ranks from", network_weights=True)] = (
        Field(False, description="train the transformer layers of network_weights, each with its own rank and alpha")
    )
    network_train_text_encoder_only: Annotated[bool, _NOT_FROM_FILE, IMAGES] = Field(
        False, description="train the text encoders that text_encoder_lr names, and not the transformer"
    )

    @field_validator("network_type", "init_lora_weights", mode="before")
    @classmethod
    def _is_trained_still(cls, value: Any) -> Any:
        """Name the replacement of what could be trained once."""
        if remedy := _NO_LONGER_TRAINED.get(str(value)):
            raise ValueError(remedy)
        return value


class OptimizerConfig(Section):
    """Optimizer and learning rate schedule."""

    optimizer_type: Annotated[str, MUST_MATCH] = Field(
        FAMILY,
        description="AdamW, AdamW8bit, Prodigy, ProdigyPlusScheduleFree, Adafactor, CAME, Lion, "
        "AdamWScheduleFree, DAdaptAdam, or a dotted class path of these packages",
    )
    trust_class_paths: bool = Field(False, description="optimizer_type may name a class of any package, which is run")
    optimizer_args: Pairs = Field([], description='key=value pairs for the optimizer, "weight_decay=0.01"')
    learning_rate: Rate = Field(FAMILY, description="learning rate; of Prodigy and D-Adaptation unset 1.0")
    text_encoder_lr: Annotated[list[Rate], MustMatch(_trained_encoders), IMAGES] = Field(
        [],
        max_length=2,
        description="learning rates of CLIP-L and T5, which are not trained without one or at 0; one value holds for "
        "both; T5 needs train_t5xxl=True in network_args too",
    )
    max_grad_norm: NotNegative = Field(1.0, description="gradient norm to clip at; 0 for no clipping")
    lr_scheduler: Scheduler = Field("constant", description="learning rate schedule")
    lr_warmup_steps: WarmUp = Field(0, description="warm-up in optimizer steps, or as a fraction of all")
    lr_warmup_start_ratio: Annotated[Fraction, _WARMING, OnlyWith(lr_warmup_steps=True)] = Field(
        0.0, description="rate from which the warm-up rises, as a share of lr"
    )
    lr_decay_steps: Annotated[StepsOrShare, OnlyWith(lr_scheduler=ENDING)] = Field(
        0,
        description="length of the decay in optimizer steps, or as a fraction of all: the last steps for "
        "warmup_stable_decay; for the others the steps after the warm-up, then the floor holds (0: to the end)",
    )
    lr_scheduler_num_cycles: Annotated[Positive, OnlyWith(lr_scheduler=("cosine_with_restarts",))] = Field(
        1, description="restarts of cosine_with_restarts"
    )
    lr_scheduler_power: Annotated[float, Field(gt=0), OnlyWith(lr_scheduler=("polynomial",))] = Field(
        1.0, description="exponent of polynomial"
    )
    lr_scheduler_min_lr_ratio: LeastRate = Field(0.0, description="floor of the decaying schedules, as a share of lr")
    lr_scheduler_timescale: Annotated[Positive | None, OnlyWith(lr_scheduler=("inverse_sqrt",))] = Field(
        None, description="steps in which inverse_sqrt falls to 0.71; default: the warm-up, or 10000 without one"
    )

    @field_validator("text_encoder_lr", mode="before")
    @classmethod
    def _one_rate_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, int | float | str) else value


class SharedTrainingKeys(Section):
    """Keys of the section ``training`` that pretraining has too; ``library.nn.checkpointing`` says what recomputes."""

    max_train_steps: Annotated[Positive, NOT_IN_EPOCHS] = Field(1600, description="optimizer steps")
    max_train_epochs: Positive | None = Field(None, description="epochs; wins over max_train_steps")
    resume: Annotated[str | None, SAME_RESULT] = Field(
        None,
        description="state folder to go on from (written by save_state); auto: the newest in output_dir, if any",
    )
    gradient_checkpointing: Annotated[bool, SAME_RESULT] = Field(
        False, description="recompute blocks in backward: less memory, more time"
    )
    activation_budget_mb: Annotated[int, Field(ge=0, le=MOST), _CHECKPOINTED, SAME_RESULT] = Field(
        0,
        description="keep so many MiB of activations instead of recomputing them, what saves most time first: "
        "outputs of attention, then blocks",
    )
    cpu_offload_checkpointing: Annotated[bool, _CHECKPOINTED, SAME_RESULT] = Field(
        False, description="keep the blocks' inputs in host memory until backward"
    )


class TrainingConfig(SharedTrainingKeys):
    """How long, in what precision, from which seed."""

    gradient_accumulation_steps: Batch = Field(1, description="batches per optimizer step")
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = Field(
        "auto",
        description="autocast dtype of the forward pass; auto: what base_dtype or full_bf16 ask for, else on a GPU the "
        "family's, bf16, and on a CPU no",
    )
    attention: Annotated[
        Literal["auto", "flash", "flash3", "flash4", "efficient", "cudnn", "math"], IMAGES, SAME_RESULT
    ] = Field(
        "auto",
        description="attention kernel; auto: on a GPU the installed ones are timed once for each image size, and the "
        "fastest is used; flash3 and flash4 need their packages; one that cannot compute this model is refused",
    )
    full_bf16: Annotated[bool, MUST_MATCH] = Field(
        False, description="LoRA weights in bf16 too, updated with stochastic rounding"
    )
    seed: Seed = Field(0, description="all noise, timesteps, shuffles and initial weights follow from it")
    prior_loss_weight: Annotated[NotNegative, IMAGES, EffectOnly(where=("is_reg", "preserve"))] = Field(
        1.0, description="weight of regularisation images (is_reg), and of all that preserves: there 2 unless it is set"
    )
    memory_dry_run: Annotated[bool | None, IMAGES, SAME_RESULT] = Field(
        None,
        description="count on fake tensors what a step at the largest bucket takes, before anything is cached; "
        "default: on a GPU, where no layout splits the model",
    )
    on_nan: Annotated[Literal["stop", "skip"], SAME_RESULT] = Field(
        "stop",
        description="a step whose loss or gradients are not finite: save what was before it and stop; or skip the step",
    )
    on_nan_limit: Annotated[Positive, OnlyWith(on_nan=("skip",)), SAME_RESULT] = Field(
        10, description="stop after so many steps in a row that are not finite (skip)"
    )
    blocks_to_swap: Annotated[int, Field(ge=0, le=MOST), IMAGES, SAME_RESULT] = Field(
        0,
        description="blocks whose frozen weights stay in host memory and are copied in as they run; at most "
        f"{_SWAPPABLE}",
    )
    memory: Annotated[Literal["manual", "auto"], IMAGES, SAME_RESULT] = Field(
        "manual",
        description="manual: as the keys above say; auto: choose the fastest of gradient_checkpointing, "
        "activation_budget_mb, cpu_offload_checkpointing, blocks_to_swap that fits, counted before anything is cached",
    )


class FlowConfig(Section):
    """Timesteps, weighting and loss of the rectified flow."""

    timestep_sampling: Literal[
        "auto",
        "uniform",
        "sigmoid",
        "shift",
        "flux_shift",
        "flux2_shift",
        "qwen_shift",
        "krea2_shift",
        "sigma",
        "logsnr",
        "qinglong_flux",
        "qinglong_qwen",
        "steps",
    ] = Field(
        "auto",
        description="how sigmas are drawn; flux_shift and the like follow the size, as these models' samplers do; "
        "logsnr is normal in log SNR; qinglong mixes both; steps: a distilled model's; auto: as the scheduler does, or "
        "with distill_effect steps",
    )
    sigmoid_scale: Annotated[float, Field(gt=0), OnlyWith(timestep_sampling=("auto", *_SIGMOIDS, *_MIXED))] = Field(
        1.0, description="spread of sigmoid and of the shifts"
    )
    discrete_flow_shift: Annotated[float, Field(gt=0), OnlyWith(timestep_sampling=("shift", "sigma"))] = Field(
        FAMILY, description="shift of timestep_sampling shift, sigma; unset that of the model's scheduler, if it is one"
    )
    weighting_scheme: Literal["none", "logit_normal", "mode", "cosmap", "sigma_sqrt"] = Field(
        "none", description="density of sigmas (logit_normal, mode) or loss weight (cosmap, sigma_sqrt); Esser 2024"
    )
    logit_mean: Annotated[float, _NORMAL] = Field(0.0, description="mean of logit_normal and logsnr")
    logit_std: Annotated[float, Field(gt=0), _NORMAL] = Field(1.0, description="spread of logit_normal and logsnr")
    mode_scale: Annotated[float, OnlyWith(weighting_scheme=("mode",))] = Field(1.29, description="scale of mode")
    min_timestep: Annotated[int, Field(ge=0, le=1000)] = Field(0, description="lowest timestep, of 1000")
    max_timestep: Annotated[int, Field(ge=0, le=1000)] = Field(1000, description="highest timestep, of 1000")
    preserve_distribution_shape: bool = Field(
        False, description="between min_timestep and max_timestep, cut the distribution off instead of squeezing it"
    )
    guidance_scale: Annotated[
        float, Field(ge=0, le=MOST_GUIDANCE), OnlyWith(", which takes no guidance", model_type=GUIDED)
    ] = Field(FAMILY, description="guidance given to guidance-distilled models in training")
    ip_noise_gamma: NotNegative = Field(
        0.0, description="input perturbation: so much more noise in the input than in the target; 0: none"
    )
    ip_noise_gamma_random_strength: Annotated[bool, OnlyWith(ip_noise_gamma=True)] = Field(
        False, description="for each sample a strength between 0 and ip_noise_gamma"
    )
    loss_type: Literal["l2", "l1", "huber", "smooth_l1"] = Field("l2", description="loss")
    huber_c: Annotated[float, Field(gt=0), OnlyWith(loss_type=("huber", "smooth_l1"))] = Field(
        0.1, description="where huber and smooth_l1 turn linear"
    )
    masked_loss: bool = Field(
        False,
        description="weigh the loss by mask images (conditioning_data_dir) or alpha; of a fill model without them, "
        "count the region to fill alone",
    )
    seam_loss_weight: NotNegative = Field(
        0.0, description="extra weight of the loss along the border of masks and regions to fill, 0 for none"
    )
    seam_width: Annotated[Size, OnlyWith(seam_loss_weight=True)] = Field(
        2, description="latent cells on each side of the border that seam_loss_weight counts"
    )


class TrainConfig(Section):
    """All sections of a LoRA training run."""

    model: ModelConfig
    precision: PrecisionConfig = PrecisionConfig()
    distillation: DistillationConfig = DistillationConfig()
    dataset: DatasetArguments
    preservation: PreservationConfig = PreservationConfig()
    pairs: PairsConfig = PairsConfig()
    network: NetworkConfig = NetworkConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    flow: FlowConfig = FlowConfig()
    saving: run_schema.SavingConfig = run_schema.SavingConfig()
    hub: run_schema.HubConfig = run_schema.HubConfig()
    sampling: run_schema.SamplingConfig = run_schema.SamplingConfig()
    validation: run_schema.ValidationConfig = run_schema.ValidationConfig()
    logging: run_schema.LoggingConfig = run_schema.LoggingConfig()
    accelerate: run_schema.AccelerateConfig = run_schema.AccelerateConfig()
    parallel: run_schema.ParallelConfig = run_schema.ParallelConfig()
