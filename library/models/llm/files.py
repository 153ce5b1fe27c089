"""From a folder with a published language model to a ``TransformerLM``, and back to transformers' format.

What lies in the folder says which of five layouts it has; all are read tensor by tensor into a model on the meta device
(``library.models.weights``), so the peak is the model and one tensor:

==============================  ==========================================================================
transformers, GPT-2             ``config.json`` with safetensors, or ``pytorch_model.bin`` where a publisher offers no
                                others, one file or shards. ``h.0.attn.c_attn.weight`` (maybe below ``transformer.``);
                                linears are stored [in, out], so they are transposed; q, k and v are one matrix already
transformers, Llama             the same files. ``model.layers.0.self_attn.q_proj.weight``; q, k, v and gate, up are
                                joined
Meta, Llama                     ``params.json`` with one ``consolidated.00.pth``. ``layers.0.attention.wq.weight``; rows
                                of q and k pair neighbours under RoPE and are put into the half-split order
OpenAI, GPT-2                   ``hparams.json`` with ``model.ckpt.index``. ``model/h0/attn/c_attn/w`` [1, in, out]
GGUF                            one file, the path of which may be given (``library.models.llm.gguf``)
==============================  ==========================================================================

A map names parameters once; a tied head is the embedding and has no entry. The same names serve LoRA, which has a group
for each linear layer of a block, all trained by default, as the usual recipes do (QLoRA, arXiv 2305.14314);
``q_proj_dim`` gives one a rank of its own, 0 leaves it out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from library.errors import UserError
from library.files import write_text
from library.gguf_header import gguf_file
from library.models.layer_names import KeyNames, KeyRow, LayerGroup, LoraTargets
from library.models.llm.gguf import gguf_config, gguf_weights, in_half_split_order, mixed_layers
from library.models.llm.model import TransformerLM, resize_vocabulary, separate_projections
from library.models.llm.sources import DequantisedWeights, Derived, DerivedWeights, TensorFlowFiles, TorchFiles
from library.models.llm.spec import NAMES, LMConfig, LMFamily, config_from_hf, config_to_hf, gpt2
from library.models.weights import KeyMap, check_map, load_into, read_config
from library.nn.rope import Llama31Scaling
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import WeightLoader
from library.safetensors_io import DTYPE_NAMES, RowRange, TensorEntry, shard_names, stream_safetensors

_TIED_ROWS = 1024  # compared to tell a head that repeats the embedding; two trained matrices differ in every row


def load_lm(
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    fp8: WeightLoader | None = None,
    pad_vocabulary_to: int | None = None,
    dequantised: bool = False,
) -> TransformerLM:
    """Return the language model in ``folder``, frozen and in eval mode.

    Args:
        folder: in one of the layouts above; or a GGUF file.
        dtype, device: of the weights.
        fp8: which linear weights become fp8, and how they compute; what a file holds quantised stays so.
        pad_vocabulary_to: pad embedding and head to a multiple of so many rows, 64 for fast products.
        dequantised: what a file holds quantised is in ``dtype`` instead.
    """
    config, weights, key_map = open_lm(Path(folder).expanduser())
    weights = DequantisedWeights(weights) if dequantised else weights
    apart = mixed_layers(weights, key_map)

    def build() -> TransformerLM:
        model = TransformerLM(config)
        separate_projections(model, apart)
        return model

    for layer in apart:
        names = config.joined[layer.split(".", 2)[2]]
        key_map = {**key_map} | {
            f"{layer}.{part}.{leaf}": [rows]
            for leaf in ("weight", "bias")
            for part, rows in zip(names, key_map.get(f"{layer}.{leaf}", ()), strict=False)
        }
        key_map = {name: ranges for name, ranges in key_map.items() if name not in (f"{layer}.weight", f"{layer}.bias")}
    placing = fp8 if fp8 is not None else WeightLoader()
    model = load_into(build, weights, key_map, dtype, device, fp8=placing)
    if pad_vocabulary_to is not None:
        resize_vocabulary(model, config.padded(pad_vocabulary_to))
    return model


def open_lm(folder: Path) -> tuple[LMConfig, WeightFiles, KeyMap]:
    """Return a model's configuration, its weights (not read yet) and where each parameter lies in them."""
    if (file := gguf_file(folder)) is not None:
        weights = WeightFiles(file)
        config = gguf_config(file, weights)
        return config, *gguf_weights(weights, config, hf_weights(weights, config)[1])
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; give a GGUF file, or the folder of a language model")
    if (folder / "config.json").is_file():
        config = config_from_hf(read_config(folder))
        return config, *hf_weights(_hf_files(folder), config)
    if (folder / "params.json").is_file():
        return _open_meta(folder)
    if indices := sorted(folder.glob("*.index")):
        hparams = read_config(folder, "hparams.json")
        config = gpt2(*(hparams[key] for key in ("n_embd", "n_layer", "n_head", "n_vocab", "n_ctx")))
        return config, *openai_weights(TensorFlowFiles(indices[-1]), config)
    raise UserError(
        f"{folder}: neither config.json (transformers) nor params.json (Meta) nor a TensorFlow .index nor a GGUF file; "
        "give the folder of a language model"
    )


def export_hf(
    model: TransformerLM,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    weights: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write ``model`` in transformers' format, ``config.json`` and ``model.safetensors``; return the folder.

    Padding rows are cut off. One tensor at a time is converted.

    Args:
        model: with weights that are not fp8.
        folder: made if needed.
        dtype: of the file; default: each weight's own.
        weights: its parameters by name, where the model itself holds only parts of them.
        metadata: more of the weights' file.
    """
    folder = Path(folder)
    state = dict(weights or model.named_parameters())
    if any(tensor.dtype.itemsize == 1 for tensor in state.values()):
        raise UserError("a model with fp8 weights is not exported; load it without fp8 first")
    places = _places(model.config, {name: tuple(tensor.shape) for name, tensor in state.items()})
    layout = {name: (dtype or state[place.ours].dtype, place.shape) for name, place in places.items()}

    def produce(name: str) -> Tensor:
        return places[name].of(state[places[name].ours].detach()).to(layout[name][0])

    stream_safetensors(folder / "model.safetensors", layout, produce, {"format": "pt", **(metadata or {})})
    stored = str(layout[next(iter(layout))][0]).removeprefix("torch.")
    config = config_to_hf(model.config) | {"torch_dtype": stored}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return folder


class _Place(NamedTuple):
    """Where a tensor of transformers' is in the model: rows of the parameter ``ours``."""

    ours: str
    rows: slice
    transposed: bool
    shape: tuple[int, ...]

    def of(self, parameter: Tensor) -> Tensor:
        """Return the tensor, as it is stored, of the parameter."""
        return parameter[self.rows].t() if self.transposed else parameter[self.rows]


def _places(config: LMConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Place]:
    """Return transformers' name -> its place among our parameters, which have ``shapes``."""
    places: dict[str, _Place] = {}
    for ours, parts, transposed in hf_names(config):
        start = 0
        for name, rows in parts:
            shape = (rows, *shapes[ours][1:])
            places[name] = _Place(ours, slice(start, start + rows), transposed, shape[::-1] if transposed else shape)
            start += rows
    return places


class TransformersFiles(WeightFiles):
    """The weights of a language model in any layout, as they would lie in transformers': its names, nothing quantised.

    Attributes:
        config: the model's.
        dtype: that most of the weights have; bf16 of quantised ones.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers of ``path``, as :func:`open_lm` does."""
        self.config, stored, self._key_map = open_lm(path)
        self.path, self.quantized, self.metadata, self.entries = path, None, {}, {}
        self._stored, self._last = DequantisedWeights(stored), ("", torch.empty(0))
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in TransformerLM(self.config).named_parameters()}
        check_map(expected, self._stored, self._key_map)
        any_matrix = self._key_map["blocks.0.attention.out.weight"][:1]
        self.dtype = torch.bfloat16 if stored.read_quantized(any_matrix) else stored.read(any_matrix).dtype
        self._places = _places(self.config, expected)
        for name, place in self._places.items():
            self.entries[name] = TensorEntry(path, DTYPE_NAMES[self.dtype], place.shape, 0, 0)

    def read(self, ranges: Sequence[RowRange]) -> Tensor:
        """Return the rows of ``ranges`` one below the other; what was quantised is fp32."""
        parts = []
        for rows in ranges:
            place = self._places[rows.source]
            if self._last[0] != place.ours:  # q, k and v follow one another
                self._last = place.ours, self._stored.read(self._key_map[place.ours])
            parts.append(place.of(self._last[1])[rows.start : rows.stop])
        return torch.cat(parts)


def _hf_files(folder: Path) -> WeightFiles:
    """Open safetensors where there are some, else PyTorch's own files."""
    if any(folder.glob("*.safetensors*")) or not any(folder.glob("pytorch_model*.bin*")):
        return WeightFiles(folder)
    index = folder / "pytorch_model.bin.index.json"
    names = ["pytorch_model.bin"]
    if index.is_file():
        names = shard_names(index)
    return TorchFiles(folder, [folder / name for name in names])


def _open_meta(folder: Path) -> tuple[LMConfig, WeightFiles, KeyMap]:
    """Open a folder of Meta's; what its ``params.json`` leaves to code follows from shapes.

    Its ``vocab_size`` may be -1, the width of the feed-forward follows from three numbers and rounding, and whether the
    head is tied is not said: Llama 3.2's small models store the embedding a second time.
    """
    file = folder / "consolidated.00.pth"
    if not file.is_file():
        raise UserError(f"{folder}: params.json without {file.name}; download the weights too")
    if (folder / "consolidated.01.pth").exists():
        raise UserError(f"{folder}: Meta's weights in several files are not read; use the transformers version")
    params, files = read_config(folder, "params.json"), TorchFiles(folder, [file])
    width, heads = params["dim"], params["n_heads"]
    vocab_size = files.shape("tok_embeddings.weight")[0]
    scaling = None
    if params.get("use_scaled_rope"):
        small = width < 4096  # Llama 3.2's 1B and 3B
        scaling = Llama31Scaling(factor=params.get("rope_scaling_factor") or (32.0 if small else 8.0))
    config = LMConfig(
        family="llama",
        vocab_size=vocab_size,
        context=131072 if scaling else 8192 if vocab_size > 100_000 else 4096,
        width=width,
        layers=params["n_layers"],
        heads=heads,
        kv_heads=params.get("n_kv_heads") or heads,
        hidden=files.shape("layers.0.feed_forward.w1.weight")[0],
        head_dim=width // heads,
        norm_eps=params.get("norm_eps", 1e-5),
        tied=_head_repeats_embedding(files),
        rope_theta=params.get("rope_theta", 10000.0),
        rope_scaling=scaling,
    )
    key_map = {ours: [RowRange(meta_name(name)) for name, _ in parts] for ours, parts, _ in hf_names(config)}
    return config, *in_half_split_order(files, config, key_map, ("wq", "wk"))


def _head_repeats_embedding(files: TorchFiles) -> bool:
    if "output.weight" not in files:
        return True
    names = ("output.weight", "tok_embeddings.weight")
    if files.shape(names[0]) != files.shape(names[1]):
        return False
    head, embedding = (files.read([RowRange(name, 0, min(_TIED_ROWS, files.shape(name)[0]))]) for name in names)
    return torch.equal(head, embedding)


def hf_names(config: LMConfig) -> Iterator[tuple[str, list[tuple[str, int]], bool]]:
    """Yield (ours, [(transformers' name, its rows), ...], stored transposed) of every parameter.

    The rows of several are joined in order.
    """
    gpt2, width = config.family == "gpt2", config.width
    embedding, block, norm = (
        ("transformer.wte", "transformer.h", "transformer.ln_f")
        if gpt2
        else ("model.embed_tokens", "model.layers", "model.norm")
    )
    with_bias = {"attention.qkv": config.attention_bias, "attention.out": config.out_bias}
    norm_leaves = ("weight", "bias") if gpt2 else ("weight",)
    rows = {name: count for parts in config.joined.values() for name, count in parts.items()}
    rows |= {"c_attn": 3 * width, "c_fc": config.hidden, "q_norm": config.head_dim, "k_norm": config.head_dim}
    yield "embedding.weight", [(f"{embedding}.weight", config.vocab_size)], False
    if gpt2:
        yield "positions.weight", [("transformer.wpe.weight", config.context)], False
    for i in range(config.layers):
        for ours, theirs in NAMES["blocks"][config.family].items():
            is_norm = ours.endswith("norm")
            if ours.startswith("attention.") and is_norm and not config.qk_norm:
                continue
            counts = [(f"{block}.{i}.{name}", rows.get(name.rpartition(".")[2], width)) for name in theirs]
            biased = ("weight", "bias") if with_bias.get(ours, config.mlp_bias) else ("weight",)
            for leaf in norm_leaves if is_norm else biased:
                transposed = gpt2 and leaf == "weight" and not is_norm
                yield f"blocks.{i}.{ours}.{leaf}", [(f"{name}.{leaf}", count) for name, count in counts], transposed
    for leaf in norm_leaves:
        yield f"norm.{leaf}", [(f"{norm}.{leaf}", width)], False
    if not config.tied:
        yield "lm_head.weight", [("lm_head.weight", config.vocab_size)], False


def hf_weights(files: WeightFiles, config: LMConfig) -> tuple[WeightFiles, KeyMap]:
    """Return weights and key map of a transformers checkpoint.

    Raises:
        UserError: a GPT-2 in fp8, whose scales belong to the other side of the transposed matrices.
    """
    if config.family == "llama":
        return files, {ours: [RowRange(name) for name, _ in parts] for ours, parts, _ in hf_names(config)}
    if files.quantized is not None:
        raise UserError(
            f"{files.path}: a GPT-2 stored in fp8 is not supported; load the fp32 or bf16 file with fp8_base"
        )
    prefix = "" if "transformer.wte.weight" in files else "transformer."
    return _gpt2_weights(files, config, lambda name: name.removeprefix(prefix))


def openai_weights(files: WeightFiles, config: LMConfig) -> tuple[WeightFiles, KeyMap]:
    """Return weights and key map of OpenAI's TensorFlow checkpoint."""
    leaves = {"bias": "/b", "weight": "/w", "norm": "/g", "embedding": ""}

    def openai_name(name: str) -> str:
        module, _, leaf = name.removeprefix("transformer.").rpartition(".")
        kind = "embedding" if module in ("wte", "wpe") else "norm" if "ln_" in module and leaf == "weight" else leaf
        return f"model/{re.sub(r'^h.', 'h', module).replace('.', '/')}{leaves[kind]}"

    return _gpt2_weights(files, config, openai_name)


def _gpt2_weights(
    files: WeightFiles, config: LMConfig, name_in_file: Callable[[str], str]
) -> tuple[WeightFiles, KeyMap]:
    """Return weights and key map of a GPT-2 whose linears are stored [in, out], or [1, in, out]."""
    derived, key_map = {}, {}
    for ours, ((theirs, _),), transposed in hf_names(config):
        source = name_in_file(theirs)
        if transposed and source in files:
            derived[f"{source}.T"] = Derived(files.shape(source)[:-3:-1], source, lambda w: w.flatten(0, -2).t())
            source = f"{source}.T"
        key_map[ours] = [RowRange(source)]
    return DerivedWeights(files, derived), key_map


def meta_name(hf_name: str) -> str:
    """Return Meta's name for transformers'."""
    layer, _, module = hf_name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
    if layer.isdigit():
        return f"layers.{layer}.{NAMES['meta'][module]}.weight"
    return f"{NAMES['meta'][hf_name.removesuffix('.weight')]}.weight"


def _targets(family: LMFamily, stack: str) -> LoraTargets:
    """Return a family as LoRA sees it: a LoRA trains the parts of joined matrices (``separate_projections``).

    ``stack`` is transformers' list of blocks. A group is a linear layer of a block and has its name; GPT-2's two layers
    ``c_proj`` are ``attn_c_proj`` and ``mlp_c_proj``.
    """
    rows = []
    for ours, theirs in NAMES["blocks"][family].items():
        for name in theirs if not ours.endswith("norm") else ():
            part = f".{name.rpartition('.')[2]}" if len(theirs) > 1 else ""
            rows.append(KeyRow(f"blocks.{{i}}.{ours}{part}", (f"{stack}.{{i}}.{name}",), transposed=family == "gpt2"))
    embedding = "transformer.wte" if family == "gpt2" else "model.embed_tokens"
    rows += [KeyRow("embedding", (embedding,)), KeyRow("lm_head", ("lm_head",))]  # of which rows may be trained
    in_block = re.escape(stack) + r"\.(\d+)\."
    layers = [row.parts[0].removeprefix(f"{stack}.{{i}}.") for row in rows if "{i}" in row.original]
    groups = {layer.replace(".", "_") if layer.endswith("c_proj") else layer.split(".")[1]: layer for layer in layers}
    return LoraTargets(
        family=family,
        layer_groups=tuple(LayerGroup(name, in_block + re.escape(layer)) for name, layer in groups.items()),
        block_options={"train_block_indices": in_block + ".*"},
        keys=KeyNames(tuple(rows)),
        file_prefix="language_model",
        kohya_base=family,
        architecture=family,
        implementation="https://github.com/huggingface/transformers",
        own_names=True,
    )


LORA_TARGETS = (_targets("llama", "model.layers"), _targets("gpt2", "transformer.h"))
