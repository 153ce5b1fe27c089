"""A LoRA for a language model, trained on chats, or on preferences between two answers.

The model is read with its frozen weights as they lie in its folder, fp8 among them; the LoRA goes beside its linear
layers. The loss is the mean over the tokens that are trained on, of a full optimizer step; validation is the same over
chats that are held out. What comes out is an adapter folder of PEFT's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from library.checksums import weights_fingerprint
from library.config.chat_schema import ChatSamplingConfig, ChatTrainConfig, ConversationsConfig
from library.config.markers import resume_keys
from library.console import Console
from library.data.batches import DataParallelRank
from library.data.file_index import content_hash
from library.errors import UserError, counted, error_prefix, names_in_short
from library.files import parse_json
from library.llm.chat_batches import (
    Chat,
    ChatBatch,
    ChatSampler,
    PairSampler,
    TokenisedChats,
    Window,
    note_unread,
    pack_examples,
    parse_chat,
    read_chats,
    target_count,
    tokenise_chats,
)
from library.llm.chat_templates import ChatTemplate, Message, load_chat_template, template_arguments
from library.llm.preferences import parse_pair
from library.llm.tokenizer_files import load_tokenizer
from library.models.hub import find_model
from library.models.llm.files import load_lm, open_lm
from library.models.llm.model import TransformerLM, lm_split_plan, separate_projections
from library.models.llm.spec import LMConfig
from library.models.registry import lora_targets
from library.nn.cross_entropy import IGNORED
from library.precision.checkpoint import QuantizedFile
from library.precision.packed_linear import unpacked
from library.precision.recipe import plan_base
from library.processes import agreed
from library.randomness import generator
from library.safetensors_io import read_safetensors_header
from library.training.checkpoint.metadata import lora_facts
from library.training.memory.budget import recompute_blocks
from library.training.parallel.parallelize import ParallelSpec, lm_parallel_spec
from library.training.plan import LoraPlan, resolve
from library.training.report.progress import counting
from library.training.run_inputs import ASPECTS, RunInputs, require_same
from library.training.sampling.text import TextSampler
from library.training.tasks.dpo import REWARDS, dpo_loss
from library.training.tasks.lora import LoraTask
from library.training.tasks.task import Task
from networks.files.adapters import load_adapter
from networks.files.metadata import BASE_MODEL, weight_file
from networks.network import AdapterNetwork, attach_lora

_USUAL_LENGTH = 2048  # of a window, where the model's context is longer


class ChatTask(Task):
    """What training on chats has, of a LoRA or of all weights.

    Attributes:
        sizes: the model's.
        template: how chats are written.
        held_out: chats to validate on, in batches of similar length, the same on every process.
    """

    metric = "loss_tokens"
    sampler_type: ClassVar[type[ChatSampler]] = ChatSampler
    to_hold_out: ClassVar[str] = "set validation_data or validation_split"

    sizes: LMConfig
    template: ChatTemplate
    held_out: Sequence[ChatBatch] = ()

    def _open_chats(self, chat: ConversationsConfig, tokenizer: Path) -> None:
        """Read the template and the prompts of samples."""
        arguments = template_arguments(chat.chat_template_args)
        template = load_chat_template(chat.chat_template, load_tokenizer(tokenizer), tokenizer, arguments)
        self.template = template
        self.base_parts = {
            "config": content_hash(repr(self.sizes).encode()),
            "chat template": content_hash(repr((template.sources, template.names, template.arguments)).encode()),
            "tokenizer": template.tokenizer.fingerprint(),
        }
        if self.raw_config.sampling.sample_prompts:
            self.sampler = self._build_sampler(self.raw_config.sampling)

    def _build_sampler(self, config: ChatSamplingConfig) -> TextSampler:
        """Return what lets the model answer the prompts.

        Raises:
            UserError: a prompt and its answer do not fit the model's context.
        """
        template, context, system = self.template, self.sizes.context, self.raw_config.chat.system_prompt
        first = [Message("system", system)] if system else []
        tokens = [template.prompt_tokens([*first, Message("user", prompt)]) for prompt in config.sample_prompts]
        if (longest := max(map(len, tokens))) + config.sample_tokens > context:
            raise UserError(
                f"sample_tokens: a prompt of {longest} tokens and {config.sample_tokens} more do not fit the model's "
                f"context of {context}; lower it"
            )
        stop_tokens = (*template.tokenizer.stop_tokens, *template.ends, *self.sizes.eos)
        return TextSampler(
            config, tokens, template.tokenizer, stop_tokens, self.raw_config.training.seed,
            self.names.folder / "samples", "step{:06d}.txt", lambda prompt, text: f"> {prompt}\n\n{text.strip()}",
            self.accelerator, self.console,
        )  # fmt: skip

    def _read_chats(self, chat: ConversationsConfig, size: int, most_held_out: int) -> None:
        """Read what is trained and validated on, in batches of ``size`` windows."""
        seed = self.raw_config.training.seed
        with agreed("reading the conversations"):
            windows, held_out = prepare_chats(chat, self.template, self.sizes, seed, self.console, self.inputs)
        require_same({}, self.inputs)
        self.batches = self.sampler_type(windows, size, seed, DataParallelRank.of(self.accelerator))
        self.loader = DataLoader(
            windows,  # type: ignore[arg-type]  # a list is a dataset
            batch_sampler=self.batches,
            collate_fn=self.sampler_type.collate,
            pin_memory=self.accelerator.device.type == "cuda",
        )
        ordered = sorted(held_out[:most_held_out], key=lambda window: sum(len(example.tokens) for example in window))
        self.held_out = [self.sampler_type.collate(ordered[i : i + size]) for i in range(0, len(ordered), size)]
        self.validates = bool(self.held_out)

    def loss(self, model: nn.Module, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        return token_mean_loss(model, batch.to(self.accelerator.device))

    def validate(self, step: int) -> dict[str, float]:
        (loss,) = self.engine.mean_over(lambda: self.held_out, self._held_out_loss)
        return {"val_loss": loss}

    def _held_out_loss(self, batch: Any) -> tuple[Tensor, Any]:
        on_device = batch.to(self.accelerator.device)
        count = (on_device.targets != IGNORED).sum()
        return self.engine.models[0](on_device.tokens, on_device.targets).double() * count, count

    def sample_names(self, batch: Any) -> list[str]:
        return ["a batch of chats"]


class ChatLora(ChatTask, LoraTask):
    """See the module's text."""

    plan: LoraPlan[ChatTrainConfig]
    transformer: TransformerLM

    def open(self, state: str | None = None) -> None:
        self.state = state
        config: ChatTrainConfig = self.raw_config
        device, seed = self.accelerator.device, config.training.seed
        name = config.model.pretrained_model_name_or_path
        folder = self.folder = find_model(name, "pretrained_model_name_or_path", is_pipeline=False)
        self.sizes, weights, _ = open_lm(folder)
        if config.model.model_type != self.sizes.family:
            raise UserError(
                f"model_type: {config.model.model_type}, but the folder holds a {self.sizes.family}; "
                f'set "{self.sizes.family}"'
            )
        if config.parallel.tp > 1:
            lm_split_plan(self.sizes, config.parallel.tp, separate=True)
        self.plan = resolve(config, lora_targets()[self.sizes.family])
        if self.plan.network.options.trainable_token_indices and config.parallel.splits_model:
            raise UserError(
                "network_args: trainable_token_indices: every process needs the whole model; remove "
                "tp, pp, shard, zero and device_map"
            )
        self.layout: QuantizedFile | None = weights.quantized
        plan_base(config.precision, self.layout, seed, device)
        self.base_fingerprint = weights_fingerprint(folder)  # reads all of a file that is no safetensors
        self.resume_keys = resume_keys(config)
        self._say_defaults()
        self._check_saved(weights)
        self._open_chats(config.chat, Path(config.model.tokenizer or folder).expanduser())

    def prepare(self) -> None:
        config, chat = self.plan.config, self.plan.config.chat
        self._read_chats(chat, chat.train_batch_size, config.validation.max_validation_conversations)
        self.load_network()
        self._wrap(config, "some" if chat.packing else "many")  # a batch is as long as its longest window
        self.facts = lora_facts(config, self.started_at, self.total_steps)
        base = Path(config.model.pretrained_model_name_or_path)
        shown = base.name if base.is_absolute() or str(base).startswith("~") else str(base)
        self.more_metadata = {BASE_MODEL: shown, TEMPLATE: self.template.stored}
        if self.template.arguments:
            self.more_metadata[TEMPLATE_ARGUMENTS] = json.dumps(self.template.arguments)

    def load_network(self) -> None:
        """Load the model, put the LoRA in, set the memory policy.

        Raises:
            UserError: the LoRA's options do not suit the model, or ``network_weights`` do not; a file is damaged.
        """
        config, training, device = self.plan.config, self.plan.config.training, self._loaded_to()
        dtype = self.plan.dtype
        fp8 = plan_base(config.precision, self.layout, training.seed, self.accelerator.device)
        self.transformer = model = load_lm(self.folder, dtype, device, fp8=fp8)
        separate_projections(model)
        fp8.round_inputs(model)
        self._note_base(self.layout, fp8, dtype)
        self.network = self._attach(model)
        self._start_from_file()
        recompute_blocks(model, model.config.layers, training, device)

    def _parallel(self) -> ParallelSpec:
        return lm_parallel_spec(self.transformer, self.network)


class PreferenceLora(ChatLora):
    """Trained on preferences: of two answers to the same chat, one is the better.

    DPO (``library.training.tasks.dpo``), with log p(y) the log-probability of an answer's tokens together. The base is
    asked first, without gradients, so that its activations are gone before those of training come. A step's loss is the
    mean over its pairs, whatever the batch size, the accumulation and the number of processes are.
    """

    metric, more_metrics = REWARDS[0], REWARDS[1:]
    sampler_type = PairSampler

    def prepare(self) -> None:
        super().prepare()
        if self.plan.config.network.network_weights:
            self.console.print("note: answers are compared with the base's, without network_weights", soft_wrap=True)

    def loss(self, model: nn.Module, batch: ChatBatch, step: int) -> tuple[Tensor, Tensor]:
        losses, rewards = self._losses(model, batch)
        return losses.mean(), rewards

    def validate(self, step: int) -> dict[str, float]:
        means = self.engine.mean_over(lambda: self.held_out, self._held_out_loss, 1 + len(REWARDS))
        return dict(zip(("val_loss", *(f"val_{key}" for key in REWARDS)), means, strict=True))

    def _held_out_loss(self, batch: ChatBatch) -> tuple[Tensor, Tensor | int]:
        losses, rewards = self._losses(self.engine.models[0], batch.to(self.accelerator.device))
        return torch.column_stack([losses, rewards]).double().sum(dim=0), len(batch)

    def _losses(self, model: nn.Module, batch: ChatBatch) -> tuple[Tensor, Tensor]:
        """Return what :func:`dpo_loss` does, of the pairs of a batch."""
        tokens, targets, chat = batch.tokens.flatten(0, 1), batch.targets.flatten(0, 1), self.plan.config.chat
        with torch.no_grad(), self.network.bypassed():
            base = model(tokens, targets, by_row=True)
        log_ratios = base - model(tokens, targets, by_row=True)  # cross-entropies, of which log p is minus one times
        return dpo_loss(log_ratios.view(-1, 2), chat.dpo_beta, chat.dpo_label_smoothing)


def prepare_chats(
    config: ConversationsConfig, template: ChatTemplate, model: LMConfig, seed: int, console: Console, inputs: RunInputs
) -> tuple[list[Window], list[Window]]:
    """Read, split, tokenise and pack the conversations, say what was read, and add it to ``inputs``.

    Return windows to train on, and conversations to validate on.

    Raises:
        UserError: files that cannot be read, conversations that do not suit the template, a ``max_length`` that the
            model does not have.
    """
    max_length = config.max_length or min(model.context, _USUAL_LENGTH)
    if max_length > model.context:
        raise UserError(f"max_length: {max_length} is more than the model's context of {model.context}; lower it")
    tokens = template.tokenizer.vocab_size
    if tokens > model.vocab_size:
        raise UserError(f"tokenizer: it has {tokens} tokens, the model {model.vocab_size}; set the model's own")
    parse = parse_pair if config.train_on == "preferences" else parse_chat
    chats = read_chats(config.train_data, parse)
    held_out = read_chats(config.validation_data, parse) if config.validation_data else []
    if config.validation_split:
        chats, held_out = _split(chats, config.validation_split, seed)
    for split, part in enumerate((chats, held_out)):
        for chat in part:
            known_by = (chat.messages, chat.trained, chat.tools, chat.rejected and chat.rejected.messages)
            inputs.add(repr(known_by), [None] * (len(ASPECTS) - 1) + [split])
    chats, held_out = ([_with_system(chat, config.system_prompt) for chat in part] for part in (chats, held_out))
    with counting(console) as start:
        advance = start("tokenising conversations", len(chats) + len(held_out))
        arguments = template, max_length, config.train_on == "all", advance
        tokenised = tokenise_chats(chats, *arguments)
        held_out_windows = tokenise_chats(held_out, *arguments).windows if held_out else []
    windows = pack_examples([*chain(*tokenised.windows)], max_length) if config.packing else tokenised.windows
    remarks = _describe(tokenised, windows, template, max_length, config.packing)
    remarks += note_unread([*chats, *held_out])
    if held_out_windows:
        remarks.append(f"{counted(len(held_out_windows), 'conversation')} to validate on")
    console.print(*remarks, sep="\n", soft_wrap=True)
    return windows, held_out_windows


def _describe(
    read: TokenisedChats, windows: Sequence[Window], template: ChatTemplate, max_length: int, packing: bool
) -> list[str]:
    """Return what was read, a line each."""
    tokens = sum(len(example.tokens) for window in windows for example in window)
    targets = target_count(windows)
    count = f"{counted(len(read.windows), 'conversation')} in the template {template.name}"
    remarks = [f"{count}: {tokens:,} tokens, {targets / tokens:.0%} of them trained on"]
    if packing:
        remarks.append(f"packed into {len(windows):,} windows, {tokens / (len(windows) * max_length):.0%} full")
    if read.left_out:
        named = ", ".join(f"{what} ({counted(n, 'conversation')})" for what, n in read.left_out.items())
        remarks.append(f"note: the chat template leaves out {named}")
    if read.cut:
        remarks.append(f"note: {read.cut} conversations are longer than {max_length} tokens and lose their end")
    if read.dropped:
        without = f"{len(read.dropped)} of them have no answer before that and are left out"
        remarks.append(f"note: {without} ({names_in_short(read.dropped)})")
    if read.same:
        remarks.append(f"note: chosen and rejected are the same, so nothing is learnt: {names_in_short(read.same)}")
    return remarks


def _with_system(chat: Chat, system: str | None) -> Chat:
    """Put ``system`` before a conversation that has no system message."""
    if not system or chat.messages[0].role == "system":
        return chat
    messages = (Message("system", system), *chat.messages)
    rejected = chat.rejected and _with_system(chat.rejected, system)
    return replace(chat, messages=messages, trained=(False, *chat.trained), rejected=rejected)


def _split(chats: Sequence[Chat], share: float, seed: int) -> tuple[list[Chat], list[Chat]]:
    """Return what to train on and what to validate on, at least one of each."""
    count = max(1, round(len(chats) * share))
    if count >= len(chats):
        raise UserError(f"validation_split: {share:g} of {len(chats)} conversations leaves none to train on; lower it")
    order = torch.randperm(len(chats), generator=generator(seed, "held-out conversations")).tolist()
    held_out = set(order[:count])
    return [d for i, d in enumerate(chats) if i not in held_out], [d for i, d in enumerate(chats) if i in held_out]


def token_mean_loss(model: nn.Module, batch: ChatBatch) -> tuple[Tensor, Tensor]:
    """Return the batch's loss (a scalar with gradient), and the number of tokens that it counts, [1].

    A batch's loss is the mean over its tokens, to which microbatches, of which the mean is taken, contribute as many as
    they have; else the tokens of short answers would count more.
    """
    count = (batch.targets != IGNORED).sum() * batch.microbatches
    mean = model(batch.tokens, batch.targets, documents=batch.documents)
    return mean * (count / batch.target_count), count[None].float()


TEMPLATE = "tandem.chat_template"  # metadata: how the conversations were written that it was trained on


TEMPLATE_ARGUMENTS = "tandem.chat_template_args"


def template_of(path: str | Path) -> tuple[str | None, dict[str, Any]]:
    """Return the chat template that a LoRA was trained with, None if it does not say, and the template's arguments.

    Raises:
        UserError: no such file.
    """
    metadata = read_safetensors_header(weight_file(Path(path))).get("__metadata__") or {}
    return metadata.get(TEMPLATE), parse_json(metadata.get(TEMPLATE_ARGUMENTS, "{}"), str(path))


def put_lora_on(model: TransformerLM, path: str | Path, strength: float = 1.0) -> AdapterNetwork:
    """Put a LoRA or DoRA onto ``model`` in place, beside its weights, which may be fp8; return its layers.

    A LoRA's ``set_multiplier(x)`` changes its strength at any time; with 0 the model is its base.

    Args:
        model: of ``library.models.llm.files.load_lm``; it is frozen, and stays in the mode it is in.
        path: an adapter folder of PEFT's, ``train_lora.py``'s among them, or the safetensors file in it.
        strength: factor on the update.

    Raises:
        UserError: no such file, it is no LoRA of this model, or the model has one already.
    """
    if any(hasattr(module, "lora_A") for module in model.modules()):
        raise UserError(f"{path}: the model has a LoRA already; load the model again, or merge the first one into it")
    targets = lora_targets()[model.config.family]
    weights = load_adapter(path, targets).weights
    with unpacked(model):
        separate_projections(model)
        network = attach_lora(model, weights, targets, str(path), model.embedding.weight.dtype)
        with error_prefix(str(path)):
            network.set_multiplier(strength)
    return network
