"""Whole runs on fp8 bases: files of every layout as they are, and bf16 files quantised while they are loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

import tools.quantize_model as quantize_model
from library.config.load import read_keys
from library.config.schema import PrecisionConfig
from library.errors import UserError
from library.models.inspection import components, weight_sets
from library.precision.activations import FakeQuantLinear
from library.precision.linear import QuantizedLinear
from library.precision.recipe import plan_base
from networks.files.base import check_target, open_base
from tests.precision.files.gguf_files import image_model_types, read_by_the_package, write_gguf
from tests.precision.files.nf4_files import nf4_of
from tests.runs import ROOT, call, largest_difference, lora, losses_of, metadata, run, velocity, write_dataset
from tests.tiny import SingleFiles, bfl_state_dict, save_single_files, tiny_flux_pipeline

LINEARS = 26  # of the tiny transformer in diffusers' layout, without embedders and final layer

# layout -> names in the file, and the option of quantize_model that is not its default
LAYOUTS = {"plain": "diffusers", "comfy_scaled": "comfy", "comfy_quant": "bfl", "musubi": "comfy"}
QUANTISED_HERE: dict[str, dict[str, object]] = {
    "fp8_base": {"fp8_base": True},
    "fp8_scaled": {
        "fp8_scaled": True,
        "fp8_granularity": "row",
        "fp8_exclude": ["final"],
        "fp8_rounding": "stochastic",
    },
}
Settings = dict[str, object]


def quantise(model: Path, target: Path, layout: str, *options: str) -> Path:
    call(quantize_model, "--model", model, "--save_to", target, "--layout", layout, *options)
    return target


def with_transformer(pipeline: Path, folder: Path, layout: str) -> Path:
    """Return a pipeline folder like ``pipeline`` whose transformer is an fp8 one."""
    return linked(pipeline, folder, quantise(pipeline, folder.with_name(f"{folder.name}-transformer"), layout))


def linked(pipeline: Path, folder: Path, transformer: Path) -> Path:
    """Return a folder of links to a pipeline's parts and to another transformer."""
    folder.mkdir(parents=True)
    for part in pipeline.iterdir():
        (folder / part.name).symlink_to(transformer if part.name == "transformer" else part.resolve())
    return folder


def file_settings(files: SingleFiles, transformer: Path) -> Settings:
    config = files.model_config(pretrained_model_name_or_path=str(transformer))
    return {key: getattr(config, key) for key in config.model_fields_set}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline in bf16."""
    return tiny_flux_pipeline(tmp_path_factory.mktemp("bf16") / "pipeline", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def bases(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Settings]:
    """Every kind of base -> the settings that train on it."""
    folder = tmp_path_factory.mktemp("fp8")
    files = save_single_files(pipeline, folder / "single")
    made: dict[str, Settings] = {}
    for layout, names in LAYOUTS.items():
        if names == "diffusers":
            made[layout] = {"pretrained_model_name_or_path": with_transformer(pipeline, folder / layout, layout)}
        else:
            source = files.comfy_transformer if names == "comfy" else files.transformer
            target = quantise(source, folder / f"{layout}.safetensors", layout)
            made[layout] = file_settings(files, target)
    for name, options in QUANTISED_HERE.items():
        made[name] = {"pretrained_model_name_or_path": pipeline, **options}
    return made


@pytest.mark.parametrize("kind", [*LAYOUTS, *QUANTISED_HERE])
def test_every_kind_of_base_trains_and_says_what_it_is(
    kind: str,
    bases: dict[str, Settings],
    pipeline: Path,
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a disc --w 64 --h 64 --s 2\n")
    settings = bases[kind] | {"mixed_precision": "bf16", "sample_prompts": prompts}
    events = run(pipeline, dataset, tmp_path / "out", **settings)
    linears = [module for module in events.task.transformer.modules() if isinstance(module, QuantizedLinear)]
    assert len(linears) == (34 if kind == "fp8_scaled" else LINEARS)
    assert all(tensor.abs().sum() > 0 for name, tensor in lora(tmp_path / "out").items() if "lora_B" in name)
    said, kept = capsys.readouterr().out, metadata(tmp_path / "out")["tandem.base_precision"]
    if kind in LAYOUTS:
        assert re.search(r"(plain cast|ComfyUI .*|musubi-tuner scaled fp8):\s\d+ e4m3fn", " ".join(said.split()))
        formats = kept.partition("(")[2].partition(")")[0]
        assert "e4m3fn, " in formats
        assert kept == f"{kind} file ({formats}), {LINEARS} linear weights read as they are stored, others bfloat16"
    else:
        recipe = {
            "fp8_base": "26 quantised (e4m3fn, plain cast, rounded to nearest; excluded: embedders, final), 10",
            "fp8_scaled": "34 quantised (e4m3fn, a scale a row, rounded stochastically; excluded: final), 2",
        }
        assert kept == f"{recipe[kind]} excluded, others bfloat16"
    assert kept in " ".join(said.split())
    assert (tmp_path / "out" / "samples" / "step000004_00.png").exists()


def independent_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of an fp8 file in bf16, by the layouts' definitions: codes times scale, rounded once."""
    stored = load_file(path)
    weights = {}
    for name, tensor in stored.items():
        layer, _, leaf = name.removeprefix("model.diffusion_model.").rpartition(".")
        if leaf in ("scale_weight", "weight_scale", "comfy_quant", "scaled_fp8"):
            continue
        scale = stored.get(
            name.replace(".weight", ".scale_weight"), stored.get(name.replace(".weight", ".weight_scale"))
        )
        values = tensor.float()
        if leaf == "weight" and tensor.dtype == torch.float8_e4m3fn and scale is not None:
            blocks = scale.shape[1] if scale.ndim == 3 else 1
            values = (values.view(values.shape[0], blocks, -1) * scale.float().view(-1, blocks, 1)).view(values.shape)
        weights[f"{layer}.{leaf}"] = values.bfloat16()
    return weights


def in_diffusers_names(bfl: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return BFL's tensors under diffusers' names: every row is followed to where ``bfl_state_dict`` takes it."""
    ids, first = {}, 0
    for name, tensor in like.items():
        ids[name] = torch.arange(first, first := first + tensor.shape[0])
    where = {int(row): (key, i) for key, rows in bfl_state_dict(ids).items() for i, row in enumerate(rows)}
    found = {name: [where[int(row)] for row in rows] for name, rows in ids.items()}
    return {name: torch.stack([bfl[key][i] for key, i in rows]) for name, rows in found.items()}


def running_weights(transformer: torch.nn.Module) -> dict[str, Tensor]:
    """Return what the trainer multiplies with, in bf16, by diffusers' names."""
    found: dict[str, Tensor] = {}
    for name, module in transformer.named_modules():
        name = name.removesuffix(".base")
        if isinstance(module, QuantizedLinear):
            found[f"{name}.weight"] = module.dequantized(torch.bfloat16)
        for leaf, parameter in module.named_parameters(recurse=False):
            if "lora_" not in name:
                found.setdefault(f"{name}.{leaf}", parameter.detach())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_deployed_file_and_lora_are_what_the_trainer_saw(
    layout: str, bases: dict[str, Settings], pipeline: Path, dataset: Path, tmp_path: Path
) -> None:
    settings = bases[layout] | {"mixed_precision": "bf16", "learning_rate": 3e-2, "network_alpha": 4}
    events = run(pipeline, dataset, tmp_path, **settings)
    model = events.task.transformer.eval()

    path = Path(str(settings["pretrained_model_name_or_path"]))
    if LAYOUTS[layout] == "diffusers":
        path = path / "transformer" / "diffusion_pytorch_model.safetensors"
    theirs = FluxTransformer2DModel.from_config(json.loads((pipeline / "transformer" / "config.json").read_text())).to(
        torch.bfloat16
    )
    deployed = independent_weights(path)
    if LAYOUTS[layout] != "diffusers":
        deployed = in_diffusers_names(deployed, theirs.state_dict())
    ours = running_weights(model)
    assert ours.keys() == deployed.keys()
    assert [name for name in ours if not torch.equal(ours[name], deployed[name])] == []

    theirs.load_state_dict(deployed)
    theirs = theirs.float().eval()  # exact; autocast rounds the weights to bf16 again
    diffusers = FluxPipeline.from_pretrained(pipeline, transformer=theirs)
    plain = output(theirs, autocast=False)
    diffusers.load_lora_weights(tmp_path / "lora.safetensors")
    exact = output(theirs, autocast=False)
    assert distance(exact, plain) > 0.1  # the LoRA does something
    # bf16 rounds by up to 2^-9 = 0.2 %, dozens of times on the way. Measured: 0.6 %; diffusers under autocast 1.8 %
    assert distance(output(model), exact) < 0.01
    assert distance(output(model), exact) < distance(output(theirs), exact)


def output(transformer: torch.nn.Module, autocast: bool = True) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return velocity(transformer).float()


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_a_t5_in_fp8_has_caches_of_its_own_and_can_be_trained_on(pipeline: Path, tmp_path: Path, dataset: Path) -> None:
    cache = tmp_path / "cache"
    settings = {"max_train_steps": 2, "cache_directory": cache}
    run(pipeline, dataset, tmp_path / "high", **settings)
    high = set(cache.rglob("text/*.safetensors"))
    run(pipeline, dataset, tmp_path / "fp8", **settings, fp8_text_encoder=True)
    fp8 = set(cache.rglob("text/*.safetensors")) - high
    assert len(fp8) == len(high)
    assert high
    assert largest_difference(lora(tmp_path / "fp8"), lora(tmp_path / "high")) > 1e-5
    both = {"text_encoder_lr": [1e-3, 1e-3], "network_args": ["train_t5xxl=True"], "fp8_text_encoder": True}
    events = run(pipeline, dataset, tmp_path / "trained", **settings, **both)
    encoders = events.task.step.text_encoders
    assert encoders is not None
    assert sum(isinstance(module, QuantizedLinear) for module in encoders.modules()) == 14  # T5's; CLIP stays


def test_auto_rounds_inputs_where_the_server_of_the_file_does(
    pipeline: Path, bases: dict[str, Settings], dataset: Path, tmp_path: Path
) -> None:
    """Our files ask ComfyUI for products in high precision, unless they were made with --products low."""
    auto: Settings = {"quantised_activations": "auto", "max_train_steps": 1}
    files = save_single_files(pipeline, tmp_path / "single")
    fast = file_settings(
        files, quantise(files.transformer, tmp_path / "fast.safetensors", "comfy_quant", "--products", "low")
    )
    for settings, rounded, words in ((bases["comfy_quant"], 0, "(in none)"), (fast, LINEARS, f"(unit in {LINEARS})")):
        events = run(pipeline, dataset, tmp_path / "out", **settings, **auto, overwrite=True)
        layers = [each for each in events.task.transformer.modules() if isinstance(each, FakeQuantLinear)]
        assert [each.rounding.how for each in layers] == ["unit"] * rounded
        assert words in metadata(tmp_path / "out")["tandem.base_precision"]


def test_products_in_fp8_are_refused_on_a_card_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 3090")
    config = PrecisionConfig(fp8_base=True, quantised_compute="quantised")
    with pytest.raises(UserError, match="need an Ada, Hopper or newer GPU; .* on NVIDIA GeForce RTX 3090"):
        plan_base(config, None, 0, torch.device("cuda"))


def test_a_configuration_that_asks_for_fused_products_is_read_as_dequant() -> None:
    """Version 5327b3c8 had ``quantised_compute = "fused"``, whose numbers were those of ``dequant``."""
    given = read_keys('quantised_compute = "fused"', "config.toml")
    assert given.values == {"quantised_compute": "dequant"}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("comfy_scaled", {"quantised_activations": "static"}, "static: the file has no input scales; use auto, row"),
        ("plain", {"fp8_scaled": True}, "is in fp8 already and is trained on as it is; remove fp8_scaled"),
        ("plain", {"fp8_base": True, "fp8_exclude": ["final"]}, "is trained on as it is; remove fp8_exclude"),
    ],
)
def test_what_has_no_effect_on_a_file_is_refused_in_one_line(
    kind: str,
    settings: Settings,
    message: str,
    bases: dict[str, Settings],
    pipeline: Path,
    dataset: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError) as caught:
        run(pipeline, dataset, tmp_path, **bases[kind] | settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_fp8_bases_of_a_trained_model_learn_as_its_bf16_base_does(tmp_path: Path) -> None:
    trained, demo = ROOT / "assets" / "tiny-flux", ROOT / "assets" / "demo_dataset" / "dataset.toml"
    settings: Settings = {
        "cache_directory": tmp_path / "cache",
        "mixed_precision": "bf16",
        "max_train_steps": 30,
        "network_dim": 8,
        "network_alpha": 8,
        "guidance_scale": 1.0,
    }
    found = {}
    for layout in ("bf16", "plain", "comfy_scaled", "musubi"):
        base = trained if layout == "bf16" else with_transformer(trained, tmp_path / f"base-{layout}", layout)
        run(base, demo, tmp_path / layout, **settings)
        found[layout] = losses_of(tmp_path / layout, "val_loss")
    before, after = found["bf16"][0], found["bf16"][-1]
    assert after < 0.97 * before
    for layout in ("plain", "comfy_scaled", "musubi"):
        assert found[layout][-1] == pytest.approx(after, rel=0.03), found
        assert found[layout][0] - found[layout][-1] == pytest.approx(before - after, rel=0.2), found


SAME_IN_FP32 = 2e-4  # other orders of summation, as in test_flux_runs


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SingleFiles:
    pipeline = tiny_flux_pipeline(tmp_path_factory.mktemp("bf16") / "p", dtype=torch.bfloat16)
    return save_single_files(pipeline, pipeline.parent / "single")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data"), images=2)


def base(kind: str, files: SingleFiles, folder: Path) -> tuple[Path, Path]:
    """Return a file of ``kind``, and one of its numbers in fp32."""
    state, plain = load_file(files.transformer), folder / "plain.safetensors"
    if kind == "nf4":
        stored, numbers = nf4_of(state, "", True)
        save_file(stored, folder / "nf4.safetensors")
        save_file(numbers, plain)
        return folder / "nf4.safetensors", plain
    path = write_gguf(folder / "flux.gguf", state, image_model_types(kind))
    save_file(read_by_the_package(path), plain)
    return path, plain


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "nf4"])
def test_the_lora_is_that_of_the_dequantised_model(
    kind: str, files: SingleFiles, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised, plain = base(kind, files, tmp_path)
    settings = files.model_config().model_dump(include={"ae", "clip_l", "t5xxl", "clip_l_tokenizer", "t5xxl_tokenizer"})
    settings |= {"mixed_precision": "no", "max_train_steps": 2}
    events = run(quantised, pair, tmp_path / "own", **settings)
    assert sum(isinstance(module, QuantizedLinear) for module in events.task.transformer.modules()) == 26
    run(plain, pair, tmp_path / "theirs", **settings)
    assert largest_difference(lora(tmp_path / "own"), lora(tmp_path / "theirs")) < SAME_IN_FP32
    kept = metadata(tmp_path / "own")["tandem.base_precision"]
    assert "26 linear weights" in kept
    assert kept.startswith("nf4" if kind == "nf4" else "gguf")
    assert kind in " ".join(capsys.readouterr().out.split())
    # a LoRA merged into the base before training leaves those layers in high precision, as the servers add it
    first = {"base_weights": [tmp_path / "own" / "lora.safetensors"]}
    run(quantised, pair, tmp_path / "own_second", **settings, **first)
    run(plain, pair, tmp_path / "their_second", **settings, **first)
    assert largest_difference(lora(tmp_path / "own_second"), lora(tmp_path / "their_second")) < SAME_IN_FP32


@pytest.mark.parametrize("kind", ["Q8_0", "nf4"])
def test_such_a_file_is_described_and_never_merged_into(kind: str, files: SingleFiles, tmp_path: Path) -> None:
    quantised, plain = base(kind, files, tmp_path)
    with pytest.raises(UserError, match=f"{quantised.name}: {kind} of .* is read only here; .* so nothing needs to be"):
        check_target(open_base(quantised, quantized=True), tmp_path / "merged.safetensors", None)
    with pytest.raises(UserError, match="merge into the bf16 or fp16 file"):
        open_base(quantised)
    (own,), (theirs,) = (components(weight_sets(path)[0]) for path in (quantised, plain))
    assert (own.parameters, own.architecture, own.blocks) == (theirs.parameters, theirs.architecture, theirs.blocks)
    assert kind in own.dtypes
