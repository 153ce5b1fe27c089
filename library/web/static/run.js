// Curves that grow, the picture before and after, samples at their full size, a log that is followed to its end.
import { ask, colour } from "/static/page.js";

const one = (selector, place = document) => place.querySelector(selector);
const curves = one("#curves"), smooth = one("#smooth"), names = JSON.parse(curves?.dataset.names ?? "[]");
const plots = new Map();
let charts = [], tag = "", busy = false;

// The slider's end is an average over hundreds of steps: decay 0 ... 0.998, in its middle the trainer's 0.95
const decay = () => smooth.value == 0 ? 0 : 1 - 0.05 ** (smooth.value * 2);

async function load() {
  if (busy || document.hidden) return;
  busy = true;
  try {
    const answer = await ask(`${curves.dataset.source}smooth=${decay().toFixed(4)}&have=${encodeURIComponent(tag)}`);
    if (answer?.status === 200) ({ charts, tag } = await answer.json(), chooseBand(), draw());
  } finally { busy = false; }
}

// Of several runs one band of noise levels is shown, since colour is the run
const banded = (chart) => names.length > 1 && chart.title.includes("noise level");
function chooseBand() {
  const found = new Set(charts.filter(banded).flatMap((chart) => chart.lines.map((line) => line.label)));
  one("#bands").hidden = !found.size;
  fill(one("#band"), [...found].sort(), found.size >> 1);
}

function lookOf(chart, line, number) {
  const several = names.length > 1;
  const hue = colour(`curve-${(several ? line.run : number) % 6 + 1}`);
  const dash = several && !banded(chart) ? [undefined, [8, 4], [2, 3]][number % 3] : undefined;
  return { label: several ? `${names[line.run]}: ${line.label}` : line.label, stroke: line.faint ? hue.replace(")", ", .35)") : hue, dash,
    width: line.faint ? 1.3 : 1.8, points: { show: chart.points || line.steps.length < 3, size: 6 },
    value: (_, v) => v == null ? "–" : +v.toPrecision(4) };
}

function draw(anew = false) {
  one("#no-curves").hidden = charts.length > 0;
  for (const [title, { plot }] of plots) if (anew || !charts.some((chart) => chart.title === title)) { plot.root.parentNode.remove(); plots.delete(title); }
  const band = one("#band").selectedOptions[0]?.text;
  for (const all of charts) {
    const chart = { ...all, lines: all.lines.filter((line) => !banded(all) || line.label === band) };
    const log = chart.log || (chart.loss && one("#logarithmic").checked);
    const tables = chart.lines.map((line) => [line.steps, log ? line.values.map((v) => v > 0 ? v : null) : line.values]);
    const data = uPlot.join(tables), shape = JSON.stringify([log, chart.lines.map((line) => [line.run, line.label])]);
    const known = plots.get(chart.title);
    if (known?.shape === shape) {
      const { min, max } = known.plot.scales.x, [xs] = known.plot.data, whole = min <= xs[0] && max >= xs[xs.length - 1];
      known.plot.setData(data, whole);
      if (!whole) known.plot.setScale("x", { min, max });
      continue;
    }
    const box = known?.plot.root.parentNode ?? document.createElement("div");
    box.className = "chart";
    known?.plot.destroy();
    if (!known) one("#charts").append(box);
    const kinds = {}; // of a run's lines: faint and smoothed ones of a key have one colour
    const number = (line) => kinds[`${line.run} ${line.label.replace(", each", "")}`] ??= Object.keys(kinds).filter((k) => k.startsWith(`${line.run} `)).length;
    const axis = () => ({ stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } });
    const format = (_, values) => values.map((v) => v == null ? "" : v && Math.abs(v) < 0.001 ? (+v.toPrecision(3)).toExponential() : +v.toPrecision(6) + "");
    const plot = new uPlot({ title: chart.title, width: box.clientWidth || 400, height: 230, cursor: { sync: { key: "runs" } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} }, legend: { live: true, markers: { dash: (plot, i) => ({ 8: "dashed", 2: "dotted" })[plot.series[i].dash?.[0]] ?? "solid" } },
      axes: [axis(), { ...axis(), size: 62, values: format }],
      series: [{ label: "step", value: (_, v) => v ?? "–" }, ...chart.lines.map((line) => lookOf(chart, line, number(line)))] }, data, box);
    plots.set(chart.title, { plot, shape });
    new ResizeObserver(() => plots.get(chart.title)?.plot === plot && plot.setSize({ width: box.clientWidth, height: 230 })).observe(box);
  }
}

if (curves) {
  addEventListener("load", load);
  setInterval(load, 2000);
  smooth.addEventListener("change", load);
  one("#band").addEventListener("change", () => draw(true));
  one("#logarithmic").addEventListener("change", () => draw(true));
  document.addEventListener("theme", () => draw(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
}

// Samples: any two steps of a prompt, divided by a slider
const pair = one("#pair");

function fill(select, values, standard) { // what was chosen stays; who looks at the newest step goes on to the next
  const known = [...select.options].map((option) => option.text), at = select.selectedIndex;
  if (values.join("\n") === known.join("\n")) return;
  select.replaceChildren(...values.map((value, i) => new Option(value, i)));
  const kept = standard < 0 && at === known.length - 1 ? -1 : values.indexOf(known[at]);
  select.selectedIndex = kept >= 0 ? kept : standard < 0 ? values.length - 1 : standard;
}

function compare() {
  const rows = [...document.querySelectorAll(".shots")].filter((row) => row.children.length > 1);
  pair.hidden = !rows.length;
  if (!rows.length) return;
  fill(one("#prompt"), rows.map((row) => row.dataset.prompt), 0);
  const shots = [...rows[one("#prompt").value || 0].children], steps = shots.map((shot) => shot.dataset.step);
  fill(one("#before"), steps, 0);
  fill(one("#after"), steps, -1);
  one(".above", pair).src = one("img", shots[one("#before").value]).src;
  one(".below", pair).src = one("img", shots[one("#after").value]).src;
}

if (pair) {
  for (const select of pair.querySelectorAll("select")) select.addEventListener("change", compare);
  one("#divider").addEventListener("input", (event) => one(".pair").style.setProperty("--at", `${event.target.value}%`));
  compare();
  for (const row of document.querySelectorAll(".shots")) row.scrollLeft = row.scrollWidth;
  document.addEventListener("click", (event) => {
    const shot = event.target.closest(".shot");
    if (!shot) return;
    const box = one("#large"), step = shot.dataset.step;
    one("img", box).src = one("img", shot).src;
    one("figcaption", box).textContent = `Step ${step}: ${shot.parentNode.dataset.prompt}`;
    box.showModal();
  });
}

// The log: followed while its end is in sight
let atEnd = true;
function follow() {
  const log = one("[data-follow]");
  if (log && atEnd) log.scrollTop = log.scrollHeight;
}
document.addEventListener("scroll", ({ target }) => {
  if (target.matches?.("[data-follow]")) atEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
}, true);
document.addEventListener("htmx:after:swap", () => { follow(); if (pair) compare(); });
follow();
