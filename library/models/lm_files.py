"""From a folder with a published language model to a ``TransformerLM``, and back to transformers' format.

Four layouts are told apart by what lies in the folder:

- ``config.json`` with safetensors (one file or shards): transformers' format;
- ``config.json`` with ``pytorch_model.bin`` (one file or shards): the same, where a publisher offers no safetensors;
- ``params.json`` with ``consolidated.00.pth``, ``consolidated.01.pth``, ...: Meta's;
- ``hparams.json`` with ``model.ckpt.index``: OpenAI's GPT-2.

All are read tensor by tensor into a model on the meta device (``library.models.weights``): the peak is the model and
one tensor, whatever the layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from library.errors import UserError
from library.files import shard_names, write_text
from library.models.lm_config import LMConfig, config_from_hf, config_to_hf, gpt2
from library.models.lm_key_maps import gpt2_names, hf_weights, llama_names, meta_weights, openai_weights
from library.models.lm_sources import TorchFiles
from library.models.tensorflow_index import TensorFlowFiles
from library.models.transformer_lm import TransformerLM, resize_vocabulary
from library.models.weights import KeyMap, Piece, WeightFiles, load_into, read_config
from library.nn.rope import Llama31Scaling
from library.precision.loading import Fp8Loading
from library.safetensors_stream import stream_safetensors

_TIED_ROWS = 1024  # compared to tell a head that repeats the embedding; two trained matrices differ in every row


def load_lm(
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    fp8: Fp8Loading | None = None,
    pad_vocabulary_to: int | None = None,
) -> TransformerLM:
    """Return the language model in ``folder``, frozen and in eval mode.

    Args:
        folder: in one of the layouts above.
        dtype, device: of the weights.
        fp8: which linear weights become fp8, and how they compute; what a file holds in fp8 stays so.
        pad_vocabulary_to: pad embedding and head to a multiple of so many rows, 64 for fast products.

    Raises:
        UserError: the layout is none of these, a file is missing or damaged, or the architecture is another one.
    """
    config, weights, key_map = open_lm(Path(folder).expanduser())
    placing = fp8 if fp8 is not None else Fp8Loading()
    model = cast(TransformerLM, load_into(lambda: TransformerLM(config), weights, key_map, dtype, device, fp8=placing))
    if pad_vocabulary_to is not None:
        resize_vocabulary(model, config.padded(pad_vocabulary_to))
    return model


def open_lm(folder: Path) -> tuple[LMConfig, WeightFiles, KeyMap]:
    """Return a model's configuration, its weights (not read yet) and where each parameter lies in them.

    Raises:
        UserError: as :func:`load_lm`.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the folder of a GPT-2 or Llama model")
    if (folder / "config.json").is_file():
        config = config_from_hf(read_config(folder))
        return config, *hf_weights(_hf_files(folder), config)
    if (folder / "params.json").is_file():
        files, shards = _meta_files(folder)
        config = _meta_config(read_config(folder, "params.json"), files, shards)
        return config, *meta_weights(files, config, shards)
    if indices := sorted(folder.glob("*.index")):
        config = _openai_config(read_config(folder, "hparams.json"))
        return config, *openai_weights(TensorFlowFiles(indices[-1]), config)
    raise UserError(
        f"{folder}: neither config.json (transformers) nor params.json (Meta) nor a TensorFlow .index file; "
        "give the folder of a GPT-2 or Llama model"
    )


def export_hf(
    model: TransformerLM,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``model`` in transformers' format, ``config.json`` and ``model.safetensors``; return the folder.

    Padding rows are cut off. One tensor at a time is converted.

    Args:
        model: with weights that are not fp8.
        folder: made if needed.
        dtype: of the file; default: each weight's own.
        weights: its parameters by name, where the model itself holds only parts of them.

    Raises:
        UserError: the model holds fp8 weights, or the folder cannot be written.
    """
    folder = Path(folder)
    state = dict(weights or model.named_parameters())
    if any(tensor.dtype.itemsize == 1 for tensor in state.values()):
        raise UserError("a model with fp8 weights is not exported; load it without fp8 first")
    plan = _export_plan(model.config)
    layout = {}
    for name, (ours, start, stop, transposed) in plan.items():
        shape = (stop - start, *state[ours].shape[1:])
        layout[name] = (dtype or state[ours].dtype, shape[::-1] if transposed else shape)

    def produce(name: str) -> Tensor:
        ours, start, stop, transposed = plan[name]
        rows = state[ours].detach()[start:stop].to(layout[name][0])
        return rows.t() if transposed else rows

    stream_safetensors(folder / "model.safetensors", layout, produce, {"format": "pt"})
    stored = str(layout[next(iter(layout))][0]).removeprefix("torch.")
    config = config_to_hf(model.config) | {"torch_dtype": stored}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return folder


def _export_plan(config: LMConfig) -> dict[str, tuple[str, int, int, bool]]:
    """Return transformers' name -> (ours, first row, end row, transposed)."""
    plan: dict[str, tuple[str, int, int, bool]] = {}
    if config.family == "llama":
        for ours, parts in llama_names(config):
            start = 0
            for name, rows in parts:
                plan[name] = (ours, start, start + rows, False)
                start += rows
        return plan
    counts = {
        "attention.qkv": 3 * config.width,
        "feed_forward.up": config.hidden,
        "embedding": config.vocab_size,
        "positions": config.context,
        "lm_head": config.vocab_size,
    }
    for ours, name, transposed in gpt2_names(config):
        count = next((count for kind, count in counts.items() if kind in ours), config.width)
        plan[name] = (ours, 0, count, transposed)
    return plan


def _hf_files(folder: Path) -> WeightFiles:
    """Open safetensors where there are some, else PyTorch's own files."""
    if any(folder.glob("*.safetensors*")) or not any(folder.glob("pytorch_model*.bin*")):
        return WeightFiles(folder)
    index = folder / "pytorch_model.bin.index.json"
    names = ["pytorch_model.bin"]
    if index.is_file():
        names = shard_names(index)
    return TorchFiles(folder, [("", folder / name) for name in names])


def _meta_files(folder: Path) -> tuple[TorchFiles, int]:
    files = sorted(folder.glob("consolidated.*.pth"))
    if not files:
        raise UserError(f"{folder}: params.json without consolidated.00.pth; download the weights too")
    if [file.name for file in files] != [f"consolidated.{i:02d}.pth" for i in range(len(files))]:
        raise UserError(f"{folder}: a file between consolidated.00.pth and {files[-1].name} is missing; download it")
    return TorchFiles(folder, [(f"{i}:", file) for i, file in enumerate(files)]), len(files)


def _meta_config(params: dict, files: TorchFiles, shards: int) -> LMConfig:
    """Return the configuration of Meta's ``params.json``; what it leaves to code is told from shapes.

    Its ``vocab_size`` may be -1, the width of the feed-forward follows from three numbers and rounding, and whether the
    head is tied is not said: Llama 3.2's small models store the embedding a second time.
    """
    width, heads = params["dim"], params["n_heads"]
    columns = files.shape("0:tok_embeddings.weight")[1]
    vocab_size = files.shape("0:tok_embeddings.weight")[0] * (shards if columns == width else 1)
    scaling = None
    if params.get("use_scaled_rope"):
        small = width < 4096  # Llama 3.2's 1B and 3B
        scaling = Llama31Scaling(factor=params.get("rope_scaling_factor") or (32.0 if small else 8.0))
    return LMConfig(
        family="llama",
        vocab_size=vocab_size,
        context=131072 if scaling else 8192 if vocab_size > 100_000 else 4096,
        width=width,
        layers=params["n_layers"],
        heads=heads,
        kv_heads=params.get("n_kv_heads") or heads,
        hidden=files.shape("0:layers.0.feed_forward.w1.weight")[0] * shards,
        head_dim=width // heads,
        norm_eps=params.get("norm_eps", 1e-5),
        tied=_head_repeats_embedding(files),
        rope_theta=params.get("rope_theta", 10000.0),
        rope_scaling=scaling,
    )


def _head_repeats_embedding(files: TorchFiles) -> bool:
    if "0:output.weight" not in files:
        return True
    names = ("0:output.weight", "0:tok_embeddings.weight")
    if files.shape(names[0]) != files.shape(names[1]):
        return False
    head, embedding = (files.read([Piece(name, 0, min(_TIED_ROWS, files.shape(name)[0]))]) for name in names)
    return torch.equal(head, embedding)


def _openai_config(hparams: dict) -> LMConfig:
    return gpt2(hparams["n_embd"], hparams["n_layer"], hparams["n_head"], hparams["n_vocab"], hparams["n_ctx"])
