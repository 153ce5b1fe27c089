// This tab's conversation: kept in sessionStorage, so that it survives a reload; drawn as text, never as HTML.
import { ask, sayGone } from "./page.js";

const find = (id) => document.getElementById(id);
const form = find("settings"), box = find("prompt"), page = document.documentElement;
let turns = []; // [question, answer, its tokens, ended by itself]
let hasTurns = null; // whether the model talks in turns; if not, it goes on with a text
let loaded = "running" in find("chat").dataset, busy = false, unanswered = "";
let name = ""; // of the newest request, by which it is stopped

const tell = (text, kind = "") => Object.assign(find("status"), { className: `note ${kind}`, textContent: text });

function drawMessage(who, text) {
  const message = Object.assign(document.createElement("article"), { className: `said ${who}`, textContent: text });
  find("turns").append(message);
  return message;
}

function draw(shown = turns) {
  find("turns").replaceChildren();
  for (const [question, text] of shown) {
    drawMessage("user", question || "…");
    drawMessage("model", text);
  }
  for (const button of document.querySelectorAll("[data-idle]")) button.disabled = busy;
  find("stop").disabled = !busy;
  find("send").disabled ||= !loaded;
  find("newest").hidden = !turns.length;
  find("copy").dataset.copy = turns.at(-1)?.[1];
  find("choices").open = innerWidth > 960 || !loaded;
  form.system.disabled = hasTurns === false;
  box.placeholder = hasTurns === false ? "Text to go on from; nothing: go on" : "Message";
}

/** Send a request and yield the events of its answer. */
async function* events(request) {
  const body = new URLSearchParams({ request: JSON.stringify(request) });
  const reply = await ask("/chat/ask", { method: "POST", body });
  const reader = reply?.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part, rest = ""; reader && !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    yield* lines.map(JSON.parse);
  }
}

/** Have the model loaded, or a message answered after `before`; later turns are given up once there is an answer. */
async function run(what, message = "", before = turns) {
  if (!form.reportValidity()) return;
  const numbers = [...form.querySelectorAll("[type=number]")].map((field) => [field.name, field.valueAsNumber]);
  const { strength, ...settings } = Object.fromEntries(numbers);
  const { model, lora } = Object.fromEntries(new FormData(form)), system = form.system.value.trim();
  name = `${Date.now()} ${Math.random()}`;
  const request = { do: what, name, model, lora, strength, settings, system, turns: before, message };
  if (hasTurns !== null) request.has_turns = hasTurns;
  if (what === "answer" && before === turns) [unanswered, box.value] = [message, ""];
  busy = true;
  tell(what === "load" ? "loading the model …" : "");
  draw(before);
  if (message) drawMessage("user", message);
  const place = drawMessage("model writing", "");
  scrollTo(0, page.scrollHeight);
  let event = {}, note = "";
  try {
    for await (event of events(request)) {
      if (innerHeight + scrollY > page.scrollHeight - 150) scrollTo(0, page.scrollHeight);
      if (event.event === "piece") place.append(event.parts.content ?? "");
      if (event.event !== "ready") continue;
      if (turns.length && hasTurns !== event.has_turns) {
        turns = [];
        note = "The conversation begins anew: a text and a talk in turns do not go together.";
      }
      [loaded, hasTurns, find("introduction").textContent] = [true, event.has_turns, event.introduction];
    }
  } catch {
    sayGone();
  }
  busy = false;
  loaded &&= !event.is_over;
  const { error, report, remarks = [], turn = place.textContent && [message, place.textContent, [], false] } = event;
  if (turn) turns = [...turns.slice(0, before.length), turn];
  else box.value ||= unanswered;
  unanswered = "";
  tell(error ?? [note, report, ...remarks].filter(Boolean).join(" · "), error ? "bad" : "");
  draw();
}

const actions = {
  load: () => run("load"),
  send: () => (box.value.trim() || hasTurns === false) && run("answer", box.value),
  stop: () => ask("/chat/stop", { method: "POST", body: new URLSearchParams({ name }) }),
  again: () => { form.seed.value++; run("answer", turns.at(-1)[0], turns.slice(0, -1)); },
  back: () => { box.value = turns.pop()[0]; draw(); },
  new: () => { turns = []; tell(""); draw(); },
};
for (const [id, action] of Object.entries(actions)) find(id).addEventListener("click", action);
box.addEventListener("keydown", (event) => {
  if (event.key === "Escape") find("stop").click();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("send").click();
});

document.addEventListener("visibilitychange", () => {
  const values = [...new FormData(form)], text = unanswered || box.value;
  sessionStorage.setItem("tandem-chat", JSON.stringify({ turns, hasTurns, values, text }));
});
try {
  const kept = JSON.parse(sessionStorage.getItem("tandem-chat"));
  if (kept.turns.every((turn) => turn.length === 4)) ({ turns, hasTurns } = kept);
  for (const [name, value] of kept.values) form[name].value = value;
  for (const select of [form.model, form.lora]) select.selectedIndex = Math.max(0, select.selectedIndex); // may be gone
  box.value = kept.text;
} catch { /* nothing, or of another version */ }
draw();
