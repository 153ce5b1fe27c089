"""A LoRA on an fp8 base that learns what the bf16 model with its LoRA answers."""

from __future__ import annotations

import shutil
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import library.training.tasks.distillation as distillation
import tools.quantize_model as quantize_model
from library.config.schema import FlowConfig, ModelConfig
from library.data.batches import Batch, Item
from library.errors import UserError
from library.models.family_by_name import model_family
from library.training.flow import add_noise, noise_for, sample_sigmas
from networks.files.adapters import load_lora
from networks.files.weights import LokrWeights, LoraWeights
from networks.files.writing import save_adapter
from networks.network import attach_lora
from tests.runs import call, largest_difference, lora, pipeline_forward, run, write_dataset
from tests.targets import FLUX_TARGETS

Settings = dict[str, object]
FP8: Settings = {"fp8_scaled": True, "fp8_granularity": "tensor", "fp8_exclude": []}


@pytest.fixture(scope="module")
def liked(base: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA trained in high precision, strong enough to be seen."""
    folder = tmp_path_factory.mktemp("liked")
    run(base, dataset, folder, learning_rate=2e-2, network_alpha=4, max_train_steps=6)
    return folder / "lora.safetensors"


def taught(base: Path, liked: Path) -> Settings:
    return FP8 | {"distill_from": base, "network_weights": liked, "network_alpha": 4}


def test_the_answers_are_the_bf16_models_at_the_runs_own_noise(
    base: Path, dataset: Path, liked: Path, tmp_path: Path
) -> None:
    settings = taught(base, liked) | {"max_train_steps": 2, "gradient_accumulation_steps": 2}
    events = run(base, dataset, tmp_path, **settings)
    answers = sorted((tmp_path / "teacher").rglob("*.safetensors"))
    family = model_family(ModelConfig(pretrained_model_name_or_path=str(base)))
    teacher = family.load_transformer(torch.float32)
    attach_lora(teacher, load_lora(liked, FLUX_TARGETS).weights, FLUX_TARGETS, "liked")
    batches = events.task.batches
    plan = []
    for epoch in range(2):  # of two batches each
        batches.set_position(epoch)
        plan += list(batches)
    assert len(answers) == sum(map(len, plan[:4]))
    for step in range(2):
        for index in (index for items in plan[2 * step : 2 * step + 2] for index in items):
            item = events.task.loader.loader.dataset[index]
            sample = [item.sample_id]
            latents = item.latents[None]
            flow = FlowConfig(timestep_sampling="flux_shift")
            sigmas = sample_sigmas(flow, sample, latents.shape[-1] * latents.shape[-2] // 4, 3, step)
            noisy, _ = add_noise(latents, noise_for(latents, sample, 3, step), sigmas)
            text = {name: tensor[None] for name, tensor in item.text.items()}
            with torch.no_grad():
                expected = pipeline_forward(teacher, noisy, sigmas, text)[0]
            (answer,) = (tmp_path / "teacher").rglob(f"*-{step:08d}-{item.key}")
            found = load_file(answer)
            torch.testing.assert_close(found["velocity"], expected, rtol=1e-4, atol=1e-5)


def test_on_a_distilled_model_the_answers_are_its_own_with_the_loras_effect_on_the_teacher(
    base: Path, dataset: Path, liked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts come from runs of their own: the teacher with the LoRA, both models with one that changes nothing.

    All see the noise levels of the distilled model's steps, which those with ``distill_effect`` choose by themselves;
    the teacher takes each step as a whole.
    """
    monkeypatch.setattr(distillation, "STEP_PARTS", 1)
    turbo = tmp_path / "turbo"
    shutil.copytree(base, turbo)
    file = turbo / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["proj_out.weight"] = weights["proj_out.weight"] / 2
    save_file(weights, file, {"format": "pt"})
    none = tmp_path / "none.safetensors"
    zeroed = {n: LoraWeights(w.down, 0 * w.up, w.alpha) for n, w in load_lora(liked, FLUX_TARGETS).weights.items()}
    save_adapter(none, zeroed, FLUX_TARGETS)
    one, kronecker = torch.ones(1, 1), tmp_path / "lokr.safetensors"  # 1 (x) B A is the same update
    liked_weights = load_lora(liked, FLUX_TARGETS).weights
    factors = {n: {"lokr_w1": one, "lokr_w2_a": w.up, "lokr_w2_b": w.down} for n, w in liked_weights.items()}
    lokrs = {name: LokrWeights(each, liked_weights[name].alpha) for name, each in factors.items()}
    save_adapter(kronecker, lokrs, FLUX_TARGETS, "comfy")

    def answers(name: str, teacher: Path, lora_file: Path, **more: object) -> list[torch.Tensor]:
        settings = {"network_weights": liked, "network_alpha": 4, "distill_from": teacher, "distill_lora": lora_file}
        settings |= {} if more else {"timestep_sampling": "steps"}
        run(turbo, dataset, tmp_path / name, **settings, max_train_steps=1, **more)
        assert len([*(tmp_path / name / "teacher").iterdir()]) == 1  # nothing in between is left
        return [load_file(path)["velocity"] for path in sorted((tmp_path / name / "teacher").rglob("*.safetensors"))]

    found = answers("effect", base, liked, distill_effect=True)
    torch.testing.assert_close(answers("lokr", base, kronecker, distill_effect=True), found, rtol=1e-4, atol=1e-5)
    parts = answers("with", base, liked), answers("without", base, none), answers("own", turbo, none)
    for effect, taught_with, without, own in zip(found, *parts, strict=True):
        assert (taught_with - without).norm() > 0.01 * own.norm()
        torch.testing.assert_close(effect, own + taught_with - without, rtol=1e-4, atol=1e-5)


def test_what_is_learnt_is_the_mixture_of_data_and_teacher(
    base: Path, dataset: Path, liked: Path, tmp_path: Path
) -> None:
    """On the teacher's own base and LoRA its answers are right already: alone they leave nothing to learn."""
    start = {"network_weights": liked, "network_alpha": 4, "distill_from": base, "max_train_steps": 1}
    sgd: Settings = {"optimizer_type": "torch.optim.SGD", "learning_rate": 1.0, "max_grad_norm": 0.0}
    before = load_file(liked)
    moved = {}
    for weight in (1.0, 0.5, 0.25):
        with pytest.raises(UserError, match="as it was before") if weight == 1 else nullcontext():
            run(base, dataset, tmp_path / f"{weight}", **start, **sgd, distill_weight=weight)
        after = lora(tmp_path / f"{weight}")
        moved[weight] = torch.cat([(after[name] - before[name]).flatten() for name in before])
    data = {key: value for key, value in start.items() if key != "distill_from"}
    run(base, dataset, tmp_path / "data", **data, **sgd)
    from_data = torch.cat([(lora(tmp_path / "data")[name] - before[name]).flatten() for name in before])
    size = from_data.abs().max()
    # The gradient of the mixture is the mixture of the gradients; the teacher's is zero here. fp32 noise of the two.
    assert moved[1.0].abs().max() < 1e-4 * size
    for weight in (0.5, 0.25):
        torch.testing.assert_close(moved[weight], (1 - weight) * from_data, rtol=1e-3, atol=float(1e-4 * size))


def test_a_second_run_and_a_resumed_one_find_the_answers(
    base: Path, dataset: Path, liked: Path, tmp_path: Path
) -> None:
    settings = taught(base, liked) | {"max_train_steps": 4, "distill_cache": tmp_path / "answers"}
    run(base, dataset, tmp_path / "straight", **settings)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "answers").rglob("*.safetensors")}
    assert len({path.parent.name for path in times}) == 4
    run(base, dataset, tmp_path / "parts", **settings, save_every_n_steps=2, save_state=True)
    (tmp_path / "parts" / "lora.safetensors").unlink()
    run(base, dataset, tmp_path / "parts", **settings, resume=tmp_path / "parts" / "lora-step00000002-state")
    assert largest_difference(lora(tmp_path / "parts"), lora(tmp_path / "straight")) == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_answers_are_those_to_what_is_trained_whatever_changes_and_damaged_ones_are_made_again(
    base: Path, liked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that finds the answers of others learns what one without any finds for itself."""
    text = "batch_size = 2\nflip_aug = true\nrandom_crop = true\nshuffle_caption = true"
    data = write_dataset(tmp_path / "data", images=4, size=(96, 64), text=text)
    settings = taught(base, liked) | {"max_train_steps": 4}
    shared: Settings = {"distill_cache": tmp_path / "shared"}

    def assert_learns_the_same(name: str, own: str = "", **more: object) -> set[Path]:
        """``own``: an earlier run of the same settings without the others' answers."""
        for kind, cache in (("shared", shared), ("own", {})):
            if kind == "shared" or not own:
                run(base, data, tmp_path / name / kind, **settings | cache | more)
        assert largest_difference(lora(tmp_path / name / "shared"), lora(tmp_path / (own or name) / "own")) == 0, name
        return {*(tmp_path / "shared").rglob("*.safetensors")}

    first = assert_learns_the_same("first", save_every_n_steps=3, save_state=True)
    assert len(first) == 8, "two samples in each step"
    state = tmp_path / "first/own/lora-step00000003-state"
    data.write_text(data.read_text().replace("batch_size = 2", "batch_size = 1"))
    assert assert_learns_the_same("batches of one") > first
    # the third step ended in another epoch than with batches of one from the start
    assert_learns_the_same("resumed", resume=state)
    assert_learns_the_same("rate", learning_rate=2e-3)
    data.write_text(data.read_text().replace("batch_size = 1", "batch_size = 2"))
    assert_learns_the_same("precision", mixed_precision="bf16")
    assert_learns_the_same("base's dtype", mixed_precision="bf16", base_dtype="fp32")
    (caption, *_) = sorted((tmp_path / "data/images").glob("*.txt"))
    usual = caption.read_text()
    caption.write_text("a disc, red, large")
    before = {*(tmp_path / "shared").rglob("*.safetensors")}
    assert 0 < len(assert_learns_the_same("caption") - before) < 8, "the other samples' are found"
    capsys.readouterr()
    caption.write_text(usual)
    for path, cut in zip(sorted(first)[:2], (b"", b"x"), strict=True):
        path.write_bytes(path.read_bytes()[:-1] + cut)
    assert_learns_the_same("damaged", own="first")
    assert "2 damaged files made again" in " ".join(capsys.readouterr().out.split())
    (mine,) = {path.parents[1] for path in first}
    for other in [folder for folder in mine.parent.iterdir() if folder != mine]:
        shutil.copytree(other, mine, dirs_exist_ok=True)
    assert_learns_the_same("another teacher's in the folder", own="first")
    for path, other in zip(sorted(first), [*sorted(first)[2:], *sorted(first)[:2]], strict=True):
        shutil.copy(other, path)
    assert_learns_the_same("another step's", own="first")


def test_one_batch_is_in_memory_at_a_time_and_none_is_read_where_velocities_are_cached(
    base: Path, dataset: Path, liked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, most, collate = list[weakref.ref[Batch]](), list[int](), distillation.collate

    def counted(items: list[Item]) -> Batch:
        batch = collate(items)
        read.append(weakref.ref(batch))
        most.append(sum(one() is not None for one in read))
        return batch

    monkeypatch.setattr(distillation, "collate", counted)
    settings = taught(base, liked) | {"max_train_steps": 4, "distill_cache": tmp_path / "velocities"}
    for _ in range(2):
        run(base, dataset, tmp_path / "out", **settings)
    assert len(read) == 4  # in the first run
    assert max(most) <= 2  # the one that is made, and the one before


def test_a_lora_of_mixed_ranks_is_trained_as_its_file_has_it(base: Path, dataset: Path, tmp_path: Path) -> None:
    width = 64
    ranks = {"transformer_blocks.0.attn.to_q": (7, 3.5), "transformer_blocks.0.attn.to_k": (2, 2.0)}
    random = torch.Generator().manual_seed(0)
    weights = {
        name: LoraWeights(torch.randn(rank, width, generator=random), torch.zeros(width, rank), alpha)
        for name, (rank, alpha) in ranks.items()
    }
    mixed = tmp_path / "mixed.safetensors"
    save_adapter(mixed, weights, FLUX_TARGETS)
    run(base, dataset, tmp_path / "out", network_weights=mixed, dim_from_weights=True, network_dim=None)
    trained = load_lora(tmp_path / "out" / "lora.safetensors", FLUX_TARGETS).weights
    assert {name: w.rank for name, w in trained.items()} == {name: rank for name, (rank, _) in ranks.items()}
    assert all(bool(w.up.any()) for w in trained.values())


def test_a_teacher_in_fp8_is_refused(base: Path, dataset: Path, liked: Path, tmp_path: Path) -> None:
    call(quantize_model, "--model", base, "--save_to", tmp_path / "fp8", "--layout", "plain")
    settings = taught(base, liked) | {"distill_from": tmp_path / "fp8"}
    with pytest.raises(UserError, match="is in fp8; give the bf16 model"):
        run(base, dataset, tmp_path, **settings)


def test_a_lora_that_changes_nothing_has_no_effect_to_learn(
    base: Path, dataset: Path, liked: Path, tmp_path: Path
) -> None:
    weights = load_lora(liked, FLUX_TARGETS).weights
    zeros = {name: LoraWeights(each.down, torch.zeros_like(each.up), each.alpha) for name, each in weights.items()}
    save_adapter(tmp_path / "zero.safetensors", zeros, FLUX_TARGETS)
    settings = {"distill_from": base, "distill_effect": True, "network_weights": tmp_path / "zero.safetensors"}
    with pytest.raises(UserError, match=r"zero.safetensors is zero and changes nothing, so it has no effect to learn"):
        run(base, dataset, tmp_path / "out", network_alpha=4, **settings)
