"""Options of kohya's in whole runs: each changes what it says, and the LoRA's file tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from library.models.flux.spec import FluxFamily
from tests.runs import arguments, largest_difference, lora, metadata, metrics, run, start, write_base, write_dataset


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


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"loss_type": "l1"}, ("ss_loss_type", "l1")),
        ({"ip_noise_gamma": 0.5}, ("ss_ip_noise_gamma", "0.5")),
        (
            {"ip_noise_gamma": 0.5, "ip_noise_gamma_random_strength": True},
            ("ss_ip_noise_gamma_random_strength", "True"),
        ),
        ({"optimizer_type": "CAME"}, ("ss_optimizer", "library.training.optim.optimizers.CAME")),
        ({"lr_scheduler": "inverse_sqrt", "lr_scheduler_timescale": 2}, ("ss_lr_scheduler", "inverse_sqrt")),
        ({"timestep_sampling": "logsnr", "logit_mean": 1.0}, ("ss_timestep_sampling", "logsnr")),
    ],
    ids=lambda value: "",
)
def test_an_option_changes_the_training_and_stands_in_the_file(
    case: tuple[Path, Path], tmp_path: Path, settings: dict[str, object], fact: tuple[str, str]
) -> None:
    run(*case, tmp_path / "with", **settings)
    run(*case, tmp_path / "without")
    assert largest_difference(lora(tmp_path / "with"), lora(tmp_path / "without")) > 1e-3
    assert metadata(tmp_path / "with")[fact[0]] == fact[1]


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
