"""tools/extract_lora.py, resize_lora.py, merge_lora.py without a model: what was merged comes out; sums by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tools.extract_lora as extract
import tools.merge_lora as merge_lora
import tools.resize_lora as resize_lora
from library.errors import UserError
from networks.files.adapters import load_lora
from networks.files.base import open_base
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.merging.extraction import extract_lora
from networks.merging.low_rank import relative_difference
from networks.merging.merge import LoraSource, merge_loras
from tests.networks.conftest import make_flux, random_pair
from tests.runs import call, refusal
from tests.targets import FLUX_TARGETS, QWEN_TARGETS
from tests.tiny import bfl_state_dict, tiny_flux_pipeline
from tests.tiny_qwen import tiny_qwen_transformer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base as folder and as BFL's file, a LoRA (rank 4, alpha 3), and the base with the LoRA merged in fp32."""
    folder = tmp_path_factory.mktemp("extract")
    model = make_flux()
    model.save_pretrained(folder / "base")
    save_file(bfl_state_dict(model.state_dict()), folder / "base.safetensors")
    rng = torch.Generator().manual_seed(5)
    shapes = {name: m.weight.shape for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    chosen = [name for name in shapes if FLUX_TARGETS.group_of(name)]
    lora = {name: random_pair(shapes[name], 4, 3.0, rng, up=0.1) for name in chosen}
    save_adapter(folder / "lora.safetensors", lora, FLUX_TARGETS)
    for base, tuned in (("base", "tuned"), ("base.safetensors", "tuned.safetensors")):
        source = [LoraSource(folder / "lora.safetensors", 1.0)]
        merge_loras(folder / base, source, folder / tuned, FLUX_TARGETS)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("tuned", ["tuned", "tuned.safetensors"])  # the other layout than the base's, too
@pytest.mark.parametrize("save_format", ["diffusers", "kohya", "comfy"])
def test_extraction_gives_back_what_was_merged(
    files: dict[str, Path], tuned: str, save_format: str, tmp_path: Path
) -> None:
    target = tmp_path / "out.safetensors"
    both = ("--model_org", files["base"], "--model_tuned", files[tuned])
    call(extract, *both, "--save_to", target, "--dim", 4, "--save_format", save_format, "--save_precision", "fp32")
    found, merged = load_lora(target, FLUX_TARGETS), load_lora(files["lora.safetensors"], FLUX_TARGETS).weights
    assert found.layout == save_format
    assert found.weights.keys() == merged.keys()
    # the merged weight is rounded to fp32 once (6e-8 of weights ten times the difference): well below the 1e-3 asked
    assert max(relative_difference(merged[name], found.weights[name]) for name in merged) < 1e-5


def test_a_smaller_rank_is_the_best_one_and_says_what_it_keeps(files: dict[str, Path]) -> None:
    name = "transformer_blocks.1.ff.net.2"
    difference = load_file(files["tuned"] / "diffusion_pytorch_model.safetensors")[f"{name}.weight"].double()
    difference -= load_file(files["base"] / "diffusion_pytorch_model.safetensors")[f"{name}.weight"].double()
    u, s, vh = np.linalg.svd(difference.numpy(), full_matrices=False)
    found = extract_lora(open_base(files["base"]), open_base(files["tuned"]), FLUX_TARGETS, dim=2)
    best = u[:, :2] * s[:2] @ vh[:2]
    # an fp32 decomposition against a float64 one
    np.testing.assert_allclose(found.weights[name].delta().numpy(), best, atol=1e-5)
    assert found.kept[name] == pytest.approx((s[:2] ** 2).sum() / (s**2).sum(), rel=1e-5)


def test_equal_layers_are_left_out_and_what_is_in_no_lora_is_named(files: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(files["base.safetensors"])
    key = "double_blocks.0.img_attn.qkv"
    tensors[f"{key}.weight"][32:64] += 0.5  # k alone
    tensors[f"{key}.bias"] += 1
    save_file(tensors, tmp_path / "tuned.safetensors")
    bases = open_base(files["base.safetensors"]), open_base(tmp_path / "tuned.safetensors")
    found = extract_lora(*bases, FLUX_TARGETS, dim=1)
    assert list(found.weights) == ["transformer_blocks.0.attn.to_k"]
    torch.testing.assert_close(found.weights["transformer_blocks.0.attn.to_k"].delta(), torch.full((32, 32), 0.5))
    assert len(found.notes) == 1
    assert f"also different, but not in the LoRA: 1 tensor ({key}.bias)" in found.notes[0]


def test_a_scaled_fp8_model_counts_as_the_numbers_it_stands_for(files: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(files["tuned.safetensors"])
    name = "double_blocks.0.img_mlp.0.weight"
    scale = tensors[name].abs().max() / 448
    tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    tensors["double_blocks.0.img_mlp.0.scale_weight"] = scale.reshape(())
    tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "fp8.safetensors")
    bases = open_base(files["base"], quantized=True), open_base(tmp_path / "fp8.safetensors", quantized=True)
    found = extract_lora(*bases, FLUX_TARGETS, dim=32)
    base = load_file(files["base.safetensors"])[name]
    expected = tensors[name].float() * scale - base
    # 32 is the full rank of a layer with 32 inputs; fp32 decomposition
    torch.testing.assert_close(found.weights["transformer_blocks.0.ff.net.0.proj"].delta(), expected, rtol=0, atol=1e-5)


def test_text_encoders_of_pipelines_are_compared_too(tmp_path: Path) -> None:
    base = tiny_flux_pipeline(tmp_path / "base")
    name = "text_encoder.encoder.layers.1.mlp.fc1"
    rng = torch.Generator().manual_seed(0)
    lora = {name: random_pair((128, 64), 2, 5.0, rng, up=0.1)}
    save_adapter(tmp_path / "lora.safetensors", lora, FLUX_TARGETS)
    merge_loras(base, [LoraSource(tmp_path / "lora.safetensors", 1.0)], tmp_path / "tuned", FLUX_TARGETS)
    found = extract_lora(open_base(base), open_base(tmp_path / "tuned"), FLUX_TARGETS, dim=2)
    assert list(found.weights) == [name]
    assert relative_difference(lora[name], found.weights[name]) < 1e-5  # fp32 rounding of the merged weight


def test_models_of_two_architectures_are_refused_in_one_line(files: dict[str, Path], tmp_path: Path) -> None:
    make_flux(blocks=1).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"another architecture than .* \(20 layers are in one of them only") as error:
        extract_lora(open_base(files["base"]), open_base(tmp_path / "other"), FLUX_TARGETS, dim=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--dim: a LoRA has a rank; give it"),
        (["--dim", 0], "command line: argument --dim: '0' is no whole number from 1"),
        (["--dim", 4, "--model_org", "nowhere"], "--model_org 'nowhere' does not exist; give a local"),
    ],
)
def test_mistakes_are_one_line(files: dict[str, Path], flags: list[object], message: str, tmp_path: Path) -> None:
    both = ("--model_org", files["base"], "--model_tuned", files["tuned"])
    assert refusal(extract, *both, "--save_to", tmp_path / "o.safetensors", *flags).startswith(f"error: {message}")


def test_two_equal_models_have_nothing_to_extract(files: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="nothing to extract"):
        extract_lora(open_base(files["base"]), open_base(files["base.safetensors"]), FLUX_TARGETS, dim=4)


def test_the_family_is_that_of_the_models_and_stands_in_the_metadata(tmp_path: Path) -> None:
    model = tiny_qwen_transformer(1)
    model.save_pretrained(tmp_path / "base")
    model.transformer_blocks[0].img_mlp.net[2].weight.data[0] += 1.0  # a layer that FLUX's table has not
    model.save_pretrained(tmp_path / "tuned")
    target = tmp_path / "out.safetensors"
    call(
        extract, "--model_org", tmp_path / "base", "--model_tuned", tmp_path / "tuned", "--save_to", target, "--dim", 1
    )
    assert list(load_lora(target, QWEN_TARGETS).weights) == ["transformer_blocks.0.img_mlp.net.2"]
    metadata = load_lora(target, QWEN_TARGETS).metadata
    assert metadata["ss_base_model_version"] == "qwen_image"
    assert metadata["modelspec.architecture"] == "Qwen-Image/lora"


Q, K, OUT = (f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_out.0"))
CLIP = "text_encoder.encoder.layers.0.mlp.fc1"
SHAPES = {Q: (32, 32), K: (32, 32), OUT: (32, 32), CLIP: (48, 24)}


def make(seed: int, rank: int, alpha: float, names: tuple[str, ...] = (Q, K, OUT, CLIP)) -> dict[str, LoraWeights]:
    """Return a LoRA whose singular values fall: column i of ``up`` is scaled by 2^-i."""
    rng = torch.Generator().manual_seed(seed)
    falling = 2.0 ** -torch.arange(rank)
    return {name: random_pair(SHAPES[name], rank, alpha, rng, up=falling) for name in names}


def write(path: Path, lora: dict[str, LoraWeights], save_format: str = "kohya", **metadata: str) -> Path:
    save_adapter(path, lora, FLUX_TARGETS, save_format, metadata=metadata)
    return path


def full(module: LoraWeights) -> np.ndarray:
    return module.alpha / module.rank * module.up.double().numpy() @ module.down.double().numpy()


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vh[:rank]


@pytest.mark.parametrize("save_format", ["kohya", "comfy", "diffusers"])
def test_the_full_rank_is_the_identity(save_format: str, tmp_path: Path) -> None:
    lora = make(0, rank=6, alpha=2.5)
    source = write(tmp_path / "a.safetensors", lora, save_format)
    target = tmp_path / "b.safetensors"
    call(resize_lora, "--lora", source, "--save_to", target, "--new_rank", 6)
    resized = load_lora(target, FLUX_TARGETS)
    assert resized.layout == save_format
    for name, module in resized.weights.items():
        assert (module.rank, module.alpha) == (6, 6.0)
        # decomposed in float64, each factor rounded to fp32 once
        np.testing.assert_allclose(full(module), full(lora[name]), atol=2e-6)


def test_a_smaller_rank_is_the_best_one(tmp_path: Path) -> None:
    lora = make(1, rank=6, alpha=2.5)
    source, target = write(tmp_path / "a.safetensors", lora), tmp_path / "b.safetensors"
    call(resize_lora, "--model", source, "--save_to", target, "--new_rank", 3)
    resized = load_lora(target, FLUX_TARGETS)
    for name, module in resized.weights.items():
        assert module.rank == 3
        np.testing.assert_allclose(full(module), best(full(lora[name]), 3), atol=2e-6)  # fp32 factors
    assert resized.metadata["ss_training_comment"] == "resized by rank 3"
    # of the whole file: kohya's q, k, v have one alpha for the fused layer, 3 x 3
    assert resized.metadata["ss_network_dim"] == "3"


@pytest.mark.parametrize(("method", "parameter"), [("sv_fro", 0.9), ("sv_cumulative", 0.7), ("sv_ratio", 3.0)])
def test_each_layer_gets_the_rank_that_sd_scripts_gives_it(method: str, parameter: float, tmp_path: Path) -> None:
    lora = make(2, rank=6, alpha=4.0)
    source, target = write(tmp_path / "a.safetensors", lora), tmp_path / "b.safetensors"
    flags = ["--dynamic_method", method, "--dynamic_param", parameter, "--new_rank", 4]
    call(resize_lora, "--model", source, "--save_to", target, *flags)
    resized = load_lora(target, FLUX_TARGETS).weights
    for name, module in lora.items():
        s = np.linalg.svd(full(module))[1][:6]
        # sd-scripts' index_sv_*, on the whole matrix's values in float64
        rank = {
            "sv_fro": lambda s: np.searchsorted((s**2).cumsum() / (s**2).sum(), parameter**2) + 1,
            "sv_cumulative": lambda s: np.searchsorted(s.cumsum() / s.sum(), parameter) + 1,
            "sv_ratio": lambda s: (s > s[0] / parameter).sum(),
        }[method](s)
        assert resized[name].rank == min(rank, 4), name
        np.testing.assert_allclose(full(resized[name]), best(full(module), min(rank, 4)), atol=2e-6)


def test_a_concatenation_is_the_sum(tmp_path: Path) -> None:
    one, two = make(3, rank=4, alpha=1.5), make(4, rank=3, alpha=7.0, names=(Q, CLIP))
    a, b = write(tmp_path / "a.safetensors", one, "comfy"), write(tmp_path / "b.safetensors", two, "diffusers")
    target = tmp_path / "both.safetensors"
    call(merge_lora, "--lora", f"{a}:0.8", f"{b}:-0.5", "--save_to", target)
    both = load_lora(target, FLUX_TARGETS)
    assert both.layout == "comfy"
    assert {name: module.rank for name, module in both.weights.items()} == {Q: 7, K: 4, OUT: 4, CLIP: 7}
    for name, module in both.weights.items():
        expected = 0.8 * full(one[name]) - (0.5 * full(two[name]) if name in two else 0)
        np.testing.assert_allclose(full(module), expected, atol=2e-6)  # fp32 factors
    as_kohya_says = tmp_path / "kohya.safetensors"
    call(merge_lora, "--models", a, b, "--ratios", 0.8, -0.5, "--save_to", as_kohya_says)
    assert all(np.array_equal(full(module), full(both.weights[name]))
               for name, module in load_lora(as_kohya_says, FLUX_TARGETS).weights.items())  # fmt: skip


def test_svd_is_the_best_of_that_rank_to_the_sum(tmp_path: Path) -> None:
    one, two = make(5, rank=4, alpha=1.5), make(6, rank=3, alpha=7.0)
    a, b = write(tmp_path / "a.safetensors", one), write(tmp_path / "b.safetensors", two)
    target = tmp_path / "both.safetensors"
    call(merge_lora, "--lora", f"{a}:0.8", b, "--save_to", target, "--method", "svd", "--new_rank", 2,
        "--save_format", "diffusers")  # fmt: skip
    both = load_lora(target, FLUX_TARGETS)
    assert both.layout == "diffusers"
    for name, module in both.weights.items():
        assert module.rank == 2
        expected = best(0.8 * full(one[name]) + full(two[name]), 2)
        np.testing.assert_allclose(full(module), expected, atol=2e-6)


def test_flags_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.safetensors", make(0, 2, 1.0))
    to = ["--save_to", tmp_path / "o.safetensors"]
    checked = [
        (merge_lora, ["--lora", a, "--method", "svd"], "--method svd and --new_rank go together"),
        (merge_lora, ["--lora", a, "--transformer_only"], "--transformer_only: has no effect without --model"),
        (merge_lora, ["--lora", a, "--model", a, "--new_rank", 4], "--new_rank: has no effect on a model"),
        (merge_lora, ["--lora", f"{a}:0"], "--lora: every strength is 0"),
        (merge_lora, ["--lora", a, a, "--ratios", 0.5], "--ratios: 1 for 2 LoRAs; give one for each"),
        (merge_lora, ["--lora", f"{a}:0.5", "--ratios", 0.5], "--ratios: 1 for 1 LoRA; give one for each, or write"),
        (resize_lora, ["--lora", a], "give --new_rank"),
        (resize_lora, ["--model", a], "give --new_rank"),  # as sd-scripts says
        (resize_lora, ["--model", a, "--dynamic_param", 0.5, "--new_rank", 2], "--dynamic_method and --dynamic_param"),
        (resize_lora, ["--model", a, "--dynamic_method", "sv_ratio", "--dynamic_param", 0.5], "--dynamic_param 0.5"),
    ]
    for tool, flags, message in checked:
        assert refusal(tool, *flags, *to).startswith(f"error: {message}"), message
