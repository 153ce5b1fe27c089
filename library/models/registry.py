"""The model families, a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family import Family
from library.models.flux.spec import FluxFamily, FluxFillFamily, FluxKontextFamily
from library.models.qwen_image.spec import QwenImageEditFamily, QwenImageEditPlusFamily, QwenImageFamily
from library.models.z_image.spec import ZImageFamily

FAMILIES: Mapping[str, Callable[[ModelConfig], Family]] = {
    "flux": FluxFamily,
    "flux_fill": FluxFillFamily,
    "flux_kontext": FluxKontextFamily,
    "qwen_image": QwenImageFamily,
    "qwen_image_edit": QwenImageEditFamily,
    "qwen_image_edit_plus": QwenImageEditPlusFamily,
    "z_image": ZImageFamily,
}


def model_family(config: ModelConfig) -> Family:
    """Return the family that ``config`` names, its paths checked and nothing loaded.

    Raises:
        UserError: a path is missing or leads to another kind of model.
    """
    return FAMILIES[config.model_type](config)


def with_transformer(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the config of the model in ``path``: a pipeline, or a transformer beside ``config``'s other parts.

    For a second model of the same family, such as the fp8 file of a bf16 folder.

    Raises:
        UserError: a folder that is no pipeline holds no weights, or several files of them.
    """
    whole = Path(config.pretrained_model_name_or_path).expanduser()
    if path.is_dir() and not (path / "model_index.json").is_file():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise UserError(f"{path}: {len(files)} safetensors files; give one file, or a whole pipeline folder")
        path = files[0]
    values = {"pretrained_model_name_or_path": str(path)}
    if path.is_file() and whole.is_dir():
        flux = config.model_type.startswith("flux")
        parts = ("ae", "clip_l", "t5xxl") if flux else ("vae", "text_encoder")
        values |= {name: str(whole) for name in parts if getattr(config, name) is None}
        two = {"clip_l_tokenizer": whole / "tokenizer", "t5xxl_tokenizer": whole / "tokenizer_2"}
        tokenizers = two if flux else {"qwen_tokenizer": whole / "tokenizer"}
        values |= {name: str(folder) for name, folder in tokenizers.items() if folder.is_dir()}
    return config.model_copy(update=values)
