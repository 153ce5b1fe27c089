"""Options that could only be ignored are refused before anything is loaded.

Each rule names two keys that do not go together, or a key that has no effect under the chosen settings, and
says what to do. A rule looks at what the user set (``model_fields_set``), so defaults never raise a complaint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from library.config.device_map_conflicts import device_map_conflicts
from library.config.instruction_schema import InstructionTrainConfig
from library.config.memory_schema import recomputation_conflicts
from library.config.optimizer_conflicts import find_conflicts as find_optimizer_conflicts
from library.config.outcomes import saves_with_base_weights, trains_text_encoders
from library.config.parallel_schema import parallel_conflicts
from library.config.pipeline_conflicts import pipeline_conflicts
from library.config.placement_conflicts import placement_conflicts
from library.config.schema import FlowConfig, LoggingConfig, ModelConfig, TrainConfig
from library.config.section import unused
from library.config.tensor_conflicts import tensor_conflicts
from library.config.zero_conflicts import zero_conflicts


def find_conflicts(config: TrainConfig) -> Iterator[str]:
    """Yield every conflict among the options, as one line with its remedy."""
    rules: tuple[Callable[[TrainConfig], Iterator[str]], ...] = (_model, _parity, _flow, _sampling, _memory)
    for rule in rules:
        yield from rule(config)
    yield from shared_conflicts(config)


def shared_conflicts(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    """Yield the conflicts within what a LoRA on any model has."""
    for rule in (
        _precision,
        _faults,
        _fp8,
        _from_weights,
        _saving,
        _tracking,
        _compiling,
        _sharding,
        pipeline_conflicts,
        tensor_conflicts,
        device_map_conflicts,
        zero_conflicts,
        placement_conflicts,
    ):
        yield from rule(config)
    yield from recomputation_conflicts(config.training, config.accelerate.torch_compile)
    yield from find_optimizer_conflicts(config.optimizer)


_FLUX_KEYS = ("ae", "clip_l", "t5xxl", "clip_l_tokenizer", "t5xxl_tokenizer", "t5xxl_max_token_length")
_QWEN_KEYS = ("vae", "text_encoder", "qwen_tokenizer", "zero_cond_t")


def model_conflicts(model: ModelConfig) -> Iterator[str]:
    """Yield a complaint for each file or setting that belongs to another family than ``model_type``."""
    kind = model.model_type
    flux, edits = kind.startswith("flux"), kind == "qwen_image_edit_plus"
    yield from unused(model, _FLUX_KEYS, not flux, f'with model_type = "{kind}", whose files are vae and text_encoder')
    yield from unused(model, _QWEN_KEYS, flux, f'with model_type = "{kind}", whose files are ae, clip_l and t5xxl')
    yield from unused(model, ("zero_cond_t",), not flux and not edits, f'with model_type = "{kind}"')


def _model(config: TrainConfig) -> Iterator[str]:
    yield from model_conflicts(config.model)
    kind = config.model.model_type
    reason = f'with model_type = "{kind}", which takes no guidance'
    yield from unused(config.flow, ("guidance_scale",), not kind.startswith("flux"), reason)


def _precision(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    training, base = config.training, config.model.base_dtype
    if training.full_bf16 and training.mixed_precision != "bf16":
        yield 'full_bf16: needs the forward pass in bf16 too; set mixed_precision = "bf16"'
    wanted = {"bf16": "bf16", "fp16": "fp16"}.get(base)
    if wanted and training.mixed_precision != wanted:
        yield f'base_dtype: {base} weights need an {base} forward pass; set mixed_precision = "{wanted}"'


def _memory(config: TrainConfig) -> Iterator[str]:
    training = config.training
    if training.memory == "manual":
        return
    policy = ("gradient_checkpointing", "checkpoint_keep_mb", "cpu_offload_checkpointing", "blocks_to_swap")
    for key in policy:
        if getattr(training, key):
            yield f'{key}: memory = "auto" chooses it; remove one of them'
    if training.preflight is not None:
        yield 'preflight: memory = "auto" takes its steps in any case; remove it'
    if config.parallel.splits_model or config.parallel.zero is not None:
        yield 'memory: "auto" tries the whole model on each device; remove it, or the split'


def _faults(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    training = config.training
    yield from unused(training, ("nonfinite_limit",), training.nonfinite == "stop", 'with nonfinite = "stop"')


def _fp8(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    fp8 = config.precision
    if fp8.fp8_base and fp8.fp8_scaled:
        yield "fp8_base: casts without scales, fp8_scaled quantises with scales; keep one of them"
    quantises = fp8.fp8_base or fp8.fp8_scaled
    yield from unused(fp8, ("fp8_granularity",), not fp8.fp8_scaled, "without fp8_scaled")
    recipe = ("fp8_format", "fp8_keep", "fp8_keep_patterns", "fp8_rounding")
    yield from unused(fp8, recipe, not quantises, "without fp8_base or fp8_scaled")
    if fp8.fp8_activations != "none" and (fp8.fp8_compute == "scaled_mm" or fp8.fp8_input_gradient):
        yield "fp8_activations: products in fp8 round them already; remove fp8_compute and fp8_input_gradient"
    dequantises = fp8.fp8_compute == "dequant"
    yield from unused(fp8, ("fp8_input_gradient",), dequantises, 'with fp8_compute = "dequant"')
    for key, wanted in (
        ("fp8_compute = scaled_mm", fp8.fp8_compute == "scaled_mm"),
        ("fp8_input_gradient", fp8.fp8_input_gradient),
    ):
        if wanted and fp8.fp8_scaled and fp8.fp8_granularity.startswith("block"):
            yield f'{key}: block scales cannot be multiplied in fp8; set fp8_granularity to "row" or "tensor"'
        if wanted and quantises and fp8.fp8_format != "e4m3fn":
            yield f'{key}: {fp8.fp8_format} weights cannot be multiplied in fp8; set fp8_format = "e4m3fn"'
    if fp8.fp8_text_encoder and config.training.mixed_precision == "fp16":
        yield 'fp8_text_encoder: T5 leaves the range of fp16; set mixed_precision = "bf16" or remove it'


def _from_weights(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    network = config.network
    yield from unused(network, ("allow_partial",), network.network_weights is None, "without network_weights")
    yield from unused(network, ("allow_partial",), network.dim_from_weights, "with dim_from_weights")
    if not network.dim_from_weights:
        return
    if network.network_weights is None:
        yield "dim_from_weights: there is no file to take ranks from; set network_weights"
    ranks = ("network_dim", "network_alpha", "network_args", "network_dropout", "network_type", "init_lora_weights")
    keys = (*ranks, "use_rslora", "network_train_text_encoder_only")
    yield from unused(network, keys, True, "with dim_from_weights, which takes layers, ranks and alphas from the file")
    encoders = any(rate > 0 for rate in config.optimizer.text_encoder_lr)
    yield from unused(config.optimizer, ("text_encoder_lr",), encoders, "with dim_from_weights: the transformer learns")


def _parity(config: TrainConfig) -> Iterator[str]:
    parity = config.parity
    teacher = parity.parity_teacher is not None
    keys = ("parity_lora", "parity_weight", "parity_cache")
    yield from unused(parity, keys, not teacher, "without parity_teacher")
    if not teacher:
        return
    if not (parity.parity_lora or config.network.network_weights):
        yield "parity_teacher: it needs the LoRA as it was trained in bf16; set network_weights to that LoRA"
    if config.flow.loss_type != "l2":
        yield f'parity_teacher: learns by the squared error, not {config.flow.loss_type}; set loss_type = "l2"'
    if any(rate > 0 for rate in config.optimizer.text_encoder_lr):
        yield (
            "parity_teacher: its answers are to cached text, which text encoders in training change; remove "
            "text_encoder_lr"
        )


def _flow(config: TrainConfig) -> Iterator[str]:
    flow: FlowConfig = config.flow
    sampling, scheme = flow.timestep_sampling, flow.weighting_scheme
    if flow.min_timestep >= flow.max_timestep:
        yield f"min_timestep: {flow.min_timestep} is not below max_timestep {flow.max_timestep}; swap or change them"
    if scheme in ("logit_normal", "mode") and sampling != "sigma":
        yield f'weighting_scheme: {scheme} shapes the density of timestep_sampling = "sigma" only; set that too'
    yield from unused(
        flow,
        ("discrete_flow_shift",),
        sampling not in ("shift", "sigma"),
        f'with timestep_sampling = "{sampling}" (shift and sigma use it)',
    )
    yield from unused(
        flow,
        ("sigmoid_scale",),
        sampling not in ("sigmoid", "shift", "flux_shift", "qwen_shift"),
        f'with timestep_sampling = "{sampling}" (sigmoid and the shifts use it)',
    )
    yield from unused(
        flow, ("logit_mean", "logit_std"), scheme != "logit_normal", 'without weighting_scheme = "logit_normal"'
    )
    yield from unused(flow, ("mode_scale",), scheme != "mode", 'without weighting_scheme = "mode"')
    yield from unused(flow, ("huber_c",), flow.loss_type == "l2", 'with loss_type = "l2"')
    yield from unused(flow, ("seam_width",), not flow.seam_loss_weight, "without seam_loss_weight")


def _saving(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    saving, hub, validation = config.saving, config.hub, config.validation
    steps, epochs = saving.save_every_n_steps, saving.save_every_n_epochs
    yield from unused(saving, ("save_last_n_steps",), steps is None, "without save_every_n_steps")
    yield from unused(saving, ("save_last_n_epochs",), epochs is None, "without save_every_n_epochs")
    for kind, every in (("steps", steps), ("epochs", epochs)):
        key = f"save_last_n_{kind}_state"
        without_states = every is None or not saving.save_state
        yield from unused(saving, (key,), without_states, f"without save_every_n_{kind} and save_state")
    if not (validation.validate_every_n_steps or validation.validate_every_n_epochs):
        reason = "without validate_every_n_steps or validate_every_n_epochs"
        yield from unused(saving, ("save_best", "early_stop_patience"), True, reason)
    if saving.ema_decay is not None and "schedulefree" in config.optimizer.optimizer_type.lower():
        yield "ema_decay: a schedule-free optimizer averages its weights already; remove ema_decay"
    optional = ("huggingface_path_in_repo", "huggingface_repo_visibility", "save_state_to_huggingface", "async_upload")
    yield from unused(hub, optional, hub.huggingface_repo_id is None, "without huggingface_repo_id")
    if hub.save_state_to_huggingface and not (saving.save_state or saving.save_state_on_train_end):
        yield "save_state_to_huggingface: no state is saved; set save_state or save_state_on_train_end"


def _sampling(config: TrainConfig) -> Iterator[str]:
    yield from unused(
        config.sampling,
        ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first", "sample_at_end"),
        config.sampling.sample_prompts is None,
        "without sample_prompts",
    )


def _tracking(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    logging: LoggingConfig = config.logging
    yield from unused(logging, ("logging_dir", "log_tracker_name"), logging.log_with is None, "without log_with")
    yield from unused(logging, ("wandb_run_name",), logging.log_with not in ("wandb", "all"), "without wandb")


def _compiling(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    compiling = config.accelerate
    if config.training.blocks_to_swap and compiling.torch_compile:
        yield "blocks_to_swap: compiled blocks keep the memory their weights lay in; remove torch_compile or swap none"
    yield from unused(
        compiling, ("dynamo_backend", "dynamo_mode"), not compiling.torch_compile, "without torch_compile"
    )
    yield from unused(
        compiling, ("dynamo_mode",), compiling.dynamo_backend != "inductor", 'without dynamo_backend = "inductor"'
    )


def _sharding(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    training, alone = config.training, "is not made for shard; remove one of them"
    yield from parallel_conflicts(
        config.parallel,
        {
            "blocks_to_swap": (training.blocks_to_swap, "moves whole weights, which shard splits; remove one of them"),
            "torch_compile": (config.accelerate.torch_compile, alone),
            "preflight": (training.preflight, "loads the model whole for its trial; remove it, or set shard = 1"),
            "mixed_precision": (training.mixed_precision == "fp16", 'fp16 is not made for shard; set "bf16"'),
            "save_format": (
                saves_with_base_weights(config),
                f"{config.saving.save_format}'s DoRA is made with whole base weights, which shard splits; set "
                'save_format = "diffusers"',
            ),
            "full_bf16": (training.full_bf16, "accelerate makes fp32 of it with shard; remove one of them"),
            "text_encoder_lr": (
                trains_text_encoders(config),
                "accelerate shards a single network; remove one of them",
            ),
        },
    )
