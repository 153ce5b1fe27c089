"""What a LoRA file says about itself, in the keys other tools read.

* ``ss_*``: training facts as kohya's sd-scripts writes them, every value as a string.
* ``sshs_model_hash``, ``sshs_legacy_hash``: sd-webui's file hashes, as sd-scripts precalculates them:
  SHA-256 of the tensor data; and the first 8 digits of SHA-256 over 64 KiB at offset 1 MiB of the file with
  ``ss_*`` alone.
* ``modelspec.*``: Stability AI's ModelSpec 1.0.1 (https://github.com/Stability-AI/ModelSpec).
* ``tandem.*``: version, the base's fingerprint and precision, that of text encoders that were trained, the
  run's config as JSON.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from datetime import UTC, datetime

import safetensors.torch
from torch import Tensor

_KOHYA_MODULE = "networks.lora_flux"  # what readers of kohya files look for; the weights mean the same
_KOHYA_BASE_VERSION = "flux1"


def build_metadata(
    facts: Mapping[str, object],
    *,
    title: str,
    timestamp: float,
    architecture: str = "flux-1-dev",
    resolution: tuple[int, int] | None = (1024, 1024),
    implementation: str = "https://github.com/black-forest-labs/flux",
    description: str | None = None,
    author: str | None = None,
    base_fingerprint: str | None = None,
    text_encoder_fingerprint: str | None = None,
    base_precision: str | None = None,
    attention: str | None = None,
    config_json: str | None = None,
    version: str = "",
) -> dict[str, str]:
    """Return the metadata strings of a LoRA file, without the hashes that :func:`hash_metadata` adds.

    Args:
        facts: training facts under kohya's names without ``ss_`` (``learning_rate``, ``network_dim``,
            ``network_alpha``, ``network_args``, ``optimizer``, ``num_train_images``, ``steps``, ``epoch``).
        title: the model's title; kohya takes the output name.
        timestamp: seconds since 1970 of this save.
        architecture: ModelSpec's name of the base, "flux-1-dev" or "flux-1-schnell".
        resolution: width and height trained at, in pixels; None for what has no pixels.
        base_fingerprint, text_encoder_fingerprint, base_precision, attention, config_json, version: for ``tandem.*``.
    """
    ss = {
        "network_module": _KOHYA_MODULE,
        "base_model_version": _KOHYA_BASE_VERSION,
        "output_name": title,
        **facts,
    }
    metadata = {f"ss_{key}": str(value) for key, value in ss.items()}
    spec = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{architecture}/lora",
        "implementation": implementation,
        "title": title,
        "resolution": f"{resolution[0]}x{resolution[1]}" if resolution else None,
        "date": datetime.fromtimestamp(int(timestamp), tz=UTC).isoformat(),
        "description": description,
        "author": author,
    }
    metadata |= {f"modelspec.{key}": value for key, value in spec.items() if value is not None}
    own = {
        "version": version,
        "base_fingerprint": base_fingerprint,
        "text_encoder_fingerprint": text_encoder_fingerprint,
        "base_precision": base_precision,
        "attention": attention,
        "config": config_json,
    }
    return metadata | {f"tandem.{key}": value for key, value in own.items() if value}


def base_mismatch(metadata: Mapping[str, str], here: str) -> str | None:
    """Return a remark if a LoRA's metadata name other base weights than those with the fingerprint ``here``.

    A LoRA that was retargeted to an fp8 file corrects the rounding of that file: beside another one it is worse than
    the LoRA it was made from.
    """
    meant = metadata.get("tandem.base_fingerprint")
    if not meant or meant == here:
        return None
    if "tandem.retargeted" in metadata:
        name = metadata.get("tandem.base_name", "an fp8 file")
        return f"fitted to {name} ({meant}), this base is {here}; retarget the original LoRA to this one"
    return f"trained on base {meant}, this one is {here} (other weights or file)"


def hash_metadata(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the hash entries for ``tensors`` that will be saved with ``metadata``."""
    training = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    data = safetensors.torch.save({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, training or None)
    (header,) = struct.unpack("<Q", data[:8])
    digest = hashlib.sha256(memoryview(data)[8 + header :]).hexdigest()
    legacy = hashlib.sha256(data[0x100000 : 0x100000 + 0x10000]).hexdigest()[:8]
    return {"sshs_model_hash": digest, "sshs_legacy_hash": legacy, "modelspec.hash_sha256": f"0x{digest}"}
