r"""What an adapter file says about itself, in the keys other tools read, and where PEFT's files keep alpha.

* ``ss_*``: training facts as kohya's sd-scripts writes them, every value as a string.
* ``sshs_model_hash``, ``sshs_legacy_hash``: sd-webui's file hashes, as sd-scripts precalculates them:
  SHA-256 of the tensor data; and the first 8 digits of SHA-256 over 64 KiB at offset 1 MiB of the file with
  ``ss_*`` alone.
* ``modelspec.*``: Stability AI's ModelSpec 1.0.1 (https://github.com/Stability-AI/ModelSpec).
* ``tandem.*``: version, the base's fingerprint and precision, that of text encoders that were trained, what
  a fill model's regions were blanked with (``inpaint_blank``), guidance and, where it is not the model's own, T5's
  tokens a caption (``guidance_scale``, ``t5xxl_max_token_length``), the run's config as JSON.
* ``ot_config``: OneTrainer's configuration as JSON, where its user had it written.
* ``lora_adapter_metadata``: diffusers keeps alpha in no tensor but in the fields of a PEFT ``LoraConfig``, as JSON,
  each field prefixed with the model's name (``transformer.r``, ``text_encoder.r``). Nothing but diffusers reads it, so
  in files for image models alpha is the rank there, and the scale in B.
* ``tandem.trained_alpha``: ``lora_alpha`` and ``alpha_pattern`` of the training in the same form, where they were
  others. ``dim_from_weights`` goes on with them; nobody needs them to use the file.

PEFT itself keeps an adapter as a folder: ``adapter_model.safetensors`` and beside it the config,
``adapter_config.json``. Language models' LoRAs are saved so, because what loads them (peft, transformers, vLLM) takes
such a folder; the weights' file alone is enough for us, since its metadata have the alphas, too.

``r`` and ``lora_alpha`` hold for all modules but those that ``rank_pattern`` and ``alpha_pattern`` name; a pattern is a
regular expression that PEFT matches as ``(.*\.)?(pattern)$``, so a pattern for the top-level ``proj_out`` would also
catch every block's. Ours therefore begin with ``^``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import safetensors.torch
from torch import Tensor

from library.config.model_types import BLANKS, Blank
from library.errors import UserError
from library.files import read_text, write_text
from library.models.layer_names import LoraTargets
from library.safetensors_io import read_entries
from networks.files.weights import AdapterWeights, TokenRowWeights


def build_metadata(
    facts: Mapping[str, object],
    targets: LoraTargets,
    *,
    title: str,
    timestamp: float,
    architecture: str | None = None,
    resolution: tuple[int, int] | None = None,
    spec: Mapping[str, str | None] | None = None,
    **tandem: str | None,
) -> dict[str, str]:
    """Return the metadata strings of a LoRA file, without the hashes that :func:`hash_metadata` adds.

    Args:
        facts: training facts under kohya's names without ``ss_`` (``learning_rate``, ``network_dim``,
            ``network_alpha``, ``network_args``, ``optimizer``, ``num_train_images``, ``steps``, ``epoch``).
        targets: the family's row.
        title: the model's title; kohya takes the output name.
        timestamp: seconds since 1970 of this save.
        architecture: ModelSpec's name of the base, "flux-1-dev" or "flux-1-schnell"; None: the family's.
        resolution: width and height trained at, in pixels; None for what has no pixels.
        spec: further fields of ModelSpec (``description``, ``author``, ``license``), or others instead of those above;
            None and "" are left out.
        tandem: what stands under ``tandem.*`` (``base_fingerprint``, ``config``), None and "" left out.
    """
    ss = {
        "network_module": targets.kohya_module,
        "base_model_version": targets.kohya_base,
        "output_name": title,
        **facts,
    }
    metadata = {f"ss_{key}": str(value) for key, value in ss.items()}
    fields = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{architecture or targets.architecture}/lora",
        "implementation": targets.implementation,
        "title": title,
        "resolution": f"{resolution[0]}x{resolution[1]}" if resolution else None,
        "date": datetime.fromtimestamp(int(timestamp), tz=UTC).isoformat(),
        **(spec or {}),
    }
    metadata |= {f"modelspec.{key}": value for key, value in fields.items() if value}
    return metadata | {f"tandem.{key}": value for key, value in tandem.items() if value}


def base_mismatch(metadata: Mapping[str, str], fingerprint: str, merged: str = "") -> str | None:
    """Return a remark if a LoRA's metadata name other base weights than those with this ``fingerprint``.

    ``merged`` are the LoRAs that are merged into those, as ``tandem.base_weights`` has them.

    A LoRA that was refitted to an fp8 file corrects the rounding of that file: beside another one it is worse than
    the LoRA it was made from.
    """
    if (under := metadata.get("tandem.base_weights", "")) != merged and under:
        return f"trained on a base with LoRAs merged into it, {under}; merge them too"
    trained_on = metadata.get("tandem.base_fingerprint")
    if not trained_on or trained_on == fingerprint:
        return None
    if "tandem.refitted" in metadata:
        name = metadata.get("tandem.base_name", "an fp8 file")
        return f"fitted to {name} ({trained_on}), this base is {fingerprint}; refit the original LoRA to this one"
    name = f" ({metadata['ss_sd_model_name']})" if metadata.get("ss_sd_model_name") else ""
    return f"trained on base {trained_on}{name}, this one is {fingerprint} (other weights or file)"


@dataclass(frozen=True)
class TrainedOn:
    """What the model was given in training, as far as LoRAs' files say it; each thing by the first that says it.

    Attributes:
        blanks: under a fill model's masks; of several the first is the first subset's. Empty: it does not say.
        guidance: of the guidance input; None: it does not say.
        t5_tokens: that T5 was given of a caption; None: it does not say, or as many as the model has by itself.
        names: of the files.
        remarks: a line for each entry that cannot be read, or says another thing than the one that is taken.
    """

    blanks: tuple[Blank, ...] = ()
    guidance: float | None = None
    t5_tokens: int | None = None
    names: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Self:
        """Return what the files ``paths`` say; their headers are read."""
        said: dict[str, Any] = {}
        remarks: list[str] = []
        for path in reversed(paths):
            found = trained_on(read_entries([weight_file(path)])[1])
            said |= {name: value for name, value in vars(found).items() if value}
            remarks += [f"{path.name}: {each}" for each in found.remarks]
        return cls(**said | {"names": tuple(path.name for path in paths), "remarks": tuple(remarks)})


def trained_on(metadata: Mapping[str, str]) -> TrainedOn:
    """Return what a LoRA's ``metadata`` say of its training: Tandem's own, sd-scripts', musubi-tuner's, OneTrainer's.

    OneTrainer blanks with grey (MGDS 'GenerateMaskedConditioningImage'), whatever it writes. ai-toolkit and SimpleTuner
    write none of these.
    """

    def said(text: str, *keys: str) -> Any:
        try:
            return functools.reduce(operator.getitem, keys, json.loads(metadata.get(text, "")))
        except (ValueError, TypeError, LookupError, RecursionError):
            return None

    words = metadata.get("tandem.inpaint_blank", "grey" if "ot_revision" in metadata else "").split()
    known = ", ".join(BLANKS)
    unknown = [f"tandem.inpaint_blank {word[:40]!r}: none of {known}; left out" for word in words if word not in BLANKS]
    guidance, about_guidance = _first_number(
        {
            "tandem.guidance_scale": metadata.get("tandem.guidance_scale"),
            "ss_guidance_scale": metadata.get("ss_guidance_scale"),
            "ot_config guidance_scale": said("ot_config", "transformer", "guidance_scale"),
        }
    )
    length, about_length = _first_number(
        {
            "tandem.t5xxl_max_token_length": metadata.get("tandem.t5xxl_max_token_length"),
            "tandem.settings t5xxl_max_token_length": said("tandem.settings", "t5xxl_max_token_length"),
            "ot_config text_encoder_2_sequence_length": said("ot_config", "text_encoder_2_sequence_length"),
        }
    )
    return TrainedOn(
        tuple(blank for word in words for blank in BLANKS if blank == word),
        guidance,
        int(length or 0) or None,
        remarks=(*unknown, *about_guidance, *about_length),
    )


def _first_number(said: Mapping[str, object]) -> tuple[float | None, list[str]]:
    """Return the first number of the entries ``said``, and a line for each that is none, or another.

    sd-scripts writes "None" for what is not set.
    """
    given = {key: value for key, value in said.items() if value not in (None, "", "None")}
    numbers = {key: number for key, value in given.items() if (number := _number(value)) is not None}
    remarks = [f"{key} {str(given[key])[:40]!r}: no number; left out" for key in given.keys() - numbers.keys()]
    if not numbers:
        return None, remarks
    (first, taken), *others = numbers.items()
    remarks += [f"{key} says {other:g}, {first} {taken:g}, which is taken" for key, other in others if other != taken]
    return taken, remarks


def _number(value: object) -> float | None:
    """Return a number that a stranger's file has, or its text; None for anything else."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and number >= 0 else None


def hash_metadata(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the hash entries for ``tensors`` that will be saved with ``metadata``."""
    training = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    data = safetensors.torch.save({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, training or None)
    (header,) = struct.unpack("<Q", data[:8])
    digest = hashlib.sha256(memoryview(data)[8 + header :]).hexdigest()
    legacy = hashlib.sha256(data[0x100000 : 0x100000 + 0x10000]).hexdigest()[:8]
    return {"sshs_model_hash": digest, "sshs_legacy_hash": legacy, "modelspec.hash_sha256": f"0x{digest}"}


ADAPTER_METADATA_KEY = "lora_adapter_metadata"
TRAINED_ALPHA_KEY = "tandem.trained_alpha"
BASE_MODEL = "tandem.base_model"  # the base's name, where it is known
TOKENS = "trainable_token_indices"
_PEFT_WEIGHTS = "adapter_model.safetensors"


def adapter_metadata(components: Mapping[str, Mapping[str, AdapterWeights]], folded: bool = False) -> str:
    """Return the JSON that lets diffusers give every module its rank and alpha.

    Args:
        components: prefix ("transformer", "text_encoder") -> module name -> weights.
        folded: alpha is the rank, as the scale is in B.
    """
    fields: dict[str, object] = {}
    for prefix, weights in components.items():
        fields |= {f"{prefix}.{key}": value for key, value in peft_config(weights, folded).items()}
    return json.dumps(fields, indent=2, sort_keys=True)


def alpha_metadata(components: Mapping[str, Mapping[str, AdapterWeights]]) -> str:
    """Return the alphas alone of :func:`adapter_metadata`, for :data:`TRAINED_ALPHA_KEY`."""
    fields = json.loads(adapter_metadata(components))
    return json.dumps({key: value for key, value in fields.items() if key.endswith(("lora_alpha", "alpha_pattern"))})


def peft_config(weights: Mapping[str, AdapterWeights], folded: bool = False) -> dict[str, object]:
    """Return the fields of the PEFT ``LoraConfig`` of one network; ``folded``: alpha is the rank."""
    of_tokens = {name: module for name, module in weights.items() if isinstance(module, TokenRowWeights)}
    tokens = {name.rpartition(".")[2]: each.tensors["token_indices"].tolist() for name, each in of_tokens.items()}
    weights = {name: module for name, module in weights.items() if name not in of_tokens}
    rank = Counter(module.rank for module in weights.values()).most_common(1)[0][0]
    alphas = {name: float(module.rank) if folded else module.alpha for name, module in weights.items()}
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {_exactly(name): m.rank for name, m in weights.items() if m.rank != rank},
        "alpha_pattern": {_exactly(name): value for name, value in alphas.items() if value != alpha},
        "target_modules": sorted(weights),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": any(module.kind == "dora" for module in weights.values()),
        "use_rslora": False,
    } | ({TOKENS: tokens if "lm_head" in tokens else next(iter(tokens.values()))} if tokens else {})


@dataclass(frozen=True)
class AlphaTable:
    """The alphas a PEFT config states.

    Attributes:
        alpha: ``lora_alpha``, LoHa's and LoKr's ``alpha``; None: each module's rank.
        patterns: ``alpha_pattern``, regular expression -> alpha; the first that matches counts.
        rank_stabilised: ``use_rslora``: the scale is alpha / sqrt(rank).
        tokens: ``trainable_token_indices``, unchecked.
        ranks: ``r`` under "", and ``rank_pattern``, unchecked.
    """

    alpha: float | None
    patterns: Mapping[str, float]
    rank_stabilised: bool
    tokens: object = None
    ranks: Mapping[str, object] = field(default_factory=dict)

    def rank_of(self, name: str) -> int | None:
        """Return the rank stated of a module, None where there is none."""
        rank = _matching(self.ranks, name, self.ranks.get(""))
        return rank if isinstance(rank, int) and rank > 0 else None

    def tokens_of(self, name: str) -> object:
        """Return the tokens of which the embedding or head called ``name`` has trained rows; a list is the former's."""
        if not isinstance(self.tokens, Mapping):
            return self.tokens
        return next((found for key, found in self.tokens.items() if f".{name}".endswith(f".{key}")), None)

    def alpha_of(self, name: str, rank: int) -> float:
        """Return the alpha with which alpha / rank is the module's scale."""
        alpha = float(_matching(self.patterns, name, rank if self.alpha is None else self.alpha))
        return alpha * rank**0.5 if self.rank_stabilised else alpha


def _matching(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return what PEFT's ``patterns`` say of a module: the first whose end it has, from a dot on."""
    return next((v for pattern, v in patterns.items() if pattern and re.match(rf"(.*\.)?({pattern})$", name)), default)


def read_alphas(path: Path, metadata: Mapping[str, str], prefix: str, dora: bool = False) -> AlphaTable | None:
    """Return the alphas stated by the metadata or by the ``adapter_config.json`` beside a PEFT file, if any.

    Raises:
        UserError: the JSON is broken, or the adapter is a DoRA and ``dora`` is not set.
    """
    beside = path.with_name("adapter_config.json")
    if text := metadata.get(ADAPTER_METADATA_KEY):
        source = f"{path}: metadata {ADAPTER_METADATA_KEY}"
    elif path.name == _PEFT_WEIGHTS and beside.is_file():
        source, text = str(beside), read_text(beside)
    else:
        return None
    return _alpha_table(source, text, prefix, dora)


def trained_alphas(path: Path, metadata: Mapping[str, str], prefix: str) -> AlphaTable | None:
    """Return the alphas that a diffusers file was trained with, if the file says so; see the module's text."""
    text = metadata.get(TRAINED_ALPHA_KEY)
    return _alpha_table(f"{path}: metadata {TRAINED_ALPHA_KEY}", text, prefix) if text else None


def _alpha_table(source: str, text: str, prefix: str, dora: bool = False) -> AlphaTable:
    try:
        config = {key.removeprefix(f"{prefix}."): value for key, value in json.loads(text).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{source}: not a JSON object ({error}); save the LoRA again") from None
    if config.get("use_dora") and not dora:
        raise UserError(f"{source}: use_dora is set, but the file has no magnitudes of a DoRA; get the whole file")
    alpha, patterns = config.get("lora_alpha", config.get("alpha")), config.get("alpha_pattern") or {}
    try:
        ranks = {**(config.get("rank_pattern") or {}), "": config.get("r")}
        numbers = [*patterns.values()] if alpha is None else [alpha, *patterns.values()]
        sound = all(map(math.isfinite, numbers)) and all(map(re.compile, (*patterns, *ranks)))
    except (TypeError, AttributeError, OverflowError, re.error):
        sound = False
    if not sound:
        raise UserError(
            f"{source}: lora_alpha, alpha_pattern or rank_pattern are no finite numbers; save the LoRA again"
        )
    return AlphaTable(alpha, patterns, bool(config.get("use_rslora")), config.get(TOKENS), ranks)


def save_peft_config(
    folder: str | Path,
    weights: Mapping[str, AdapterWeights],
    targets: LoraTargets,
    metadata: Mapping[str, str],
) -> Path:
    """Write ``adapter_config.json`` into ``folder``, made if needed; return where the weights go, beside it.

    A ``.safetensors`` file instead of a folder is the weights' file alone.
    """
    if Path(folder).suffix == ".safetensors":
        return Path(folder)
    fields = peft_config(weights) | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": metadata.get(BASE_MODEL),
        "fan_in_fan_out": targets.fan_in_fan_out,
        "inference_mode": True,
    }
    write_text(Path(folder) / "adapter_config.json", json.dumps(fields, indent=2, sort_keys=True) + "\n")
    return Path(folder) / _PEFT_WEIGHTS


def weight_file(path: Path) -> Path:
    """Return the weights' file of a LoRA, which may be a folder."""
    return path / _PEFT_WEIGHTS if path.is_dir() else path


def _exactly(name: str) -> str:
    """Return a pattern that PEFT matches with this module alone; CLIP's lie below ``text_model`` in older versions."""
    return ("^(text_model\\.)?" if name.startswith("encoder.layers.") else "^") + re.escape(name)
