"""Pairs of images: a batch beside diffusers, peft and the published formula in float64; properties; whole runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from PIL import Image, ImageChops
from torch import Tensor

from library.conditions import Conditions
from library.config.schema import DatasetArguments, FlowConfig, ModelConfig, NetworkConfig, PairsConfig, TrainingConfig
from library.data.batches import Batch
from library.data.config import load_dataset_config
from library.data.directions import Direction, read_directions
from library.data.samples import scan
from library.errors import UserError
from library.models.family import Family
from library.models.family_by_name import model_family
from library.models.registry import lora_targets
from library.training.flow import noise_for, sample_sigmas
from library.training.memory.budget import recompute_blocks
from library.training.report.run_folder import samples_of
from library.training.tasks.dpo import REWARDS
from library.training.tasks.image_pairs import SHOWN, PreferenceStep, SliderStep
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.parity.peft_lora import assert_gradients_are_pefts, copy_to_peft, fill_up
from tests.runs import (
    arguments,
    assert_same_metrics,
    largest_difference,
    lora,
    metrics,
    pipeline_forward,
    run,
    same,
    train_flags,
    write_dataset,
)
from tests.targets import FLUX_TARGETS
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline
from tests.training.tasks.test_family_runs import LEARNERS
from tests.worker_group import run_in_group

RANK, ALPHA, SEED, STEP = 4, 3.0, 9, 11
FLOW = FlowConfig(timestep_sampling="flux_shift", guidance_scale=3.5)


@pytest.fixture(scope="module")
def family(base: Path) -> Family:
    return model_family(ModelConfig(pretrained_model_name_or_path=str(base)))


def with_lora(family: Family) -> tuple[torch.nn.Module, AdapterNetwork]:
    transformer = family.load_transformer(torch.float32)
    options = parse_network_args(NetworkConfig(network_dim=RANK, network_alpha=ALPHA), FLUX_TARGETS)
    network = fill_up(inject_adapter(transformer, options, FLUX_TARGETS, seed=0, dtype=torch.float32))
    return transformer.train(), network


def pairs_of(count: int = 2, masks: Tensor | None = None) -> Batch:
    """Pairs of latents, one after the other, with the same text and the same id."""
    inputs = tiny_flux_inputs(batch=2 * count)
    text = {k: inputs[k][::2].repeat_interleave(2, dim=0) for k in ("prompt_embeds", "pooled_prompt_embeds")}
    ids = [5 + row // 2 for row in range(2 * count)]
    masks = None if masks is None else masks.repeat_interleave(2, dim=0)
    return Batch(inputs["latents"], text, torch.ones(2 * count), masks, ids, views=2)


def swapped(batch: Batch) -> Batch:
    """The same pairs the other way round."""
    return batch.rows([row ^ 1 for row in range(len(batch.sample_ids))])


class Plain:
    """diffusers' transformer with peft's LoRA, in float64, and the inputs of a step as the papers write them."""

    def __init__(self, base: Path, network: AdapterNetwork, batch: Batch) -> None:
        model = FluxTransformer2DModel.from_pretrained(base, subfolder="transformer").requires_grad_(False)
        model.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(network.modules)))
        self.model = model.double().train()
        self.named = dict(self.model.named_parameters())
        copy_to_peft(network, self.named)
        noise = noise_for(batch.latents, batch.sample_ids, SEED, STEP)
        self.sigmas = sample_sigmas(FLOW, batch.sample_ids, 16, SEED, STEP).double()
        self.noisy = torch.lerp(batch.latents.double(), noise.double(), self.sigmas.view(-1, 1, 1, 1))
        self.target = noise.double() - batch.latents.double()

    def velocity(self, text: dict[str, Tensor], rows: Sequence[int], strength: float = 1.0) -> Tensor:
        """Return the velocity of some rows at a strength of the LoRA; 0: of the base, without gradients."""
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.scaling["default"] = strength * ALPHA / RANK
        chosen = {name: tensor[list(rows)].double() for name, tensor in text.items()}
        with torch.set_grad_enabled(strength != 0):
            return pipeline_forward(self.model, self.noisy[list(rows)], self.sigmas[list(rows)], chosen, guidance=3.5)


def assert_gradients(network: AdapterNetwork, plain: Plain) -> None:
    assert_gradients_are_pefts(network, plain.named, 1e-4)  # ours in fp32


@pytest.mark.parametrize("checkpointing", [False, True])
def test_preferences_have_the_loss_and_gradients_of_diffusion_dpo(
    base: Path, family: Family, checkpointing: bool
) -> None:
    transformer, network = with_lora(family)
    if checkpointing:
        recompute_all(transformer, family)
    batch, beta = pairs_of(), 30.0
    settings = PairsConfig(train_on="preferences", dpo_beta=beta)
    step = PreferenceStep(family, FLOW, SEED, network=network, pairs=settings)
    loss, values = step.loss(transformer, batch, STEP)
    loss.backward()

    plain, rows = Plain(base, network, batch), range(4)
    errors = (plain.velocity(batch.text, rows) - plain.target).square().mean(dim=(1, 2, 3))
    base_errors = (plain.velocity(batch.text, rows, 0.0) - plain.target).square().mean(dim=(1, 2, 3))
    chosen, rejected = (errors - base_errors).view(-1, 2).unbind(1)
    inside = -beta / 2 * (chosen - rejected)  # equation 14
    expected = -F.logsigmoid(inside).mean()
    expected.backward()

    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=0)
    assert_gradients(network, plain)
    torch.testing.assert_close(values[:, -2].double(), inside.detach(), rtol=1e-3, atol=1e-4)
    assert values[:, -1].tolist() == (inside > 0).double().tolist()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["images", "prompts"])
def test_a_slider_has_the_loss_and_gradients_of_concept_sliders(
    base: Path, family: Family, kind: str, checkpointing: bool
) -> None:
    transformer, network = with_lora(family)
    if checkpointing:
        recompute_all(transformer, family)
    batch, eta = pairs_of() if kind == "images" else directions_of(), 1.5
    named = ["a --p b --n c"] if kind == "prompts" else None
    settings = PairsConfig(train_on="slider", slider_prompts=named, **({"slider_guidance": eta} if named else {}))
    step = SliderStep(family, FLOW, SEED, network=network, pairs=settings)
    loss, _ = step.loss(transformer, batch, STEP)
    loss.backward()

    plain, errors = Plain(base, network, batch), []
    if kind == "images":
        for rows, strength in (((0, 2), 1.0), ((1, 3), -1.0)):
            errors.append(plain.velocity(batch.text, rows, strength) - plain.target[list(rows)])
    else:
        neutral, positive, negative = (plain.velocity(batch.text, (first, first + 3), 0.0) for first in range(3))
        for strength in (1.0, -1.0):
            target = neutral + strength * eta * (positive - negative)
            errors.append(plain.velocity(batch.text, (0, 3), strength) - target)
    expected = torch.stack(errors).square().mean()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=0)
    assert_gradients(network, plain)

    with torch.no_grad():
        held_out = step.validated(transformer.eval(), batch, [0.3])  # the step's strengths hold no longer
        network.set_row_strengths(None)
        assert torch.equal(held_out, step.validated(transformer, batch, [0.3]))
    assert held_out.shape == (1, 2, 1)


def directions_of(count: int = 2) -> Batch:
    """Samples with the texts of a target, a positive and a negative prompt."""
    inputs = tiny_flux_inputs(batch=3 * count)
    text = {k: inputs[k] for k in ("prompt_embeds", "pooled_prompt_embeds")}
    ids = [5 + row // 3 for row in range(3 * count)]
    return Batch(inputs["latents"][::3].repeat_interleave(3, dim=0), text, torch.ones(3 * count), None, ids, views=3)


@pytest.mark.parametrize("kind", ["images", "prompts"])
def test_a_slider_turned_round_is_the_same_slider_at_the_other_strength(family: Family, kind: str) -> None:
    transformer, network = with_lora(family)
    batch = pairs_of() if kind == "images" else directions_of()
    order = [1, 0, 3, 2] if kind == "images" else [0, 2, 1, 3, 5, 4]
    settings = PairsConfig(train_on="slider", slider_prompts=["a --p b --n c"] if kind == "prompts" else None)
    step = SliderStep(family, FLOW, SEED, network=network, pairs=settings)
    one = step.loss(transformer, batch, STEP)[0]
    turned = step.loss(transformer, batch.rows(order), STEP)[0]
    assert (one - turned).abs() > 1e-5 * one
    for layer in network.modules.values():
        layer.lora_B.weight.data.neg_()
    torch.testing.assert_close(step.loss(transformer, batch.rows(order), STEP)[0], one, rtol=1e-5, atol=0)


def recompute_all(transformer: torch.nn.Module, family: Family) -> None:
    """Recompute every block in backward, as runs do."""
    blocks = family.blocks(transformer)
    training = TrainingConfig(gradient_checkpointing=True)
    recompute_blocks(transformer, len(blocks), training, torch.device("cpu"), {}, family.chained_args)


def test_a_pair_the_other_way_round_has_the_margin_negated_and_a_fresh_lora_prefers_none(family: Family) -> None:
    transformer, network = with_lora(family)
    mask = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    step = PreferenceStep(family, FLOW.model_copy(update={"masked_loss": True}), SEED, network=network)
    margin = len(PreferenceStep.more_metrics) - 1
    batch = pairs_of(masks=mask)
    one, other = (step.loss(transformer, each, STEP)[1] for each in (batch, swapped(batch)))
    assert one[:, margin].abs().min() > 1e-3
    torch.testing.assert_close(one[:, margin], -other[:, margin], rtol=1e-4, atol=1e-5)
    for layer in network.modules.values():
        layer.lora_B.weight.data.zero_()
    loss, values = step.loss(transformer, pairs_of(), STEP)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-7)
    assert not values[:, margin - 2 : margin + 1].any()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if "_edit" in kind else ()) for kind in LEARNERS]
)
def test_every_family_has_each_sample_of_a_batch_at_its_own_strength(kind: str, tmp_path: Path) -> None:
    learner = LEARNERS[kind]
    settings = ModelConfig(model_type=kind, pretrained_model_name_or_path=str(learner.write(tmp_path / "base")))
    family, targets = model_family(settings), lora_targets()[kind]
    transformer = family.load_transformer(torch.float32).train()
    shared = kind.startswith("qwen_image_21")  # its modulation of texts is one for all samples
    config = NetworkConfig(network_dim=4, network_args=list(() if shared else learner.arguments))
    network = fill_up(inject_adapter(transformer, parse_network_args(config, targets), targets, seed=0))
    inputs = learner.inputs()
    text = {
        name: inputs[name].repeat(2, *[1] * (inputs[name].ndim - 1)) for name in inputs if name.startswith("prompt")
    }
    text.setdefault("prompt_embeds_mask", torch.ones(text["prompt_embeds"].shape[:2], dtype=torch.bool))
    latents = torch.cat([inputs["latents"], inputs["latents"].flip(-2)])
    conditions = Conditions(references=(latents.flip(-1),) if "edit" in kind else ())
    step, sigmas = SliderStep(family, FlowConfig(), SEED, network=network), torch.tensor([0.3, 0.7])

    def velocity() -> Tensor:
        return step._velocity(transformer, latents, sigmas, text, conditions).detach()

    network.set_row_strengths(torch.tensor([1.0, -1.0]))
    together = velocity()
    network.set_row_strengths(None)
    first = velocity()
    with network.at_strength(-1.0):
        second = velocity()
    close = {"rtol": 1e-3, "atol": 1e-4 * float(first.abs().max())}
    torch.testing.assert_close(together, torch.stack([first[0], second[1]]), **close)
    assert (first - second).abs().max() > 20 * close["atol"]


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Eight pairs, of which two are held out; the other image of each is paler."""
    text = "batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1"
    dataset = write_dataset(tmp_path / "data", text=text, paired_directory='"others"')
    (tmp_path / "data/others").mkdir()
    for path in (tmp_path / "data/images").glob("*.png"):
        image = Image.open(path)
        Image.blend(image, Image.new("RGB", image.size, "white"), 0.7).save(tmp_path / "data/others" / path.name)
    return dataset


def sliding(dataset: Path, kind: str, **more: object) -> dict[str, Any]:
    if kind == "prompts":
        dataset.write_text(dataset.read_text().replace('paired_directory = "others"', ""))
        (file := dataset.with_name("slider.txt")).write_text(
            "a disc --p a red disc --n a blue disc\n--p plain --n spots"
        )
        more |= {"slider_prompts": file}
    return {"dataset": dataset, "train_on": "slider", "validate_every_n_steps": 2} | more


def preferring(dataset: Path, **more: object) -> dict[str, Any]:
    return {"dataset": dataset, "train_on": "preferences", "dpo_beta": 1000, "validate_every_n_steps": 2} | more


def test_runs_learn_to_prefer_go_on_where_they_stopped_and_keep_regularisation_images(
    base: Path, pairs: Path, tmp_path: Path
) -> None:
    regular = tmp_path / "regular"
    regular.mkdir()
    for path in (tmp_path / "data/images").iterdir():
        (regular / path.name).write_bytes(path.read_bytes())
    pairs.write_text(pairs.read_text() + f'[[datasets.subsets]]\nimage_dir = "{regular}"\nis_reg = true\n')
    often = {"save_every_n_steps": 8, "save_state": True, "max_train_steps": 12, "learning_rate": 5e-3}
    settings = (
        preferring(pairs, preserve="prior", general_prompts="none", preserve_share=0.2, preserve_directions=0) | often
    )
    run(base, output=tmp_path / "one", **settings)
    run(base, output=tmp_path / "two", **settings, resume=tmp_path / "one/lora-step00000008-state")
    assert same(lora(tmp_path / "one"), lora(tmp_path / "two"))
    held = [line for line in metrics(tmp_path / "one") if "val_loss" in line]
    assert held[0]["val_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert held[-1]["val_loss"] < 0.6 < held[-1]["val_rewards/accuracies"], held[-1]
    steps = [line for line in metrics(tmp_path / "one") if "loss" in line]
    assert {name for line in steps for name in line} >= {*REWARDS}
    assert any("rewards/margins" not in line for line in steps), "regularisation images have no rewards"


@pytest.mark.parametrize("kind", ["images", "prompts"])
def test_sliders_are_sampled_at_strengths_held_out_resumed_and_learn_what_differs(
    base: Path, pairs: Path, tmp_path: Path, kind: str
) -> None:
    (prompts := tmp_path / "prompts.txt").write_text("a disc --w 64 --h 64 --s 2")
    settings = sliding(pairs, kind) | {"max_train_steps": 12, "save_every_n_steps": 8, "save_state": True}
    settings |= {"learning_rate": 3e-3, "sample_prompts": prompts, "validate_every_n_steps": 6}
    task = run(base, output=tmp_path / "one", **settings).task
    run(base, output=tmp_path / "two", **settings, resume=tmp_path / "one/lora-step00000008-state")
    assert same(lora(tmp_path / "one"), lora(tmp_path / "two"))
    held = [line["val_loss"] for line in metrics(tmp_path / "one") if "val_loss" in line]
    assert held[-1] < held[0]
    samples = tmp_path / "one/samples"
    shown = samples_of(tmp_path / "one")
    assert [text for _, text, _ in shown] == [f"a disc, strength {each:g}" if each != 1 else "a disc" for each in SHOWN]
    assert (samples / "strengths.png").exists()
    with task.network.bypassed():
        plain = task.sampler._generate(task.transformer, 3)  # strength 1
    images = [ImageChops.difference(plain, Image.open(samples / f"step000012_{i:02d}.png")) for i in range(5)]
    assert images[2].getbbox() is None
    assert all(images[i].getbbox() for i in (0, 1, 3, 4))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with enough blocks to swap."""
    return tiny_flux_pipeline(tmp_path_factory.mktemp("deep") / "base", double_blocks=4, single_blocks=4)


@pytest.mark.parametrize("kind", ["preferences", "images", "prompts"])
def test_swapped_and_recomputed_blocks_change_nothing(deep: Path, pairs: Path, tmp_path: Path, kind: str) -> None:
    settings = (preferring(pairs) if kind == "preferences" else sliding(pairs, kind)) | {"max_train_steps": 2}
    pairs.write_text(pairs.read_text().replace("validation_split = 0.25\nvalidation_seed = 1", ""))
    settings["validate_every_n_steps"] = None
    run(deep, output=tmp_path / "plain", **settings)
    run(deep, output=tmp_path / "saving", **settings, gradient_checkpointing=True, blocks_to_swap=2)
    assert largest_difference(lora(tmp_path / "saving"), lora(tmp_path / "plain")) < 2e-4  # see test_flux_runs.py


def test_a_slider_of_images_learns_their_difference_and_leaves_what_they_share(
    base: Path, pairs: Path, tmp_path: Path
) -> None:
    """Of pairs of the same image nothing is learnt to first order: both strengths pull a LoRA in opposite ways."""
    run(base, output=tmp_path / "one", **sliding(pairs, "images", max_train_steps=1))
    for path in (tmp_path / "data/images").glob("*.png"):
        (tmp_path / "data/others" / path.name).write_bytes(path.read_bytes())
    run(base, output=tmp_path / "two", **sliding(pairs, "images", max_train_steps=1))
    differing, same_images = (
        next(line["grad_norm"] for line in metrics(tmp_path / name) if "loss" in line) for name in ("one", "two")
    )
    assert same_images < 1e-4 * differing


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a person --p an old person", "has not one --p and one --n; write"),
        ("a person --p x --n x", "positive and negative are the same prompt"),
        ("a person --p an old person --n a child --g 3.5", "--g is no part of a direction; remove it"),
        ('[{"target": "a", "positive": "b"}]', "entry 1: has no texts target, positive and negative"),
        ('[{"target": "a", "positive": "b", "unconditional": "c", "action": "erase"}]', "'action' is not taken"),
        ("[]", "holds no list of directions"),
        (None, "is not a file; name one, or write"),
    ],
)
def test_what_is_no_direction_is_named_with_the_remedy(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / ("slider.json" if text and text[0] == "[" else "slider.txt")
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"^slider_prompts: {re.escape(str(path))}.*{said}"):
        read_directions(str(path))


def test_the_line_of_a_file_and_the_text_of_a_flag_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("# ages\n\na person --p old --n young\na person --p old\n")
    with pytest.raises(UserError, match=r"^slider_prompts: .*a\.txt, line 4: has not one --p and one --n"):
        read_directions(str(tmp_path / "a.txt"))
    for given, named in (("a --p x", "prompt 1, 'a --p x'"), (["--p x --n y", "a"], "prompt 2, 'a'")):
        with pytest.raises(UserError, match=f"^slider_prompts: {named}: has not one --p and one --n"):
            read_directions(given)


def test_pairs_of_the_same_file_and_images_without_a_partner_are_named(tmp_path: Path) -> None:
    for folder, names in (("more", "abc"), ("less", "abcdef")):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            shade = 40 * number + 90 * (folder == "less" and name == "c")
            Image.new("RGB", (64, 64), (shade, 0, 0)).save(tmp_path / folder / f"{name}.png")
    table = f"image_dir = '{tmp_path}/more'\npaired_directory = '{tmp_path}/less'\nclass_tokens = 'a'\n"
    (tmp_path / "d.toml").write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\n{table}")
    config = load_dataset_config(tmp_path / "d.toml", DatasetArguments(dataset_config="d"))
    said = "\n".join(scan(config, 0, 16).warnings)
    assert "both of a pair are the same file, which teaches nothing: 2 of 3 images (a.png, b.png)" in said
    assert f"3 images in {tmp_path}/less belong to no image, left out (d.png, e.png, f.png)" in said


def test_directions_are_read_from_lines_text_json_and_toml_alike(tmp_path: Path) -> None:
    expected = (Direction("a person", "an old person", "a young person"), Direction("", "big", "small"))
    lines = ["a person --p an old person --n a young person", "--n small --p big"]
    (tmp_path / "a.txt").write_text("# ages\n" + "\n".join(lines) + "\n\n")
    entries = [dict(zip(("target", "positive", "unconditional"), each, strict=True)) for each in expected]
    (tmp_path / "a.json").write_text(json.dumps([entries[0], lines[1]]))
    tables = [
        f'[[prompts]]\ntarget = "{t}"\npositive = "{p}"\nnegative = "{n}"\n' for t, p, n in (each for each in expected)
    ]
    (tmp_path / "a.toml").write_text("".join(tables))
    assert [read_directions(str(path)) for path in sorted(tmp_path.iterdir())] == [expected] * 3
    assert read_directions(lines) == expected


@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"shard": 2}, marks=pytest.mark.slow), pytest.param({"tp": 2}, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "kind", ["preferences", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("images", "prompts"))]
)
def test_two_processes_equal_one(base: Path, pairs: Path, tmp_path: Path, layout: dict[str, int], kind: str) -> None:
    settings = (
        preferring(pairs, max_train_steps=3) if kind == "preferences" else sliding(pairs, kind, max_train_steps=3)
    )
    dataset = settings.pop("dataset")
    alone = {} if "tp" in layout else {"gradient_accumulation_steps": 2}
    run(base, dataset, tmp_path / "one", **settings, **alone)
    job = ("two", train_flags, (arguments(base, dataset, tmp_path / "two", **settings, **layout),))
    assert run_in_group([job], tmp_path) == {"two": ""}
    keys = ("loss", "val_loss", "grad_norm")
    assert_same_metrics(metrics(tmp_path / "one"), metrics(tmp_path / "two"), keys, rel=2e-3)


SLIDER = {"train_on": "slider", "dpo_beta": 2000}


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        ("missing", {}, "no image in paired_directory .*others for 1 of 8 images \\(3.png\\); add the other image"),
        ("shape", {}, "others/3.png: paired image of 64x32 for an image of 64x64"),
        ("itself", {}, "paired_directory is image_dir itself"),
        ("none", {}, 'no paired_directory, and train_on = "preferences" learns from pairs'),
        ("", {"train_on": "images", "dpo_beta": 2000}, "paired_directory: has no effect without train_on"),
        ("", {"loss_type": "l1"}, "train_on: preferences are told by the squared error, not l1"),
        ("", {"pp": 2}, "train_on: asks the model twice in a step"),
        ("", {**SLIDER, "network_type": "lokr"}, "train_on: a slider has strengths below 0, which lokr has not"),
        ("", {**SLIDER, "text_encoder_lr": [1e-4]}, "train_on: a slider's prompts are encoded once"),
        ("", {**SLIDER, "slider_prompts": "a --p b --n c"}, "paired_directory: has no effect without"),
        ("", {"distill_from": "x", "network_weights": "y"}, "train_on: a teacher's answers take the place"),
        ("", {"preserve": "prior", "preserve_blank": True}, "preserve_blank: a pair is not seen with another caption"),
    ],
)
def test_what_is_no_pair_or_does_not_go_with_them_is_named(
    base: Path, pairs: Path, tmp_path: Path, change: str, settings: dict[str, Any], said: str
) -> None:
    other = tmp_path / "data/others/3.png"
    if change == "missing":
        other.unlink()
    elif change == "shape":
        Image.open(other).crop((0, 0, 64, 32)).save(other)
    elif change:
        with_it, line = pairs.read_text(), 'paired_directory = "others"'
        pairs.write_text(with_it.replace(line, line.replace("others", "images") if change == "itself" else ""))
    with pytest.raises(UserError, match=said):
        run(base, output=tmp_path / "out", **preferring(pairs) | settings)
