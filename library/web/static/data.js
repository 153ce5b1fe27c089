// Data: cards of the images come and go as they are scrolled to; captions are saved when they are left; pictures are sent.
import { ask, say } from "/static/page.js";

const find = (selector, within = document) => within.querySelector(selector);
const grid = find("#grid"), history = find("#history");
const look = grid?.dataset.look, dataset = history?.dataset.dataset;
const form = (values) => ({ method: "POST", body: new URLSearchParams(values) });

// Chunks: filled when they come near, emptied when they are far, so that 10,000 images are a few hundred elements.
const near = new WeakSet();
const observer = new IntersectionObserver((entries) => {
  for (const { target: chunk, isIntersecting } of entries) {
    if (isIntersecting && !near.has(chunk)) {
      near.add(chunk);
      setTimeout(fill, 60, chunk); // one that flies past is not asked for
    } else if (!isIntersecting && !chunk.contains(document.activeElement)) {
      near.delete(chunk);
      chunk.replaceChildren();
    }
  }
}, { rootMargin: "1500px 0px" });
async function fill(chunk) {
  const answer = near.has(chunk) && await ask(`/data/cards?look=${look}&rows=${chunk.dataset.rows}`);
  const text = answer && await answer.text();
  if (text && near.has(chunk)) chunk.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.children);
}
const refill = () => { for (const chunk of grid.querySelectorAll(".chunk")) fill(chunk); };

// Captions
async function save(area) {
  if (area.readOnly || area.value === area.defaultValue || area.dataset.busy) return;
  const text = area.value, card = area.closest(".picture"), said = find(".said", card);
  area.dataset.busy = "yes";
  const answer = await ask("/data/caption", form({ look, number: card.dataset.number, hash: area.dataset.hash, text }));
  delete area.dataset.busy;
  if (!answer) return void (said.textContent = "not saved");
  const now = await answer.json();
  [area.dataset.hash, area.defaultValue] = [now.hash, now.text];
  if (now.conflict) said.textContent = `It was changed elsewhere meanwhile; this is the new text. Yours was not saved: ${text}`;
  else said.textContent = now.text ? "saved" : "saved: no caption, its file is gone";
  said.classList.toggle("bad", now.conflict);
  find(".uncaptioned", card).hidden = now.text.trim() !== "";
  if (area.value === text || now.conflict) area.value = now.text;
  else save(area); // written on meanwhile
  show(now);
}
function show(now) {
  for (const button of history.querySelectorAll("button[name]")) [button.title, button.disabled] = [now[button.name], !now[button.name]];
}
async function step(name) {
  document.activeElement?.blur();
  const answer = await ask("/data/step", form({ dataset, step: name }));
  if (!answer) return;
  const now = await answer.json();
  say(now.said, now.left ? "warn" : "");
  show(now);
  refill();
}

// Pictures
async function send(files, to) {
  const bar = find("#sent"), refused = [];
  [bar.hidden, bar.max] = [false, files.length];
  for (let at = 0; at < files.length; bar.value = at) {
    const body = new FormData();
    body.append("dataset", to);
    for (let bytes = 0, end = at + 50; at < Math.min(end, files.length) && bytes < 2 ** 26; at++) {
      body.append("files", files[at]);
      bytes += files[at].size;
    }
    const answer = await ask("/data/upload", { method: "POST", body });
    if (!answer) return false;
    refused.push(...(await answer.json()).refused);
  }
  if (refused.length > 20) refused.splice(20, Infinity, `and ${refused.length - 20} more`);
  sessionStorage.setItem("refused", refused.join("\n")); // said by the page that comes next
  return true;
}

document.addEventListener("change", async ({ target }) => {
  if (target.matches(".picture textarea")) save(target);
  else if (target.matches("#new [type=file]")) find("#chosen").textContent = `${target.files.length} files chosen`;
  else if (target.matches("#history [type=file]")) {
    if (await send(target.files, dataset) && await ask("/data/look", form({ dataset }))) location.reload();
  }
});
document.addEventListener("click", ({ target }) => { if (target.matches("#history button[name]")) step(target.name); });
document.addEventListener("keydown", (event) => {
  const area = event.target.closest(".picture textarea"), held = event.ctrlKey || event.metaKey;
  if (!area) {
    if (history && held && event.key.toLowerCase() === "z" && !event.target.closest("input, textarea, select")) step(event.shiftKey ? "redo" : "undo");
  } else if (event.key === "Enter" && held) save(area);
  else if (event.key === "Escape") area.value = area.defaultValue;
  else if (event.key === "Tab" && !event.shiftKey) {
    const all = [...grid.querySelectorAll(".picture textarea")], next = all[all.indexOf(area) + 1];
    if (next) { event.preventDefault(); next.focus(); }
  }
});
find("#new")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = new FormData(event.target), { files } = find("[type=file]", event.target), button = find("button", event.target);
  body.delete("files");
  button.disabled = true;
  const answer = await ask("/data/new", { method: "POST", body });
  const made = answer && await answer.json();
  if (made && await send(files, made.dataset)) location.href = made.address;
  button.disabled = false;
});
document.addEventListener("error", ({ target }) => { // a picture of a mask that is not drawn yet
  if (!target.matches?.("[data-preview]") || (target.dataset.tries = +(target.dataset.tries ?? 0) + 1) > 20) return;
  setTimeout(() => { target.src = target.src.replace(/&try=.*|$/, `&try=${target.dataset.tries}`); }, 1500);
}, true);
document.addEventListener("htmx:after:swap", () => {
  for (const chunk of grid?.querySelectorAll(".chunk") ?? []) observer.observe(chunk);
  const done = find("[data-undo]");
  if (done) { show({ ...done.dataset }); done.removeAttribute("data-undo"); refill(); }
});

if (sessionStorage.getItem("refused")) say(sessionStorage.getItem("refused"), "warn");
sessionStorage.removeItem("refused");
if (grid) new ResizeObserver(() => grid.style.setProperty("--columns", Math.max(1, Math.floor((grid.clientWidth + 12) / (232 + 12))))).observe(grid);
