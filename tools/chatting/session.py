"""A conversation with one of several language models: what both front ends, terminal and browser, are thin around.

:class:`ModelRegistry` holds the models and LoRAs there are; one model at a time is in memory, a LoRA comes and goes on
it. :class:`Session` is one person's conversation with its settings and choices; several share a registry, one answer at
a time.
"""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.model_types import LANGUAGE_MODEL_KINDS
from library.errors import UserError, did_you_mean
from library.gguf_header import has_language_model
from library.llm.chat_session import ChatSession
from library.llm.chat_templates import PromptTemplate, load_prompt_template
from library.llm.generation import SamplingSettings
from library.llm.tokenizers import load_tokenizer
from library.models.hub import find_model
from library.models.llm.files import open_lm
from library.models.llm.model import TransformerLM
from library.training.tasks.chat_lora import put_lora_on, template_of
from networks.adapters.base import AdapterLinear
from networks.merging.merge import LoraSource
from networks.network import AdapterNetwork
from tools.command import load_language_model, lora_source

ANOTHER_SEED = 7919  # from one try of an answer to the next; turns count theirs up by 1
_DEPTH = 3  # folders below --models_dir and --loras_dir that are looked into: train_llm.py writes output/NAME/NAME


@dataclass(frozen=True)
class Loading:
    """How models are loaded.

    Attributes:
        tokenizer: a path, or None for the one in the model's folder.
        dtype, fp8_scaled: as for ``tools/generate.py text``.
        chat_template: which template, or "auto".
    """

    tokenizer: str | None = None
    dtype: str | None = None
    fp8_scaled: bool = False
    chat_template: str = "auto"


class ModelRegistry:
    """What there is to talk to, and what of it is in memory.

    Attributes:
        models: name -> path. loras: name -> path, and the strength that it has at first.
        model, template: in memory; the template is the one that the LoRA was trained with, or the model's.
        model_name, lora_name: what they are; no LoRA is None.
    """

    model: TransformerLM
    template: PromptTemplate
    _own_template: PromptTemplate

    def __init__(self, models: dict[str, Path], loras: dict[str, LoraSource], loading: Loading) -> None:
        """Load the first model; raises a UserError if it cannot be, or if there is none."""
        if not models:
            raise UserError("no model to talk to; give --model FOLDER, or --models_dir with models below it")
        self.models, self.loras, self._loading = models, loras, loading
        self.model_name, self.lora_name, self._network = "", None, None
        self.use(next(iter(models)), None)

    lora_name: str | None
    _network: AdapterNetwork | None

    def use(self, model_name: str, lora_name: str | None, strength: float = 1.0) -> None:
        """Have a model in memory with a LoRA on it or none; what is there already stays, the base under a LoRA too.

        ``strength`` is the factor on the LoRA's update.

        Raises:
            UserError: no such name, or it cannot be loaded.
        """
        for kind, name, known in (("model", model_name, self.models), ("LoRA", lora_name, self.loras)):
            if name is not None and name not in known:
                choice = f"choose one of {', '.join(known)}" if known else "there is none"
                raise UserError(f"no {kind} {name!r}{did_you_mean(name, known)}; {choice}")
        if model_name != self.model_name:
            self._load(model_name)
        if lora_name != self.lora_name:
            self._exchange_lora(lora_name)
        if self._network is not None:
            self._network.set_multiplier(strength)

    def _load(self, name: str) -> None:
        folder = self.models[name].expanduser()
        config = open_lm(folder)[0]
        tokenizer = load_tokenizer(self._loading.tokenizer or folder)
        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; "
                "use the model's own tokenizer"
            )
        template = load_prompt_template(self._loading.chat_template, tokenizer, folder, config.eos)
        if self.model_name:
            self.model_name, self.lora_name, self._network = "", None, None
            del self.model  # before the next one needs its memory
            gc.collect()
        self.model = load_language_model(str(folder), self._loading.dtype, self._loading.fp8_scaled)
        self.template = self._own_template = template
        self.model_name = name

    def _exchange_lora(self, name: str | None) -> None:
        before, template = self.lora_name, self._own_template
        if name is not None:
            template = self._template_with(self.loras[name].path)
        take_loras_off(self.model)
        try:
            self._network = put_lora_on(self.model, self.loras[name].path) if name is not None else None
        except UserError:
            if before is not None:
                self._network = put_lora_on(self.model, self.loras[before].path)
            raise
        self.lora_name, self.template = name, template

    def _template_with(self, lora: Path) -> PromptTemplate:
        """Return the template that a LoRA was trained with, where it says so and nobody asked for another."""
        trained_with = template_of(lora)
        if trained_with is None or self._loading.chat_template != "auto":
            return self._own_template
        folder = self.models[self.model_name].expanduser()
        return load_prompt_template(trained_with, self._own_template.tokenizer, folder, self.model.config.eos)


def take_loras_off(model: TransformerLM) -> None:
    """Put the layers back that a LoRA was put around; their weights were never touched."""
    for name, module in list(model.named_modules()):
        if isinstance(module, AdapterLinear):
            model.set_submodule(name, module.base)


def find_models(named: Sequence[str], below: Path | None) -> dict[str, Path]:
    """Return name -> folder or GGUF file of the models that are named, in order, and of those below a folder."""
    paths = [find_model(name, "--model", is_pipeline=False) for name in named]
    of_hub = {path: name for path, name in zip(paths, named, strict=True) if path != Path(name).expanduser()}
    if below is not None:
        folders = _folders(below, "--models_dir")
        found = [folder for folder in folders if _is_model(folder)]
        found += [file for folder in folders for file in sorted(folder.glob("*.gguf")) if has_language_model(file)]
        if not found:
            raise UserError(f"--models_dir: {below}: no language model in it; choose another folder")
        paths += found
    return {of_hub.get(path, name): path for name, path in _by_name(paths).items()}


def find_loras(named: Sequence[str], below: Path | None) -> dict[str, LoraSource]:
    """Return name -> PEFT folder or safetensors file of the LoRAs that are named and of those below a folder.

    Those that are named have the strength after their name, as in ``my_lora:0.7``, the others 1.
    """
    sources = [lora_source(name) for name in named]
    strengths = {source.path.expanduser(): source.ratio for source in sources}
    paths = list(strengths)
    for path in paths:
        if not path.exists():
            raise UserError(f"--lora: {path}: no such file or folder; check the path")
    if below is not None:
        folders = _folders(below, "--loras_dir")
        adapters = [folder for folder in folders if (folder / "adapter_config.json").is_file()]
        files = [file for folder in folders if folder not in adapters for file in sorted(folder.glob("*.safetensors"))]
        found = adapters + [file for file in files if file.name != "model.safetensors"]
        if not found:
            raise UserError(f"--loras_dir: {below}: no adapter folder or safetensors file in it; choose another")
        paths += found
    return {name: LoraSource(path, strengths.get(path, 1.0)) for name, path in _by_name(paths).items()}


def _folders(top: Path, flag: str) -> list[Path]:
    top = top.expanduser()
    if not top.is_dir():
        raise UserError(f"{flag}: {top}: no such folder; check the path")
    folders, level = [top], [top]
    for _ in range(_DEPTH):
        level = [inner for folder in level for inner in sorted(folder.iterdir()) if inner.is_dir()]
        folders += level
    return folders


def _is_model(folder: Path) -> bool:
    if (folder / "params.json").is_file() or any(folder.glob("*.ckpt.index")):
        return True
    try:
        return (
            json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") in LANGUAGE_MODEL_KINDS
        )
    except (OSError, ValueError, AttributeError):
        return False


def _by_name(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the paths by their last part, or by more of it where two share that."""
    unique = list({path.resolve(): path for path in paths}.values())
    names: dict[str, Path] = {}
    for path in unique:
        parts = path.resolve().parts
        same = [other.resolve().parts for other in unique if other != path]
        length = 1
        while length < len(parts) and any(other[-length:] == parts[-length:] for other in same):
            length += 1
        names["/".join(parts[-length:])] = path
    return names


class Session:
    """Talk with a model of the registry, which other sessions may be using too, one answer at a time.

    Attributes:
        registry: the models and LoRAs there are.
        conversation: what was said.
        settings: of the next answer.
        model_name, lora_name, strength: what was chosen; the registry may hold something else until the next answer.
    """

    def __init__(
        self, registry: ModelRegistry, settings: SamplingSettings, system: str = "", context: int | None = None
    ) -> None:
        """Begin with the model and the LoRA that are on the registry; raises a UserError as ``ChatSession`` does."""
        self.registry, self.settings = registry, settings
        self.model_name, self.lora_name, self.strength = registry.model_name, registry.lora_name, 1.0
        self.conversation = ChatSession(registry.model.config, registry.template, system, context)
        self._ready_for = (
            self.model_name,
            self.lora_name,
            self.strength,
        )  # what the conversation's tokens and cache are of
        self._notes: list[str] = []

    def begin_another(self) -> Session:
        """Return a session for somebody else, with this one's choices and nothing said yet."""
        other = copy.copy(self)
        other.conversation = self.conversation.begin_another()
        other._notes = []
        return other

    def introduction(self) -> str:
        """Return a line about the model and how it takes what is typed."""
        conversation = self.conversation
        if conversation.template.has_turns:
            manner = f"talks in turns (template {conversation.template.name})"
        else:
            manner = "is a base model: it continues what you type, an empty line lets it go on"
        strength = "" if self.strength == 1 else f" at {self.strength:g}"
        lora = f" with {self.lora_name}{strength}" if self.lora_name else ""
        return f"{self.model_name}{lora} {manner}; context {conversation.context} tokens"

    def choose(self, model_name: str, lora_name: str | None) -> None:
        """Take another model or LoRA from now on, at the strength it came with; the conversation goes on if it can.

        Raises:
            UserError: there is no such thing, or they do not fit together; nothing has changed then.
        """
        source = self.registry.loras.get(lora_name or "")
        strength = source.ratio if source is not None else 1.0
        self._take(model_name, lora_name, strength)
        self.model_name, self.lora_name, self.strength = model_name, lora_name, strength

    def set_strength(self, strength: float) -> None:
        """Set the factor on the LoRA's update from the next answer on; raises a UserError if there is no LoRA."""
        if self.lora_name is None:
            raise UserError("strength: there is no LoRA on the model; choose one")
        self.strength = strength

    def set_system(self, text: str) -> None:
        """Set the system message; raises a UserError if the model knows none."""
        self.conversation.template.prompt(text, [], "?")
        self.conversation.system = text

    def answer(self, text: str) -> Iterator[str]:
        """Yield the answer piece by piece; see ``ChatSession.answer``. Nobody else may use the registry meanwhile."""
        self._take(self.model_name, self.lora_name, self.strength)  # another session may have exchanged them
        yield from self.conversation.answer(self.registry.model, text, self.settings)

    def _take(self, model_name: str, lora_name: str | None, strength: float) -> None:
        registry, conversation = self.registry, self.conversation
        registry.use(model_name, lora_name, strength)
        if model_name != self._ready_for[0] or registry.template.name != conversation.template.name:
            said = bool(conversation.turns)
            if not conversation.switch(registry.model.config, registry.template) and said:
                self._notes.append("the conversation begins anew: a text and a talk in turns do not go together")
        elif (lora_name, strength) != self._ready_for[1:]:
            conversation.forget_cache()
        self._ready_for = (model_name, lora_name, strength)

    def remarks(self) -> list[str]:
        """Return what should be told about the last answer or choice, and forget it."""
        notes, self._notes = [*self._notes, *self.conversation.remarks], []
        stats = self.conversation.stats
        if stats is not None and stats.ending == "max_new_tokens":
            notes.append(f"the answer was cut off after {stats.tokens} tokens (max_new_tokens)")
        return notes

    def report(self) -> str:
        """Return a line about what the last answer took."""
        stats = self.conversation.stats
        if stats is None:
            return ""
        rate = stats.tokens / max(stats.seconds, 1e-9)
        return (
            f"{stats.tokens} tokens in {stats.seconds:.1f} s ({rate:.1f}/s); of the prompt {stats.computed} tokens "
            f"were new, {stats.cached} known"
        )

    def record(self) -> dict[str, Any]:
        """Return the conversation as one object of a jsonl file: messages, or a base model's text."""
        conversation = self.conversation
        if conversation.template.has_turns:
            return {"messages": [message._asdict() for message in conversation.messages]}
        text = ""
        for i, turn in enumerate(conversation.turns):
            line = "\n" if turn.question and i and not conversation.turns[i - 1].ended else ""
            text += line + turn.question + turn.answer
        return {"text": text}
