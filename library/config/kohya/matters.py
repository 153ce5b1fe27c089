"""What keys of kohya's mean that depend on others.

Each rule looks at one matter (the learning rate, the Huber loss, ...), rewrites the values in place and leaves a note
on every key that it touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from library.config.kohya.flags import DEFAULTS
from library.config.kohya.translation import Known, Translation, is_off
from library.config.markers import is_nothing
from library.config.model_types import MODEL_TYPES
from library.config.optimizer_types import estimates_step_size
from library.files import read_text


def _learning_rate(result: Translation, known: Known) -> None:
    if "unet_lr" in result.values and "unet_lr" not in known:
        text = "becomes learning_rate, which it wins over, as there"
        result.rename("unet_lr", "learning_rate", result.take("unet_lr"), text)


QWEN_IMAGE, _FLUX_2 = "networks.lora_qwen_image", "networks.lora_flux_2"

_VERSIONS = {  # musubi-tuner's model_version -> model_type
    QWEN_IMAGE: {
        "original": "qwen_image",
        "edit": "qwen_image_edit",
        "edit-2509": "qwen_image_edit_plus",
        "edit-2511": "qwen_image_edit_plus",
    },
    _FLUX_2: {"dev": "flux2_dev"}
    | dict.fromkeys(("klein-4b", "klein-base-4b", "klein-9b", "klein-base-9b"), "flux2_klein"),
}


def _model(result: Translation, known: Known) -> None:
    """musubi-tuner names the kind of Qwen-Image and FLUX.2; of all but Qwen-Image control images ask for editing."""
    module = result.values.get("network_module", QWEN_IMAGE) if result.tool else QWEN_IMAGE
    if module in _VERSIONS:
        _version(result, module)
    edits = f"{result.values.get('model_type')}_edit"
    if module == QWEN_IMAGE or result.tool != "musubi-tuner" or edits not in MODEL_TYPES:
        return
    if names_key(result.values.get("dataset_config"), "control_directory"):
        result.default("model_type", edits, "dataset_config", f"{edits}, as the dataset has control images")


def _version(result: Translation, module: str) -> None:
    """Set the ``model_type`` that model_version names; FLUX.2 without one is dev."""
    version, known = result.take("model_version"), _VERSIONS[module]
    if not version and module == QWEN_IMAGE:
        return
    named = str(version or "dev").lower()
    if named not in known:
        text = f"not taken: {named!r} is not a model family of this version; set one of {', '.join(known)}"
        result.note("model_version", "refused", text)
    elif version:
        result.rename("model_version", "model_type", known[named])
    else:
        result.place("model_type", known[named], "network_module")
        text = f"unset, so dev, the default of musubi-tuner: model_type = {known[named]}"
        result.note("model_version", "default", text)
    if named == "edit-2511":
        result.default("zero_cond_t", True, "model_version", "true, which is what tells edit-2511 from edit-2509")


def names_key(dataset: object, key: str) -> bool:
    """Whether the dataset TOML, if it is there, has ``key``."""
    path = Path(str(dataset or "")).expanduser()
    return path.is_file() and re.search(rf"^[ \t]*{key}[ \t]*=", read_text(path), re.MULTILINE) is not None


def _buckets(result: Translation, known: Known) -> None:
    """A dataset that sd-scripts' flags, or a TOML beside its settings, give buckets has those of sd-scripts."""
    dataset, key = result.values.get("dataset_config"), "bucket_reso_steps"
    of_toml = result.tool == "sd-scripts" and names_key(dataset, "enable_bucket") and not names_key(dataset, key)
    of_flags = dataset and not is_off(result.values.get("enable_bucket"))
    if key not in result.values and (of_toml or of_flags):
        result.default(key, 64, key, "unset, so 64, the default of sd-scripts: its sizes hold, not Tandem's")


def _vae(result: Translation, known: Known) -> None:
    """Qwen-Image's VAE is vae; FLUX's is ae, also where the trainers' common option vae names it."""
    row = MODEL_TYPES.get(str(result.values.get("model_type", "flux")))
    if result.tool and "vae" in result.values and not (row and "vae" in row.files):
        if "ae" in result.values:
            result.leave_out("vae", "ae is set too and counts")
        else:
            result.rename("vae", "ae", result.take("vae"), "becomes ae; the VAE")


def _no_half_vae(result: Translation, known: Known) -> None:
    if not is_off(result.take("no_half_vae")):
        result.rename("no_half_vae", "vae_dtype", "fp32")


def _deprecated(result: Translation, known: Known) -> None:
    """Older flags, each as its trainer takes it; the newer flag counts where both are set."""
    epochs, ratio = result.values.get("max_train_epochs"), result.values.get("save_n_epoch_ratio")
    counted = str(epochs).isdigit() and str(ratio).isdigit() and str(ratio) != "0"
    every = max(1, int(str(epochs)) // int(str(ratio))) if counted else None
    meant: dict[str, tuple[str, Any]] = {
        "edit_plus": ("model_version", "edit-2509"),
        "edit": ("model_version", "edit"),
        "split_mode": ("blocks_to_swap", 18),
        "use_8bit_adam": ("optimizer_type", "AdamW8bit"),
        "use_lion_optimizer": ("optimizer_type", "Lion"),
        "save_n_epoch_ratio": ("save_every_n_epochs", every),
    }
    for key, (name, value) in meant.items():
        if key not in result.values:
            continue
        if is_off(result.take(key)):
            result.note(key, "accepted", "asks for nothing")
        elif not is_nothing(result.values.get(name)):
            result.note(key, "left out", f"{name} is set too and counts")
        elif value is None:
            text = f"it depends on the number of epochs; set {name} to max_train_epochs divided by it"
            result.note(key, "refused", f"not taken: {text}")
        else:
            result.rename(key, name, value)


_DEEPSPEED = (
    *("offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device", "offload_param_nvme_path"),
    *("zero3_init_flag", "zero3_save_16bit_model", "fp16_master_weights_and_gradients"),
)


def _deepspeed(result: Translation, known: Known) -> None:
    stage, on = result.take("zero_stage"), not is_off(result.take("deepspeed"))
    if on:
        result.rename("deepspeed", "zero", 2 if stage is None else stage)
        return
    for key in [key for key in _DEEPSPEED if key in result.values]:
        result.leave_out(key, "has no effect without deepspeed")


def _text_encoders(result: Translation, known: Known) -> None:
    """sd-scripts trains CLIP-L, at learning_rate unless text_encoder_lr is set, but for network_train_unet_only."""
    if result.tool != "sd-scripts":
        return
    rates = result.values.get("text_encoder_lr")
    if rates is not None and not isinstance(rates, list):
        result.values["text_encoder_lr"] = rates = [rates]
    if not is_off(result.values.get("network_train_unet_only")):
        if rates is not None:
            result.leave_out("text_encoder_lr", "has no effect with network_train_unet_only")
    elif rates and is_off(rates):
        result.leave_out("text_encoder_lr", "zero, so text encoders stay as they are", "accepted")
    elif not rates and not is_off(result.values.get("dim_from_weights")):
        text = "trains the file's layers of the transformer; sd-scripts trains those of CLIP-L too, which stay out here"
        result.note("dim_from_weights", "note", text)
    elif not rates:
        estimated = estimates_step_size(str(result.values.get("optimizer_type", "")))
        rate = result.values.get("learning_rate", 1.0 if estimated else DEFAULTS["sd-scripts"]["learning_rate"])
        text = "CLIP-L is trained at learning_rate, as in sd-scripts without network_train_unet_only"
        result.default("text_encoder_lr", [rate], "text_encoder_lr", text)


def _alpha(result: Translation, known: Known) -> None:
    if "network_alpha" in result.values and is_off(result.values["network_alpha"]):
        rank = result.values.get("network_dim", 4 if result.tool else None)
        result.note("network_alpha", "changed", f"0 means the rank, so it is {rank}")
        if rank is None:
            result.take("network_alpha")
        else:
            result.place("network_alpha", rank, "network_alpha")


def _network_args(result: Translation, known: Known) -> None:
    """Rewrite what the LoRA takes under another name here; what it refuses it names itself."""
    if not result.tool or not isinstance(result.values.get("network_args"), list):
        return
    taken: list[str] = []
    excludes = any(str(pair).strip().startswith("exclude_patterns") for pair in result.values["network_args"])
    for pair in result.values["network_args"]:
        key, _, value = (part.strip() for part in str(pair).partition("="))
        text = ""
        if key == "include_patterns" and result.tool == "musubi-tuner":
            if excludes:
                reason = "it brings back what exclude_patterns take there, here it restricts; narrow exclude_patterns"
                result.note("network_args", "refused", f"not taken: {pair}: {reason}")
                continue
            text = "left out, it has no effect there without exclude_patterns"
        elif key == "train_blocks" and value in ("all", "single", "double"):
            other = {"single": "double", "double": "single"}.get(value)
            text = f"train_{other}_block_indices=none" if other else "left out, it is what happens"
            taken += [text] if other else []
        elif key in ("conv_dim", "conv_alpha", "verbose") or (key == "train_t5xxl" and value == "False"):
            text = "left out, it changes nothing"
        else:
            taken.append(str(pair))
        if text:
            result.note("network_args", "changed", f"{pair}: {text}")
    result.values["network_args"] = taken


def _split_qkv(result: Translation, known: Known) -> None:
    """kohya's trainers have one LoRA on each joined qkv of FLUX.1 and 2, unless sd-scripts' split_qkv is set."""
    values, arguments = result.values, result.values.get("network_args", [])
    flux = values.get("network_module") in ("networks.lora_flux", _FLUX_2)
    other = values.get("network_type", "lora") != "lora" or values.get("init_lora_weights", "default") != "default"
    if not result.tool or not flux or other or not isinstance(arguments, list):
        return
    named = {str(pair).partition("=")[0].strip() for pair in arguments}
    if not is_off(values.get("dim_from_weights")) or "split_qkv" in named:
        return
    text = "split_qkv=False is the default there: one LoRA on each joined qkv, where Tandem's default is one each"
    result.default("network_args", [*arguments, "split_qkv=False"], "network_args", text)


def _optimizer(result: Translation, known: Known) -> None:
    if result.values.get("optimizer_type") == "":
        result.values["optimizer_type"] = "AdamW"
    if not result.tool or str(result.values.get("optimizer_type")).lower() != "adafactor":
        return
    arguments = list(result.values.get("optimizer_args", []))
    relative = [a for a in arguments if a.replace(" ", "").startswith("relative_step=")]
    if not relative:
        text = f"relative_step=True is Adafactor's default in {result.tool}"
        result.default("optimizer_args", [*arguments, "relative_step=True"], "optimizer_type", text)
    elif relative[0].replace(" ", "") != "relative_step=True":
        return
    for key in ("learning_rate", "lr_scheduler"):
        if key in result.values:
            result.leave_out(key, "Adafactor with relative_step=True computes its own rate")


def _schedule(result: Translation, known: Known) -> None:
    for key in ("lr_warmup_steps", "lr_decay_steps"):
        text = result.values.get(key)
        if isinstance(text, str) and text.endswith("%"):
            try:
                result.values[key] = float(text[:-1]) / 100
            except ValueError:
                continue  # the schema says what it expected
            result.note(key, "changed", f"{text} is {result.values[key]:g}")
    if result.tool and "lr_decay_steps" in result.values and result.values.get("lr_scheduler") != "warmup_stable_decay":
        result.leave_out("lr_decay_steps", "has no effect there without warmup_stable_decay")
    if result.tool == "musubi-tuner" and result.values.get("lr_scheduler") == "rex":
        result.values.setdefault("lr_scheduler_min_lr_ratio", 0.01)  # RexLR's there
        result.note("lr_scheduler", "note", "rex falls as in its paper, z / (0.5 + 0.5 z); there z / (0.1 + 0.9 z)")
    if result.values.get("lr_scheduler") == "cosine_with_min_lr":
        result.values["lr_scheduler"] = "cosine"
        result.note("lr_scheduler", "changed", "cosine, with lr_scheduler_min_lr_ratio as its floor")


def _huber(result: Translation, known: Known) -> None:
    if result.values.get("loss_type", "l2") not in ("huber", "smooth_l1"):
        for key in [key for key in ("huber_scale", "huber_schedule") if key in result.values]:
            result.leave_out(key, "has no effect with this loss_type")
    elif result.tool == "sd-scripts" and "huber_schedule" not in result.values:
        result.note("huber_schedule", "note", "unset it is snr, which does not run for FLUX; here it is constant")


def _weighting(result: Translation, known: Known) -> None:
    """sd-scripts weighs the loss with sigma_scaled only, both trainers shape the density with sigma only."""
    scheme = result.values.get("weighting_scheme")
    if not result.tool or scheme is None:
        return
    sampling = result.values.get("timestep_sampling", "sigma")
    weighs = scheme in ("sigma_sqrt", "cosmap")
    if (weighs and result.tool == "sd-scripts") or (scheme in ("logit_normal", "mode") and sampling != "sigma"):
        result.values["weighting_scheme"] = "none"
        reason = "the raw prediction" if weighs else f"timestep_sampling = {sampling}"
        result.note("weighting_scheme", "changed", f"{scheme} has no effect there with {reason}, so it is none")


def _compile(result: Translation, known: Known) -> None:
    for name in ("compile_backend", "compile_mode"):
        if name in result.values and is_off(result.values.get("compile")):
            result.leave_out(name, "has no effect without compile")
    backend = result.values.get("dynamo_backend")
    if not isinstance(backend, str):
        return
    result.values["dynamo_backend"] = backend.lower()
    if backend.lower() == "no":
        result.take("dynamo_backend")
        if not is_off(result.values.get("compile")):  # musubi-tuner compiles by either
            return
        if not is_off(result.values.get("torch_compile")):
            result.note("torch_compile", "changed", "dynamo_backend = no turns it off")
        result.note("dynamo_backend", "changed", "no is torch_compile = false")
        result.values["torch_compile"] = False
    elif result.tool == "musubi-tuner":
        result.values.setdefault("torch_compile", True)


def _fp8(result: Translation, known: Known) -> None:
    """musubi-tuner's fp8_scaled stands beside fp8_base; here it stands alone."""
    if result.tool and not is_off(result.values.get("fp8_scaled")) and "fp8_base" in result.values:
        result.leave_out("fp8_base", "fp8_scaled is set too and counts", "accepted")


def _tracking(result: Translation, known: Known) -> None:
    if result.tool and "logging_dir" in result.values and "log_with" not in result.values:
        result.default("log_with", "tensorboard", "logging_dir", "logging_dir alone means tensorboard there")


def _sampling(result: Translation, known: Known) -> None:
    for key in ("sample_every_n_steps", "sample_every_n_epochs"):
        if key in result.values and str(result.values[key]).lstrip("-").isdigit() and int(result.values[key]) <= 0:
            result.leave_out(key, "zero or less means never", "accepted")


RULES: tuple[Callable[[Translation, Known], None], ...] = (
    _deprecated,  # before model_version is read
    _model,
    _vae,
    _no_half_vae,
    _deepspeed,
    _text_encoders,  # before learning_rate becomes unet_lr
    _learning_rate,
    _alpha,
    _buckets,
    _network_args,
    _split_qkv,
    _optimizer,
    _schedule,
    _huber,
    _weighting,
    _compile,
    _fp8,
    _tracking,
    _sampling,
)
