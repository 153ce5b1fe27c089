"""Options that could only be ignored are refused before anything is loaded.

Each rule names two keys that do not go together, or a key that has no effect under the chosen settings, and
says what to do. A rule looks at what the user set (``model_fields_set``), so defaults never raise a complaint.

What several options of a LoRA come to together, for the rules that refuse what does not go with it.

Optimizer settings that contradict each other, found before anything is loaded.

A setting that could only be ignored is refused: a person who writes ``lr_scheduler_num_cycles = 3`` beside
``lr_scheduler = "cosine"`` expects three cycles and would get one. Refused is only what was set on purpose
(pydantic's ``model_fields_set``) to something else than the default; a config that spells out defaults runs.

The optimizer is judged by its name here, so that the check needs no import of optimizer packages. What only
the built optimizer knows is checked again by ``library.training.optim.factory`` and
``library.training.optim.schedules``.

What does not go with one process that drives several GPUs (``device_map``); see ``library.config.rules``.

What does not go with a LoRA that is split with its base (``lora_placement``); see ``library.config.rules``.

What does not go with DeepSpeed's ZeRO (``zero``); see ``library.config.rules``.

What does not go with layers that processes have together (``tp``); see ``library.config.rules``.

What does not go with a pipeline (``pp``), for LoRAs and for language models; see ``library.config.rules``.

Options of a LoRA on a language model that could only be ignored; see ``library.config.rules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from library.config.chat_schema import ChatDataConfig, ChatTrainConfig
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.pretrain_schema import PretrainConfig
from library.config.schema import (
    FlowConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    parallel_conflicts,
    recomputation_conflicts,
    refused,
    unused,
)


def find_conflicts(config: TrainConfig) -> Iterator[str]:
    """Yield every conflict among the options, as one line with its remedy."""
    rules: tuple[Callable[[TrainConfig], Iterator[str]], ...] = (_model, _parity, _flow, _sampling, _memory)
    for rule in rules:
        yield from rule(config)
    yield from shared_conflicts(config)


def shared_conflicts(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
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


def model_conflicts(model: ModelConfig) -> Iterator[str]:
    """Yield a complaint for each file or setting that belongs to another family than ``model_type``."""
    own = MODEL_TYPES[model.model_type]
    others = {key for row in MODEL_TYPES.values() for key in row.keys} - set(own.keys)
    *first, last = own.files
    files = f"{', '.join(first)} and {last}"
    reason = f'with model_type = "{model.model_type}", whose files are {files}'
    yield from unused(model, tuple(key for key in type(model).model_fields if key in others), True, reason)


def _model(config: TrainConfig) -> Iterator[str]:
    yield from model_conflicts(config.model)
    kind = config.model.model_type
    reason = f'with model_type = "{kind}", which takes no guidance'
    yield from unused(config.flow, ("guidance_scale",), not MODEL_TYPES[kind].takes_guidance, reason)


def _precision(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
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
    policy = ("gradient_checkpointing", "activation_budget_mb", "cpu_offload_checkpointing", "blocks_to_swap")
    for key in policy:
        if getattr(training, key):
            yield f'{key}: memory = "auto" chooses it; remove one of them'
    if training.preflight is not None:
        yield 'preflight: memory = "auto" takes its steps in any case; remove it'
    if config.parallel.splits_model or config.parallel.zero is not None:
        yield 'memory: "auto" tries the whole model on each device; remove it, or the split'


def _faults(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
    training = config.training
    yield from unused(training, ("on_nan_limit",), training.on_nan == "stop", 'with on_nan = "stop"')


def _fp8(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
    fp8 = config.precision
    if fp8.fp8_base and fp8.fp8_scaled:
        yield "fp8_base: casts without scales, fp8_scaled quantises with scales; keep one of them"
    quantises = fp8.fp8_base or fp8.fp8_scaled
    yield from unused(fp8, ("fp8_granularity",), not fp8.fp8_scaled, "without fp8_scaled")
    recipe = ("fp8_format", "fp8_exclude", "fp8_exclude_patterns", "fp8_rounding")
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


def _from_weights(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
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
    parity = config.distillation
    teacher = parity.distill_from is not None
    keys = ("distill_lora", "distill_weight", "distill_cache")
    yield from unused(parity, keys, not teacher, "without distill_from")
    if not teacher:
        return
    if not (parity.distill_lora or config.network.network_weights):
        yield "distill_from: it needs the LoRA as it was trained in bf16; set network_weights to that LoRA"
    if config.flow.loss_type != "l2":
        yield f'distill_from: learns by the squared error, not {config.flow.loss_type}; set loss_type = "l2"'
    if any(rate > 0 for rate in config.optimizer.text_encoder_lr):
        yield (
            "distill_from: its answers are to cached text, which text encoders in training change; remove "
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
        sampling in ("uniform", "sigma"),
        f'with timestep_sampling = "{sampling}" (sigmoid and the shifts use it)',
    )
    yield from unused(
        flow, ("logit_mean", "logit_std"), scheme != "logit_normal", 'without weighting_scheme = "logit_normal"'
    )
    yield from unused(flow, ("mode_scale",), scheme != "mode", 'without weighting_scheme = "mode"')
    yield from unused(flow, ("huber_c",), flow.loss_type == "l2", 'with loss_type = "l2"')
    yield from unused(flow, ("seam_width",), not flow.seam_loss_weight, "without seam_loss_weight")


def _saving(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
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


def _tracking(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
    logging: LoggingConfig = config.logging
    yield from unused(logging, ("logging_dir", "log_tracker_name"), logging.log_with is None, "without log_with")
    yield from unused(logging, ("wandb_run_name",), logging.log_with not in ("wandb", "all"), "without wandb")


def _compiling(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
    compiling = config.accelerate
    if config.training.blocks_to_swap and compiling.torch_compile:
        yield "blocks_to_swap: compiled blocks keep the memory their weights lay in; remove torch_compile or swap none"
    yield from unused(
        compiling, ("dynamo_backend", "dynamo_mode"), not compiling.torch_compile, "without torch_compile"
    )
    yield from unused(
        compiling, ("dynamo_mode",), compiling.dynamo_backend != "inductor", 'without dynamo_backend = "inductor"'
    )


def _sharding(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
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


def trains_text_encoders(config: TrainConfig | ChatTrainConfig) -> bool:
    """Whether text encoders are trained, beside the transformer or alone."""
    return config.network.network_train_text_encoder_only or any(config.optimizer.text_encoder_lr)


def saves_with_base_weights(config: TrainConfig | ChatTrainConfig) -> bool:
    """Whether saving takes the base's weights, not only what is trained: DoRA in the other programs' layouts."""
    is_dora, save_format = config.network.network_type == "dora", config.saving.save_format
    of_images = config.model.model_type in IMAGE_MODELS  # of the others it is peft's whatever the key says
    return is_dora and of_images and save_format not in ("diffusers", "peft")


BY_ELEMENT = ("AdamW", "Adam", "SGD", "SGDNesterov")  # see treats_numbers_alone
DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial", "rex", "warmup_stable_decay")
# Below this, an optimizer that estimates its step size was surely given another optimizer's learning rate.
SMALLEST_LR_FACTOR = 0.01

_ONLY_WITH: dict[str, tuple[str, ...]] = {
    "lr_scheduler_power": ("polynomial",),
    "lr_scheduler_num_cycles": ("cosine_with_restarts",),
    "lr_scheduler_min_lr_ratio": DECAYING,
    "lr_decay_steps": ("warmup_stable_decay",),
    "lr_warmup_steps": ("constant_with_warmup", *DECAYING),
}


def treats_numbers_alone(optimizer_type: str) -> bool:
    """Return whether the optimizer treats every number of a weight by itself, so that it can be given a part of it."""
    return optimizer_type.lower() in [name.lower() for name in BY_ELEMENT]


def estimates_step_size(optimizer_type: str) -> bool:
    """Return whether the named optimizer (short name or class path) finds its own step size ``d``."""
    return _class_name(optimizer_type).startswith(("prodigy", "dadapt"))


def adapts_each_group(optimizer_type: str) -> bool:
    """Return whether the named optimizer estimates a step size for each parameter group, so that rates may differ."""
    return _class_name(optimizer_type).startswith("prodigyplus")


def effective_learning_rate(config: OptimizerConfig) -> float:
    """Return the learning rate to train with: the one that was set, else the optimizer's customary one.

    Optimizers that estimate their step size take a factor instead of a rate, customarily 1.0.
    """
    if "learning_rate" not in config.model_fields_set and estimates_step_size(config.optimizer_type):
        return 1.0
    return config.learning_rate


def find_optimizer_conflicts(config: OptimizerConfig) -> Iterator[str]:
    """Yield one line about each setting that could have no effect or fights another."""
    yield from _schedule_conflicts(config)
    yield from _optimizer_conflicts(config)


def _schedule_conflicts(config: OptimizerConfig) -> Iterator[str]:
    scheduler = config.lr_scheduler
    for key, schedulers in _ONLY_WITH.items():
        if _is_set(config, key) and scheduler not in schedulers:
            known = ", ".join(schedulers)
            yield f"{key} has no effect with lr_scheduler {scheduler!r}; remove it or choose one of: {known}"
    if scheduler == "constant_with_warmup" and not config.lr_warmup_steps:
        yield "lr_scheduler 'constant_with_warmup' needs lr_warmup_steps above 0; set it or choose 'constant'"
    if scheduler == "warmup_stable_decay" and not config.lr_decay_steps:
        yield "lr_scheduler 'warmup_stable_decay' needs lr_decay_steps above 0 (such as 0.2); set it"


def _optimizer_conflicts(config: OptimizerConfig) -> Iterator[str]:
    name = _class_name(config.optimizer_type)
    if config.trust_class_paths and "." not in config.optimizer_type:
        yield "trust_class_paths has no effect without a class path (a.b.C) in optimizer_type; remove it"
    flags = {argument.replace(" ", "") for argument in config.optimizer_args}
    if "schedulefree" in name and config.lr_scheduler != "constant" and "use_schedulefree=False" not in flags:
        yield (
            f"{config.optimizer_type} averages weights instead of lowering the learning rate, lr_scheduler "
            f'{config.lr_scheduler!r} would fight it; set lr_scheduler = "constant" (for a warm-up, '
            "AdamWScheduleFree takes warmup_steps in optimizer_args)"
        )
    if name == "adafactor" and flags & {"relative_step=True", "warmup_init=True"}:
        for key in ("learning_rate", "text_encoder_lr", "lr_scheduler"):
            if _is_set(config, key):
                yield f"{key} has no effect with Adafactor's relative_step=True; remove one of the two"
    lr = effective_learning_rate(config)
    if estimates_step_size(config.optimizer_type) and 0 < lr < SMALLEST_LR_FACTOR:
        yield (
            f"learning_rate {lr:g} multiplies the step size that {config.optimizer_type} estimates, "
            "nothing would be learned; set learning_rate = 1.0 or leave it out"
        )


def _class_name(optimizer_type: str) -> str:
    return optimizer_type.rsplit(".", 1)[-1].lower()


def _is_set(config: OptimizerConfig, key: str) -> bool:
    """Return whether ``key`` was given, and given another value than its default."""
    return key in config.model_fields_set and getattr(config, key) != type(config).model_fields[key].default


def device_map_conflicts(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with ``device_map``."""
    parallel, training = config.parallel, config.training
    if parallel.device_map is None:
        return
    if not hasattr(config, "flow"):
        yield from no_device_map(parallel)
        return
    several = max(parallel.dp or 1, parallel.shard, parallel.tp, parallel.pp) > 1
    yield from refused(
        {
            "device_map": (several, "one process drives all GPUs; remove it, or dp, shard, tp and pp"),
            "blocks_to_swap": (training.blocks_to_swap, "has blocks on one device in turn; remove one of them"),
            "cpu_offload_checkpointing": (
                training.cpu_offload_checkpointing,
                "brings inputs back to one device; remove one of them",
            ),
            "torch_compile": (config.accelerate.torch_compile, "is not made for device_map; remove one of them"),
            "preflight": (training.preflight, "looks at one device; remove it, or device_map"),
            "mixed_precision": (training.mixed_precision == "fp16", 'fp16 is not made for device_map; set "bf16"'),
            "text_encoder_lr": (
                trains_text_encoders(config),
                "text encoders are not dealt out; remove it, or device_map",
            ),
        }
    )


def no_device_map(parallel: ParallelConfig) -> Iterator[str]:
    """Yield a line if ``device_map`` is set for a language model."""
    if parallel.device_map is not None:
        yield "device_map: is for LoRAs on image models; set shard, tp or pp, with a process a GPU"


_WHOLE = 'set lora_placement = "replicated"'


def placement_conflicts(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with splitting it."""
    parallel, kind, network = config.parallel, config.optimizer.optimizer_type, config.network.network_type
    if not parallel.splits_lora:
        return
    yield from refused(
        {
            "lora_placement": (
                not parallel.accelerate_shards or parallel.is_pipelined,
                "sharded splits the LoRA as shard splits the base, without tp and pp; set shard, or remove it",
            ),
            "optimizer_type": (
                not treats_numbers_alone(kind),
                f"{kind} does not treat every number by itself, and would have a part of the LoRA; use "
                f"{', '.join(BY_ELEMENT)}, or {_WHOLE}, with which any trains",
            ),
            "network_type": (network != "lora", f"of {network} nothing is split; train a lora, or {_WHOLE}"),
            "ema_decay": (config.saving.ema_decay, f"averages are of whole weights; remove it, or {_WHOLE}"),
            "on_nan": (
                config.training.on_nan != "stop",
                f'a single image\'s gradients are not had of a split LoRA; set on_nan = "stop", or {_WHOLE}',
            ),
        }
    )


def no_placement(parallel: ParallelConfig) -> Iterator[str]:
    """Yield a line if a placement is set where there is no LoRA."""
    if "lora_placement" in parallel.model_fields_set:
        yield "lora_placement: there is no LoRA, shard splits all weights; remove it"


_NOT_FOR_ZERO = "is not made for zero; remove one of them"
NO_FP8 = (
    "zero = 3 gathers weights in their own dtype, and gloo takes no fp8 (NCCL was not tried); set zero = 2, or shard"
)


def zero_conflicts(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with ``zero``."""
    parallel, training, precision = config.parallel, config.training, config.precision
    if parallel.zero is None:
        return
    kind, splits_weights = config.optimizer.optimizer_type, parallel.zero == 3
    several = max(parallel.shard, parallel.tp, parallel.pp) > 1 or parallel.device_map is not None
    fit, save_format = ", ".join(BY_ELEMENT), config.saving.save_format
    yield from refused(
        {
            "zero": (several, "splits among all processes; remove it, or shard, tp, pp and device_map"),
            "optimizer_type": (
                not treats_numbers_alone(kind),
                f"{kind} does not treat every number by itself, and zero gives it parts of flat tensors; use {fit}, or "
                "shard, with which any trains",
            ),
            "fp8_base": (splits_weights and precision.fp8_base, NO_FP8),
            "fp8_scaled": (splits_weights and precision.fp8_scaled, NO_FP8),
            "save_format": (
                splits_weights and saves_with_base_weights(config),
                f"{save_format}'s DoRA is made with whole base weights, which zero = 3 splits; set "
                'save_format = "diffusers"',
            ),
            "blocks_to_swap": (training.blocks_to_swap, "DeepSpeed puts the model on its device; remove one of them"),
            "torch_compile": (config.accelerate.torch_compile, _NOT_FOR_ZERO),
            "preflight": (training.preflight, "DeepSpeed's engine is not taken down after a trial; remove it, or zero"),
            "mixed_precision": (training.mixed_precision == "fp16", 'fp16 is not made for zero; set "bf16"'),
            "full_bf16": (training.full_bf16, "DeepSpeed steps on fp32 copies; remove one of them"),
            "text_encoder_lr": (
                trains_text_encoders(config),
                "DeepSpeed trains a single network; remove it, or zero",
            ),
        }
    )


def no_zero(parallel: ParallelConfig) -> Iterator[str]:
    """Yield a line if ``zero`` is set where all weights are trained."""
    if parallel.zero is not None:
        yield "zero: is for LoRAs; set shard, which splits weights, gradients and optimizer as zero = 3 does"


_NOT_FOR_TP = "is not made for tp; remove one of them"


def tensor_conflicts(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with ``tp``."""
    if not config.parallel.is_tensor_parallel:
        return
    training, kind, rounds = config.training, config.network.network_type, config.precision.fp8_activations != "none"
    whole = f"{kind} changes whole weights, of which tp leaves parts; train a lora, or set tp = 1"
    yield from refused(
        {
            "network_type": (kind != "lora", whole),
            "blocks_to_swap": (training.blocks_to_swap, "moves whole weights, which tp splits; remove one of them"),
            "fp8_activations": (rounds, "rounds by whole inputs, of which tp gives a layer a part; remove one of them"),
            "torch_compile": (config.accelerate.torch_compile, _NOT_FOR_TP),
            "preflight": (training.preflight, "loads the model whole for its trial; remove it, or set tp = 1"),
            "mixed_precision": (training.mixed_precision == "fp16", 'fp16 is not made for tp; set "bf16"'),
            "text_encoder_lr": (trains_text_encoders(config), "text encoders are not split; remove it, or set tp = 1"),
        }
    )


def llm_tensor_conflicts(config: PretrainConfig) -> Iterator[str]:
    """Yield a line for each option of pretraining that does not go with ``tp``."""
    if not config.parallel.is_tensor_parallel:
        return
    kind, fit = config.optimizer.optimizer_type, ", ".join(BY_ELEMENT)
    yield from refused(
        {
            "optimizer_type": (
                not treats_numbers_alone(kind),
                f"{kind} needs whole matrices, which tp splits; use {fit}, or set tp = 1",
            ),
            "full_bf16": (
                config.training.full_bf16,
                'rounds whole tensors, which tp splits; set mixed_precision = "bf16" instead',
            ),
            "torch_compile": (config.accelerate.torch_compile, _NOT_FOR_TP),
        }
    )


Options = dict[str, tuple[object, str]]  # name -> (whether it is set, reason and remedy)
_NOT_FOR_PP = "is not made for pp; remove one of them"


def pipeline_conflicts(config: TrainConfig | ChatTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with ``pp``."""
    training, kind = config.training, config.model.model_type
    lengths = f"{kind} keeps captions' lengths, so that parts of a batch differ in shape; use shard"
    if isinstance(data := getattr(config, "instructions", None), ChatDataConfig):
        yield from _too_many_pieces(config.parallel, data.train_batch_size)
    yield from _pp_conflicts(
        config.parallel,
        {
            "model_type": (MODEL_TYPES[kind].texts_differ_in_length, lengths),
            "save_format": (
                saves_with_base_weights(config),
                f"{config.saving.save_format}'s DoRA is made with base weights that other stages have; set "
                'save_format = "diffusers"',
            ),
            "blocks_to_swap": (training.blocks_to_swap, "a stage has few blocks; raise pp, or remove one of them"),
            "torch_compile": (config.accelerate.torch_compile, _NOT_FOR_PP),
            "preflight": (training.preflight, "loads the model whole for its trial; remove it, or set pp = 1"),
            "mixed_precision": (training.mixed_precision == "fp16", 'fp16 is not made for pp; set "bf16"'),
            "text_encoder_lr": (
                trains_text_encoders(config),
                "text encoders are not cut into stages; remove one of them",
            ),
        },
        splits=kind in IMAGE_MODELS,
    )


def llm_pipeline_conflicts(config: PretrainConfig) -> Iterator[str]:
    """Yield a line for each option of pretraining that does not go with ``pp``."""
    kind = config.optimizer.optimizer_type
    yield from _too_many_pieces(config.parallel, config.data.train_batch_size)
    yield from _pp_conflicts(
        config.parallel,
        {
            "optimizer_type": (
                estimates_step_size(kind),
                f"{kind} sums over all weights, of which a stage has a part; use AdamW or Muon, or pp = 1",
            ),
            "save_state": (
                config.saving.save_state and kind.lower() == "muon",
                "of Muon the states of stages are not gathered; use AdamW, or save models alone",
            ),
            "full_bf16": (config.training.full_bf16, 'is not made for pp; set mixed_precision = "bf16" instead'),
            "torch_compile": (config.accelerate.torch_compile, _NOT_FOR_PP),
        },
        splits=False,
    )


def _too_many_pieces(parallel: ParallelConfig, batch: int) -> Iterator[str]:
    if parallel.is_pipelined and (parallel.microbatches or 1) > batch:
        yield f"microbatches: {parallel.microbatches} pieces of a train_batch_size of {batch}; raise that or lower it"


def _pp_conflicts(parallel: ParallelConfig, options: Options, splits: bool) -> Iterator[str]:
    """Yield a line for each of ``options`` that is set; ``splits`` says whether a stage's layers can be split by tp."""
    if not parallel.is_pipelined:
        for key in ("microbatches", "schedule", "pp_balance"):
            if key in parallel.model_fields_set:
                yield f"{key}: has no effect without pp; set pp to the number of stages, or remove it"
        return
    beside: Options = {
        "shard": (parallel.is_sharded, "a stage's weights are not split once more; set shard = 1, and raise pp"),
        "tp": (parallel.tp > 1 and not splits, "of language models a stage is not split once more; set tp = 1"),
    }
    for key, (is_set, reason) in (beside | options).items():
        if is_set:
            yield f"{key}: {reason}"


def find_instruction_conflicts(config: ChatTrainConfig) -> Iterator[str]:
    """Yield every conflict among the options, as one line with its remedy."""
    yield from shared_conflicts(config)
    data, sampling, validation = config.instructions, config.sampling, config.validation
    if config.network.network_type not in ("lora", "dora"):
        kind = config.network.network_type
        yield f"network_type: peft's {kind} has another form; a language model takes lora and dora"
    if data.validation_data and data.validation_split:
        yield "validation_split: validation_data is what is validated on; remove one of them"
    if config.training.on_nan == "rollback":
        yield "on_nan: rollback leaves single images out; with conversations choose stop or skip"
    keys = ("validate_every_n_steps", "validate_every_n_epochs", "max_validation_conversations")
    held_out = bool(data.validation_data) or data.validation_split > 0
    yield from unused(validation, keys, not held_out, "without validation_data or validation_split")
    times = ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first", "sample_at_end")
    how = ("sample_tokens", "sample_temperature", "sample_top_p")
    yield from unused(sampling, (*times, *how), not sampling.sample_prompts, "without sample_prompts")
    greedy = bool(sampling.sample_prompts) and sampling.sample_temperature == 0
    yield from unused(sampling, ("sample_top_p",), greedy, "at sample_temperature 0 (greedy)")


_SIZES = ("width", "layers", "heads", "kv_heads", "hidden")


def find_llm_conflicts(config: PretrainConfig) -> Iterator[str]:
    """Yield every conflict among the options, as one line with its remedy."""
    model, sampling, optimizer = config.model, config.sampling, config.optimizer
    if (model.preset is None) == (model.init_from is None):
        yield "preset: give either preset (fresh weights) or init_from (published ones)"
    yield from unused(model, _SIZES, model.init_from is not None, "with init_from, whose weights have their size")
    if config.training.full_bf16 and config.training.mixed_precision != "no":
        yield 'full_bf16: weights are bf16 already; set mixed_precision = "no"'
    if config.training.full_bf16 and optimizer.optimizer_type.lower() == "muon":
        yield 'full_bf16: is not made for Muon; set mixed_precision = "bf16" instead'
    how = ("sample_every_n_steps", "sample_tokens", "sample_temperature", "sample_top_p")
    yield from unused(sampling, how, not sampling.sample_prompts, "without sample_prompts")
    greedy = bool(sampling.sample_prompts) and sampling.sample_temperature == 0
    yield from unused(sampling, ("sample_top_p",), greedy, "at sample_temperature 0 (greedy)")
    schedule = ("lr_warmup_steps", "lr_scheduler_min_lr_ratio")
    yield from unused(optimizer, schedule, optimizer.lr_scheduler == "constant", 'with lr_scheduler = "constant"')
    if optimizer.clip_during_warmup and optimizer.max_grad_norm == 0:
        yield "clip_during_warmup: has no effect with max_grad_norm 0; remove it"
    if config.saving.save_state and config.saving.save_every_n_steps is None:
        yield "save_state: has no effect without save_every_n_steps; set it or remove save_state"
    yield from recomputation_conflicts(config.training, config.accelerate.torch_compile)
    yield from _llm_sharding(config)
    yield from llm_pipeline_conflicts(config)
    yield from no_device_map(config.parallel)
    yield from no_zero(config.parallel)
    yield from no_placement(config.parallel)
    yield from llm_tensor_conflicts(config)
    yield from find_optimizer_conflicts(optimizer.shared())


# Their step on a weight's pieces is the pieces of their step on the weight; Prodigy's sums go over all pieces.
SHARDING_OPTIMIZERS = ("AdamW", "Adam", "SGD", "SGDNesterov", "Prodigy")


def _llm_sharding(config: PretrainConfig) -> Iterator[str]:
    kind, full_bf16 = config.optimizer.optimizer_type, config.training.full_bf16
    whole = kind.lower() not in [name.lower() for name in SHARDING_OPTIMIZERS]
    fit = ", ".join(SHARDING_OPTIMIZERS)
    yield from parallel_conflicts(
        config.parallel,
        {
            "optimizer_type": (
                whole,
                f"{kind} needs whole matrices, which shard splits; use {fit}, or shard = 1",
            ),
            "full_bf16": (full_bf16, 'rounds whole tensors, which shard splits; set mixed_precision = "bf16" instead'),
            "torch_compile": (config.accelerate.torch_compile, "is not made for shard; remove one of them"),
        },
    )
