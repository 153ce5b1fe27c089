"""A new run: a form made from the schema beside the configuration that it writes, what it will take, and the start.

The text is the configuration; the form only shows it. A changed field goes to the server with the text, which comes
back with that one line changed (:func:`edited`), what its keys are now, and what the trainer would say of it
(:func:`examine`). Nothing is stored before the start, so any number of tabs may be open.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, count, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from library.config.kohya.command import SCRIPT_SUFFIXES, read_command_file
from library.config.kohya.translate import Note, summary
from library.config.load import RawConfig, checked, read_keys
from library.config.markers import OnlyWith, listed, words_of
from library.config.model_types import LANGUAGE_MODELS, MODEL_FILE_KEYS, MODEL_TYPES
from library.config.optimizer_types import OPTIMIZERS
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields, section_fields, sections
from library.errors import UserError
from library.files import parse_json, parse_toml, read_text, read_toml, toml_string, write_text
from library.web.access import STATE
from library.web.data import IMAGES, datasets, refuse_outside
from library.web.jobs import ROOT, Job
from library.web.run import is_run, look, script_of, settings_of, text_of
from library.web.site import Form, Handler, Site, goto, url

NAME = "configuration"  # what messages call the text
SUGGESTED = ("kind", "images", "control_directory", "trigger_word", "class_word", "gpu_memory", "model", "model_type",
             "ae", "clip_l", "t5xxl", "vae", "text_encoder")  # fmt: skip
_SCRIPTS: Mapping[str, Script[Any]] = {script.training: script for script in (LORA, LANGUAGE_LORA, LLM)}
# What a first LoRA needs; all else stands under "All options". Of these a schema has some.
_BASICS = {
    "Model": "model_type pretrained_model_name_or_path ae clip_l t5xxl vae text_encoder tokenizer preset init_from",
    "What it learns from": "dataset_config trigger_word train_data data_dir train_batch_size",
    "Training": "network_dim network_alpha learning_rate optimizer_type max_train_steps max_train_epochs",
    "What is written": "output_dir output_name save_every_n_steps sample_prompts sample_every_n_steps",
    "Memory": "mixed_precision memory gradient_checkpointing fp8_scaled fp8_text_encoder blocks_to_swap",
}
_NAMED = (".safetensors", ".toml", ".txt", ".json", ".jsonl", ".gguf")  # files that options name
_READ = ("config_file", "dataset_config", "train_data_dir", "reg_data_dir", "in_json", "conditioning_data_dir")
_MOST_TEXT, _MOST_BRACKETS = 2**18, 2000  # of a configuration; nested lists take a hundred times their length to read
_PROMPTS, _MOST_PROMPTS = "{job}/prompts.txt", 2**16  # those that were typed, beside the job; bytes that are shown
_PATHS = ("pretrained_model_name_or_path", *MODEL_FILE_KEYS, "dataset_config", "sample_prompts")
_MADE = ("cache_directory", "distill_cache", "save_fallback_dir", "logging_dir")  # folders that need not be there yet


def _types(annotation: Any) -> set[type]:
    """Return the plain types within an annotation."""
    if get_origin(annotation) is Literal:
        return {str}
    inner = [part for part in get_args(annotation) if isinstance(part, type) or get_args(part)]
    return set().union(*map(_types, inner)) if inner else {annotation}


def option(key: str, field: FieldInfo) -> dict[str, Any]:
    """Return an option's control: checkbox, switch (three states), select, list, number, path or text, by its type."""
    types, words, about = _types(field.annotation), words_of(field.annotation), field.description or ""
    kind = "number" if types & {int, float} else "text"
    if get_origin(field.annotation) is list:
        kind = "list"
    elif bool in types:
        kind, words = ("switch", ("true", "false")) if type(None) in types else ("checkbox", ())
    elif words:
        kind, words = "select", tuple(MODEL_TYPES) if key == "model_type" else words  # the schema follows from it
    elif key in MODEL_FILE_KEYS or (re.search(r"\b(folder|file|TOML)\b", about) and key != "output_name"):
        kind = "path"
    default = "required" if field.is_required() else shown(field.get_default()) or ""
    return {"key": key, "kind": kind, "about": about, "default": default, "words": words}


def form_of(script: Script[Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return the basics, then the sections with all other options: title, sentence (none of the basics), options."""
    controls = {key: option(key, field) for key, (_, field) in fields(script).items()}
    groups = [(title, "", [controls.pop(k) for k in keys.split() if k in controls]) for title, keys in _BASICS.items()]
    for name, section in sections(script).items():
        rest = [controls[key] for key in section_fields(script, section) if key in controls]
        groups.append((name, (section.__doc__ or "").strip().split("\n")[0], rest))
    return [group for group in groups if group[2]]


def shown(value: Any) -> str | None:
    """Return a value as its control shows it; None if none can: a text or an item of several lines, or a table."""
    if isinstance(value, list):
        items = [shown(item) for item in value]
        fit = all(item and item.strip() == item and "\n" not in item for item in items)
        return ("\n".join(map(str, items)) or "[]") if fit else None
    if isinstance(value, dict) or "\n" in str(value):
        return None
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "" if value is None else text or '""'


def _written(text: str, field: FieldInfo) -> str | None:
    """Return a control's content as TOML; None where it asks for the default."""
    types, lines = _types(field.annotation), [line.strip() for line in text.splitlines() if line.strip()]

    def scalar(item: str) -> str:  # what fits no number is a text, which the trainer refuses in its own words
        with suppress(UserError):
            value = parse_toml(f"value = {item}", NAME).get("value")
            if isinstance(value, bool | int | float) and types & {bool, int, float}:
                return item
        return '""' if item == '""' else toml_string(item)

    if get_origin(field.annotation) is list and lines:
        numbers = [f"{line}.0" if line.isdecimal() and float in types else line for line in lines]
        items = list(map(scalar, numbers))
        if len({item[0] == '"' for item in items}) > 1:  # toml takes lists of one type
            items = list(map(toml_string, lines))
        return "[]" if lines == ["[]"] else f"[{', '.join(items)}]"
    return scalar(lines[0]) if lines else None


# A value of TOML: a text, a list of plain values, or what stands before a comment.
_VALUE = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|'
    r'\[(?:"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[^\]"\'#])*\]|[^#\n]*',
    re.DOTALL,
)


def edited(text: str, key: str, content: str, script: Script[Any]) -> str:
    """Return the text with one key set to what its control holds; comments, order and all other lines stay.

    Raises:
        UserError: the text is no TOML, or has the key in a way that its line does not tell.
    """
    section, field = fields(script).get(key, ("", None))
    value = _written(content, field) if field else None
    # a learning rate counts even where it is the default: without it optimizers that find their own take 1.0
    if field and value and not field.is_required() and key != "learning_rate":
        read, default = parse_toml(f"value = {value}", NAME)["value"], field.get_default()
        value = None if read == default and isinstance(read, bool) is isinstance(default, bool) else value
    changed, line = text, re.search(rf"^[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*=[ \t]*", text, re.MULTILINE)
    if line:
        old = _VALUE.match(text, line.end())
        rest = text[line.end() + len(old[0].rstrip() if old else "") :]
        comment, _, after = rest.partition("\n")
        without = text[: line.start()] + (f"{comment.strip()}\n" if comment.strip() else "") + after
        changed = without if value is None else text[: line.end()] + value + rest
    elif value is not None and (heading := re.search(rf"^[ \t]*\[ *{section} *\][^\n]*", text, re.MULTILINE)):
        following = re.compile(r"^[ \t]*\[", re.MULTILINE).search(text, heading.end())
        block = text[: following.start() if following else len(text)].splitlines()
        while not block[-1].strip() or block[-1].lstrip()[0] == "#":  # that is said of what follows
            block.pop()
        at = len("\n".join(block))
        changed = f"{text[:at]}\n{key} = {value}\n{text[at:].removeprefix(chr(10))}"
    elif value is not None:
        changed = f"{text.rstrip()}\n\n[{section}]\n{key} = {value}\n".lstrip()
    kept, now = read_keys(text, NAME, script).values, read_keys(changed, NAME, script).values
    kept.pop(key, None)
    if (now.pop(key, None) is None) is not (value is None) or now != kept:
        raise UserError(f"{key}: stands in the text in a way that the form cannot change; change it there")
    return changed


def _read(text: str, pretrains: bool) -> tuple[Script[Any], RawConfig]:
    """Return the script that a text is for, and its keys."""
    script: Script[Any] = LLM if pretrains else LORA
    if not pretrains and read_keys(text, NAME, LORA).values.get("model_type") in LANGUAGE_MODELS:
        script = LANGUAGE_LORA
    return script, read_keys(text, NAME, script)


def examine(site: Site, text: str, pretrains: bool, typed: bool = False) -> dict[str, Any]:
    """Return what the form shows of a text: its keys, and all that the trainer would say; ``typed``: prompts were."""
    try:
        script, given = _read(text, pretrains)
    except UserError as error:
        return {"text": text, "problems": [{"line": str(error), "key": "", "stands": False}], "values": None}
    values, known, notes, problems = dict(given.values), fields(script), list[Note](), []
    told = values | {"sample_prompts": _PROMPTS} if typed and script is LORA else values
    lines = _missing(site, told)
    try:
        checked(replace(given, values=dict(told)), script, notes)
    except UserError as error:
        lines = [*_plain(error).splitlines(), *lines]
    for line in lines:
        key = found[1] if (found := re.match(rf"(?:{NAME}:\d+: )?([\w-]+): ", line)) else ""
        problems.append({"line": line, "key": key, "stands": key in values or line.startswith(f"{NAME}:")})
    return {
        "text": text, "training": script.training, "problems": problems, "notes": summary(notes),
        "values": {key: shown(values[key]) if key in values else "" for key in known},
        "unmet": {key: unmet for key, (_, field) in known.items() if (unmet := _unmet(key, field, values, known))},
        "output": _of_output(site, values) if "output_dir" in values else None,
    }  # fmt: skip


def _unmet(key: str, field: FieldInfo, given: Mapping[str, Any], known: Mapping[str, tuple[str, FieldInfo]]) -> str:
    """Return what an option goes with that is not given, or nothing."""
    values = {k: None if f.is_required() else f.get_default() for k, (_, f) in known.items()} | dict(given)
    types = tuple(name for name, row in MODEL_TYPES.items() if key in row.keys)
    if types and values.get("model_type", types[0]) not in types:
        return f"goes with model_type = {listed(types)}"
    markers = [one for one in field.metadata if isinstance(one, OnlyWith) and one.unmet(values)]
    return f"goes with {', '.join(map(str, markers))}".replace("`", "") if markers else ""


def _plain(error: UserError) -> str:
    """Return what the trainer says, with the remedy that there is here."""
    return re.sub(r"set it in the TOML file or with --\w+", "fill it in", str(error))


def _is_there(value: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(value).exists()
    return False


def _missing(site: Site, values: Mapping[str, Any]) -> list[str]:
    """Return what stands against the paths of a configuration; "owner/name" is a model of the hub."""
    folders = (site.places.show(folder) for folder in (*site.places.outputs, *site.places.folders))
    lines, begins = [], ("/", "./", "../", *(f"{folder}/" for folder in folders))
    for key, value in ((key, values.get(key)) for key in _PATHS):
        if isinstance(value, str) and value not in ("", _PROMPTS):
            is_local = "/" not in value or value.startswith(begins) or Path(value).suffix.lower() in _NAMED
            try:
                site.places.refuse_paths_outside(value, key)
                lines += [f"{key}: no such file or folder: {value}"] if is_local and not _is_there(value) else []
            except UserError as error:
                lines.append(str(error))
    return lines


def _prompts_of(site: Site, values: Mapping[str, Any]) -> str:
    """Return the prompts in the small text file of the places that a configuration names, or nothing."""
    with suppress(UserError, OSError):
        path = site.places.find(str(values.get("sample_prompts") or ""), own=True)
        if path.suffix == ".txt" and path.stat().st_size <= _MOST_PROMPTS:
            return read_text(path, "choose another")
    return ""


def _apart(site: Site, text: str, script: Script[Any]) -> tuple[str, str]:
    """Return a run's text without prompts that were typed, which lie with its job, and these prompts."""
    values = read_keys(text, NAME, script).values
    own = STATE in Path(str(values.get("sample_prompts") or "")).parts
    return (edited(text, "sample_prompts", "", script), _prompts_of(site, values)) if own else (text, "")


def _files(site: Site, text: str, pretrains: bool, prompts: str) -> dict[str, str]:
    """Return the files of a job: the configuration, and prompts that were typed, unless they are those of its file."""
    script, given = _read(text, pretrains)
    if script is not LORA or not prompts or prompts == _prompts_of(site, given.values).strip():
        return {"config.toml": text}
    return {"config.toml": edited(text, "sample_prompts", _PROMPTS, script), "prompts.txt": f"{prompts}\n"}


def _of_output(site: Site, values: Mapping[str, Any]) -> dict[str, str] | None:
    """Return what stands against output_dir, and a folder to take instead; None if nothing does."""
    own = site.places.outputs[0] / Path(str(values.get("output_name") or "lora")).name
    try:
        path = site.places.find(str(values["output_dir"]), output=True)
        own = own if path in site.places.outputs else path
        said = {
            "it holds all runs; give this one a folder of its own": own != path,
            "a run that is going on or waits has this folder; choose another": str(path) in _taken(site),
            "it holds another run; choose another, or set resume or overwrite":
                is_run(path) and not (values.get("overwrite") or values.get("resume")),
        }  # fmt: skip
        line = next((line for line, stands in said.items() if stands), "")
    except UserError as error:
        line = str(error)
    return {"line": f"output_dir: {line}", "free": site.places.show(_free(site, own))} if line else None


def _taken(site: Site) -> set[str]:
    return {job.output for job in site.jobs.all() if not job.is_over}


def _free(site: Site, path: Path) -> Path:
    """Return the first of name, name-2, name-3 ... where nothing is, and no run is to come."""
    taken, stem = _taken(site), re.sub(r"-\d+$", "", path.name)
    found = (path.with_name(f"{stem}-{at}") for at in count(2))
    return next(one for one in chain([path], found) if not one.exists() and str(one) not in taken)


def ready(site: Site) -> dict[str, list[tuple[str, str]]]:
    """Return the configurations in folders called configs: the model -> path and title, those for small cards first."""
    found = []
    for path in (path for folder in site.places.folders if folder.name == "configs" for path in folder.rglob("*.toml")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if title := re.match(r"#:schema .*\n# ?(.*)", text):
            row = MODEL_TYPES.get("".join(re.findall(r'^model_type *= *"(\w+)"', text, re.M)))
            group = "Demos" if path.name.startswith("demo") else row.title if row else "A language model from scratch"
            memory = int((*re.findall(r"(\d+) GB", title[1]), 999)[0])
            found.append((group != "Demos", group, memory, site.places.show(path), title[1].rstrip(".:")))
    groups = groupby(sorted(found), key=lambda row: row[1])
    return {name: [row[3:] for row in rows] for name, rows in groups}


# ---- requests


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the form over an empty text, or over ``?config=``: a TOML, or the folder of a run."""
    text, found, script, prompts = "", None, LORA, ""
    if dataset := request.query_params.get("dataset"):
        text = edited("", "dataset_config", site.places.show(site.places.find(dataset)), LORA)
    if asked := request.query_params.get("config"):
        found = site.places.find(asked)
        file = site.places.find(str(found / "config.toml")) if found.is_dir() else found
        text = read_text(file, "choose a configuration that is there")
    pretrains = re.search(r"^\s*(data_dir|preset|init_from)\s*=", text, re.MULTILINE) is not None
    with suppress(UserError):
        script = _read(text, pretrains)[0]
        if found and is_run(file.parent):  # its states are its own
            for key in ("resume", "overwrite"):
                text = edited(text, key, "", script)
            text, prompts = _apart(site, text, script)
    configs = ready(site)
    demo = next((path for group in configs.values() for path, _ in group if Path(path).name == "demo.toml"), None)
    return site.page(
        request, "new_run.html", text=text, pretrains=pretrains, groups=form_of(script), training=script.training,
        found=found, prompts=prompts, card=shutil.which("nvidia-smi"), ready=configs, demo=demo, suggested=SUGGESTED,
        optimizers=list(OPTIMIZERS), models=MODEL_TYPES,
    )  # fmt: skip


def _given(form: Form) -> tuple[str, bool, str]:
    """Return the text, whether it is for pretraining, and prompts that were typed."""
    text = str(form.get("text", "")).replace("\r\n", "\n")
    if len(text) > _MOST_TEXT or max(text.count("["), text.count("{")) > _MOST_BRACKETS:
        raise UserError("configuration: is too long for one; copy less of it")
    return text, bool(form.get("pretrains")), str(form.get("prompts", "")).replace("\r\n", "\n").strip()


def edit(site: Site, request: Request, form: Form) -> Response:
    """Change the text as the form was changed; return what it says now, and the form if another schema has it."""
    text, pretrains, prompts = _given(form)
    changes = parse_json(str(form.get("changes", "{}")), "changes")
    for key, content in changes.items() if isinstance(changes, dict) else ():
        text = edited(text, key, content, _read(text, pretrains)[0])
    answer = examine(site, text, pretrains, prompts != "")
    answer["prompts"] = _prompts_of(site, answer["values"] or {})
    if (training := answer.get("training")) and training != form.get("training"):
        part = site.part(
            "new_run.html", "fields", groups=form_of(_SCRIPTS[training]), training=training, prompts=prompts
        )
        answer["fields"] = bytes(part.body).decode()
    return JSONResponse(answer)


def paths(site: Site, request: Request, form: Form) -> Response:
    """Return paths that begin with a text: folders, and files that options name."""
    text, found = request.query_params.get("text", ""), [*site.places.outputs, *site.places.folders]
    with suppress(UserError, OSError):
        folder = site.places.find(text if text.endswith("/") else str(Path(text).parent))
        begun = [path for path in folder.iterdir() if path.name.startswith(text.rpartition("/")[2])]
        found = sorted(path for path in begun if path.name[0] != "." and (path.is_dir() or path.suffix in _NAMED))
    if request.query_params.get("of") == "suggest_images":
        found = [*(path for path, _ in datasets(site)[1] if site.places.show(path).startswith(text)), *found]
    return JSONResponse([site.places.show(path) + "/" * path.is_dir() for path in found[:60]])


def runnable(site: Site, text: str, pretrains: bool) -> tuple[Script[Any], dict[str, Any]]:
    """Return script and values of a configuration; all that is run comes by here.

    Raises:
        UserError: anything is wrong with it, lies outside of the places, or would run another program.
    """
    script, given = _read(text, pretrains)
    try:
        sections = checked(given, script).model_dump().values()
    except UserError as error:
        raise UserError(_plain(error)) from None
    values = {key: value for section in sections for key, value in section.items()}
    for key in filter(values.get, ("caption_command", "trust_class_paths")):
        raise UserError(f"{key}: runs a program, which this page does not; start such a run in a terminal")
    site.places.refuse_paths_outside(values, "")
    for folder in filter(None, map(values.get, _MADE)):
        site.places.find(folder)
    if lines := _missing(site, values):
        raise UserError("\n".join(lines))
    if values.get("dataset_config"):
        _refuse_dataset_outside(site, site.places.find(values["dataset_config"]))
    return script, values


def _refuse_dataset_outside(site: Site, path: Path) -> None:
    """Refuse a dataset TOML that names anything outside, as seen from it or from the working directory."""
    if path.is_file():
        site.places.refuse_paths_outside(read_toml(path, "check dataset_config")[0], path.name)
        refuse_outside(site, path)


def start(site: Site, request: Request, form: Form) -> Response:
    """Put the run into the queue, and go to it."""
    files = _files(site, *(given := _given(form)))
    script, values = runnable(site, files["config.toml"], given[1])
    if said := _of_output(site, values):
        raise UserError(f"{said['line']}, such as {said['free']}")
    output, processes = site.places.find(values["output_dir"], output=True), str(form.get("processes") or 1)
    if not re.fullmatch(r"[1-9]\d{0,2}", processes):
        raise UserError(f"processes: {processes[:20]!r} is no number from 1 to 999; give one for each GPU")
    many = ["-m", "torch.distributed.run", "--nproc-per-node", processes] if processes != "1" else []
    words = [*many, str(ROOT / script.name), "--config_file", "{job}/config.toml"]
    site.jobs.add("train", values["output_name"], words, queued=True, output=str(output), files=files)
    return goto(url("/run", path=output))


def again(site: Site, request: Request, form: Form) -> Response:
    """Queue a run once more, from one of its states or its newest, with the settings that it wrote."""
    folder, state = site.places.find(str(form.get("path", "")), output=True), str(form.get("state", "auto"))
    job = site.jobs.of_output(folder)
    run, settings = look(site, folder, job), settings_of(folder, job)
    if run.state == "running":  # perhaps in a terminal; a job that waits is refused by the queue
        raise UserError(f"{run.name}: is running already")
    if not settings:
        raise UserError(f"{run.name}: has no configuration that a run wrote; begin a new run instead")
    own = job.folder if job and not settings_of(folder) else folder  # one that failed early has written none
    text, pretrains = text_of(own / "config.toml") or "", script_of(settings) is LLM
    text, prompts = _apart(site, text, script_of(settings))
    text = text if state else re.sub(r"(?m)^resume *=.*\n", "", text)  # "": from the first step
    files = _files(site, text, pretrains, prompts.strip())
    script, _ = runnable(site, files["config.toml"], pretrains)
    resume = state if state in ("auto", "") else str(site.places.find(str(folder / state), output=True))
    words = [script.name, "--config_file", "{job}/config.toml", "--output_dir", str(folder)]
    words += ["--resume", resume] if resume else []
    site.jobs.add("train", run.name, words, queued=True, output=str(folder), files=files)
    return Response(status_code=204, headers={"hx-trigger": "changed"})


def save(site: Site, request: Request, form: Form) -> Response:
    """Write the text to a file of the places; one that is there is replaced when that was agreed to."""
    path = site.places.find(str(form.get("save_to", "")))
    if path.suffix != ".toml":
        raise UserError(f"{site.places.show(path)}: a configuration is TOML; give it a name that ends in .toml")
    asks = path.exists() and form.get("replace") != str(path)
    if not asks:
        write_text(path, _given(form)[0])
    return site.part("new_run.html", "saved", saved=path, asks=asks)


def side_job(site: Site, request: Request, form: Form) -> Response:
    """Begin what is done beside the form: count memory, look the data over, suggest, or translate kohya's."""
    kind, files, output = str(form.get("job")), {}, site.places.outputs[0]
    if kind == "memory":
        words = ["tools/plan_memory.py", "{job}/config.toml", "--save_to", "{job}/result.json"]
        words += [f"--gpu_memory={form['card']}"] if form.get("card") else []
        text, pretrains, prompts = _given(form)
        files = _files(site, text, pretrains, prompts)
        runnable(site, files["config.toml"], pretrains)
    elif kind == "dataset":
        path = site.places.find(str(_read(*_given(form)[:2])[1].values.get("dataset_config", "")))
        _refuse_dataset_outside(site, path)
        words = ["tools/check_dataset.py", str(path)]
    elif kind == "suggest":
        given = {key: str(form[f"suggest_{key}"]) for key in SUGGESTED if form.get(f"suggest_{key}")}
        given |= {} if "gpu_memory" in given or shutil.which("nvidia-smi") else {"gpu_memory": "cpu"}
        site.places.refuse_paths_outside(given, "")
        images = Path(given.get("images", ""))
        if (images / "images").is_dir() and not any(path.suffix.lower() in IMAGES for path in images.iterdir()):
            given["images"] = str(images / "images")  # a dataset's folder
        folder = _free(site, output / (Path(str(form.get("suggest_name"))).name[:60] or "my_lora"))
        words = ["tools/suggest_config.py", *(f"--{key}={value}" for key, value in given.items())]
        words += ["--save_to", site.places.show(folder)]
    else:
        dropped, name, text = form.get("kohya"), Path("command.txt"), str(form.get("command", ""))
        if isinstance(dropped, UploadFile) and dropped.filename:
            name, text = Path(dropped.filename), dropped.file.read().decode("utf-8", "replace")
        source = "kohya" + name.suffix[:5]
        folder = _free(site, output / (re.sub(r"\W", "_", name.stem)[:60] or "kohya"))
        words = ["tools/migrate_config.py", f"{{job}}/{source}", "--save_to", f"{site.places.show(folder)}/config.toml"]
        files = {source: text}
        _refuse_read_outside(site, source, text)
    return show_job(site, request, form, site.jobs.add(kind, kind, words, files=files))


def _refuse_read_outside(site: Site, source: str, text: str) -> None:
    """Refuse a configuration of kohya's by what would be read to translate it: datasets, another configuration."""
    values: dict[str, Any] = {}
    if Path(source).suffix.lower() in SCRIPT_SUFFIXES:
        with TemporaryDirectory() as folder:
            write_text(Path(folder) / source, text)
            words = read_command_file(Path(folder) / source).arguments
        for word, following in zip(words, (*words[1:], ""), strict=True):
            name, equals, value = word.removeprefix("--").partition("=")
            values[name] = value if equals else following
    else:
        values = read_keys(text, source, LORA).values
    site.places.refuse_paths_outside({key: values[key] for key in _READ if key in values}, "")


def show_job(site: Site, request: Request, form: Form, begun: Job | None = None) -> Response:
    """Show how far a job beside the form is."""
    job = begun or site.jobs.get(request.query_params.get("id", ""))
    settings = job.log.rpartition("\nset:\n")[2] if job.kind == "memory" and "\nset:\n" in job.log else ""
    proposed = {key: shown(value) for key, value in parse_toml(settings, "settings").items()} if job.is_over else {}
    opens = job.kind in ("suggest", "migrate") and job.state == "done" and job.words[-1].removesuffix("/config.toml")
    fits = re.search(r"^(fits|does not fit) into", job.log, re.MULTILINE)
    card = next((word.partition("=")[2] for word in job.words if word.startswith("--gpu_memory=")), "")
    said = {"fits": fits[1] if fits and card else "", "card": card}
    return site.part("new_run.html", "job", job=job, proposed=proposed, opens=opens, **said)


ROUTES: dict[str, Handler | tuple[Handler | None, Handler]] = {
    "/new": show, "/new/edit": (None, edit), "/new/paths": paths, "/new/job": (show_job, side_job),
    "/new/start": (None, start), "/new/save": (None, save), "/run/again": (None, again),
}  # fmt: skip
