"""Files of other programs: fused layers, biases, full differences, XLabs' processors, layers that are wider here.

Held to what diffusers and peft make of the same file where they read it, else to the sum written out in float64.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from library.config.model_layouts import is_lora
from library.errors import UserError
from library.models.layer_names import LoraTargets
from networks.files.adapters import load_adapter, load_lora
from networks.files.inspection import inspect_lora
from networks.files.verify import loads_in
from networks.merging.merge import LoraSource, merge_loras, read_base_weights
from networks.network import attach_lora
from tests.networks.conftest import diffusers_pipeline, inject, make_flux, run_flux
from tests.networks.files.test_readers import MODELS, apart
from tests.targets import FLUX2_TARGETS, FLUX_TARGETS
from tests.tiny_flux2 import tiny_flux2_transformer
from tests.tiny_krea2 import tiny_krea2_transformer
from tools.convert_lora import convert

PAIRS = {"peft": ("lora_A.weight", "lora_B.weight"), "kohya": ("lora_down.weight", "lora_up.weight")}
# of the diffusers modules of a layer: the names that programs put before it. SimpleTuner has diffusers' own pipelines,
# whose ``fuse_qkv_projections`` calls the whole to_qkv and to_added_qkv.
QKV = ("to_q", "to_k", "to_v")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
FUSED = {
    "flux": {"transformer_blocks.1.attn.": {"to_qkv": QKV, "to_added_qkv": ADDED, "add_qkv_proj": ADDED},
             "single_transformer_blocks.1.attn.": {"to_qkv": QKV}},
    "flux2_klein": {"transformer_blocks.0.attn.": {"to_qkv": QKV, "to_added_qkv": ADDED}},
    "flux3_klein": {"single_transformer_blocks.0.attn.": {"to_qkv": QKV}},
    "qwen_image": {"transformer_blocks.0.attn.": {"to_qkv": QKV, "to_added_qkv": ADDED}},
    "qwen_image_21": {"transformer_blocks.0.attn.": {"to_qkv": QKV}},
    "z_image": {"layers.0.attention.": {"to_qkv": QKV}},
    "ernie_image": {"layers.0.self_attention.": {"to_qkv": QKV}},
    "krea2": {"transformer_blocks.1.attn.": {"to_qkv": QKV}, "text_fusion.refiner_blocks.1.attn.": {"to_qkv": QKV}},
}  # fmt: skip


def changed(path: Path, model: nn.Module, targets: LoraTargets) -> dict[str, Tensor]:
    """The parameters that ``base_weights`` changes, as the base is loaded."""
    changes = read_base_weights([str(path)], [], targets).changes(targets)
    return {name: change(model.get_parameter(name).detach().float()) for name, change in changes.items()}


def merged(path: Path, model: nn.Module, targets: LoraTargets, folder: Path) -> dict[str, Tensor]:
    """The same of ``merge_lora.py --model``."""
    model.save_pretrained(folder / "base")
    merge_loras(folder / "base", [LoraSource(path, 1.0)], folder / "merged", targets)
    new = load_file(folder / "merged" / "diffusion_pytorch_model.safetensors")
    return {name: each for name, each in new.items() if not torch.equal(each, model.state_dict()[name])}


@pytest.mark.parametrize("way", [changed, merged])
@pytest.mark.parametrize("family", MODELS)
def test_a_lora_in_any_known_form_adds_its_product_and_its_bias(family: str, way, tmp_path: Path) -> None:
    make, targets = MODELS[family]
    model, random = make(), torch.Generator().manual_seed(0)
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    forms = list(product(PAIRS, ("transformer.", "diffusion_model.", "", "lora_unet_"), (True, False)))
    tensors, expected = {}, {}
    layers = {n: (n,) for n in linears if targets.keys.find(n) and targets.group_of(n)}
    for stem, fused in FUSED[family].items():
        for name, parts in fused.items():
            layers[stem + name] = tuple(stem + part for part in parts)
    taken: set[str] = set()
    for i, (name, parts) in enumerate(sorted(layers.items(), key=lambda pair: -len(pair[1]))):
        if taken & set(parts):
            continue
        taken |= set(parts)
        (pair, prefix, has_alpha), rank = forms[i % len(forms)], 1 + i % 3
        stem = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
        weight = torch.cat([linears[part].weight for part in parts])
        a = torch.randn(rank, weight.shape[1], generator=random)
        b = torch.randn(weight.shape[0], rank, generator=random)
        scale = 1.5 / rank if has_alpha else 1.0
        tensors |= {f"{stem}.{PAIRS[pair][0]}": a, f"{stem}.{PAIRS[pair][1]}": b}
        tensors |= {f"{stem}.alpha": torch.tensor(1.5)} if has_alpha else {}
        sizes = [linears[part].out_features for part in parts]
        new = weight.double() + scale * b.double() @ a.double()
        expected |= {f"{part}.weight": rows for part, rows in zip(parts, new.split(sizes), strict=True)}
        if all(linears[part].bias is not None for part in parts):
            added = torch.randn(len(weight), generator=random)
            scaled = pair == "peft"  # peft multiplies the bias of B by the scale, ComfyUI takes diff_b as it stands
            tensors[f"{stem}.lora_B.bias" if scaled else f"{stem}.diff_b"] = added
            bias = torch.cat([linears[part].bias for part in parts]).double() + added * (scale if scaled else 1.0)
            expected |= {f"{part}.bias": rows for part, rows in zip(parts, bias.split(sizes), strict=True)}
    assert len(taken) > len(layers) - 12
    save_file(tensors, tmp_path / "a.safetensors")
    assert is_lora(tensors)
    arguments = () if way is changed else (tmp_path,)
    found = way(tmp_path / "a.safetensors", model, targets, *arguments)
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # fp32: the product, the sum
        torch.testing.assert_close(found[name].double(), value.detach(), rtol=1e-5, atol=1e-5)


def test_a_lora_of_fused_projections_does_what_it_does_in_diffusers(tmp_path: Path) -> None:
    model = make_flux()
    model.fuse_qkv_projections()  # as SimpleTuner's fuse_qkv_projections
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_qkv", "to_added_qkv"], init_lora_weights=False))
    expected = run_flux(model)
    FluxPipeline.save_lora_weights(tmp_path, get_peft_model_state_dict(model, adapter_name="default"))
    path = tmp_path / "pytorch_lora_weights.safetensors"
    plain, lora = make_flux(), load_lora(path, FLUX_TARGETS)
    attach_lora(plain, lora.weights, FLUX_TARGETS, "x")
    torch.testing.assert_close(run_flux(plain), expected, rtol=1e-4, atol=1e-5)  # fp32, other order of sums
    assert apart(expected, run_flux(make_flux())) > 1e-3
    # no program but the one that wrote it knows the name; its own formats all do
    assert {each.layers for each in loads_in(path, lora.weights, FLUX_TARGETS)} == {0}


def test_fused_projections_of_fewer_keys_than_queries_are_split_where_simpletuner_splits_them(tmp_path: Path) -> None:
    attention = tiny_krea2_transformer().transformer_blocks[0].attn
    heights = [attention.to_q.out_features, attention.to_k.out_features, attention.to_v.out_features]
    assert heights == [64, 32, 32]
    a, b = torch.randn(3, 64), torch.randn(128, 3)
    stem = "transformer.transformer_blocks.0.attn.to_qkv"
    save_file({f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}, tmp_path / "a.safetensors")
    read = load_lora(tmp_path / "a.safetensors", MODELS["krea2"][1]).weights
    for name, rows in zip(QKV, b.split(heights), strict=True):
        assert torch.equal(read[f"transformer_blocks.0.attn.{name}"].up, rows)
    save_file({f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b[:63]}, tmp_path / "b.safetensors")
    with pytest.raises(UserError, match="made for another model"):
        load_lora(tmp_path / "b.safetensors", MODELS["krea2"][1])


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_xlabs_processors_are_read_as_diffusers_reads_them(prefix: str, tmp_path: Path) -> None:
    random, tensors = torch.Generator().manual_seed(0), {}
    shapes = {"qkv_lora1": (96, 32), "qkv_lora2": (96, 32), "proj_lora1": (32, 32), "proj_lora2": (32, 32)}
    layers = {f"double_blocks.{i}.processor.{name}": shape for i in (0, 1) for name, shape in shapes.items()}
    layers |= {f"single_blocks.{i}.processor.qkv_lora": (96, 32) for i in (0, 1)}
    layers |= {f"single_blocks.{i}.processor.proj_lora": (32, 160) for i in (0, 1)}
    for name, (out, width) in layers.items():
        tensors[f"{prefix}{name}.down.weight"] = torch.randn(4, width, generator=random) * 0.2
        tensors[f"{prefix}{name}.up.weight"] = torch.randn(out, 4, generator=random) * 0.2
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    pipeline = diffusers_pipeline("flux", make_flux())
    pipeline.load_lora_weights(str(path))
    lora, model = load_lora(path, FLUX_TARGETS), make_flux()
    attach_lora(model, lora.weights, FLUX_TARGETS, "x")
    torch.testing.assert_close(run_flux(model), run_flux(pipeline.transformer), rtol=1e-4, atol=1e-5)
    assert is_lora(tensors)
    assert next(each for each in loads_in(path, lora.weights, FLUX_TARGETS) if each.program == "diffusers").is_right
    convert(path, tmp_path / "b.safetensors", "diffusers")
    for name, weights in load_lora(tmp_path / "b.safetensors", FLUX_TARGETS).weights.items():
        torch.testing.assert_close(weights.delta(), lora.weights[name].delta())


def test_a_lora_with_biases_merges_to_what_peft_computes(tmp_path: Path) -> None:
    model = make_flux()
    layers = ["to_q", "proj_out", "norm_out.linear", "x_embedder"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules=layers, lora_bias=True, init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B.default.bias"):
            nn.init.normal_(parameter, std=0.3)
    expected = run_flux(model)
    state = {f"transformer.{name}": each for name, each in get_peft_model_state_dict(model).items()}
    stems = {name.rpartition(".lora_")[0] for name in state}
    save_file(state | {f"{stem}.alpha": torch.tensor(6.0) for stem in stems}, tmp_path / "a.safetensors")
    plain = make_flux()
    for way, arguments in ((changed, ()), (merged, (tmp_path,))):
        plain.load_state_dict(make_flux().state_dict())
        found = way(tmp_path / "a.safetensors", plain, FLUX_TARGETS, *arguments)
        plain.load_state_dict(plain.state_dict() | found)
        torch.testing.assert_close(run_flux(plain), expected, rtol=1e-4, atol=1e-5)
    report = inspect_lora(tmp_path / "a.safetensors")
    assert any("biases" in note for note in report.notes)


def test_comfyuis_differences_are_added_as_they_stand_also_to_rows_of_fused_layers(tmp_path: Path) -> None:
    model, random, tensors = make_flux(), torch.Generator().manual_seed(0), {}
    for stem, shape in {"double_blocks.0.img_attn.qkv": (96, 32), "final_layer.adaLN_modulation.1": (64, 32)}.items():
        tensors[f"diffusion_model.{stem}.diff"] = torch.randn(shape, generator=random)
        tensors[f"diffusion_model.{stem}.diff_b"] = torch.randn(shape[0], generator=random)
    save_file(tensors, tmp_path / "a.safetensors")
    expected = {}
    for leaf, ending in (("weight", "diff"), ("bias", "diff_b")):
        rows = tensors[f"diffusion_model.double_blocks.0.img_attn.qkv.{ending}"].split(32)
        expected |= {f"transformer_blocks.0.attn.{n}.{leaf}": each for n, each in zip(QKV, rows, strict=True)}
        shift, scale = tensors[f"diffusion_model.final_layer.adaLN_modulation.1.{ending}"].chunk(2)
        expected[f"norm_out.linear.{leaf}"] = torch.cat([scale, shift])
    found = changed(tmp_path / "a.safetensors", model, FLUX_TARGETS)
    assert found.keys() == expected.keys()
    assert found.keys() == merged(tmp_path / "a.safetensors", model, FLUX_TARGETS, tmp_path).keys()
    for name, difference in expected.items():
        torch.testing.assert_close(found[name], model.get_parameter(name).detach() + difference)
    table = {each.program: each for each in loads_in(tmp_path / "a.safetensors",
             load_adapter(tmp_path / "a.safetensors", FLUX_TARGETS).weights, FLUX_TARGETS)}  # fmt: skip
    assert (table["ComfyUI"].is_right, table["diffusers"].layers) == (True, 0)


def test_what_no_lora_can_hold_is_refused_with_the_way_that_takes_it_and_zeros_are_left_out(tmp_path: Path) -> None:
    stem = "diffusion_model.double_blocks.0.img_attn.proj"
    pair = {f"{stem}.lora_down.weight": torch.randn(2, 32), f"{stem}.lora_up.weight": torch.randn(32, 2)}
    bias, path = {f"{stem}.diff_b": torch.randn(32)}, tmp_path / "a.safetensors"
    save_file(pair | bias, path)
    for read in (lambda: load_lora(path, FLUX_TARGETS), lambda: inject(make_flux()).load_file(path)):
        with pytest.raises(UserError, match=r"to_out\.0\.bias beside.*merge_lora\.py --model.*base_weights"):
            read()
    save_file(pair | {f"{stem}.diff_b": torch.zeros(32)}, path)
    lora = load_lora(path, FLUX_TARGETS)
    assert lora.weights.keys() == {"transformer_blocks.0.attn.to_out.0"}
    assert "are zero and left out (transformer_blocks.0.attn.to_out.0.bias)" in lora.notes[0]
    save_file(pair | {f"{stem}.norm.query_norm.diff": torch.randn(16)}, path)
    with pytest.raises(UserError, match=r"query_norm\.diff.*take them out of the file"):
        load_lora(path, FLUX_TARGETS)
    save_file(pair | bias, path)
    model = tiny_flux2_transformer()  # which has no biases
    with pytest.raises(UserError, match=r"to_out\.0\.bias"):
        merged(path, model, FLUX2_TARGETS, tmp_path)


def test_a_lora_of_the_narrower_input_layer_gets_zero_columns_as_in_diffusers(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {f"transformer.{name}.lora_{part}.weight": torch.randn(shape, generator=random)
               for name in ("x_embedder", "transformer_blocks.0.attn.to_q")
               for part, shape in {"A": (4, 16 if name == "x_embedder" else 32), "B": (32, 4)}.items()}  # fmt: skip
    path = tmp_path / "dev.safetensors"
    save_file(tensors, path)

    def fill() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return type(make_flux()).from_config(make_flux().config | {"in_channels": 96, "out_channels": 16})

    pipeline = diffusers_pipeline("flux", fill())
    pipeline.load_lora_weights(str(path))
    found = {name: layer for name, layer in pipeline.transformer.named_modules() if isinstance(layer, BaseTunerLayer)}
    base = fill().state_dict()
    expected = {f"{n}.weight": base[f"{n}.weight"] + each.get_delta_weight("default_0") for n, each in found.items()}
    assert len(expected) == 2
    attached = fill()
    network = attach_lora(attached, load_lora(path, FLUX_TARGETS).weights, FLUX_TARGETS, "x")
    running = {f"{n}.weight": each.base.weight + each.weights().delta() for n, each in network.modules.items()}
    for values in (running, changed(path, fill(), FLUX_TARGETS), merged(path, fill(), FLUX_TARGETS, tmp_path)):
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value)
    report = merge_loras(tmp_path / "base", [LoraSource(path, 1.0)], tmp_path / "again", FLUX_TARGETS)
    assert report.notes == ("x_embedder.weight: the LoRA is for fewer inputs, the others add nothing",)
    save_file(tensors | {"transformer.x_embedder.lora_A.weight": torch.randn(4, 97)}, path)
    with pytest.raises(UserError, match="x_embedder"):
        merged(path, fill(), FLUX_TARGETS, tmp_path / "c")


def test_halves_that_diffusers_leaves_where_they_are_are_told(tmp_path: Path) -> None:
    random, stem = torch.Generator().manual_seed(0), "diffusion_model.final_layer.adaLN_modulation.1"
    width = tiny_flux2_transformer().norm_out.linear.in_features
    a, b = torch.randn(4, width, generator=random), torch.randn(2 * width, 4, generator=random)
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}, path)
    meant = load_lora(path, FLUX2_TARGETS).weights

    def in_diffusers(file: Path) -> Tensor:
        pipeline = diffusers_pipeline("flux2_klein", tiny_flux2_transformer())
        pipeline.load_lora_weights(str(file), adapter_name="x")
        return pipeline.transformer.norm_out.linear.get_delta_weight("x")

    real = apart(in_diffusers(path), meant["norm_out.linear"].delta())
    row = next(each for each in loads_in(path, meant, FLUX2_TARGETS) if each.program == "diffusers")
    assert real > 1
    assert row.difference == pytest.approx(real, rel=1e-4)
    assert row.remedy == "set save_format = diffusers"
    convert(path, other, "diffusers", model_type="flux2_klein")
    shift, scale = (b @ a).chunk(2)
    torch.testing.assert_close(in_diffusers(other), torch.cat([scale, shift]))
    assert all(each.is_right for each in loads_in(other, meant, FLUX2_TARGETS) if each.program == "diffusers")
