"""Where FLUX's parts lie, and what is said when they do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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


def refuses(match: str, path: Path, **options: object) -> None:
    with pytest.raises(UserError, match=match) as caught:
        model_family(ModelConfig(pretrained_model_name_or_path=str(path), **options))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folders_that_are_no_flux_are_refused(folder: Path, tmp_path: Path) -> None:
    refuses(r"pretrained_model_name_or_path '.*nowhere' does not exist; give a local", tmp_path / "nowhere")
    refuses("no model_index.json, so no diffusers pipeline", tmp_path)
    no_index = "a StableDiffusionXLPipeline without a transformer folder; give a FLUX.1 folder"
    missing = r"transformer/config\.json: no such file; the folder is no complete model, download it again"
    config, vae = "transformer/config.json", "vae/config.json"
    other, tiny = {"_class_name": "SD3Transformer2DModel"}, {"_class_name": "AutoencoderTiny"}
    cases: list[tuple[str, str, Any]] = [  # the message; the file that is spoilt, and how
        (r"model_index\.json: not valid JSON", "model_index.json", "{"),
        ("'SD3Transformer2DModel', not FluxTransformer2DModel", config, other),
        (missing, config, None),
        (r"vae/config\.json: not valid JSON", vae, "{"),
        ("takes 128 channels and returns 64, as FLUX.1 De", config, {"in_channels": 128, "out_channels": 64}),
        ("'AutoencoderTiny', not AutoencoderKL; give FLUX's VAE", vae, tiny),
    ]
    for number, (message, name, change) in enumerate(cases):
        copy = Path(shutil.copytree(folder, tmp_path / f"copy{number}"))
        if change is None:
            (copy / name).unlink()
        elif isinstance(change, str):
            (copy / name).write_text(change)
        else:
            rewrite(copy / name, **change)
        refuses(message, copy)
    rewrite(copy / "model_index.json", _class_name="StableDiffusionXLPipeline")
    shutil.rmtree(copy / "transformer")
    refuses(no_index, copy)


def test_parts_that_are_missing_or_in_each_others_place_are_named(files: SingleFiles, tmp_path: Path) -> None:
    published = {"ae": "ae.safetensors", "clip_l": "clip_l.safetensors", "t5xxl": "t5xxl_fp16.safetensors"}
    small = load_file(files.ae)
    small["decoder.conv_in.weight"] = small["decoder.conv_in.weight"][:, :4].contiguous()
    save_file(small, tmp_path / "sd.safetensors")
    qwen = {"encoder.conv_in": (96, 3), "decoder.conv_in": (384, 16), "encoder.down_blocks.0.conv1": (96, 96)}
    tensors = {f"{name}.weight": torch.zeros(*shape, 3, 3, 3) for name, shape in qwen.items()}
    save_file(tensors, tmp_path / "qwen.safetensors")
    cases = [
        (option, None, f"needs {option} beside it; set {option} to {named}") for option, named in published.items()
    ]
    cases += [(option, "gone.safetensors", rf"{option} 'gone\.safetensors' does not exist") for option in published]
    cases += [
        ("ae", str(files.transformer), r"not FLUX's VAE \(no encoder\.conv_in\.weight\); give ae\.safetensors"),
        ("clip_l", str(files.transformer), r"not a CLIP text encoder .*; give clip_l\.safetensors as clip_l"),
        ("t5xxl", str(files.transformer), r"not a T5 encoder .*; give t5xxl_fp16\.safetensors as t5xxl"),
        ("ae", str(tmp_path / "sd.safetensors"), "4 latent channels, FLUX's VAE has 16"),
        ("ae", str(tmp_path / "qwen.safetensors"), r"not FLUX's VAE \(no encoder\.down_blocks\.0\.resnets\.0\.conv1"),
    ]
    for option, value, message in cases:
        with pytest.raises(UserError, match=message):
            model_family(files.model_config(**{option: value}))


def test_other_checkpoints_are_recognised(files: SingleFiles, tmp_path: Path) -> None:
    cases = {
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": "a LoRA, not a base model; give it as network_w",
        "transformer.transformer_blocks.0.attn.to_q.lora_A.weight": "a LoRA, not a base model",
        "model.diffusion_model.input_blocks.0.0.weight": "a Stable Diffusion or SDXL checkpoint, not FLUX.1",
        "distilled_guidance_layer.in_proj.weight": "a Chroma checkpoint, not FLUX.1",
        "model.diffusion_model.joint_blocks.0.x": "a Stable Diffusion 3 checkpoint, not FLUX.1",
        "transformer_blocks.0.img_mod.1.weight": "a Qwen-Image transformer, not FLUX.1",
        "something.else": "of no known layout",
    }
    path = tmp_path / "other.safetensors"
    for key, message in cases.items():
        save_file({key: torch.ones(2, 2)}, path)
        with pytest.raises(UserError, match=message):
            model_family(files.model_config(pretrained_model_name_or_path=str(path)))


def test_transformer_files_with_more_or_less_in_them(files: SingleFiles, folder: Path, tmp_path: Path) -> None:
    path, whole, comfy = tmp_path / "x.safetensors", load_file(files.transformer), load_file(files.comfy_transformer)

    def family(tensors: dict[str, torch.Tensor]) -> Any:
        save_file(tensors, path)
        return model_family(files.model_config(pretrained_model_name_or_path=str(path)))

    def is_alone(loaded: Any) -> bool:
        ours, alone = (each.load_transformer(torch.float32).state_dict() for each in (loaded, plain))
        return ours.keys() == alone.keys() and all(torch.equal(ours[name], each) for name, each in alone.items())

    plain = model_family(files.model_config())
    others = {"vae.encoder.conv_in.weight": torch.ones(1), "text_encoders.clip_l.scaled_fp8": torch.ones(1)}
    assert is_alone(family(comfy | others)), "of an all-in-one file the transformer"
    assert is_alone(family(load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")))
    lacking = {name: tensor for name, tensor in whole.items() if name != "single_blocks.1.linear2.weight"}
    for tensors, message in (
        (lacking, r"tensor 'single_blocks\.1\.linear2\.weight' is missing"),
        (whole | {"controlnet.x": torch.ones(1)}, r"tensor 'controlnet\.x' is unknown to this architecture"),
        (comfy | {"model.diffusion_model.double_blocks.0.img_attn.qkv.scale_weight": torch.ones(1)},
         r"'model\.diffusion_model\..*scale_weight' is a scale without a"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            family(tensors).load_transformer(torch.float32)


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


def test_tokenizers_that_cannot_be_had_or_read_name_their_option(
    folder: Path, files: SingleFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(folder / "tokenizer_2", tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{")
    absent = "{}: tokenizer 'nobody/nothing' is neither .*point {} to a local"
    for option, given, message in (
        ("clip_l_tokenizer", "nobody/nothing", absent),
        ("t5xxl_tokenizer", "nobody/nothing", absent),
        ("clip_l_tokenizer", str(tmp_path), r"{}: .* holds no tokenizer \(none of tokenizer\.json"),
        ("t5xxl_tokenizer", str(tmp_path / "broken"), "{}: .* holds no readable tokenizer; download it again"),
    ):
        with pytest.raises(UserError, match=message.format(option, option)):
            model_family(files.model_config(**{option: given})).load_text_encoder(torch.float32)


def test_tokenizer_is_downloaded_where_the_cache_has_other_files_of_the_model_alone(
    folder: Path, files: SingleFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        return str(tmp_path if local_files_only else folder / "tokenizer_2")

    monkeypatch.setattr("library.models.text.snapshot_download", snapshot)
    family = model_family(files.model_config(t5xxl_tokenizer="someone/t5"))
    assert family.load_text_encoder(torch.float32).encode(["a"])


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
