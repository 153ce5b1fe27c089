"""Where FLUX's parts lie, and what is said when they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers import T5TokenizerFast

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family_by_name import model_family
from library.models.text import load_tokenizer
from tests.tiny import SingleFiles, save_single_files, tiny_flux_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux_pipeline(tmp_path_factory.mktemp("flux") / "pipeline")


@pytest.fixture(scope="module")
def files(folder: Path) -> SingleFiles:
    return save_single_files(folder, folder.parent / "files")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder to spoil."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def refuses(match: str, path: Path, **options: object) -> None:
    with pytest.raises(UserError, match=match) as caught:
        model_family(ModelConfig(pretrained_model_name_or_path=str(path), **options))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_model_is_named(tmp_path: Path) -> None:
    refuses(r"pretrained_model_name_or_path '.*nowhere' does not exist; give a local", tmp_path / "nowhere")


def test_folder_that_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    refuses("no model_index.json, so no diffusers pipeline", tmp_path)


def test_folder_of_another_pipeline_is_refused_by_its_class(copy: Path) -> None:
    rewrite(copy / "model_index.json", _class_name="StableDiffusionXLPipeline")
    shutil.rmtree(copy / "transformer")
    refuses("a StableDiffusionXLPipeline without a transformer folder; give a FLUX.1 folder", copy)


def test_broken_index_is_refused(copy: Path) -> None:
    (copy / "model_index.json").write_text("{")
    refuses(r"model_index\.json: not valid JSON", copy)


def test_folder_with_another_transformer_is_refused(copy: Path) -> None:
    rewrite(copy / "transformer" / "config.json", _class_name="SD3Transformer2DModel")
    refuses("'SD3Transformer2DModel', not FluxTransformer2DModel", copy)


def test_folder_without_transformer_config_is_refused(copy: Path) -> None:
    (copy / "transformer" / "config.json").unlink()
    refuses(r"transformer/config\.json: no such file; the folder is no complete model, download it again", copy)


def test_folder_with_broken_config_is_refused(copy: Path) -> None:
    (copy / "vae" / "config.json").write_text("{")
    refuses(r"vae/config\.json: not valid JSON", copy)


def test_flux_variant_with_a_conditioning_image_is_refused(copy: Path) -> None:
    rewrite(copy / "transformer" / "config.json", in_channels=128, out_channels=64)
    refuses("takes 128 channels and returns 64, as FLUX.1 Depth and Canny do", copy)


def test_folder_with_another_autoencoder_is_refused(copy: Path) -> None:
    rewrite(copy / "vae" / "config.json", _class_name="AutoencoderTiny")
    refuses("'AutoencoderTiny', not AutoencoderKL; give FLUX's VAE", copy)


@pytest.mark.parametrize(
    ("option", "published"),
    [("ae", "ae.safetensors"), ("clip_l", "clip_l.safetensors"), ("t5xxl", "t5xxl_fp16.safetensors")],
)
def test_single_file_asks_for_what_must_lie_beside_it(files: SingleFiles, option: str, published: str) -> None:
    with pytest.raises(UserError, match=f"needs {option} beside it; set {option} to {published}"):
        model_family(files.model_config(**{option: None}))
    with pytest.raises(UserError, match=rf"{option} 'gone\.safetensors' does not exist"):
        model_family(files.model_config(**{option: "gone.safetensors"}))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("ae", r"not FLUX's VAE \(no encoder\.conv_in\.weight\); give ae\.safetensors"),
        ("clip_l", r"not a CLIP text encoder .*; give clip_l\.safetensors as clip_l"),
        ("t5xxl", r"not a T5 encoder .*; give t5xxl_fp16\.safetensors as t5xxl"),
    ],
)
def test_files_in_each_others_place_are_noticed(files: SingleFiles, option: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_family(files.model_config(**{option: str(files.transformer)}))


def test_autoencoder_of_stable_diffusion_is_refused(files: SingleFiles, tmp_path: Path) -> None:
    state = load_file(files.ae)
    state["decoder.conv_in.weight"] = state["decoder.conv_in.weight"][:, :4].contiguous()
    save_file(state, tmp_path / "sd.safetensors")
    with pytest.raises(UserError, match="4 latent channels, FLUX's VAE has 16"):
        model_family(files.model_config(ae=str(tmp_path / "sd.safetensors")))


def test_autoencoder_of_qwen_image_with_diffusers_names_is_refused(files: SingleFiles, tmp_path: Path) -> None:
    state = {"encoder.conv_in": (96, 3), "decoder.conv_in": (384, 16), "encoder.down_blocks.0.conv1": (96, 96)}
    path = tmp_path / "qwen.safetensors"
    save_file({f"{name}.weight": torch.zeros(*shape, 3, 3, 3) for name, shape in state.items()}, path)
    lacking = r"not FLUX's VAE \(no encoder\.down_blocks\.0\.resnets\.0\.conv1\.weight\)"
    with pytest.raises(UserError, match=lacking):
        model_family(files.model_config(ae=str(path)))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight",
            "a LoRA, not a base model; give it as network_w",
        ),
        ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "a LoRA, not a base model"),
        (
            "model.diffusion_model.input_blocks.0.0.weight",
            "a Stable Diffusion or SDXL checkpoint, not FLUX.1",
        ),
        ("distilled_guidance_layer.in_proj.weight", "a Chroma checkpoint, not FLUX.1"),
        ("model.diffusion_model.joint_blocks.0.x", "a Stable Diffusion 3 checkpoint, not FLUX.1"),
        ("transformer_blocks.0.img_mod.1.weight", "a Qwen-Image transformer, not FLUX.1"),
        ("something.else", "of no known layout"),
    ],
)
def test_other_checkpoints_are_recognised(files: SingleFiles, tmp_path: Path, key: str, message: str) -> None:
    save_file({key: torch.ones(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=message):
        model_family(files.model_config(pretrained_model_name_or_path=str(tmp_path / "other.safetensors")))


def test_a_scale_whose_weight_is_not_fp8_is_refused_by_name(files: SingleFiles, tmp_path: Path) -> None:
    state = load_file(files.comfy_transformer)
    state["model.diffusion_model.double_blocks.0.img_attn.qkv.scale_weight"] = torch.ones(1)
    save_file(state, tmp_path / "scaled.safetensors")
    with pytest.raises(UserError, match=r"'model\.diffusion_model\..*scale_weight' is a scale without a"):
        model_family(files.model_config(pretrained_model_name_or_path=str(tmp_path / "scaled.safetensors")))


def test_plain_fp8_transformer_keeps_its_codes(files: SingleFiles, tmp_path: Path) -> None:
    state = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(files.transformer).items()}
    save_file(state, tmp_path / "fp8.safetensors")
    family = model_family(files.model_config(pretrained_model_name_or_path=str(tmp_path / "fp8.safetensors")))
    loaded = family.load_transformer(torch.bfloat16).state_dict()
    assert loaded["x_embedder.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(loaded["x_embedder.weight"].view(torch.uint8), state["img_in.weight"].view(torch.uint8))
    assert torch.equal(loaded["x_embedder.bias"], state["img_in.bias"].bfloat16())


def test_all_in_one_checkpoint_is_read_for_its_transformer(files: SingleFiles, tmp_path: Path) -> None:
    others = {"vae.encoder.conv_in.weight": torch.ones(1), "text_encoders.clip_l.scaled_fp8": torch.ones(1)}
    save_file(load_file(files.comfy_transformer) | others, tmp_path / "all.safetensors")
    family = model_family(files.model_config(pretrained_model_name_or_path=str(tmp_path / "all.safetensors")))
    loaded, alone = (
        f.load_transformer(torch.float32).state_dict() for f in (family, model_family(files.model_config()))
    )
    assert loaded.keys() == alone.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in alone.items())


def test_transformer_file_in_diffusers_layout_is_read(files: SingleFiles, folder: Path) -> None:
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    family = model_family(files.model_config(pretrained_model_name_or_path=str(path)))
    state = load_file(path)
    loaded = family.load_transformer(torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_incomplete_transformer_file_is_named_on_loading(files: SingleFiles, tmp_path: Path) -> None:
    state = load_file(files.transformer)
    del state["single_blocks.1.linear2.weight"]
    save_file(state, tmp_path / "less.safetensors")
    family = model_family(files.model_config(pretrained_model_name_or_path=str(tmp_path / "less.safetensors")))
    with pytest.raises(UserError, match=r"tensor 'single_blocks\.1\.linear2\.weight' is missing"):
        family.load_transformer(torch.float32)


def test_unknown_tensor_in_transformer_file_is_named_on_loading(files: SingleFiles, tmp_path: Path) -> None:
    save_file(load_file(files.transformer) | {"controlnet.x": torch.ones(1)}, tmp_path / "more.safetensors")
    family = model_family(files.model_config(pretrained_model_name_or_path=str(tmp_path / "more.safetensors")))
    with pytest.raises(UserError, match=r"tensor 'controlnet\.x' is unknown to this architecture"):
        family.load_transformer(torch.float32)


def test_options_replace_parts_of_a_folder(folder: Path, files: SingleFiles) -> None:
    config = ModelConfig(
        pretrained_model_name_or_path=str(folder),
        ae=str(files.ae),
        clip_l=str(folder),
        t5xxl=str(files.t5xxl),
    )
    family, plain = model_family(config), model_family(ModelConfig(pretrained_model_name_or_path=str(folder)))
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    encoders = [each.load_image_encoder(torch.float32) for each in (family, plain)]
    assert torch.equal(encoders[0].encode(pixels), encoders[1].encode(pixels))
    rows = [each.load_text_encoder(torch.float32).encode(["a"])[0] for each in (family, plain)]
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])


@pytest.mark.parametrize("option", ["clip_l_tokenizer", "t5xxl_tokenizer"])
def test_tokenizer_that_cannot_be_had_names_its_option(
    files: SingleFiles, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    family = model_family(files.model_config(**{option: "nobody/nothing"}))
    with pytest.raises(UserError, match=f"{option}: tokenizer 'nobody/nothing' is neither .*point {option} to a local"):
        family.load_text_encoder(torch.float32)


def test_tokenizer_is_downloaded_where_the_cache_has_other_files_of_the_model_alone(
    folder: Path, files: SingleFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        return str(tmp_path if local_files_only else folder / "tokenizer_2")

    monkeypatch.setattr("library.models.text.snapshot_download", snapshot)
    family = model_family(files.model_config(t5xxl_tokenizer="someone/t5"))
    assert family.load_text_encoder(torch.float32).encode(["a"])


def test_tokenizer_folder_without_a_tokenizer_is_named(files: SingleFiles, tmp_path: Path) -> None:
    family = model_family(files.model_config(clip_l_tokenizer=str(tmp_path)))
    with pytest.raises(UserError, match=r"clip_l_tokenizer: .* holds no tokenizer \(none of tokenizer\.json"):
        family.load_text_encoder(torch.float32)


def test_broken_tokenizer_is_named(folder: Path, files: SingleFiles, tmp_path: Path) -> None:
    shutil.copytree(folder / "tokenizer_2", tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{")
    family = model_family(files.model_config(t5xxl_tokenizer=str(tmp_path / "broken")))
    with pytest.raises(UserError, match=r"t5xxl_tokenizer: .* holds no readable tokenizer; download it again"):
        family.load_text_encoder(torch.float32)


def test_t5_tokenizer_is_read_from_the_published_sentencepiece_model(
    files: SingleFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """google/t5-v1_1-xxl holds spiece.model and no tokenizer.json."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a red ball\nhello world of tiny pictures\n" * 20)
    Path("t5").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        "--input=text.txt --model_prefix=t5/spiece --vocab_size=60 --hard_vocab_limit=false "
        "--pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1 --minloglevel=2"
    )
    tokenizer = load_tokenizer(T5TokenizerFast.from_pretrained, "t5", "t5xxl_tokenizer")
    pieces = sentencepiece.SentencePieceProcessor(model_file="t5/spiece.model").encode("a red ball")
    assert tokenizer("a red ball").input_ids == [*pieces, 1]


def test_fp16_keeps_t5s_output_matrices_in_fp32(files: SingleFiles) -> None:
    encoder = model_family(files.model_config()).load_text_encoder(torch.float16)
    encoder.encode(["a red ball"])
    dtypes = {name: p.dtype for name, p in encoder._model.text_encoder_2.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {name for name in dtypes if name.endswith(".wo.weight")}
    encoder.release()
    assert encoder._model is None
