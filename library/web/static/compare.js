// Two pictures over each other with a slider between them; and, of painted pictures, one of them large beside another.
document.addEventListener("input", (event) => {
  const figure = event.target.closest(".compare");
  if (figure && event.target.type === "range") figure.style.setProperty("--at", `${event.target.value}%`);
});

const large = document.getElementById("large");

function show() {
  const [one, other] = large.querySelectorAll("img");
  const [left, right] = large.querySelectorAll("select");
  one.src = left.value;
  other.src = right.value;
  large.querySelector("input[type=range]").hidden = left.value === right.value;
  large.querySelector(".compare").classList.toggle("single", left.value === right.value);
  const save = large.querySelector("a");
  save.href = `${right.value}&download=1`;
}

document.addEventListener("click", (event) => {
  const cell = event.target.closest("[data-large]");
  if (!cell) return;
  const row = [...cell.closest("tr").querySelectorAll("[data-large]")];
  for (const select of large.querySelectorAll("select")) {
    select.replaceChildren(...row.map((each) => new Option(each.dataset.strength, each.dataset.large)));
    select.value = cell.dataset.large;
  }
  large.querySelector("h2").textContent = cell.dataset.prompt;
  show();
  large.showModal();
});

large?.addEventListener("change", show);

// What the prompts say themselves stands at the fields that it wins over
const prompts = document.querySelector("[name=prompts]");
function sayFlags() {
  for (const note of document.querySelectorAll("[data-flag]")) {
    const said = prompts.value.matchAll(new RegExp(`\\s--${note.dataset.flag}[\\s=]+(\\S+)`, "g"));
    const values = [...new Set(Array.from(said, (match) => match[1]))].slice(0, 4).join(", ");
    note.textContent = values && `the prompts say ${values}`;
  }
}
prompts?.addEventListener("input", sayFlags);
if (prompts) sayFlags();
