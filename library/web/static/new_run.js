// The form and the text, each following the other: what is changed goes to the server, which says what both are then.
import { ask } from "/static/page.js";

const text = document.getElementById("text"), pretrains = document.getElementById("pretrains");
let pending = {}, typed = true, busy = null, timer = 0;

const controls = () => document.querySelectorAll("#fields [data-key]");
const make = (kind, content, more = {}) => Object.assign(document.createElement(kind), { textContent: content }, more);

function later(milliseconds = 300) {
  clearTimeout(timer);
  timer = setTimeout(send, milliseconds);
}

/** Send what has changed; resolves when nothing is left to send. */
async function send() {
  clearTimeout(timer);
  timer = 0;
  if (busy) await busy;
  if (!typed && !Object.keys(pending).length) return;
  const sent = pending, body = new FormData();
  [pending, typed] = [{}, false];
  body.set("text", text.value);
  body.set("changes", JSON.stringify(sent));
  body.set("training", document.getElementById("fields").dataset.training);
  if (pretrains.checked) body.set("pretrains", "1");
  busy = ask("/new/edit", { method: "POST", body }).then((answer) => answer?.json());
  const found = await busy;
  busy = null;
  if (!found) return;
  if (!typed) return show(found);
  pending = { ...sent, ...pending }; // the text was changed meanwhile: its owner's words stay, the field comes again
  await send();
}

function show(found) {
  if (found.text !== text.value) {
    const top = text.scrollTop;
    text.value = found.text;
    text.scrollTop = top;
  }
  if (found.fields) {
    document.getElementById("fields").replaceWith(new DOMParser().parseFromString(found.fields, "text/html").getElementById("fields"));
    filter();
  }
  const said = found.problems.map((problem) => {
    const line = make("p", problem.line, { className: problem.line.includes(" is required") ? "warn" : "bad" });
    if (problem.stands && problem.key) line.append(" ", changing("Remove", { [problem.key]: "" }));
    return line;
  });
  said.push(...(found.notes ?? []).map((note) => make("p", note, { className: "note" })));
  if (!said.length) said.push(make("p", text.value.trim() ? "Complete: the trainer takes it." : "", { className: "good" }));
  document.getElementById("problems").replaceChildren(...said);
  const output = found.output && make("p", found.output.line + " ", { className: "warn" });
  output?.append(changing(`Take ${found.output.free}`, { output_dir: found.output.free }));
  document.getElementById("output").replaceChildren(...(output ? [output] : []));
  document.getElementById("fields").disabled = found.values === null;
  if (found.values) for (const control of controls()) fill(control, found);
  for (const group of document.querySelectorAll(".group")) {
    const tag = group.querySelector(".tag"), set = group.querySelectorAll(".set").length;
    tag.textContent = `${set} set`;
    tag.hidden = !set;
  }
  const data = document.getElementById("data"), dataset = found.values?.dataset_config;
  data.hidden = !dataset;
  data.href = `/data?dataset=${encodeURIComponent(dataset ?? "")}`;
}

function fill(control, found) {
  const key = control.dataset.key, value = found.values[key], option = control.closest(".option");
  const problems = found.problems.filter((problem) => problem.key === key).map((problem) => problem.line);
  option.classList.toggle("set", value !== "");
  option.classList.toggle("unmet", key in found.unmet);
  option.querySelector(".goes").textContent = value === null ? "of several lines: change it in the text" : found.unmet[key] ?? "";
  option.querySelector(".said").textContent = problems.join("\n");
  control.setAttribute("aria-invalid", problems.length > 0);
  control.disabled = value === null;
  if (key in pending || (control === document.activeElement && control.type !== "checkbox")) return;
  if (control.type === "checkbox") control.checked = (value || control.dataset.default) === "true";
  else control.value = value ?? "";
}

function changing(words, changes) {
  const button = make("button", words, { type: "button", className: "small" });
  button.dataset.changes = JSON.stringify(changes);
  return button;
}

function filter() {
  const word = document.getElementById("search").value.trim().toLowerCase();
  let shown = 0;
  for (const group of document.querySelectorAll(".group")) {
    const options = [...group.querySelectorAll(".option")];
    for (const option of options) option.hidden = !option.textContent.toLowerCase().includes(word);
    const fitting = options.filter((option) => !option.hidden).length;
    group.hidden = !fitting;
    group.open = word ? true : "basic" in group.dataset;
    shown += fitting;
  }
  document.getElementById("none").hidden = shown > 0;
}

async function suggest(input) {
  const answer = await ask(`/new/paths?text=${encodeURIComponent(input.value)}`);
  const found = answer ? await answer.json() : [];
  document.getElementById("paths").replaceChildren(...found.map((path) => make("option", "", { value: path })));
}

document.addEventListener("input", ({ target }) => {
  if (target.dataset.key) pending[target.dataset.key] = target.type === "checkbox" ? String(target.checked) : target.value;
  if (target === text || target === pretrains) typed = true;
  if (target.dataset.key || target === text || target === pretrains) later();
  if (target.id === "search") filter();
});
for (const type of ["input", "focusin"]) {
  document.addEventListener(type, ({ target }) => target.getAttribute?.("list") === "paths" && suggest(target));
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-changes], [data-hides], [data-settled]");
  if (!button) return;
  if (button.dataset.changes) send(Object.assign(pending, JSON.parse(button.dataset.changes)));
  else if ("hides" in button.dataset) button.closest("dialog").close();
  else if (timer || busy) { // what was typed last belongs to what is started
    event.preventDefault();
    event.stopImmediatePropagation();
    send().then(() => button.click());
  }
}, true);
document.addEventListener("htmx:after:swap", () => document.querySelector("#message:not(:empty)")?.scrollIntoView({ block: "nearest" }));
send();
