"""What a LoRA on any model has: checks before loading, the network in the model, its optimizer, its file."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from rich.text import Text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from library import __version__
from library.config.chat_schema import ChatTrainConfig
from library.config.schema import TrainConfig
from library.data.batches import DataParallelRank
from library.errors import UserError
from library.files import broken_link
from library.models.hub import find_lora
from library.precision.checkpoint import QuantizedFile, WeightFiles
from library.precision.linear import ddp_ignored_names
from library.precision.recipe import WeightLoader, describe_base
from library.safetensors_io import read_safetensors_header
from library.training.checkpoint.metadata import LEAST_FACTS, save_facts, spec_fields, without_folders
from library.training.checkpoint.output_folder import describe_settings
from library.training.checkpoint.state import (
    AUTO,
    Position,
    load_training_state,
    read_position,
    refuse_finished,
    settings_of_state,
    start_position,
)
from library.training.optim.after_update import UpdateNorms, WeightNormLimit
from library.training.optim.factory import build_optimizer, check_optimizer
from library.training.optim.schedules import build_schedule
from library.training.parallel.gather import gathered
from library.training.parallel.parallelize import ParallelSpec
from library.training.plan import LoraPlan, as_in_state, family_options, with_precision
from library.training.report.progress import loads_in_table
from library.training.tasks.task import Task, describe_steps, run_length
from networks.adapters.lycoris import refuse_large_factor
from networks.files.adapters import load_lora, load_trainable
from networks.files.metadata import base_mismatch, build_metadata, trained_alphas, weight_file
from networks.files.readers import check_readers, read_by_none
from networks.files.verify import check_file
from networks.network import AdapterNetwork, attach_lora, inject_adapter, refuse_large_rank


class LoraTask(Task):
    """A LoRA, or another adapter, in a frozen model.

    Attributes:
        network: the LoRA, of all trained models together.
        text_encoders: those that are trained, as one module; None where none is.
        base_precision: of the frozen weights, in words.
        facts: of the run, for the file's metadata, under kohya's names.
        norm_limit: what keeps the updates small; None where nothing does.
    """

    plan: LoraPlan[Any]
    network: AdapterNetwork
    text_encoders: nn.Module | None = None
    base_precision: str
    facts: Mapping[str, object] = {}
    norm_limit: WeightNormLimit | None = None

    def _settled(self, config: Any) -> Any:
        self._unset = [key for key, (_, is_unset) in family_options(config).items() if is_unset]
        saved = settings_of_state(config.training.resume, config.saving)
        config = config if saved is None else as_in_state(config, saved)
        network, found = config.network, dict[str, Any]()
        if network.network_weights:
            found["network_weights"] = str(find_lora(network.network_weights, "network_weights"))
        if loras := getattr(network, "base_weights", ()):
            found["base_weights"] = [str(find_lora(lora, "base_weights")) for lora in loras]
        config = config.model_copy(update={"network": network.model_copy(update=found)})
        return with_precision(config, on_cpu=not torch.cuda.is_available())

    def state_settings(self) -> Mapping[str, Any]:
        return {key: value for key, (value, _) in family_options(self.plan.config).items()} | dict(self.resume_keys)

    def _say_defaults(self) -> None:
        """Print what nobody set and the family decides."""
        values, model_type = family_options(self.plan.config), self.plan.config.model.model_type
        if said := [f"{key} = {values[key][0]}" for key in self._unset if key in values]:
            self.console.print(f"{model_type}'s defaults: {', '.join(said)}", soft_wrap=True)

    def _check(self, config: TrainConfig | ChatTrainConfig) -> None:
        check_optimizer(config.optimizer)
        weights = config.network.network_weights
        if weights and not Path(weights).exists():
            raise UserError(f"network_weights: {weights} does not exist{broken_link(weights)}; check the path")

    def _check_saved(self, base: WeightFiles) -> None:
        """Look at the files a run goes on from, now that headers tell which model it is; no weights of it are read.

        Args:
            base: the model's, of which only headers are looked at.

        Raises:
            UserError: ``network_weights`` is no LoRA of this family; the state to go on from was trained on another
                base, or has nothing left to train; a rank is above that of every layer of the model; programs would not
                read the LoRA from its format.
        """
        training, network, options = self.plan.config.training, self.plan.config.network, self.plan.network.options
        shapes = [shape for name in base.names if len(shape := base.shape(name)) == 2]
        ranks = [(f"network_args: {option}", options.dims[kind]) for kind, option in options.dim_sources.items()]
        for option, rank in ranks if network.dim_from_weights else [("network_dim", options.dim), *ranks]:
            refuse_large_rank(option, rank, shapes, options.kind)
        for kind, factor in (("", options.factor), *options.factors.items()):
            refuse_large_factor(f"network_args: {f'{kind}_factor'.lstrip('_')}", factor, shapes)
        if not network.dim_from_weights:  # whose layers the end's check knows
            self._check_readers()
        if network.network_weights:
            load_trainable(network.network_weights, self.plan.network.targets)
        if self.state is not None:
            position = read_position(self.state, self.resume_keys, self.base_fingerprint)
            if training.max_train_epochs is None:
                refuse_finished(self.state, position, training.max_train_steps, training.resume == AUTO)

    def _check_readers(self) -> None:
        """Refuse a format that was asked for and that a program, or every program, would read in part; else say so."""
        plan, saving = self.plan.network, self.plan.config.saving
        options, names = plan.options, plan.options.trained_layers(plan.targets, plan.rates)
        kind, groups = options.kind, {group.name for name in names if (group := plan.targets.group_of(name))}
        factors = {options.factors.get(group, options.factor) for group in groups}
        check_readers(saving.save_for, names, plan.targets, self.save_format, kind, factors)
        if problem := read_by_none(names, plan.targets, self.save_format, kind):
            if "save_format" in saving.model_fields_set:
                raise UserError(problem)
            self.console.print(f"note: {problem}")

    def _note_base(self, layout: QuantizedFile | None, fp8: WeightLoader, dtype: torch.dtype) -> None:
        """Remember the precision of the base that was loaded; print it where some of it is in fp8."""
        self.base_precision = describe_base(layout, fp8, dtype)
        if layout is not None or fp8.recipe is not None:
            self.console.print(f"base: {self.base_precision}")

    @property
    def _lora_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.plan.config.training.full_bf16 else torch.float32

    def _attach(self, transformer: nn.Module) -> AdapterNetwork:
        """Put a LoRA into the transformer: a new one, or with ``dim_from_weights`` the file's, layer by layer."""
        network, plan = self.plan.config.network, self.plan.network
        if not network.dim_from_weights:
            return inject_adapter(
                transformer, plan.options, plan.targets, self.plan.config.training.seed, self._lora_dtype
            )
        source = network.network_weights
        assert source is not None, "the config's rules ask for one"
        file = load_lora(source, plan.targets)
        parts = plan.targets.by_component(file.weights)
        weights = parts.pop(plan.targets.file_prefix, {})
        if not weights:
            raise UserError(f"dim_from_weights: {source} has nothing for the transformer; give a LoRA that has")
        if parts:
            self.console.print(
                f"note: {source}: its layers of {' and '.join(sorted(parts))} are not trained and not saved"
            )
        alphas = trained_alphas(Path(source), file.metadata, plan.targets.file_prefix)
        return attach_lora(transformer, weights, plan.targets, source, self._lora_dtype, alphas)

    def _start_from_file(self) -> None:
        """Read ``network_weights`` into the LoRA, if they are given; say if they were trained on another base."""
        source, say = self.plan.config.network.network_weights, self.console.print
        say(Text(self.network.describe()))
        if source is None:
            return
        metadata = read_safetensors_header(weight_file(Path(source))).get("__metadata__") or {}
        is_distilled = getattr(getattr(self.plan.config, "distillation", None), "distill_effect", False)  # of its base
        merged = self._describe_file().get("base_weights", "")
        if not is_distilled and (remark := base_mismatch(metadata, self.base_fingerprint, merged)):
            say(f"note: {source}: {remark}")
        if not self.plan.config.network.dim_from_weights:
            say(Text(self.network.load_file(source)))

    def _wrap(self, config: Any, sizes: Literal["one", "some", "many"]) -> None:
        """Build optimizer and schedule, compile the loaded networks, and let the engine wrap them.

        Args:
            config: of the run, with what was chosen for it.
            sizes: of how many the batches are.
        """
        training, dp_rank = config.training, DataParallelRank.of(self.accelerator)
        groups = self.plan.network.parameter_groups(self.network)
        optimizer = build_optimizer(config.optimizer, groups, training.full_bf16, training.seed)
        per_epoch = self.batches.batches_per_epoch()
        start = start_position(self.state, per_epoch)
        self.total_steps, self.total_epochs = run_length(training, per_epoch, dp_rank.step_batches, start)
        if dp_rank.step_batches > 1:
            self.console.print(describe_steps(per_epoch, dp_rank, dp_rank.step_batches), soft_wrap=True)
        schedule = build_schedule(config.optimizer, optimizer, self.total_steps)
        spec = self._parallel()
        self._compile(config, spec, self.total_steps - start.step, sizes)
        for module in filter(None, (self.transformer, self.text_encoders)):
            # every process has read the same frozen weights: broadcasting takes time, and gloo cannot broadcast fp8
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ddp_ignored_names(module))
        self.loader, self.text_encoders = self.engine.prepare(
            config.parallel,
            spec,
            optimizer,
            schedule,
            self.network.parameters,
            self.loader,
            max_grad_norm=config.optimizer.max_grad_norm,
            ema_decay=config.saving.ema_decay,
        )
        self.engine.needs_base = any(layer.kind == "dora" for layer in self.network.modules.values())
        limit = config.network.scale_weight_norms
        # of joined ones the first
        layers = [layer for layer in self.network.modules.values() if "lora_A.weight" in layer.trained()]
        if limit:
            self.norm_limit = WeightNormLimit(limit, layers)
            self.engine.after_update = self.norm_limit.apply

    @abstractmethod
    def _parallel(self) -> ParallelSpec:
        """Return what layouts ask about the loaded model."""

    def training_metrics(self, values: dict[str, float], position: Position) -> dict[str, float]:
        return values if self.norm_limit is None else values | self.norm_limit.metrics()

    def update_norms(self, first_step: int) -> UpdateNorms:
        groups = {name: self.network.targets.group_of(name) for name in self.network.modules}
        kinds = {name: group.name if group else "other" for name, group in groups.items()}
        return UpdateNorms(self.network.modules, kinds, first_step)

    def gathered(self, with_state: bool) -> Any:
        return gathered(self.engine.optimizer, with_state)

    def weights(self) -> dict[str, Tensor]:
        return self.network.state_dict()

    def restore(self, folder: str) -> Position:
        parameters = self.weights()

        def scatter(weights: Mapping[str, Tensor]) -> None:
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])

        shapes = {name: tensor.shape for name, tensor in parameters.items()}
        return load_training_state(
            folder, shapes, scatter, self.engine.parts(), self.base_fingerprint, self.resume_keys
        )

    save_format = "peft"
    more_metadata: Mapping[str, str] = {}

    def _describe_file(self) -> dict[str, Any]:
        """Return further arguments of ``build_metadata``."""
        return {}

    def save(self, path: Path, position: Position) -> None:
        saving, now = self.plan.config.saving, time.time()
        facts = {**self.facts, **save_facts(position, self.total_steps, now)}
        comment = saving.training_comment
        config = json.dumps(without_folders(self.plan.config.model_dump(exclude_none=True)))
        if saving.no_metadata:
            facts, comment, config = {key: facts[key] for key in facts.keys() & LEAST_FACTS}, None, ""
        more = self._describe_file()
        metadata = build_metadata(
            facts,
            self.plan.network.targets,
            title=saving.output_name,
            timestamp=now,
            spec={"description": comment, "trigger_phrase": more.pop("trigger_phrase", None), **spec_fields(saving)},
            base_fingerprint=self.base_fingerprint,
            base_precision=self.base_precision,
            config=config,
            settings=describe_settings(self.raw_config, hidden=saving.no_metadata),
            version=__version__,
            **more,
        )
        precision = saving.save_precision or ("bf16" if self.plan.config.training.full_bf16 else "fp32")
        self.network.save(path, self.save_format, precision, {**self.more_metadata, **metadata})

    def verify(self, path: Path) -> str:
        with self.engine.deployed_weights():
            check = check_file(path, self.network, self.save_format)
        self.console.print(loads_in_table(each.row for each in check.programs))
        return str(check)

    def memory_advice(self) -> str:
        training, precision = self.plan.config.training, self.plan.config.precision
        options = [] if training.gradient_checkpointing else ["set gradient_checkpointing = true"]
        options.append("lower batch_size (train_batch_size) or resolution")
        if not (precision.fp8_base or precision.fp8_scaled):
            options.append("set fp8_scaled = true")
        return ", or ".join(options)
