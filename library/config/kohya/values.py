"""What unset keys and single values mean in kohya's two trainers, where that is not what they mean here.

Data for ``library.config.kohya.translate``, beside the flags themselves (``kohya_flags``). The defaults are those of
the argument parsers of sd-scripts 48d368f and musubi-tuner 30c658c.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from library.config.kohya.flags import Tool

_BOTH: Mapping[str, Any] = {
    "network_dim": 4,
    "network_alpha": 1.0,
    "learning_rate": 2e-6,
    "max_train_steps": 1600,
    "max_grad_norm": 1.0,
    "optimizer_type": "AdamW",
    "lr_scheduler": "constant",
    "timestep_sampling": "sigma",
    "sigmoid_scale": 1.0,
    "weighting_scheme": "none",
    "save_format": "kohya",
}
DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "sd-scripts": {
        **_BOTH,
        "mixed_precision": "no",
        "discrete_flow_shift": 3.0,
        "guidance_scale": 3.5,
        "loss_type": "l2",
        "huber_c": 0.1,
        "prior_loss_weight": 1.0,
    },
    "musubi-tuner": {**_BOTH, "discrete_flow_shift": 1.0, "guidance_scale": 1.0},
}  # what an unset key means there, where training or its result depends on it (their parsers' defaults)

SAME_AS: Mapping[tuple[str, str], str] = {  # (key, value there) -> value here
    ("weighting_scheme", "uniform"): "none",
    ("save_precision", "float"): "fp32",
    ("network_module", "networks.lora_flux.py"): "networks.lora_flux",
}

REFUSED_VALUES: Mapping[tuple[str, str], str] = {  # refused unless the schema takes the value
    ("loss_type", "l1"): "use smooth_l1 with a small huber_c, which is near it",
    ("lr_scheduler", "inverse_sqrt"): "use cosine or polynomial",
    ("lr_scheduler", "piecewise_constant"): "use warmup_stable_decay",
    ("lr_scheduler", "reduce_lr_on_plateau"): "use cosine",
    ("lr_scheduler", "cosine_warmup_with_min_lr"): "use cosine with lr_scheduler_min_lr_ratio",
    ("lr_scheduler", "adafactor"): "it comes with Adafactor's relative_step=True only; use constant_with_warmup",
    ("model_type", "chroma"): "Chroma is not a model family of this version; train FLUX.1",
    ("timestep_sampling", "logsnr"): "use sigmoid, which is logSNR at mean 0 and standard deviation 2",
    ("timestep_sampling", "flux2_shift"): "it belongs to FLUX.2; use flux_shift or shift",
    ("timestep_sampling", "ideogram4_shift"): "it belongs to Ideogram; use flux_shift or shift",
    ("timestep_sampling", "krea2_shift"): "it belongs to Krea; use flux_shift or shift",
    ("timestep_sampling", "qinglong_flux"): "use flux_shift",
    ("timestep_sampling", "qinglong_qwen"): "use qwen_shift",
}
