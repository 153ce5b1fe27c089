"""What all families of image models claim of a tiny model each: precision of weights and noise levels, every layout of
files, samples of diffusers' pipelines, text encoders, refusals.

What differs between families, velocities above all, is tested in the folders beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
from safetensors.torch import save_file
from torch import Tensor, nn

from library.config.model_types import MODEL_TYPES
from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family import Family
from library.models.family_by_name import family_class, model_family
from library.nn.rope import Table
from library.precision.files.fp8 import Fp8Scheme
from library.precision.recipe import Recipe
from tests.models.claims import (
    assert_bf16_is_near,
    assert_fp8_is_near,
    assert_lone_file_is_read,
    assert_refused,
    assert_same_model,
    assert_sample_is_the_pipelines,
    assert_timesteps_are_exact,
    quiet,
)
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline
from tests.tiny_ernie_image import (
    save_ernie_split_files,
    tiny_ernie_inputs,
    tiny_ernie_pipeline,
    tiny_ernie_transformer,
)
from tests.tiny_flux2 import save_flux2_files, tiny_flux2_inputs, tiny_flux2_pipeline, tiny_flux2_transformer
from tests.tiny_flux3 import (
    CalledAsOthers,
    flux3_reference,
    save_flux3_split_files,
    tiny_flux3_inputs,
    tiny_flux3_pipeline,
    tiny_flux3_transformer,
)
from tests.tiny_krea2 import save_krea2_split_files, tiny_krea2_inputs, tiny_krea2_pipeline, tiny_krea2_transformer
from tests.tiny_qwen import save_split_files, tiny_qwen_inputs, tiny_qwen_pipeline, tiny_qwen_transformer
from tests.tiny_qwen_21 import (
    save_21_split_files,
    tiny_21_inputs,
    tiny_21_loaded,
    tiny_21_pipeline,
    tiny_21_transformer,
)
from tests.tiny_z_image import save_z_split_files, tiny_z_inputs, tiny_z_pipeline, tiny_z_transformer

CAPTIONS = ["a red disc", "make the picture of a small plain disc blue, yellow and purple " * 6]


@dataclass(frozen=True)
class Case:
    """A family's tiny model.

    Attributes:
        folder, files: write its pipeline, and that as split files with a prefix.
        inputs: of so many samples. transformer: diffusers' own.
        fp8: kinds of layers that stay high -> how many layers are quantised, and how many stay.
        refusals: remedies of a file alone, by the option that is missing, and the title in messages.
        text_layers: how many layers of the text encoder are loaded. text_title: what it is called.
        lone: further tensors of a lone file that are passed over; model_type of a model with every part.
    """

    folder: Callable[..., Path]
    files: Callable[..., Any]
    inputs: Callable[..., dict[str, Tensor]]
    transformer: Callable[[], nn.Module]
    fp8: Mapping[tuple[str, ...], tuple[int, int]]
    needs: Mapping[str, str]
    title: str
    text: tuple[int, str] | None = None
    lone: Mapping[str, Tensor] | None = None
    whole: str = ""


LOW, HIGH = (), ("embedders", "final")
CASES = {
    "qwen_image": Case(
        *(tiny_qwen_pipeline, save_split_files, tiny_qwen_inputs, tiny_qwen_transformer),
        fp8={HIGH: (2 * 14, 6)},
        needs={"vae": "qwen_image_vae.safetensors", "text_encoder": "qwen_2.5_vl_7b"},
        title="a Qwen-Image transformer",
    ),
    "qwen_image_21": Case(
        *(tiny_21_pipeline, save_21_split_files, tiny_21_inputs, tiny_21_transformer),
        fp8={HIGH: (2 * 7 + 1, 7)},  # the modulation too
        needs={"vae": "qwen_image_2.1_vae", "text_encoder": "qwen3vl_8b"},
        title="a Qwen-Image-2.1 transformer",
    ),
    "z_image": Case(
        *(tiny_z_pipeline, save_z_split_files, tiny_z_inputs, tiny_z_transformer),
        # 7 in each of four blocks, modulation in three; outside them image, text, two of the timestep, two of the end
        fp8={HIGH: (31, 6), LOW: (37, 0)},
        needs={"vae": "ae.safetensors", "text_encoder": "qwen_3_4b"},
        title="a Z-Image transformer",
        text=(2, "Qwen3"),
    ),
    "flux2_klein": Case(
        *(tiny_flux2_pipeline, save_flux2_files, tiny_flux2_inputs, tiny_flux2_transformer),
        # 12 of the double block, two of each single one; 3 modulations; image, text, two of timestep and of the end
        fp8={(*HIGH, "modulation"): (16, 9), HIGH: (19, 6), LOW: (25, 0)},
        needs={"vae": "flux2-vae.safetensors", "text_encoder": "qwen_3_4b"},
        title="a FLUX.2 transformer .*",
        text=(27, "Qwen3"),
    ),
    "flux3_klein": Case(
        *(tiny_flux3_pipeline, save_flux3_split_files, tiny_flux3_inputs, tiny_flux3_transformer),
        # 6 in each of six blocks, four modulations; text, image, two of the timestep; two of the end
        fp8={(*HIGH, "modulation"): (36, 10), HIGH: (40, 6), LOW: (46, 0)},
        needs={"vae": "flux2-vae", "text_encoder": "qwen3vl_4b"},
        title="a FLUX.3 transformer.*",
        text=(32, "Qwen3-VL"),
        lone={"repa_projectors.0.weight": torch.ones(1)},
        whole="flux3_klein_edit",
    ),
    "krea2": Case(
        *(tiny_krea2_pipeline, save_krea2_split_files, tiny_krea2_inputs, tiny_krea2_transformer),
        # 8 in each of two blocks; the text's transformer has 3 blocks of 8 and the projector, around it are 7
        fp8={HIGH: (16, 32), LOW: (48, 0)},
        needs={"vae": "qwen_image_vae.safetensors", "text_encoder": "qwen3vl_4b"},
        title="a Krea 2 transformer",
        text=(35, "Qwen3-VL"),
    ),
    "ernie_image": Case(
        *(tiny_ernie_pipeline, save_ernie_split_files, tiny_ernie_inputs, tiny_ernie_transformer),
        # 7 in each of two blocks; text, two of the timestep, the modulation of all blocks; two of the end
        fp8={HIGH: (14, 6), LOW: (20, 0)},
        needs={"vae": "flux2-vae.safetensors", "text_encoder": "ministral-3-3b"},
        title="an ERNIE-Image transformer",
        text=(2, "Ministral 3"),
    ),
}


@dataclass(frozen=True)
class Model:
    """A case's model on disk."""

    name: str
    case: Case
    folder: Path

    def family(self, folder: Path | None = None, **changes: object) -> Family:
        """Return the family of the folder, or of another path."""
        path = str(folder or self.folder)
        settings: dict[str, object] = {"model_type": self.name, "pretrained_model_name_or_path": path}
        return model_family(ModelConfig(**(settings | changes)))  # type: ignore[arg-type]

    def text(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the text of ``inputs``, all of it real."""
        return {name: inputs[name] for name in ("prompt_embeds", "prompt_embeds_mask") if name in inputs}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    case = CASES[request.param]
    return Model(request.param, case, case.folder(tmp_path_factory.mktemp(request.param) / "pipeline"))


def test_bf16_weights_with_and_without_autocast_are_near_and_timesteps_exact(model: Model) -> None:
    inputs, one = model.case.inputs(), model.case.inputs(1)
    assert_bf16_is_near(model.family(), inputs, model.text(inputs))
    assert_timesteps_are_exact(model.family(), one, model.text(one))


def test_fp8_base_stays_near_and_keeps_its_inputs_high(model: Model) -> None:
    inputs = model.case.inputs()
    for high, counts in model.case.fp8.items():
        assert_fp8_is_near(model.family(), inputs, model.text(inputs), high, counts)


def test_split_files_hold_the_same_model(model: Model, tmp_path: Path) -> None:
    """With a prefix: tests/training/tasks/test_family_runs.py."""
    files = model.case.files(model.folder, tmp_path, "")
    kind = {"model_type": model.case.whole or model.name}
    assert_same_model(model_family(files.model_config(**kind)), model.family(**kind), CAPTIONS)


def test_a_lone_file_in_diffusers_names_is_read(model: Model, tmp_path: Path) -> None:
    more, kind = dict(model.case.lone or {}), model.case.whole or model.name
    assert_lone_file_is_read(model.folder, model.family, tmp_path / "lone.safetensors", more, model_type=kind)


def test_swapping_twice_changes_nothing(model: Model) -> None:
    optimise = family_class(model.name).optimise_forward
    transformer = optimise(optimise(model.case.transformer()))
    assert transformer.state_dict().keys() == model.case.transformer().state_dict().keys()


@torch.no_grad()
def guidance_of(name: str, pipeline: Any, cfg: float, negative: str = "blurry, large") -> dict[str, Any]:
    """Return the guidance, and above 1 the negative text, as diffusers' pipeline of the family takes them."""
    given: dict[str, Any] = {"true_cfg_scale" if name == "qwen_image" else "guidance_scale": cfg}
    if name in ("krea2", "z_image"):
        given = {"guidance_scale": cfg - 1}  # the pipelines count from 0
    if cfg > 1 and name == "flux2_klein":  # takes no negative text
        return given | {"negative_prompt_embeds": pipeline.encode_prompt(negative)[0]}
    return given | ({"negative_prompt": negative} if cfg > 1 else {})


@pytest.fixture(scope="module")
def pipeline(model: Model) -> Any:
    """diffusers' pipeline of the same model."""
    if model.name == "flux3_klein":
        return CalledAsOthers(flux3_reference(model.folder))
    if model.name == "qwen_image_21":
        return tiny_21_loaded(model.folder)
    return quiet(getattr(diffusers, MODEL_TYPES[model.name].pipeline).from_pretrained(model.folder))


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_samples_are_those_of_the_pipeline(model: Model, pipeline: Any, cfg: float) -> None:
    if model.name == "qwen_image_21":
        pytest.skip("its pipeline gives images with opacity; tested beside")
    assert_sample_is_the_pipelines(model.family(), pipeline, cfg, **guidance_of(model.name, pipeline, cfg))


def embeddings_of(name: str, pipeline: Any, captions: list[str]) -> list[Tensor]:
    """Return what the pipeline makes of each caption, without padding."""
    if name == "flux3_klein":  # takes one caption at a time
        encode = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
        parts = pipeline.pipeline.text_encoder, pipeline.pipeline.tokenizer
        return [encode(*parts, caption)[0] for caption in captions]
    if name == "z_image":
        return pipeline.encode_prompt([*captions], do_classifier_free_guidance=False)[0]
    if name == "ernie_image":
        return pipeline.encode_prompt([*captions], "cpu")
    embeds, mask, *_ = pipeline.encode_prompt([*captions])
    if name == "flux2_klein" or mask is None:
        return list(embeds)
    return [each[kept].flatten(1) for each, kept in zip(embeds, mask.bool(), strict=True)]


LONG, SPECIAL = "plain " * 1100, "a {brace} and <|im_end|>"


@torch.no_grad()
@pytest.mark.parametrize("captions", [CAPTIONS, [""], [SPECIAL], [LONG]], ids=["two", "empty", "special", "long"])
def test_text_embeddings_are_those_of_the_pipeline(model: Model, pipeline: Any, captions: list[str]) -> None:
    if captions == [LONG] and model.name == "flux3_klein":
        captions = ["plain " * 500]  # 6 vectors short of a multiple of 80
    encoder = model.family().load_text_encoder(torch.float32)
    within = 1e-4 if model.name == "qwen_image_21" else 1e-5  # whose pipeline pads on the left: other positions
    for ours, theirs in zip(encoder.encode(captions), embeddings_of(model.name, pipeline, captions), strict=True):
        assert ours["prompt_embeds"].shape == theirs.shape
        assert ours.get("prompt_embeds_mask", torch.ones(1, dtype=torch.bool)).all()
        assert ("prompt_embeds_mask" in ours) is model.family().captions_differ
        assert (ours["prompt_embeds"] - theirs).abs().max() <= within * theirs.abs().max()
        if captions == CAPTIONS:
            assert theirs.std(dim=0).amax() > 0.05 * theirs.abs().max(), "places differ"


def test_only_the_layers_of_the_text_encoder_that_are_read_are_loaded_and_fp8_ones_are_near(model: Model) -> None:
    plain: Any = model.family().load_text_encoder(torch.bfloat16)
    small = model.family().load_text_encoder(torch.bfloat16, recipe=Recipe(Fp8Scheme("block64"), exclude=()))
    assert plain.fingerprint != small.fingerprint
    (expected,) = plain.encode(CAPTIONS[:1])
    assert not any("visual" in name for name, _ in plain._model.named_parameters())
    if model.case.text is not None:
        assert len(plain._model.layers) == model.case.text[0]
        with pytest.raises(UserError, match=f"text_encoder_lr: {model.case.text[1]}"):
            plain.load_modules(["text_encoder"])
    if model.case.text is None or model.case.text[0] < 10:  # deeper ones of random weights are too far off
        (found,) = small.encode(CAPTIONS[:1])
        error = (found["prompt_embeds"] - expected["prompt_embeds"]).float().norm() / expected["prompt_embeds"].norm()
        assert 0 < error < 0.15  # e4m3 rounds a weight by 2.6 % (rms); 14 to 21 matrices one after the other
    plain.release()
    assert plain._model is None


def test_missing_parts_and_other_models_are_refused_in_one_line(model: Model, tmp_path: Path) -> None:
    files, path = model.case.files(model.folder, tmp_path / "files"), "pretrained_model_name_or_path"
    lora = tmp_path / "lora.safetensors"
    save_file({"diffusion_model.single_blocks.0.q_proj.lora_A.weight": torch.ones(1)}, lora)
    needs = {f"needs {part} beside it; set {part} to {named}": {part: None} for part, named in model.case.needs.items()}
    wanted = needs | {
        "does not exist; give a local file or folder": {path: "nowhere"},
        "vae 'nowhere' does not exist": {"vae": "nowhere"},
        "no model_index.json, so no diffusers pipeline": {path: str(tmp_path)},
        "a LoRA, not a base model; give it as network_weights": {path: str(lora)},
        "not (Qwen|Ministral)": {"text_encoder": str(files.vae)},
    }
    assert_refused(files.model_config, wanted)
    with pytest.raises(UserError, match=f'{model.case.title}, not FLUX.1; set model_type = "{model.name}"'):
        model_family(ModelConfig(model_type="flux", pretrained_model_name_or_path=str(files.transformer)))
    with pytest.raises(UserError, match=f'not FluxTransformer2DModel; set model_type = "{model.name}"'):
        model_family(ModelConfig(model_type="flux", pretrained_model_name_or_path=str(model.folder)))


TABLES = {"flux": (tiny_flux_pipeline, tiny_flux_inputs), "qwen_image": (tiny_qwen_pipeline, tiny_qwen_inputs)}


@pytest.mark.parametrize("name", TABLES)
def test_each_bucket_has_its_own_table(name: str, tmp_path: Path) -> None:
    write, draw = TABLES[name]
    folder = str(write(tmp_path / "pipeline"))
    family: Any = model_family(ModelConfig(model_type=name, pretrained_model_name_or_path=folder))  # type: ignore[arg-type]
    transformer = family.load_transformer(torch.float32)
    tables: list[Table] = []
    transformer.pos_embed.register_forward_hook(lambda module, args, table: tables.append(table))

    def step(height: int, width: int, tokens: int = 12) -> torch.Tensor:
        inputs = draw(1, 8, tokens)
        text = {key: inputs[key] for key in inputs if key not in ("latents", "sigmas")}
        latents = torch.randn(1, 16, height, width, generator=torch.Generator().manual_seed(0))
        return family.predict_velocity(transformer, latents, inputs["sigmas"], text, 1.0)

    with torch.inference_mode():  # pictures may be drawn before the first step
        step(8, 4)
    first = step(8, 4)
    step(4, 8)
    step(8, 4, tokens=9)
    torch.testing.assert_close(step(8, 4), first, rtol=0, atol=0)
    cosines = [cos for cos, _ in tables]
    assert torch.equal(cosines[1], cosines[4])
    assert not any(cos.is_inference() for cos in cosines[1:])
    assert cosines[1].shape == cosines[2].shape
    assert not torch.equal(cosines[1], cosines[2])  # as many tokens, in another shape
    assert cosines[3].shape != cosines[1].shape
