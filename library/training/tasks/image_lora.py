"""A LoRA for a diffusion transformer, trained on images.

The order is the memory plan. First the VAE encodes what is not cached yet and leaves; then the text encoders; only
then is the transformer loaded, so the peak is the largest of the three and not their sum. A text encoder that is
trained comes back beside the transformer, and what it gave the cache is computed anew in every step. Each step after
loading is a function on the model: inject the LoRA, set the memory policy, and let accelerate compile and wrap it.

Validation is the loss on held-out images at fixed noise and fixed sigmas: the one loss that can be compared between
steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.utils.data import DataLoader

from library.accelerator import is_model_parallel
from library.config.markers import resume_keys
from library.config.rules import reason_alone
from library.config.schema import DatasetArguments, TrainConfig, TrainingConfig
from library.console import Console
from library.data.batches import Batch, DataParallelRank, EpochBatchSampler, RaisingLoader, collate_or_error
from library.data.cache import TextJob, absent, discard_damaged
from library.data.caption_command import write_captions
from library.data.dataset import (
    ENCODING_CAPTIONS,
    ENCODING_IMAGES,
    Painted,
    TrainingData,
    build_dataset,
    check_masks,
    check_pairs,
    check_references,
    held_out_loader,
    workers_with_room,
)
from library.data.directions import read_directions
from library.data.lint import captions_of, long_captions, refuse_damaged, summarise
from library.errors import UserError, counted, names_in_short
from library.models.family import Family
from library.models.family_by_name import model_family
from library.models.text import TextEncoder
from library.models.vae import ImageEncoder
from library.nn.attention import Backend
from library.nn.attention_timing import AttentionShape, choose_kernel
from library.nn.checkpointing import neighbours
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import plan_base, text_encoder_recipe
from library.processes import agreed
from library.training.checkpoint.metadata import image_facts, lora_facts, trigger_phrase
from library.training.checkpoint.state import has_part, tidy
from library.training.compiling import plan_compilation
from library.training.memory.block_swap import Ring, describe_rings, kind_sizes, swap_blocks, swapped_per_kind
from library.training.memory.budget import recompute_blocks
from library.training.memory.dry_run import fit_memory
from library.training.memory.fake_cuda import cache_folder
from library.training.memory.policy import advice
from library.training.optim.factory import unwrapped
from library.training.optim.preconditioning import Directions, InputPreconditioner
from library.training.parallel.parallelize import ParallelSpec, devices_to_fill, place_blocks
from library.training.parallel.pipeline import check_microbatches, transformer_split_points
from library.training.plan import ImagePlan, resolve_images, why_no_directions
from library.training.report.progress import FIRST_STEP, LOADING, SAMPLING, Work, counting
from library.training.run_inputs import RunInputs, dataset_settings, idle_options, require_same
from library.training.sampling import painting
from library.training.sampling.conditions import PromptImageRules, read_run_prompts, text_jobs
from library.training.sampling.images import Sampler as ImageSampler
from library.training.sampling.images import build_sampler
from library.training.sampling.prompts import SamplePrompt, note_changes
from library.training.sampling.sample_model import SampleModel, sample_family
from library.training.signals import ignore_signals
from library.training.step_graphs import why_eager
from library.training.tasks.distillation import prepare_teacher
from library.training.tasks.image_pairs import SHOWN, PreferenceStep, SliderStep
from library.training.tasks.image_step import MEASURING, FlowStep, StepInputs, Teacher, check_seam
from library.training.tasks.lora import LoraTask
from networks.files.layouts import PRECISIONS
from networks.merging.merge import BaseWeights, read_base_weights
from networks.network import AdapterNetwork, inject_adapter

# by train_on
STEPS: Mapping[str, type[FlowStep]] = {"images": FlowStep, "preferences": PreferenceStep, "slider": SliderStep}


class ImageLora(LoraTask):
    """See the module's text.

    Attributes:
        family: the model's. shown: of the model that samples are made with.
        dtype: of the frozen weights.
        training: the section, with what ``memory = "auto"`` has chosen.
        image_encoder, text_encoder: located; their weights are read when they are needed.
        data: the images, and those held out.
        base_weights: LoRAs that are merged into the base as it is loaded.
        step: the forward pass.
        general: prompts by which changes elsewhere are measured, and what the base paints of them.
    """

    metric: ClassVar[str] = "sigma_mean"
    suffix: ClassVar[str] = ".safetensors"

    plan: ImagePlan
    family: Family
    shown: Family
    dtype: torch.dtype
    training: TrainingConfig
    image_encoder: ImageEncoder
    text_encoder: TextEncoder
    data: TrainingData
    base_weights: BaseWeights
    attention: Backend = "auto"  # until the data is read, PyTorch's choice
    batches: EpochBatchSampler
    step: FlowStep
    teacher: Teacher | None = None
    general: painting.PaintedSet | None = None
    sampler: ImageSampler | None = None
    rings: Sequence[Ring] = ()

    def open(self, state: str | None = None) -> None:
        self.state = state
        accelerator = self.accelerator
        raw_config: TrainConfig = self.raw_config
        self.devices = devices_to_fill(raw_config.parallel, accelerator)
        self.family = family = model_family(raw_config.model)
        self.plan = resolve_images(raw_config, family)
        config, self.dtype, self.training = self.plan.config, self.plan.dtype, self.plan.config.training
        self.more_metrics = STEPS[config.pairs.train_on].more_metrics
        self.base_fingerprint, self.base_parts = family.fingerprint(), family.other_parts()
        self.base_weights = read_base_weights(
            config.network.base_weights, config.network.base_weights_multiplier, family.targets, self.base_fingerprint
        )
        vae = config.model.vae_dtype
        vae_dtype = self.dtype if vae == "auto" else PRECISIONS[vae]
        self.image_encoder = family.load_image_encoder(vae_dtype, accelerator.device)
        plan_base(config.precision, family.quantized_file(), config.training.seed, accelerator.device)
        recipe = text_encoder_recipe(config.precision)
        self.text_encoder = family.load_text_encoder(self.dtype, accelerator.device, recipe=recipe)
        self.shown, other = family, config.sampling.sample_model
        if other is not None:
            self.shown = sample_family(other, config.model, family)
        self.prompts = read_run_prompts(
            config.sampling.sample_prompts,
            config.training.seed,
            self.shown,
            self.image_encoder.pixel_multiple,
            self.plan.dataset.largest,
            self.console.print,
        )
        if config.pairs.train_on == "slider":
            self.prompts = [replace(prompt, strength=strength) for prompt in self.prompts for strength in SHOWN]
        if config.parallel.tp > 1:
            family.split_plan(config.parallel.tp)
        if swapped := self.training.blocks_to_swap:  # refused here, before anything is encoded
            with torch.device("meta"):
                outline = family.build(family.files.transformer_config).requires_grad_(False)
            swapped_per_kind(kind_sizes(family.blocks(outline)), swapped)
        for line in family.unused_tensors():
            self.console.print(f"note: {line}", soft_wrap=True)
        self.text_fingerprint = self.text_encoder.weights_fingerprint if self.plan.network.text_encoders else None
        trained_text = {} if self.text_fingerprint is None else {"text_encoders": self.text_fingerprint}
        asked = {"preserve_directions": raw_config.preservation.preserve_directions}  # another layout may take none
        merged = {"base_weights": self.base_weights.fingerprint()}
        self.resume_keys = resume_keys(config) | trained_text | merged | asked
        self._say_defaults()
        if config.preservation.preserve != "none" and (reason := why_no_directions(config, general=True)):
            self.console.print(f"note: preserve_directions = 0: {reason}", soft_wrap=True)
        if raw_config.flow.timestep_sampling == "auto" and family.files.scheduler is None:
            kind, (*_, how) = "the distilled" if family.distilled else "the", family.own_sampling().items()
            taken = f"no scheduler beside the transformer, which is taken for {kind} {family.layout.title}"
            self.console.print(f"note: {taken}: {how[0]} = {how[1]}", soft_wrap=True)
        self._check_saved(WeightFiles(family.files.transformer))

    def read(self, painted: Painted | None = None) -> None:
        """Read the dataset, with what the base has painted beside it; nothing is encoded, and no weights are loaded.

        Raises:
            UserError: see ``write_captions``, ``build_dataset`` and ``check_masks``; a seam without masks; more control
                images than the model takes.
        """
        config, self.data = self.plan.config, self._dataset(painted)
        data = self.data
        self.attention = self._attention_kernel()
        self.console.print(*data.describe(), sep="\n", soft_wrap=True)
        captions = captions_of([*data.listed, *(data.validation.samples if data.validation else ())])
        long = long_captions(captions, self.text_encoder.too_long, config.dataset.caption_variants)
        notes = ["slider_prompts take the place of the images' captions"] if data.train.directions else []
        notes += [*note_changes(self.prompts, self.text_encoder.too_long), *(finding.text for finding in long)]
        for line in [*idle_options(config, self.plan.dataset), *notes, *summarise(data.listed)]:
            self.console.print(f"note: {line}", soft_wrap=True)

    def _dataset(self, painted: Painted | None = None) -> TrainingData:
        config, encoder = self.plan.config, self.image_encoder
        with agreed("writing captions"), counting(self.console) as start:
            if config.dataset.caption_command and self.accelerator.is_main_process:
                write_captions(config.dataset.caption_command, self.plan.dataset, start)
        data = build_dataset(
            self.plan.dataset,
            config.training.seed,
            encoder.pixel_multiple,
            encoder.latent_factor,
            config.training.prior_loss_weight,
            config.preservation,
            painted,
            read_directions(config.pairs.slider_prompts),
        )
        check_masks(data, config.flow.masked_loss)
        check_pairs(data, config.pairs.train_on)
        check_seam(config.flow, data)
        check_references(data, self.family.most_references)
        return data

    def _attention_kernel(self) -> Backend:
        """Return what chooses attention's kernel, or the one that is asked for, once it has run."""
        training, (heads, shared, width) = self.plan.config.training, self.family.attention_sizes
        dtype = self.dtype if training.mixed_precision == "no" else PRECISIONS[training.mixed_precision]
        masked = self.family.captions_differ and max(self.data.train.batch_sizes.values()) > 1
        shape = AttentionShape(
            (1, heads, 256, width), (1, shared, 256, width), dtype, (1, 1, 1, 256) if masked else None
        )
        report, folder = functools.partial(self.console.print, soft_wrap=True), cache_folder() / "attention"
        return choose_kernel(training.attention, self.accelerator.device, shape, folder, report)

    def paint(self) -> Painted:
        """Let the base paint what the run trains on and is measured by.

        First every image is decoded that has no latents yet, so that nothing is captioned, painted or encoded beside a
        damaged one.
        """
        config, family, encoders = self.plan.config, self.family, (self.image_encoder, self.text_encoder)
        samples = self.prompts if self.shown is family else []
        sets = painting.painted_sets(config, self.plan.dataset, family, self.base_weights, encoders, samples)
        self.general = sets.get("general_prompts")
        with agreed("checking images"), counting(self.console) as start:
            if self.accelerator.is_local_main_process:
                refuse_damaged(self.plan.dataset, start)
            if self.accelerator.is_main_process:
                painting.restore_captions(sets, self.console)
        share = config.preservation.preserve_share
        if config.preservation.preserve != "none" and not config.preservation.preserve_outside_mask:
            cost = f"{1 - share:.0%} teach what is new; a step takes about {share / 3:.0%} longer"
            self.console.print(
                f"preserve: {share:.0%} of the samples keep what the base answers, {cost}", soft_wrap=True
            )
        todo = dict(painting.missing_of(sets))
        data = self._dataset(painting.pictures_of(sets, todo))
        if data.validation is None:  # said before anything is generated or encoded
            self.refuse_to_validate(sorted(config.validation.model_fields_set) if self.general is None else ())
        self._plan(data, [*todo.values()])
        return painting.paint(sets, config, family, self.base_weights, encoders, self.accelerator, self.console)

    def _plan(self, data: TrainingData, to_paint: Sequence[SamplePrompt]) -> None:
        """Say what is done before the first step; ``data`` is without the pictures ``to_paint``."""
        config, encoders = self.plan.config, (self.image_encoder, self.text_encoder)
        texts = [*self._texts(data), *(TextJob(prompt.prompt) for prompt in to_paint)]
        is_text = {path: path.parent.name == "text" for path in data.cached_files(*encoders, texts)}
        missing = [is_text[path] for path in absent((path, path) for path in is_text)]
        painted = f"{painting.describe(to_paint)}; once for this base, they are kept"
        words = {painting.PAINTING: painted} if to_paint else {}
        items = {painting.PAINTING: len(to_paint)}
        for name, kind, more in ((ENCODING_IMAGES, False, len(to_paint)), (ENCODING_CAPTIONS, True, 0)):
            kept = [*is_text.values()].count(kind) - missing.count(kind)
            items[name] = missing.count(kind) + more
            words[name] = f"{items[name]:,} new, {kept:,} cached"
        words[LOADING] = config.model.pretrained_model_name_or_path
        if (directions := config.preservation.preserve_directions) and not self._saved_directions:
            words[MEASURING] = f"the LoRA learns least in {directions} directions of each layer's inputs"
        if config.sampling.sample_at_first and self.prompts:
            words[SAMPLING] = painting.describe(self.prompts)
        compiles, _ = plan_compilation(config, self.accelerator.device, config.training.max_train_steps)
        if compiles:
            words[FIRST_STEP] = "compiles the model, which takes a minute or more"
        self.preparation.plan(words, self.console, self._work(items, to_paint))

    def _work(self, items: Mapping[str, int], to_paint: Sequence[SamplePrompt]) -> dict[str, Work]:
        """Return the work of this process by the name of its step, with what the time of an item depends on."""
        config, device, world = self.plan.config, self.accelerator.device, self.accelerator.num_processes
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        of_run = card, self.family.name, config.model.pretrained_model_name_or_path, config.precision
        sizes: dict[str, set[tuple[int, ...]]] = {
            painting.PAINTING: {(one.width, one.height, painting.passes_of([one])) for one in to_paint},
            ENCODING_IMAGES: {one.resolution for one in self.plan.dataset.datasets},
            ENCODING_CAPTIONS: set(),
        }
        folder = cache_folder() / "times"
        return {
            name: Work.of(math.ceil(count / world), folder, name, of_run, sorted(sizes[name]))
            for name, count in items.items()
        }

    def _texts(self, data: TrainingData) -> list[TextJob]:
        """Return what is encoded of the prompts."""
        prompts = [*self.prompts, *(self.general.prompts if self.general else ())]
        rules, sees = PromptImageRules.of(data), self.text_encoder.sees_references
        return [job for prompt in prompts for job in text_jobs(prompt, sees, rules).values()]

    def cache(self) -> None:
        """Make sure that every latent and text embedding that the data and the prompts need is cached.

        With several processes each encodes its share of a folder that all see. An encoder's weights are read only if
        something is missing, and are let go before this returns.
        """
        data, arguments, encoder = self.data, self.plan.config.dataset, self.text_encoder
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        say = self.console.print
        with agreed("tidying the cache"):
            texts = self._texts(data)
            if self.accelerator.is_main_process:
                tidy(data.cache_folders, say)
            if self.accelerator.is_local_main_process:  # each machine may have a cache of its own
                discard_damaged(data.cached_files(self.image_encoder, encoder, texts), say)
        for part in dict.fromkeys([(rank, world), (0, 1)]):  # then what a folder lacks that not all see
            with agreed("caching"), counting(self.console) as progress:
                data.cache_latents(self.image_encoder, arguments.vae_batch_size, progress, *part)
                data.cache_text(encoder, texts, arguments.text_encoder_batch_size, progress, *part)

    def prepare(self) -> None:
        config, family, console = self.plan.config, self.family, self.console
        self.read(self.paint())
        if self.shown is not family:
            base, other = config.model.pretrained_model_name_or_path, config.sampling.sample_model
            model = f"--model {base} --model_type {family.name} --distilled {other}"
            self.summary["samples"] = f"made with {other}; how the LoRA fares there: tools/precision_report.py {model}"
        self._compare_data()
        self.training = fit_memory(self, config, console)
        config = config.model_copy(update={"training": self.training})  # as files say it
        self.cache()
        self.teacher = prepare_teacher(config, self.state, self.data, self.accelerator, console)
        self.preparation.begin(LOADING)
        self.load_networks()
        directions = self._leading_directions()
        self.wrap_networks()
        if (preconditioner := self.engine.preconditioner) is not None and directions:
            preconditioner.set(directions, start=config.network.network_weights is None)
        self._hold_out()
        samples, writes = self.names.folder / "samples", self.accelerator.is_main_process
        self.sampler = build_sampler(
            self.shown, self.prompts, self.image_encoder, self.data, samples, self.text_encoders, writes,
            None if self.shown is family else SampleModel(self._load_shown, self.rings),
        )  # fmt: skip
        if self.sampler is not None and config.pairs.train_on == "slider":
            self.sampler.at_strength = self.network.at_strength
        if self.general is not None and config.sampling.sample_at_end:
            self.end_sampler = build_sampler(
                family, [*self.general.prompts], self.image_encoder, self.data, samples / "general",
                self.text_encoders, writes,
            )  # fmt: skip
            assert self.end_sampler is not None
            self.end_sampler.sampled[0] = self.general.paths
        if writes:  # others write no files
            dp_rank, per_epoch = self.batches.dp_rank, self.batches.batches_per_epoch()
            facts = image_facts(config, self.data, self.started_at, per_epoch, dp_rank, self.total_epochs)
            self.facts = {**lora_facts(config, self.started_at, self.total_steps), **facts}

    def _compare_data(self) -> None:
        """Note what the run is trained on; compare it with the other processes."""
        data, tables = self.data, dataset_settings(self.plan.dataset)
        with agreed("reading the images"):
            samples = data.hashed_samples()
        trained = {one.image.content for one in samples if not one.held_out}
        if both := [one.image.path for one in samples if one.held_out and one.image.content in trained]:
            what = f"held out, and trained on as a copy or in another subset: {names_in_short(both)}"
            remedy = "remove copies, and give subsets of one folder the same validation_split"
            why = f"the held-out loss is too low; {remedy}"
            self.console.print(f"note: {counted(len(both), 'image')} {what}; {why}", soft_wrap=True)
        self.inputs.settings |= tables
        self.inputs.add_images(samples, by_path=True)
        if is_model_parallel(self.accelerator):  # noise follows from the paths as written, and must be the same here
            tables["names of folders"] = " ".join(self.inputs.samples)
        require_same(tables, RunInputs({}).add_images(samples, by_path=False))

    def load_networks(self) -> None:
        """Load what takes part in a step, put the LoRA in, set the memory policy.

        Raises:
            UserError: the LoRA's options do not suit the model, or ``network_weights`` do not; an fp8 file is damaged.
        """
        config, family, plan, device = self.plan.config, self.family, self.plan.network, self.accelerator.device
        training, layout = self.training, family.quantized_file()
        fp8 = plan_base(config.precision, layout, training.seed, device)
        fp8.changes = self.base_weights.changes(family.targets)
        loaded_to = torch.device("cpu") if training.blocks_to_swap else self._loaded_to()
        self.transformer = transformer = family.load_transformer(self.dtype, loaded_to, self.attention, fp8=fp8)
        fp8.round_inputs(transformer)
        if layout is not None:
            self.console.print(layout.describe())
        self._note_base(layout, fp8, self.dtype)
        for path, strength in self.base_weights.sources:
            self.console.print(f"base: {path} merged at {strength:g}", soft_wrap=True)
        for line in self.base_weights.left_out:
            self.console.print(f"note: {line}", soft_wrap=True)
        loras = [self._attach(transformer)] if plan.trains_transformer or config.network.dim_from_weights else []
        if plan.text_encoders:
            self.text_encoders = self.text_encoder.load_modules(plan.text_encoders)
            options = plan.options.for_text_encoders()
            loras.append(inject_adapter(self.text_encoders, options, plan.targets, training.seed, self._lora_dtype))
        self.network = functools.reduce(AdapterNetwork.joined, loras)
        self._start_from_file()
        if plan.options.train_t5xxl:
            self.console.print("note: diffusers passes over T5's part of a LoRA file; ComfyUI and sd-scripts load it")
        blocks = family.blocks(transformer)
        # Not where a block's weights come for its turn: a pair runs forwards again before it runs backwards.
        fetched = bool(training.blocks_to_swap or self.devices or config.parallel.splits_model)
        pairs = {} if fetched else neighbours(blocks)
        recompute_blocks(transformer, len(blocks), training, device, pairs, family.chained_args)
        if training.gradient_checkpointing and self.text_encoders is not None:
            self.text_encoders.enable_gradient_checkpointing()  # type: ignore[operator]
        if swapped := training.blocks_to_swap:
            self.rings = swap_blocks(transformer, blocks, swapped, device)
            self.console.print(describe_rings(self.rings))
        if self.devices:
            self.console.print(place_blocks(transformer, blocks, self.devices))

    @property
    def _saved_directions(self) -> bool:
        """Whether the state that the run goes on from has them."""
        return self.state is not None and has_part(self.state, "preconditioner")

    def _leading_directions(self) -> dict[str, Directions]:
        """Return what general images use most of each layer's inputs; of a resumed run the state has it."""
        plan, count = self.plan.config, self.plan.config.preservation.preserve_directions
        if not count or self._saved_directions:
            return {}
        step = FlowStep(self.family, plan.flow, plan.training.seed, self.text_encoders, network=self.network)
        with counting(self.console) as start, self.accelerator.autocast():
            found = step.leading_directions(self.transformer, self.data.train, count, self.accelerator.device, start)
        device = self.accelerator.device
        return {name: Directions(*broadcast([part.to(device) for part in each])) for name, each in found.items()}

    def _load_shown(self) -> nn.Module:
        """Read the transformer that samples are made with into host memory, as the base was loaded."""
        config, shown = self.plan.config, self.shown
        fp8 = plan_base(config.precision, shown.quantized_file(), config.training.seed, self.accelerator.device)
        transformer = shown.load_transformer(self.dtype, "cpu", self.attention, fp8=fp8)
        fp8.round_inputs(transformer)
        return transformer

    def _parallel(self) -> ParallelSpec:
        family, transformer = self.family, self.transformer
        return ParallelSpec(
            transformer,
            sorted({type(block).__name__ for block in family.blocks(transformer)}),
            lambda: transformer_split_points(
                transformer, family.blocks(transformer), family.tail, len(family.chained_args)
            ),
            family.split_plan,
            self.network,
            self.text_encoders,
        )

    def wrap_networks(self) -> None:
        """Let the engine wrap the loaded networks, with optimizer, schedule and batches."""
        sizes, config = self.data.train.batch_sizes, self.plan.config
        check_microbatches(config.parallel, max(sizes.values()))
        self.batches, self.loader = training_loader(self.data, config.dataset, self.accelerator, self.console)
        self._wrap(config.model_copy(update={"training": self.training}), "some" if len(sizes) > 1 else "one")
        if count := config.preservation.preserve_directions:
            layers = self.network.component(self.network.targets.file_prefix).modules
            parts = {name: layer.trained().get("lora_A.weight") for name, layer in layers.items()}
            downs = {name: down for name, down in parts.items() if down is not None}  # of joined ones the first has it
            self.engine.preconditioner = preconditioner = InputPreconditioner(downs, count)
            preconditioner.attach(unwrapped(self.engine.optimizer))
        self.loader = RaisingLoader(self.loader)
        outside = config.training.prior_loss_weight if config.preservation.preserve_outside_mask else 0.0
        lockstep = config.preservation.preserve != "none" and config.parallel.gathers_weights
        self.step = STEPS[config.pairs.train_on](
            self.family, config.flow, config.training.seed, self.text_encoders, self.teacher, self.network, outside,
            lockstep, pairs=config.pairs,
        )  # fmt: skip
        self._capture_steps()

    def _capture_steps(self) -> None:
        """Let steps run as CUDA graphs where ``cuda_graph`` asks for it and nothing speaks against it.

        Raises:
            UserError: it must, and something does.
        """
        config, note = self.plan.config.model_copy(update={"training": self.training}), self.console.print
        if (asked := config.accelerate.cuda_graph) is False:
            return
        if reason := why_eager(config, self.accelerator, self.transformer):
            if asked is True:
                raise UserError(reason)
            if self.accelerator.device.type == "cuda":
                note(f"note: steps run without a CUDA graph: {reason_alone(reason, 'cuda_graph')}", soft_wrap=True)
            return
        # flash attention takes no mask, which captions of rounded lengths need
        rounded = replace(self.step, rounds_text=not config.training.attention.startswith("flash"))

        def inputs(batch: Batch, step: int) -> StepInputs:
            graphs = self.engine.graphs
            return (self.step if graphs is None or graphs.is_off else rounded).inputs(batch, step)

        self.engine.capture_steps(inputs, self.step.compute, note, required=asked is True)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        return self.step.loss(model, batch, step)

    def _hold_out(self) -> None:
        """Find the images to validate on."""
        self.validates = self.data.validation is not None or self.data.general is not None
        if self.data.validation is not None:
            self.held_out = held_out_loader(self.data.validation, self.plan.config.validation.max_validation_images)

    def validate(self, step: int) -> dict[str, float]:
        """Return what was learnt of held-out images, and what the LoRA changes on images of general prompts."""
        losses = {} if self.data.validation is None else self._held_out_losses()
        if (general := self.data.general) is None:
            return losses
        if step == 0 and self.plan.config.network.network_weights is None:
            return losses | {"val_prior_loss": 0.0}  # whatever the kind of adapter, it begins as its base
        sigmas = self.plan.config.validation.validation_sigmas

        def difference(batch: Batch) -> tuple[Tensor, int]:
            losses = self.step.prior_losses(self.engine.models[0], batch.to(self.accelerator.device), sigmas)
            return losses.double().sum(), len(losses)

        (changed,) = self.engine.mean_over(lambda: held_out_loader(general, len(general)), difference)
        return losses | {"val_prior_loss": changed}

    def _held_out_losses(self) -> dict[str, float]:
        """Return the losses at each noise level, their mean, and the means of what else is measured."""
        sigmas, names = self.plan.config.validation.validation_sigmas, ("loss", *self.step.more_validated)

        def measure(batch: Batch) -> tuple[Tensor, int]:
            values = self.step.validated(self.engine.models[0], batch.to(self.accelerator.device), sigmas)
            return values.double().sum(dim=1).flatten(), len(batch)

        means = self.engine.mean_over(lambda: self.held_out, measure, len(sigmas) * len(names))
        losses = dict(zip(sigmas, means[:: len(names)], strict=True))
        found = {f"val_{name}": sum(means[i :: len(names)]) / len(sigmas) for i, name in enumerate(names)}
        return found | {f"val_loss/sigma_{sigma:g}": loss for sigma, loss in losses.items()}

    @property
    def save_format(self) -> str:  # type: ignore[override]
        return self.plan.config.saving.save_format

    def _describe_file(self) -> dict[str, Any]:
        return {
            "architecture": self.family.modelspec_architecture,
            "resolution": self.data.config.datasets[0].resolution,
            "text_encoder_fingerprint": self.text_fingerprint,
            "attention": self.plan.config.training.attention,
            "base_weights": self.base_weights.described(),
            "inpaint_blank": " ".join(self.data.config.inpaint_blanks),
            "guidance_scale": f"{self.plan.config.flow.guidance_scale:g}" if self.family.guidance_input else None,
            "t5xxl_max_token_length": str(self.plan.config.model.t5xxl_max_token_length or ""),
            "trigger_phrase": None if self.plan.config.saving.no_metadata else trigger_phrase(self.data.config),
        }

    def memory_advice(self) -> str:
        config = self.plan.config.model_copy(update={"training": self.training})
        return advice(config, on_cpu=self.accelerator.device.type == "cpu")

    def describe_batch(self, batch: Batch) -> str:
        height, width = (side * self.data.latent_factor for side in batch.latents.shape[-2:])
        names = ", ".join(self.sample_names(batch)[:4])
        return f"the batch of {len(batch)} at {width}x{height} ({names})"

    def sample_names(self, batch: Batch) -> list[str]:
        return [sample.image.path for sample in self.data.train.samples_of(batch.sample_ids[:: batch.views])]


def training_loader(
    data: TrainingData, arguments: DatasetArguments, accelerator: Accelerator, console: Console
) -> tuple[EpochBatchSampler, DataLoader[Any]]:
    """Return the loader of training batches, to be prepared by accelerate, and the sampler that orders them."""
    sampler = data.batch_sampler(DataParallelRank.of(accelerator))
    workers = workers_with_room(data.train, arguments.max_data_loader_n_workers, accelerator.num_processes, console)
    loader = DataLoader(
        data.train,
        batch_sampler=sampler,
        collate_fn=collate_or_error,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=ignore_signals,
        pin_memory=accelerator.device.type == "cuda",
    )
    return sampler, loader
