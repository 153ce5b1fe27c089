"""tools/migrate_config.py: TOML, script or pasted command in; Tandem's TOML and a table out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import toml

from library.config import load_config
from library.config.kohya.command import read_command, read_command_file
from tests.forked import run_script
from tests.runs import call, refusal
from tools import migrate_config
from tools.migrate_config import migrate

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "migrate_config.py"
LAUNCH = ["accelerate", "launch", "--num_cpu_threads_per_process=1", "--mixed_precision", "bf16", "--num_processes=2"]
FLAGS = ["--pretrained_model_name_or_path", "m", "--network_module", "networks.lora_flux", "--network_dim", "8"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_script(SCRIPT, arguments, cwd)


def test_a_pasted_command_becomes_a_toml_that_means_the_same(tmp_path: Path) -> None:
    words = [*LAUNCH, "flux_train_network.py", *FLAGS, "--dataset_config", "d.toml", "--unet_lr", "1e-3", "--sdpa"]
    words += ["--full_fp16", "--xformers", "--lr_scheduler=cosine", "--lr_warmup_steps", "10%"]
    words += ["--network_args", "verbose=True"]
    done = run("--save_to", "my.toml", "--", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if len(line.split()) > 1}
    assert rows["network_dim"] == "same"
    assert rows["unet_lr"] == "renamed"
    assert rows["sdpa"] == "accepted"
    assert rows["xformers"] == "note"
    assert rows["full_fp16"] == "refused"
    assert rows["guidance_scale"] == "default"
    assert "start with accelerate launch --num_processes 2 train_lora.py" in done.stdout
    assert done.stdout.endswith("my.toml: written; not taken over: 1 setting, see above\n")

    text = (tmp_path / "my.toml").read_text()
    assert "learning_rate = 0.001  # from unet_lr\n" in text
    assert "#   full_fp16: fp16 LoRA weights lose small updates; use full_bf16, which rounds stochastically\n" in text
    assert "#   xformers: has no effect here: PyTorch's own attention kernels are used, of which attention" in text
    config = load_config(["--config_file", str(tmp_path / "my.toml")])
    assert config.optimizer.learning_rate == 1e-3
    assert config.optimizer.lr_warmup_steps == pytest.approx(0.1)
    assert config.flow.guidance_scale == 3.5
    assert config.saving.save_format == "kohya"
    assert config.network.network_args == ["split_qkv=False"]


SCRIPTS = {
    "train.sh": """#!/bin/bash
# accelerate launch flux_train_network.py --network_dim 999
MODEL="/my models"
export OUT=out
source venv/bin/activate
cd sd-scripts && accelerate launch --num_processes=1 flux_train_network.py \\
  --pretrained_model_name_or_path "$MODEL/flux1-dev.safetensors" \\
  --network_module=networks.lora_flux --dataset_config d.toml \\
  --output_dir=${OUT} "$@" 2>&1 | tee log.txt
""",
    "train.bat": """@echo off
rem accelerate launch flux_train_network.py --network_dim 999
set MODEL=/my models
set "OUT=out"
accelerate launch sd-scripts\\flux_train_network.py ^
  --pretrained_model_name_or_path "%MODEL%/flux1-dev.safetensors" ^
  --network_module=networks.lora_flux --dataset_config d.toml ^
  --output_dir=%OUT% %*
pause
""",
    "train.ps1": """$MODEL = "/my models"
$OUT = 'out'
accelerate launch flux_train_network.py `
  --pretrained_model_name_or_path "$MODEL/flux1-dev.safetensors" `
  --network_module=networks.lora_flux --dataset_config d.toml `
  --output_dir=$OUT
""",
}


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_a_script_is_read_with_its_continuations_and_variables(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(SCRIPTS[name])
    assert read_command_file(tmp_path / name).arguments == (
        "--pretrained_model_name_or_path",
        "/my models/flux1-dev.safetensors",
        "--network_module=networks.lora_flux",
        "--dataset_config",
        "d.toml",
        "--output_dir=out",
    )


def test_windows_paths_keep_their_backslashes(tmp_path: Path) -> None:
    (tmp_path / "t.bat").write_text(r'python flux_train_network.py --ae "C:\models\ae.safetensors" --t5xxl D:\t5')
    assert read_command_file(tmp_path / "t.bat").arguments == (
        "--ae", r"C:\models\ae.safetensors", "--t5xxl", r"D:\t5",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "tool"),
    [
        (["python", "src/musubi_tuner/qwen_image_train_network.py", "--seed", "1"], "musubi-tuner"),
        (["accelerate", "launch", "-m", "musubi_tuner.qwen_image_train_network", "--seed", "1"], "musubi-tuner"),
        (["accelerate launch flux_train_network.py --seed 1"], "sd-scripts"),
        (["--seed", "1"], None),
    ],
)
def test_the_trainer_is_known_by_its_script(words: list[str], tool: str | None) -> None:
    command = read_command(words)
    assert command.tool == tool
    assert command.arguments == ("--seed", "1")


def test_what_describes_images_means_in_the_toml_what_it_means_in_a_run(tmp_path: Path) -> None:
    for folder in ("img/10_sks dog", "img/2_dog_park", "reg/1_dog"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "kohya.toml").write_text(
        'network_module = "networks.lora_flux"\npretrained_model_name_or_path = "m"\ntrain_data_dir = "img"\n'
        'reg_data_dir = "reg"\nresolution = "1024,768"\nenable_bucket = true\ncaption_extension = ".txt"\n'
        "keep_tokens = 2\nmin_bucket_reso = 512\ntrain_batch_size = 2\n"
    )
    done = run("--save_to", "new/my.toml", "kohya.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    given, migrated = (
        load_config(["--config_file", str(tmp_path / name)]).dataset for name in ("kohya.toml", "new/my.toml")
    )
    assert given == migrated
    assert (migrated.dataset_config, migrated.train_batch_size) == ("img", 2)
    assert set(migrated.dataset_args) == {
        *("reg_data_dir=reg", "resolution=1024,768", "enable_bucket=True", "caption_extension=.txt", "keep_tokens=2"),
        "min_bucket_reso=512",
    }


def test_network_arguments_that_the_lora_refuses_are_not_written(tmp_path: Path) -> None:
    flags = [*FLAGS, "--dataset_config", "d.toml", "--network_args", "ggpo_beta=1", "rank_dropout=0.1"]
    notes = migrate(read_command(["flux_train_network.py", *flags]), tmp_path / "my.toml", "a test")
    assert toml.load(tmp_path / "my.toml")["network"]["network_args"] == ["rank_dropout=0.1", "split_qkv=False"]
    assert any(note.outcome == "refused" and "ggpo_beta" in note.text for note in notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "python", "sdxl_train_network.py", "--seed", "1"], "sdxl_train_network.py: not a LoRA trainer that"),
        (["--", "python", "x"], "command: no trainer's script in it"),
        (["--", "flux_train_network.py --ae 'x"], "command: a quote is not closed"),
        (["--", "flux_train_network.py", "--netwrk_dim", "8"], "unknown flag; did you mean 'network_dim'?"),
        (["none.sh"], "none.sh: no such file"),
        (["empty.sh"], "empty.sh: starts no trainer"),
        (["unset.sh"], "unset.sh: $WHERE is not set in this file; write its value into it"),
        ([], "give a TOML file, a script, or -- and a command"),
        (["--", *FLAGS, "--resolution", "64"], "dataset_config: is required"),
        (["--", "--network_module=networks.lora_flux", "--dataset_config=d"], "pretrained_model_name_or_path: is requ"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty.sh").write_text("echo hello\n")
    (tmp_path / "unset.sh").write_text("python flux_train_network.py --ae $WHERE/ae\n")
    monkeypatch.chdir(tmp_path)
    assert message in refusal(migrate_config, "--save_to", "my.toml", *arguments)
    assert not (tmp_path / "my.toml").exists()


def test_a_musubi_command_takes_its_precision_from_the_launcher(tmp_path: Path) -> None:
    words = [*LAUNCH, "src/musubi_tuner/qwen_image_train_network.py", "--dit", "d", "--dataset_config", "d.toml"]
    assert read_command(words).launcher["mixed_precision"] == "bf16"
    migrate(read_command(words), tmp_path / "my.toml", "a test")
    assert toml.load(tmp_path / "my.toml")["training"]["mixed_precision"] == "bf16"


def test_a_file_that_is_there_is_replaced_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("mine")
    (tmp_path / "kohya.toml").write_text(
        'pretrained_model_name_or_path = "x"\ndataset_config = "d.toml"\noutput_dir = "o"\noutput_name = "o"\n'
        'network_module = "networks.lora_flux"\n'
    )
    line = refusal(migrate_config, "--save_to", "my.toml", "kohya.toml")
    assert line == "error: my.toml: exists; choose another --save_to or give --overwrite\n"
    assert (tmp_path / "my.toml").read_text() == "mine"
    call(migrate_config, "--save_to", "my.toml", "kohya.toml", "--overwrite")
    assert "networks.lora_flux" not in (tmp_path / "my.toml").read_text()


@pytest.mark.parametrize("target", ["/", "", ".", "..", "my", "/dev/null", "/.toml"])
def test_what_is_no_name_of_a_toml_is_refused(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets" / "1_cat").mkdir(parents=True)
    (tmp_path / "kohya.toml").write_text('pretrained_model_name_or_path = "x"\ntrain_data_dir = "sets"\n')
    assert refusal(migrate_config, "--save_to", target, "kohya.toml").startswith("error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kohya.toml", "sets"]
