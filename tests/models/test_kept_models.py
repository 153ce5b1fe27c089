"""Models as people keep them: prefixes, folders in part, other precisions, parts from elsewhere, folders of the hub's
cache. Whatever the form, what is loaded is the model that diffusers wrote; what is not used is named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from library.config.model_layouts import snapshot_of
from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family import Family
from library.models.family_by_name import model_family, with_transformer
from library.models.hub import find_model
from library.models.inspection import weight_sets
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import Recipe
from library.safetensors_io import weight_files
from networks.files.base import find_modules, open_base
from networks.merging.merge import LoraSource, merge_loras
from tests.hub_server import Hub, files_of, serving
from tests.models.claims import assert_same_model
from tests.models.test_hub import find
from tests.runs import ROOT
from tests.targets import FLUX_KEYS, FLUX_TARGETS
from tests.tiny import SingleFiles, bfl_state_dict, save_single_files
from tools.inspect_model import inspect

FLUX = ROOT / "assets/tiny-flux"
PREFIXES = ("diffusion_model.", "transformer.", "model.", "model.diffusion_model.", "module.")
PARTS = {"ae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"}
TOKENIZERS = {"clip_l_tokenizer": str(FLUX / "tokenizer"), "t5xxl_tokenizer": str(FLUX / "tokenizer_2")}


def family(path: Path, **parts: object) -> Family:
    return model_family(ModelConfig(pretrained_model_name_or_path=str(path), **parts))  # type: ignore[arg-type]


@pytest.fixture
def flux(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FLUX, tmp_path / "flux"))


@pytest.fixture
def files(flux: Path, tmp_path: Path) -> SingleFiles:
    return save_single_files(flux, tmp_path / "files")


def written(network: nn.Module | dict[str, Tensor], path: Path, prefix: str = "", **more: Tensor) -> Path:
    state = network if isinstance(network, dict) else network.state_dict()
    save_file({prefix + name: tensor.contiguous() for name, tensor in state.items()} | more, path)
    return path


@pytest.mark.parametrize("names", ["bfl", "diffusers"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_transformer_below_any_known_prefix_is_read_merged_shown_and_quantised_alike(
    prefix: str, names: str, flux: Path, tmp_path: Path
) -> None:
    state = load_file(flux / "transformer/diffusion_pytorch_model.safetensors")
    named = bfl_state_dict(state) if names == "bfl" else state
    file = written(named, tmp_path / "model.safetensors", prefix, **{"ema.decay": torch.ones(1)})
    read = family(file, **{option: str(flux) for option in PARTS}, **TOKENIZERS)
    loaded = read.load_transformer(torch.float32).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name].float()) for name in state)
    assert [
        line for line in read.unused_tensors() if "1 tensors are not the transformer's and not used (ema.decay)" in line
    ]
    (finding,) = inspect(file)
    assert any(each.architecture.startswith("FLUX.1 transformer") for each in finding.components)
    plain = find_modules(WeightFiles(written(named, tmp_path / "plain.safetensors")), FLUX_KEYS, "flux")
    placed = find_modules(WeightFiles(file), FLUX_KEYS, "flux")
    assert placed == {name: replace(place, tensor=prefix + place.tensor) for name, place in plain.items()}
    layers = [place.tensor.removesuffix(".weight") for place in plain.values()]
    assert [Recipe().excluded_as(prefix + name) for name in layers] == [Recipe().excluded_as(name) for name in layers]


def test_a_transformers_folder_alone_takes_its_parts_from_the_options_or_from_the_pipeline_around_it(
    flux: Path, files: SingleFiles, tmp_path: Path
) -> None:
    whole = family(flux)
    assert_same_model(family(flux / "transformer"), whole, ["a fox"])
    alone = Path(shutil.move(flux / "transformer", tmp_path / "downloaded"))
    given: dict[str, object] = {
        "ae": str(files.ae),
        "clip_l": str(files.clip_l),
        "t5xxl": str(files.t5xxl),
    } | TOKENIZERS
    one = family(alone, **given)
    assert one.files.transformer == alone
    with pytest.raises(UserError, match="a transformer folder needs t5xxl beside it; set t5xxl to t5xxl_fp16"):
        family(alone, **(given | {"t5xxl": None}))
    part = Path(
        shutil.copytree(alone, tmp_path / "incomplete" / "transformer")
    )  # hf download --include "transformer/*"
    for each in (one, family(part.parent, **given)):
        loaded = each.load_transformer(torch.float32).state_dict()
        expected = load_file(alone / "diffusion_pytorch_model.safetensors")
        assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in expected.items())
    config = with_transformer(ModelConfig(pretrained_model_name_or_path=str(FLUX)), alone)
    assert model_family(config).files.transformer == alone
    assert open_base(alone).weights_path == alone


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_in_fp16_alone_is_read_by_its_file_or_its_index(shards: int, flux: Path, tmp_path: Path) -> None:
    folder, transformer = flux / "transformer", FluxTransformer2DModel.from_pretrained(flux / "transformer").half()
    plain = folder / "diffusion_pytorch_model.safetensors"
    plain.unlink()
    size = sum(each.numel() * 2 for each in transformer.state_dict().values())
    transformer.save_pretrained(folder, variant="fp16", max_shard_size=size // shards + 1)  # diffusers' own names
    assert len(weight_files(folder)) >= shards
    assert all(".fp16" in file.name for file in weight_files(folder))
    loaded = family(flux).load_transformer(torch.float16).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in transformer.state_dict().items())
    assert len(weight_sets(flux)) == 4
    stem = "transformer.transformer_blocks.0.attn.to_q"
    pair = {f"{stem}.lora_A.weight": torch.ones(1, 160), f"{stem}.lora_B.weight": torch.ones(160, 1)}
    save_file(pair, tmp_path / "lora.safetensors")
    merge_loras(flux, [LoraSource(tmp_path / "lora.safetensors", 1.0)], tmp_path / "merged", FLUX_TARGETS)
    again = FluxTransformer2DModel.from_pretrained(tmp_path / "merged/transformer", variant="fp16").state_dict()
    changed = {name for name, each in again.items() if not torch.equal(each.half(), transformer.state_dict()[name])}
    assert changed == {"transformer_blocks.0.attn.to_q.weight"}
    save_file({"x": torch.ones(1)}, plain)  # the plain file is the model where there is one
    assert weight_files(folder) == [plain]


def test_several_forms_without_the_plain_one_are_not_guessed_between(tmp_path: Path) -> None:
    for variant in ("fp16", "bf16"):
        save_file({"x": torch.ones(1)}, tmp_path / f"model.{variant}.safetensors")
    with pytest.raises(UserError, match="2 safetensors files and no index; give one of the files"):
        weight_files(tmp_path)


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
def test_an_autoencoder_below_a_prefix_or_beside_others_is_read(
    prefix: str, files: SingleFiles, tmp_path: Path
) -> None:
    more = {"loss.logvar": torch.zeros(1)} | ({"cond_stage_model.x": torch.zeros(1)} if prefix else {})
    file = written(load_file(files.ae), tmp_path / "vae.safetensors", prefix, **more)
    config = files.model_config(ae=str(file))
    assert_same_model(model_family(config), model_family(files.model_config()), ["a fox"])
    (line,) = model_family(config).unused_tensors()
    assert line.startswith(f"{file}: {len(more)} tensors are not the VAE's and not used (")
    assert all(name in line for name in more)
    missing = {k: v for k, v in load_file(file).items() if "mid.block_1.conv1.weight" not in k}
    save_file(missing | {f"{prefix}decoder.other.weight": torch.ones(1)}, file)
    with pytest.raises(UserError, match="missing; the file is incomplete or of another architecture"):
        model_family(config).load_image_encoder(torch.float32).encode(torch.zeros(1, 3, 32, 32))


def test_every_part_may_be_a_name_on_the_hub_and_brings_no_other_part(
    flux: Path, files: SingleFiles, tmp_path: Path
) -> None:
    half = Path(shutil.copytree(flux, tmp_path / "half"))
    (half / "vae/diffusion_pytorch_model.safetensors").rename(half / "vae/diffusion_pytorch_model.fp16.safetensors")
    with serving(Hub({"acme/flux": flux, "acme/half": half, "acme/vae": flux / "vae"})) as hub:
        for part in PARTS.values():
            hub.fetched.clear()
            found, _ = find(hub, tmp_path / part, "acme/flux", f", None, (), {part!r}")
            assert {name.partition("/")[0] for name in hub.fetched} == {part, "model_index.json"}
            assert files_of(Path(found) / part).keys() == files_of(flux / part).keys()
        for name in ("acme/half", "acme/vae"):
            found, _ = find(hub, tmp_path / "vaes", name, ", None, (), 'vae'")
            folder = Path(found) / "vae" if name == "acme/half" else Path(found)
            assert_same_model(
                model_family(files.model_config(ae=str(folder))),
                model_family(files.model_config(ae=str(flux))),
                ["a fox"],
            )
        code = (
            "from library.config.schema import ModelConfig; from library.models.family_by_name import model_family; "
            f"print(model_family(ModelConfig(pretrained_model_name_or_path={str(files.transformer)!r}, "
            "ae='acme/flux', clip_l='acme/flux', t5xxl='acme/flux', "
            f"**{TOKENIZERS!r})).files.vae)"
        )
        _, _ = find(hub, tmp_path / "all", "acme/vae", before=code)
    assert (tmp_path / "all/hub/models--acme--flux").is_dir()


def test_a_folder_of_the_hubs_cache_stands_for_the_snapshot_that_main_names(flux: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--acme--flux"
    for name in ("a" * 40, "b" * 40):
        shutil.copytree(flux, cache / "snapshots" / name)
    meant = cache / "snapshots" / ("b" * 40)
    for folder in (cache, cache / "snapshots"):
        with pytest.raises(
            UserError, match=r"models--acme--flux.*: no snapshot that refs/main names; give one of .*snaps"
        ):
            find_model(folder, "--model")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("b" * 40)
    assert find_model(cache, "--model") == find_model(cache / "snapshots", "--model") == meant
    assert family(cache).files.transformer == meant / "transformer"
    assert family(flux, ae=str(cache)).files.vae == meant / "vae"
    assert [each.name for each in weight_sets(cache)] == [each.name for each in weight_sets(flux)]
    shutil.rmtree(meant)
    with pytest.raises(UserError, match="refs/main"):
        find_model(cache, "--model")
    (cache / "refs/main").unlink()
    assert find_model(cache, "--model") == cache / "snapshots" / ("a" * 40)
    assert snapshot_of(flux) == flux
