// Data: cards of the images come and go as they are scrolled to; captions are saved when they are left; pictures are sent.
import { ask, say } from "/static/page.js";

const find = (selector, within = document) => within.querySelector(selector);
const grid = find("#grid"), filters = find("#filters"), bulk = find("#bulk"), history = find("#history");
const look = grid?.dataset.look;
const selected = new Set();
const form = (values) => ({ method: "POST", body: new URLSearchParams(values) });

// Chunks: filled when they come near, emptied when they are far, so that 10,000 images are a few hundred elements.
const waiting = new Map(); // chunk -> what ends its loading
async function fill(chunk) {
  const stop = new AbortController();
  waiting.set(chunk, () => stop.abort());
  await new Promise((go) => setTimeout(go, 60)); // one that flies past is not asked for
  if (stop.signal.aborted) return;
  const answer = await fetch(`/data/cards?look=${look}&rows=${chunk.dataset.rows}`, { signal: stop.signal }).catch(() => null);
  const text = answer && await answer.text().catch(() => null);
  if (text === null || !answer.ok || waiting.get(chunk) === undefined) return;
  waiting.delete(chunk);
  chunk.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.children);
  for (const card of chunk.children) find("[data-select]", card).checked = selected.has(card.dataset.number);
}
function near(entries) {
  for (const { target: chunk, isIntersecting } of entries) {
    if (isIntersecting && !chunk.children.length) fill(chunk);
    else if (!isIntersecting && !chunk.contains(document.activeElement)) {
      waiting.get(chunk)?.();
      waiting.delete(chunk);
      chunk.replaceChildren();
    }
  }
}
const observer = new IntersectionObserver(near, { rootMargin: "1500px 0px" });
function watch() {
  observer.disconnect();
  for (const chunk of grid.querySelectorAll(".chunk")) observer.observe(chunk);
}
const refill = () => { for (const chunk of grid.querySelectorAll(".chunk")) if (chunk.children.length) fill(chunk); };
function columns() {
  grid.style.setProperty("--columns", Math.max(1, Math.floor((grid.clientWidth + 12) / (232 + 12))));
}

// Captions
async function save(area) {
  if (area.readOnly || area.value === area.defaultValue || area.dataset.busy) return;
  const text = area.value, said = find(".said", area.closest(".picture"));
  area.dataset.busy = "yes";
  const answer = await ask("/data/caption", form({ look, number: area.closest(".picture").dataset.number, hash: area.dataset.hash, text }));
  delete area.dataset.busy;
  if (!answer) return void (said.textContent = "not saved");
  const now = await answer.json();
  [area.dataset.hash, area.defaultValue] = [now.hash, now.text];
  if (now.conflict) said.textContent = `It was changed elsewhere meanwhile; this is the new text. Yours was not saved: ${text}`;
  else said.textContent = now.text ? "saved" : "saved: no caption, its file is gone";
  said.classList.toggle("bad", now.conflict);
  if (area.value === text || now.conflict) area.value = now.text;
  else save(area); // written on meanwhile
  show(now);
}
function show(now) {
  for (const [key, step] of [["undo", "1"], ["redo", "0"]]) find(`[data-step="${step}"]`, history).dataset.what = now[key];
  for (const button of history.querySelectorAll("[data-step]")) [button.disabled, button.title] = [!button.dataset.what, button.dataset.what];
}
async function step(back) {
  document.activeElement?.blur();
  const answer = await ask("/data/step", form({ dataset: history.dataset.dataset, back }));
  if (!answer) return;
  const now = await answer.json();
  say(now.said, now.left ? "warn" : "");
  show(now);
  refill();
}

// Pictures
async function send(files, dataset) {
  const bar = find("#sent"), refused = [];
  [bar.hidden, bar.max, bar.value] = [false, files.length, 0];
  for (let at = 0; at < files.length;) {
    const body = new FormData();
    body.append("dataset", dataset);
    for (let bytes = 0, end = at + 50; at < Math.min(end, files.length) && bytes < 2 ** 26; at++) {
      body.append("files", files[at]);
      bytes += files[at].size;
    }
    const answer = await ask("/data/upload", { method: "POST", body });
    if (!answer) return false;
    refused.push(...(await answer.json()).refused);
    bar.value = at;
  }
  if (refused.length) sessionStorage.setItem("refused", refused.slice(0, 20).join("\n") + (refused.length > 20 ? `\nand ${refused.length - 20} more` : ""));
  return true;
}

document.addEventListener("change", async (event) => {
  const { target } = event;
  if (target.matches(".picture textarea")) save(target);
  else if (target.matches("[data-select]")) {
    const { number } = target.closest(".picture").dataset;
    selected[target.checked ? "add" : "delete"](number);
    find("[name=selected]", bulk).value = [...selected].join(",");
    find("#selection").textContent = `${selected.size || "none"} selected`;
  } else if (target.matches("[data-upload]")) {
    if (await send(target.files, target.dataset.upload) && await ask("/data/look", form({ dataset: target.dataset.upload }))) location.reload();
  } else if (target.matches("#new [type=file]")) {
    find("#chosen").textContent = `${target.files.length} files chosen`;
  } else if (target.matches("#bulk [name=action]")) {
    for (const label of bulk.querySelectorAll("[data-for]")) {
      label.hidden = !label.dataset.for.split(" ").includes(target.value);
      find("input", label).disabled = label.hidden;
    }
  }
});
document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-step], [data-set]");
  if (!target) return;
  if ("step" in target.dataset) return void step(target.dataset.step);
  event.preventDefault();
  const field = find(`[name=${target.dataset.set}]`, filters);
  field.value = field.value === target.dataset.to ? "" : target.dataset.to;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  for (const one of document.querySelectorAll(`[data-set=${target.dataset.set}]`)) one.ariaPressed = one.dataset.to === field.value;
});
document.addEventListener("keydown", (event) => {
  const area = event.target.closest(".picture textarea");
  if (!area) {
    const typing = event.target.closest("input, textarea, select");
    if (history && !typing && (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") step(event.shiftKey ? "0" : "1");
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(area);
  else if (event.key === "Escape") area.value = area.defaultValue;
  else if (event.key === "Tab" && !event.shiftKey) {
    const all = [...grid.querySelectorAll(".picture textarea")], next = all[all.indexOf(area) + 1];
    if (next) { event.preventDefault(); next.focus(); }
  }
});
document.addEventListener("submit", async (event) => {
  if (event.target.id !== "new") return;
  event.preventDefault();
  const fields = new FormData(event.target), { files } = find("[type=file]", event.target);
  fields.delete("files");
  const button = find("button", event.target);
  button.disabled = true;
  const answer = await ask("/data/new", { method: "POST", body: fields });
  const made = answer && await answer.json();
  if (made && (!files.length || await send(files, made.dataset))) location.href = made.address;
  button.disabled = false;
});
document.addEventListener("error", ({ target }) => { // a picture of a mask that is not drawn yet
  if (!target.matches?.("[data-preview]") || (target.dataset.tries = +(target.dataset.tries ?? 0) + 1) > 20) return;
  setTimeout(() => { target.src = target.src.replace(/&try=.*|$/, `&try=${target.dataset.tries}`); }, 1500);
}, true);
document.addEventListener("toggle", ({ target }) => {
  if (target.open && target.dataset.tags) window.htmx.ajax("GET", target.dataset.tags, { target: "#tags", swap: "innerHTML" });
}, true);
document.addEventListener("htmx:after:swap", () => {
  const done = find("#bulk-said [data-done]");
  if (done) { show(done.dataset); done.removeAttribute("data-done"); refill(); }
});

if (sessionStorage.getItem("refused")) say(sessionStorage.getItem("refused"), "warn");
sessionStorage.removeItem("refused");
if (history) show({ undo: find('[data-step="1"]').dataset.what, redo: find('[data-step="0"]').dataset.what });
if (grid) {
  new MutationObserver(watch).observe(grid, { childList: true });
  new ResizeObserver(columns).observe(grid);
  columns();
  watch();
  filters.addEventListener("input", () => {
    const asked = new URLSearchParams([["dataset", history.dataset.dataset], ...[...new FormData(filters)].filter(([key, value]) => value && key !== "look")]);
    window.history.replaceState(null, "", `/data?${asked}`);
  });
}
