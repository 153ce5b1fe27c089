"""tools/generate.py against diffusers' own pipelines: with LoRAs, with a picture to fill, with reference pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from library.conditions import Conditions
from library.config.model_types import MODEL_TYPES
from library.config.schema import ModelConfig
from library.errors import NotFiniteError, UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.registry import lora_targets
from library.safetensors_io import write_safetensors
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.data.folders import make_image
from tests.models.test_image_families import CASES, guidance_of
from tests.networks.conftest import filled, random_pair
from tests.runs import call, refusal
from tests.targets import FLUX_TARGETS
from tests.tiny import T5_LENGTH, tiny_flux_pipeline, tiny_flux_transformer
from tools import generate as tool
from tools import merge_lora, quantize_model
from tools.generate import image, parser

SMALL = ["--w", "64", "--h", "48", "--s", "3"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux_pipeline(tmp_path_factory.mktemp("generate") / "base")


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two LoRAs of different ranks, alphas and layers, strong enough to change a picture."""
    folder = tmp_path_factory.mktemp("loras")
    model = tiny_flux_transformer()
    paths = []
    for name, rank, alpha, part in (("a", 4, 2.0, "attn."), ("b", 2, 5.0, "transformer_blocks.0.")):
        random = torch.Generator().manual_seed(rank)
        weights = {
            module_name: random_pair(module.weight.shape, rank, alpha, random, 0.2, 0.2)
            for module_name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and part in module_name and FLUX_TARGETS.group_of(module_name)
        }
        paths.append(folder / f"{name}.safetensors")
        save_adapter(paths[-1], weights, FLUX_TARGETS, "diffusers")
    return paths[0], paths[1]


def drawn(*arguments: str) -> list[np.ndarray]:
    return [np.asarray(Image.open(path)).astype(int) for path in image(parser().parse_args(["image", *arguments]))]


def diffusers_pipeline(base: Path) -> FluxPipeline:
    pipeline = FluxPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def diffusers_picture(
    base: Path | FluxPipeline, prompt: str, loras: dict[Path, float], seed: int, **extra: object
) -> np.ndarray:
    pipeline = diffusers_pipeline(base) if isinstance(base, Path) else base
    for path in loras:
        pipeline.load_lora_weights(str(path), adapter_name=path.stem)
    if loras:
        pipeline.set_adapters([path.stem for path in loras], list(loras.values()))
    picture = pipeline(
        prompt, width=64, height=48, num_inference_steps=3, guidance_scale=3.5, max_sequence_length=T5_LENGTH,
        generator=torch.Generator().manual_seed(seed), **extra,
    ).images[0]  # fmt: skip
    return np.asarray(picture).astype(int)


def test_one_and_several_loras_draw_what_diffusers_draws(base: Path, loras: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = loras
    plain = drawn("--model", str(base), "--prompt", "a red disc", "--d", "5", *SMALL, "--save_to", str(tmp_path))[0]
    for given in ({a: 0.7}, {a: 0.7, b: -0.4}):
        ours = drawn(
            "--model", str(base), "--prompt", "a red disc", "--d", "5", *SMALL, "--save_to", str(tmp_path),
            "--lora", *(f"{path}:{strength}" for path, strength in given.items()),
        )[0]  # fmt: skip
        theirs = diffusers_picture(base, "a red disc", given, seed=5)
        assert np.abs(ours - plain).max() > 8  # the LoRA shows
        # sums in another order: the fp32 result may lie on the other side of a rounding to 8 bits
        assert np.abs(ours - theirs).max() <= 1
    assert np.abs(plain - diffusers_picture(base, "a red disc", {}, seed=5)).max() <= 1
    assert np.array_equal(
        plain,
        drawn("--model", str(base), "--prompt", "a red disc", "--d", "5", *SMALL, "--save_to", str(tmp_path),
              "--lora", f"{a}:0")[0],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["lokr", "loha", "dora"])
def test_other_kinds_draw_at_any_strength_what_the_merged_model_draws(
    kind: str, base: Path, loras: tuple[Path, Path], tmp_path: Path
) -> None:
    network = filled(tiny_flux_transformer(), FLUX_TARGETS, network_type=kind, network_dim=3)
    network.save(tmp_path / "other.safetensors", "comfy", "fp32", {})
    used = [f"{tmp_path / 'other.safetensors'}:0.7", f"{loras[0]}:-0.4"]
    common = ["--prompt", "a red disc", "--d", "5", *SMALL, "--save_to", str(tmp_path)]
    ours, plain = drawn("--model", str(base), *common, "--lora", *used)[0], drawn("--model", str(base), *common)[0]
    call(merge_lora, "--model", base, "--lora", *used, "--save_to", tmp_path / "merged")
    merged = drawn("--model", str(tmp_path / "merged"), *common)[0]
    assert np.abs(ours - plain).max() > 8
    assert np.abs(ours - merged).max() <= 1  # fp32 sums in another order


def test_the_text_encoders_take_their_part_of_a_lora(base: Path, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    lora = {
        f"text_encoder.encoder.layers.{i}.self_attn.{name}": random_pair((64, 64), 2, 1.0, random)
        for i in range(2)
        for name in ("q_proj", "v_proj")
    }
    path = tmp_path / "text.safetensors"
    save_adapter(path, lora, FLUX_TARGETS, "kohya")
    common = ["--model", str(base), "--prompt", "a red disc", "--d", "5", *SMALL, "--save_to", str(tmp_path)]
    ours, plain = drawn(*common, "--lora", f"{path}:0.6")[0], drawn(*common)[0]
    assert np.abs(ours - plain).max() > 4
    # diffusers raises on a file without a transformer part, so its CLIP gets the updates added to its weights
    pipeline = diffusers_pipeline(base)
    with torch.no_grad():
        for name, weights in lora.items():
            layer = pipeline.text_encoder.get_submodule(name.removeprefix("text_encoder."))
            layer.weight += 0.6 * weights.up @ weights.down / 2
    assert np.abs(ours - diffusers_picture(pipeline, "a red disc", {}, seed=5)).max() <= 1


def test_prompts_of_a_file_take_what_they_leave_open_from_the_flags(base: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.toml"
    prompts.write_text('[prompt]\nscale = 2.0\n[[prompt.subset]]\nprompt = "one"\n[[prompt.subset]]\nprompt = "two"\n')
    out = tmp_path / "pictures"
    first, second = drawn(
        "--model", str(base), "--from_file", str(prompts), *SMALL, "--n", "dull", "--d", "8", "--save_to", str(out)
    )
    assert first.shape == (48, 64, 3)
    # guidance proper takes the negative prompt from --n, and the second picture the next seed
    theirs = diffusers_picture(base, "two", {}, seed=9, negative_prompt="dull", true_cfg_scale=2.0)
    assert np.abs(second - theirs).max() <= 1
    assert sorted(path.name for path in out.iterdir()) == ["0000_one_seed8.png", "0001_two_seed9.png"]
    with Image.open(out / "0001_two_seed9.png") as picture:
        assert picture.info["prompt"] == "two --n dull --w 64 --h 48 --d 9 --s 3 --g 3.5 --l 2.0"
        assert picture.info["model"] == str(base)


def test_pictures_are_added_and_none_is_written_over(base: Path, tmp_path: Path) -> None:
    (tmp_path / "0007_mine.png").write_bytes(b"mine")
    drawn("--model", str(base), "--prompt", "Ein Haus!", "x --w 32", *SMALL, "--save_to", str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["0007_mine.png", "0008_ein-haus_seed0.png", "0009_x_seed1.png"]
    assert (tmp_path / "0007_mine.png").read_bytes() == b"mine"
    assert Image.open(tmp_path / "0009_x_seed1.png").size == (32, 48)


def test_a_lora_of_another_base_is_remarked_on(
    base: Path, loras: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"transformer_blocks.0.attn.to_q": LoraWeights(torch.ones(1, 64), torch.ones(64, 1), 1.0)}
    other = tmp_path / "other.safetensors"
    save_adapter(other, weights, FLUX_TARGETS, metadata={"tandem.base_fingerprint": "0123456789abcdef"})
    drawn("--model", str(base), "--prompt", "x", *SMALL, "--save_to", str(tmp_path), "--lora", str(other))
    text = capsys.readouterr().out
    assert f"{other}: diffusers, 1 layer, strength 1" in text
    assert f"note: {other}: trained on base 0123456789abcdef, this one is" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], 'give either --prompt "..." or --from_file FILE'),
        (["--prompt", "x", "--from_file", "y"], "give either --prompt"),
        (["--prompt", "x --w 0"], "--prompt 1: 0 x 1024 pixels; at most"),
        (["--from_file", "nowhere.txt"], "--from_file: nowhere.txt: no such file"),
        (["--prompt", "x", "--lora", "nowhere.safetensors"], "nowhere.safetensors: no such file"),
        (["--prompt", "x", "--lora", "a.safetensors:much"], "'much' is not a number"),
        (["--prompt", "x", "--mixed_precision", "fp16"], "fp16 needs a GPU"),
    ],
)
def test_a_mistake_is_told_before_anything_is_loaded(
    base: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("library.models.flux.spec.FluxFamily.load_transformer", never)
    monkeypatch.setattr("library.models.flux.spec.FluxFamily.load_text_encoder", never)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        image(parser().parse_args(["image", "--model", str(base), *arguments]))


def test_fp8_options_draw_what_the_quantised_file_draws(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "fp8"
    folder.mkdir()
    for part in base.iterdir():
        if part.name != "transformer":
            (folder / part.name).symlink_to(part)
    options = ["--layout", "musubi", "--scheme", "row"]
    call(quantize_model, "--model", base, "--save_to", folder / "transformer", *options)
    asked = ["--prompt", "a red disc", *SMALL, "--save_to", str(tmp_path)]
    from_file = drawn("--model", str(folder), *asked)[0]
    text = capsys.readouterr().out
    assert re.search(r"base: musubi file \(\d+ e4m3fn, a scale a row.*\), 26 linear weights", text)
    quantised = drawn("--model", str(base), "--fp8_scaled", "--fp8_granularity", "row", *asked)[0]
    assert (quantised == from_file).all()
    assert (quantised != drawn("--model", str(base), *asked)[0]).any()


def test_a_lora_of_another_architecture_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "wide.safetensors"
    key = "transformer.transformer_blocks.0.attn.to_q"
    write_safetensors(path, {f"{key}.lora_A.weight": torch.ones(1, 9), f"{key}.lora_B.weight": torch.ones(9, 1)})
    with pytest.raises(UserError, match=r"wide.safetensors.*to_q is for a layer of 9x9"):
        drawn("--model", str(base), "--prompt", "x", *SMALL, "--save_to", str(tmp_path), "--lora", str(path))


def test_the_script_says_in_a_line_what_is_wrong() -> None:
    words = ("image", "--model", "nowhere", "--prompt", "x")
    assert refusal(tool, *words).startswith("error: --model 'nowhere' does not exist")


# beginnings of the layers that get a LoRA, and its format, as far as diffusers reads it
LORAS: dict[str, tuple[str | tuple[str, ...], str]] = {
    "qwen_image": ("", "kohya"),
    "z_image": ("layers.", "kohya"),
    "flux2_klein": (("transformer_b", "single_tr"), "kohya"),
    "krea2": ("", "diffusers"),
}


def write_lora(path: Path, kind: str) -> None:
    """Write a random LoRA on the layers of the family that the table names."""
    targets, random, (beginnings, save_format) = lora_targets()[kind], torch.Generator().manual_seed(1), LORAS[kind]
    weights = {
        name: random_pair(module.weight.shape, 4, 2.0, random, 0.2, 0.2)
        for name, module in CASES[kind].transformer().named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(beginnings) and targets.group_of(name)
    }
    save_adapter(path, weights, targets, save_format)


@pytest.mark.parametrize("kind", LORAS)
def test_split_files_with_a_lora_draw_what_diffusers_draws(kind: str, tmp_path: Path) -> None:
    base, lora = CASES[kind].folder(tmp_path / "base"), tmp_path / "lora.safetensors"
    files = CASES[kind].files(base, tmp_path / "files")
    write_lora(lora, kind)
    flags = [
        *("image", "--model", str(files.transformer), "--model_type", kind, "--vae", str(files.vae)),
        *("--text_encoder", str(files.text_encoder), "--qwen_tokenizer", str(files.tokenizer)),
        *("--lora", f"{lora}:0.5", "--prompt", "a red disc", "--n", "large"),
        *("--w", "64", "--h", "48", "--s", "3", "--d", "5", "--l", "3", "--save_to", str(tmp_path / "out")),
    ]
    (path,) = image(parser().parse_args(flags))

    pipeline: Any = getattr(diffusers, MODEL_TYPES[kind].pipeline).from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(lora), adapter_name="lora")
    pipeline.set_adapters(["lora"], [0.5])
    theirs = pipeline(
        prompt="a red disc",
        **guidance_of(kind, pipeline, 3.0, "large"),
        width=64,
        height=48,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    # the same numbers up to rounding, of which two steps of 255 may be left behind a VAE of random weights
    assert np.abs(np.asarray(Image.open(path)).astype(int) - np.asarray(theirs).astype(int)).max() <= 2

    with pytest.raises(UserError, match=f'ae: has no effect with model_type = "{kind}", whose files are vae'):
        image(parser().parse_args([*flags, "--ae", "x"]))
    with pytest.raises(UserError, match=r"prompt 'a red disc': --g 3.5 is not taken: this model has no guidance input"):
        image(parser().parse_args([*flags, "--g", "3.5"]))


IN_TWO_STEPS = ["--w", "64", "--h", "48", "--s", "2", "--g", "3", "--d", "5"]


def picture_drawn(*arguments: str) -> np.ndarray:
    (path,) = image(parser().parse_args(["image", *arguments]))
    return np.asarray(Image.open(path)).astype(int)


def latents_of(base: Path, pixels: torch.Tensor) -> torch.Tensor:
    """diffusers' VAE, its latents normalised with FLUX's published constants."""
    vae = AutoencoderKL.from_pretrained(base, subfolder="vae")
    with torch.no_grad():
        return (vae.encode(pixels[None]).latent_dist.mode() - 0.1159) * 0.3611


def painted(base: Path, model_type: str, conditions: Conditions) -> np.ndarray:
    family = model_family(ModelConfig(model_type=model_type, pretrained_model_name_or_path=str(base)))
    text = family.load_text_encoder(torch.float32).encode(["a door"])[0]
    transformer = family.load_transformer(torch.float32)
    encoder = family.load_image_encoder(torch.float32)
    sample = family.sample(
        transformer, encoder, text, SampleSettings(64, 48, steps=2, guidance=3.0, seed=5), conditions=conditions
    )
    return np.asarray(sample).astype(int)


def to_pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_image(64, 48, seed=1).save(tmp_path / "a.png")
    make_image(32, 32, seed=2).save(tmp_path / "b.png")
    mask = np.zeros((48, 64), dtype=np.uint8)
    mask[:20, 30:] = 255
    Image.fromarray(mask).save(tmp_path / "m.png")
    return tmp_path


def test_a_picture_is_filled_where_its_mask_is_white(folder: Path) -> None:
    base = tiny_flux_pipeline(folder / "base", model_type="flux_fill")
    flags = ["--model", str(base), "--model_type", "flux_fill", "--save_to", str(folder / "out"), *IN_TWO_STEPS]
    pictures = ["--ci", str(folder / "a.png"), "--mi", str(folder / "m.png")]
    mask = torch.from_numpy(np.array(Image.open(folder / "m.png")) // 255).float()
    blanked = latents_of(base, to_pixels(make_image(64, 48, seed=1)) * (1 - mask))
    expected = painted(base, "flux_fill", Conditions(blanked, mask[None, None]))
    # the pictures may differ by one where fp32 convolutions of another batch layout round differently
    assert abs(picture_drawn(*flags, "--prompt", "a door", *pictures) - expected).max() <= 1
    with pytest.raises(UserError, match="prompt 'a door': no mask; write --ci image.png --mi mask.png"):
        picture_drawn(*flags, "--prompt", f"a door --ci {folder / 'a.png'}")


def test_the_region_is_blanked_as_the_lora_was_trained_unless_a_flag_says_otherwise(folder: Path) -> None:
    base = tiny_flux_pipeline(folder / "base", model_type="flux_fill")
    targets = lora_targets()["flux_fill"]
    nothing = {"transformer_blocks.0.attn.to_q": LoraWeights(torch.ones(2, 64), torch.zeros(64, 2), 2.0)}
    save_adapter(folder / "l.safetensors", nothing, targets, metadata={"tandem.inpaint_blank": "black grey"})
    flags = ["--model", str(base), "--model_type", "flux_fill", "--save_to", str(folder / "out"), *IN_TWO_STEPS]
    flags += ["--prompt", f"a door --ci {folder / 'a.png'} --mi {folder / 'm.png'}"]
    mask = torch.from_numpy(np.array(Image.open(folder / "m.png")) // 255).float()
    pixels = to_pixels(make_image(64, 48, seed=1)) * (1 - mask)
    lora = ["--lora", str(folder / "l.safetensors")]
    for given, colour in ((lora, -1.0), ([*lora, "--inpaint_blank", "white"], 1.0), (["--inpaint_blank", "grey"], 0.0)):
        blanked = latents_of(base, pixels + colour * mask)
        expected = painted(base, "flux_fill", Conditions(blanked, mask[None, None]))
        assert abs(picture_drawn(*flags, *given) - expected).max() <= 1


@pytest.mark.parametrize("name", ["new.png", "new.JPG", "list"])
def test_a_file_to_save_to_is_refused_before_any_work_is_done(tmp_path: Path, name: str) -> None:
    (tmp_path / "list").write_text("x")
    with pytest.raises(UserError, match=f"{name}: images get names of their own; give a folder"):
        picture_drawn("--model", "nowhere", "--save_to", str(tmp_path / name), "--prompt", "a door")


def test_references_are_taken_at_the_size_asked_for(folder: Path) -> None:
    base = tiny_flux_pipeline(folder / "base", model_type="flux_kontext")
    flags = ["--model", str(base), "--model_type", "flux_kontext", "--save_to", str(folder / "out"), *IN_TWO_STEPS]
    line = f"a door --ci {folder / 'a.png'} --ci {folder / 'b.png'}"
    references = tuple(
        latents_of(base, to_pixels(make_image(*size, seed=s))) for size, s in (((64, 48), 1), ((32, 32), 2))
    )
    expected = painted(base, "flux_kontext", Conditions(references=references))
    assert abs(picture_drawn(*flags, "--prompt", line, "--no_resize_control") - expected).max() <= 1
    resized = picture_drawn(*flags, "--prompt", line)  # to the picture's size
    assert abs(resized - expected).max() > 1


def test_a_picture_of_numbers_that_are_not_finite_is_not_written(folder: Path) -> None:
    base = tiny_flux_pipeline(folder / "base")
    file = base / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["decoder.conv_out.weight"][1] = torch.finfo(torch.float32).max  # finite; its products are not
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(NotFiniteError, match=r"^image of seed 5: NaN or infinity instead of pixels; lower the LoRA"):
        picture_drawn("--model", str(base), "--save_to", str(folder / "out"), *IN_TWO_STEPS, "--prompt", "a door")
    assert not [path for path in folder.rglob("*") if path.name.startswith("out") and path.is_file()]
