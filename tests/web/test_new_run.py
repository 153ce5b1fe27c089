"""The form of a new run: the text and the form say the same, and what the trainer would say is said."""

from __future__ import annotations

import json
import random
import re
import struct
import sys
import tomllib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, cast, get_origin
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import urlopen

import pytest

pytest.importorskip("starlette")
pytest.importorskip("multipart")

from starlette.datastructures import FormData

from library.config.edit import edited
from library.config.family_defaults import presets
from library.config.load import checked, load_for, read_arguments
from library.config.markers import words_of
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.published_models import MODEL, published_models
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields
from library.errors import UserError
from library.files import toml_text
from library.models.hub import index_on_hub
from library.web.access import AllowedRoots
from library.web.jobs import Jobs
from library.web.new_run import _picker, _refuse_kohyas, _suggestion, edit, examine, form_of, start
from library.web.site import Site
from library.web.trainable import _look
from tests.config.test_edit import valid
from tests.forked import run_script
from tests.runs import write_dataset
from tests.tiny import tiny_flux_pipeline
from tests.web.page import ROOT, WAIT, Server, Tab, expect, post, serve, until

SCRIPTS = [LORA, LANGUAGE_LORA, LLM]
named = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.training)
in_browser = pytest.mark.slow
expect.set_options(timeout=WAIT)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.of(AllowedRoots.of([tmp_path / "output"], [tmp_path]))


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("", r"\xff.png: the name is not UTF-8; rename the file"),
        ("echo Traceback >&2; echo \"KeyError: 'x'\" >&2; exit 1", "could not be looked at (KeyError: 'x'); "),
        ("kill -9 $$", "could not be looked at (its process ended with -9); "),
        ("printf 'a\\377b'", r"a\xffb"),
    ],
)
def test_bytes_of_names_and_the_end_of_who_looks_are_said(
    ends: str, said: str, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_dataset(tmp_path / "data")
    (image := next(tmp_path.rglob("*.png"))).rename(image.parent / "\udcff.png")
    text = f'pretrained_model_name_or_path = "{tiny_flux_pipeline(tmp_path / "flux")}"\ndataset_config = "{data}"\n'
    if ends:  # as its Python might
        (tmp_path / "python").write_text(f"#!/bin/sh\n{ends}\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    shown = examine(site, f'{text}output_dir = "{tmp_path}/output/a"\n', pretrains=False)
    assert said in json.dumps(shown, ensure_ascii=False).encode().decode().replace("\\\\", "\\")


@pytest.fixture
def looks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let model and dataset be looked at in this process, which has torch."""

    def look(config: Any) -> str:
        return _look(config.model.model_dump_json(), config.dataset.model_dump_json(), str(config.training.seed))

    monkeypatch.setattr("library.web.new_run.reason_against", look)


@pytest.mark.usefixtures("looks_here")
def test_what_the_trainer_says_of_model_and_dataset_is_said_before_the_start(site: Site, tmp_path: Path) -> None:
    """A16: a model of another kind, images that are none, a second run whose file would be called as the first's."""
    text = (
        f'model_type = "flux"\npretrained_model_name_or_path = "{tiny_flux_pipeline(tmp_path / "flux")}"\n'
        f'dataset_config = "{write_dataset(tmp_path / "data")}"\noutput_dir = "{tmp_path}/output/runA"\n'
        'output_name = "runA"\n'
    )
    assert examine(site, text, pretrains=False)["problems"] == []
    other = text.replace('"flux"', '"z_image"').replace("/data/", "/none/")
    (tmp_path / "none/images").mkdir(parents=True)
    (tmp_path / "none/dataset.toml").write_text((tmp_path / "data/dataset.toml").read_text())
    errors = examine(site, other, pretrains=False)["errors"]
    assert "is FLUX.1 (flux), not z_image" in errors["pretrained_model_name_or_path"]
    errors = examine(site, other.replace('"z_image"', '"flux"'), pretrains=False)["errors"]
    assert "images" in errors["dataset_config"]
    (tmp_path / "output/runA").mkdir(parents=True)
    (tmp_path / "output/runA/metrics.jsonl").write_text("{}")
    (taken,) = examine(site, text, pretrains=False)["problems"]
    assert taken["changes"] == {"output_dir": f"{tmp_path}/output/runA-2", "output_name": "runA-2"}
    assert not list(tmp_path.rglob(".tandem_cache"))  # nothing is stored
    (tmp_path / "output/runA/config.toml").write_text(text)
    (tmp_path / "output/runA-2").mkdir()
    (tmp_path / "output/runA-2/metrics.jsonl").write_text("{}")
    (tmp_path / "output/runA-2/config.toml").write_text('output_name = "runA-3"\n')
    (same,) = examine(site, text.replace('output/runA"', 'output/b"'), pretrains=False)["problems"]
    assert (same["key"], same["changes"]) == ("output_name", {"output_name": "runA-2"})  # as no other run's
    own = text.replace('output/runA"', 'output/b"').replace('output_name = "runA"\n', "")
    found = examine(site, own, pretrains=False)
    assert (found["problems"], found["defaults"]["output_name"]) == ([], "b")


# ---- the models to choose from


@pytest.mark.usefixtures("looks_here")
def test_no_choice_of_a_model_and_a_card_is_refused(site: Site, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Without a dataset that alone is missing; with one the trainer takes it, and trains the kind that was chosen."""
    data = {
        "none": write_dataset(tmp_path / "images"),
        "fill": write_dataset(tmp_path / "masks", inpaint_masks='["halves"]'),
    }
    data["references"] = write_dataset(tmp_path / "edits", control_directory='"images"')
    (site.roots.outputs[0] / "flux_1_dev").mkdir()
    shown = _picker(site, {"lora": [], "model": []}, [])
    seen = set()
    for model, kinds, common in shown["models"]:
        for (kind, cards), card in ((item, card) for item in kinds.items() for card in item[1]):
            with subtests.test(model.label, kind=kind, card=card):
                text = ""
                for key, content in (cards[card] | common).items():
                    text = edited(text, key, content, LORA)
                assert [one["line"] for one in examine(site, text, False)["problems"]] == [
                    "dataset_config: is required; fill it in"
                ]
                text = edited(text, "dataset_config", str(data[MODEL_TYPES[kind].conditioning]), LORA)
                found = examine(site, text, False)
                assert found["problems"] == []
                assert kind in (found["values"]["model_type"], found["defaults"].get("model_type", "").split(": ")[-1])
                assert found["values"]["output_dir"] != str(site.roots.outputs[0] / "flux_1_dev")
                assert set(cards[card]) & {"blocks_to_swap", "fp8_scaled"} <= set(shown["forced"])
                seen.add((model.hub, kind))
    assert seen == {
        (row.hub, kind) for row in published_models() if not row.train_on or row.adapter for kind in row.model_types
    }


def test_a_training_adapter_is_set_once_it_is_there_and_files_are_offered_with_their_family(site: Site) -> None:
    turbo = next(row for row in published_models() if row.adapter)
    path = f"models/{Path(turbo.adapter).name}"
    folder = tiny_flux_pipeline(site.roots.outputs[0] / "my flux")
    shown = _picker(site, {"lora": [path], "model": [str(folder), str(site.roots.outputs[0] / "none.gguf")]}, [])
    assert {model.hub: common["base_weights"] for model, _, common in shown["models"] if common["base_weights"]} == {
        turbo.hub: path
    }
    (own,) = shown["own"]
    assert own[:2] == (str(folder), "FLUX.1")
    assert own[2]["output_dir"] == str(site.roots.outputs[0] / "my_flux")


# ---- every option


@named
def test_every_option_of_the_schema_has_one_control_of_its_type(script: Script[Any]) -> None:
    controls = [one for _, _, options in form_of(script) for one in options]
    assert sorted(one["key"] for one in controls) == sorted(fields(script))
    for one in controls:
        field = fields(script)[one["key"]][1]
        assert one["about"] == field.description
        assert (one["default"] == "required") == field.is_required()
        if field.annotation is bool:
            assert one["kind"] == "checkbox"
        if one["kind"] == "select" and one["key"] != "model_type":
            switch = ("true", "false") if "bool" in str(field.annotation) else ()
            assert one["words"] == words_of(field.annotation) + switch
        if get_origin(field.annotation) is list:
            assert one["kind"] == "list"


def _said(found: dict[str, Any]) -> list[str]:
    """Return what the form says in the trainer's words, without what this page alone refuses."""
    own = ("no such file or folder", "lies outside", "runs a program", "output_dir: it holds")
    lines = [problem["line"] for problem in found["problems"]]
    return [
        re.sub(r"^(\S+): is required; fill it in$", r"\1: is required; set it in the TOML file or with --\1", line)
        for line in lines if not any(words in line for words in own)
    ]  # fmt: skip


def _loaded(text: str, script: Script[Any], path: Path) -> Any:
    """Return what the trainer makes of a text: a configuration, or its lines."""
    path.write_text(text, encoding="utf-8")
    try:
        return checked(read_arguments(["--config_file", str(path)], script), script, None, index_on_hub)
    except UserError as error:
        return str(error).replace(str(path), "configuration").splitlines()


@named
@pytest.mark.parametrize("seed", range(4))
def test_a_text_goes_through_the_form_and_means_the_same(
    script: Script[Any], seed: int, site: Site, tmp_path: Path
) -> None:
    """All options at random values, a third of them at a time; what excludes each other must be said alike, too."""
    draw = random.Random(seed)
    keys = [key for key in fields(script) if draw.random() < 0.4 or fields(script)[key][1].is_required()]
    tables: dict[str, Any] = {}
    for key in keys:
        tables.setdefault(fields(script)[key][0], {})[key] = valid(key, script, draw)
    text = toml_text(tables)
    found = examine(site, text, script is LLM)
    assert found["training"] == script.training
    rebuilt = ""
    for key, content in found["values"].items():
        if content:
            rebuilt = edited(rebuilt, key, content, script)
    wanted, made = _loaded(text, script, tmp_path / "a.toml"), _loaded(rebuilt, script, tmp_path / "b.toml")
    if isinstance(wanted, list):  # lines stand elsewhere, and equal-to-default is not written
        assert isinstance(made, list)
        assert _said(found) == wanted
    else:
        assert made == wanted


# ---- what the trainer says


REFUSED = {
    "unknown": 'network_dimm = 4\nlerning_rate = 1\nzzz = 1\n[dataset]\ndataset_config = "d"',
    "wrong": 'network_dim = "many"\nlr_scheduler = "cosin"\nfp8_base = 7\n',
    "excluding": 'model_type = "flux"\npretrained_model_name_or_path = "m"\ndataset_config = "d"\nfp8_base = true\n'
    "fp8_scaled = true\n"
    "torch_compile = true\nshard = 2\nhuber_c = 0.3\n",
    "twice": "seed = 1\n[training]\nseed = 2\n",
    "broken": 'seed = \n"',
    "foreign": 'packing = true\nmodel_type = "flux"\ncp = 2',
    "chats": 'model_type = "llama"\ndataset_config = "d"\ntrain_data = []\nflip = 1',
    "misspelt type": 'model_type = "flx"',
    "kohya": 'network_module = "networks.lora_flux"\nvae_batch_size = 2\nnetwork_dim = "x"\nxformers = true',
}


@pytest.mark.parametrize(
    ("text", "rank", "alpha", "rate"),
    [
        ('model_type = "krea2"', "32", "32", "0.0003"),
        ('model_type = "krea2"\nnetwork_dim = 8\noptimizer_type = "Prodigy"', None, "8", "1.0"),
        ("model_type = 3\noptimizer_type = [1]", "16", "16", "0.0001"),
        ('model_type = "llama"', "16", "16", "0.0001"),
    ],
)
def test_an_unset_option_shows_what_the_family_has(
    text: str, rank: str | None, alpha: str, rate: str, site: Site
) -> None:
    shown = examine(site, text, pretrains=False)["defaults"]
    wanted = {"network_dim": rank, "network_alpha": alpha, "learning_rate": rate}
    assert {key: shown.get(key) for key in wanted} == {k: v and f"the family's: {v}" for k, v in wanted.items()}
    assert examine(site, text, pretrains=True)["defaults"] == {}


@pytest.mark.parametrize("model_type", IMAGE_MODELS)
def test_a_chosen_adapter_is_one_that_trains_and_leaves_what_was_set(model_type: str, site: Site) -> None:
    """List and buttons of Adapter: what the one kind needs comes and goes, other network_args stay."""

    def chosen(text: str, **changes: str) -> str:
        form = FormData({"text": text, "changes": json.dumps(changes), "touched": "yes"})
        return str(json.loads(edit(site, cast(Any, None), form).body)["text"])

    def network(text: str) -> list[str]:
        keys = ("network_args", "save_format", "network_type")
        return [line for line in _said(examine(site, text, pretrains=False)) if any(key in line for key in keys)]

    text = f'model_type = "{model_type}"\n[network]\nnetwork_args = ["exclude_patterns=.*0.*"]\n'
    lokr = chosen(text, network_type="lokr")
    arguments = tomllib.loads(lokr)["network"]["network_args"]
    factor = presets(f"lokr/{model_type}")["network_args"][0][1]
    assert arguments == ["full_matrix=True", factor, "exclude_patterns=.*0.*"]
    assert chosen(text, network_type="lokr", network_args=f"full_matrix=True\n{factor}") == lokr
    assert network(lokr) == []
    assert chosen(chosen(lokr, network_type="loha"), network_type="lokr") == lokr
    for kind in ("loha", "dora", "lora", ""):
        assert network(other := chosen(lokr, network_type=kind)) == []
        assert tomllib.loads(other)["network"]["network_args"] == ["exclude_patterns=.*0.*"]
        assert ("save_format" in other) == (kind == "loha")
    said = network(lokr.replace('network_type = "lokr"', 'network_type = "dora"'))
    assert [line.split(": ")[1] for line in said] == ["full_matrix", "factor"]
    (line,) = network(lokr.replace('save_format = "comfy"', 'save_format = "diffusers"'))
    assert line.startswith("save_format: no program loads network_type lokr")


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_what_train_lora_prints(text: str, site: Site, tmp_path: Path) -> None:
    (tmp_path / "configuration").write_text(text)
    done = run_script(ROOT / "train_lora.py", ["--config_file", "configuration"], tmp_path)
    printed = done.stderr.removeprefix("error: ").strip().splitlines()
    assert done.returncode == 2
    assert _said(examine(site, text, pretrains=False)) == printed


def test_a_refusal_is_shown_at_the_field_it_is_about(site: Site) -> None:
    found = examine(site, REFUSED["excluding"], pretrains=False)
    assert {"fp8_base", "huber_c", "torch_compile"} <= {problem["key"] for problem in found["problems"]}
    assert found["unmet"]["huber_c"] == "goes with loss_type = huber or smooth_l1"
    assert found["unmet"]["vae"].startswith("goes with model_type = flux2_klein")
    assert "ae" not in found["unmet"]


@pytest.mark.parametrize(
    ("text", "pretrains", "script"),
    [
        ('model_type = "llama"\npretrained_model_name_or_path = "o/m"\ntrain_data = ["d"]\n', "", "train_lora.py"),
        ('preset = "llama-tiny"\ndata_dir = "d"\n', "1", "train_llm.py"),
    ],
)
def test_several_processes_are_started_by_torchrun_with_the_script_that_the_text_is_for(
    text: str, pretrains: str, script: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Jobs, "begin", lambda self, name=None: None)
    output = site.roots.outputs[0] / "run"
    form: Any = {"text": text + f'output_dir = "{output}"\n', "pretrains": pretrains, "processes": "2"}
    answer = start(site, cast(Any, None), form)
    job = site.jobs.queue()[0]
    assert job.words[:4] == ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert job.words[4:] == (str(ROOT / script), "--config_file", str(job.folder / "config.toml"))
    assert (job.kind, job.output) == ("train", str(output))
    assert answer.headers["hx-redirect"] == f"/run?{urlencode({'path': output})}"
    with pytest.raises(UserError, match="waiting run uses this folder"):  # the same folder once more
        start(site, cast(Any, None), form)


@pytest.mark.parametrize(
    ("key", "path", "is_said"),
    [
        ("pretrained_model_name_or_path", "black-forest-labs/FLUX.1-dev", False),  # of the hub
        ("pretrained_model_name_or_path", "owner/name-1.5", True),  # which is asked
        ("pretrained_model_name_or_path", "name", True),
        ("pretrained_model_name_or_path", "models/gone.safetensors", True),
        ("ae", "./gone", True),
        ("t5xxl", "{output}/gone", True),
        ("dataset_config", "{output}/here.toml", False),
        ("sample_prompts", "gone.txt", True),
    ],
)
def test_a_path_that_is_not_there_is_said_at_its_field(key: str, path: str, is_said: bool, site: Site) -> None:
    (site.roots.outputs[0] / "here.toml").touch()
    path = path.format(output=site.roots.outputs[0])
    found = examine(site, f'{key} = "{path}"', pretrains=False)
    lines = [one["line"] for one in found["problems"] if one["key"] == key and path in one["line"]]
    said = "does not exist" if key == MODEL else f"^{key}: no such file or folder: {path}$"
    assert [bool(re.search(said, line)) for line in lines] == [True] * is_said


# ---- over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("new")
    for name in ("assets", "configs"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("data", "more/configs"):
        (folder / name).mkdir(parents=True)
    with serve(folder, "--folders", "data", "more/configs") as running:
        yield running


def text_shown(server: Server, config: str) -> str:
    """Return the text of the form over a configuration, as HTML."""
    with urlopen(f"{server.address}/new?{urlencode({'config': config})}") as answer:
        found = re.search(r'<textarea name="text".*?>\n(.*?)</textarea>', answer.read().decode(), re.DOTALL)
    assert found
    return found[1]


def demo(output: str, **changes: str) -> str:
    """Return a run of two steps on the tiny model; its files have its folder's name, as no two runs' may be one."""
    text = (ROOT / "configs/demo.toml").read_text()
    quick = {"output_dir": output, "output_name": Path(output).name, "max_train_steps": "2", "preserve": "none"}
    quick["overwrite"] = "false"
    unset = ("preserve_prompts", "preserve_share", "general_prompts", "prior_loss_weight", "lr_warmup_steps",
             "sample_prompts", "sample_at_first", "validate_every_n_steps")  # fmt: skip
    quick |= dict.fromkeys(unset, "")
    for key, content in (quick | changes).items():
        text = edited(text, key, content, LORA)
    return text


@in_browser
def test_a_folder_that_holds_a_run_is_not_taken_twice(server: Server) -> None:
    for name in ("held", "held-2"):
        (server.output / name).mkdir()
        (server.output / name / "metrics.jsonl").write_text("")
    status, text = post(server, "/new/start", text=demo("output/held"))
    assert status == 422
    assert "output/held-3" in text
    found = json.loads(post(server, "/new/edit", text=demo("output/held"), training="images", touched="1")[1])
    changes = [problem["changes"] for problem in found["problems"] if problem["key"] == "output_dir"]
    assert changes == [{"output_dir": "output/held-3", "output_name": "held-3"}]


@in_browser
def test_a_copy_of_a_runs_settings_neither_replaces_nor_resumes_it_and_has_its_prompts(server: Server) -> None:
    run = server.output / "copied"
    run.mkdir()
    begun = """# Tandem 1\nseed = 5\nresume = "auto"\noverwrite = true\nsample_prompts = ["a red zorbo & a hat"]\n"""
    (run / "config.toml").write_text(begun)
    (run / "metrics.jsonl").touch()
    for name in ("output/copied", "output/copied/config.toml"):
        shown = text_shown(server, name)
        assert "seed = 5" in shown
        assert not re.search("resume|overwrite", shown)
        assert "sample_prompts = [&#34;a red zorbo &amp; a hat&#34;]" in shown


@in_browser
def test_prompts_stand_in_the_configuration_and_a_files_own_do_not(server: Server) -> None:
    (server.folder / "data/prompts.txt").write_text("a zorbo --w 64 --h 64 --s 1\n")
    of_file = demo("output/prompted", sample_prompts="data/prompts.txt")
    assert 'sample_prompts = "data/prompts.txt"' in of_file
    lines = "a blue hat --w 64 --h 64 --s 1\na cat --w 64 --h 64 --s 1"
    changes = json.dumps({"sample_prompts": lines.replace("\n", "\r\n"), "sample_every_n_steps": "1"})
    form = {"text": demo("output/typed"), "training": "images", "touched": "1", "changes": changes}
    found = json.loads(post(server, "/new/edit", **form)[1])
    assert (found["problems"], found["values"]["sample_prompts"]) == ([], lines)
    assert post(server, "/new/start", text=of_file)[0] == 204
    assert (_job_of(server, server.output / "prompted").folder / "config.toml").read_text() == of_file
    assert post(server, "/new/start", text=found["text"])[0] == 204
    job = until(lambda: (one := _job_of(server, server.output / "typed")).is_over and one)
    assert job.state == "done", job.log
    config = load_for(LORA, ["--config_file", str(job.folder / "config.toml")])
    assert config.sampling.sample_prompts == lines.splitlines()
    assert post(server, "/run/again", path="output/typed")[0] == 204  # from the settings it wrote
    again = load_for(LORA, ["--config_file", str(_job_of(server, server.output / "typed").folder / "config.toml")])
    assert again.sampling.sample_prompts == lines.splitlines()


def test_a_prompt_that_is_wrong_or_names_an_image_outside_is_said_at_its_field(site: Site) -> None:
    file = site.roots.outputs[0] / "p.txt"
    file.write_text("a cat --ci /etc/hosts\n")
    for prompts, said in {
        '["fine", "cat --q 3"]': "prompt 2: unknown option --q",
        '["cat --ci /etc/hosts"]': "/etc/hosts: lies outside",
        '["cat --ci gone.png"]': "prompt 1: image 'gone.png' does not exist",
        f'"{file}"': "/etc/hosts: lies outside",
    }.items():
        errors = examine(site, f"sample_prompts = {prompts}\n", pretrains=False)["errors"]
        assert errors["sample_prompts"].startswith(said)
    for odd in ("3", "[1, 2]", "[[]]", "true", "{a = 1}"):
        assert examine(site, f"sample_prompts = {odd}\n", pretrains=False)["problems"]
    chats = examine(site, 'model_type = "llama"\nsample_prompts = ["what is --q"]\n', pretrains=False)
    assert "sample_prompts" not in chats["errors"]


@in_browser
def test_paths_are_suggested_from_the_folders_alone(server: Server, tmp_path: Path) -> None:
    """A model, a dataset and a configuration of the places are; what links in them lead to is not, nor the page's."""
    data, configs, own = server.folder / "data", server.folder / "more/configs", server.output / ".tandem/jobs/own"
    own.mkdir(parents=True)
    for folder in (data, own, tmp_path):
        (folder / "<i> & 'it'.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        (folder / "pipeline").mkdir()
        (folder / "pipeline/model_index.json").write_text("{}")
        (folder / "set.toml").write_text('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "."\n')
    for folder in (configs, tmp_path):
        (folder / "ready.toml").write_text("#:schema train_lora.schema.json\n# What it is for.\nseed = 1\n")
    for link, name in {
        data / "led.safetensors": "<i> & 'it'.safetensors", data / "led": "pipeline", data / "led.toml": "set.toml",
        data / "all": ".", configs / "led.toml": "ready.toml", configs / "all": ".",
    }.items():  # fmt: skip
        link.symlink_to(tmp_path / name)
    with urlopen(f"{server.address}/new") as answer:
        text = answer.read().decode()
    listed = re.search(r'<datalist id="paths">(.*?)</datalist>', text, re.DOTALL)
    assert listed
    paths = [unescape(path) for path in re.findall(r'<option value="([^"]*)"', listed[1])]
    wanted = {"data/<i> & 'it'.safetensors", "data/pipeline", "data/set.toml", "more/configs/ready.toml"}
    known = ("assets/tiny-flux", "assets/demo_dataset/dataset.toml", "configs/demo.toml")
    wanted |= {str(ROOT / name) for name in known}
    assert wanted <= set(paths)
    assert len(set(paths)) == len(paths)
    assert "<i>" not in listed[1]
    roots = (server.output, data, configs, ROOT / "assets", ROOT / "configs")
    for path in paths:
        resolved = (server.folder / path).resolve()
        assert any(map(resolved.is_relative_to, roots)), path
        assert ".tandem" not in resolved.parts
        assert resolved.exists()
    assert not [path for path in paths if ".." in Path(path).parts or "/led" in path]
    for one in (one for _, _, options in form_of(LORA) for one in options if one["kind"] == "path"):
        assert re.search(rf'<input data-key="{one["key"]}" [^>]*list="paths">', text)


# ---- in the browser


def containing(part: str) -> re.Pattern[str]:
    return re.compile(re.escape(part))


def _job_of(server: Server, output: Path) -> Any:
    return Jobs(server.output / ".tandem").of_output(output)


@in_browser
def test_the_demo_is_started_from_the_form_and_the_queue_runs_it(tab: Tab, server: Server, size: str) -> None:
    page, output = tab.page, server.output / f"from-{size}"
    tab.open("/new")
    page.get_by_role("link", name="Try it: the demo").click()
    expect(page.locator("#against")).to_have_text("Complete: the trainer takes it")
    tab.fits()
    page.locator("[data-key=max_train_steps]").fill("2")
    page.locator("[data-key=output_dir]").fill(f"output/from-{size}")
    expect(page.locator("#text")).to_have_value(re.compile(r"max_train_steps = 2\s"))
    page.locator("#text").fill(demo(f"output/from-{size}"))
    expect(page.locator("[data-key=max_train_steps]")).to_have_value("2")
    name = page.locator("[data-key=output_name]")
    name.fill("<img src=x onerror=alert(1)>")
    expect(page.locator("[data-of=output_name] .said")).to_contain_text("'<img src=x onerror=alert(1)>' does not fit")
    name.fill(f"&lt;i&gt; it's {size}")  # two runs never write files of one name; and at once:
    page.locator("#start").click()
    page.wait_for_url(re.compile(r"/run\?path="))
    job = until(lambda: (one := _job_of(server, output)) and one.is_over and one)
    assert job.state == "done", job.log
    assert job.queued
    assert job.title == f"&lt;i&gt; it's {size}"
    config = load_for(LORA, ["--config_file", str(job.folder / "config.toml")])
    assert (config.training.max_train_steps, config.saving.output_dir) == (2, f"output/from-{size}")
    metrics = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in metrics if "loss" in line] == [1, 2]
    assert (output / f"&lt;i&gt; it's {size}.safetensors").exists()
    tab.open("/new")  # the same settings, for another run
    expect(page.locator("#changed")).to_have_text(containing(f"from-{size} holds a run. Set: output_dir = "))
    expect(page.locator("#text")).to_have_value(containing(f"/from-{size}-2"))


@in_browser
def test_a_first_lora_is_a_model_a_dataset_and_start(tab: Tab, server: Server, size: str) -> None:
    """The hub cannot be reached from here, which the run says; another model keeps the steps that a person has set."""
    page = tab.page
    tab.open("/new")
    tab.fits()
    page.get_by_title("FLUX.2 klein base 9B, images, on a card of 12 GB").click()
    expect(page.locator("#against")).to_have_text("Still to choose: a dataset")
    expect(page.locator("#changed")).to_contain_text("fp8_scaled = true, ")
    page.get_by_role("button", name="assets/demo_dataset/dataset.toml").click()
    expect(page.locator("#against")).to_contain_text("Complete: the trainer takes it; the model is downloaded first")
    expect(page.locator("[data-key=model_type] option").first).to_have_text("as the model says: flux2_klein")
    expect(page.locator("[data-key=blocks_to_swap]")).to_have_value("8")
    page.locator("[data-key=max_train_steps]").fill("77")
    page.locator("summary", has_text="Choose a model").click()
    page.get_by_title("Krea 2 Raw, images, on a card of 24 GB").click()
    text = page.locator("#text")
    expect(text).to_have_value(containing('"krea/Krea-2-Raw"'))
    expect(page.locator("#changed")).to_contain_text("Removed: ")
    expect(page.locator("#changed")).to_contain_text("Kept: max_train_steps = 77")
    assert re.search("max_train_steps = 77", text.input_value())
    assert not re.search("blocks_to_swap|save_format|flux", text.input_value())
    tab.fits()
    page.locator("#start").click()
    page.wait_for_url(re.compile(r"/run\?path="))
    (output,) = parse_qs(urlsplit(page.url).query)["path"]
    assert re.fullmatch(r"krea_2_raw(-2)?", Path(output).name)
    job = until(lambda: (one := _job_of(server, output)) and one.is_over and one)
    assert "krea/Krea-2-Raw" in job.error
    assert "Traceback" not in job.log


@in_browser
def test_form_and_text_follow_each_other_and_nothing_typed_is_run(tab: Tab, size: str) -> None:
    page = tab.page
    tab.open("/new?config=configs/demo.toml")
    text, dim = page.locator("#text"), page.locator("[data-key=network_dim]")
    expect(dim).to_have_value("16")
    words = "# <script>alert(1)</script><img src=x onerror=alert(2)>"
    text.fill((ROOT / "configs/demo.toml").read_text() + f'{words}\n[flow2]\nhuber_c = 0.2\n"<b>" = 1\nsede = 3\n')
    problems = page.locator("#problems")
    expect(problems).to_contain_text("unknown key; did you mean 'seed'?")
    expect(problems).to_contain_text("huber_c: has no effect with loss_type")
    expect(page.locator("[data-of=huber_c] .said")).to_contain_text("has no effect")
    assert page.locator("#problems b, #problems img, #problems script").count() == 0
    page.locator("#problems p", has_text="sede").get_by_role("button").click()
    expect(problems).not_to_contain_text("sede")
    dim.fill("4")
    expect(text).to_have_value(containing("network_dim = 4\n"))
    assert words in text.input_value()
    assert page.evaluate("document.activeElement.dataset.key") == "network_dim"
    search = page.locator("#search")
    search.fill("turn linear")
    expect(page.locator(".option:visible")).to_have_count(1)
    page.locator("[data-key=huber_c]").fill("")
    for words, first in {"vram": "memory", "lora_rank": "network_dim", "learning RATE": "learning_rate"}.items():
        search.fill(words)  # another word, another trainer's name, two words: what is named so comes first
        expect(page.locator(".option:visible").first).to_have_attribute("data-of", first)
    search.fill("loss")
    page.locator("[data-key=loss_type]").select_option("huber")
    expect(page.locator("[data-of=huber_c]")).not_to_have_class(containing("unmet"))
    tab.fits()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.path().read_text() == text.input_value()
    text.fill('model_type = "llama"')
    search.fill("")
    expect(page.locator("#fields")).to_have_attribute("data-training", "chats")
    expect(page.locator("[data-key=train_data]")).to_have_count(1)
    page.locator("#pretrains").check()
    expect(page.locator("[data-key=data_dir]")).to_have_count(1)


@in_browser
def test_an_empty_form_is_calm_keeps_its_draft_and_has_the_start_in_sight(tab: Tab, size: str) -> None:
    page = tab.page
    tab.open("/new")
    expect(page.locator("#against")).to_have_text("Choose a base model and a dataset to begin")
    expect(page.locator("#start")).to_be_in_viewport(ratio=1)
    assert page.locator("[aria-invalid=true]").count() == 0
    page.locator("#start").click()
    expect(page.locator("#message")).to_contain_text("dataset_config: is required; fill it in")
    expect(page.locator("[data-of=dataset_config] .said")).to_have_text("is required")
    page.locator("[data-key=network_dim]").fill("5")
    page.locator("[data-key=sample_prompts]").fill("a hat")
    expect(page.locator("#text")).to_have_value(
        '[network]\nnetwork_dim = 5\n\n[sampling]\nsample_prompts = ["a hat"]\n'
    )
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_role("link", name="New run").first.click()
    expect(page.locator("[data-key=network_dim]")).to_have_value("5")
    expect(page.locator("[data-key=sample_prompts]")).to_have_value("a hat")
    page.get_by_role("button", name="Clear all").click()
    expect(page.locator("[data-key=network_dim]")).to_have_value("")
    tab.open("/data?dataset=assets/demo_dataset/dataset.toml")
    page.get_by_role("link", name="Train on this").click()
    expect(page.locator("[data-key=dataset_config]")).to_have_value(re.compile("assets/demo_dataset/dataset.toml"))
    tab.fits()


@in_browser
def test_a_configuration_of_kohyas_is_dropped_and_its_table_shown(tab: Tab, server: Server) -> None:
    page = tab.page
    tab.open("/new")
    script = (
        "accelerate launch flux_train_network.py --pretrained_model_name_or_path assets/tiny-flux --network_module "
    )
    script += "networks.lora_flux --network_dim 8 --dataset_config assets/demo_dataset/dataset.toml --xformers"
    page.get_by_role("button", name="From another trainer").click()
    page.locator("input[name=kohya]").set_input_files(
        {"name": "my train.sh", "mimeType": "text/plain", "buffer": script.encode()}
    )
    page.get_by_role("button", name="Translate").click()
    expect(page.locator("#migrate pre")).to_contain_text("xformers")
    page.get_by_role("link", name="Open it in the form").click()
    expect(page.locator("[data-key=network_dim]")).to_have_value("8")
    expect(page.locator("[data-key=save_format]")).to_have_value("kohya")
    assert (server.output / "my_train/config.toml").is_file()


def test_settings_of_other_programs_are_translated_and_name_no_file_outside(site: Site, tmp_path: Path) -> None:
    """The keys are written as JSON may write them, with escapes."""
    for name, text in {
        "a.json": '{"model_type": "FLUX_DEV_1", "training_method": "LORA", "concept_file_n\\u0061me": "%s"}',
        "a.toml": 'model_family = "flux"\n"data_backend_\\u0063onfig" = "%s"\n',
        "a.env": "export MODEL_FAMILY=flux\nexport DATALOADER_CONFIG=%s\n",
    }.items():
        _refuse_kohyas(site, text % (tmp_path / "here.json"), name)
        with pytest.raises(UserError, match="/etc/hosts: lies outside"):
            _refuse_kohyas(site, text % "/etc/hosts", name)


@in_browser
def test_memory_and_dataset_are_looked_at_before_the_start(tab: Tab, server: Server) -> None:
    page = tab.page
    tab.open("/new?config=configs/demo.toml")
    expect(page.locator("#against")).to_have_text("Complete: the trainer takes it")
    page.locator("#card").fill("24")
    expect(page.locator("#against")).to_have_text("Complete: the trainer takes it")
    page.get_by_role("button", name="Count the memory").click()
    expect(page.locator("#memory")).to_contain_text(re.compile("begun just now: two steps of the run"))
    page.get_by_role("button", name="Look the dataset over").click()
    expect(page.locator("#dataset pre")).to_contain_text("16 images, nothing found")
    expect(page.locator("#memory b").first).to_have_text(re.compile(r"Peak 0\.\d\d GiB: fits on a card of 24 GB"))
    plan = next(job for job in Jobs(server.output / ".tandem").all() if job.kind == "memory")
    peak = json.loads((plan.folder / "result.json").read_text())["peak"] / 2**30
    expect(page.locator("#memory")).to_contain_text(f"Peak {peak:.2f} GiB")
    assert page.locator("#data").get_attribute("href") == "/data?dataset=assets%2Fdemo_dataset%2Fdataset.toml"


@pytest.mark.parametrize("place", ["[general]", "[[datasets]]", "[[datasets.subsets]]"])
def test_a_suggestion_takes_the_trigger_word_of_the_dataset_where_the_form_has_none(
    site: Site, tmp_path: Path, place: str
) -> None:
    dataset = write_dataset(tmp_path / "data")
    text = dataset.read_text()
    line = f'{place}\ntrigger_word = "ohwx"'
    dataset.write_text(text.replace(place, line, 1) if place in text else f"{line}\n{text}")
    model = tiny_flux_pipeline(tmp_path / "flux")
    form = {"text": f'dataset_config = "{dataset}"\n{MODEL} = "{model}"\n', "kind": "subject", "class_word": "box"}
    for more, word in (("", "ohwx"), ('trigger_word = "zorbo"\n', "zorbo")):
        words, _ = _suggestion(site, FormData(form | {"text": form["text"] + more}))
        assert f"--trigger_word={word}" in words


@in_browser
def test_settings_are_suggested_for_the_forms_model_and_dataset_and_go_into_the_form(tab: Tab, size: str) -> None:
    page = tab.page
    tab.open("/new")
    page.get_by_text("Suggest settings").click()
    suggest = page.get_by_role("button", name="Suggest", exact=True)
    suggest.click()
    expect(page.locator("#message")).to_contain_text("dataset_config: is needed for this; fill it in")
    said = {"pretrained_model_name_or_path": "assets/tiny-flux", "trigger_word": "zorbo",
            "dataset_config": "assets/demo_dataset/dataset.toml", "output_name": "mine"}  # fmt: skip
    for key, value in said.items():
        page.locator(f"[data-key={key}]").fill(value)
    suggest.click()
    expect(page.locator("#message")).to_contain_text("What it is: is needed for a subject")
    page.locator("[name=class_word]").fill("creature")
    suggest.click()  # without a card on this machine: for the CPU
    page.locator("#suggest").get_by_role("button", name="Put into the form").click()
    tab.fits()
    expect(page.locator("[data-key=preserve_class]")).to_have_value("creature")
    expect(page.locator("[data-key=sample_prompts]")).to_have_value(containing("zorbo creature on a beach --w 128"))
    for key, value in said.items():
        expect(page.locator(f"[data-key={key}]")).to_have_value(value)
    # output_dir is left as it is by default, the folder of all runs, which a start refuses
    page.locator("#problems").get_by_role("button", name="Take output/mine").click()
    expect(page.locator("#against")).to_have_text("Complete: the trainer takes it")
    text = page.locator("#text").input_value()
    assert "sample_every_n_steps = 250" in text
    assert ".tandem" not in text
    assert not re.search("dataset_args|prompts.txt", text)
    assert text.count("output_dir") == text.count('output_dir = "output/mine"') == 1
