// This tab's conversation: kept in sessionStorage, so that it survives a reload; drawn as text, never as HTML.
import { ask, sayGone } from "./page.js";

const find = (id) => document.getElementById(id);
const form = find("settings"), box = find("text"), status = find("status");
const number = (name) => form[name].valueAsNumber;
let talk = { turns: [], hasTurns: null, tries: 0 }; // a turn: [question, answer, its tokens, ended by itself]
let loaded = find("chat").hasAttribute("data-running"), current = null; // the answer that is under way

const make = (name, text = "", values = {}) => Object.assign(document.createElement(name), { textContent: text }, values);
const tell = (text, kind = "") => Object.assign(status, { className: `note ${kind}`, textContent: text });
const show = () => { save(); draw(); };
const button = (text, title, onclick) => make("button", text, { type: "button", className: "quiet small", title, onclick });

function save(unanswered = box.value) {
  const values = { ...Object.fromEntries(new FormData(form)), markdown: form.markdown.checked };
  try {
    sessionStorage.setItem("tandem-chat", JSON.stringify({ talk, values, unanswered }));
  } catch { /* no room: a reload begins anew */ }
}

function restore() {
  try {
    const { talk: kept, values, unanswered } = JSON.parse(sessionStorage.getItem("tandem-chat"));
    if (kept.turns.every((turn) => turn.length === 4)) talk = kept;
    for (const [name, value] of Object.entries(values)) {
      const field = form[name], before = field.value;
      if (name === "markdown") field.checked = value;
      else if ((field.value = value, field.value !== value)) field.value = before; // it is not there any more
    }
    box.value = unanswered;
  } catch { /* nothing, or of another version */ }
}

/** Append Markdown's headings, lists, code and bold, as elements with text in them. */
function drawMarkdown(place, text) {
  for (const [i, block] of text.split(/^```.*$/m).entries()) {
    if (i % 2) place.append(make("pre", block.replace(/^\n|\n$/g, "")));
    for (const line of i % 2 ? [] : block.split("\n").filter((line) => line.trim())) {
      const [, mark, rest] = line.match(/^\s*(#{1,6}|[-*]|\d+\.)\s+(.*)$/) ?? [null, "", line];
      const name = !mark ? "p" : mark[0] === "#" ? "h3" : "li";
      const parent = place.appendChild(make(name, "", name === "li" ? { className: /\d/.test(mark) ? mark : "dot" } : {}));
      for (const part of rest.split(/(`[^`]+`|\*\*[^*]+\*\*)/)) {
        const kind = /^`[^]+`$/.test(part) ? ["code", 1] : /^\*\*[^]+\*\*$/.test(part) ? ["strong", 2] : null;
        parent.append(kind ? make(kind[0], part.slice(kind[1], -kind[1])) : part);
      }
    }
  }
}

/** Show a message with its tools; `change`: takes what it was edited to. */
function drawMessage(who, text, change, ...tools) {
  const place = find("turns").appendChild(make("article", "", { className: `said ${who}` }));
  const words = place.appendChild(make("div", form.markdown.checked ? "" : text, { className: form.markdown.checked ? "" : "plain" }));
  if (form.markdown.checked) drawMarkdown(words, text);
  const bar = place.appendChild(make("div", "", { className: "tools" })), copy = button("Copy", "");
  copy.dataset.copy = text;
  bar.append(copy, ...current ? [] : [button("Edit", who === "user" ? "It is answered again" : "What follows stays", () => {
    const area = make("textarea", "", { value: text, rows: Math.min(12, text.split("\n").length + 1), ariaLabel: "Edit" });
    place.replaceChildren(area, button("Save", "", () => change(area.value)), button("Cancel", "", draw));
    area.focus();
  }), ...tools]);
  return words;
}

function draw() {
  find("turns").replaceChildren();
  talk.turns.forEach(([question, text], i) => {
    drawMessage("user", question || "…", (changed) => answer(i, changed));
    const isLast = i === talk.turns.length - 1;
    drawMessage("model", text, (changed) => { talk.turns[i] = [question, changed, [], true]; show(); }, ...isLast ? [
      button("Again", "Another answer, of another seed", () => answer(i, question, talk.tries + 1)),
      button("Take back", "The newest message, into the line below", () => { talk.turns.pop(); box.value = question; show(); }),
    ] : []);
  });
  find("send").disabled = current || !loaded;
  find("stop").disabled = !current;
  for (const id of ["load", "free", "new"]) find(id).disabled = current;
  find("free").hidden = !loaded;
  form.system.disabled = talk.hasTurns === false;
  form.strength.disabled = !form.lora.value;
  for (const name of ["top_k", "top_p", "min_p"]) form[name].disabled = number("temperature") === 0;
  box.placeholder = !loaded ? "Load a model first" : talk.hasTurns === false ? "Text to go on from; nothing: go on" : "Message";
}

const heard = { // what each event of an answer does
  begun: ({ id }) => { current.id = id; },
  waiting: () => tell("waiting for another conversation …"),
  error: ({ error, is_over }) => { tell(error, "bad"); loaded &&= !is_over; },
  ready: ({ has_turns: hasTurns, introduction }) => {
    const anew = talk.turns.length && talk.hasTurns !== hasTurns;
    [loaded, talk] = [true, { ...talk, hasTurns, turns: anew ? [] : talk.turns }];
    find("introduction").textContent = introduction;
    tell(anew ? "The conversation begins anew: a text and a talk in turns do not go together." : "");
  },
};

/** Send a request, show what becomes of it and hand each event on; "done", "error" or "stopped". */
async function follow(request, hear) {
  const asked = { model: form.model.value, lora: form.lora.value, strength: form.lora.value ? number("strength") : 1, ...request };
  let ending = "stopped", rest = "";
  try {
    const reply = await ask("/chat/ask", { method: "POST", body: new URLSearchParams({ request: JSON.stringify(asked) }) });
    const reader = reply?.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part; reader && !(part = await reader.read()).done;) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const event of lines.map(JSON.parse)) {
        heard[event.event]?.(event);
        if (["done", "error"].includes(event.event)) ending = event.event;
        hear(event);
      }
    }
  } catch {
    sayGone();
  }
  if (ending === "stopped") tell("stopped");
  current = null;
  return ending;
}

/** Answer a message as turn number `at`; those from there on are given up for it, unless nothing comes. */
async function answer(at, text, tries = 0) {
  if (current || !loaded || (!text.trim() && talk.hasTurns !== false) || !form.reportValidity()) return draw();
  const settings = Object.fromEntries([...form.querySelectorAll("[data-sampling] input")].map(({ name, valueAsNumber }) => [name, valueAsNumber]));
  const given = talk.turns.splice(at), request = { do: "answer", turns: [...talk.turns], message: text, tries, settings, system: form.system.value.trim() };
  if (talk.hasTurns !== null) request.has_turns = talk.hasTurns;
  if (!given.length) box.value = "";
  [talk.tries, current] = [tries, {}];
  save(given.length ? box.value : text);
  draw();
  tell("");
  drawMessage("user", text || "…");
  const words = drawMessage("model", ""), written = words.appendChild(new Text());
  words.parentNode.classList.add("writing", "plain");
  let turn = null;
  const ending = await follow(request, ({ event, text: piece, ...done }) => {
    const atEnd = innerHeight + scrollY > document.documentElement.scrollHeight - 150;
    if (event === "piece") written.appendData(piece);
    if (event === "piece" ? atEnd : event === "begun") scrollTo(0, document.documentElement.scrollHeight);
    if (event !== "done") return;
    turn = done.turn;
    tell([status.textContent, turn ? done.report : "stopped before the first word", ...done.remarks].filter(Boolean).join(" · "));
  });
  turn ??= written.data && [text, written.data, [], false]; // the process died: what was written stays
  talk.turns.push(...turn ? [turn] : given);
  if (!turn && !given.length) box.value = text;
  if (ending === "error" && !loaded) find("choices").open = true;
  show();
}

function record() {
  const { turns, hasTurns } = talk, system = form.system.value.trim();
  const line = (question, i) => (question && i && !turns[i - 1][3] ? "\n" : "");
  if (hasTurns === false) return { text: turns.map(([question, text], i) => line(question, i) + question + text).join("") };
  const said = turns.flatMap(([question, text]) => [{ role: "user", content: question }, { role: "assistant", content: text }]);
  return { messages: [...system ? [{ role: "system", content: system }] : [], ...said] };
}

const fold = () => { find("choices").open = innerWidth >= 800 || !loaded; };
const actions = {
  load: async () => {
    current = {};
    draw();
    tell("loading the model …");
    await follow({ do: "load" }, () => {});
    fold();
    show();
    box.focus();
  },
  stop: () => current?.id && ask("/chat/stop", { method: "POST", body: new URLSearchParams({ id: current.id }) }),
  send: () => answer(talk.turns.length, box.value),
  new: () => { talk = { ...talk, turns: [], tries: 0 }; tell(""); show(); box.focus(); },
  export: () => make("a", "", { download: "chat.jsonl", href: `data:application/jsonl;charset=utf-8,${encodeURIComponent(JSON.stringify(record()) + "\n")}` }).click(),
  free: async () => {
    if (await ask("/chat/free", { method: "POST" })) { loaded = false; tell("The model's memory is free again."); show(); }
  },
};

restore();
fold();
draw();
for (const [id, action] of Object.entries(actions)) find(id).addEventListener("click", action);
box.addEventListener("keydown", (event) => {
  if (event.key === "Escape") actions.stop();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  actions.send();
});
box.addEventListener("input", () => save());
form.addEventListener("input", () => { save(); if (!current) draw(); });
