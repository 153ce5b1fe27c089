"""Every setting of ``train_llm.py``, once; ``library.config.schema`` says how a schema is read.

It trains all weights of a language model, on texts (``data_dir``) or on conversations (``train_data``).
Keys that mean what they mean in ``train_lora.py`` have the same names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from library.config.chat_schema import HELD_OUT, ChatSamplingConfig, ConversationsConfig
from library.config.markers import (
    MUST_MATCH,
    SAME_RESULT,
    Batch,
    NotNegative,
    OnlyWith,
    Pairs,
    Positive,
    Rate,
    Section,
    Seed,
    Size,
)
from library.config.optimizer_types import estimates_step_size
from library.config.run_schema import SAMPLED, AccelerateConfig, HubConfig, LoggingConfig, ParallelConfig, SavingConfig
from library.config.schema import NOT_IN_EPOCHS, LeastRate, OptimizerConfig, Scheduler, SharedTrainingKeys, WarmUp

_ADAM_BETAS = "betas=0.9,0.95"  # of GPT-3 (arXiv 2005.14165) and Llama; torch's 0.999 is slow to forget early steps
_TUNING_RATE = 2e-5  # of Llama 2's chats (arXiv 2307.09288), TRL's SFTConfig and torchtune's full_finetune recipes
_OF_TEXTS, _OF_TALKS = OnlyWith(data_dir=True), OnlyWith(train_data=True)
_VALIDATED = OnlyWith(any_of=True, data_dir=True, validation_data=True, validation_split=True)
_OfPreset = Annotated[Size | None, OnlyWith(", whose weights have their size", init_from=False)]


class LLMModelConfig(Section):
    """The model: a preset with fresh weights, changed where a key says so, or a published one to go on from."""

    preset: Annotated[str | None, MUST_MATCH] = Field(
        None, description="gpt2-tiny, gpt2-124m, ..., llama-tiny, llama3.2-1b, ... (docs/llm.md); with fresh weights"
    )
    init_from: str | None = Field(
        None, description="folder, GGUF file, or name on the hub, of a language model to go on from"
    )
    tokenizer: Annotated[str | None, _OF_TALKS] = Field(
        None, description="tokenizer's file or folder for conversations; default: that of init_from"
    )
    context: Annotated[Size | None, MUST_MATCH, OnlyWith("; conversations have max_length", data_dir=True)] = Field(
        None, description="tokens a training window holds; default: the model's"
    )
    width: _OfPreset = Field(None, description="of the residual stream, instead of the preset's")
    layers: _OfPreset = Field(None, description="blocks, instead of the preset's")
    heads: _OfPreset = Field(None, description="heads of queries, instead of the preset's")
    kv_heads: _OfPreset = Field(None, description="heads of keys and values, instead of the preset's")
    hidden: _OfPreset = Field(None, description="width of the feed-forward's middle, instead of the preset's")
    pad_vocabulary_to: Size = Field(64, description="embedding and head are padded to a multiple of so many rows")


class LLMDataConfig(Section):
    """The corpus, unless conversations are trained on, and how much makes a step."""

    data_dir: str | None = Field(None, description="folder that tools/prepare_text.py wrote; or set train_data")
    train_batch_size: Batch = Field(
        8, description="windows in a forward pass of one process: of the corpus, conversations, or packs of them"
    )
    tokens_per_batch: Annotated[Positive | None, _OF_TEXTS] = Field(
        None, description="tokens of an optimizer step over all processes; default: those of one forward pass each"
    )
    gradient_accumulation_steps: Annotated[Batch, _OF_TALKS] = Field(
        1, description="batches of conversations per optimizer step, of each process"
    )


class LLMOptimizerConfig(OptimizerConfig):
    """Optimizer and learning rate schedule."""

    optimizer_type: Annotated[str, MUST_MATCH] = Field(
        "AdamW",
        description="AdamW (fused), Prodigy, Muon (hidden matrices; AdamW for the rest), any of train_lora.py's, or a "
        "dotted class path of their packages",
    )
    optimizer_args: Pairs = Field(
        [], description='key=value pairs for the optimizer; AdamW has "betas=0.9,0.95" unless set here'
    )
    learning_rate: Rate = Field(
        6e-4, description="peak learning rate; default with init_from 2e-5, of Prodigy and D-Adaptation 1.0"
    )
    weight_decay: Annotated[NotNegative, MUST_MATCH] = Field(0.1, description="of matrices; norms and biases have none")
    clip_during_warmup: Annotated[bool | None, OnlyWith(max_grad_norm=True)] = Field(
        None, description="clip from step 0 on, not only after the warm-up; default: with init_from"
    )
    lr_scheduler: Scheduler = Field("cosine", description="learning rate schedule after the linear warm-up")
    lr_warmup_steps: WarmUp = Field(0.02, description="warm-up in optimizer steps, or as a fraction of all")
    lr_scheduler_min_lr_ratio: LeastRate = Field(0.1, description="floor of the decaying schedules, as a share of lr")

    def with_defaults(self, is_published: bool) -> LLMOptimizerConfig:
        """Return these settings with what is usual where it is unset, and no warm-up of a constant schedule.

        ``is_published``: the weights are not fresh, so a smaller rate is usual, and the first gradients are not larger.
        """
        changes: dict[str, Any] = {"lr_warmup_steps": 0} if self.lr_scheduler == "constant" else {}
        has_betas = any(argument.split("=")[0].strip() == "betas" for argument in self.optimizer_args)
        if self.optimizer_type.lower() == "adamw" and not has_betas:
            changes["optimizer_args"] = [*self.optimizer_args, _ADAM_BETAS]
        if "learning_rate" not in self.model_fields_set and (is_published or estimates_step_size(self.optimizer_type)):
            changes["learning_rate"] = 1.0 if estimates_step_size(self.optimizer_type) else _TUNING_RATE
        if self.clip_during_warmup is None:
            changes["clip_during_warmup"] = is_published
        return self.model_copy(update=changes)


class LLMTrainingConfig(SharedTrainingKeys):
    """How long, in what precision, from which seed."""

    max_train_steps: Annotated[Positive, NOT_IN_EPOCHS] = Field(1000, description="optimizer steps")
    mixed_precision: Literal["no", "bf16"] = Field("no", description="autocast dtype of the forward pass")
    full_bf16: Annotated[bool, MUST_MATCH] = Field(
        False, description="weights in bf16 too, updated with stochastic rounding"
    )
    allow_tf32: bool = Field(False, description="let a GPU multiply fp32 matrices in TF32")
    seed: Annotated[Seed, MUST_MATCH] = Field(
        0, description="initial weights, order of the data and samples follow from it"
    )
    on_nan: Annotated[Literal["stop", "skip"], SAME_RESULT] = Field(
        "stop",
        description="a step that is not finite: save what was before it and stop; or skip its update",
    )
    on_nan_limit: Annotated[Positive, OnlyWith(on_nan=("skip",)), SAME_RESULT] = Field(
        10, description="stop after so many steps in a row that are not finite (skip)"
    )


class LLMSavingConfig(SavingConfig):
    """What is written, and when."""

    output_name: str = Field(
        "model",
        description="name of the model's folder in output_dir",
        json_schema_extra={"pattern": r"^[^/\\]+$"},
    )
    save_precision: Literal["fp32", "bf16"] | None = Field(None, description="of saved models; default: the weights'")


class LLMSamplingConfig(ChatSamplingConfig):
    """Text before, during and after training."""

    sample_prompts: list[str] = Field(
        [], description="beginnings that samples go on from; with train_data user messages, which are answered"
    )
    sample_at_first: Annotated[bool | None, SAMPLED] = Field(  # type: ignore[assignment]
        None, description="sample before the first step; default: where sample_every_n_steps is set"
    )
    sample_tokens: Annotated[Size, SAMPLED] = Field(64, description="tokens of a sample")
    sample_temperature: Annotated[NotNegative, SAMPLED] = Field(0.8, description="0 takes the most likely token")


class LLMValidationConfig(Section):
    """Cross-entropy on held-out documents or conversations."""

    validate_every_n_steps: Annotated[Positive | None, _VALIDATED] = Field(
        None, description="validate every so many optimizer steps"
    )
    validate_every_n_epochs: Annotated[Positive | None, _VALIDATED] = Field(
        None, description="validate every so many epochs"
    )
    validation_tokens: Annotated[Positive, _OF_TEXTS] = Field(65536, description="at most so many held-out tokens")
    max_validation_conversations: Annotated[Positive, HELD_OUT] = Field(
        256, description="at most so many held-out conversations"
    )


class PretrainConfig(Section):
    """All sections of a run that trains all weights."""

    model: LLMModelConfig = LLMModelConfig()
    data: LLMDataConfig = LLMDataConfig()
    chat: ConversationsConfig = ConversationsConfig()
    optimizer: LLMOptimizerConfig = LLMOptimizerConfig()
    training: LLMTrainingConfig = LLMTrainingConfig()
    saving: LLMSavingConfig = LLMSavingConfig()
    hub: HubConfig = HubConfig()
    sampling: LLMSamplingConfig = LLMSamplingConfig()
    validation: LLMValidationConfig = LLMValidationConfig()
    logging: LoggingConfig = LoggingConfig()
    accelerate: AccelerateConfig = AccelerateConfig()
    parallel: ParallelConfig = ParallelConfig()
