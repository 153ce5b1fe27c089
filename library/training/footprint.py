"""What a model's parts take in a training step, found without its weights and without the memory for them.

Weights are counted on the meta device. Activations are what the forward pass keeps for the backward pass: one block of
each kind is run on fake tensors, which have shapes and dtypes and no numbers, under the autocast of training, with
Tandem's own layers. Blocks of a kind keep the same, so that a shallow model tells of a deep one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from library.config.schema import NetworkConfig
from library.errors import UserError, did_you_mean
from library.models import flux_layout, qwen_layout
from library.models.lm_config import PRESETS, LMConfig
from library.models.lm_files import open_lm
from library.models.lm_projections import separate_projections
from library.models.registry import FAMILIES
from library.models.transformer_lm import TransformerLM
from library.models.weights import WeightFiles, read_config
from library.precision.recipe import Fp8Recipe
from networks.injection import inject_lora
from networks.options import parse_network_args
from networks.targets import TARGETS

Inputs = dict[str, Any]
_CLASSES = {
    "FluxTransformer2DModel": "flux",
    "QwenImageTransformer2DModel": "qwen_image",
    "ZImageTransformer2DModel": "z_image",
}
_DEPTHS = {"flux": ("num_layers", "num_single_layers"), "qwen_image": ("num_layers",), "z_image": ("n_layers",)}
_PUBLISHED: dict[str, dict[str, Any]] = {  # what differs from the defaults of diffusers' classes, which are the models'
    "flux": {"guidance_embeds": True},
    "flux_fill": {"guidance_embeds": True, "in_channels": 384, "out_channels": 64},
    "flux_kontext": {"guidance_embeds": True},
    "qwen_image": {},
    "qwen_image_edit": {},
    "qwen_image_edit_plus": {},
    "z_image": {},
}
_PICTURES = {"flux_kontext": 2, "qwen_image_edit": 2, "qwen_image_edit_plus": 2}  # seen by the model: one to edit


@dataclass(frozen=True)
class Part:
    """Blocks of one kind, or what lies outside the blocks.

    Attributes:
        count: blocks; the other numbers are of one of them.
        weights: frozen or trained numbers, without a LoRA.
        matrices: those of them that ``fp8_scaled`` makes fp8.
        lora: numbers of its LoRA.
        activations: bytes kept for the backward pass by a batch of one.
        inputs: bytes of what goes in, kept instead where blocks are recomputed.
        largest: bytes of the largest tensor kept.
    """

    count: int
    weights: int
    matrices: int
    lora: int
    activations: int
    inputs: int
    largest: int


@dataclass(frozen=True)
class Footprint:
    """A model and its step on a batch of one.

    Attributes:
        name: of the family.
        blocks, outside: its parts; without a LoRA where all weights are trained.
        largest_matrix: numbers of the largest in a block.
        heads: that ``tp`` must divide; 1 where the family has no plan for it.
        has_stages: whether ``pp`` can cut it.
    """

    name: str
    blocks: tuple[Part, ...]
    outside: Part
    largest_matrix: int
    heads: int
    has_stages: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything."""
        return (*self.blocks, self.outside)


@dataclass(frozen=True)
class Shape:
    """A model's kind and sizes: the arguments of its class, or a language model's configuration."""

    name: str  # of the family
    arguments: Mapping[str, Any] | LMConfig


def published_shapes() -> list[str]:
    """Return the names that :func:`shape_of` knows without files."""
    return [*_PUBLISHED, *PRESETS]


def shape_of(model: str) -> Shape:
    """Return the shape of a published model by name, or of a folder or file, of which headers are read.

    Raises:
        UserError: no such name, file or folder, or another kind of model.
    """
    if model in _PUBLISHED:
        return Shape(model, _PUBLISHED[model])
    if model in PRESETS:
        return Shape(PRESETS[model].family, PRESETS[model])
    path = Path(model).expanduser()
    if not path.exists():
        names = published_shapes()
        raise UserError(
            f"{model}: no file, folder or known model{did_you_mean(model, names)}; known: {', '.join(names)}"
        )
    if path.is_file():
        return _shape_of_file(path)
    if not (path / "model_index.json").is_file() and not (path / "transformer").is_dir():
        config, _, _ = open_lm(path)
        return Shape(config.family, config)
    arguments = read_config(path / "transformer")
    kind = str(arguments.get("_class_name"))
    if kind not in _CLASSES:
        raise UserError(
            f"{path}: a {kind}, no family of this version; give FLUX.1, Qwen-Image, Z-Image, GPT-2 or Llama"
        )
    return Shape(_CLASSES[kind], arguments)


def _shape_of_file(path: Path) -> Shape:
    weights = WeightFiles(path)
    if (prefix := flux_layout.bfl_prefix(weights)) is not None:
        return Shape("flux", flux_layout.bfl_config(weights, prefix))
    if (prefix := qwen_layout.qwen_prefix(weights)) is not None:
        return Shape("qwen_image", qwen_layout.file_config(weights, prefix))
    flux_layout.refuse_other_architectures(weights)
    return Shape("flux", flux_layout.diffusers_config(weights))


def footprint(shape: Shape, tokens: int, text: int, rank: int, base: torch.dtype = torch.bfloat16) -> Footprint:
    """Return what ``shape`` takes.

    Args:
        shape: of :func:`shape_of`.
        tokens: of a picture (1024 x 1024 pixels are 4096), or of a text.
        text: of a caption; of no meaning to language models.
        rank: of the LoRA; 0 trains all weights.
        base: dtype of the weights.
    """
    (whole, lora), (shallow, _) = (_model(shape, base, rank, shallow=only_two) for only_two in (False, True))
    linear = {f"{name}.weight" for name, module in whole.named_modules() if isinstance(module, nn.Linear)}
    kept = _kept(shallow, _blocks(shape, shallow), lambda device: _inputs(shape, tokens, text, device))
    blocks, kinds = _blocks(shape, whole), dict[str, list[nn.Module]]()
    for block in blocks:
        kinds.setdefault(type(block).__name__, []).append(block)
    inside = {id(p) for block in blocks for p in block.parameters()}
    rest = {n: p for n, p in whole.named_parameters() if id(p) not in inside}
    own = {id(p): n for n, p in whole.named_parameters()}
    parts = []
    for kind, members in kinds.items():
        numbers = _numbers({own[id(p)]: p for block in members for p in block.parameters()}, lora, linear)
        each = {key: round(value / len(members)) for key, value in numbers.items()}
        parts.append(Part(len(members), **each, **kept[kind]))
    outside = Part(1, **_numbers(rest, lora, linear), **kept[""])
    largest = max(p.numel() for n, p in whole.named_parameters() if p.ndim == 2 and id(p) in inside)
    heads, has_stages = _cuts(shape, whole)
    return Footprint(shape.name, tuple(parts), outside, largest, heads, has_stages)


def _cuts(shape: Shape, model: Any) -> tuple[int, bool]:
    """Return into how many shares heads can be dealt out, and whether there can be stages."""
    if isinstance(shape.arguments, LMConfig):
        return math.gcd(shape.arguments.heads, shape.arguments.kv_heads), True
    family: Any = FAMILIES[shape.name]
    heads = model.config.num_attention_heads if family.transformer_class._tp_plan else 1
    return heads, bool(family.behind_blocks)


def _model(shape: Shape, base: torch.dtype, rank: int, shallow: bool) -> tuple[nn.Module, set[str]]:
    """Return the model on the meta device, two blocks deep if ``shallow``, and the names of its LoRA's weights."""
    torch.set_default_dtype(base)
    try:
        with torch.device("meta"):
            arguments = shape.arguments
            if isinstance(arguments, LMConfig):
                layers = min(2, arguments.layers) if shallow else arguments.layers
                model: nn.Module = TransformerLM(replace(arguments, layers=layers))
            else:
                model = _transformer(shape, shallow)
    finally:
        torch.set_default_dtype(torch.float32)
    if not rank:
        return model, set()
    if isinstance(model, TransformerLM):
        separate_projections(model)
    targets = TARGETS[shape.name]
    options = parse_network_args(NetworkConfig(network_dim=rank, network_alpha=rank), targets)
    trained = {id(p) for p in inject_lora(model, options, targets, seed=0).parameters()}
    return model, {name for name, p in model.named_parameters() if id(p) in trained}


def _transformer(shape: Shape, shallow: bool) -> nn.Module:
    """Return a diffusion transformer with the family's layers."""
    assert isinstance(shape.arguments, Mapping)
    family = _without_files(shape)
    arguments = {key: value for key, value in shape.arguments.items() if not key.startswith("_")}
    model = family.transformer_class.from_config(arguments)
    if shallow:
        depths = {key: min(2, model.config[key]) for key in _DEPTHS[_CLASSES[type(model).__name__]]}
        model = family.transformer_class.from_config(arguments | depths)
    return family._with_hot_paths(model, "auto")


def _blocks(shape: Shape, model: nn.Module) -> list[nn.Module]:
    if isinstance(model, TransformerLM):
        return list(model.blocks)
    return _without_files(shape).blocks(model)


def _without_files(shape: Shape) -> Any:
    """Return the family, of which only what needs no files is asked."""
    family: Any = FAMILIES[shape.name]
    return object.__new__(family)


def _numbers(parameters: Mapping[str, Tensor], lora: set[str], linear: set[str]) -> dict[str, int]:
    """Return how many weights there are, how many fp8 takes and how many belong to a LoRA."""
    recipe, counts = Fp8Recipe(), {"weights": 0, "matrices": 0, "lora": 0}
    for name, parameter in parameters.items():
        if name in lora:
            counts["lora"] += parameter.numel()
            continue
        counts["weights"] += parameter.numel()
        if name in linear and not recipe.kept_as(name.removesuffix(".weight").removesuffix(".base")):
            counts["matrices"] += parameter.numel()
    return counts


def _kept(model: nn.Module, blocks: list[nn.Module], inputs: Callable[[str], Inputs]) -> dict[str, dict[str, int]]:
    """Return what a forward pass keeps by kind of block, and under "" outside of them."""
    found: dict[str, dict[int, Tensor]] = {"": {}}
    entering: dict[str, int] = {"": 0}
    counts: dict[str, int] = {"": 1}
    stack, device = [""], "cpu"

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        kind = type(module).__name__
        stack.append(kind)
        counts[kind] = counts.get(kind, 0) + 1
        streams = {id(t): t for t in (*arguments, *named.values()) if isinstance(t, Tensor) and t.requires_grad}
        entering[kind] = max(entering.get(kind, 0), sum(t.numel() * t.element_size() for t in streams.values()))

    def leave(*_: Any) -> None:
        stack.pop()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        known = any(storage._cdata in group for group in found.values())
        if storage._cdata not in own and not known:
            found.setdefault(stack[-1], {})[storage._cdata] = tensor  # kept, or its number is given to another
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        _as_fake(model, device)
        own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        for block in blocks:
            block.register_forward_pre_hook(enter, with_kwargs=True)
            block.register_forward_hook(leave)
        saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with saving, torch.autocast(device, torch.bfloat16):
            result = model.train()(**inputs(device))  # its graph holds what is counted
        kept = {
            kind: {
                "activations": sum(t.untyped_storage().nbytes() for t in group.values()) // counts[kind],
                "inputs": entering[kind],
                "largest": max((t.untyped_storage().nbytes() for t in group.values()), default=0),
            }
            for kind, group in ((kind, found.get(kind, {})) for kind in counts)
        }
        del result
    return kept


def _as_fake(model: nn.Module, device: str) -> None:
    """Put fake tensors in the place of meta ones, which know no autocast."""
    shared: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                made = shared.setdefault(id(parameter), nn.Parameter(fake, requires_grad=parameter.requires_grad))
                module._parameters[name] = made
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


@contextmanager
def _on(device: str) -> Iterator[None]:
    with torch.device(device):
        yield


def _inputs(shape: Shape, tokens: int, text: int, device: str) -> Inputs:
    """Return what the model is called with, for a batch of one."""
    arguments = shape.arguments
    with _on(device):
        if isinstance(arguments, LMConfig):
            words = torch.zeros(1, min(tokens, arguments.context), dtype=torch.long)
            return {"tokens": words, "targets": words}
        model = _without_files(shape).transformer_class
        with torch.device("meta"):
            config = model.from_config(
                {k: v for k, v in arguments.items() if not k.startswith("_")}
                | dict.fromkeys(_DEPTHS[_CLASSES[model.__name__]], 1)
            ).config
        side = max(1, round(tokens**0.5))
        seen = side * side * _PICTURES.get(shape.name, 1)
        time = torch.rand(1)
        if shape.name == "z_image":
            picture = torch.randn(config.in_channels, 1, 2 * side, 2 * side)
            caption = torch.randn(text, config.cap_feat_dim)
            return {"x": [picture], "t": time, "cap_feats": [caption], "return_dict": False}
        common: Inputs = {
            "hidden_states": torch.randn(1, seen, config.in_channels),
            "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim),
            "timestep": time,
            "return_dict": False,
        }
        if shape.name.startswith("qwen_image"):
            grids = [(1, side, side)] * _PICTURES.get(shape.name, 1)
            return common | {"encoder_hidden_states_mask": None, "img_shapes": [grids]}
        common["pooled_projections"] = torch.randn(1, config.pooled_projection_dim)
        common |= {"img_ids": torch.zeros(seen, 3), "txt_ids": torch.zeros(text, 3)}
        return common | ({"guidance": torch.ones(1)} if config.guidance_embeds else {})
