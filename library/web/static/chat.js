// The conversation of this tab: kept in sessionStorage, so that it survives a reload; drawn as text, never as HTML.
import { ask, say } from "./page.js";

const KEY = "tandem-chat";
const find = (id) => document.getElementById(id);
const settings = find("settings"), message = find("text");
let talk = { turns: [], hasTurns: null, introduction: "", tries: 0 }; // a turn: [question, answer, its tokens, ended by itself]
let loaded = find("chat") && "running" in find("chat").dataset, current = null; // the answer that is under way

function make(name, text = "", values = {}) {
  return Object.assign(document.createElement(name), { textContent: text }, values);
}

function button(text, title, action) {
  return make("button", text, { type: "button", className: "quiet small", title, onclick: action });
}

function save(unanswered = message.value) {
  try {
    const form = { ...Object.fromEntries(new FormData(settings)), markdown: settings.markdown.checked };
    sessionStorage.setItem(KEY, JSON.stringify({ ...talk, form, message: unanswered }));
  } catch { /* no room: the tab goes on, a reload begins anew */ }
}

function restore() {
  try {
    const { form = {}, message: typed = "", ...kept } = JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
    const sound = ([question, answer, said]) => [question, answer].every((text) => typeof text === "string") && Array.isArray(said);
    if (kept.turns?.every(sound)) talk = { ...talk, ...kept };
    for (const field of settings.elements) {
      if (field.type === "checkbox") field.checked = form[field.name] === true;
      else if (typeof form[field.name] === "string" && field.name) field.value = form[field.name];
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field.selectedIndex = 0; // it is not there any more
    }
    message.value = typed;
  } catch { /* of another version */ }
}

// ---- what is seen

/** Append Markdown's headings, lists, code and bold to a box, as elements with text in them. */
function drawMarkdown(box, text) {
  const spans = (parent, line) => {
    for (const part of line.split(/(`[^`]+`|\*\*[^*]+\*\*)/)) {
      if (part.length > 2 && part.startsWith("`")) parent.append(make("code", part.slice(1, -1)));
      else if (part.length > 4 && part.startsWith("**")) parent.append(make("strong", part.slice(2, -2)));
      else parent.append(part);
    }
    return parent;
  };
  for (const [i, block] of text.split(/^```.*$/m).entries()) {
    if (i % 2) { box.append(make("pre", block.replace(/^\n|\n$/g, ""))); continue; }
    let list = null;
    for (const line of block.split("\n")) {
      const [, mark, rest] = line.match(/^\s*(#{1,6}|[-*]|\d+\.)\s+(.*)$/) ?? [];
      if (!mark || mark[0] === "#") list = null;
      else if (!list) box.append(list = make(/\d/.test(mark) ? "ol" : "ul", "", /\d/.test(mark) ? { start: parseInt(mark) } : {}));
      if (list) list.append(spans(make("li"), rest));
      else if (line.trim()) box.append(spans(make(mark ? "h3" : "p"), mark ? rest : line));
    }
  }
}

function drawText(box, text) {
  const formatted = settings.markdown.checked;
  box.classList.toggle("plain", !formatted);
  if (formatted) drawMarkdown(box, text);
  else box.textContent = text;
}

/** Let a message be changed in its place; done(text) if it was. */
function edit(box, text, done) {
  const area = make("textarea", "", { value: text, rows: Math.min(12, text.split("\n").length + 1), ariaLabel: "Edit" });
  const bar = make("div", "", { className: "bar" });
  bar.append(button("Save", "", () => done(area.value)), button("Cancel", "Esc", draw));
  area.onkeydown = (event) => event.key === "Escape" && draw();
  box.replaceChildren(area, bar);
  area.focus();
}

function draw() {
  const busy = current !== null, turns = find("turns"), last = talk.turns.length - 1;
  turns.replaceChildren();
  for (const [i, turn] of talk.turns.entries()) {
    for (const [side, who, text] of [[0, "user", turn[0]], [1, "model", turn[1]]]) {
      const box = make("article", "", { className: `said ${who}` }), words = make("div"), tools = make("div", "", { className: "tools" });
      drawText(words, text || (side ? "(nothing)" : "…"));
      box.append(make("h2", side ? "Model" : "You", { className: "skip" }), words, tools);
      const change = side
        ? (changed) => { talk.turns[i] = [turn[0], changed, [], turn[3]]; save(); draw(); }
        : (changed) => { if (changed.trim() || talk.hasTurns === false) answer(i, changed); else draw(); };
      tools.append(Object.assign(button("Copy", "", null), { onclick: null }));
      tools.lastChild.dataset.copy = text;
      if (!busy) tools.append(button("Edit", side ? "Change the answer; what follows stays" : "Change the message; it is answered again", () => edit(box, text, change)));
      if (!busy && side && i === last) {
        tools.append(button("Again", "Another answer, of another seed", () => answer(i, turn[0], talk.tries + 1)),
          button("Take back", "The newest message, into the line below", () => { talk.turns.pop(); message.value = turn[0]; save(); draw(); message.focus(); }));
      }
      turns.append(box);
    }
  }
  find("send").disabled = busy || !loaded;
  find("stop").disabled = !busy;
  find("load").disabled = find("free").disabled = find("new").disabled = busy;
  find("load").textContent = loaded ? "Load another" : "Load";
  find("free").hidden = !loaded;
  settings.system.disabled = talk.hasTurns === false;
  settings.strength.disabled = !settings.lora.value;
  for (const name of ["top_k", "top_p", "min_p"]) settings[name].disabled = settings.temperature.valueAsNumber === 0;
  message.placeholder = !loaded ? "Load a model first" : talk.hasTurns === false ? "Text to go on from; nothing: go on" : "Message";
  if (loaded && talk.introduction) find("introduction").textContent = talk.introduction;
}

function tell(text, kind = "") {
  find("status").className = `note ${kind}`;
  find("status").textContent = text;
}

// ---- what is asked

/** Send a request and hand each event to `hear`; false if it ended without its last one. */
async function events(request, hear) {
  const number = (name) => settings[name].valueAsNumber;
  const choices = { model: settings.model.value, lora: settings.lora.value, strength: settings.lora.value ? number("strength") : 1 };
  const reply = await ask("/chat/ask", { method: "POST", body: new URLSearchParams({ request: JSON.stringify({ ...choices, ...request }) }) });
  let ended = false;
  try {
    let rest = "";
    const reader = reply?.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part; reader && !(part = await reader.read()).done;) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const event = JSON.parse(line);
        if (event.event === "begun") current.id = event.id;
        else if (event.event === "waiting") tell("waiting for another conversation …");
        else if (event.event === "ready") ready(event);
        else if (event.event === "error") { tell(event.error, "bad"); if (event.is_over) loaded = false; }
        ended ||= ["done", "error"].includes(event.event);
        hear(event);
      }
    }
  } catch {
    say("The page's program does not answer any more; start it again with make ui.");
  }
  return ended;
}

function ready({ introduction, has_turns: hasTurns }) {
  const anew = talk.turns.length > 0 && talk.hasTurns !== hasTurns;
  loaded = true;
  talk = { ...talk, introduction, hasTurns, turns: anew ? [] : talk.turns };
  tell(anew ? "The conversation begins anew: a text and a talk in turns do not go together." : "");
  if (anew) current.turn?.parentNode.replaceChildren(current.question, current.turn);
}

async function load() {
  current = {};
  draw();
  tell("loading the model …");
  const ended = await events({ do: "load" }, (event) => event.event === "done" && message.focus());
  current = null;
  if (!ended) tell("stopped");
  if (loaded && innerWidth < 800) find("choices").open = false;
  save();
  draw();
}

function sampling() {
  const value = (name) => settings[name].valueAsNumber, drawn = value("temperature") > 0;
  const filter = (name, off) => (drawn && value(name) !== off ? value(name) : null);
  return { temperature: value("temperature"), top_k: filter("top_k", 0), top_p: filter("top_p", 1), min_p: filter("min_p", 0),
    repetition_penalty: value("repetition_penalty"), max_new_tokens: value("max_new_tokens"), seed: value("seed") };
}

/** Answer a message as turn number `at`; those from there on are given up for it, unless nothing comes. */
async function answer(at, text, tries = 0) {
  const before = talk.turns, given = before.slice(at);
  talk.turns = before.slice(0, at);
  talk.tries = tries;
  const request = { do: "answer", turns: talk.turns, has_turns: talk.hasTurns ?? undefined, message: text, tries, system: settings.system.value.trim(), settings: sampling() };
  current = {};
  save(given.length ? "" : text);
  draw();
  current.question = find("turns").appendChild(make("article", text || "…", { className: "said user plain" }));
  current.turn = find("turns").appendChild(make("article", "", { className: "said model plain writing" }));
  find("say").scrollIntoView({ block: "end" });
  const written = current.turn.appendChild(document.createTextNode(""));
  let turn = null, failed = false;
  const ended = await events(request, (event) => {
    if (event.event === "piece") {
      const follow = innerHeight + scrollY > document.documentElement.scrollHeight - 120;
      written.appendData(event.text);
      if (follow) scrollTo(0, document.documentElement.scrollHeight);
    } else if (event.event === "done") {
      turn = event.turn;
      const same = tries && !settings.temperature.valueAsNumber ? ["At temperature 0 every try gives the same answer; raise it for another."] : [];
      tell([turn ? event.report : "stopped before the first word", ...event.remarks, ...same].join(" · "));
    } else if (event.event === "error") failed = true;
  });
  current = null;
  turn ??= written.data ? [text, written.data, [], false] : null; // the process died: what was written stays
  if (!ended) tell("stopped", "");
  if (turn) talk.turns.push(turn);
  else { talk.turns = [...talk.turns, ...given]; if (!given.length) message.value = text; }
  if (failed && !loaded) find("choices").open = true;
  save();
  draw();
}

function record() {
  if (talk.hasTurns !== false) {
    const system = settings.system.value.trim() ? [{ role: "system", content: settings.system.value.trim() }] : [];
    return { messages: [...system, ...talk.turns.flatMap(([user, model]) => [{ role: "user", content: user }, { role: "assistant", content: model }])] };
  }
  const line = (question, i) => (question && i && !talk.turns[i - 1][3] ? "\n" : "");
  return { text: talk.turns.map(([question, text], i) => line(question, i) + question + text).join("") };
}

function download() {
  const link = make("a", "", { href: URL.createObjectURL(new Blob([JSON.stringify(record()) + "\n"], { type: "application/jsonl" })), download: "chat.jsonl" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function stop() {
  if (current?.id) ask("/chat/stop", { method: "POST", body: new URLSearchParams({ id: current.id }) });
}

function send() {
  const text = message.value;
  if (current || !loaded || (!text.trim() && talk.hasTurns !== false) || !settings.reportValidity()) return;
  message.value = "";
  answer(talk.turns.length, text);
}

if (settings) {
  restore();
  if (innerWidth < 800 && loaded) find("choices").open = false;
  draw();
  find("say").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    else if (event.key === "Escape") stop();
  });
  message.addEventListener("input", () => save());
  settings.addEventListener("input", () => { save(); if (!current) draw(); });
  settings.addEventListener("submit", (event) => event.preventDefault());
  find("load").addEventListener("click", load);
  find("stop").addEventListener("click", stop);
  find("export").addEventListener("click", download);
  find("new").addEventListener("click", () => { talk.turns = []; talk.tries = 0; tell(""); save(); draw(); message.focus(); });
  find("free").addEventListener("click", async () => {
    if (!await ask("/chat/free", { method: "POST" })) return;
    loaded = false;
    tell("The model's memory is free again.");
    draw();
  });
}
