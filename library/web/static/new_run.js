// The form and the text, each following the other: what is changed goes to the server, which says what both are then.
import { ask } from "/static/page.js";

const element = (id) => document.getElementById(id);
const all = (what, within = document) => [...within.querySelectorAll(what)];
const text = element("text"), pretrains = element("pretrains");
let touched = text.value.trim() !== "";
let pending = {}, typed = true, busy = null, timer; // pending: changed fields; typed: something else was
let values = {}; // of the options, as the text has them

/** Send what has changed; resolves when nothing is left to send. */
async function send() {
  timer = clearTimeout(timer);
  while (busy) await busy;
  if (!typed && !Object.keys(pending).length) return;
  const sent = pending, body = new FormData(element("new"));
  [pending, typed] = [{}, false];
  element("against").classList.add("old");
  const said = { changes: JSON.stringify(sent), training: element("fields").dataset.training, touched: touched || "" };
  for (const [name, value] of Object.entries(said)) body.set(name, value);
  busy = ask("/new/edit", { method: "POST", body }).then((answer) => answer?.json());
  const found = await busy;
  busy = null;
  element("against").classList.remove("old");
  if (!found || !typed) return found && show(found);
  pending = { ...sent, ...pending }; // the text was changed meanwhile: those words stay, and the field comes again
  await send();
}

function restore(draft) {
  [text.value, pretrains.checked] = [draft.text, draft.pretrains];
  touched = draft.text.trim() !== "";
}

function show(found) {
  if (found.text !== text.value) [text.value, text.scrollTop] = [found.text, text.scrollTop];
  if (found.fields) filter(element("fields").outerHTML = found.fields);
  sessionStorage.draft = JSON.stringify({ text: text.value, pretrains: pretrains.checked });
  [element("problems").innerHTML, element("against").innerHTML] = [found.said, found.against];
  element("fields").disabled = !found.values;
  values = found.values ?? {};
  if (!found.values) return;
  for (const control of all("#fields [data-key]")) fill(control, found);
  for (const button of all("#fields [data-changes]")) { // what is chosen
    const is = ([key, wanted]) => `${values[key] ?? ""}\n`.startsWith(`${wanted}\n`);
    button.setAttribute("aria-pressed", Object.entries(JSON.parse(button.dataset.changes)).every(is));
  }
  for (const group of all(".group")) group.querySelector(".tag").textContent = `${all(".set", group).length} set`;
  for (const place of all("[data-shows]")) {
    place.textContent = found.values[place.dataset.shows] ?? "";
  }
  const dataset = found.values.dataset_config ?? "";
  Object.assign(element("data"), { hidden: !dataset, href: `/data?dataset=${encodeURIComponent(dataset)}` });
}

/** Put a model of the picker into the form: what a person has set stays, what another model of it set goes; say so. */
function choose({ label, settings, own }) {
  const key_of = "pretrained_model_name_or_path", before = values[key_of], changes = {}, said = { Set: [], Removed: [], Kept: [] };
  const others = all("[data-pick]").map((one) => JSON.parse(one.dataset.pick).settings).filter((one) => one[key_of] === before);
  const forced = own ? [key_of] : JSON.parse(element("models").dataset.forced); // a file's parts and memory are the person's to say
  for (const key of own ? Object.keys(settings) : new Set([...forced, ...Object.keys(settings), ...others.flatMap(Object.keys)])) {
    const now = values[key] ?? "", wanted = settings[key] ?? "";
    const free = forced.includes(key) || values[key] === "" || others.some((one) => (one[key] ?? "") === now);
    if (free) changes[key] = wanted;
    if (now === wanted || [key_of, "output_dir"].includes(key)) continue; // where it is written is named after the dataset, too
    if (!free) said.Kept.push(`${key} = ${now}`);
    else if (wanted) said.Set.push(`${key} = ${wanted}`);
    else said.Removed.push(key);
  }
  const lines = Object.entries(said).filter(([, keys]) => keys.length).map(([what, keys]) => `${what}: ${keys.join(", ")}.`);
  element("changed").textContent = [`${label}.`, ...lines].join(" ");
  element("models").open = false;
  element("begin").scrollIntoView({ block: "nearest" });
  return changes;
}

function fill(control, { values, defaults, unmet, errors }) {
  const key = control.dataset.key, value = values[key], option = control.closest(".option");
  option.classList.toggle("set", value !== "");
  option.classList.toggle("unmet", key in unmet);
  option.querySelector(".goes").textContent = value === null ? "change it in the text" : unmet[key] ?? "";
  if (key === "pretrained_model_name_or_path") option.querySelector(".goes").textContent = defaults.model_type ?? "";
  option.querySelector(".said").textContent = errors[key] ?? "";
  control.setAttribute("aria-invalid", key in errors);
  control.disabled = value === null;
  if (key in defaults) control.placeholder = defaults[key];
  if (key === "model_type") control.options[0].textContent = defaults[key] ?? "as the model says";
  if (control.type === "checkbox") control.checked = (pending[key] ?? (value || control.dataset.default)) === "true";
  else if (!(key in pending) && control !== document.activeElement) control.value = value ?? "";
}

/** Return how well an option is found, 0 best: every word in its name or as another word for it, title or help. */
function rank({ dataset: { of: key, also }, textContent }, words) {
  const names = [key, ...also.split(" ")], [title] = textContent.toLowerCase().split(key), help = textContent.toLowerCase();
  const places = [(word) => names.includes(word), (word) => key.includes(word), (word) => `${also}${title}`.includes(word),
    (word) => help.includes(word), () => true];
  const found = words.map((word) => places.findIndex((has) => has(word)));
  return found.includes(4) ? Infinity : Math.max(0, ...found);
}

function filter() {
  const words = element("search").value.toLowerCase().split(/\s+/).filter(Boolean), searches = words.length > 0;
  for (const option of all(".option")) option.hidden = (option.rank = rank(option, words)) === Infinity;
  for (const group of all(".group")) {
    group.rank = Math.min(...all(".option", group).map((option) => option.rank));
    group.hidden = group.rank === Infinity;
    group.open = searches || "basic" in group.dataset;
    arrange(group.querySelector(".fields"));
  }
  arrange(element("fields"));
  for (const heading of all("#fields > h2")) heading.hidden = searches;
  element("none").hidden = all(".group:not([hidden])").length > 0;
}

/** Put what is found best first; without a search all stand as they did. */
function arrange(parent) {
  const children = [...parent.children];
  children.forEach((child, place) => { child.place ??= place; });
  parent.append(...children.sort((one, other) => (one.rank ?? 0) - (other.rank ?? 0) || one.place - other.place));
}

document.addEventListener("input", ({ target }) => {
  const { key } = target.dataset, counts = key || [text, pretrains].includes(target);
  if (target.id === "search") filter();
  if (!counts) return;
  touched = true;
  if (key) pending[key] = target.type === "checkbox" ? String(target.checked) : target.value;
  else typed = true;
  clearTimeout(timer);
  timer = setTimeout(send, 300);
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-changes], [data-pick], [data-settled], #clear");
  const { changes, pick } = button?.dataset ?? {};
  if (!button) return;
  if (button.id === "clear") element("models").open = true, send(restore({ text: "", pretrains: false }), typed = true);
  if (pick) [pretrains.checked, typed] = [false, true];
  if (button.id === "start") sessionStorage.started = "yes";
  if ("settled" in button.dataset) element("message").replaceChildren(); // what was refused before
  if (changes || pick || button.id === "start") touched ||= typed = true;
  if (changes) send(Object.assign(pending, JSON.parse(changes)));
  else if (pick) send().then(() => send(Object.assign(pending, choose(JSON.parse(pick)))));
  else if ("settled" in button.dataset && (timer || busy || typed)) { // what was typed last belongs to what is started
    event.preventDefault();
    event.stopImmediatePropagation();
    send().then(() => button.click());
  } else if (button.id === "download") button.href = URL.createObjectURL(new Blob([text.value]));
}, true);
document.addEventListener("htmx:after:swap", () =>
  document.querySelector("#message:not(:empty)")?.scrollIntoView({ block: "nearest" }));
if (!location.search && sessionStorage.draft) restore(JSON.parse(sessionStorage.draft));
send().then(() => { // the run that was started from this draft has its folder: the next one gets another
  if (values.pretrained_model_name_or_path) element("models").open = false;
  const offer = sessionStorage.started && document.querySelector('#problems [data-changes*="output_dir"]');
  delete sessionStorage.started;
  if (!offer) return;
  offer.click();
  element("changed").textContent = `${values.output_dir} holds a run. Set: output_dir = ${JSON.parse(offer.dataset.changes).output_dir}.`;
});
