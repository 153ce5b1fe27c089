"""What can be wrong with a deployment, what helps, and one that was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CAUSES = {
    "weights": "rounding of the weights to fp8",
    "wrong_base": "the deployed file is not this model in fp8",
    "wrong_scale": "weights with a wrong scale",
    "ruined_layer": "a damaged layer",
    "sensitive_layer": "a layer that does not bear fp8",
    "delta_lost": "the LoRA's update was rounded away in the merge",
    "strength": "the LoRA runs at another strength",
    "merge": "rounding the LoRA into the weights",
    "activations": "rounding of activations to fp8",
    "activation_scale": "a scale of the activations that does not fit them",
    "text": "the text encoder in low precision",
    "vae": "the VAE in low precision",
    "timestep": "timesteps in low precision",
    "positions": "position tables (RoPE) in low precision",
    "paste": "known pixels pasted over the model's own",
}
REMEDIES = {
    "weights": "refit the LoRA to this file (tools/refit_lora.py), or keep the first layers of the table in bf16",
    "wrong_base": "deploy the fp8 file that was made from the reference, or train on the one you deploy",
    "wrong_scale": "make the file again with tools/quantize_model.py; its scales do not belong to its weights",
    "ruined_layer": "make or download the file again; the named layers are not the reference's",
    "sensitive_layer": "keep the named layers in bf16 (tools/quantize_model.py --exclude_pattern)",
    "delta_lost": "keep the LoRA beside the weights, or merge with tools/merge_lora.py --rounding compensated",
    "strength": "set the strength to the one it was trained for; one minute's test: 1 / retention",
    "merge": "keep the LoRA beside the weights, or merge with tools/merge_lora.py --rounding compensated",
    "activations": "multiply in bf16 (in ComfyUI without --fast fp8_matrix_mult), or train with fp8_activations",
    "activation_scale": "use dynamic scales, or calibrate the input scales again on images like yours",
    "text": "run the text encoder in bf16, or with scales in blocks",
    "vae": "run the VAE in bf16: it is 0.2 GB",
    "timestep": "carry timesteps in fp32",
    "positions": "compute cosines and sines in fp32",
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
