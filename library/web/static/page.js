// What all screens share: theme, keys, messages that can be closed, pictures laid over each other.
const root = document.documentElement;
if (localStorage.theme) root.dataset.theme = localStorage.theme;

function changeTheme() {
  const theme = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  localStorage.theme = root.dataset.theme = theme === "dark" ? "light" : "dark";
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

/** Show a line above the screen's content; kind: "bad", "warn" or "". */
export function say(text, kind = "bad") {
  const box = Object.assign(document.createElement("div"), { className: `message ${kind}` });
  for (const line of text.split("\n")) box.append(Object.assign(document.createElement("p"), { textContent: line }));
  const close = Object.assign(document.createElement("button"), { className: "quiet", textContent: "×", ariaLabel: "Close" });
  close.dataset.close = "";
  box.append(close);
  document.getElementById("message").replaceChildren(box);
}

export function sayGone() {
  say("The page's program does not answer. Jobs that it began go on; start it again with make ui.");
}

/** Fetch from this server; an error becomes a message and null. */
export async function ask(address, options = {}) {
  const answer = await fetch(address, options).catch(sayGone);
  if (!answer || answer.ok) return answer ?? null;
  const text = await answer.text();
  const lines = new DOMParser().parseFromString(text, "text/html").querySelectorAll("#message p, .message p");
  say([...lines].map((line) => line.textContent).join("\n") || text.slice(0, 400));
  return null;
}

document.addEventListener("click", ({ target }) => {
  const pressed = target.closest("[data-close], [data-opens], [data-copy], #theme");
  if (!pressed) return;
  const { opens, copy } = pressed.dataset;
  if (opens) document.getElementById(opens).showModal();
  else if (copy !== undefined) navigator.clipboard.writeText(copy).then(() => say("copied", ""));
  else if (pressed.id === "theme") changeTheme();
  else pressed.closest(".message").remove();
});

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, select, dialog[open]");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const search = document.querySelector("input[type=search]");
  if (event.key === "t") changeTheme();
  else if (event.key === "/" && search) {
    event.preventDefault();
    search.focus();
  }
});

// Two pictures over each other, divided by a slider; and the dialog in which any two of a row's are laid so.
const large = document.getElementById("large"), [left, right] = large.querySelectorAll("select");
function layOver() {
  const [under, over] = large.querySelectorAll("img");
  [under.src, over.src, large.querySelector("a").href] = [left.value, right.value, `${right.value}&download=1`];
  large.querySelector(".divided").classList.toggle("single", left.value === right.value);
}
large.addEventListener("change", layOver);
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
  [left.selectedIndex, right.selectedIndex] = [0, row.indexOf(shot) || row.length - 1]; // the first one beside the last, any other beside the first
  large.querySelector("h2").textContent = shot.parentNode.dataset.title;
  layOver();
  large.showModal();
});

document.addEventListener("htmx:error", sayGone);
