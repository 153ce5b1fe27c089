"""The tiny FLUX and the demo images: captions tell the truth, stages run, the model obeys its prompts."""

import math
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

from dev.make_tiny_models import main
from dev.tiny_models.latent_pool import tokenize, tokenizers
from dev.tiny_models.painting import COLOURS, GROUNDS, SHAPES, SKIES, coverage
from dev.tiny_models.scenes import PLACES, RELATIONS, TRIGGER, Item, Scene, random_scene
from dev.tiny_models.transformer import text_to_image_of
from library.models.vae import pack_latents

ASSETS = Path(__file__).resolve().parents[2] / "assets"
TINY_FLUX, DEMO = ASSETS / "tiny-flux", ASSETS / "demo_dataset"


T5, CLIP = tokenizers()
KNOWN_WORDS = {piece.removeprefix("▁") for piece in T5.get_vocab() if piece.startswith("▁")}


def nearest_colour(pixel: np.ndarray) -> str:
    return min(COLOURS, key=lambda name: float(np.square(np.asarray(COLOURS[name]) - pixel).sum()))


def colour_under(scene: Scene, item: Item) -> str:
    """The named colour that most resembles the mean of the pixels wholly inside the item's outline."""
    inside = coverage(SHAPES[item.shape], *scene.image.shape[:2], item.centre, item.radius) == 1.0
    return nearest_colour(np.median(scene.image[inside], axis=0))


def known_part(caption: str) -> str:
    """The caption without its invented words."""
    words = caption.lower().rstrip(".").split()
    return " ".join(word for word in words if word in KNOWN_WORDS)


def test_a_caption_names_the_colours_that_were_painted() -> None:
    rng = np.random.default_rng(5)
    scenes = [random_scene(rng) for _ in range(200)]
    shaped = [scene for scene in scenes if scene.items]
    assert len(shaped) > 100
    for scene in shaped:
        for item in scene.items:
            assert colour_under(scene, item) == item.colour, scene.caption
            assert f"{item.colour} {item.shape}" in known_part(scene.caption)
    plain = [scene for scene in shaped if scene.background_colour and "background" in scene.caption]
    for scene in plain:
        assert nearest_colour(scene.image[1, 1]) == scene.background_colour, scene.caption
        assert f"{scene.background_colour} background" in known_part(scene.caption)


@pytest.mark.parametrize(
    ("words", "axis", "sign"), [("above", 1, 1), ("below", 1, -1), ("left of", 0, 1), ("right of", 0, -1)]
)
def test_a_caption_names_the_places_that_were_painted(words: str, axis: int, sign: int) -> None:
    rng = np.random.default_rng(6)
    scenes = [scene for scene in (random_scene(rng) for _ in range(300)) if f" {words} a" in scene.caption]
    assert len(scenes) > 5
    for scene in scenes:
        first, second = scene.items
        named = [known_part(scene.caption).index(f"{item.colour} {item.shape}") for item in (first, second)]
        assert named[0] < named[1]
        assert sign * (second.centre[axis] - first.centre[axis]) > 20


def test_known_words_are_one_piece_and_any_other_word_is_spelt() -> None:
    for phrase in [*COLOURS, *SHAPES, *PLACES, *RELATIONS, *SKIES, *GROUNDS]:
        assert all(len(tokenizer.tokenize(phrase)) == len(phrase.split()) for tokenizer in (T5, CLIP)), phrase
    assert T5.tokenize(TRIGGER) == ["▁", *TRIGGER]
    assert T5.unk_token_id not in T5("a Zorbo-4, on_fire!").input_ids
    assert CLIP.unk_token_id not in CLIP(TRIGGER).input_ids[1:-1]


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    main(["--smoke", f"--out={folder}", f"--state={folder / 'state'}"])
    return folder


def test_all_stages_make_a_pipeline_that_loads_and_paints(smoke_run: Path) -> None:
    pipeline = FluxPipeline.from_pretrained(smoke_run / "tiny-flux", torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    arguments = {"num_inference_steps": 2, "max_sequence_length": 32, "height": 96, "width": 160}
    image = pipeline("a red circle", **arguments).images[0]
    assert image.size == (160, 96)
    assert np.asarray(image).std() > 0
    made = sorted(path.name for path in smoke_run.iterdir())
    assert made == ["demo_dataset", "state", "tiny-flux", "tiny-flux-fill"]  # nothing half-written


def test_a_stage_whose_file_is_there_is_not_run_again(smoke_run: Path) -> None:
    stages = {path: path.stat().st_mtime_ns for path in (smoke_run / "state").iterdir()}
    assert {path.stem for path in stages} == {"latents", "dit", "distill", "fill_pool", "fill"}
    weights = (smoke_run / "tiny-flux-fill/transformer/diffusion_pytorch_model.safetensors").read_bytes()
    main(["--smoke", f"--out={smoke_run}", f"--state={smoke_run / 'state'}"])
    assert {path: path.stat().st_mtime_ns for path in stages} == stages
    assert (smoke_run / "tiny-flux-fill/transformer/diffusion_pytorch_model.safetensors").read_bytes() == weights


@torch.no_grad()
def test_the_trained_modules_give_the_pipelines_velocity(smoke_run: Path) -> None:
    pipeline = FluxPipeline.from_pretrained(smoke_run / "tiny-flux", torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    model = text_to_image_of(pipeline)
    prompt, noise = "a red circle on a blue background", torch.randn(1, 16, 12, 20)
    arguments = {"guidance_scale": 3.5, "max_sequence_length": 32, "height": 96, "width": 160, "output_type": "latent"}
    theirs = pipeline(prompt, num_inference_steps=4, latents=pack_latents(noise), **arguments).images
    latents, captions, guidance = noise, tokenize([prompt]), torch.tensor([3.5])
    for sigma, following in pairwise(pipeline.scheduler.sigmas):
        latents = latents + (following - sigma) * model(latents, sigma[None], captions, guidance)
    torch.testing.assert_close(pack_latents(latents), theirs, rtol=1e-4, atol=1e-4)


def test_the_committed_demo_is_the_one_that_is_painted(smoke_run: Path) -> None:
    painted, images = {path.name: path for path in (smoke_run / "demo_dataset/images").iterdir()}, DEMO / "images"
    assert painted.keys() == {path.name for path in images.glob("[!.]*")}
    for name, path in painted.items():
        committed = images / name
        if path.suffix == ".png":  # Pillow's encoder may change
            assert np.array_equal(np.asarray(Image.open(path)), np.asarray(Image.open(committed))), name
        else:
            assert path.read_text() == committed.read_text(), name


def test_every_demo_image_has_a_caption_with_the_trigger_word() -> None:
    config = tomllib.loads((DEMO / "dataset.toml").read_text())
    (dataset,) = config["datasets"]
    images = sorted((DEMO / dataset["subsets"][0]["image_dir"]).glob("*.png"))
    assert len(images) >= 12
    for path in images:
        assert TRIGGER in path.with_suffix(config["general"]["caption_extension"]).read_text().split()
        assert all(side % 16 == 0 for side in Image.open(path).size)
    assert 2 <= math.floor(len(images) * dataset["validation_split"]) <= 4


def test_what_the_demo_preserves_the_base_knows_and_what_it_measures_is_not_among_it() -> None:
    prompts = {
        name: [line.split(" --")[0] for line in (DEMO / f"{name}.txt").read_text().splitlines()]
        for name in ("preserve", "general", "prompts")
    }
    assert len(set(prompts["preserve"])) == 48
    for caption in prompts["preserve"] + prompts["general"]:
        assert caption.lower() == known_part(caption)
    assert not set(prompts["preserve"]) & {*prompts["general"], *prompts["prompts"]}


@pytest.fixture(scope="module")
def tiny_flux() -> FluxPipeline:
    if not TINY_FLUX.exists():
        pytest.skip("assets/tiny-flux is not made yet: python dev/make_tiny_models.py")
    pipeline = FluxPipeline.from_pretrained(TINY_FLUX, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: FluxPipeline, prompt: str, seed: int = 0) -> np.ndarray:
    """[128, 128, 3] in 0..1."""
    return pipeline(
        prompt,
        height=128,
        width=128,
        num_inference_steps=12,
        guidance_scale=3.5,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images[0]


def test_the_committed_model_fits_its_budget() -> None:
    if not TINY_FLUX.exists():
        pytest.skip("assets/tiny-flux is not made yet: python dev/make_tiny_models.py")
    assert sum(path.stat().st_size for path in TINY_FLUX.rglob("*")) < 10 * 2**20


@pytest.mark.parametrize("colour", ["red", "blue", "green"])
def test_the_committed_model_paints_the_named_colour_in_the_middle(tiny_flux: FluxPipeline, colour: str) -> None:
    image = draw(tiny_flux, f"a {colour} circle on a white background")
    assert nearest_colour(np.median(image[56:72, 56:72], axis=(0, 1))) == colour
    assert nearest_colour(np.median(image[:8], axis=(0, 1))) == "white"


@pytest.mark.parametrize(("place", "x", "y"), [("on the left", 32, 64), ("in the top right corner", 96, 32)])
def test_the_committed_model_paints_at_the_named_place(tiny_flux: FluxPipeline, place: str, x: int, y: int) -> None:
    image = draw(tiny_flux, f"a red square {place} on a white background")
    there, opposite = image[y - 4 : y + 4, x - 4 : x + 4], image[124 - y : 132 - y, 124 - x : 132 - x]
    assert nearest_colour(np.median(there, axis=(0, 1))) == "red"
    assert nearest_colour(np.median(opposite, axis=(0, 1))) == "white"
