"""What programs make of our files: their update held to the trained one, read by their own code or by their rules.

diffusers is installed, and loads the files itself. ComfyUI, sd-scripts and musubi-tuner are not: what they do with a
file's tensors is a few lines here, from the same sources as ``networks.files.readers`` and independent of it.
"""

from __future__ import annotations

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lokr.layer import factorization
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from library.config.schema import NetworkConfig
from library.errors import UserError
from library.models.layer_names import LoraTargets
from library.models.registry import lora_targets
from networks.files.adapters import load_adapter, load_lora
from networks.files.metadata import ADAPTER_METADATA_KEY, trained_alphas
from networks.files.readers import READERS, check_readers, read_as, read_by_none, readable
from networks.files.verify import check_file, loads_in
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.network import AdapterNetwork, attach_lora
from networks.options import parse_network_args
from tests.networks.conftest import diffusers_pipeline, filled, make_flux, run_flux
from tests.targets import (
    ERNIE_IMAGE_TARGETS,
    FLUX2_TARGETS,
    FLUX3_TARGETS,
    FLUX_TARGETS,
    KREA2_TARGETS,
    QWEN_21_TARGETS,
    QWEN_TARGETS,
    Z_IMAGE_TARGETS,
)
from tests.tiny_ernie_image import tiny_ernie_transformer
from tests.tiny_flux2 import tiny_flux2_transformer
from tests.tiny_flux3 import tiny_flux3_transformer
from tests.tiny_krea2 import tiny_krea2_transformer
from tests.tiny_qwen import tiny_qwen_transformer
from tests.tiny_qwen_21 import tiny_21_transformer
from tests.tiny_z_image import tiny_z_transformer

MODELS = {
    "flux": (make_flux, FLUX_TARGETS),
    "qwen_image": (tiny_qwen_transformer, QWEN_TARGETS),
    "qwen_image_21": (tiny_21_transformer, QWEN_21_TARGETS),
    "z_image": (tiny_z_transformer, Z_IMAGE_TARGETS),
    "flux2_klein": (tiny_flux2_transformer, FLUX2_TARGETS),
    "flux3_klein": (tiny_flux3_transformer, FLUX3_TARGETS),
    "krea2": (tiny_krea2_transformer, KREA2_TARGETS),
    "ernie_image": (tiny_ernie_transformer, ERNIE_IMAGE_TARGETS),
}


def trained(family: str, kind: str = "lora", *args: str, **fields: Any) -> tuple[nn.Module, AdapterNetwork]:
    """Return a tiny model and a network in it whose every layer does something."""
    make, targets = MODELS[family]
    args += ("projector_dim=1",) if family == "krea2" else ()  # a layer of one output has no more directions
    settings = {"network_dim": 16, "network_alpha": 1.0, "network_type": kind, **fields}
    model = make()
    return model, filled(model, targets, *args, scale=0.02, **settings)


def updates(network: AdapterNetwork) -> dict[str, Tensor]:
    """Module name -> what was trained, in fp64 from the layers' own A and B: alpha over rank, or its root."""
    found = {}
    for name, layer in network.modules.items():
        up, down = layer.lora_B.weight.detach().double(), layer.lora_A.weight.detach().double()
        delta = up @ down
        if layer.start is not None:
            delta = delta - layer.start.B.double() @ layer.start.A.double()
        found[name] = delta * layer.alpha / (layer.rank**0.5 if layer.rank_stabilised else layer.rank)
    return found


def from_tensors_alone(path: Path) -> dict[str, Tensor]:
    """What ComfyUI, sd-scripts and musubi-tuner make of pairs: no header, ``.alpha`` over rank, without one 1."""
    tensors, found = load_file(path), {}
    for key, down in tensors.items():
        for a, b in (("lora_A", "lora_B"), ("lora_down", "lora_up")):
            if key.endswith(f".{a}.weight"):
                stem = key.removesuffix(f".{a}.weight")
                scale = float(tensors.get(f"{stem}.alpha", torch.tensor(float(len(down))))) / len(down)
                found[stem] = tensors[f"{stem}.{b}.weight"].double() @ down.double() * scale
    return found


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other).norm() / other.norm())


SCALES = {
    "default": {},
    "alpha above rank": {"network_dim": 4, "network_alpha": 32.0},
    "no power of two": {"network_dim": 6, "network_alpha": 2.7},
    "rank stabilised": {"network_dim": 8, "network_alpha": 3.0, "use_rslora": True},
    "pissa": {"network_dim": 8, "network_alpha": 1.0, "init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("fields", SCALES.values(), ids=SCALES)
def test_a_program_that_reads_no_header_gets_the_trained_update(
    family: str, fields: dict[str, object], tmp_path: Path
) -> None:
    _, network = trained(family, **fields)
    for precision, rounding in {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-10}.items():
        network.save(tmp_path / "a.safetensors", "diffusers", precision, {})
        read = from_tensors_alone(tmp_path / "a.safetensors")
        assert read.keys() == {f"transformer.{name}" for name in network.modules}
        for name, delta in updates(network).items():  # of two factors, each rounds by half of it
            assert apart(read[f"transformer.{name}"], delta) < rounding, precision


def test_fp16_has_enough_bits_for_a_young_lora_at_a_small_scale(tmp_path: Path) -> None:
    _, network = trained("flux", network_dim=32, network_alpha=0.5)
    with torch.no_grad():
        for layer in network.modules.values():
            layer.lora_B.weight.mul_(0.02)  # about 4e-4, as after a few hundred steps
    network.save(tmp_path / "a.safetensors", "diffusers", "fp16", {})
    read = from_tensors_alone(tmp_path / "a.safetensors")
    worst = max(apart(read[f"transformer.{name}"], delta) for name, delta in updates(network).items())
    assert worst < 2.0**-7
    assert check_file(tmp_path / "a.safetensors", network, "diffusers").largest == pytest.approx(worst, rel=1e-3)


@pytest.mark.parametrize("save_format", ["kohya", "comfy", "diffusers"])
@pytest.mark.parametrize("family", ["qwen_image", "qwen_image_21", "z_image", "flux2_klein", "flux3_klein"])
def test_diffusers_own_loader_does_what_the_rules_say(family: str, save_format: str, tmp_path: Path) -> None:
    inputs = ("time_in_dim=2", "img_in_dim=2")
    if (family, save_format) != ("qwen_image_21", "kohya"):
        inputs += ("txt_in_dim=2",)
    _, network = trained(family, "lora", *inputs, network_dim=4, network_alpha=3.0)
    network.save(tmp_path / "a.safetensors", save_format, "fp32", {})
    pipe = diffusers_pipeline(family, MODELS[family][0]())
    pipe.load_lora_weights(str(tmp_path / "a.safetensors"), adapter_name="x")
    loaded = {name: module for name, module in pipe.transformer.named_modules() if isinstance(module, BaseTunerLayer)}
    diffusers = READERS[0]
    assert loaded.keys() == readable(diffusers, network.modules, network.targets, save_format)
    for name, delta in updates(network).items():
        if name in loaded:
            assert apart(loaded[name].get_delta_weight("x").double(), delta) < 1e-6


@pytest.mark.parametrize("inputs", ["txt_in_dim=2", "mod_dim=2"])
def test_a_module_that_diffusers_loader_stops_at_takes_all_others_with_it(inputs: str, tmp_path: Path) -> None:
    _, network = trained("qwen_image_21", "lora", inputs, network_dim=4)
    network.save(tmp_path / "a.safetensors", "kohya", "fp32", {})
    pipe = diffusers_pipeline("qwen_image_21", tiny_21_transformer())
    with pytest.raises(ValueError, match="state_dict. should be empty"):
        pipe.load_lora_weights(str(tmp_path / "a.safetensors"), adapter_name="x")
    assert readable(READERS[0], network.modules, QWEN_21_TARGETS, "kohya") == set()
    tensors = load_file(tmp_path / "a.safetensors")
    assert not read_as(READERS[0], tensors, {}, QWEN_21_TARGETS).weights
    assert read_as(READERS[1], tensors, {}, QWEN_21_TARGETS).weights


# What precedes a module's name in published files -> whether dots are underscores in it.
PREFIXES = {"transformer.": False, "diffusion_model.": False, "": False, "lora_unet_": True, "lora_transformer_": True}
OTHERS = ("ff.net.2", "img_mlp.net.2", "w1", "ff.up", "ff.linear_out", "gate_layer", "modulation.1", "txt_in.in_layer")
PAIRS = [
    ("lora_A.weight", "lora_B.weight"),
    ("lora_A.default.weight", "lora_B.default.weight"),
    ("lora_down.weight", "lora_up.weight"),
    ("lora.down.weight", "lora.up.weight"),
]
FOREIGN = [
    *[(family, prefix) for family in [*MODELS][1:] for prefix in PREFIXES if prefix != "lora_transformer_"],
    ("flux", "transformer."),
    ("flux", "lora_transformer_"),
    ("flux2_klein", "lora_transformer_"),
]


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        pytest.param(*pair, marks=() if pair[0] == "flux" or i % 4 == i // 4 % 4 else pytest.mark.slow)
        for i, pair in enumerate(FOREIGN)
    ],
)
def test_of_foreign_files_too_the_rules_say_what_diffusers_own_loader_does(
    family: str, prefix: str, tmp_path: Path
) -> None:
    make, targets = MODELS[family]
    untouched = make()
    layer = next(name for name, module in untouched.named_modules() if name.endswith("attn.to_q") or "to_k" in name)
    others = [name for name, module in untouched.named_modules() if name.endswith(OTHERS) and ".1." not in name]
    for (down, up), alpha, name in product(PAIRS, (True, False), (layer, *others)):
        if (prefix, down) == ("transformer.", "lora_down.weight") and family == "flux":
            continue  # read without its alpha: not claimed
        model, stem = copy.deepcopy(untouched), prefix + (name.replace(".", "_") if PREFIXES[prefix] else name)
        linear, random = model.get_submodule(name), torch.Generator().manual_seed(0)
        a = torch.randn(4, linear.in_features, generator=random)
        b = torch.randn(linear.out_features, 4, generator=random)
        tensors = {f"{stem}.{down}": a, f"{stem}.{up}": b} | ({f"{stem}.alpha": torch.tensor(2.0)} if alpha else {})
        save_file(tensors, tmp_path / "a.safetensors")
        expected = b.double() @ a.double() * (0.5 if alpha else 1.0)
        pipe = diffusers_pipeline(family, model)
        try:
            pipe.load_lora_weights(str(tmp_path / "a.safetensors"), adapter_name="x")
            found = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
            real = found.keys() == {name} and apart(found[name].get_delta_weight("x").double(), expected) < 1e-5
        except Exception:  # any refusal, and tensors that were never filled
            real = False
        meant = {name: LoraWeights(a, b, 2.0 if alpha else 4.0)}
        ours = next(
            each for each in loads_in(tmp_path / "a.safetensors", meant, targets) if each.program == "diffusers"
        )
        assert ours.is_right == real, (down, alpha, name)


LOKR_STEMS = {
    "flux2_klein": {
        "transformer_blocks.0.attn.to_q": "double_blocks.0.img_attn.qkv",
        "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
        "single_transformer_blocks.0.attn.to_out": "single_blocks.0.linear2",
        "x_embedder": "img_in",
    },
    "z_image": {"layers.0.attention.to_q": "layers.0.attention.qkv", "layers.0.feed_forward.w1": ""},
    "qwen_image": {"transformer_blocks.0.attn.to_q": ""},
    "flux3_klein": {"single_transformer_blocks.0.attn.to_q": "single_blocks.0.q_proj"},
}
FORMS = {  # the factors' ranks; 0: whole
    "whole": (0, 0),
    "w2 of low rank": (0, 2),
    "both of low rank": (1, 1),
}


@pytest.mark.parametrize("prefix", ["transformer.", "diffusion_model.", "base_model.model.", "", "lycoris_"])
@pytest.mark.parametrize("family", LOKR_STEMS)
def test_of_a_lokr_too_the_rules_say_what_diffusers_own_loader_does(family: str, prefix: str, tmp_path: Path) -> None:
    make, targets = MODELS[family]
    untouched = make()
    for (name, original), ranks, alpha in product(LOKR_STEMS[family].items(), FORMS.values(), (True, False)):
        for stem in filter(None, (name, original)):
            model, random = copy.deepcopy(untouched), torch.Generator().manual_seed(0)
            rows, columns = model.get_submodule(name).weight.shape
            rows *= 3 if stem.endswith("qkv") else 1
            shapes = [(one, -(-size // one)) for size in (rows, columns) for one in [factorization(size, 4)[0]]]
            tensors = {}
            for side, rank in enumerate(ranks):
                shape, key = [shapes[0][side], shapes[1][side]], f"lokr_w{side + 1}"
                parts = {f"{key}_a": (shape[0], rank), f"{key}_b": (rank, shape[1])} if rank else {key: shape}
                tensors |= {part: torch.randn(size, generator=random) for part, size in parts.items()}
            tensors |= {"alpha": torch.tensor(3.0)} if alpha else {}
            written = prefix + (stem.replace(".", "_") if prefix.endswith("_") else stem)
            save_file({f"{written}.{key}": t for key, t in tensors.items()}, tmp_path / "a.safetensors")
            w1, w2 = (
                tensors[key] if key in tensors else tensors[f"{key}_a"] @ tensors[f"{key}_b"]
                for key in ("lokr_w1", "lokr_w2")
            )
            rank = ranks[1] or ranks[0]
            expected = torch.kron(w1.double(), w2.double()) * (3 / rank if alpha and rank else 1.0)
            pipe = diffusers_pipeline(family, model)
            try:
                pipe.load_lora_weights(str(tmp_path / "a.safetensors"), adapter_name="x")
                (found,) = (m for m in model.modules() if isinstance(m, BaseTunerLayer))
                real = apart(found.get_delta_weight("x").double(), expected) < 1e-5
            except Exception:  # any refusal, and a file of which nothing was loaded
                real = False
            meant = load_adapter(tmp_path / "a.safetensors", targets).weights
            ours = next(
                each for each in loads_in(tmp_path / "a.safetensors", meant, targets) if each.program == "diffusers"
            )
            assert ours.is_right == real, (written, ranks, alpha)


def test_a_lokr_of_several_factors_is_told_from_one_that_diffusers_builds(tmp_path: Path) -> None:
    stem, tensors = "diffusion_model.layers.{}.attention.to_q", {}
    for block, one in enumerate((2, 8)):  # of 32 x 32
        name = stem.format(block)
        tensors |= {f"{name}.lokr_w1": torch.randn(one, one), f"{name}.lokr_w2": torch.randn(32 // one, 32 // one)}
    save_file(tensors, tmp_path / "a.safetensors")
    meant = load_adapter(tmp_path / "a.safetensors", Z_IMAGE_TARGETS).weights
    rows = {each.program: each.row for each in loads_in(tmp_path / "a.safetensors", meant, Z_IMAGE_TARGETS)}
    assert rows["diffusers"][1:] == ("0 of 2", "", "it takes LoKrs of one factor alone; train with one in network_args")
    assert rows["ComfyUI"][1] == "2 of 2"
    _, network = trained("z_image", "lokr", "attn_factor=4", "mlp_factor=8", "full_matrix=True")
    network.save(tmp_path / "b.safetensors", "comfy", "fp32", {})
    checked = check_file(tmp_path / "b.safetensors", network, "comfy")  # a run is not ended by it
    assert {each.program for each in checked.programs if each.is_right} == {"ComfyUI"}
    with pytest.raises(ValueError, match="Could not infer a `decompose_factor`"):
        diffusers_pipeline("z_image", tiny_z_transformer()).load_lora_weights(str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize("pair", [*PAIRS, ("lora_A", "lora_B")])
def test_comfyui_and_we_read_every_spelling_of_a_pair(pair: tuple[str, str], tmp_path: Path) -> None:
    name = "transformer_blocks.0.attn.to_q"
    tensors = {f"{name}.{pair[0]}": torch.randn(4, 32), f"{name}.{pair[1]}": torch.randn(32, 4)}
    save_file(tensors, tmp_path / "a.safetensors")
    meant = load_adapter(tmp_path / "a.safetensors", FLUX_TARGETS).weights
    assert meant.keys() == {name}
    found = {each.program: each for each in loads_in(tmp_path / "a.safetensors", meant, FLUX_TARGETS)}
    assert found["ComfyUI"].is_right


def test_a_loha_that_was_trained_on_the_joined_layer_is_read_by_rows(tmp_path: Path) -> None:
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    shapes = {"hada_w1_a": (96, 2), "hada_w1_b": (2, 32), "hada_w2_a": (96, 2), "hada_w2_b": (2, 32)}
    tensors = {f"{stem}.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors | {f"{stem}.alpha": torch.tensor(1.0)}, tmp_path / "a.safetensors")
    meant = load_adapter(tmp_path / "a.safetensors", lora_targets()["flux_kontext"]).weights
    found = {each.program: each for each in loads_in(tmp_path / "a.safetensors", meant, lora_targets()["flux_kontext"])}
    # ComfyUI and musubi-tuner have the joined layer itself
    assert {program for program, each in found.items() if each.is_right} == {"ComfyUI", "musubi-tuner"}
    assert found["ComfyUI"].layers == 3


# Layers of the tiny model's transformer that each program reads: found by its own code, see docs/lora_formats.md.
LOADS = {
    ("flux", "lora", "diffusers"): {"diffusers", "ComfyUI"},
    ("flux", "lora", "kohya"): {"diffusers", "ComfyUI", "sd-scripts"},
    ("flux", "lora", "comfy"): {"diffusers", "ComfyUI"},
    ("flux", "dora", "diffusers"): {"diffusers"},
    ("flux", "dora", "comfy"): {"ComfyUI"},
    ("flux", "lokr", "comfy"): {"ComfyUI"},
    ("flux", "loha", "comfy"): {"ComfyUI"},
    ("qwen_image", "lora", "diffusers"): {"diffusers", "ComfyUI"},
    ("qwen_image", "lora", "kohya"): {"diffusers", "ComfyUI", "musubi-tuner"},
    ("qwen_image", "lora", "comfy"): {"diffusers", "ComfyUI"},
    ("qwen_image", "lokr", "kohya"): {"ComfyUI", "musubi-tuner"},
    ("qwen_image", "loha", "kohya"): {"ComfyUI", "musubi-tuner"},
    ("qwen_image_21", "lora", "diffusers"): {"diffusers", "ComfyUI"},
    ("qwen_image_21", "lora", "kohya"): {"musubi-tuner"},
    ("qwen_image_21", "lora", "comfy"): {"ComfyUI"},
    ("qwen_image_21", "dora", "diffusers"): {"diffusers"},
    ("z_image", "lora", "diffusers"): {"diffusers", "ComfyUI"},
    ("z_image", "lora", "kohya"): {"diffusers", "musubi-tuner"},
    ("z_image", "lora", "comfy"): {"diffusers", "ComfyUI"},
    ("flux3_klein", "lora", "diffusers"): {"diffusers"},
    ("flux3_klein", "lora", "kohya"): {"ComfyUI"},
    ("flux3_klein", "lora", "comfy"): {"diffusers", "ComfyUI"},
    ("z_image", "lokr", "kohya"): {"musubi-tuner"},
    ("z_image", "lokr", "comfy"): {"diffusers", "ComfyUI"},
    ("z_image", "dora", "comfy"): {"ComfyUI"},
    ("flux3_klein", "lokr", "comfy"): {"ComfyUI"},
    ("flux3_klein", "loha", "kohya"): {"ComfyUI"},
    ("flux3_klein", "dora", "comfy"): {"ComfyUI"},
    ("qwen_image", "lokr", "comfy"): {"ComfyUI"},
    ("krea2", "lokr", "kohya"): {"ComfyUI", "musubi-tuner"},
    ("krea2", "lokr", "comfy"): {"ComfyUI"},
    ("ernie_image", "lokr", "comfy"): {"ComfyUI"},
    ("flux2_klein", "lora", "diffusers"): {"diffusers", "ComfyUI"},
    ("flux2_klein", "lora", "kohya"): {"diffusers", "ComfyUI", "musubi-tuner"},
    ("flux2_klein", "lora", "comfy"): {"diffusers", "ComfyUI"},
    ("flux2_klein", "lokr", "comfy"): {"diffusers", "ComfyUI"},
    ("krea2", "lora", "diffusers"): {"diffusers", "ComfyUI"},
    ("krea2", "lora", "kohya"): {"ComfyUI", "musubi-tuner"},
    ("krea2", "lora", "comfy"): {"diffusers", "ComfyUI"},
    ("krea2", "loha", "comfy"): {"ComfyUI"},
    ("ernie_image", "lora", "diffusers"): {"diffusers", "ComfyUI"},
    ("ernie_image", "lora", "kohya"): {"ComfyUI"},
    ("ernie_image", "lora", "comfy"): {"diffusers", "ComfyUI"},
    ("ernie_image", "dora", "diffusers"): {"diffusers"},
    ("ernie_image", "lokr", "kohya"): {"ComfyUI"},
}


@pytest.mark.parametrize(("family", "kind", "save_format"), LOADS)
def test_the_table_names_the_programs_that_load_a_file(
    family: str, kind: str, save_format: str, tmp_path: Path
) -> None:
    _, network = trained(family, kind, network_dim=8)
    network.save(tmp_path / "a.safetensors", save_format, "fp32", {})
    programs = check_file(tmp_path / "a.safetensors", network, save_format).programs
    assert {each.program for each in programs if each.is_right} == LOADS[family, kind, save_format]
    for each in programs:
        if each.is_right:
            assert each.layers == len(network.modules)
            assert each.difference is not None
            assert each.difference < 1e-6


def test_the_table_says_how_much_is_lost_and_what_to_do(tmp_path: Path) -> None:
    _, network = trained("z_image", network_dim=4)
    network.save(tmp_path / "a.safetensors", "kohya", "fp32", {})
    rows = {each.program: each.row for each in check_file(tmp_path / "a.safetensors", network, "kohya").programs}
    # of 7 layers a block the MLP's three have one name everywhere
    assert rows["ComfyUI"][1:] == ("6 of 14", "0", "set save_format = diffusers or comfy")
    _, network = trained("flux", "dora", network_dim=4)
    network.save(tmp_path / "b.safetensors", "diffusers", "fp32", {})
    rows = {each.program: each.row for each in check_file(tmp_path / "b.safetensors", network, "diffusers").programs}
    assert rows["ComfyUI"][1:] == ("40 of 40", "another update", "set save_format = comfy")
    assert "takes no DoRA of ours" in rows["sd-scripts"][3]


def test_another_trainers_file_is_judged_too(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    name = "transformer.transformer_blocks.0.attn.to_q"
    pair = {f"{name}.lora_A.weight": torch.randn(8, 32, generator=random), f"{name}.lora_B.weight": torch.ones(32, 8)}
    fields = {"transformer.r": 8, "transformer.lora_alpha": 2}  # what diffusers' own training scripts leave
    save_file(pair, tmp_path / "a.safetensors", {ADAPTER_METADATA_KEY: json.dumps(fields)})
    meant = load_adapter(tmp_path / "a.safetensors", FLUX_TARGETS).weights
    found = {each.program: each for each in loads_in(tmp_path / "a.safetensors", meant, FLUX_TARGETS)}
    assert found["diffusers"].is_right
    assert found["ComfyUI"].difference == pytest.approx(3.0)  # four times too strong
    assert "diffusers" in found["ComfyUI"].remedy  # written anew it is right


def test_a_header_left_behind_is_found_out(tmp_path: Path) -> None:
    _, network = trained("qwen_image", network_dim=4)
    path = tmp_path / "a.safetensors"
    network.save(path, "kohya", "fp32", {})
    check_file(path, network, "kohya")
    fields = {"transformer.r": 4, "transformer.lora_alpha": 1.0}
    save_file(load_file(path), path, {ADAPTER_METADATA_KEY: json.dumps(fields)})  # diffusers multiplies by both
    with pytest.raises(UserError, match=r"diffusers would read .* otherwise than was trained"):
        check_file(path, network, "kohya")


def test_the_header_of_a_source_does_not_get_into_a_file_with_alphas(tmp_path: Path) -> None:
    _, network = trained("flux", network_dim=4)
    network.save(tmp_path / "a.safetensors", "diffusers", "fp32", {})
    read = load_lora(tmp_path / "a.safetensors", FLUX_TARGETS)
    save_adapter(tmp_path / "b.safetensors", read.weights, FLUX_TARGETS, "kohya", metadata=read.metadata)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert not [key for key in file.metadata() if "alpha" in key or "adapter" in key]


@pytest.mark.parametrize("fields", [{}, {"network_dim": 6, "network_alpha": 2.7}], ids=["power of two", "other"])
def test_going_on_with_a_files_ranks_goes_on_with_the_alpha_of_its_training(
    fields: dict[str, object], tmp_path: Path
) -> None:
    model, network = trained("flux", **fields)
    network.save(tmp_path / "a.safetensors", "diffusers", "fp32", {})
    file = load_lora(tmp_path / "a.safetensors", FLUX_TARGETS)
    alphas = trained_alphas(tmp_path / "a.safetensors", file.metadata, "transformer")
    other = make_flux()
    attached = attach_lora(other, file.weights, FLUX_TARGETS, "a", alphas=alphas)
    for name, layer in attached.modules.items():
        assert layer.alpha == network.modules[name].alpha
        torch.testing.assert_close(layer.lora_B.weight, network.modules[name].lora_B.weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(run_flux(other), run_flux(model), rtol=1e-5, atol=1e-6)


# ---- at the door


def layers(targets: LoraTargets, *args: str, components: tuple[str, ...] = ("transformer",)) -> list[str]:
    options = parse_network_args(NetworkConfig(network_args=list(args)), targets)
    return options.trained_layers(targets, components)


@pytest.mark.parametrize("family", MODELS)
def test_the_layers_named_before_a_model_is_there_are_those_that_are_trained(family: str) -> None:
    args = {"flux": ["in_dims=[2,0,2,0,0]", "img_mod_dim=0"], "qwen_image": ["img_mod_dim=2"], "z_image": ["mlp_dim=0"]}
    args |= {"flux2_klein": ["txt_in_dim=2", "single_dim=0"], "flux3_klein": ["img_mod_dim=2", "txt_dim=0"]}
    args |= {"krea2": ["txt_in_dim=0"], "qwen_image_21": ["mlp_dim=0"], "ernie_image": ["final_dim=2"]}
    pattern = r"exclude_patterns=.*attn\.to_q|.*attention\.to_k"
    _, network = trained(family, "lora", *args[family], pattern)
    first = {name.replace(".1.", ".0.") for name in network.modules}
    assert set(layers(network.targets, *args[family], pattern)) == {n for n in first if not n.startswith("x")} | {
        name for name in network.modules if ".1." not in name
    }


# what is trained beside the default; musubi-tuner's lora_qwen_image.py looks for layers in the blocks' classes
REFUSED = [
    (Z_IMAGE_TARGETS, "kohya", "lora", "comfyui", (), "reads no LoRA of .*set save_format = diffusers or comfy"),
    (Z_IMAGE_TARGETS, "diffusers", "lora", "musubi-tuner", (), "set save_format = kohya"),
    (Z_IMAGE_TARGETS, "comfy", "lora", "sd-scripts", (), "sd-scripts has no model z_image"),
    (FLUX3_TARGETS, "kohya", "lora", "diffusers", (), "set save_format = diffusers or comfy"),
    (FLUX_TARGETS, "diffusers", "dora", "comfyui", (), "reads no DoRA .*set save_format = comfy"),
    (FLUX_TARGETS, "comfy", "lokr", "diffusers", (), "takes no LoKr of ours; set network_type = lora, or merge it"),
    (
        lora_targets()["flux_fill"],
        "kohya",
        "lora",
        "diffusers",
        ("in_dims=[4,0,0,0,0]",),
        "no LoRA of x_embedder",
    ),
    (QWEN_TARGETS, "kohya", "lora", "musubi-tuner", ("txt_in_dim=2",), "no LoRA of txt_in .*leave these layers out"),
]


@pytest.mark.parametrize(("targets", "save_format", "kind", "program", "args", "message"), REFUSED)
def test_a_format_is_refused_for_a_program_that_would_read_it_otherwise(
    targets: LoraTargets, save_format: str, kind: str, program: str, args: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=f"save_for: .*{message}"):
        check_readers([program], layers(targets, *args), targets, save_format, kind)
    check_readers([], layers(targets, *args), targets, save_format, kind)  # unasked the run says it at its end


def test_several_factors_are_refused_for_diffusers_before_anything_is_trained() -> None:
    names = layers(Z_IMAGE_TARGETS)
    with pytest.raises(UserError, match="save_for: diffusers: it takes LoKrs of one factor alone; train with one"):
        check_readers(["diffusers"], names, Z_IMAGE_TARGETS, "comfy", "lokr", {4, 8})
    check_readers(["diffusers"], names, Z_IMAGE_TARGETS, "comfy", "lokr", {8})
    check_readers(["comfyui"], names, Z_IMAGE_TARGETS, "comfy", "lokr", {4, 8})


@pytest.mark.parametrize("args", [(), ("factor=4",), ("factor=2", "decompose_both=True")], ids=str)
@pytest.mark.parametrize("rank", [3, 16])
def test_musubi_tuners_two_readings_of_a_lokr_are_the_trained_update(
    args: tuple[str, ...], rank: int, tmp_path: Path
) -> None:
    model, network = trained("qwen_image", "lokr", *args, network_dim=rank, network_alpha=1.5)
    network.save(tmp_path / "a.safetensors", "kohya", "fp32", {})
    model.double()
    tensors = {key: tensor.double() for key, tensor in load_file(tmp_path / "a.safetensors").items()}
    for name, layer in network.modules.items():
        stem = f"lora_unet_{name.replace('.', '_')}"
        here = {key.removeprefix(f"{stem}."): t for key, t in tensors.items() if key.startswith(f"{stem}.")}
        w2 = here["lokr_w2"] if "lokr_w2" in here else here["lokr_w2_a"] @ here["lokr_w2_b"]
        kron = torch.kron(here["lokr_w1"], w2)
        alpha, dim = float(here["alpha"]), here["lokr_w2_a"].shape[1] if "lokr_w2_a" in here else None
        with torch.no_grad():
            expected = (layer(torch.eye(layer.in_features).double()) - layer.bias).t() - layer.weight
        # lokr.py, merge_weights_to_tensor: *_generate_image.py
        assert apart(kron * (alpha / dim if dim else 1.0), expected) < 1e-6
        # lokr.py, LoKrInfModule: the layer's own cut decides, not the file's
        dim = dim or max(here["lokr_w2"].shape)
        largest = max(max(factorization(size, -1)) for size in expected.shape)
        assert apart(kron * (alpha / dim if dim < largest / 2 else 1.0), expected) < 1e-6


def test_a_format_from_which_nobody_reads_a_layer_is_told() -> None:
    names = layers(FLUX_TARGETS, components=("transformer", "text_encoder_2"))
    said = read_by_none(names, FLUX_TARGETS, "diffusers", "lora")
    assert said is not None
    assert said.startswith("save_format: no program reads text_encoder_2.")
    assert said.endswith(" from diffusers; set save_format = kohya or comfy")
    assert read_by_none(names, FLUX_TARGETS, "kohya", "lora") is None
    check_readers(["comfyui", "sd-scripts"], names, FLUX_TARGETS, "kohya", "lora")


def test_q_k_and_v_that_were_trained_as_one_are_read_by_rows(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    down, up = torch.randn(4, 32, generator=random), torch.randn(96, 4, generator=random)
    tensors = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up, f"{stem}.alpha": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "a.safetensors")
    rows = zip(("to_q", "to_k", "to_v"), up.split(32), strict=True)
    meant = {f"transformer_blocks.0.attn.{name}": LoraWeights(down, part, 2.0) for name, part in rows}
    for each in loads_in(tmp_path / "a.safetensors", meant, FLUX_TARGETS):
        assert (each.layers, each.is_right, each.difference) == (3, True, pytest.approx(0.0, abs=1e-7)), each.program


def test_a_file_in_fp8_is_judged_too(tmp_path: Path) -> None:
    name = "transformer.transformer_blocks.0.attn.to_q"
    pair = {f"{name}.lora_A.weight": torch.randn(8, 32), f"{name}.lora_B.weight": torch.ones(32, 8)}
    save_file({key: tensor.to(torch.float8_e4m3fn) for key, tensor in pair.items()}, tmp_path / "a.safetensors")
    meant = load_adapter(tmp_path / "a.safetensors", FLUX_TARGETS).weights
    assert {each.program for each in loads_in(tmp_path / "a.safetensors", meant, FLUX_TARGETS) if each.is_right} == {
        "diffusers",
        "ComfyUI",
    }
