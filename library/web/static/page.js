// What all screens share: theme, keys, messages that can be closed, places to drop files on, pictures laid
// over each other.
const root = document.documentElement;
const saved = localStorage.getItem("theme");
if (saved) root.dataset.theme = saved;

function changeTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  document.dispatchEvent(new Event("theme"));
}

/** Return a colour of page.css, "--curve-1" as "curve-1", as the canvas takes it in the theme that is on. */
export function colour(name) {
  const probe = document.body.appendChild(Object.assign(document.createElement("i"), { hidden: true }));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Show a line above the screen's content; kind: "bad", "warn" or "" . */
export function say(text, kind = "bad") {
  const box = document.createElement("div");
  box.className = `message ${kind}`;
  for (const line of text.split("\n")) box.append(Object.assign(document.createElement("p"), { textContent: line }));
  box.append(Object.assign(document.createElement("button"), { className: "quiet", type: "button", textContent: "×", ariaLabel: "Close" }));
  box.lastChild.dataset.close = "";
  document.getElementById("message").replaceChildren(box);
}

export function sayGone() {
  say("The page's program does not answer: it may have been closed. Jobs that it began go on; start it again with make ui.");
}

/** Fetch from this server; an error becomes a message and null. */
export async function ask(address, options = {}) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    return sayGone() ?? null;
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  const read = new DOMParser().parseFromString(text, "text/html");
  say([...read.querySelectorAll("#message p, .message p")].map((p) => p.textContent).join("\n") || text.slice(0, 400));
  return null;
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-close], #theme, [data-opens], [data-copy]");
  if (!target) return;
  if (target.id === "theme") changeTheme();
  else if ("opens" in target.dataset) document.getElementById(target.dataset.opens).showModal();
  else if ("copy" in target.dataset) navigator.clipboard.writeText(target.dataset.copy).then(() => say("copied", ""));
  else target.closest(".message, dialog").remove();
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, [contenteditable], dialog[open]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const links = document.querySelectorAll("nav a:not(.brand)");
  if (event.key >= "1" && event.key <= String(links.length)) links[event.key - 1].click();
  else if (event.key === "t") changeTheme();
  else if (event.key === "?") document.getElementById("keys").showModal();
  else if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  }
});

// A place to drop files on: a label with class drop around a file input.
for (const type of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(type, (event) => {
    const place = event.target.closest?.(".drop");
    if (!place) return;
    event.preventDefault();
    place.classList.toggle("over", type === "dragover");
    if (type !== "drop") return;
    const input = place.querySelector("input[type=file]");
    input.files = event.dataTransfer.files;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  });
}

// Two pictures over each other, divided by a slider; and the dialog in which any two of a row's are laid so.
const large = document.getElementById("large"), [left, right] = large.querySelectorAll("select");
function layOver() {
  const [under, over] = large.querySelectorAll("img"), isOne = left.value === right.value;
  [under.src, over.src, large.querySelector("a").href] = [left.value, right.value, `${right.value}&download=1`];
  large.querySelector(".divided").classList.toggle("single", isOne);
}
large.addEventListener("change", ({ target }) => { if (target.matches("select")) layOver(); });
document.addEventListener("input", ({ target }) => {
  target.closest(".divided")?.style.setProperty("--at", `${target.value}%`);
});
document.addEventListener("click", ({ target }) => {
  const shot = target.closest("button.shot");
  if (!shot) return;
  const row = [...shot.parentNode.querySelectorAll("button.shot")];
  for (const select of [left, right]) {
    select.replaceChildren(...row.map((each) => new Option(each.textContent, each.firstChild.getAttribute("src"))));
  }
  [left.selectedIndex, right.selectedIndex] = [0, row.indexOf(shot)];
  large.querySelector("h2").textContent = shot.parentNode.dataset.title;
  layOver();
  large.showModal();
});

document.addEventListener("htmx:error", sayGone);

// hx-confirm in a dialog of the page's own.
document.addEventListener("htmx:confirm", (event) => {
  event.preventDefault();
  const box = document.createElement("dialog"), form = Object.assign(document.createElement("form"), { method: "dialog", className: "bar" });
  box.append(Object.assign(document.createElement("p"), { textContent: event.detail.ctx.confirm }), form);
  for (const [value, text] of [["", "Cancel"], ["yes", "Yes"]]) form.append(Object.assign(document.createElement("button"), { value, textContent: text }));
  box.addEventListener("close", () => { box.remove(); box.returnValue ? event.detail.issueRequest() : event.detail.dropRequest(); });
  document.body.append(box);
  box.showModal();
});
