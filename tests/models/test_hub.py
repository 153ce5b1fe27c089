"""Models by their names on the hub: huggingface_hub itself against a server on this machine, and without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from library.errors import UserError
from library.models.hub import find_model
from tests.forked import run_code
from tests.hub_server import Hub, files_of, serving
from tests.runs import ROOT

FLUX = ROOT / "assets/tiny-flux"
NOBODY = "http://127.0.0.1:9"  # refuses connections


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Serve a pipeline as publishers keep it, and a language model, each with what nobody needs."""
    pipeline, language = tmp_path / "pipeline", tmp_path / "language"
    shutil.copytree(FLUX, pipeline)
    for name in (
        *("flux1.safetensors", "transformer/x.fp16.safetensors", "text_encoder/pytorch_model.bin", "a/b.json"),
        "pe/model.safetensors",
    ):
        (pipeline / name).parent.mkdir(exist_ok=True)
        (pipeline / name).write_bytes(b"unneeded")
    index = json.loads((pipeline / "model_index.json").read_text())  # with ERNIE-Image's prompt enhancer
    (pipeline / "model_index.json").write_text(json.dumps(index | {"pe": ["transformers", "Ministral3ForCausalLM"]}))
    language.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "README.md"):
        (language / name).write_bytes(os.urandom(2 << 20) if name == "model.safetensors" else name.encode())
    (language / "original").mkdir()
    (language / "original/params.json").write_text("{}")
    with serving(
        Hub({"acme/flux": pipeline, "acme/llama": language, "acme/gated": pipeline}, {"acme/gated"})
    ) as served:
        yield served


def find(
    hub: Hub | str, home: Path, name: str, more: str = "", before: str = "", lora: bool = False, **env: str
) -> tuple[str, str]:
    """Return what a process finds for ``name``, and what it says; huggingface_hub is imported with ``env``."""
    finds = "find_lora" if lora else "find_model"
    code = (
        "import os, shutil, sys\n"
        "for imported in [each for each in sys.modules if each.partition('.')[0] == 'huggingface_hub']:\n"
        "    del sys.modules[imported]\n"
        f"from library.errors import exit_on_user_error\nfrom library.models.hub import {finds}\n"
        f"{before}\nexit_on_user_error(lambda: print({finds}({name!r}, '--model'{more}), end=''))()\n"
    )
    address = hub if isinstance(hub, str) else hub.url
    done = run_code(code, [], ROOT, {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **env})
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == (0 if done.stdout else 2), done.stderr
    return done.stdout, done.stderr


def test_of_a_pipeline_what_is_read_is_fetched_once_and_found_without_a_network(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    found, said = find(hub, home, "acme/flux")
    own = {name for name in files_of(FLUX) if "/" in name or name == "model_index.json"}
    assert set(files_of(Path(found))) == set(hub.fetched) == own
    assert f"downloading acme/flux to {home / 'hub'}: {len(own) - 1} files" in said
    for name in own:
        assert (Path(found) / name).read_bytes() == (hub.models["acme/flux"] / name).read_bytes()
    hub.fetched.clear()
    assert find(hub, home, "acme/flux") == (found, "")
    assert find(NOBODY, home, "acme/flux") == (found, "")
    assert find(hub, home, "acme/flux", HF_HUB_OFFLINE="1") == (found, "")
    assert not hub.fetched


def test_a_lora_is_found_by_its_repository_or_by_its_file_there(hub: Hub, tmp_path: Path) -> None:
    adapters = "zimage_turbo_training_adapter"
    for name, files in {
        "acme/one": ("style.safetensors", "adapter_config.json", "sample.png"),
        "acme/two": ("a.safetensors", "sub/b.safetensors"),
        f"ostris/{adapters}": (f"{adapters}_v1.safetensors", f"{adapters}_v2.safetensors"),
    }.items():
        hub.models[name] = tmp_path / name.replace("/", "_")
        for file in files:
            (hub.models[name] / file).parent.mkdir(exist_ok=True, parents=True)
            (hub.models[name] / file).write_bytes(file.encode())
    home = tmp_path / "home"
    found = {name: find(hub, home, name, lora=True)[0] for name in ("acme/one", "acme/two/sub/b.safetensors")}
    assert {name: Path(path).read_text() for name, path in found.items()} == {
        "acme/one": "style.safetensors",
        "acme/two/sub/b.safetensors": "sub/b.safetensors",
    }
    assert sorted(hub.fetched) == ["adapter_config.json", "style.safetensors", "sub/b.safetensors"]
    assert find(hub, home, f"ostris/{adapters}", lora=True)[0].endswith("_v2.safetensors")
    assert find(NOBODY, home, "acme/one", lora=True) == (found["acme/one"], "")
    assert (
        "acme/two has 2 safetensors files; give one of acme/two/a.safetensors,"
        in find(hub, home, "acme/two", lora=True)[1]
    )
    assert "acme/two has no c.safetensors; give one of" in find(hub, home, "acme/two/c.safetensors", lora=True)[1]
    said = find(hub, home, f"models/{adapters}_v2.safetensors", lora=True)[1]
    assert f"does not exist; correct it, or give ostris/{adapters}, which is downloaded" in said
    for local in ("tests/none.safetensors", "nowhere.safetensors", "docs/none/style.safetensors"):
        assert find(hub, home, local, lora=True) == (local, "")


def test_a_part_that_is_given_otherwise_is_not_fetched(hub: Hub, tmp_path: Path) -> None:
    find(hub, tmp_path / "home", "acme/flux", ", True, ['vae', 'text_encoder_2']")
    assert {name.partition("/")[0] for name in hub.fetched} >= {"transformer", "text_encoder", "tokenizer_2"}
    assert not [name for name in hub.fetched if name.startswith(("vae/", "text_encoder_2/"))]


def test_of_a_language_model_safetensors_are_fetched_and_pickles_only_where_there_are_no_others(
    hub: Hub, tmp_path: Path
) -> None:
    find(hub, tmp_path / "home", "acme/llama")
    assert sorted(hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    (hub.models["acme/llama"] / "model.safetensors").unlink()
    hub.fetched.clear()
    find(hub, tmp_path / "other", "acme/llama")
    assert sorted(hub.fetched) == ["config.json", "pytorch_model.bin", "tokenizer.json"]
    (hub.models["acme/llama"] / "pytorch_model.bin").rename(hub.models["acme/llama"] / "q4.gguf")
    assert "acme/llama has no model in safetensors (it has README.md" in find(hub, tmp_path / "third", "acme/llama")[1]


def test_a_download_that_was_cut_off_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    (hub.models["acme/llama"] / "model.safetensors").write_bytes(os.urandom(24 << 20))
    hub.breaks_after = 22 << 20  # the client writes pieces of 10 MiB
    found, _ = find(hub, tmp_path / "home", "acme/llama")
    assert (Path(found) / "model.safetensors").read_bytes() == (
        hub.models["acme/llama"] / "model.safetensors"
    ).read_bytes()
    assert [first for first in hub.ranges if int(first.removeprefix("bytes=").partition("-")[0]) > 0]


def test_what_is_in_the_way_is_one_line_with_the_remedy(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    _, said = find(hub, home, "acme/gated")
    assert said.splitlines()[-1] == (
        f"error: --model: acme/gated is gated; accept its licence at {hub.url}/acme/gated, then log in with "
        "`hf auth login` (or set HF_TOKEN)"
    )
    assert "acme/lama is neither a path here nor a model on the hub" in find(hub, home, "acme/lama")[1]
    full = "shutil.disk_usage = lambda path: type('Full', (), {'free': 10**6})"
    _, said = find(hub, home, "acme/llama", before=full)
    assert f"0.0 GB are to be downloaded to {home / 'hub'}, where 0.0 GB are free" in said
    assert "model.safetensors" not in hub.fetched


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        (", True", 'hf download acme/none --include "*/*" --include "*model_index.json"'),
        (", False", 'hf download acme/none --exclude "*/*"'),
        ("", "hf download acme/none"),
    ],
)
def test_without_a_network_the_command_to_fetch_it_is_told(kind: str, command: str, tmp_path: Path) -> None:
    assert find(NOBODY, tmp_path, "acme/none", kind)[1] == (
        "error: --model: acme/none does not exist here, and is not (completely) in the cache; without a network, "
        f"fetch it where there is one: {command}\n"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("modles/flux-dev", "--model 'modles/flux-dev' does not exist; did you mean 'models/flux-dev'?"),
        (
            "models/flux-dve",
            "does not exist; did you mean 'models/flux-dev'? For the model of that name on the hub: hf",
        ),
        ("models/other.safetensors", "'models/other.safetensors' does not exist; give a local file or folder, or a"),
        ("gpt2", "'gpt2' does not exist; give a local file or folder, or a name on the Hugging Face hub, owner/name"),
        ("./models/x/y", "does not exist; give a local file"),
        ("./q5.gguf", "'./q5.gguf' does not exist; did you mean 'q4.gguf'?"),
        ("", "'' does not exist"),
    ],
)
def test_a_mistyped_path_is_not_looked_for_on_the_hub(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/flux-dev").mkdir(parents=True)
    (tmp_path / "q4.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        find_model(given, "--model")
    assert said in str(error.value)
    assert ("hf download" in str(error.value)) == (given == "models/flux-dve")  # the folder is there, as an owner's


@pytest.mark.slow
def test_every_program_that_takes_a_model_takes_a_name(hub: Hub, tmp_path: Path) -> None:
    """They stop at the gate: until there each has understood the name."""
    flags = {
        "train_lora.py": ["--pretrained_model_name_or_path", "acme/gated", "--dataset_config", "x.toml"],
        "tools/generate.py": ["image", "--model", "acme/gated", "--prompt", "a house"],
        "tools/merge_lora.py": ["--model", "acme/gated", "--lora", "x.safetensors", "--save_to", str(tmp_path / "m")],
        "tools/quantize_model.py": ["--model", "acme/gated", "--save_to", str(tmp_path / "q")],
    }
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    for script, words in flags.items():
        done = subprocess.run(
            [sys.executable, script, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=90
        )
        assert done.returncode == 2, done.stderr
        assert "acme/gated is gated; accept its licence" in done.stderr.splitlines()[-1], done.stderr
