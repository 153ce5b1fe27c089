"""A new run: a form made from the schema beside the configuration that it writes, what it will take, and the start.

The text is the configuration; the form only shows it. A changed field goes to the server with the text, which comes
back with that one line changed (:func:`edited`), what its keys are now, and what the trainer would say of it
(:func:`examine`). Nothing is stored before the start, so any number of tabs may be open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomlkit
from pydantic.fields import FieldInfo
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
from library.files import parse_json, read_text, read_toml, toml_string, write_text
from library.training.report.run_folder import is_run, script_of, settings_of, text_of
from library.web.access import STATE
from library.web.data import refuse_outside
from library.web.jobs import ROOT, Job
from library.web.loras import free_name
from library.web.run import look
from library.web.site import Form, Routes, Site, goto, tell_changed, url

NAME = "configuration"  # what messages call the text
_SCRIPTS: Mapping[str, Script[Any]] = {script.training: script for script in (LORA, LANGUAGE_LORA, LLM)}
# What a first LoRA needs; all else stands under "All options". Of these a schema has some.
_BASICS = {
    "Model": "model_type pretrained_model_name_or_path ae clip_l t5xxl vae text_encoder tokenizer preset init_from",
    "What it learns from": "dataset_config trigger_word train_data data_dir train_batch_size",
    "Training": "network_dim network_alpha learning_rate optimizer_type max_train_steps max_train_epochs",
    "What is written": "output_dir output_name save_every_n_steps sample_prompts sample_every_n_steps",
    "Memory": "mixed_precision memory gradient_checkpointing fp8_scaled fp8_text_encoder blocks_to_swap",
}
_PLAIN = {  # what people call those that a first LoRA needs
    "pretrained_model_name_or_path": "Base model", "model_type": "Kind of model", "dataset_config": "Dataset",
    "network_dim": "Rank", "learning_rate": "Learning rate", "max_train_steps": "Steps", "optimizer_type": "Optimizer",
    "output_name": "Name", "output_dir": "Where it is written", "sample_prompts": "Sample prompts",
}  # fmt: skip
_NAMED = (".safetensors", ".toml", ".txt", ".json", ".jsonl", ".gguf")  # files that options name
_READ = ("config_file", "dataset_config", "train_data_dir", "reg_data_dir", "in_json", "conditioning_data_dir")
_MOST_TEXT, _MOST_BRACKETS = 2**18, 2000  # of a configuration; nested lists take a hundred times their length to read
_PROMPTS, _MOST_PROMPTS = "{job}/prompts.txt", 2**16  # those that were typed, beside the job; bytes that are shown
_PATHS = ("pretrained_model_name_or_path", *MODEL_FILE_KEYS, "dataset_config", "sample_prompts")
_MADE = ("output_dir", "cache_directory", "distill_cache", "save_fallback_dir", "logging_dir")  # may not be there yet
_LINE = re.compile(rf"(?:{NAME}:\d+: )?([\w-]+): (.*?)(?:; fill it in)?$")  # what is said of a key
_OF_A_RUN = (*_PATHS, "dataset_args", "output_dir", "output_name")  # which a suggestion leaves as the form has them


def _types(field: FieldInfo) -> set[str]:
    return set(re.findall(r"\b(?:bool|int|float|list|None|NoneType)\b", str(field.annotation)))


def option(key: str, field: FieldInfo) -> dict[str, Any]:
    """Return an option's control: checkbox, switch (three states), select, list, number, path or text, by its type."""
    types, words, about = _types(field), words_of(field.annotation), field.description or ""
    is_path = key in MODEL_FILE_KEYS or (re.search(r"\b(folder|file|TOML)\b", about) and key != "output_name")
    kind = "path" if is_path else "number" if types & {"int", "float"} else "text"
    if "list" in types or "bool" in types:
        kind = "list" if "list" in types else "switch" if len(types) > 1 else "checkbox"
    elif words:
        kind, words = "select", tuple(MODEL_TYPES) if key == "model_type" else words  # the schema follows from it
    default = "required" if field.is_required() else shown(field.get_default()) or ""
    words = words or ("true", "false")
    return {"key": key, "called": _PLAIN.get(key), "kind": kind, "about": about, "default": default, "words": words}


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


def _value(text: str, field: FieldInfo) -> Any:
    """Return a control's content as a value of TOML; None where it is empty."""
    types, lines = _types(field), [line.strip() for line in text.splitlines() if line.strip()]

    def scalar(line: str) -> Any:  # what fits no number is a text, which the trainer refuses in its own words
        with suppress(ValueError):
            value = tomlkit.value(line)
            if isinstance(value.unwrap(), bool | int | float) and types & {"bool", "int", "float"}:
                return value
        return tomlkit.value('""' if line == '""' else toml_string(line))

    if not lines or "list" not in types:
        return scalar(lines[0]) if lines else None
    items = [scalar(f"{line}.0" if line.isdecimal() and "float" in types else line) for line in lines if line != "[]"]
    if len(set(map(type, items))) > 1:  # toml takes lists of one type
        items = [tomlkit.value(toml_string(line)) for line in lines]
    return tomlkit.value(f"[{', '.join(item.as_string() for item in items)}]")


def _put(document: tomlkit.TOMLDocument, section: str, key: str, value: Any) -> None:
    """Set a key where it stands, else at the end of its section; None removes it."""
    tables: list[Any] = [document, *(table for table in document.values() if isinstance(table, dict))]
    table = next((table for table in tables if key in table), None)
    if table is not None and value is None:
        table.remove(key)
    elif table is not None:
        table[key] = value
    elif value is not None:
        table = document.setdefault(section, tomlkit.table())
        body = table.value.body
        end = 1 + max((at for at, (name, _) in enumerate(body) if name), default=-1)
        following, body[end:] = body[end:], []  # comments at the end of a section are said of the next
        table[key] = value
        body.extend(following)


def edited(text: str, key: str, content: str, script: Script[Any]) -> str:
    """Return the text with one key set to what its control holds; comments, order and all other lines stay.

    Raises:
        UserError: the text is no TOML, or has the key in a way that cannot be changed without touching others.
    """
    section, field = fields(script).get(key, ("", None))
    value, kept = _value(content, field) if field else None, read_keys(text, NAME, script).values
    # a learning rate counts even where it is the default: without it optimizers that find their own take 1.0
    if field and value is not None and not field.is_required() and key != "learning_rate":
        read, default = value.unwrap(), field.get_default()
        value = None if read == default and isinstance(read, bool) is isinstance(default, bool) else value
    changed, now = text, dict[str, Any]()
    with suppress(Exception):  # a heading that is a value, TOML that toml alone takes ...: refused below
        document = tomlkit.parse(text)
        _put(document, section, key, value)
        changed = tomlkit.dumps(document)
        now = read_keys(changed, NAME, script).values
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
    """Return what the form shows of a text: its keys, and all that stands against it; ``typed``: prompts were."""
    try:
        script, given = _read(text, pretrains)
    except UserError as error:
        return {"text": text, "errors": {}, "problems": [{"line": str(error), "changes": {}}], "values": None}
    values, known, errors, problems = dict(given.values), fields(script), dict[str, str](), []
    given.values |= {"sample_prompts": _PROMPTS} if typed and script is LORA else {}
    lines, notes, _ = _against(site, script, given)
    for line in (*lines, *_against_output(site, values)):
        key, said = found.groups() if (found := _LINE.match(line)) else ("", line)
        content = said.partition(", such as ")[2] if key == "output_dir" else ""
        stands = key and (key in values or line.startswith(NAME))
        problems.append({"line": line, "key": key, "changes": {key: content} if stands else {},
                         "offers": f"Take {content}" if content else "Remove"})  # fmt: skip
        errors[key] = f"{errors.get(key, '')}\n{said}".strip()
    return {
        "text": text, "training": script.training, "problems": problems, "errors": errors, "notes": notes,
        "values": {key: shown(values[key]) if key in values else "" for key in known},
        "unmet": {key: unmet for key, (_, field) in known.items() if (unmet := _unmet(key, field, values, known))},
    }  # fmt: skip


def _unmet(key: str, field: FieldInfo, given: Mapping[str, Any], known: Mapping[str, tuple[str, FieldInfo]]) -> str:
    """Return what an option goes with that is not given, or nothing."""
    values = {k: None if f.is_required() else f.get_default() for k, (_, f) in known.items()} | dict(given)
    types = tuple(name for name, row in MODEL_TYPES.items() if key in row.keys)
    if types and values.get("model_type", types[0]) not in types:
        return f"goes with model_type = {listed(types)}"
    markers = [one for one in field.metadata if isinstance(one, OnlyWith) and one.unmet(values)]
    return f"goes with {', '.join(map(str, markers))}".replace("`", "") if markers else ""


def _against(site: Site, script: Script[Any], given: RawConfig) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return what stands against running a configuration, a line each; its notes; and its values."""
    notes, values, lines = list[Note](), dict(given.values), list[str]()
    try:
        config = checked(given, script, notes)
        values = {key: value for section in config.model_dump().values() for key, value in section.items()}
    except UserError as error:
        lines = re.sub(r"set it in the TOML file or with --\w+", "fill it in", str(error)).splitlines()
    return [*lines, *_refused(site, values)], summary(notes), values


def _refused(site: Site, values: Mapping[str, Any]) -> list[str]:
    """Return a line for each option that runs a program, or whose path, or dataset, lies outside of the places."""
    lines = []
    for key, value in values.items():
        path = Path(value) if key in _PATHS and isinstance(value, str) and value not in ("", _PROMPTS) else None
        try:
            site.places.refuse_paths_outside(value, key)
            if key in ("caption_command", "trust_class_paths") and value:
                raise UserError("runs a program, which this page does not; start such a run in a terminal")
            if key in _MADE and value:
                site.places.find(str(value), output=key == "output_dir")
            # "owner/name", of which there is no folder, is a model of the hub
            if path and not path.exists() and (path.suffix in _NAMED or path.parent.is_dir()):
                raise UserError(f"no such file or folder: {value}")
            if path and key == "dataset_config" and path.is_file():
                site.places.refuse_paths_outside(read_toml(path, "check dataset_config")[0], path.name)
                refuse_outside(site, site.places.find(value))
        except (UserError, OSError, ValueError) as error:
            lines.append(f"{key}: {str(error).removeprefix(f'{key}: ')}")
    return lines


def _against_output(site: Site, values: Mapping[str, Any]) -> list[str]:
    """Return a line if output_dir is not free for this run; it ends with a folder that is."""
    taken, line = [Path(job.output) for job in site.jobs.all() if not job.is_over], ""
    with suppress(UserError, KeyError):  # what lies elsewhere is said already
        path = site.places.find(str(values["output_dir"]), output=True)
        if path in site.places.outputs:
            path /= Path(str(values.get("output_name") or "lora")).name
            line = "it holds all runs; give this one a folder of its own"
        elif path in taken:
            line = "a run that is going on or waits has this folder; choose another"
        elif is_run(path) and not (values.get("overwrite") or values.get("resume")):
            line = "it holds another run; set resume or overwrite, or choose another"
    return [f"output_dir: {line}, such as {site.places.show(free_name(path, taken))}"] if line else []


def _prompts_of(site: Site, values: Mapping[str, Any], typed: bool = False) -> str:
    """Return the prompts in the text file that a configuration names; ``typed``: if they were, and lie with a job."""
    with suppress(UserError, OSError):
        path = site.places.find(str(values.get("sample_prompts") or ""), own=True)
        if path.suffix == ".txt" and path.stat().st_size <= _MOST_PROMPTS and (STATE in path.parts or not typed):
            return read_text(path, "choose another").strip()
    return ""


def _files(site: Site, text: str, pretrains: bool, prompts: str) -> dict[str, str]:
    """Return the files of a job: the configuration, and prompts that were typed, for it or for the run it repeats."""
    script, given = _read(text, pretrains)
    typed = _prompts_of(site, given.values, typed=True)
    if script is not LORA or (not typed and prompts in ("", _prompts_of(site, given.values))):
        return {"config.toml": text}
    text = edited(text, "sample_prompts", _PROMPTS, script)
    return {"config.toml": text, "prompts.txt": f"{prompts or typed}\n"}


def ready(site: Site) -> list[tuple[str, str]]:
    """Return the configurations in folders called configs that say what they are for: path and title."""
    folders = [folder for folder in site.places.folders if folder.name == "configs"]
    texts = {path: path.read_text("utf-8", "replace") for folder in folders for path in sorted(folder.rglob("*.toml"))}
    titles = {path: re.match(r"#:schema .*\n# ?(.*)", text) for path, text in texts.items()}
    return [(site.places.show(path), title[1].rstrip(".:")) for path, title in titles.items() if title]


# ---- requests


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the form over an empty text, or over ``?config=``: a TOML, or the folder of a run."""
    text, found, script, prompts, configs = "", None, LORA, "", ready(site)
    if dataset := request.query_params.get("dataset"):
        text = edited("", "dataset_config", site.places.show(site.places.find(dataset)), LORA)
    if asked := request.query_params.get("config"):
        found = site.places.find(asked)
        file = site.places.find(str(found / "config.toml")) if found.is_dir() else found
        text = read_text(file, "choose a configuration that is there")
    pretrains = re.search(r"^\s*(data_dir|preset|init_from)\s*=", text, re.MULTILINE) is not None
    with suppress(UserError):
        script, given = _read(text, pretrains)
        if found and is_run(file.parent):  # its states are its own, and prompts that were typed lie with its job
            prompts = _prompts_of(site, given.values, typed=True)
            for key in ("resume", "overwrite", *["sample_prompts"] * bool(prompts)):
                text = edited(text, key, "", script)
    return site.page(
        request, "new_run.html", text=text, pretrains=pretrains, groups=form_of(script), training=script.training,
        found=found, prompts=prompts, ready=configs, optimizers=list(OPTIMIZERS),
        demo=next((path for path, _ in configs if path.endswith("demo.toml")), None),
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
        text = edited(text, key, str(content), _read(text, pretrains)[0])
    answer = examine(site, text, pretrains, prompts != "")
    if not form.get("touched"):  # in an empty form nothing is missing yet
        answer |= {"problems": [], "errors": {}}
    answer["prompts"] = _prompts_of(site, answer["values"] or {})
    parts = {"said": {"touched": form.get("touched"), **answer}}
    if (training := answer.get("training")) and training != form.get("training"):
        parts["fields"] = {"groups": form_of(_SCRIPTS[training]), "training": training, "prompts": prompts}
    html = {name: bytes(site.part("new_run.html", name, **values).body).decode() for name, values in parts.items()}
    return JSONResponse(answer | html)


def paths(site: Site, request: Request, form: Form) -> Response:
    """Return paths that begin with a text: folders, and files that options name."""
    text, found = request.query_params.get("text", ""), [*site.places.outputs, *site.places.folders]
    with suppress(UserError, OSError):
        folder = site.places.find(text if text.endswith("/") else str(Path(text).parent))
        begun = [path for path in folder.iterdir() if path.name.startswith(text.rpartition("/")[2])]
        found = sorted(path for path in begun if path.name[0] != "." and (path.is_dir() or path.suffix in _NAMED))
    return JSONResponse([site.places.show(path) + "/" * path.is_dir() for path in found[:60]])


def runnable(site: Site, text: str, pretrains: bool) -> tuple[Script[Any], dict[str, Any]]:
    """Return script and values of a configuration; all that is run comes by here.

    Raises:
        UserError: anything is wrong with it, lies outside of the places, or would run another program.
    """
    script, given = _read(text, pretrains)
    lines, _, values = _against(site, script, given)
    if lines:
        raise UserError(*lines)
    return script, values


def start(site: Site, request: Request, form: Form) -> Response:
    """Put the run into the queue, and go to it."""
    text, pretrains, prompts = _given(form)
    files, processes = _files(site, text, pretrains, prompts), str(form.get("processes") or 1)
    script, values = runnable(site, files["config.toml"], pretrains)
    if lines := _against_output(site, values):
        raise UserError(*lines)
    if not re.fullmatch(r"[1-9]\d{0,2}", processes):
        raise UserError(f"processes: {processes[:20]!r} is no number from 1 to 999; give one for each GPU")
    output = site.places.find(values["output_dir"], output=True)
    many = ["-m", "torch.distributed.run", "--nproc-per-node", processes] if processes != "1" else []
    words = [*many, str(ROOT / script.name), "--config_file", "{job}/config.toml"]
    site.jobs.add("train", values["output_name"], words, queued=True, output=str(output), files=files)
    return goto(url("/run", path=output))


def again(site: Site, request: Request, form: Form) -> Response:
    """Queue a run once more, from one of its states, its newest ("auto") or the first step (""), as it was set."""
    folder, state = site.places.find(str(form.get("path", "")), output=True), str(form.get("state", "auto"))
    job = site.jobs.of_output(folder)
    run, settings = look(site, folder, job), settings_of(folder, job.folder if job else None)
    if run.state == "running":  # perhaps in a terminal; a job that waits is refused by the queue
        raise UserError(f"{run.name}: is running already")
    if not settings:
        raise UserError(f"{run.name}: has no configuration that a run wrote; begin a new run instead")
    own = job.folder if job and not settings_of(folder) else folder  # one that failed early has written none
    pretrains = script_of(settings) is LLM
    files = _files(site, text_of(own / "config.toml") or "", pretrains, "")
    script, _ = runnable(site, files["config.toml"], pretrains)
    resume = state if state in ("auto", "") else str(site.places.find(str(folder / state), output=True))
    words = [script.name, "--config_file", "{job}/config.toml", "--output_dir", str(folder), "--resume", resume]
    site.jobs.add("train", run.name, words, queued=True, output=str(folder), files=files)
    return tell_changed()


def side_job(site: Site, request: Request, form: Form) -> Response:
    """Begin what is done beside the form: count memory, look the data over, suggest, or translate kohya's."""
    kind, (text, pretrains, prompts), files = str(form.get("job")), _given(form), dict[str, str]()
    values = _read(text, pretrains)[1].values
    if kind == "memory":
        files = _files(site, text, pretrains, prompts)
        runnable(site, files["config.toml"], pretrains)
        words = ["tools/plan_memory.py", "{job}/config.toml", "--save_to={job}/result.json"]
        words += [f"--gpu_memory={form['card']}"] if form.get("card") else []
    elif kind in ("dataset", "suggest"):
        read = _PATHS[:-1] if kind == "suggest" else ("dataset_config",)
        lacking = [key for key in read if key not in MODEL_FILE_KEYS and not values.get(key)]
        lines = [f"{key}: is needed for this; fill it in" for key in lacking]
        if lines := lines or _refused(site, {key: values[key] for key in read if key in values}):
            raise UserError(*lines)
        words = ["tools/check_dataset.py", str(site.places.find(str(values["dataset_config"])))]
        words = _suggestion(form, values) if kind == "suggest" else words
    else:
        dropped, name, text = form.get("kohya"), "command.txt", str(form.get("command", ""))
        if getattr(dropped, "filename", ""):
            name, text = dropped.filename, dropped.file.read().decode("utf-8", "replace")
        source = "kohya" + Path(name).suffix[:5]
        _refuse_read_outside(site, source, text)
        folder = free_name(site.places.outputs[0] / (re.sub(r"\W", "_", Path(name).stem)[:60] or "kohya"))
        words = ["tools/migrate_config.py", f"{{job}}/{source}", "--save_to", f"{site.places.show(folder)}/config.toml"]
        files = {source: text}
    return show_job(site, request, form, site.jobs.add(kind, kind, words, files=files))


def _suggestion(form: Form, values: Mapping[str, Any]) -> list[str]:
    """Return the command that suggests settings for the form's model and dataset."""
    kind, model = str(form.get("kind")), str(values["pretrained_model_name_or_path"])
    said = {"kind": kind, "model": model, "images": values["dataset_config"], "gpu_memory": form.get("gpu_memory")}
    said |= {"class_word": form.get("class_word")} if kind == "subject" else {}
    taken = ("model_type", *["trigger_word"] * (kind != "edit"), *MODEL_FILE_KEYS * Path(model).is_file())
    flags = said | {key: values.get(key) for key in taken}
    return ["tools/suggest_config.py", "--save_to={job}", *(f"--{key}={said}" for key, said in flags.items() if said)]


def _refuse_read_outside(site: Site, source: str, text: str) -> None:
    """Refuse a configuration of kohya's by what would be read to translate it: datasets, another configuration."""
    if Path(source).suffix.lower() in SCRIPT_SUFFIXES:
        with TemporaryDirectory() as folder:
            write_text(Path(folder) / source, text)
            words = read_command_file(Path(folder) / source).arguments
        pairs: Any = pairwise([*(part for word in words for part in word.split("=", 1)), ""])
    else:
        pairs = read_keys(text, source, LORA).values.items()
    for key, value in pairs:
        if key.lstrip("-") in _READ:
            site.places.refuse_paths_outside(value, key)


def show_job(site: Site, request: Request, form: Form, begun: Job | None = None) -> Response:
    """Show how far a job beside the form is, and what it would set in the form."""
    job = begun or site.jobs.get(request.query_params.get("id", ""))
    said = text_of(job.folder / "config.toml") if job.kind == "suggest" else job.log.partition("\nset:\n")[2]
    values = read_keys(said or "", "settings", LORA).values if job.is_over else {}
    proposed = {key: text for key, value in values.items() if key not in _OF_A_RUN and (text := shown(value))}
    prompts = job.kind == "suggest" and text_of(job.folder / "prompts.txt")
    fits = re.search(r"^(fits|does not fit) into ([\d.]+)", job.log, re.MULTILINE)
    opens = job.kind == "migrate" and job.state == "done" and Path(job.words[-1]).parent
    return site.part("new_run.html", "job", job=job, proposed=proposed, prompts=prompts, fits=fits, opens=opens)


ROUTES: Routes = {
    "/new": show, "/new/edit": (None, edit), "/new/paths": paths, "/new/job": (show_job, side_job),
    "/new/start": (None, start), "/run/again": (None, again),
}  # fmt: skip
