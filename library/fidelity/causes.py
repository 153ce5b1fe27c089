"""What can be wrong with a deployment, what helps, and one that was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CAUSES = {
    "weights": "rounding of the weights to their format",
    "wrong_base": "the deployed file is not this model",
    "other_block": "blocks of another fine-tune",
    "other_lora": "an unknown LoRA is merged into the file",
    "wrong_scale": "tensors with a wrong scale",
    "permuted": "weights in another order",
    "exchanged": "layers that hold another layer's weights",
    "zeroed": "tensors, or parts of them, that are zero",
    "clipped": "large weights clipped",
    "rounding_mode": "weights not rounded to nearest",
    "mixed_formats": "some weights in a coarser format than the rest",
    "ruined_layer": "a damaged tensor",
    "small_in_fp8": "norms or biases in fp8",
    "embedders_in_fp8": "embedders, modulation or the final layer in low precision",
    "modulation_in_fp8": "modulation in low precision",
    "sensitive_layer": "a layer that does not bear its format",
    "delta_lost": "the LoRA's update was rounded away in the merge",
    "lora_missing": "the LoRA is missing from layers of the file",
    "lora_twice": "the LoRA is in the file already, and runs beside it too",
    "strength": "the LoRA runs at another strength",
    "lora_without": "a part of the LoRA is missing",
    "merge": "rounding the LoRA into the weights",
    "activations": "rounding of activations in products",
    "activation_scale": "a scale of the activations that does not fit them",
    "attention": "attention in fp8",
    "text": "other text encoders, or text encoders in low precision",
    "vae": "another VAE, or the VAE in low precision",
    "configs": "the deployed folder's configs are not the reference's",
    "guidance": "another guidance",
    "shift": "another schedule of the sampler (shift)",
    "steps": "another number of sampling steps",
    "timestep": "timesteps in low precision",
    "positions": "position tables (RoPE) in low precision",
    "mask_invert": "the mask is the wrong way round",
    "mask_grow": "the mask is grown",
    "mask_snap": "the mask is grown to whole latent cells",
    "mask_blur": "the mask is blurred",
    "blank": "the region is blanked with another colour",
    "latents_dtype": "the latents of the picture that is given are rounded",
    "crop_multiple": "the picture is cropped",
    "paste": "the known region is pasted over the model's own",
}
_UNMERGED = (
    "keep the LoRA beside the weights (ComfyUI: Load LoRA (Bypass), saved in ComfyUI's own names), or merge with "
    "tools/merge_lora.py --rounding compensated"
)
REMEDIES = {
    "weights": "refit the LoRA to this file (tools/refit_lora.py), or keep the first layers of the table in bf16",
    "wrong_base": "deploy the file that was made from the reference, or train on the one you deploy",
    "other_block": "deploy a file made from the reference alone (tools/quantize_model.py); parts of this one come from "
    "another model, as after a block-weighted merge",
    "other_lora": "make the file from the base without that LoRA (tools/quantize_model.py), or train on the file as it "
    "is; tools/extract_lora.py writes the difference down",
    "wrong_scale": "make the file again with tools/quantize_model.py; factors and weights do not belong together",
    "permuted": "the program that made the file converts this architecture wrongly; make it with "
    "tools/quantize_model.py",
    "exchanged": "the program that made the file confuses layers' names; make it with tools/quantize_model.py",
    "zeroed": "make or download the file again; the named tensors were lost",
    "clipped": "make the file with scales of the largest number (tools/quantize_model.py, a scale a row); clipping "
    "outliers costs more than it gains",
    "rounding_mode": "make the file with tools/quantize_model.py, which rounds to nearest and keeps subnormals; the "
    "program that made this one cuts bits off",
    "mixed_formats": "make the named layers in the format of the rest (tools/quantize_model.py, e4m3fn), or keep them "
    "in bf16 (--exclude_pattern)",
    "ruined_layer": "make or download the file again; the named tensors are not the reference's",
    "small_in_fp8": "keep norms and biases in bf16, as tools/quantize_model.py does: they are under 0.1 % of the file",
    "embedders_in_fp8": "keep them in bf16 (tools/quantize_model.py does by default, modulation with --exclude): they "
    "cost more than they save",
    "modulation_in_fp8": "where the file may grow, keep it in bf16 (tools/quantize_model.py --exclude "
    "embedders,modulation,final)",
    "sensitive_layer": "keep the named layers in bf16 (tools/quantize_model.py --exclude_pattern)",
    "delta_lost": _UNMERGED,
    "lora_missing": "merge again with tools/merge_lora.py, which refuses what does not fit, or keep the LoRA beside "
    "the weights; the program that merged does not know these layers' names",
    "lora_twice": "load the file without the LoRA (--deploy_merged describes that), or the LoRA beside the base",
    "strength": "set the strength to the one it was trained for; one minute's test: 1 / retention",
    "merge": _UNMERGED,
    "activations": "multiply in bf16 (in ComfyUI a plain cast without --fast fp8_matrix_mult, or a file that says "
    "full_precision_matrix_mult, as tools/quantize_model.py makes them; int8 files are always multiplied in int8), or "
    "train with quantised_activations",
    "activation_scale": "use dynamic scales, or calibrate the input scales again on images like yours",
    "lora_without": "load the whole LoRA: a loader that prints 'key not loaded' drops layers; convert the file to its "
    "names (tools/convert_lora.py), and load the part for the text encoders too",
    "attention": "use attention in bf16 (no SageAttention, no fp8 FlashAttention 3)",
    "text": "use the text encoder files of training, in bf16 or fp16, or with scales in blocks",
    "vae": "use the VAE file of training in bf16: it is 0.2 GB",
    "configs": "copy the named keys from the reference's config.json",
    "guidance": "set the guidance to the reference's, and let no node switch it off (FluxDisableGuidance)",
    "shift": "use the scheduler of the model's own folder; in ComfyUI ModelSamplingFlux with its published shifts",
    "steps": "sample with as many steps as the reference",
    "timestep": "carry timesteps in fp32",
    "positions": "compute cosines and sines in fp32",
    "mask_invert": "invert the mask: white is filled",
    "mask_grow": "give the mask as it was drawn, without growing it, or train with masks grown alike",
    "mask_snap": "give the mask in pixels: the model sees it in pixels, not in latent cells",
    "mask_blur": "give a hard mask, and blend afterwards, in the finished picture",
    "blank": "blank the region with the colour of training (inpaint_blank; FLUX Fill: grey)",
    "latents_dtype": "keep the latents of the given picture in fp32 or bf16",
    "crop_multiple": "give pictures whose sides are multiples already, or paste the result back at its place",
    "paste": "leave the model's own pixels near the border, or blend over two latent cells",
}


@dataclass(frozen=True)
class Finding:
    """A cause that was found.

    Attributes:
        cause: key of ``CAUSES``. share: of the squared error, as far as causes add up.
        layers: that show it; empty where it is not about layers.
        evidence: the numbers that speak for it, in words.
    """

    cause: str
    share: float
    layers: tuple[str, ...]
    evidence: str

    def sentence(self) -> str:
        """Return cause, evidence and remedy in words."""
        remedy = REMEDIES[self.cause]
        return f"{CAUSES[self.cause]}: {self.evidence}. {remedy[0].upper()}{remedy[1:]}."

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"title": CAUSES[self.cause], "remedy": REMEDIES[self.cause]}
