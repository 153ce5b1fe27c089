"""Images sampled while training, by the model being trained, and the sheets that show them side by side.

``before_after.png`` has the first sampled step beside the last; ``over_time.png`` a column for each sampled step, or
eight evenly chosen ones. Of fill and edit models the first column is what they start from. Every image carries its
prompt, as a line of a prompt file, under the PNG key ``prompt``: that is how a resumed run recognises the images
sampled before it was interrupted.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor, nn

from library.conditions import Conditions
from library.data.dataset import TrainingData
from library.files import atomic_path
from library.models.family import Family, SampleSettings
from library.models.vae import ImageEncoder
from library.nn.checkpointing import evaluating
from library.training.sampling.conditions import PromptImageRules, encode_prompt_images, show_prompt_images, text_jobs
from library.training.sampling.prompts import SamplePrompt
from library.training.sampling.sample_model import SampleModel

_CELL = 256  # pixels of an image's longer side on the sheet
_CAPTION = 44  # pixels for two lines of prompt under a row
_HEADER = 28
_MOST_COLUMNS = 8  # of the sheet over time: about 2100 pixels, a screen's width


@dataclass
class Sampler:
    """Samples the same prompts with the same seeds at different steps into ``<folder>``.

    Attributes:
        family: the model's.
        prompts: to be sampled.
        image_encoder: decodes the latents.
        embeddings: every prompt's text (its ``text_key``) -> its encoder outputs, without a batch axis.
        folder: gets the images.
        text_encoders: that are trained; their embeddings are computed when they are needed.
        rules: what becomes of the prompts' images; these are encoded once, when they are first needed.
        writes: else images are generated and dropped, as a collective call with the processes that write.
        model: that takes the trained one's place while samples are made.
        at_strength: sets the LoRA's strength for a prompt that has another than 1.
        sampled: the files by step.
    """

    family: Family
    prompts: list[SamplePrompt]
    image_encoder: ImageEncoder
    embeddings: dict[str, dict[str, Tensor]]
    folder: Path
    text_encoders: nn.Module | None = None
    rules: PromptImageRules = field(default_factory=PromptImageRules)
    writes: bool = True
    model: SampleModel | None = None
    at_strength: Callable[[float], AbstractContextManager[object]] = nullcontext
    sampled: dict[int, list[Path]] = field(default_factory=dict)
    _conditions: dict[int, Conditions] = field(default_factory=dict)

    def sample(
        self, transformer: nn.Module, step: int, is_stopping: Callable[[], bool] | None = lambda: False
    ) -> list[Path]:
        """Sample every prompt; return the files. The VAE is loaded for it and freed again.

        Args:
            transformer: the network itself, out of any wrapper.
            step: names the files.
            is_stopping: asked before each image; the run that goes on samples all of them again. None where several
                processes make an image together: none may stop alone, nor fail to write while the others make the next,
                so all images are made before the first is written.
        """
        paths: list[Path] = []
        try:
            with nullcontext() if self.model is None else self.model.in_place(transformer):
                images: list[Image.Image] = []
                for i in range(len(self.prompts)):
                    if is_stopping is not None and is_stopping():
                        return paths
                    images.append(self._generate(transformer, i))
                    if is_stopping is not None or i + 1 == len(self.prompts):
                        paths += self._write(images, step, len(paths))
                        images.clear()
        finally:
            self.image_encoder.release()
        self.sampled[step] = paths
        return paths

    def _generate(self, transformer: nn.Module, i: int) -> Image.Image:
        """Return the image of prompt ``i``."""
        prompt = self.prompts[i]
        if i not in self._conditions:
            self._conditions[i] = encode_prompt_images(prompt, self.image_encoder, self.rules)
        texts = {text: self._text(prompt, text) for text in prompt.texts()}
        with self.at_strength(prompt.strength):
            return generate_image(self.family, transformer, self.image_encoder, prompt, texts, self._conditions[i])

    def _write(self, images: list[Image.Image], step: int, first: int) -> list[Path]:
        """Write the images of the prompts from ``first`` on, where this process does that; return their files."""
        paths = [self._path(step, first + i) for i in range(len(images))]
        for path, image, prompt in zip(paths, images, self.prompts[first:], strict=False):
            if self.writes:
                save_image(image, path, {"prompt": prompt.line()})
        return paths

    def _text(self, prompt: SamplePrompt, text: str) -> dict[str, Tensor]:
        """Return the embeddings of one of a prompt's texts, without a batch axis."""
        cached = self.embeddings[prompt.text_key(text)]
        if self.text_encoders is None:
            return cached
        with evaluating(self.text_encoders):
            current = self.text_encoders([text])
        return cached | {name: rows[0] for name, rows in current.items()}

    def _path(self, step: int, i: int) -> Path:
        return self.folder / f"step{step:06d}_{i:02d}.png"

    def recall(self, last_step: int) -> None:
        """Note the images of these prompts that an interrupted run sampled, up to ``last_step``."""
        lines = [prompt.line() for prompt in self.prompts]
        for first in sorted(self.folder.glob(f"step{'[0-9]' * 6}*_00.png")):
            step = int(first.stem.removeprefix("step").partition("_")[0])
            paths = [self._path(step, i) for i in range(len(lines))]
            if step <= last_step and [prompt_of(path) for path in paths] == lines:
                self.sampled.setdefault(step, paths)

    def write_sheets(self) -> list[Path]:
        """Write ``before_after.png`` and, with more than two sampled steps, ``over_time.png``; return their paths.

        Where prompts are sampled at several strengths, ``strengths.png`` has a column for each, of the last step.
        """
        steps = sorted(self.sampled)
        strengths = list(dict.fromkeys(prompt.strength for prompt in self.prompts))
        if steps and len(strengths) > 1:
            rows, last = dict[str, list[Path | Image.Image]](), self.sampled[steps[-1]]
            for prompt, path in zip(self.prompts, last, strict=True):
                rows.setdefault(replace(prompt, strength=1.0).line(), []).append(path)
            shown = [(line.partition(" --")[0], images) for line, images in rows.items()]
            write_sheet(path := self.folder / "strengths.png", [f"{strength:g}" for strength in strengths], shown)
            return [path]
        if len(steps) < 2:
            return []
        ends = {
            steps[0]: f"{'before' if steps[0] == 0 else 'early'} (step {steps[0]})",
            steps[-1]: f"after (step {steps[-1]})",
        }
        sheets = {"before_after.png": ends}
        if len(steps) > 2:
            sheets["over_time.png"] = {step: f"step {step}" for step in _spread(steps, _MOST_COLUMNS)}
        return [self._write_sheet(self.folder / name, columns) for name, columns in sheets.items()]

    def _write_sheet(self, path: Path, columns: dict[int, str]) -> Path:
        """Write one sheet; ``columns`` maps the steps to show to their titles."""
        titles, rows = list(columns.values()), []
        for i, prompt in enumerate(self.prompts):
            images: list[Path | Image.Image] = [self.sampled[step][i] for step in columns]
            start = show_prompt_images(prompt, self.rules)
            rows.append((prompt.prompt, images if start is None else [start, *images]))
        if self.rules.conditioning != "none":
            titles = ["input", *titles]
        write_sheet(path, titles, rows)
        return path


def generate_image(
    family: Family,
    transformer: nn.Module,
    image_encoder: ImageEncoder,
    prompt: SamplePrompt,
    texts: Mapping[str, dict[str, Tensor]],
    conditions: Conditions,
) -> Image.Image:
    """Return the prompt's image; ``texts`` has the embeddings of its ``texts()``, without a batch axis."""
    return family.sample(
        transformer,
        image_encoder,
        texts[prompt.prompt],
        SampleSettings(
            prompt.width, prompt.height, steps=prompt.steps, guidance=prompt.guidance, seed=prompt.seed, cfg=prompt.cfg
        ),
        negative_text=texts[prompt.negative] if prompt.cfg != 1.0 else None,
        conditions=conditions,
    )


def save_image(image: Image.Image, path: Path, texts: Mapping[str, str]) -> None:
    """Write ``image`` as PNG in one step, with ``texts`` as its text chunks."""
    info = PngInfo()
    for key, text in texts.items():
        info.add_itxt(key, text)
    with atomic_path(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=info)


def prompt_of(path: Path) -> str | None:
    """Return the prompt that an image carries, or None if it carries none, is damaged or is not there."""
    try:
        with Image.open(path) as image:
            image.load()
            return image.info.get("prompt")
    except Exception:  # whatever a damaged image does to its decoder
        return None


def _spread(steps: list[int], most: int) -> list[int]:
    """Return at most ``most`` of ``steps``, evenly chosen, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def build_sampler(
    family: Family,
    prompts: list[SamplePrompt],
    image_encoder: ImageEncoder,
    data: TrainingData,
    folder: Path,
    text_encoders: nn.Module | None = None,
    writes: bool = True,
    model: SampleModel | None = None,
) -> Sampler | None:
    """Return the sampler of a run, or None where no prompts were given; embeddings come from the dataset's cache."""
    if not prompts:
        return None
    rules = PromptImageRules.of(data)
    embeddings = {
        key: data.text_embeddings(job)
        for prompt in prompts
        for key, job in text_jobs(prompt, data.train.text_sees_references, rules).items()
    }
    return Sampler(family, prompts, image_encoder, embeddings, folder, text_encoders, rules, writes, model)


def _shown_size(image: Path | Image.Image) -> tuple[int, int]:
    """Return an image's width and height on a sheet."""
    if isinstance(image, Path):
        with Image.open(image) as opened:
            return _shown_size(opened)
    factor = _CELL / max(image.size)
    return max(1, round(image.width * factor)), max(1, round(image.height * factor))


def write_sheet(path: Path, titles: list[str], rows: Sequence[tuple[str, Sequence[Path | Image.Image]]]) -> None:
    """Write one image: a column a title, a row with its text under it; of two columns two rows side by side."""
    across = 2 if len(rows) > 3 and len(titles) == 2 else 1
    block_width = len(titles) * (_CELL + 8) + 16
    heights = [max(_shown_size(image)[1] for image in images) for _, images in rows]
    bands = [max(heights[i : i + across]) for i in range(0, len(rows), across)]  # of the rows of the sheet
    tops = [_HEADER + sum(bands[:i]) + i * _CAPTION for i in range(len(bands) + 1)]
    sheet = Image.new("RGB", (across * block_width + 8, tops[-1] + 8), "white")
    draw = ImageDraw.Draw(sheet)
    title_font, font = ImageFont.load_default(16), ImageFont.load_default(13)
    for i, (prompt, images) in enumerate(rows):
        left, top = 12 + (i % across) * block_width, tops[i // across]
        for column, (title, shown) in enumerate(zip(titles, images, strict=True)):
            x = left + column * (_CELL + 8)
            if i < across:
                draw.text((x, 6), title, fill="black", font=title_font)
            with shown if isinstance(shown, Image.Image) else Image.open(shown) as image:
                sheet.paste(image.convert("RGB").resize(_shown_size(image), Image.Resampling.LANCZOS), (x, top))
        caption = "\n".join(textwrap.wrap(prompt, len(titles) * _CELL // 7)[:2])
        draw.multiline_text((left, top + heights[i] + 4), caption, fill="#333333", font=font, spacing=2)
    with atomic_path(path) as temporary:
        sheet.save(temporary, format="PNG")
