// Data: cards of the images come and go as they are scrolled to; pictures are sent; keys. htmx saves captions.
import { ask, say } from "/static/page.js";

const find = (selector, within = document) => within.querySelector(selector);
const grid = find("#grid"), dataset = find("#does")?.dataset.dataset;

// Chunks: filled when they come near, emptied when they are far, so that 10,000 images are a few hundred elements.
const near = new WeakSet();
const observer = new IntersectionObserver((entries) => {
  for (const { target: chunk, isIntersecting } of entries) {
    if (isIntersecting && !near.has(chunk)) {
      near.add(chunk);
      setTimeout(() => near.has(chunk) && htmx.trigger(chunk, "near"), 60); // one that flies past is not asked for
    } else if (!isIntersecting && !chunk.contains(document.activeElement)) {
      near.delete(chunk);
      chunk.replaceChildren();
    }
  }
}, { rootMargin: "1500px 0px" });
const observe = () => grid?.querySelectorAll(".chunk").forEach((chunk) => observer.observe(chunk));
document.addEventListener("htmx:after:swap", ({ target }) => {
  if (target.matches(".chunk")) observer.unobserve(target); // and look anew whether it is far by now
  observe();
  if (picked.size) showPicked();
});
observe(); // the grid may have come before this module
document.addEventListener("changed", () => {
  for (const chunk of grid?.querySelectorAll(".chunk:not(:empty)") ?? []) htmx.trigger(chunk, "near");
});
if (grid) {
  new ResizeObserver(() => {
    grid.style.setProperty("--columns", Math.max(1, Math.floor((grid.clientWidth + 12) / (232 + 12))));
  }).observe(grid);
}

// Images that are selected, by their numbers: their cards come and go.
const picked = new Set(), bar = find("#picked");
function showPicked() {
  for (const box of document.querySelectorAll(".pick")) box.checked = picked.has(box.value);
  bar.hidden = !picked.size;
  find("b", bar).textContent = picked.size === 1 ? "1 image selected" : `${picked.size} images selected`;
}
document.addEventListener("change", (event) => {
  if (!event.target.matches(".pick")) return;
  event.stopPropagation(); // the card's form saves its caption at a change
  picked[event.target.checked ? "add" : "delete"](event.target.value);
  showPicked();
}, true);
bar?.addEventListener("click", async ({ target }) => {
  const body = new URLSearchParams({ dataset, look: grid.dataset.look, rows: [...picked].join(",") });
  if ("delete" in target.dataset && await ask("/data/delete", { method: "POST", body })) location.reload();
  else if ("clear" in target.dataset) showPicked(picked.clear());
});

// Pictures, one after the other; what was refused is said on the dataset's screen until the message is closed.
async function send(files, to) {
  const bar = find("#sent"), refused = [];
  [bar.hidden, bar.max, bar.value] = [false, files.length, 0];
  for (const file of files) {
    const body = new FormData();
    body.append("dataset", to);
    body.append("file", file);
    const answer = await ask("/data/upload", { method: "POST", body });
    if (!answer) return false;
    refused.push((await answer.json()).refused);
    bar.value += 1;
  }
  const lines = refused.filter(Boolean);
  if (lines.length > 20) lines.splice(20, Infinity, `and ${lines.length - 20} more`);
  sessionStorage.setItem(`refused ${to}`, lines.join("\n"));
  return true;
}
if (sessionStorage.getItem(`refused ${dataset}`)) say(sessionStorage.getItem(`refused ${dataset}`), "warn");
document.addEventListener("click", ({ target }) =>
  target.closest("#message [data-close]") && sessionStorage.removeItem(`refused ${dataset}`));
document.addEventListener("htmx:before:request", (event) => { // the screen comes anew once nobody writes on it
  const { value, defaultValue } = document.activeElement;
  if (event.target.id === "state" && defaultValue !== undefined && value !== defaultValue) event.preventDefault();
});
find("#does [type=file]")?.addEventListener("change", async ({ target }) => {
  const body = new URLSearchParams({ dataset });
  if (await send(target.files, dataset) && await ask("/data/look", { method: "POST", body })) location.reload();
});
find("#new")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target, button = find("button", form);
  button.disabled = true;
  const made = await (await ask("/data/new", { method: "POST", body: new FormData(form) }))?.json();
  if (made && await send(find("[type=file]", form).files, made.dataset)) location.href = made.address;
  button.disabled = false;
});

const captions = find("#captions"), isOpen = `captions ${dataset}`; // the screen comes anew once they are written
if (captions) {
  captions.open = sessionStorage.getItem(isOpen) === "true";
  document.addEventListener("click", ({ target }) => { captions.open ||= !!target.closest("[href='#captions']"); });
  captions.addEventListener("toggle", () => sessionStorage.setItem(isOpen, captions.open));
}

document.addEventListener("keydown", (event) => {
  const area = event.target.closest(".picture textarea"), held = event.ctrlKey || event.metaKey;
  if (!area) {
    if (!held || event.key.toLowerCase() !== "z" || event.target.closest("input, textarea, select")) return;
    find(`#history [name=${event.shiftKey ? "redo" : "undo"}]`)?.click();
  } else if (event.key === "Enter" && held) area.form.requestSubmit();
  else if (event.key === "Escape") area.value = area.defaultValue;
});
document.addEventListener("error", ({ target }) => { // a picture that the look has not drawn yet
  if (!target.matches?.("[data-preview]") || (target.dataset.tries = +(target.dataset.tries ?? 0) + 1) > 200) return;
  setTimeout(() => { target.src = target.src.replace(/&try=.*|$/, `&try=${target.dataset.tries}`); }, 2000);
}, true);
