"""What LoRAs call the layers of the families, by the names that tests have for the tables."""

from __future__ import annotations

from library.models.registry import lora_targets

_TARGETS = lora_targets()
ERNIE_IMAGE_TARGETS = _TARGETS["ernie_image"]
FLUX_TARGETS = _TARGETS["flux"]
FLUX2_TARGETS = _TARGETS["flux2_klein"]
FLUX3_TARGETS, FLUX3_EDIT_TARGETS = _TARGETS["flux3_klein"], _TARGETS["flux3_klein_edit"]
KREA2_TARGETS = _TARGETS["krea2"]
QWEN_TARGETS = _TARGETS["qwen_image"]
QWEN_21_TARGETS = _TARGETS["qwen_image_21"]
Z_IMAGE_TARGETS = _TARGETS["z_image"]
FLUX_KEYS = FLUX_TARGETS.keys
