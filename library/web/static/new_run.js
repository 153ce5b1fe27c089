// The form and the text, each following the other: what is changed goes to the server, which says what both are then.
import { ask } from "/static/page.js";

const element = (id) => document.getElementById(id), all = (what, within = document) => [...within.querySelectorAll(what)];
const make = (kind, textContent, more = {}) => Object.assign(document.createElement(kind), { textContent, ...more });
const text = element("text"), pretrains = element("pretrains");
let pending = {}, typed = true, busy = null, timer = 0, touched = text.value.trim() !== "", ownPrompts = Boolean(element("prompts")?.value);
if (!location.search && sessionStorage.draft) restore(JSON.parse(sessionStorage.draft));

/** Send what has changed; resolves when nothing is left to send. */
async function send() {
  clearTimeout(timer);
  timer = 0;
  while (busy) await busy;
  if (!typed && !Object.keys(pending).length) return;
  const sent = pending, body = new FormData();
  [pending, typed] = [{}, false];
  const said = { text: text.value, changes: JSON.stringify(sent), training: element("fields").dataset.training, pretrains: pretrains.checked ? "1" : "", prompts: prompts() };
  for (const [name, value] of Object.entries(said)) body.set(name, value);
  busy = ask("/new/edit", { method: "POST", body }).then((answer) => answer?.json());
  const found = await busy;
  busy = null;
  if (found && !typed) return show(found);
  if (!found) return;
  pending = { ...sent, ...pending }; // the text was changed meanwhile: those words stay, and the field comes again
  await send();
}

/** Return the prompts that were typed; a file's are its own. */
function prompts() {
  return ownPrompts ? element("prompts")?.value ?? "" : "";
}

function restore(draft) {
  [text.value, pretrains.checked, touched] = [draft.text, draft.pretrains, draft.text.trim() !== ""];
  ownPrompts = Boolean(draft.prompts);
  if (element("prompts")) element("prompts").value = draft.prompts;
}

function show(found) {
  if (found.text !== text.value) {
    const top = text.scrollTop;
    text.value = found.text;
    text.scrollTop = top;
  }
  if (found.fields) {
    element("fields").replaceWith(new DOMParser().parseFromString(found.fields, "text/html").getElementById("fields"));
    filter();
  }
  if (element("prompts") && !ownPrompts && element("prompts") !== document.activeElement) element("prompts").value = found.prompts ?? "";
  sessionStorage.draft = JSON.stringify({ text: text.value, pretrains: pretrains.checked, prompts: prompts() });
  if (!touched) found.problems = [];
  const said = found.problems.map(({ line, key, stands }) => {
    const shown = make("p", `${line} `, { className: line.includes(" is required") ? "warn" : "bad" });
    if (stands && key) shown.append(changing("Remove", { [key]: "" }));
    return shown;
  });
  if (found.output && touched) {
    said.push(make("p", `${found.output.line} `, { className: "warn" }));
    said.at(-1).append(changing(`Take ${found.output.free}`, { output_dir: found.output.free }));
  }
  const count = said.length, against = count ? said[0].firstChild.data : touched ? "" : "Choose a base model and a dataset to begin";
  Object.assign(element("verdict"), { textContent: count ? `${count} to settle` : touched ? "complete" : "", className: `tag ${count ? "warn" : "good"}`, hidden: !touched });
  Object.assign(element("against"), { textContent: against, title: against, className: count ? "warn" : "note" });
  if (!count) said.push(make("p", touched ? "Complete: the trainer takes it." : against, { className: touched ? "good" : "note" }));
  element("problems").replaceChildren(...said, ...(found.notes ?? []).map((note) => make("p", note, { className: "note" })));
  element("fields").disabled = !found.values;
  if (found.values) for (const control of all("#fields [data-key]")) fill(control, found);
  for (const group of all(".group")) {
    const tag = group.querySelector(".tag"), set = all(".set", group).length;
    Object.assign(tag, { textContent: `${set} set`, hidden: !set });
  }
  const dataset = found.values?.dataset_config ?? "";
  Object.assign(element("data"), { hidden: !dataset, href: `/data?dataset=${encodeURIComponent(dataset)}` });
}

function fill(control, { values, unmet, problems }) {
  const key = control.dataset.key, value = values[key], option = control.closest(".option");
  const said = problems.filter((problem) => problem.key === key).map(({ line }) => line.replace(/^(configuration:\d+: )?[\w-]+: |; fill it in$/g, "")).join("\n");
  option.classList.toggle("set", value !== "");
  option.classList.toggle("unmet", key in unmet);
  option.querySelector(".goes").textContent = value === null ? "of several lines: change it in the text" : unmet[key] ?? "";
  option.querySelector(".said").textContent = said;
  control.setAttribute("aria-invalid", said !== "");
  control.disabled = value === null;
  if (control.type === "checkbox") control.checked = (pending[key] ?? (value || control.dataset.default)) === "true";
  else if (!(key in pending) && control !== document.activeElement) control.value = value ?? "";
}

function changing(words, changes) {
  const button = make("button", words, { type: "button", className: "small" });
  button.dataset.changes = JSON.stringify(changes);
  return button;
}

function filter() {
  const word = element("search").value.trim().toLowerCase();
  for (const option of all(".option")) option.hidden = !option.textContent.toLowerCase().includes(word);
  for (const group of all(".group")) {
    group.hidden = !group.querySelector(".option:not([hidden])");
    group.open = word !== "" || "basic" in group.dataset;
  }
  element("none").hidden = all(".group:not([hidden])").length > 0;
}

async function complete(input) {
  const answer = await ask(`/new/paths?of=${input.name}&text=${encodeURIComponent(input.value)}`);
  if (answer) element("paths").replaceChildren(...(await answer.json()).map((value) => make("option", "", { value })));
}

for (const type of ["input", "focusin"]) {
  document.addEventListener(type, ({ target }) => {
    if (target.getAttribute?.("list") === "paths") complete(target);
    if (type === "focusin") return;
    const { key } = target.dataset;
    if (target.id === "prompts") ownPrompts = target.value.trim() !== "";
    const counts = key || [text, pretrains, element("prompts")].includes(target);
    touched ||= Boolean(counts);
    if (key) pending[key] = target.type === "checkbox" ? String(target.checked) : target.value;
    else if (counts) typed = true;
    if (target.id === "search") filter();
    if (!counts) return;
    clearTimeout(timer);
    timer = setTimeout(send, 300);
  });
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-changes], [data-hides], [data-settled], #clear");
  if (button?.dataset.changes || button?.id === "start") touched ||= typed = true;
  if (button?.dataset.changes) send(Object.assign(pending, JSON.parse(button.dataset.changes)));
  else if (button?.id === "clear") send(restore({ text: "", pretrains: false, prompts: "" }, typed = true));
  else if (button && "hides" in button.dataset) button.closest("dialog").close();
  else if (button && (timer || busy || typed)) { // what was typed last belongs to what is started
    event.preventDefault();
    event.stopImmediatePropagation();
    send().then(() => button.click());
  }
}, true);
document.addEventListener("htmx:after:swap", () => document.querySelector("#message:not(:empty)")?.scrollIntoView({ block: "nearest" }));
send();
