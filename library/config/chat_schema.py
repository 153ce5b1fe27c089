"""The settings of ``train_lora.py`` on a language model; ``library.config.schema`` says how a schema is read.

What a LoRA on any model has (network, optimizer, saving, ...) are the same sections as for image models, less the
options marked as those of images; model, data, samples and validation are those of language models.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

import library.config.run_schema as run_schema
from library.config.markers import MUST_MATCH, Batch, Fraction, NotNegative, OnlyWith, Pairs, Positive, Section, Size
from library.config.model_types import LANGUAGE_MODELS
from library.config.run_schema import SAMPLED
from library.config.schema import PREFERENCES, NetworkConfig, OptimizerConfig, PrecisionConfig, TrainingConfig

_TALKS = OnlyWith(train_data=True)
_ALONE = OnlyWith(", whose pairs stay side by side", train_on=("assistant", "all"))
_DRAWN = OnlyWith(", which is 0 (greedy)", sample_temperature=True)
HELD_OUT = OnlyWith(any_of=True, validation_data=True, validation_split=True)

_TRAIN_DATA = "jsonl, json or parquet files or folders: messages, ShareGPT, Alpaca, or prompt and completion"


class LanguageModelConfig(Section):
    """The base model."""

    model_type: Literal[LANGUAGE_MODELS] = Field(  # type: ignore[valid-type]
        description="architecture family: Llama 2 to 3.2, or GPT-2"
    )
    pretrained_model_name_or_path: str = Field(
        description="folder of the model, in any published layout (docs/llm.md); its weights may be fp8; or a name on "
        "the Hugging Face hub, meta-llama/Llama-3.2-1B"
    )
    tokenizer: str | None = Field(
        None, description="tokenizer's file or folder; default: the one in the model's folder"
    )
    base_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="dtype of the frozen weights; auto follows mixed_precision"
    )


class ConversationsConfig(Section):
    """The conversations, and how they are trained on."""

    train_data: list[str] = Field([], description=_TRAIN_DATA)
    validation_data: Annotated[list[str], _TALKS] = Field([], description="the same, to validate on")
    validation_split: Annotated[Fraction, MUST_MATCH, _TALKS] = Field(
        0.0, description="share of train_data to validate on instead; follows seed"
    )
    chat_template: Annotated[str, MUST_MATCH, _TALKS] = Field(
        "auto",
        description="how conversations are formatted; tokenizer: as published with it; auto: that, if there is one, "
        "else the one of llama3, chatml, llama2, plain whose special tokens it has; or a Jinja file",
    )
    chat_template_args: Annotated[Pairs, MUST_MATCH, _TALKS] = Field(
        [], description="name=value pairs for the template, enable_thinking=false"
    )
    system_prompt: Annotated[str | None, _TALKS] = Field(
        None, description="system message of conversations that have none"
    )
    train_on: Annotated[Literal["assistant", "all"], MUST_MATCH, _TALKS] = Field(
        "assistant", description="tokens the loss counts: the assistant's, or all"
    )
    max_length: Annotated[Size | None, MUST_MATCH, _TALKS] = Field(
        None, description="tokens of a window; longer conversations are truncated; default: the context, at most 2048"
    )
    packing: Annotated[bool, MUST_MATCH, _TALKS, _ALONE] = Field(
        False, description="pack several conversations into a window; none attends to another"
    )


class ChatDataConfig(ConversationsConfig):
    """The conversations, and how they are trained on."""

    train_data: list[str] = Field(min_length=1, description=_TRAIN_DATA)
    train_on: Annotated[Literal["assistant", "all", "preferences"], MUST_MATCH] = Field(  # type: ignore[assignment]
        "assistant",
        description="tokens the loss counts: the assistant's, or all; preferences: DPO on chosen and rejected answers",
    )
    dpo_beta: Annotated[float, Field(gt=0), MUST_MATCH, PREFERENCES] = Field(
        0.1, description="DPO's beta: the higher, the nearer the model stays to its base"
    )
    dpo_label_smoothing: Annotated[float, Field(ge=0, lt=0.5), MUST_MATCH, PREFERENCES] = Field(
        0.0, description="share of pairs taken to be labelled the wrong way round"
    )
    train_batch_size: Annotated[Batch, MUST_MATCH] = Field(
        1, description="windows in a forward pass: conversations, packs of them, or pairs"
    )


class ChatSamplingConfig(run_schema.SamplingConfig):
    """Answers before, during and after training."""

    sample_prompts: list[str] = Field([], description="user messages; the model's answers are written as text")
    sample_tokens: Annotated[Size, SAMPLED] = Field(128, description="tokens of an answer at most")
    sample_temperature: Annotated[NotNegative, SAMPLED] = Field(0.0, description="0 takes the most likely token")
    sample_top_p: Annotated[float, Field(gt=0, le=1), SAMPLED, _DRAWN] = Field(
        0.95, description="draws among so much probability"
    )


class ChatValidationConfig(Section):
    """Loss on held-out conversations; unless it is said when, with each save."""

    validate_every_n_steps: Annotated[Positive | None, HELD_OUT] = Field(
        None, description="validate every so many optimizer steps"
    )
    validate_every_n_epochs: Annotated[Positive | None, HELD_OUT] = Field(
        None, description="validate every so many epochs"
    )
    max_validation_conversations: Annotated[Positive, HELD_OUT] = Field(
        256, description="at most so many held-out conversations"
    )


class ChatTrainConfig(Section):
    """All sections of a LoRA training run on a language model."""

    model: LanguageModelConfig
    precision: PrecisionConfig = PrecisionConfig()
    chat: ChatDataConfig
    network: NetworkConfig = NetworkConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    saving: run_schema.SavingConfig = run_schema.SavingConfig()
    hub: run_schema.HubConfig = run_schema.HubConfig()
    sampling: ChatSamplingConfig = ChatSamplingConfig()
    validation: ChatValidationConfig = ChatValidationConfig()
    logging: run_schema.LoggingConfig = run_schema.LoggingConfig()
    accelerate: run_schema.AccelerateConfig = run_schema.AccelerateConfig()
    parallel: run_schema.ParallelConfig = run_schema.ParallelConfig()
