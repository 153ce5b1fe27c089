"""Whole runs on a tiny random model: what is equal must be equal, what is written readable; options of kohya's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from library.errors import UserError
from library.models.flux.spec import FluxFamily
from tests.runs import (
    arguments,
    largest_difference,
    lora,
    losses_of,
    metadata,
    metrics,
    run,
    same,
    start,
    velocity,
    write_base,
    write_dataset,
)

# Sums in another order: 64 tokens x a few hundred products in fp32, then four Adam steps. Adam divides by the
# gradient's own size, so a relative error of 1e-6 in a gradient stays a relative error of about 1e-6 in a step; entries
# of lora_B that are nearly zero take more.
SAME_IN_FP32 = 2e-4


def test_a_run_leaves_lora_metrics_plots_samples_and_its_settings(base: Path, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a disc --s 2\nno disc --w 96 --h 64 --s 2 --l 2 --n disc\n")
    out = tmp_path / "out"
    sampling = {"sample_prompts": prompts, "sample_at_first": True, "sample_every_n_steps": 2}
    events = run(base, dataset, out, curves=True, **sampling, save_every_n_steps=2, save_every_n_epochs=1)
    steps = [line for line in metrics(out) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    expected = {"step", "epoch", "loss", "loss_ema", "lr/lora", "grad_norm", "sigma_mean", "s_per_it", "data_wait_s"}
    assert expected | {"peak_mem_bytes", "samples_per_s"} <= steps[0].keys()
    validations = [line for line in metrics(out) if "val_loss" in line]
    assert [line["step"] for line in validations] == [0, 2, 3, 4]  # at the start, and with each save
    assert events.val_loss == validations[-1]["val_loss"]
    for name in (
        "lora.safetensors",
        "lora-step00000002.safetensors",
        "lora-000001.safetensors",
        "lr.png",
        "lr.svg",
    ):
        assert (out / name).stat().st_size > 0, name
    for number, size in enumerate([(64, 64), (96, 64)]):  # the dataset's where the prompt names none
        with Image.open(out / "samples" / f"step000004_{number:02}.png") as image:
            assert image.size == size
    assert (out / "samples" / "before_after.png").exists()
    with Image.open(out / "samples" / "over_time.png") as sheet:
        assert sheet.width > 3 * 96  # a column for each of steps 0, 2 and 4
    again = run(base, dataset, tmp_path / "again", config_file=out / "config.toml", output_dir=tmp_path / "again")
    assert events.task.total_steps == again.task.total_steps
    assert same(lora(out), lora(tmp_path / "again"))


@pytest.mark.parametrize("save_format", ["diffusers", "kohya", "comfy"])
def test_every_save_format_gives_diffusers_the_output_of_the_running_network(
    base: Path, dataset: Path, tmp_path: Path, save_format: str
) -> None:
    settings = {"network_alpha": 3, "learning_rate": 1e-2, "save_format": save_format}
    ranks = "single_dim=6" if save_format == "diffusers" else "single_dim=0"
    events = run(base, dataset, tmp_path, **settings, network_args=[ranks])
    pipeline = FluxPipeline.from_pretrained(base)
    ours, plain = velocity(events.task.transformer.eval()), velocity(pipeline.transformer)
    pipeline.load_lora_weights(tmp_path / "lora.safetensors")
    assert (ours - plain).abs().max() > 1e-2  # the LoRA does something
    torch.testing.assert_close(ours, velocity(pipeline.transformer), atol=1e-4, rtol=1e-4)


def test_the_same_settings_give_the_same_lora_whatever_the_number_of_workers(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    run(base, dataset, tmp_path / "a")
    run(base, dataset, tmp_path / "b", max_data_loader_n_workers=2)
    assert same(lora(tmp_path / "a"), lora(tmp_path / "b"))
    run(base, dataset, tmp_path / "c", seed=4)
    assert largest_difference(lora(tmp_path / "a"), lora(tmp_path / "c")) > 0.01


def test_accumulation_over_four_equals_a_batch_of_four(base: Path, dataset: Path, tmp_path: Path) -> None:
    one_by_one = write_dataset(tmp_path / "data", text="batch_size = 1")
    run(base, dataset, tmp_path / "batch")
    run(base, one_by_one, tmp_path / "accumulated", gradient_accumulation_steps=4)
    assert largest_difference(lora(tmp_path / "accumulated"), lora(tmp_path / "batch")) < SAME_IN_FP32
    assert losses_of(tmp_path / "batch") == pytest.approx(losses_of(tmp_path / "accumulated"), rel=1e-5)


def test_epochs_win_over_steps_and_buckets_survive_them(base: Path, tmp_path: Path) -> None:
    data = write_dataset(
        tmp_path / "data",
        images=5,
        text="batch_size = 2\nenable_bucket = true\nbucket_reso_steps = 16\nmin_bucket_reso = 32",
    )
    write_dataset(tmp_path / "wide", images=3, size=(128, 64))
    data.write_text(data.read_text() + f'[[datasets.subsets]]\nimage_dir = "{tmp_path / "wide" / "images"}"\n')
    events = run(base, data, tmp_path / "out", max_train_epochs=2)
    assert events.task.total_steps == 2 * (3 + 2)
    assert metrics(tmp_path / "out")[-1]["epoch"] == 1


def test_a_finished_run_has_nothing_to_resume(base: Path, dataset: Path, tmp_path: Path) -> None:
    run(base, dataset, tmp_path, save_state_on_train_end=True)
    with pytest.raises(UserError, match=r"lora-state is at step 4 and the run ends at 4; raise max_train_steps"):
        run(base, dataset, tmp_path, resume=tmp_path / "lora-state")
    run(base, dataset, tmp_path, resume=tmp_path / "lora-state", max_train_steps=6)
    assert metrics(tmp_path)[-1]["step"] == 6


def test_a_resumed_run_may_not_change_what_its_state_brings_along(base: Path, dataset: Path, tmp_path: Path) -> None:
    run(base, dataset, tmp_path, save_state=True)
    resumed = {"resume": tmp_path / "lora-state", "max_train_steps": 6}
    for changed in ({"optimizer_type": "Lion"}, {"network_alpha": 2.0}, {"ema_decay": 0.9}):
        with pytest.raises(UserError, match=f"was trained with {next(iter(changed))} = "):
            run(base, dataset, tmp_path, **resumed, **changed)
    run(base, dataset, tmp_path, **resumed, lr_scheduler="cosine")  # a schedule is taken up at the next step


# aot_eager: the whole of the compiler but its code generator, which takes minutes on two cores; a block by itself is
# compiled so in tests/networks/adapters/test_lora.py
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_regional_compilation_trains_the_same_lora(base: Path, dataset: Path, tmp_path: Path, backend: str) -> None:
    run(base, dataset, tmp_path / "plain", max_train_steps=2)
    run(base, dataset, tmp_path / "compiled", max_train_steps=2, torch_compile=True, dynamo_backend=backend)
    assert largest_difference(lora(tmp_path / "compiled"), lora(tmp_path / "plain")) < SAME_IN_FP32


def test_the_tracker_gets_themetrics(base: Path, dataset: Path, tmp_path: Path) -> None:
    run(base, dataset, tmp_path, log_with="tensorboard", max_train_steps=2)
    events = EventAccumulator(str(tmp_path / "logs" / "tandem")).Reload()
    assert [point.value for point in events.Scalars("loss")] == pytest.approx(losses_of(tmp_path))
    assert {"lr/lora", "grad_norm", "s_per_it"} <= set(events.Tags()["scalars"])


def test_training_goes_on_from_network_weights(base: Path, dataset: Path, tmp_path: Path) -> None:
    run(base, dataset, tmp_path / "first", learning_rate=1e-2)
    weights = tmp_path / "first" / "lora.safetensors"
    with pytest.raises(UserError, match="is as it was before the first step; .* the learning rate is 0"):
        run(base, dataset, tmp_path / "second", network_weights=weights, learning_rate=0.0)
    assert largest_difference(lora(tmp_path / "second"), lora(tmp_path / "first")) < 1e-6


def test_a_run_computes_with_the_attention_kernel_that_was_chosen(base: Path, dataset: Path, tmp_path: Path) -> None:
    done = run(base, dataset, tmp_path / "out", attention="math", max_train_steps=1)
    used = {m.processor.backend for m in done.task.transformer.modules() if hasattr(m, "processor")}
    assert used == {"math"}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("kohya_options")
    return write_base(folder / "base"), write_dataset(folder / "data", images=4)


def test_no_update_of_the_file_is_larger_than_scale_weight_norms(case: tuple[Path, Path], tmp_path: Path) -> None:
    limit = 0.05
    settings = {"network_alpha": 4, "learning_rate": 0.02}
    for name, more in (("free", {}), ("bound", {"scale_weight_norms": limit, "log_every_n_steps": 1})):
        run(*case, tmp_path / name, **settings | more)
    norms = {}
    for name in ("free", "bound"):
        weights = lora(tmp_path / name)
        downs = [key for key in weights if key.endswith("lora_A.weight")]
        pairs = [(weights[key.replace("lora_A", "lora_B")].double(), weights[key].double()) for key in downs]
        norms[name] = [(up @ down).norm().item() for up, down in pairs]  # alpha is the rank
    assert max(norms["free"]) > 2 * limit
    assert max(norms["bound"]) <= limit * (1 + 1e-5)
    last = metrics(tmp_path / "bound")[-1]
    assert last["max_norm/max_key_norm"] == pytest.approx(max(norms["bound"]), rel=1e-5)
    assert last["norm/avg_key_norm"] == pytest.approx(sum(norms["bound"]) / len(norms["bound"]), rel=1e-5)
    assert last["max_norm/keys_scaled"] > 0
    assert metadata(tmp_path / "bound")["ss_scale_weight_norms"] == str(limit)
    assert metadata(tmp_path / "free")["ss_scale_weight_norms"] == "None"


@pytest.fixture(scope="module")
def usual(case: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The LoRA of a run without an option."""
    run(*case, folder := tmp_path_factory.mktemp("usual"))
    return lora(folder)


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"loss_type": "l1"}, ("ss_loss_type", "l1")),
        ({"ip_noise_gamma": 0.5}, ("ss_ip_noise_gamma", "0.5")),
        (
            {"ip_noise_gamma": 0.5, "ip_noise_gamma_random_strength": True},
            ("ss_ip_noise_gamma_random_strength", "True"),
        ),
        ({"optimizer_type": "CAME"}, ("ss_optimizer", "pytorch_optimizer.optimizer.came.CAME")),
        ({"lr_scheduler": "inverse_sqrt", "lr_scheduler_timescale": 2}, ("ss_lr_scheduler", "inverse_sqrt")),
        ({"timestep_sampling": "logsnr", "logit_mean": 1.0}, ("ss_timestep_sampling", "logsnr")),
    ],
    ids=lambda value: "",
)
def test_an_option_changes_the_training_and_stands_in_the_file(
    case: tuple[Path, Path],
    usual: dict[str, torch.Tensor],
    tmp_path: Path,
    settings: dict[str, object],
    fact: tuple[str, str],
) -> None:
    run(*case, tmp_path, **settings)
    assert largest_difference(lora(tmp_path), usual) > 1e-3
    assert metadata(tmp_path)[fact[0]] == fact[1]


FIELDS = ["title", "author", "description", "license", "tags", "usage_hint", "trigger_phrase", "merged_from"]


def test_metadata_are_modelspecs_fields_and_no_metadata_leaves_the_run_out(
    case: tuple[Path, Path], tmp_path: Path
) -> None:
    given = {f"metadata_{field}": f"my {field}, Ä" for field in FIELDS}
    run(*case, tmp_path / "all", **given, training_comment="a comment", max_train_steps=1)
    found = metadata(tmp_path / "all")
    assert {field: found[f"modelspec.{field}"] for field in FIELDS} == {f: f"my {f}, Ä" for f in FIELDS}
    assert found["ss_output_name"] == "lora"
    assert found["ss_training_comment"] == "a comment"

    run(*case, tmp_path / "few", **given, training_comment="a comment", no_metadata=True, max_train_steps=1)
    few = metadata(tmp_path / "few")
    assert few["modelspec.author"] == "my author, Ä"
    # SS_METADATA_MINIMUM_KEYS of sd-scripts' train_util.py, of which network_args are unset here, and the name
    least = {"ss_v2", "ss_base_model_version", "ss_network_module", "ss_network_dim", "ss_network_alpha"}
    assert {key for key in few if key.startswith("ss_")} == least | {"ss_output_name"}
    assert "a comment" not in str(few)
    assert "tandem.config" not in few
    assert few["tandem.base_fingerprint"] == found["tandem.base_fingerprint"]
    assert torch.equal(*(next(iter(lora(tmp_path / name).values())) for name in ("all", "few")))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"mixed_precision": "bf16"}, torch.bfloat16),
        ({"mixed_precision": "bf16", "vae_dtype": "fp32"}, torch.float32),
        ({"network_module": "networks.lora_flux", "mixed_precision": "bf16", "no_half_vae": True}, torch.float32),
    ],
)
def test_the_vae_is_loaded_in_a_dtype_of_its_own(
    case: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    wanted: torch.dtype,
) -> None:
    """On a CPU it computes in fp32 in any case, so what is asked for is looked at."""
    asked, load = [], FluxFamily.load_image_encoder

    def noted(self: FluxFamily, dtype: torch.dtype, *rest: object) -> object:
        asked.append(dtype)
        return load(self, dtype, *rest)

    monkeypatch.setattr(FluxFamily, "load_image_encoder", noted)
    run(*case, tmp_path / "out", max_train_steps=1, **settings)
    assert asked == [wanted]


@pytest.mark.slow
def test_a_line_of_kohyas_trains_from_the_shell(case: tuple[Path, Path], tmp_path: Path) -> None:
    flags = [
        "--network_module",
        "networks.lora_flux",
        "--network_train_unet_only",
        "--xformers",
        "--scale_weight_norms",
    ]
    flags += ["1", "--optimizer_type", "pytorch_optimizer.CAME", "--caption_extension", ".txt", "--flip_aug"]
    done = start([*arguments(*case, tmp_path / "out"), *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "note: --xformers: has no effect here: PyTorch's own attention kernels" in done.stdout.replace("\n", " ")


def test_a_held_out_image_that_is_trained_on_too_is_named(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "data", images=4, validation_split=0.25)
    run(base, data, tmp_path / "first", max_train_steps=1)
    assert "trained on as a copy" not in capsys.readouterr().out
    inputs = [path.read_bytes() for path in sorted((tmp_path / "data/images").glob("?.png"))]
    (tmp_path / "data/more").mkdir()
    for i, content in enumerate(inputs):
        (tmp_path / f"data/more/copy{i}.png").write_bytes(content)
        (tmp_path / f"data/more/copy{i}.txt").write_text("a disc")
    data.write_text(data.read_text() + '[[datasets.subsets]]\nimage_dir = "more"\n')
    run(base, data, tmp_path / "again", max_train_steps=1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 image held out, and trained on as a copy or in another subset: " in printed


def test_a_start_says_which_captions_and_prompts_are_cut(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny T5 reads 24 tokens: a letter each, one before them and one at the end. Half of the images are held out.

    It is said again where everything is cached.
    """
    data = write_dataset(tmp_path / "data", images=4, text="validation_split = 0.5\nvalidation_seed = 1")
    for i, length in enumerate((22, 23, 90, 4)):
        (tmp_path / f"data/images/{i}.txt").write_text("abcd"[i] * length)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{'x' * 30} --s 1\nshort --s 1\n")
    for output in ("first", "again"):
        run(base, data, tmp_path / output, sample_prompts=prompts, max_train_steps=1)
        printed = " ".join(capsys.readouterr().out.split())
        longer = "2 of 4 captions are longer than the 23 tokens that the text encoder reads of one"
        assert f"note: {longer}; the rest of each is not trained on: 1.png, 2.png" in printed
        assert f"note: prompt '{'x' * 30}': 8 of 31 tokens are not read by the text encoder" in printed
