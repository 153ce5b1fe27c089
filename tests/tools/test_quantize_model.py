"""bf16 checkpoint to fp8 file and back, read once by Tandem and once by a dozen independent lines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

import tools.quantize_model as quantize_model
from library.precision.checkpoint import WeightFiles
from library.precision.names import SCHEME_NAMES
from library.precision.recipe import scheme_named
from library.safetensors_io import RowRange
from tests.runs import ROOT, call, metadata, pipeline_forward, refusal
from tests.tiny import tiny_flux_transformer

WIDTH = 64
NAMES = ("double_blocks.0.img_attn.qkv", "double_blocks.0.img_mod.lin", "single_blocks.0.linear2")


def checkpoint(prefix: str = "") -> dict[str, Tensor]:
    """A few tensors of a FLUX file in BFL's names, bf16."""
    torch.manual_seed(0)
    shapes = {
        "img_in.weight": (WIDTH, 64),
        "double_blocks.0.img_attn.qkv.weight": (3 * WIDTH, WIDTH),
        "double_blocks.0.img_attn.qkv.bias": (3 * WIDTH,),
        "double_blocks.0.img_attn.norm.query_norm.scale": (32,),
        "double_blocks.0.img_mod.lin.weight": (6 * WIDTH, WIDTH),
        "single_blocks.0.linear2.weight": (WIDTH, 3 * WIDTH + 32),  # not a multiple of 64
        "final_layer.linear.weight": (64, WIDTH),
    }
    return {prefix + name: (torch.randn(shape) * 0.03).bfloat16() for name, shape in shapes.items()}


def run(model: Path, save_to: Path, *flags: object) -> None:
    call(quantize_model, "--model", model, "--save_to", save_to, *flags)


def read_independently(path: Path) -> dict[str, Tensor]:
    """Return layer -> fp32 weight by the formats' definitions alone: weight = codes * scale."""
    raw, weights = load_file(path), {}
    for name, tensor in raw.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight":
            continue
        scale = raw.get(f"{layer}.scale_weight", raw.get(f"{layer}.weight_scale"))
        if scale is None:
            weights[layer] = tensor.float()
        elif scale.ndim == 3:
            weights[layer] = (tensor.float().view(*scale.shape[:2], -1) * scale.float()).view(tensor.shape)
        else:
            weights[layer] = tensor.float() * scale.float()
    return weights


CASES = {
    "plain": ["--layout", "plain"],
    "plain e5m2": ["--layout", "plain", "--format", "e5m2"],
    "comfy_scaled": [],
    "comfy_quant": ["--layout", "comfy_quant"],
    "comfy_quant e5m2": ["--layout", "comfy_quant", "--format", "e5m2"],
    "musubi": ["--layout", "musubi"],
    "musubi tensor": ["--layout", "musubi", "--scheme", "tensor"],
    "musubi row": ["--layout", "musubi", "--scheme", "row"],
    "stochastic": ["--layout", "musubi", "--rounding", "stochastic", "--seed", "3"],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_what_is_written_reads_back_the_same_by_tandem_and_by_independent_code(
    case: str, prefix: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    original = checkpoint(prefix)
    save_file(original, source)
    run(source, target, *CASES[case])
    layout = WeightFiles(target).quantized
    assert layout is not None
    assert layout.layout == {"stochastic": "musubi"}.get(case, case.split()[0])
    assert set(layout.weights) == {f"{prefix}{name}.weight" for name in NAMES}
    stored, independent = load_file(target), read_independently(target)
    assert set(stored) - layout.bookkeeping == set(original)
    for name in NAMES:
        weight = f"{prefix}{name}.weight"
        ours = layout.read([RowRange(weight)]).dequantize(torch.float32)
        assert torch.equal(ours, independent[f"{prefix}{name}"])
        before = original[weight].float()
        error = float((ours - before).norm() / before.norm())
        # rms error of 3 and 2 mantissa bits; a plain cast of std 0.03 loses more to e4m3's fixed small steps;
        # stochastic rounding has about sqrt(2) times the error
        assert 0.005 < error < (0.06 if "e5m2" in case or case == "stochastic" else 0.035)
    for name in set(original) - set(layout.weights):
        assert torch.equal(stored[name], original[name])


@pytest.mark.parametrize("arguments", [[], ["--layout", "comfy_quant"], ["--scheme", "nvfp4"]])
@pytest.mark.parametrize("in_header", [False, True])
def test_a_quantised_file_asks_for_other_products_and_is_the_same_otherwise(
    arguments: list[str], in_header: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, high = "model.diffusion_model.", {"full_precision_matrix_mult": True}
    save_file(checkpoint(prefix), source := tmp_path / "in.safetensors")
    run(source, made := tmp_path / "made.safetensors", *arguments, "--products", "low")
    before = load_file(made)
    if in_header and arguments:  # as some writers have it, the layers named without the prefix
        said = {name: before.pop(name) for name in list(before) if name.endswith(".comfy_quant")}
        layers = {name.removesuffix(".comfy_quant").removeprefix(prefix): json.loads(bytes(marker.tolist()))
                  for name, marker in said.items()}  # fmt: skip
        save_file(before, made, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})})
    for ask, expected in (("high", high), ("low", {})):
        capsys.readouterr()
        run(made, target := tmp_path / f"{ask}.safetensors", "--products", ask)
        words = {"high": "high precision", "low": "the format"}[ask]
        assert f"asks ComfyUI for products in {words}; nothing else is changed" in capsys.readouterr().out
        after = load_file(target)
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            if name.endswith("scaled_fp8"):
                assert after[name].shape == ((2,) if expected else (0,))  # two elements: full precision
            elif name.endswith("comfy_quant"):
                old, new = (json.loads(bytes(each[name].tolist())) for each in (before, after))
                assert new == old | expected
            else:
                assert after[name].dtype == tensor.dtype
                assert torch.equal(after[name].float(), tensor.float())
        if in_header and arguments:
            assert json.loads(metadata(target)["_quantization_metadata"]) == {
                "format_version": "1.0", "layers": {name: each | expected for name, each in layers.items()}
            }  # fmt: skip
        served = WeightFiles(target).quantized
        assert served is not None
        assert {stored.served_rounding is None for stored in served.weights.values()} == {bool(expected)}


def test_the_words_of_the_command_line_are_the_schemes_there_are() -> None:
    assert tuple(scheme_named(name).name for name in SCHEME_NAMES) == SCHEME_NAMES


@pytest.mark.parametrize(
    ("flags", "precise"), [([], False), (["--products", "high"], True), (["--products", "low"], False)]
)
def test_nvfp4_files_leave_products_to_comfyui_unless_asked(flags: list[str], precise: bool, tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(checkpoint(), source)
    run(source, target, "--scheme", "nvfp4", *flags)
    layout = WeightFiles(target).quantized
    assert layout is not None
    assert {stored.full_precision for stored in layout.weights.values()} == {precise}


def test_comfyui_files_carry_the_marks_comfyui_looks_for(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    save_file(checkpoint("model.diffusion_model."), source, {"modelspec.title": "mine"})
    for extra, elements, config in (
        ([], 2, {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}),
        (["--products", "low"], 0, {"format": "float8_e4m3fn"}),
    ):
        run(source, tmp_path / "old.safetensors", *extra)
        run(source, tmp_path / "new.safetensors", "--layout", "comfy_quant", *extra)
        old, new = load_file(tmp_path / "old.safetensors"), load_file(tmp_path / "new.safetensors")
        marker = old["model.diffusion_model.scaled_fp8"]
        assert (marker.dtype, marker.numel()) == (torch.float8_e4m3fn, elements)
        layer = f"model.diffusion_model.{NAMES[0]}"
        scale = old[f"{layer}.scale_weight"]
        assert (scale.dtype, scale.shape) == (torch.float32, torch.Size([]))
        # as ComfyUI's loader reads it: json.loads(tensor.numpy().tobytes())
        assert json.loads(new[f"{layer}.comfy_quant"].numpy().tobytes()) == config
        assert torch.equal(new[f"{layer}.weight_scale"], scale)
    kept = metadata(tmp_path / "old.safetensors")
    assert kept["modelspec.title"] == "mine"
    assert kept["quantised"] == "e4m3fn, one scale a tensor, rounded to nearest; excluded: embedders, final"


def test_musubi_files_have_its_shapes_and_dtype(tmp_path: Path) -> None:
    save_file(checkpoint(), tmp_path / "in.safetensors")
    run(tmp_path / "in.safetensors", tmp_path / "o.safetensors", "--layout", "musubi")
    stored = load_file(tmp_path / "o.safetensors")
    assert stored[f"{NAMES[0]}.scale_weight"].shape == (3 * WIDTH, 1, 1)
    assert stored[f"{NAMES[2]}.scale_weight"].shape == (WIDTH, 1)  # falls back to rows
    assert stored[f"{NAMES[0]}.scale_weight"].dtype == torch.bfloat16


def test_a_diffusers_folder_becomes_one_that_diffusers_loads(tmp_path: Path) -> None:
    model = tiny_flux_transformer().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "pipeline" / "transformer", max_shard_size="200KB")
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    run(tmp_path / "pipeline", tmp_path / "fp8", "--layout", "plain", "--exclude", "")
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path / "fp8", torch_dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        original = model.get_parameter(name)
        is_matrix = name.endswith("weight") and original.ndim == 2
        assert torch.equal(parameter, original.to(torch.float8_e4m3fn).bfloat16() if is_matrix else original)


def test_a_transformers_folder_and_kept_layers(tmp_path: Path) -> None:
    folder = tmp_path / "t5"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "t5"}')
    attention = "encoder.block.0.layer.0.SelfAttention"
    names = ("shared", f"{attention}.q", f"{attention}.relative_attention_bias")
    save_file({f"{name}.weight": torch.randn(64, 64).bfloat16() for name in names}, folder / "model.safetensors")
    run(folder, tmp_path / "fp8")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    assert [stored[f"{name}.weight"].dtype for name in names] == [torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16]


def test_every_mistake_is_told_in_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(checkpoint(), source)
    done = tmp_path / "done.safetensors"
    run(source, done)
    broken = checkpoint()
    broken[f"{NAMES[1]}.weight"][0, 0] = torch.nan
    save_file(broken, tmp_path / "broken.safetensors")
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "none.safetensors")
    eight = tmp_path / "eight.safetensors"
    run(source, eight, "--scheme", "int8")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    cases = {
        "scales 'row' cannot be written in it; use tensor": (source, "--layout", "comfy_scaled", "--scheme", "row"),
        "use comfy_quant for e5m2": (source, "--format", "e5m2"),
        "is written in the layout comfy_quant, not musubi": (source, "--scheme", "nvfp4", "--layout", "musubi"),
        "scheme 'mxfp8': files in it are read and trained on, not written": (source, "--scheme", "mxfp8"),
        "scheme 'Q4_K': files in it are read and trained on, not written": (source, "--scheme", "Q4_K"),
        "did you mean 'int8_convrot'?": (source, "--scheme", "int8_convrt"),
        "--format e5m2: is of fp8, and the scheme is int8": (source, "--scheme", "int8", "--format", "e5m2"),
        "--products low: files of layout plain cannot say so": (source, "--layout", "plain", "--products", "low"),
        "ComfyUI multiplies int8 files in int8 always": (source, "--scheme", "int8", "--products", "high"),
        "is quantised already; quantise the bf16 or fp16 file": (done,),
        "--scheme: ": (done, "--products", "low", "--scheme", "nvfp4"),
        "ComfyUI multiplies such weights in one way, whatever the file says": (eight, "--products", "high"),
        "no linear weight is left to quantise": (tmp_path / "none.safetensors",),
        f"{NAMES[1]}.weight holds NaN or infinity": (tmp_path / "broken.safetensors",),
        "excluded pattern 'qvk' matches no linear layer": (source, "--exclude_pattern", "qvk"),
        "excluded kind 'finall' is none of": (source, "--exclude", "finall"),
        "does not exist; give a local file or folder": (tmp_path / "absent",),
        "a pipeline without a transformer folder": (tmp_path / "pipeline",),
    }
    for message, (model, *extra) in cases.items():
        assert message in refusal(quantize_model, "--model", model, "--save_to", target, *extra)
        assert not target.exists()
    for message, goal in ("is the model itself", source), ("is a file, so the result is one", tmp_path / "folder"):
        assert message in refusal(quantize_model, "--model", source, "--save_to", goal)
    assert not list(tmp_path.glob(".*.tmp"))


BASE = ROOT / "assets" / "tiny-flux"


def quantize(folder: Path, *flags: object) -> dict[str, Tensor]:
    """Run the tool into the plain layout, whose numbers need no scales; return the file's tensors."""
    run(BASE, folder, "--layout", "plain", *flags)
    return load_file(folder / "diffusion_pytorch_model.safetensors")


def velocity(tensors: dict[str, Tensor]) -> Tensor:
    """Return diffusers' output on inputs like those of sampling: noise, and a caption's embeddings stand-in."""
    model = FluxTransformer2DModel.from_pretrained(BASE / "transformer").eval()
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    random = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, 16, 16, generator=random)
    text = {"prompt_embeds": torch.zeros(2, 8, 64), "pooled_prompt_embeds": torch.zeros(2, 64)}
    with torch.no_grad():
        return pipeline_forward(model, latents, torch.tensor([0.9, 0.9]), text, 3.5)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("data") / "data"
    shutil.copytree(ROOT / "assets" / "demo_dataset", folder)
    return ["--dataset_config", folder / "dataset.toml", "--calibration_images", 3, "--calibration_sigmas", 0.9]


def test_compensated_rounding_takes_error_off_at_the_same_size(calibration: list[object], tmp_path: Path) -> None:
    reference = velocity(load_file(BASE / "transformer" / "diffusion_pytorch_model.safetensors"))
    files = {
        "nearest": quantize(tmp_path / "nearest"),
        "compensated": quantize(tmp_path / "compensated", "--compensated", *calibration),
    }
    error = {name: float((velocity(tensors) - reference).norm()) for name, tensors in files.items()}
    assert error["compensated"] < 0.8 * error["nearest"]
    sizes = {name: sum(t.numel() * t.element_size() for t in tensors.values()) for name, tensors in files.items()}
    assert sizes["compensated"] == sizes["nearest"]


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("give both or neither", ["--compensated"]),
        ("give both or neither", ["--dataset_config", "x.toml"]),
        ("choose one", ["--compensated", "--dataset_config", "x.toml", "--rounding", "stochastic"]),
    ],
)
def test_flags_that_do_not_go_together_are_refused(message: str, flags: list[str], tmp_path: Path) -> None:
    words = ["--model", BASE, "--save_to", tmp_path / "out", "--layout", "plain", *flags]
    assert message in refusal(quantize_model, *words)
