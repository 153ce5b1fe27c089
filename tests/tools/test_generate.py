"""tools/generate.py against diffusers' own pipeline with the same LoRAs, and as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

from library.errors import UserError
from library.models.family_by_name import family_class
from library.models.flux.files import FLUX_TARGETS
from library.models.registry import lora_targets
from library.safetensors_io import write_safetensors
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.models.test_image_families import CASES, guidance_of
from tests.runs import call, refusal
from tests.tiny import T5_LENGTH, tiny_flux_pipeline, tiny_flux_transformer
from tools import generate as tool
from tools import quantize_model
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
            module_name: LoraWeights(
                torch.randn(rank, module.in_features, generator=random) * 0.2,
                torch.randn(module.out_features, rank, generator=random) * 0.2,
                alpha,
            )
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


def test_the_text_encoders_take_their_part_of_a_lora(base: Path, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    lora = {
        f"text_encoder.encoder.layers.{i}.self_attn.{name}": LoraWeights(
            torch.randn(2, 64, generator=random), torch.randn(64, 2, generator=random), 1.0
        )
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
    said = capsys.readouterr().out
    assert f"{other}: diffusers, 1 layer, strength 1" in said
    assert f"note: {other}: trained on base 0123456789abcdef, this one is" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], 'give either --prompt "..." or --from_file FILE'),
        (["--prompt", "x", "--from_file", "y"], "give either --prompt"),
        (["--prompt", "x --w 50"], r"--prompt 1: width \(--w\) 50 is no multiple of 16; take 48"),
        (["--prompt", "x", "--w", "50"], r"width \(--w\) 50 is no multiple of 16"),
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
    said = capsys.readouterr().out
    assert re.search(r"base: musubi file \(\d+ e4m3fn, a scale a row.*\), 26 linear weights", said)
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
    line = refusal(tool, "image", "--model", "nowhere", "--prompt", "x")
    assert line.startswith("error: --model 'nowhere' does not exist")


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
        name: LoraWeights(
            torch.randn(4, module.in_features, generator=random) * 0.2,
            torch.randn(module.out_features, 4, generator=random) * 0.2,
            2.0,
        )
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

    pipeline: Any = getattr(diffusers, family_class(kind).published_pipeline).from_pretrained(base)
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
