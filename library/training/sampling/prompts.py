"""Sample prompts: kohya's three kinds of file and its line syntax, which a configuration's own list has too.

* ``.txt`` (and any other name): a prompt a line, which only a newline ends,
  ``a cat in the rain --n blurry --w 1024 --h 1024 --d 42 --s 20 --g 3.5 --l 1.0``: negative prompt, width, height,
  seed, steps, guidance given to a guidance-distilled model, and classifier-free guidance proper (with a negative
  prompt, at twice the cost). ``--ci image.png`` names the image that a fill model completes, or a reference image of an
  edit model (several times for several), ``--mi mask.png`` the mask of a fill model, white where to fill. Empty lines
  and those that begin with ``#`` are skipped.
* ``.toml``: ``[prompt]`` with what all have in common, ``[[prompt.subset]]`` for each image.
* ``.json``: a list of objects, or of lines in the syntax above.
* A list in the configuration itself: of lines in that syntax; all of them count.

TOML and JSON use the keys prompt, negative_prompt, width, height, seed, sample_steps, guidance_scale, scale (in
musubi-tuner: cfg_scale), control_image_path (one or a list) and mask_image_path. Relative paths of images are looked
for beside the prompt file first, then in the working directory; a list's only there. What the two trainers know and
Tandem does not do is refused by its name, unless it asks for nothing: a sample without it would be another sample.

A side that is no multiple of the model's is rounded down to one, to 64 at least, as sd-scripts' ``flux_train_utils.py``
does (``sample_image_inference``); a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library.config.family_defaults import family_defaults
from library.config.markers import MOST_GUIDANCE, MOST_PIXELS, MOST_SEED, MOST_SIDE, MOST_STEPS, is_nothing
from library.errors import UserError, did_you_mean, error_prefix
from library.files import parse_json, read_text, read_toml, written_path

if TYPE_CHECKING:
    from library.models.family import Family  # imports diffusers

_OPTION = re.compile(r"(?:^|\s)--([a-zA-Z][\w-]*)(?:[\s=]+|$)")
_LEAST_SIDE = 64  # of what is rounded
TooLong = Callable[[Iterable[str]], Mapping[str, tuple[int, int]]]  # library.models.text.TextEncoder.too_long


@dataclass(frozen=True)
class SamplePrompt:
    """One image to sample."""

    prompt: str
    negative: str = ""
    width: int = 512
    height: int = 512
    seed: int = 0
    steps: int = 20
    guidance: float = 3.5
    cfg: float = 1.0
    control_images: tuple[str, ...] = ()
    mask_image: str | None = None
    strength: float = 1.0  # of the LoRA in training
    asked_size: tuple[int, int] | None = field(default=None, repr=False, compare=False)  # where it was rounded

    def texts(self) -> list[str]:
        """Return the texts whose embeddings this image needs."""
        return [self.prompt, self.negative] if self.cfg != 1.0 else [self.prompt]

    def text_key(self, text: str) -> str:
        """Return what its embeddings of ``text`` go by: the text, and the images that may be seen with it."""
        return "\n".join([text, *self.control_images])

    def images(self) -> list[str]:
        """Return the paths of the images it names."""
        return [*self.control_images, *([self.mask_image] if self.mask_image else [])]

    def short(self) -> str:
        """Return its text for messages."""
        return repr(self.prompt if len(self.prompt) <= 40 else f"{self.prompt[:37]}...")

    def line(self) -> str:
        """Return the image as a line of a prompt file, with everything that is not left to a default."""
        words = [self.prompt, *(["--n", self.negative] if self.cfg != 1.0 else [])]
        for option in ("w", "h", "d", "s", "g", "l"):
            words += [f"--{option}", str(getattr(self, _OPTIONS[option][0]))]
        for path in self.control_images:
            words += ["--ci", path]
        words += ["--mi", self.mask_image] if self.mask_image else []
        words += [] if self.strength == 1 else ["--strength", f"{self.strength:g}"]
        return " ".join(words)


def usual_prompt(family: Family | type[Family], distilled: bool | None = None) -> SamplePrompt:
    """Return what a prompt leaves open, of this model: the family's defaults; a distilled one has its own steps.

    ``distilled`` is needed where there are no files to make an instance of the family of.
    """
    values, distilled = family_defaults(family.name), family.distilled if distilled is None else distilled
    side, guidance = values["sample_size"], values.get("sample_guidance", 1.0)
    steps = family.distilled_steps if distilled else values["sample_steps"]
    cfg = 1.0 if distilled or family.guidance_input else values.get("sample_cfg", 1.0)
    return SamplePrompt("", width=side, height=side, steps=steps, guidance=guidance, cfg=cfg)


def not_above(usual: SamplePrompt, largest: tuple[int, int]) -> SamplePrompt:
    """Return ``usual`` with no more pixels than ``largest``, width and height of the largest images trained on."""
    is_above = usual.width * usual.height > largest[0] * largest[1]
    return replace(usual, width=largest[0], height=largest[1]) if is_above else usual


_TABLES = read_toml(Path(__file__).with_name("prompt_keys.toml"))[0]
_OPTIONS, _KEYS = _TABLES["options"], _TABLES["keys"]
_NOT_TAKEN, _ASKS_NOTHING = _TABLES["not_taken"], _TABLES["asks_nothing"]
_KINDS: Mapping[str, type] = {"a whole number": int, "a number": float, "text": str}


def check_steering(prompts: Sequence[SamplePrompt], guidance_input: bool, usual_guidance: float) -> list[str]:
    """Refuse guidance that the model has no input for; return remarks on negative prompts that nothing uses.

    Prompt files of kohya's often carry a negative prompt that is used only with ``--l``, so it is no mistake.

    Args:
        prompts: to be sampled.
        guidance_input: whether the model has one.
        usual_guidance: of prompts that say nothing about it.

    Raises:
        UserError: names the prompt.
    """
    for prompt in prompts:
        if not guidance_input and prompt.guidance != usual_guidance:
            raise UserError(
                f"prompt {prompt.short()}: --g {prompt.guidance:g} is not taken: this model has no guidance input; "
                "remove it, or write --l and --n for a model that knows negative prompts"
            )
    idle = [prompt.short() for prompt in prompts if prompt.negative and prompt.cfg == 1.0]
    return [f"prompt {name}: its negative prompt is not used while --l is 1" for name in idle]


def note_changes(prompts: Sequence[SamplePrompt], too_long: TooLong) -> list[str]:
    """Return remarks on sizes that were rounded, and on texts that are ``too_long`` for the text encoder."""
    cut = too_long(dict.fromkeys(text for prompt in prompts for text in prompt.texts()))
    sizes = [(each, "{} x {}".format(*each.asked_size)) for each in prompts if each.asked_size is not None]
    why = "the model's sides are multiples, rounded down as in sd-scripts"
    rounded = [f"prompt {each.short()}: {size} becomes {each.width} x {each.height}: {why}" for each, size in sizes]
    why = "are not read by the text encoder and not sampled from"
    return rounded + [
        f"prompt {text[:40]!r}: {left} of {kept + left} tokens {why}" for text, (kept, left) in cut.items()
    ]


def read_prompts(
    source: str | Path | Sequence[str] | None,
    seed: int,
    pixel_multiple: int,
    defaults: SamplePrompt | None = None,
    option: str = "sample_prompts",
) -> list[SamplePrompt]:
    """Read a prompt file of any kind, or prompts that are listed. No source, no prompts.

    Args:
        source: a path, ``.toml``, ``.json``, or anything else for lines of text; or the lines themselves in a list.
        seed: a prompt without a seed takes this plus its place, counted from 0.
        pixel_multiple: widths and heights are rounded down to multiples of it.
        defaults: what prompts leave open; its seed is not used.
        option: the option that named the file or holds the list, for messages.

    Raises:
        UserError: the file is missing, empty or broken, or a prompt has an unknown option or a value of the wrong type.
    """
    if source is None:
        return []
    if not isinstance(source, str | Path):
        items: Items = [(f"{option}, prompt {n}", line) for n, line in enumerate(source, 1)]
        folder, searched = Path(), "in the working directory"
    else:
        items, folder, searched = _file_items(source, option), Path(source).parent, "beside the prompts' file"
    prompts = []
    for i, (where, item) in enumerate(items):
        default = replace(defaults or SamplePrompt(""), seed=seed + i)
        if isinstance(item, str):
            prompt = parse_prompt(item, default, pixel_multiple, where)
        else:
            prompt = _from_keys(item, default, pixel_multiple, where)
        prompts.append(_with_found_images(prompt, folder, searched, where))
    return prompts


def parse_prompt(line: str, default: SamplePrompt, pixel_multiple: int, where: str) -> SamplePrompt:
    """Return the image that a line in kohya's syntax asks for.

    Args:
        line: the prompt and its options.
        default: what the line leaves open.
        pixel_multiple: the size's.
        where: file and line, for messages.

    Raises:
        UserError: no prompt, an unknown option, a value of the wrong type or range.
    """
    prompt, *options = _OPTION.split(line.strip())
    if not prompt.strip():
        raise UserError(f"{where}: no prompt before the options; write one")
    values: dict[str, Any] = {"prompt": prompt.strip()}
    for name, text in zip(options[::2], options[1::2], strict=True):
        low, text = name.lower(), text.strip()  # kohya's options are of either case
        if _refuse_foreign(low, f"--{name}", text, where):
            continue
        if low not in _OPTIONS:
            raise UserError(f"{where}: unknown option --{name}; known are " + " ".join(f"--{k}" for k in _OPTIONS))
        field, kind = _OPTIONS[low]
        if field == "control_images":
            values[field] = (*values.get(field, ()), text)
            continue
        if field in values:
            raise UserError(f"{where}: --{name} stands there twice; keep one")
        try:
            values[field] = _KINDS[kind](text)
        except ValueError:
            raise UserError(f"{where}: --{name} takes {kind}, not {text!r}; correct it") from None
    return _checked(replace(default, **values), pixel_multiple, where)


def _from_keys(item: Mapping[str, Any], default: SamplePrompt, pixel_multiple: int, where: str) -> SamplePrompt:
    """Return the image that an object of a TOML or JSON file describes."""
    values: dict[str, Any] = {}
    for key, value in item.items():
        is_unset = value is None or (value == "" and key.endswith("image_path"))
        if key == "enum" or is_unset or _refuse_foreign(key, key, value, where):  # kohya's own code puts enum there
            continue
        if key not in _KEYS:
            raise UserError(f"{where}: unknown key {key!r}{did_you_mean(key, _KEYS) or '; known: ' + ', '.join(_KEYS)}")
        field, kind = _KEYS[key]
        if field in values:
            raise UserError(f"{where}: {key} repeats what another key sets; keep one")
        if field == "control_images":
            values[field] = _image_list(value, key, where)
            continue
        fitting = (int, float) if kind == "a number" else _KINDS[kind]
        if not isinstance(value, fitting) or isinstance(value, bool):
            raise UserError(f"{where}: {key} takes {kind}, not {value!r}; correct it")
        values[field] = _KINDS[kind](value)
    if "prompt" not in values:
        raise UserError(f'{where}: no prompt; write prompt = "..."')
    return _checked(replace(default, **values), pixel_multiple, where)


def _image_list(value: Any, key: str, where: str) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(path, str) for path in listed):
        raise UserError(f"{where}: {key} takes a path or a list of paths, not {value!r}; correct it")
    return tuple(listed)


def _with_found_images(prompt: SamplePrompt, folder: Path, searched: str, where: str) -> SamplePrompt:
    """Return the prompt with the paths of its images as they are from the working directory."""

    def found(path: str) -> str:
        written = written_path(path, f"{where}: image")
        places = [folder / written, written]
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            raise UserError(f"{where}: image {path!r} does not exist; it is looked for {searched}")
        return str(place)

    images = tuple(found(path) for path in prompt.control_images)
    return replace(prompt, control_images=images, mask_image=found(prompt.mask_image) if prompt.mask_image else None)


def _checked(parsed: SamplePrompt, pixel_multiple: int, where: str) -> SamplePrompt:
    asked = parsed.width, parsed.height
    if min(asked) < 1 or max(asked) > MOST_SIDE or parsed.width * parsed.height > MOST_PIXELS:
        most = f"at most {MOST_SIDE} a side and {MOST_PIXELS // 2**20} megapixels in all, and at least one pixel"
        raise UserError(f"{where}: {parsed.width} x {parsed.height} pixels; {most}")
    if not 1 <= parsed.steps <= MOST_STEPS:
        raise UserError(f"{where}: steps (--s) {parsed.steps}; at least one step is needed, at most {MOST_STEPS}")
    if not 0 <= parsed.seed <= MOST_SEED:
        raise UserError(f"{where}: seed (--d) {parsed.seed}; write a number from 0 to 2^63 - 1, or leave it out")
    for name, value in (("guidance (--g)", parsed.guidance), ("guidance scale (--l)", parsed.cfg)):
        if not abs(value) <= MOST_GUIDANCE:
            raise UserError(f"{where}: {name} {value}; write a finite number, at most {MOST_GUIDANCE:g}")
    width, height = (max(_LEAST_SIDE, s - s % pixel_multiple) if s % pixel_multiple else s for s in asked)
    return parsed if (width, height) == asked else replace(parsed, width=width, height=height, asked_size=asked)


def _refuse_foreign(name: str, shown: str, value: object, where: str) -> bool:
    """Refuse an option that only other trainers know; return whether it is one, and asks for nothing."""
    if name in _NOT_TAKEN and not is_nothing(value, *_ASKS_NOTHING.get(name, ())):
        raise UserError(f"{where}: {shown} is not taken: {_NOT_TAKEN[name]}")
    return name in _NOT_TAKEN


Items = list[tuple[str, "str | Mapping[str, Any]"]]  # where it was found, and a line or an object


def _file_items(path: str | Path, option: str) -> Items:
    read = {".toml": _toml_items, ".json": _json_items}.get(Path(path).suffix.lower(), _text_items)
    with error_prefix(option):
        if option == "sample_prompts" and " " in str(path) and not Path(path).exists():
            raise UserError(f'{path}: no such file; prompts themselves stand in a list in the TOML, ["a cat", "a dog"]')
        items = read(str(path))
    if not items:
        raise UserError(f"{option}: {path} holds no prompt; write {_HOW.get(read, 'one a line')}")
    return items


def _text_items(path: str) -> Items:
    lines = [(n, line.strip()) for n, line in enumerate(read_text(path).split("\n"), 1)]
    return [(f"{path}:{n}", line) for n, line in lines if line and not line.startswith("#")]


def _toml_items(path: str) -> Items:
    tables, _ = read_toml(path)
    if other := sorted(tables.keys() - {"prompt"}):
        raise UserError(f"{path}: unknown key {other[0]!r}; put everything under [prompt] and [[prompt.subset]]")
    common = tables.get("prompt", {})
    subsets = common.pop("subset", [{}] if common else []) if isinstance(common, dict) else None
    if not isinstance(subsets, list) or not all(isinstance(subset, dict) for subset in subsets):
        raise UserError(f"{path}: prompt is not a table; write [prompt] and a [[prompt.subset]] for each image")
    return [(f"{path}: prompt {n}", {**common, **subset}) for n, subset in enumerate(subsets, 1)]


def _json_items(path: str) -> Items:
    listed = parse_json(read_text(path), path)
    if not isinstance(listed, list) or not all(isinstance(item, str | dict) for item in listed):
        raise UserError(f'{path}: not a list of prompts; write [{{"prompt": "..."}}, ...]')
    return [(f"{path}: prompt {n}", item) for n, item in enumerate(listed, 1)]


_HOW = {_toml_items: "a [[prompt.subset]] for each", _json_items: 'a list, [{"prompt": "..."}]'}
