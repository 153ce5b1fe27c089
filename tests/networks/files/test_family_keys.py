"""LoRAs of each family but FLUX.1: what is trained, the keys that programs know, and files that diffusers loads.

FLUX.1, whose files have the most layouts, is in ``test_formats.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers.loaders.single_file_utils import (
    convert_ernie_image_transformer_checkpoint_to_diffusers,
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_flux3_transformer_checkpoint_to_diffusers,
    convert_krea2_transformer_checkpoint_to_diffusers,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tools.merge_lora as merge_lora
from library.errors import UserError
from library.models.layer_names import LoraTargets
from library.models.qwen_image_21.model import optimise_forward
from networks.files.adapters import load_lora
from networks.files.base import find_modules, fullest_targets, open_base
from networks.files.readers import check_readers
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.network import AdapterNetwork
from tests.networks.conftest import assert_read_as_written, diffusers_pipeline, filled
from tests.runs import call
from tests.targets import (
    ERNIE_IMAGE_TARGETS,
    FLUX2_TARGETS,
    FLUX3_EDIT_TARGETS,
    FLUX3_TARGETS,
    FLUX_TARGETS,
    KREA2_TARGETS,
    QWEN_21_TARGETS,
    QWEN_TARGETS,
    Z_IMAGE_TARGETS,
)
from tests.tiny_ernie_image import run_ernie, tiny_ernie_transformer
from tests.tiny_flux2 import bfl_flux2_state_dict, run_flux2, tiny_flux2_transformer
from tests.tiny_flux3 import bfl_name, run_flux3, run_flux3_edit, tiny_flux3_transformer
from tests.tiny_krea2 import published_name, published_state_dict, run_krea2, tiny_krea2_transformer
from tests.tiny_qwen import run_qwen, tiny_qwen_transformer
from tests.tiny_qwen_21 import comfy_21_state_dict, run_21, tiny_21_transformer
from tests.tiny_z_image import comfy_state_dict, run_z, tiny_z_transformer


@dataclass(frozen=True)
class Family:
    """A tiny model and its published file.

    Attributes:
        published: diffusers' state dict -> that of the published file. diffusers: the way back, by diffusers' converter
            or, where it has none, by ComfyUI's rules. everything: network_args that train each layer there is.
    """

    targets: LoraTargets
    make: Callable[[], nn.Module]
    run: Callable[[nn.Module], Tensor]
    published: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    diffusers: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    everything: tuple[str, ...]

    def inject(self, model: nn.Module, *network_args: str, kind: str = "lora") -> AdapterNetwork:
        return filled(model, self.targets, *network_args, network_type=kind)

    def reloaded(self, path: Path) -> nn.Module:
        """Return the tiny transformer with the file loaded by diffusers' pipeline."""
        pipeline = diffusers_pipeline(self.targets.family, self.make())
        pipeline.load_lora_weights(str(path))
        return pipeline.transformer

    def output(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            return self.run(model)


def bfl_flux3_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {bfl_name(name): tensor for name, tensor in state.items()}
    last = "final_layer.image.adaLN_modulation.1.weight"
    return named | {last: torch.cat(named[last].chunk(2)[::-1])}


def halves_of_21(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ComfyUI's weights of Qwen-Image-2.1 with ``gate_up`` taken apart, as diffusers has it."""
    state = dict(state)
    for key in [key for key in state if "gate_up" in key]:
        gate, factor = state.pop(key).chunk(2)
        state |= {key.replace("gate_up", "gate_layer"): gate, key.replace("gate_up", "proj"): factor}
    return state


def bfl_layer(name: str) -> str:
    return bfl_name(f"{name}.weight").removesuffix(".weight")


INPUTS = ("img_in_dim=2", "txt_in_dim=2", "time_in_dim=2")
KREA2_LINEARS = sum(isinstance(module, nn.Linear) for module in tiny_krea2_transformer().modules())
KREA2_OTHERS = ("mlp", "txt_fusion", "projector", "img_in", "txt_in", "time_in", "final")
FLUX2 = Family(
    FLUX2_TARGETS,
    tiny_flux2_transformer,
    run_flux2,
    bfl_flux2_state_dict,
    convert_flux2_transformer_checkpoint_to_diffusers,
    ("img_mod_dim=3", "txt_mod_dim=2", "single_mod_dim=2", *INPUTS),
)
FLUX3 = Family(
    FLUX3_TARGETS,
    tiny_flux3_transformer,
    run_flux3,
    bfl_flux3_state_dict,
    convert_flux3_transformer_checkpoint_to_diffusers,
    ("img_mod_dim=3", "txt_mod_dim=2", *INPUTS),
)
FLUX3_EDIT = Family(
    FLUX3_EDIT_TARGETS,
    tiny_flux3_transformer,
    run_flux3_edit,
    bfl_flux3_state_dict,
    convert_flux3_transformer_checkpoint_to_diffusers,
    (*FLUX3.everything, "ref_mod_dim=2", "ref_in_dim=2"),
)
Z_IMAGE = Family(
    Z_IMAGE_TARGETS,
    tiny_z_transformer,
    run_z,
    comfy_state_dict,
    convert_z_image_transformer_checkpoint_to_diffusers,
    ("mod_dim=3", "refiner_dim=2", "refiner_mod_dim=2", "mlp_dim=6", *INPUTS),
)
KREA2 = Family(
    KREA2_TARGETS,
    tiny_krea2_transformer,
    run_krea2,
    published_state_dict,
    convert_krea2_transformer_checkpoint_to_diffusers,
    (),
)
ERNIE_IMAGE = Family(
    ERNIE_IMAGE_TARGETS,
    tiny_ernie_transformer,
    run_ernie,
    dict,
    convert_ernie_image_transformer_checkpoint_to_diffusers,
    ("mod_dim=3", "final_dim=2", "txt_in_dim=2", "time_in_dim=2"),
)
QWEN = Family(
    QWEN_TARGETS,
    tiny_qwen_transformer,
    run_qwen,
    dict,
    dict,
    ("img_mod_dim=3", "txt_mod_dim=2", "img_mlp_dim=6", *INPUTS),
)
QWEN_21 = Family(
    QWEN_21_TARGETS,
    lambda: optimise_forward(tiny_21_transformer()),
    run_21,
    comfy_21_state_dict,
    halves_of_21,
    ("mod_dim=3", "mlp_dim=6", *INPUTS),
)

# What diffusers reads whole: formats, and network_args beside the default ones.
LOADED: list[tuple[Family, tuple[str, ...], str]] = [
    *((FLUX2, args, layout) for layout in ("diffusers", "comfy") for args in ((), FLUX2.everything)),
    *((FLUX2, args, "kohya") for args in ((), INPUTS)),
    *((family, (), layout) for family in (FLUX3, FLUX3_EDIT) for layout in ("diffusers", "comfy")),
    *((Z_IMAGE, args, layout) for layout in ("diffusers", "kohya", "comfy") for args in ((), Z_IMAGE.everything)),
    (KREA2, (), "diffusers"),
    *((ERNIE_IMAGE, args, layout) for layout in ("diffusers", "comfy") for args in ((), ERNIE_IMAGE.everything)),
    *((QWEN, args, layout) for layout in ("diffusers", "kohya", "comfy") for args in ((), QWEN.everything)),
    *((QWEN_21, args, "diffusers") for args in ((), QWEN_21.everything)),
]


@pytest.mark.parametrize(
    ("family", "network_args", "save_format"),
    [pytest.param(*row, id=f"{row[0].targets.family}, {row[2]}, {len(row[1])} options") for row in LOADED],
)
def test_diffusers_computes_what_our_network_computes(
    family: Family, network_args: tuple[str, ...], save_format: str, tmp_path: Path
) -> None:
    model = family.make()
    network = family.inject(model, *network_args)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), family.targets, save_format)
    loaded = family.reloaded(tmp_path / "lora.safetensors")
    assert {n for n, each in loaded.named_modules() if isinstance(each, BaseTunerLayer)} == network.modules.keys()
    ours, theirs = family.output(model), family.output(loaded)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)  # peft multiplies in another order
    assert (ours - family.output(family.make())).abs().max() > 0.01
    assert_read_as_written(tmp_path / "lora.safetensors", network, family.targets, save_format)
    check_readers(["diffusers"], list(network.modules), family.targets, save_format, "lora")


# A module of each family, and its names in files: AI toolkit's below diffusion_model., musubi-tuner's below lora_unet_,
# OneTrainer's below lora_transformer_, peft's below base_model.model., diffusers' below transformer.
READ: list[tuple[Family, str, list[str]]] = [
    (FLUX2, "single_transformer_blocks.1.attn.to_out", [
        "diffusion_model.single_blocks.1.linear2", "lora_unet_single_blocks_1_linear2",
        "lora_transformer_single_transformer_blocks_1_attn_to_out", "base_model.model.single_blocks.1.linear2",
        "transformer.single_transformer_blocks.1.attn.to_out", "single_transformer_blocks.1.attn.to_out",
    ]),
    (FLUX3, "mode_blocks.image.1.ff.linear_out", [
        "diffusion_model.content_mode_blocks.image.1.mlp_out", "lora_unet_content_mode_blocks_image_1_mlp_out",
        "transformer.mode_blocks.image.1.ff.linear_out", "base_model.model.mode_blocks.image.1.ff.linear_out",
        "mode_blocks.image.1.ff.linear_out",
    ]),
    (Z_IMAGE, "layers.1.feed_forward.w2", [
        "diffusion_model.layers.1.feed_forward.w2", "lora_unet_layers_1_feed_forward_w2",
        "base_model.model.layers.1.feed_forward.w2", "layers.1.feed_forward.w2",
    ]),
    (Z_IMAGE, "layers.0.attention.to_k", ["lora_unet_layers_0_attention_to_k"]),
    (Z_IMAGE, "layers.0.attention.to_out.0", ["lora_unet_layers_0_attention_to_out_0"]),
    (KREA2, "transformer_blocks.0.attn.to_out.0", ["lora_unet_blocks_0_attn_wo"]),
    (KREA2, "text_fusion.refiner_blocks.1.ff.down", ["lora_unet_txtfusion_refiner_blocks_1_mlp_down"]),
    (KREA2, "time_mod_proj", ["lora_unet_tproj_1"]),
    (ERNIE_IMAGE, "layers.1.mlp.linear_fc2", [  # OneTrainer's below transformer.
        "diffusion_model.layers.1.mlp.linear_fc2", "lora_unet_layers_1_mlp_linear_fc2",
        "base_model.model.layers.1.mlp.linear_fc2", "transformer.layers.1.mlp.linear_fc2", "layers.1.mlp.linear_fc2",
    ]),
    (ERNIE_IMAGE, "layers.0.self_attention.to_out.0", ["lora_unet_layers_0_self_attention_to_out_0"]),
    (QWEN, "transformer_blocks.1.attn.add_k_proj", [  # the first is lightx2v's and DiffSynth-Studio's
        "transformer_blocks.1.attn.add_k_proj", "diffusion_model.transformer_blocks.1.attn.add_k_proj",
        "lora_unet_transformer_blocks_1_attn_add_k_proj",
    ]),
    (QWEN_21, "transformer_blocks.1.img_mlp.out", [
        "diffusion_model.transformer_blocks.1.img_mlp.out", "lora_unet_transformer_blocks_1_img_mlp_out",
        "base_model.model.transformer_blocks.1.img_mlp.out", "transformer.transformer_blocks.1.img_mlp.out",
        "transformer_blocks.1.img_mlp.out",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name", "stem"), [(family, name, stem) for family, name, stems in READ for stem in stems]
)
def test_published_layouts_are_read(family: Family, name: str, stem: str, tmp_path: Path) -> None:
    layer = family.make().get_submodule(name)
    assert isinstance(layer, nn.Linear)
    a, b = torch.randn(4, layer.in_features), torch.randn(layer.out_features, 4)
    for down, up in (("lora_A", "lora_B"), ("lora_A.default", "lora_B.default"), ("lora_down", "lora_up")):
        alpha = {f"{stem}.alpha": torch.tensor(2.0)} if down == "lora_down" else {}
        save_file({f"{stem}.{down}.weight": a, f"{stem}.{up}.weight": b} | alpha, tmp_path / "lora.safetensors")
        ((found, weights),) = load_lora(tmp_path / "lora.safetensors", family.targets).weights.items()
        assert found == name
        assert torch.equal(weights.down, a)
        assert torch.equal(weights.up, b)
        assert weights.alpha == (2.0 if alpha else 4.0)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize(
    ("family", "save_format"),
    [(FLUX2, "diffusers"), (FLUX3_EDIT, "diffusers"), (Z_IMAGE, "diffusers"), (KREA2, "comfy"), (QWEN, "kohya"),
     (QWEN_21, "diffusers"), (ERNIE_IMAGE, "kohya")],
)  # fmt: skip
def test_merging_into_the_published_file_gives_the_networks_output(
    family: Family, save_format: str, prefix: str, tmp_path: Path
) -> None:
    model = family.make()
    base = {f"{prefix}{n}": tensor.contiguous() for n, tensor in family.published(model.state_dict()).items()}
    save_file(base, tmp_path / "base.safetensors")
    network = family.inject(model, *family.everything)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), family.targets, save_format)
    files = ("--model", tmp_path / "base.safetensors", "--lora", tmp_path / "lora.safetensors")
    call(merge_lora, *files, "--save_to", tmp_path / "merged.safetensors", "--model_type", family.targets.family)
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == base.keys()
    plain = family.make()
    plain.load_state_dict(family.diffusers({name.removeprefix(prefix): tensor for name, tensor in merged.items()}))
    torch.testing.assert_close(family.output(plain), family.output(model), rtol=1e-4, atol=1e-5)


# Family, network_args -> how many layers are trained, and what all their names look like.
TRAINED: list[tuple[Family, tuple[str, ...], int, str]] = [
    (FLUX2, (), 12 + 2 * 2, r".*transformer_blocks\..*"),
    (FLUX2, FLUX2.everything, 12 + 2 * 2 + 3 + 4, ".*"),
    (FLUX2, ("train_single_block_indices=1", "train_double_block_indices=none"), 2, r"single_.*\.1\.attn\.to_\w+"),
    (FLUX3, (), 3 * 2 * 6, "(?!.*(image_cond|modulation)).*"),  # image, text, joint: two blocks each
    (FLUX3_EDIT, FLUX3_EDIT.everything, 4 * 2 * 6 + 6 + 2 + 1 + 2, ".*"),
    (FLUX3, ("train_single_block_indices=0",), (2 + 2 + 1) * 6, ".*"),
    (FLUX3, ("train_mode_block_indices=1",), (1 + 1 + 2) * 6, ".*"),
    (Z_IMAGE, (), 2 * 7, r"layers\.(?!.*adaLN).*"),
    (Z_IMAGE, Z_IMAGE.everything, 2 * 8 + 8 + 7 + 4, ".*"),  # main layers, noise and context refiner, inputs
    (Z_IMAGE, ("train_block_indices=0",), 7, r"layers\.0\..*"),
    # networks/lora_krea2.py of musubi-tuner: no list of modules, which stands for all; docs/krea2.md: attention alone
    (KREA2, (), KREA2_LINEARS, ".*"),
    (KREA2, tuple(f"{name}_dim=0" for name in KREA2_OTHERS), 2 * 5, r"transformer_blocks\..*"),
    (KREA2, ("train_block_indices=0",), KREA2_LINEARS - 8, r"(?!transformer_blocks\.1\.).*"),
    # layer_filter_preset attn-mlp of OneTrainer; AI toolkit trains the linear layers below layers.
    (ERNIE_IMAGE, (), 2 * 7, r"layers\..*"),
    (ERNIE_IMAGE, ERNIE_IMAGE.everything, 2 * 7 + 1 + 2 + 1 + 2, ".*"),
    (ERNIE_IMAGE, ("train_block_indices=0",), 7, r"layers\.0\..*"),
    (QWEN, (), 2 * 12 - 4, r"transformer_blocks\.\d\.(attn|img_mlp|txt_mlp)\..*"),
    (QWEN, QWEN.everything, 2 * 14 - 4 + 4, ".*"),
    (QWEN, ("train_block_indices=0",), 12, ".*"),
    (QWEN_21, (), 2 * 7, r"transformer_blocks\..*"),
    (QWEN_21, QWEN_21.everything, 2 * 7 + 1 + 1 + 2 + 2, ".*"),
    (QWEN_21, ("train_block_indices=0",), 7, ".*"),
]


def test_blocks_are_trained_by_default_and_the_rest_where_asked() -> None:
    for family, args, count, pattern in TRAINED:
        network = family.inject(family.make(), *args)
        assert len(network.modules) == count, (family.targets.family, args)
        assert all(re.fullmatch(pattern, name) for name in network.modules), (family.targets.family, args)
        ranks = {layer.rank for layer in network.modules.values()}
        asked = {int(arg.partition("=")[2]) for arg in args if arg.endswith(("=2", "=3", "=6"))}
        assert ranks == {4} | asked, (family.targets.family, args)


def flux2_name(name: str) -> str:
    """Return BFL's name of a layer: the parts of qkv have one."""
    place = FLUX2_TARGETS.keys.find(name)
    assert place is not None
    return place.original


# What stands before a tensor's name in a file -> what it is of a module's name. ComfyUI's comfy/lora.py knows a file's
# own names below diffusion_model., with underscores below lora_unet_ (musubi-tuner's too); peft diffusers' names.
# Z-Image: ComfyUI knows diffusers' names below diffusion_model., musubi-tuner no others than these below lora_unet_.
WRITTEN: list[tuple[Family, dict[str, Callable[[str], str]]]] = [
    (FLUX2, {"kohya": flux2_name, "comfy": flux2_name}),
    (FLUX3_EDIT, {"kohya": bfl_layer, "comfy": bfl_layer}),
    (Z_IMAGE, {"kohya": str, "comfy": str}),
    (KREA2, {"kohya": published_name, "comfy": published_name}),
    (ERNIE_IMAGE, {"kohya": str, "comfy": str}),
    (QWEN, {"kohya": str, "comfy": str}),
    (QWEN_21, {"kohya": str}),
]
PREFIXES = {"diffusers": "transformer.", "kohya": "lora_unet_", "comfy": "diffusion_model."}


@pytest.mark.parametrize(("family", "namings"), WRITTEN, ids=[family.targets.family for family, _ in WRITTEN])
def test_files_have_the_keys_that_other_programs_know(
    family: Family, namings: dict[str, Callable[[str], str]], tmp_path: Path
) -> None:
    network = family.inject(family.make(), *family.everything)
    for save_format, naming in {"diffusers": str, **namings}.items():
        save_adapter(tmp_path / "a.safetensors", network.weights(), family.targets, save_format)
        names = {naming(name) for name in network.modules}
        names = {name.replace(".", "_") for name in names} if save_format == "kohya" else names
        written = load_file(tmp_path / "a.safetensors")
        assert {key.split(".lora_")[0].removesuffix(".alpha") for key in written} == {
            PREFIXES[save_format] + name for name in names
        }, save_format
        if family is FLUX2:
            assert any(key.endswith(".alpha") for key in written) is (save_format == "kohya")
        assert_read_as_written(tmp_path / "a.safetensors", network, family.targets, save_format)


# ---- FLUX.2


def test_diffusers_reads_a_lokr_of_flux2_in_comfyuis_layout(tmp_path: Path) -> None:
    model = tiny_flux2_transformer()
    FLUX2.inject(model, kind="lokr").save(tmp_path / "lokr.safetensors", "comfy", "fp32", {})
    theirs = FLUX2.output(FLUX2.reloaded(tmp_path / "lokr.safetensors"))
    torch.testing.assert_close(theirs, FLUX2.output(model), rtol=1e-4, atol=1e-5)


def test_the_tests_own_layout_of_bfls_flux2_is_the_one_that_diffusers_converts() -> None:
    state = tiny_flux2_transformer(2, 3, guidance=True).state_dict()
    converted = convert_flux2_transformer_checkpoint_to_diffusers(bfl_flux2_state_dict(state))
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in state.items())


# ---- FLUX.3


def test_modulation_and_inputs_of_flux3_load_from_diffusers_layout_alone(tmp_path: Path) -> None:
    model = tiny_flux3_transformer()
    network = FLUX3_EDIT.inject(model, *FLUX3_EDIT.everything)
    for save_format in ("diffusers", "comfy"):
        save_adapter(tmp_path / f"{save_format}.safetensors", network.weights(), FLUX3_EDIT_TARGETS, save_format)
    theirs = FLUX3_EDIT.output(FLUX3_EDIT.reloaded(tmp_path / "diffusers.safetensors"))
    torch.testing.assert_close(theirs, FLUX3_EDIT.output(model), rtol=1e-4, atol=1e-5)
    loaded = {
        name for name, _ in FLUX3_EDIT.reloaded(tmp_path / "comfy.safetensors").named_parameters() if "lora_A" in name
    }
    assert {name.split(".lora_A")[0] for name in loaded} == {name for name in network.modules if "_blocks." in name}
    check_readers(["diffusers"], list(network.modules), FLUX3_EDIT_TARGETS, "diffusers", "lora")
    check_readers(["comfyui"], list(network.modules), FLUX3_EDIT_TARGETS, "comfy", "lora")
    with pytest.raises(UserError, match="diffusers reads no LoRA of .* set save_format = diffusers"):
        check_readers(["diffusers"], list(network.modules), FLUX3_EDIT_TARGETS, "comfy", "lora")


# ---- Qwen-Image


@torch.enable_grad()
def test_exactly_the_layers_without_a_gradient_are_left_out() -> None:
    """The independent answer is autograd's: which of all linear layers in the blocks the loss reaches."""
    model = tiny_qwen_transformer(blocks=3)
    run_qwen(model).square().sum().backward()
    linears = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    reached = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    dead = {name.removesuffix(".weight") for name in linears if name not in reached}
    assert len(dead) == 4
    assert all(name.startswith("transformer_blocks.2.") for name in dead)
    everything = {name for name in linears if not re.match(r"(proj_out|norm_out)", name)}
    injected = set(QWEN.inject(tiny_qwen_transformer(blocks=3), *QWEN.everything).modules)
    assert injected == {name.removesuffix(".weight") for name in everything} - dead


def test_a_lora_and_a_model_of_another_family_are_named(tmp_path: Path) -> None:
    layer = {"transformer_blocks.0.img_mlp.net.2": LoraWeights(torch.ones(1, 4), torch.ones(4, 1), 1.0)}
    save_adapter(tmp_path / "a.safetensors", layer, QWEN_TARGETS)
    with pytest.raises(UserError, match=r"a.safetensors: is a LoRA of qwen_image, not of flux; give a LoRA of flux"):
        load_lora(tmp_path / "a.safetensors", FLUX_TARGETS)
    tiny_qwen_transformer(1).save_pretrained(tmp_path / "base")  # its attention has FLUX's names
    files = open_base(tmp_path / "base").weights
    with pytest.raises(UserError, match=r"is a model of qwen_image, not of flux; give a model of flux, or"):
        find_modules(files, FLUX_TARGETS.keys, "flux")
    assert [row.family for row in fullest_targets(files)] == ["qwen_image"]


# ---- Qwen-Image-2.1


def by_comfyui(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of ComfyUI's model with a LoRA merged into them, by its rules (``comfy/lora.py``)."""
    weights = comfy_21_state_dict(tiny_21_transformer().state_dict())
    places: dict[str, tuple[str, slice]] = {}
    for key, weight in weights.items():
        name = key.removesuffix(".weight")
        places[f"diffusion_model.{name}"] = places[f"lora_unet_{name.replace('.', '_')}"] = key, slice(None)
        halves = {name: slice(None)}
        if name.endswith(".img_mlp.gate_up"):
            half = weight.shape[0] // 2
            halves = {
                name.replace("gate_up", "gate_layer"): slice(half),
                name.replace("gate_up", "proj"): slice(half, None),
            }
        for known, rows in halves.items():
            for prefix in ("", "transformer."):
                places[prefix + known] = key, rows
    for key, down in tensors.items():
        for a, b in (("lora_down", "lora_up"), ("lora_A", "lora_B")):
            stem = key.removesuffix(f".{a}.weight")
            if stem != key and stem in places:
                target, rows = places[stem]
                scale = float(tensors.get(f"{stem}.alpha", torch.tensor(len(down)))) / len(down)
                weights[target][rows] += scale * tensors[f"{stem}.{b}.weight"] @ down
    return weights


def test_every_layer_of_a_lora_of_qwen_image_21_has_a_gradient() -> None:
    """Text goes through the last block's layers too, but these are the image's: DDP waits for no other gradient."""
    model = optimise_forward(tiny_21_transformer().requires_grad_(False))
    network = QWEN_21.inject(model, *QWEN_21.everything)
    run_21(model).square().sum().backward()
    for name, layer in network.modules.items():
        for weight in (layer.lora_A.weight, layer.lora_B.weight):
            assert weight.grad is not None, name
            assert weight.grad.abs().max() > 0, name


@pytest.mark.parametrize("save_format", ["diffusers", "comfy"])
@pytest.mark.parametrize("network_args", [(), QWEN_21.everything], ids=["default", "everything"])
def test_comfyui_computes_of_qwen_image_21_what_our_network_computes(
    save_format: str, network_args: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_21_transformer()
    network = QWEN_21.inject(model, *network_args)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), QWEN_21_TARGETS, save_format)
    tensors = load_file(tmp_path / "lora.safetensors")
    if save_format == "comfy":
        gate_up = "diffusion_model.transformer_blocks.0.img_mlp.gate_up"
        assert f"{gate_up}.lora_down.weight" in tensors
        assert not any("gate_layer" in key or "img_mlp.proj" in key for key in tensors)
    theirs = tiny_21_transformer()
    theirs.load_state_dict(halves_of_21(by_comfyui(tensors)))
    with torch.no_grad():
        torch.testing.assert_close(run_21(theirs), run_21(model), rtol=1e-4, atol=1e-5)
    assert_read_as_written(tmp_path / "lora.safetensors", network, QWEN_21_TARGETS, save_format)


def test_a_fused_lora_of_qwen_image_21_is_one_of_each_half_and_one_of_another_size_is_refused(tmp_path: Path) -> None:
    stem = "diffusion_model.transformer_blocks.0.img_mlp.gate_up"
    a, b = torch.randn(4, 64), torch.randn(2 * 192, 4)
    save_file({f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}, tmp_path / "lora.safetensors")
    weights = load_lora(tmp_path / "lora.safetensors", QWEN_21_TARGETS).weights
    assert weights.keys() == {f"transformer_blocks.0.img_mlp.{half}" for half in ("gate_layer", "proj")}
    assert torch.equal(weights["transformer_blocks.0.img_mlp.gate_layer"].up, b[:192])
    assert torch.equal(weights["transformer_blocks.0.img_mlp.proj"].up, b[192:])
    wrong = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": torch.randn(300, 4)}
    save_file(wrong, tmp_path / "lora.safetensors")
    with pytest.raises(UserError, match="gate_up.*300"):
        load_lora(tmp_path / "lora.safetensors", QWEN_21_TARGETS)
