"""Captions by a vision language model of transformers: Qwen3-VL, Qwen2.5-VL, Gemma 3, LLaVA, Florence-2 and others.

The model is a name on the hub or a folder. Its weights are read from safetensors, and no Python of a repository is
run. The likeliest token is taken each time, so a caption follows from picture, prompt and model. Florence-2 knows
tasks instead of prompts; it gets the one for a description unless another of them is asked for.

transformers reads videos by torchvision, and asks for it before it loads a processor that knows videos too. Such a
processor is made of its two other parts here, as captions need no videos.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library.errors import UserError, counted, reason_of
from library.files import read_json
from library.models.hub import find_model

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

PROMPT = "Describe this picture in one plain sentence."
# Some that are known to do it -> memory in bf16, gigabytes: two bytes a weight, and what a picture takes.
CAPTIONERS = {"Qwen/Qwen3-VL-2B-Instruct": 6, "Qwen/Qwen3-VL-4B-Instruct": 11, "florence-community/Florence-2-large": 3}
_OTHER = f"choose another captioner, as {next(iter(CAPTIONERS))}"
_TASK, _TASKS = "<DETAILED_CAPTION>", ("<CAPTION>", "<DETAILED_CAPTION>", "<MORE_DETAILED_CAPTION>", "<OCR>")


class Captioner:
    """A loaded model; ``device`` and ``dtype``: where and in what it computes."""

    def __init__(self, model: str, device: torch.device, dtype: torch.dtype) -> None:
        """Load it; raises a UserError where it cannot caption, or cannot be loaded."""
        from transformers import AutoModelForImageTextToText, logging

        logging.set_verbosity_error()  # what transformers has to say of versions to come
        logging.disable_progress_bar()
        folder = find_model(model, "--model", is_pipeline=False)
        self._kind, self._device, self._dtype = _kind_of(folder, f"--model {model}"), device, dtype
        how: Any = {"trust_remote_code": False, "local_files_only": True}
        with _in_a_line(f"--model {model}: cannot be loaded"):
            self._processor = _load_processor(folder, how)
            how |= {"use_safetensors": True, "dtype": dtype, "device_map": {"": device}, "output_loading_info": True}
            self._model, found = AutoModelForImageTextToText.from_pretrained(folder, **how)
        if missing := sorted(found["missing_keys"]):
            lack = f"{counted(len(missing), 'weight')} of the model not in its files ({missing[0]})"
            raise UserError(f"--model {model}: {lack}; {_OTHER}")
        self._processor.tokenizer.padding_side = "left"
        self._model.generation_config.forced_eos_token_id = None  # it would hide that a text was cut

    def answers(self, asked: Sequence[tuple[Image, str]], most: int) -> list[tuple[str, bool]]:
        """Return the text for each picture and its prompt, and whether it was cut at ``most`` tokens."""
        import torch

        with _in_a_line("the model cannot caption"), torch.inference_mode():
            given = self._inputs(asked).to(self._device, self._dtype)
            made = self._model.generate(**given, max_new_tokens=most, do_sample=False, num_beams=1)
            made = made[:, 1 if self._model.config.is_encoder_decoder else given["input_ids"].shape[1] :]
            texts = self._processor.batch_decode(made, skip_special_tokens=True)
            ends = torch.as_tensor(self._model.generation_config.eos_token_id, device=made.device)
            is_cut = (~torch.isin(made, ends).any(dim=1)).tolist()
        return [(_plain(text), cut) for text, cut in zip(texts, is_cut, strict=True)]

    def _inputs(self, asked: Sequence[tuple[Image, str]]) -> Any:
        if self._kind == "florence2":
            tasks = [_TASK if prompt == PROMPT else prompt for _, prompt in asked]
            if strange := set(tasks).difference(_TASKS):
                raise UserError(f"prompt {strange.pop()!r}: Florence-2 knows only tasks: {', '.join(_TASKS)}")
            return self._processor(text=tasks, images=[one for one, _ in asked], padding=True, return_tensors="pt")
        contents = [[{"type": "image", "image": one}, {"type": "text", "text": prompt}] for one, prompt in asked]
        how: Any = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        chats = [[{"role": "user", "content": content}] for content in contents]
        return self._processor.apply_chat_template(chats, processor_kwargs={"padding": True}, **how)


def _plain(text: str) -> str:
    """Return an answer in one line, without what a model thought before it and what steers a terminal."""
    text = text.rpartition("</think>")[2]
    return " ".join("".join(c if c.isprintable() else " " for c in text.replace("\ufffd", "")).split())


def _kind_of(folder: Path, where: str) -> str:
    """Return the model_type of a model that reads pictures and writes text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as KINDS

    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    kind = str(config.get("model_type"))
    reasons = {
        "is a LoRA, no whole model": (folder / "adapter_config.json").is_file(),
        "is no folder of a transformers model, as it has no config.json": not config,
        "runs Python code of its own, which is never done here": kind not in KINDS and "auto_map" in config,
        f"{kind} is no model that reads pictures": kind not in KINDS,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        raise UserError(f"{where}: {reason}; {_OTHER}")
    return kind


def _load_processor(folder: Path, how: dict[str, Any]) -> Any:
    """Return a model's processor, without what reads videos where torchvision is not there."""
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    full = PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(folder, **how)), None)
    if full is None or is_torchvision_available() or "video_processor" not in full.get_attributes():
        return AutoProcessor.from_pretrained(folder, **how)

    class WithoutVideos(full):  # type: ignore[misc,valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    images, tokenizer = (each.from_pretrained(folder, **how) for each in (AutoImageProcessor, AutoTokenizer))
    parts = {"image_processor": images, "tokenizer": tokenizer}
    settings, _ = full.get_processor_dict(folder, **how)
    return WithoutVideos.from_args_and_dict([parts.get(name) for name in full.get_attributes()], settings)


@contextmanager
def _in_a_line(what: str) -> Iterator[None]:
    """Say what transformers and torch raise about a model in one line."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ImportError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UserError(f"{what} ({reason_of(error)}); {_OTHER}") from error
