// Curves that grow, and what is followed to its end: a log, and samples as they are painted.
import { ask, colour } from "/static/page.js";

const one = (selector) => document.querySelector(selector);
const curves = one("#curves"), names = JSON.parse(curves?.dataset.names ?? "[]"), several = names.length > 1;
const plots = new Map(); // by a chart's title
let charts = [], tag = "", busy = false;

async function load() {
  if (busy || document.hidden) return;
  busy = true;
  const at = one("#smooth").value; // its end is an average over hundreds of steps, its middle the trainer's decay 0.95
  const decay = at > 0 ? 1 - 0.05 ** (at * 2) : 0;
  const answer = await ask(`${curves.dataset.source}smooth=${decay.toFixed(4)}&have=${encodeURIComponent(tag)}`);
  busy = false;
  if (answer?.status !== 200) return;
  ({ charts, tag } = await answer.json());
  draw();
}

function seriesOf(chart, line) {
  const hue = colour(`curve-${(several ? line.run : line.kind) % 8 + 1}`);
  return {
    label: several ? `${names[line.run]}: ${line.label}` : line.label,
    stroke: line.faint ? hue.replace(")", ", .35)") : hue,
    width: line.faint ? 1.3 : 1.8,
    dash: several ? [[], [8, 4], [2, 3]][line.kind % 3] : [],
    points: { show: chart.points || line.steps.length < 3, size: 6 },
    value: (_, value) => value == null ? "" : +value.toPrecision(4),
  };
}

function draw() {
  one("#no-curves").hidden = charts.length > 0;
  for (const [title, { box }] of plots) {
    if (!charts.some((chart) => chart.title === title)) box.remove(), plots.delete(title);
  }
  for (const chart of charts) {
    const { lines } = chart;
    const log = chart.log || (chart.loss && one("#logarithmic").checked);
    const columns = lines.map(({ steps, values }) => [steps, values.map((v) => log && !(v > 0) ? null : v)]);
    const data = uPlot.join(columns), series = [{ label: "step", value: (_, step) => step ?? "" }, ...lines.map((line) => seriesOf(chart, line))];
    const shape = JSON.stringify([log, series]), known = plots.get(chart.title);
    if (known?.shape === shape) { // new steps alone
      const { min, max } = known.plot.scales.x, [steps] = known.plot.data;
      known.plot.setData(data);
      if (min > steps[0] || max < steps.at(-1)) known.plot.setScale("x", { min, max }); // looked at closer
      continue;
    }
    const hidden = known?.plot.series.filter((each) => !each.show).map((each) => each.label);
    for (const each of series) each.show = !hidden?.includes(each.label);
    known?.plot.destroy();
    const box = known?.box ?? one("#charts").appendChild(document.createElement("div"));
    const faint = { stroke: colour("line"), width: 1 }, axis = { stroke: colour("quiet"), grid: faint, ticks: faint };
    const short = (v) => v && Math.abs(v) < 0.001 ? (+v.toPrecision(3)).toExponential() : +v.toPrecision(6);
    const numbers = (_, values) => values.map((v) => v == null ? "" : `${short(v)}`);
    const plot = new uPlot({
      title: chart.title, width: box.clientWidth || 400, height: 230, series, cursor: { sync: { key: "runs" } },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } }, axes: [axis, { ...axis, size: 62, values: numbers }],
    }, data, box);
    plots.set(chart.title, { plot, shape, box });
  }
}

if (curves) {
  addEventListener("load", load);
  setInterval(load, 2000);
  one("#smooth").addEventListener("change", load);
  one("#logarithmic").addEventListener("change", draw);
  document.addEventListener("theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(() => {
    for (const { plot, box } of plots.values()) plot.setSize({ width: box.clientWidth, height: 230 });
  }).observe(one("#charts"));
}

// Followed to its end, unless somebody has scrolled back from where it was
const ends = new WeakMap();
function follow() {
  for (const box of document.querySelectorAll("#log pre, #samples .shots")) {
    const end = box.scrollWidth - box.clientWidth + box.scrollHeight - box.clientHeight;
    if (box.scrollLeft + box.scrollTop < Math.min(ends.get(box) ?? 0, end) - 40) continue;
    box.scrollTo(box.scrollWidth, box.scrollHeight);
    ends.set(box, end);
  }
}
for (const event of ["load", "htmx:after:swap"]) document.addEventListener(event, follow, true); // load: a picture
follow();
