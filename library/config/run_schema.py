"""Options of a run, whatever it trains: what is written, measured and shown, and how processes share the work.

Sections of ``library.config.schema``, which says what all of them are like.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, field_validator

from library.config.markers import MUST_MATCH, Above, Batch, OnlyFor, OnlyWith, Positive, Section, Size
from library.errors import UserError
from library.files import find_bad_name

LORAS = OnlyFor(("images", "chats"), "is for LoRAs, whose files carry metadata; remove it")
# layout -> the kinds of adapter that a program loads from it
KINDS_OF_LAYOUT = {
    "diffusers": ("lora", "dora"),
    "kohya": ("lora", "lokr", "loha"),
    "comfy": ("lora", "dora", "lokr", "loha"),
    "peft": ("lora", "dora"),  # of language models
}
SAVE_FORMATS = ("diffusers", "kohya", "comfy")  # of image models

IMAGES = OnlyFor(("images",), "is about image models, this is a language model; remove it")
_NAME_GROWS = 72  # bytes: "-step00000000-state", and what a file is called while it is written (library.files)
SAMPLED = OnlyWith(sample_prompts=True)
# validation runs with each save unless it is said when
_VALIDATED = OnlyWith(
    any_of=True,
    validate_every_n_steps=True,
    validate_every_n_epochs=True,
    save_every_n_steps=True,
    save_every_n_epochs=True,
)
_UPLOADED = OnlyWith(huggingface_repo_id=True)
_PIPELINED = OnlyWith(pp=Above(1))


def layout_refusal(kind: str, layout: str, better: Iterable[str]) -> str:
    """Return what to say where no program loads the kind of adapter from ``layout``; ``better``: layouts to set."""
    remedy = f"set save_format = {' or '.join(better)}"
    return f"save_format: no program loads network_type {kind} from the layout {layout}; {remedy}"


class SavingConfig(Section):
    """What is written, and when."""

    output_dir: str = Field("output", description="folder for everything a run writes")
    output_name: str = Field(
        "lora",
        description="file name of the LoRA, without suffix",
        json_schema_extra={"pattern": r"^[^/\\]+$"},
    )
    overwrite: bool = Field(False, description="replace a finished result of other settings, of the same output_name")
    save_every_n_steps: Positive | None = Field(None, description="save every so many optimizer steps")
    save_every_n_epochs: Positive | None = Field(None, description="save every so many epochs")
    save_last_n_steps: Annotated[Positive | None, OnlyWith(save_every_n_steps=True)] = Field(
        None, description="keep only what was saved in the last so many steps"
    )
    save_last_n_epochs: Annotated[Positive | None, OnlyWith(save_every_n_epochs=True)] = Field(
        None, description="keep only the last so many epoch files"
    )
    save_last_n_steps_state: Annotated[Positive | None, OnlyWith(save_every_n_steps=True, save_state=True)] = Field(
        None, description="the same for states; default: as the files"
    )
    save_last_n_epochs_state: Annotated[Positive | None, OnlyWith(save_every_n_epochs=True, save_state=True)] = Field(
        None, description="the same for states; default: as the files"
    )
    save_best: Annotated[bool, _VALIDATED] = Field(
        False, description="write <name>-best whenever the validation loss is the lowest so far"
    )
    early_stop_patience: Annotated[Positive | None, _VALIDATED] = Field(
        None, description="stop after so many validations without a lower loss"
    )
    ema_decay: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, MUST_MATCH] = Field(
        None, description="save, sample and validate an exponential moving average of the weights, such as 0.999"
    )
    save_precision: Literal["fp32", "fp16", "bf16"] | None = Field(None, description="default: the training dtype")
    save_state: bool = Field(False, description="write the full training state with every save")
    save_state_on_train_end: bool = Field(False, description="write the training state at the end")
    save_retries: Annotated[int, Field(ge=0, le=1000)] = Field(
        10, description="tries more to write the last weights and state where that fails, over about seven minutes"
    )
    save_fallback_dir: str | None = Field(
        None, description="folder for them after that; default: <output_name>-fallback in the system's temporary folder"
    )
    save_format: Annotated[Literal["diffusers", "kohya", "comfy"], IMAGES] = Field(
        "diffusers", description="key layout of the LoRA file"
    )
    save_for: Annotated[list[Literal["diffusers", "comfyui", "sd-scripts", "musubi-tuner"]], IMAGES] = Field(
        [],
        description="programs that the LoRA is meant for: a save_format or layers that one of them would not read are "
        "refused at the start",
    )
    training_comment: Annotated[str | None, LORAS] = Field(None, description="free text for the LoRA's metadata")
    no_metadata: Annotated[bool, LORAS] = Field(
        False, description="of the run, write only what loaders and merges need; metadata_* are written as given"
    )
    metadata_title: Annotated[str | None, LORAS] = Field(None, description="title; default: output_name")
    metadata_author: Annotated[str | None, LORAS] = Field(None, description="author")
    metadata_description: Annotated[str | None, LORAS] = Field(
        None, description="what the LoRA is; default: training_comment"
    )
    metadata_license: Annotated[str | None, LORAS] = Field(None, description="license")
    metadata_tags: Annotated[str | None, LORAS] = Field(None, description="tags, separated by commas")
    metadata_usage_hint: Annotated[str | None, LORAS] = Field(None, description="how to use it")
    metadata_trigger_phrase: Annotated[str | None, LORAS] = Field(None, description="words that call it up in a prompt")
    metadata_merged_from: Annotated[str | None, LORAS] = Field(None, description="what it was made from")

    @field_validator("output_name")
    @classmethod
    def _is_a_file_name(cls, value: str) -> str:
        if set(value) & {"/", "\\"}:
            raise ValueError("it is a file's name alone; put the folder into output_dir")
        if problem := find_bad_name(value, _NAME_GROWS):
            raise ValueError(problem)
        return value


class HubConfig(Section):
    """Upload to the Hugging Face hub; the token is taken from HF_TOKEN or huggingface-cli login."""

    huggingface_repo_id: str | None = Field(None, description="repository to upload to, user/name; made if needed")
    huggingface_path_in_repo: Annotated[str | None, _UPLOADED] = Field(None, description="folder in the repository")
    huggingface_repo_visibility: Annotated[Literal["private", "public"], _UPLOADED] = Field(
        "private", description="of a new repository"
    )
    save_state_to_huggingface: Annotated[
        bool, _UPLOADED, OnlyWith(": no state is saved", any_of=True, save_state=True, save_state_on_train_end=True)
    ] = Field(False, description="upload training states too")
    async_upload: Annotated[bool, _UPLOADED] = Field(
        False, description="upload in the background while training goes on"
    )


class SamplingConfig(Section):
    """Sample images before, during and after training."""

    sample_prompts: str | list[str] | None = Field(
        None,
        description="prompts in a list, or a file of them: text, TOML or JSON, as kohya's. After a prompt may stand "
        "--w and --h (size; else the model's own, but no larger than the dataset's), --d (seed), --s (steps), "
        "--g (guidance), --n (negative prompt, with --l, its strength), --ci and --mi (image and mask of a model that "
        "takes one)",
    )
    sample_model: Annotated[str | None, SAMPLED, IMAGES] = Field(
        None,
        description="folder, file or name on the hub of a model of the same architecture and format: samples are made "
        "with it instead, without base_weights, in as many steps as it is distilled to (of a LoRA for a turbo model)",
    )
    sample_every_n_steps: Annotated[Positive | None, SAMPLED] = Field(
        None, description="sample every so many optimizer steps"
    )
    sample_every_n_epochs: Annotated[Positive | None, SAMPLED] = Field(None, description="sample every so many epochs")
    sample_at_first: Annotated[bool, SAMPLED] = Field(False, description="sample before the first step")
    sample_at_end: Annotated[bool, SAMPLED] = Field(True, description="sample after the last step")


class ValidationConfig(Section):
    """Loss on held-out images, at fixed noise and fixed timesteps; unless it is said when, with each save."""

    validate_every_n_steps: Positive | None = Field(None, description="validate every so many optimizer steps")
    validate_every_n_epochs: Positive | None = Field(None, description="validate every so many epochs")
    validation_sigmas: list[Annotated[float, Field(gt=0, lt=1)]] = Field(
        [0.1, 0.3, 0.5, 0.7, 0.9], description="the sigmas every held-out image is seen at"
    )
    max_validation_images: Positive = Field(32, description="at most so many held-out images")


class LoggingConfig(Section):
    """Metrics and trackers. metrics.jsonl is always written."""

    log_with: Literal["tensorboard", "wandb", "all"] | None = Field(None, description="trackers")
    logging_dir: Annotated[str | None, OnlyWith(log_with=True)] = Field(
        None, description="folder for tracker files; default <output_dir>/logs"
    )
    log_tracker_name: Annotated[str, OnlyWith(log_with=True)] = Field(
        "tandem", description="project name in the tracker"
    )
    wandb_run_name: Annotated[str | None, OnlyWith(log_with=("wandb", "all"))] = Field(
        None, description="run name in wandb; default output_name"
    )
    log_every_n_steps: Positive = Field(1, description="write metrics every so many steps; each reads the loss once")

    @field_validator("log_tracker_name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if problem := find_bad_name(value):
            raise ValueError(problem)
        return value


class AccelerateConfig(Section):
    """Process group, DDP and compilation."""

    ddp_timeout: Size = Field(10, description="minutes until a stuck collective fails")
    ddp_gradient_as_bucket_view: bool = Field(False, description="DDP gradients as views of the buckets: less memory")
    ddp_static_graph: bool = Field(False, description="tell DDP that every step uses the same parameters")
    torch_compile: bool | Literal["auto"] = Field(
        "auto",
        description="compile the transformer blocks, which takes a minute; auto: on a GPU, if 300 steps are left",
    )
    dynamo_backend: Annotated[Literal["inductor", "aot_eager", "eager"], OnlyWith(torch_compile=True)] = Field(
        "inductor", description="compiler"
    )
    dynamo_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune"],
        OnlyWith(torch_compile=True, dynamo_backend=("inductor",)),
    ] = Field("default", description="inductor mode")
    cuda_graph: Annotated[bool | Literal["auto"], OnlyFor(("images",), "is for LoRAs on image models; remove it")] = (
        Field(
            "auto",
            description="run forward and backward as one CUDA graph; auto: on one NVIDIA GPU, after three steps of a "
            "size, not with swap, offload, dropout or fp16",
        )
    )


class ParallelConfig(Section):
    """How the processes of a run share the work; started with torchrun --nproc-per-node N."""

    shard: Size = Field(
        1, description="processes that share one copy of the weights (FSDP2); 1: each has a full copy (DDP)"
    )
    dp: Size | None = Field(
        None,
        description="replicas that train on different batches, beside shard (HSDP), tp or pp; default: as many as "
        "there are processes for",
    )
    pp: Size = Field(1, description="pipeline stages, each a process with some of the blocks; 1: no pipeline")
    microbatches: Annotated[Batch | None, _PIPELINED] = Field(
        None, description="equal parts that a pipeline splits a batch into; default: as many as stages"
    )
    tp: Size = Field(
        1, description="processes that compute each large layer together, on the same batch (tensor parallelism)"
    )

    zero: Annotated[
        int | None, OnlyFor(("images", "chats"), "is for LoRAs; set shard, which splits what zero = 3 does")
    ] = Field(
        None,
        ge=1,
        le=3,
        description="DeepSpeed's ZeRO: all processes split the LoRA's optimizer state (1), its gradients too (2), the "
        "model's weights too (3); needs requirements/zero.txt",
    )

    device_map: Annotated[
        Literal["balanced"] | None,
        OnlyFor(("images",), "is for LoRAs on image models; set shard, tp or pp, with a process a GPU"),
    ] = Field(None, description="one process drives all GPUs, each with some of the blocks; one works at a time")

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are gathered where they are used, by FSDP2 or DeepSpeed."""
        return self.shard > 1 or self.zero == 3

    @property
    def microbatch_count(self) -> int:
        """Into how many microbatches a pipeline cuts a batch."""
        return self.microbatches or self.pp

    @property
    def splits_model(self) -> bool:
        """Whether a process gets a part of the model only, so that it must not go to its device in full."""
        return self.gathers_weights or self.pp > 1 or self.tp > 1 or self.device_map is not None

    def replicas(self, processes: int) -> int:
        """Return how often the weights are held by ``processes`` processes.

        Raises:
            UserError: the product of all dimensions is not their number, or, without ``dp``, does not divide it; or
                ``zero`` has nobody to split among.
        """
        if self.zero is not None and processes == 1:
            raise UserError(
                f"zero = {self.zero} splits among several processes; start with torchrun --nproc-per-node 2"
            )
        once = self.pp * self.shard * self.tp  # processes that hold the weights once
        if self.dp is None and processes % once == 0:
            return processes // once
        needed = once * (self.dp or max(1, processes // once))
        if self.dp is None or processes != needed:
            sizes = {"dp": self.dp, "pp": self.pp, "shard": self.shard, "tp": self.tp}
            layout = ", ".join(f"{key} = {size}" for key, size in sizes.items() if size and (size > 1 or key == "dp"))
            raise UserError(
                f"{layout} needs {needed} processes, this run has {processes}; "
                f"start with torchrun --nproc-per-node {needed}"
            )
        return self.dp

    def mesh(self, processes: int) -> dict[str, int]:
        """Return how many of ``processes`` lie along each dimension; what travels most, travels along the last.

        Neighbours lie along the last. Raises as :meth:`replicas`.
        """
        return {"pp": self.pp, "dp": self.replicas(processes), "shard": self.shard, "tp": self.tp}
