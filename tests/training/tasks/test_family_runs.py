"""Whole runs on tiny models of all families: what is equal is equal, what is written readable; fill and edit too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ErnieImagePipeline,
    Flux2KleinPipeline,
    Krea2Pipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
)
from PIL import Image, ImageDraw

from library.conditions import Conditions
from library.config.model_types import MODEL_TYPES
from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.errors import UserError
from library.models.family_by_name import model_family
from library.models.registry import lora_targets
from library.training.flow import noise_for
from library.training.tasks.image_step import FlowStep
from networks.files.metadata import TrainedOn, trained_on
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.runs import largest_difference, lora, losses_of, metadata, run, same, write_dataset
from tests.tiny import tiny_flux_pipeline
from tests.tiny_ernie_image import run_ernie, save_ernie_split_files, tiny_ernie_inputs, tiny_ernie_pipeline
from tests.tiny_flux2 import run_flux2, save_flux2_files, tiny_flux2_inputs, tiny_flux2_pipeline
from tests.tiny_flux3 import flux3_reference, run_flux3, save_flux3_split_files, tiny_flux3_inputs, tiny_flux3_pipeline
from tests.tiny_krea2 import run_krea2, save_krea2_split_files, tiny_krea2_inputs, tiny_krea2_pipeline
from tests.tiny_qwen import Kind, SplitFiles, run_qwen, save_split_files, tiny_qwen_inputs, tiny_qwen_pipeline
from tests.tiny_qwen_21 import run_21, save_21_split_files, tiny_21_inputs, tiny_21_loaded, tiny_21_pipeline
from tests.tiny_z_image import run_z, save_z_split_files, tiny_z_inputs, tiny_z_pipeline
from tests.training.test_host_waits import asked_by_more_steps

SAME_IN_FP32 = 2e-4  # see test_flux_runs.py
EPOCH = {"max_train_steps": 2}  # each of the four images once


@dataclass(frozen=True)
class Case:
    """A family: options of its runs, its tiny model, diffusers' pipeline, and what its LoRA's metadata say."""

    options: dict[str, str]
    write: Callable[[Path], Path]
    split: Callable[[Path, Path, str], SplitFiles]
    pipeline: Callable[[Path], Any]
    output: Callable[[torch.nn.Module], torch.Tensor]
    metadata: dict[str, str]


CASES = {
    "qwen_image": Case(
        {"model_type": "qwen_image", "timestep_sampling": "qwen_shift"},
        lambda folder: tiny_qwen_pipeline(folder, blocks=4),
        save_split_files,
        QwenImagePipeline.from_pretrained,
        run_qwen,
        {
            "ss_network_module": "networks.lora_qwen_image",
            "ss_base_model_version": "qwen_image",
            "modelspec.architecture": "Qwen-Image/lora",
            "modelspec.implementation": "https://github.com/QwenLM/Qwen-Image",
        },
    ),
    "qwen_image_21": Case(
        {"model_type": "qwen_image_21", "timestep_sampling": "qwen_shift"},
        lambda folder: tiny_21_pipeline(folder, blocks=4),
        save_21_split_files,
        tiny_21_loaded,
        run_21,
        {
            "ss_network_module": "networks.lora_qwen_image_21",
            "ss_base_model_version": "qwen_image_21",
            "modelspec.architecture": "Qwen-Image-2.1/lora",
            "modelspec.implementation": "https://github.com/QwenLM/Qwen-Image",
        },
    ),
    "z_image": Case(
        {"model_type": "z_image", "timestep_sampling": "shift"},
        lambda folder: tiny_z_pipeline(folder, layers=4),
        save_z_split_files,
        ZImagePipeline.from_pretrained,
        run_z,
        {
            "ss_network_module": "networks.lora_zimage",
            "ss_base_model_version": "z_image",
            "modelspec.architecture": "Z-Image/lora",
        },
    ),
    "flux2_klein": Case(
        {"model_type": "flux2_klein", "timestep_sampling": "flux2_shift"},
        lambda folder: tiny_flux2_pipeline(folder, double_blocks=3, single_blocks=4),
        save_flux2_files,
        Flux2KleinPipeline.from_pretrained,
        run_flux2,
        {
            "ss_network_module": "networks.lora_flux_2",
            "ss_base_model_version": "flux_2",
            "modelspec.architecture": "flux-2-klein/lora",
            "modelspec.implementation": "https://github.com/black-forest-labs/flux2",
        },
    ),
    "flux3_klein": Case(
        {"model_type": "flux3_klein", "timestep_sampling": "shift", "discrete_flow_shift": "6.93"},
        lambda folder: tiny_flux3_pipeline(folder, blocks=3),
        save_flux3_split_files,
        flux3_reference,
        run_flux3,
        {
            "ss_network_module": "peft",
            "ss_base_model_version": "flux3",
            "modelspec.architecture": "flux-3-klein/lora",
            "modelspec.implementation": "https://github.com/black-forest-labs/flux-3-image-klein",
        },
    ),
    "krea2": Case(
        {"model_type": "krea2", "timestep_sampling": "krea2_shift"},
        lambda folder: tiny_krea2_pipeline(folder, layers=4),
        save_krea2_split_files,
        Krea2Pipeline.from_pretrained,
        run_krea2,
        {
            "ss_network_module": "networks.lora_krea2",
            "ss_base_model_version": "krea2",
            "modelspec.architecture": "Krea-2/lora",
            "modelspec.implementation": "https://github.com/krea-ai/krea-2",
        },
    ),
    "ernie_image": Case(
        {"model_type": "ernie_image", "timestep_sampling": "shift"},
        lambda folder: tiny_ernie_pipeline(folder, layers=4),
        save_ernie_split_files,
        ErnieImagePipeline.from_pretrained,
        run_ernie,
        {
            "ss_network_module": "peft",
            "ss_base_model_version": "ernie_image",
            "modelspec.architecture": "ERNIE-Image/lora",
            "modelspec.implementation": "https://github.com/baidu/ERNIE-Image",
        },
    ),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def base(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.write(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    dataset = write_dataset(folder, images=4, text="batch_size = 2")
    for i in range(4):  # captions of different lengths, past Z-Image's 32 and FLUX.3's 80 tokens: batches are padded
        (folder / "images" / f"{i}.txt").write_text("a disc, " + "plain, " * (16 * i) + "red")
    return dataset


@pytest.fixture(scope="module")
def plain(case: Case, base: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without anything special."""
    folder = tmp_path_factory.mktemp("plain")
    run(base, dataset, folder, **case.options, **EPOCH)
    return folder


@pytest.mark.parametrize("family", ["qwen_image", "qwen_image_21"])
def test_steps_read_nothing_back_from_the_device(family: str, tmp_path: Path) -> None:
    case = CASES[family]
    base = case.write(tmp_path / "base")

    def train(folder: Path, steps: int) -> None:
        given = {"max_train_steps": steps, "log_every_n_steps": 100, "save_every_n_epochs": 9, **case.options}
        run(base, write_dataset(tmp_path), folder, **given)

    more = asked_by_more_steps(tmp_path, train)
    assert not more, more


@torch.no_grad()
def test_a_run_leaves_a_lora_that_gives_diffusers_the_output_of_the_running_network(
    case: Case, base: Path, dataset: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a disc --w 64 --h 64 --s 2\na disc --w 96 --h 64 --s 2 --l 3 --n plain disc\n")
    out = tmp_path / "out"
    settings = {"network_alpha": 3, "learning_rate": 1e-2, "sample_prompts": prompts, "sample_at_first": True}
    with torch.enable_grad():
        events = run(base, dataset, out, **case.options, **EPOCH, **settings)
    with Image.open(out / "samples" / "step000002_01.png") as image:
        assert image.size == (96, 64)
    pipeline = case.pipeline(base)
    ours, plain = case.output(events.task.transformer.eval()), case.output(pipeline.transformer)
    pipeline.load_lora_weights(out / "lora.safetensors")
    torch.testing.assert_close(case.output(pipeline.transformer), ours, rtol=1e-4, atol=1e-5)
    assert (ours - plain).abs().max() > 1e-3
    assert case.metadata.items() <= metadata(out).items()


@pytest.mark.parametrize("option", [{"gradient_checkpointing": True}, {"blocks_to_swap": 2}], ids=str)
def test_checkpointing_and_swapped_blocks_change_nothing(
    case: Case, base: Path, dataset: Path, plain: Path, tmp_path: Path, option: dict[str, object]
) -> None:
    run(base, dataset, tmp_path, **case.options, **EPOCH, **option)
    assert largest_difference(lora(tmp_path), lora(plain)) < SAME_IN_FP32


def test_split_files_and_an_fp8_base_train(case: Case, base: Path, dataset: Path, plain: Path, tmp_path: Path) -> None:
    files = case.split(base, tmp_path / "files", "model.diffusion_model.")
    tokenizer = next(iter(MODEL_TYPES[str(case.options["model_type"])].tokenizers))
    parts = {"vae": files.vae, "text_encoder": files.text_encoder, tokenizer: files.tokenizer, **case.options, **EPOCH}
    run(files.transformer, dataset, tmp_path / "single", **parts)
    assert same(lora(tmp_path / "single"), lora(plain))
    run(files.transformer, dataset, tmp_path / "fp8", **parts, fp8_scaled=True, fp8_text_encoder=True)
    whole, small = losses_of(plain), losses_of(tmp_path / "fp8")
    # fp8 text and weights: a tenth off in the velocity, so a hundredth in the loss, and twice that for luck
    assert all(0 < abs(a - b) < 0.02 * a for a, b in zip(whole, small, strict=True))


@dataclass(frozen=True)
class Learner:
    """A tiny model that can learn an image by heart: what writes it, its last layer, and what it is given.

    The last layer is frozen: it must be wide enough for a token's numbers, and behind a norm whose scale is fixed.
    """

    write: Callable[[Path], Path]
    inputs: Callable[[], dict[str, torch.Tensor]]
    sampling: str
    output: str = "proj_out.weight"
    arguments: tuple[str, ...] = ()


def _flux3_inputs() -> dict[str, torch.Tensor]:
    inputs = tiny_flux3_inputs(1, 6, 6)
    return inputs | {"latents": inputs["latents"][:, :8]}


def _qwen(kind: Kind) -> Learner:
    return Learner(lambda f: tiny_qwen_pipeline(f, kind, blocks=1), lambda: tiny_qwen_inputs(1, side=6), "qwen_shift")


_FLUX2 = Learner(
    lambda f: tiny_flux2_pipeline(f, single_blocks=1, heads=6), lambda: tiny_flux2_inputs(1, side=6), "flux2_shift"
)
_FLUX3 = Learner(
    lambda f: tiny_flux3_pipeline(f, blocks=1, channels=8), _flux3_inputs, "shift", arguments=("img_mod_dim=32",)
)
_QWEN_21 = Learner(
    lambda f: tiny_21_pipeline(f, blocks=1), lambda: tiny_21_inputs(1, side=6), "qwen_shift", arguments=("mod_dim=32",)
)
LEARNERS = {
    **{kind: _qwen(kind) for kind in ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus")},
    # attention and MLP alone stop at 0.4 of it
    "z_image": Learner(
        lambda f: tiny_z_pipeline(f, layers=1),
        lambda: tiny_z_inputs(1, side=6),
        "shift",
        "all_final_layer.2-1.linear.weight",
        ("mod_dim=32",),
    ),
    "qwen_image_21": _QWEN_21,
    "qwen_image_21_edit": _QWEN_21,
    "flux2_klein": _FLUX2,
    "flux2_klein_edit": _FLUX2,
    "flux3_klein": _FLUX3,
    "flux3_klein_edit": _FLUX3,
    "krea2": Learner(
        lambda f: tiny_krea2_pipeline(f, layers=1),
        lambda: tiny_krea2_inputs(1, side=6),
        "krea2_shift",
        "final_layer.linear.weight",
        ("final_dim=0",),
    ),
    "ernie_image": Learner(
        lambda f: tiny_ernie_pipeline(f, layers=1, heads=6),
        lambda: tiny_ernie_inputs(1, side=6),
        "shift",
        "final_linear.weight",
        ("mod_dim=32",),
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if "_edit" in kind else ()) for kind in LEARNERS]
)
def test_one_image_is_learnt_by_heart(kind: str, tmp_path: Path) -> None:
    """A tenth of what predicting nothing would cost, for one image at one noise."""
    learner = LEARNERS[kind]
    folder = learner.write(tmp_path / "base")
    family = model_family(ModelConfig(model_type=kind, pretrained_model_name_or_path=str(folder)))
    transformer = family.load_transformer(torch.float32)
    transformer.get_parameter(learner.output).mul_(5)  # a random one cannot reach a velocity's size
    targets = lora_targets()[kind]
    config = NetworkConfig(network_dim=32, network_alpha=32, network_args=list(learner.arguments))
    network = inject_adapter(transformer, parse_network_args(config, targets), targets, seed=0)
    inputs = learner.inputs()
    text = {name: inputs[name] for name in inputs if name.startswith("prompt")}
    text.setdefault("prompt_embeds_mask", torch.ones(text["prompt_embeds"].shape[:2], dtype=torch.bool))
    references = (inputs["latents"].flip(-1),) if "edit" in kind else ()
    conditions = Conditions(references=references)
    batch = Batch(inputs["latents"], text, torch.ones(1), None, [3], conditions=conditions)
    step = FlowStep(family, FlowConfig(timestep_sampling=learner.sampling), seed=9)
    nothing = (noise_for(batch.latents, batch.sample_ids, 9, 0) - batch.latents).square().mean().item()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(130):
        loss, _ = step.loss(transformer, batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if losses[-1] < 0.1 * min(nothing, losses[0]):
            return
    pytest.fail(f"{losses[-1]} of {nothing}, {losses[0]} at the start")


STEPS = 3


def write_pictures(folder: Path, images: int = 4) -> tuple[Path, Path]:
    """Write a dataset, a control picture for each image, a picture to fill and its mask; return TOML and prompts."""
    toml = write_dataset(folder, images, control_directory='"control"')
    (folder / "control").mkdir()
    for i in range(images):
        Image.new("RGB", (64, 64), (50 * i, 80, 120)).save(folder / "control" / f"{i}.png")
    mask = Image.new("L", (64, 64))
    ImageDraw.Draw(mask).rectangle((0, 0, 40, 40), fill=255)
    mask.save(folder / "mask.png")
    prompts = folder / "prompts.txt"
    prompts.write_text("a disc --ci images/1.png --w 64 --h 64 --s 2\n")
    return toml, prompts


def test_a_fill_model_trains_on_generated_masks_and_paints_into_its_prompts(tmp_path: Path) -> None:
    base = tiny_flux_pipeline(tmp_path / "base", model_type="flux_fill")
    toml, prompts = write_pictures(tmp_path / "data")
    toml.write_text(toml.read_text().replace('control_directory = "control"', 'inpaint_masks = ["halves", "strokes"]'))
    prompts.write_text(prompts.read_text().strip() + " --mi mask.png\n")
    keys = {
        "model_type": "flux_fill", "max_train_steps": STEPS, "masked_loss": True, "seam_loss_weight": 0.5,
        "sample_prompts": prompts, "sample_at_first": True, "guidance_scale": 4.0, "t5xxl_max_token_length": 16,
    }  # fmt: skip
    events = run(base, toml, tmp_path / "run", **keys)
    assert trained_on(metadata(tmp_path / "run")) == TrainedOn(("grey",), 4.0, 16)
    assert events.task.step.flow.masked_loss
    assert any(tensor.abs().max() > 0 for name, tensor in lora(tmp_path / "run").items() if "lora_B" in name)
    assert len(list((tmp_path / "data" / "images" / ".tandem_cache" / "conditions").iterdir())) == 4 * 4
    with Image.open(tmp_path / "run" / "samples" / "before_after.png") as sheet:
        assert sheet.width == 3 * 264 + 24
        grey = sheet.convert("RGB").getpixel((12 + 40, 28 + 40))  # the region to fill, in the first column
    assert grey == (128, 128, 128)
    run(base, toml, tmp_path / "unweighed", **(keys | {"masked_loss": False, "seam_loss_weight": 0}))
    one, other = lora(tmp_path / "run"), lora(tmp_path / "unweighed")
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_an_edit_model_trains_on_references_that_its_text_encoder_sees(tmp_path: Path) -> None:
    base = tiny_qwen_pipeline(tmp_path / "base", "qwen_image_edit_plus", blocks=1)
    toml, prompts = write_pictures(tmp_path / "data", images=2)
    for i in range(2):
        (tmp_path / "data" / "images" / f"{i}.txt").write_text("the same")
    run(base, toml, tmp_path / "run", model_type="qwen_image_edit_plus", max_train_steps=1, sample_prompts=prompts)
    cache = tmp_path / "data" / "images" / ".tandem_cache"
    assert len(list((cache / "text").iterdir())) == 4  # one caption with two pictures; a prompt, and without one
    assert len(list((cache / "conditions").iterdir())) == 2
    assert [path.name for path in (tmp_path / "run" / "samples").iterdir()] == ["step000001_00.png"]


@pytest.mark.parametrize(
    ("model_type", "line", "message"),
    [
        ("flux_fill", "x --w 64 --h 64", "prompt 'x': no image to fill; write --ci"),
        ("flux_kontext", "x --w 64 --h 64", "prompt 'x': no image to edit; add --ci"),
        (
            "flux",
            "x --w 64 --h 64 --ci images/1.png",
            "prompt 'x': --ci is not taken: this model generates from text alone",
        ),
    ],
)
def test_prompts_that_do_not_suit_the_model_are_refused_before_anything_is_encoded(
    tmp_path: Path, model_type: str, line: str, message: str
) -> None:
    base = tiny_flux_pipeline(tmp_path / "base", model_type=model_type)
    toml, prompts = write_pictures(tmp_path / "data")
    prompts.write_text(line)
    if model_type != "flux_kontext":  # the only one of these that takes control images
        toml.write_text(toml.read_text().replace('control_directory = "control"', ""))
    with pytest.raises(UserError, match=message):
        run(base, toml, tmp_path / "run", model_type=model_type, sample_prompts=prompts)
    assert not (tmp_path / "data" / "images" / ".tandem_cache").exists()


@pytest.mark.parametrize(
    ("model_type", "pipeline"),
    [("qwen_image_edit", QwenImageEditPipeline), ("qwen_image_edit_plus", QwenImageEditPlusPipeline)],
)
def test_the_edit_pipelines_load_what_was_trained(
    model_type: Kind, pipeline: type[QwenImageEditPipeline], tmp_path: Path
) -> None:
    base = tiny_qwen_pipeline(tmp_path / "base", model_type, blocks=1)
    toml, _ = write_pictures(tmp_path / "data", images=1)
    keys = {"model_type": model_type, "max_train_steps": 2, "learning_rate": 1e-2, "network_alpha": 3}
    events = run(base, toml, tmp_path / "run", **keys)
    theirs = QwenImageTransformer2DModel.from_pretrained(base, subfolder="transformer").eval()
    inputs = tiny_qwen_inputs(1)
    batch = {
        "hidden_states": QwenImagePipeline._pack_latents(inputs["latents"], 1, 16, *inputs["latents"].shape[2:]),
        "timestep": inputs["sigmas"],
        "encoder_hidden_states": inputs["prompt_embeds"],
        "img_shapes": [[(1, 4, 4)]],
        "return_dict": False,
    }
    with torch.no_grad():
        plain = theirs(**batch)[0]
        pipeline(None, None, None, None, None, theirs).load_lora_weights(tmp_path / "run" / "lora.safetensors")
        loaded, ours = theirs(**batch)[0], events.task.transformer.eval()(**batch)[0]
    torch.testing.assert_close(loaded, ours, rtol=1e-4, atol=1e-5)  # fp32 sums in another order
    assert (loaded - plain).abs().max() > 1e-3
