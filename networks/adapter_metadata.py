"""alpha in diffusers' and PEFT's files: it lies not in the tensors but in a PEFT ``LoraConfig``.

diffusers writes the config's fields as JSON under the metadata key ``lora_adapter_metadata``, each field
prefixed with the model's name (``transformer.r``). PEFT itself writes ``adapter_config.json`` beside the
weights. ``r`` and ``lora_alpha`` hold for all modules but those that ``rank_pattern`` and ``alpha_pattern``
name; a pattern is a regular expression that PEFT matches as ``(.*\\.)?(pattern)$``, so a pattern for the
top-level ``proj_out`` would also catch every block's. Ours therefore begin with ``^``. A file with several
networks holds the fields of each under its own prefix (``text_encoder.r``).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from library.errors import UserError
from networks.weights import LoraWeights

ADAPTER_METADATA_KEY = "lora_adapter_metadata"


def adapter_metadata(components: Mapping[str, Mapping[str, LoraWeights]]) -> str:
    """Return the JSON that lets diffusers give every module its rank and alpha.

    Args:
        components: prefix ("transformer", "text_encoder") -> module name -> weights.
    """
    fields: dict[str, object] = {}
    for prefix, weights in components.items():
        fields |= {f"{prefix}.{key}": value for key, value in peft_config(weights).items()}
    return json.dumps(fields, indent=2, sort_keys=True)


def peft_config(weights: Mapping[str, LoraWeights]) -> dict[str, object]:
    """Return the fields of the PEFT ``LoraConfig`` of one network."""
    rank = Counter(module.rank for module in weights.values()).most_common(1)[0][0]
    alpha = Counter(module.alpha for module in weights.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {_exactly(name): m.rank for name, m in weights.items() if m.rank != rank},
        "alpha_pattern": {_exactly(name): m.alpha for name, m in weights.items() if m.alpha != alpha},
        "target_modules": sorted(weights),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }


@dataclass(frozen=True)
class AlphaTable:
    """The alphas a PEFT config states.

    Attributes:
        alpha: ``lora_alpha``; None: each module's rank.
        patterns: ``alpha_pattern``, regular expression -> alpha; the first that matches counts.
        rank_stabilised: ``use_rslora``: the scale is alpha / sqrt(rank).
    """

    alpha: float | None
    patterns: Mapping[str, float]
    rank_stabilised: bool

    def alpha_of(self, name: str, rank: int) -> float:
        """Return the alpha with which alpha / rank is the module's scale."""
        matching = (a for pattern, a in self.patterns.items() if re.match(rf"(.*\.)?({pattern})$", name))
        alpha = float(next(matching, rank if self.alpha is None else self.alpha))
        return alpha * rank**0.5 if self.rank_stabilised else alpha


def read_alphas(path: Path, metadata: Mapping[str, str], prefix: str, dora: bool = False) -> AlphaTable | None:
    """Return the alphas stated by the metadata or by the ``adapter_config.json`` beside a PEFT file, if any.

    Raises:
        UserError: the JSON is broken, or the adapter is a DoRA and ``dora`` is not set.
    """
    beside = path.with_name("adapter_config.json")
    if text := metadata.get(ADAPTER_METADATA_KEY):
        source = f"{path}: metadata {ADAPTER_METADATA_KEY}"
    elif path.name == "adapter_model.safetensors" and beside.is_file():
        source, text = str(beside), beside.read_text(encoding="utf-8")
    else:
        return None
    try:
        fields = json.loads(text)
        config = {key.removeprefix(f"{prefix}."): value for key, value in fields.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{source}: not a JSON object ({error}); save the LoRA again") from None
    if config.get("use_dora") and not dora:
        raise UserError(f"{source}: this is a DoRA, which is more than a LoRA; it cannot be read")
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    try:
        numbers = [*patterns.values()] if alpha is None else [alpha, *patterns.values()]
        sound = all(math.isfinite(number) for number in numbers) and all(re.compile(pattern) for pattern in patterns)
    except (TypeError, AttributeError, OverflowError, re.error):
        sound = False
    if not sound:
        raise UserError(f"{source}: lora_alpha or alpha_pattern are no finite numbers; save the LoRA again")
    return AlphaTable(alpha, patterns, bool(config.get("use_rslora")))


def _exactly(name: str) -> str:
    """Return a pattern that PEFT matches with this module alone; CLIP's lie below ``text_model`` in older versions."""
    return ("^(text_model\\.)?" if name.startswith("encoder.layers.") else "^") + re.escape(name)
