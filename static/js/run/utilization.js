/* Utilization tab: busy share of each device, causes of its idle time, and overlap of the stages; all from the run's spans. */
import { axisInAddress, axisOf, keepAxis } from "../charts/axes.js";
import { Plotly, loadPlotly } from "../charts/plotly.js";
import * as T from "../charts/plotly-theme.js";
import { runSeries } from "./series.js";
import * as api from "../core/api.js";
import { ApiError, tryAgain } from "../core/api.js";
import { el, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { run } from "./store.js";
import { CHARTS, KEYS, MEMORY, RESIDENT, device, driverLines, shownPhases } from "./utilization-charts.js";

const RECENT = 50;
const MOST_CARDS = 16;
const $ = (id) => document.getElementById(id);
const series = runSeries(run.id, KEYS);
const view = {
  series,
  colour: run.colour,
  devices: [],
  shown: [],
  all: [],
  weight: stored(),
  axis: axisInAddress("step"),
};
const charts = { ...CHARTS };
let roles = null;
let busy = false;
let again = false;
let due = false;

/* Remedies, shown for the most expensive cause. */
const REMEDY = {
  decode:
    "the scorers have processed all tokens and wait for the actor. Place them on fewer devices, or give the actor more.",
  tail: "only the last few responses are still decoding. A larger Δ keeps more rows on the device.",
  score:
    "scores are completed after decoding. Chunk-wise streaming hides most of this; a smaller C leaves less for the end.",
  update:
    "a device is idle while another one updates. Balance the models: the shorter update waits for the longer one.",
  weights: "weights are synchronized or caches rebuilt. Fewer, larger steps reduce it.",
  data: "prompts are being loaded. Pre-tokenized prompts shorten it.",
  checkpoint: "a checkpoint is being written. Raise checkpoints.every_steps.",
  eval: "an evaluation is running. Evaluate less often, or on fewer prompts.",
  unknown: "the trace does not show the cause. More than 2 % indicates a problem: check the timeline.",
};

function stored() {
  try {
    const w = parseFloat(localStorage.getItem("oppo-smoothing"));
    return w >= 0 && w < 1 ? w : 0.6;
  } catch (e) {
    return 0.6;
  }
}
function layout(made) {
  const top = made.column.x[made.column.x.length - 1] || 0;
  const bare = { showticklabels: false, showgrid: false, zeroline: false };
  if (!made.data.length || !made.column.x.length) {
    const text = run.summary.step
      ? "Not reported by this run"
      : run.summary.ended_at
        ? "The run ended before its first step"
        : "Appears after the first step";
    return T.layout({
      margin: { l: 48, r: 14, t: 8, b: 24 },
      xaxis: bare,
      yaxis: bare,
      annotations: [
        {
          xref: "paper",
          yref: "paper",
          x: 0.5,
          y: 0.5,
          text,
          showarrow: false,
          font: { size: 12, color: T.css("--text-3") },
        },
      ],
    });
  }
  const { margin, ...more } = made.layout;
  const end = (margin && margin.r > 14 ? 1 : 1.1) * top;
  const range = [0, view.axis === "step" ? Math.max(10, Math.ceil(end)) : end || 1];
  return T.layout({
    hovermode: "x",
    uirevision: view.axis,
    margin: { l: 48, r: 14, t: 8, b: 24, ...margin },
    xaxis: { range, ...ticks(range[1]) },
    ...more,
  });
}
/* Round numbers in a unit that fits the axis; the last tick shows the unit. */
function ticks(end) {
  if (view.axis === "step") return { nticks: 7, tickformat: ",d" };
  const { size, word } = axisOf(view.axis, end);
  const length = end / size;
  const power = 10 ** Math.floor(Math.log10(length / 6));
  const apart = [1, 2, 5, 10].map((n) => n * power).find((n) => length / n <= 6);
  const vals = Array.from({ length: Math.floor(length / apart) + 1 }, (_, i) => i * apart);
  return {
    tickmode: "array",
    tickvals: vals.map((value) => value * size),
    ticktext: vals.map(
      (value, i) => `${f.plain(Number(value.toPrecision(6)))}${i === vals.length - 1 ? ` ${word}` : ""}`,
    ),
  };
}
function drawOne(name) {
  const plot = $(`plot-${name}`);
  const made = charts[name](view);
  if (made.say !== undefined && $(`at-${name}`)) setText($(`at-${name}`), made.say);
  return Plotly.react(plot, T.dotted(made.data), layout(made), T.config);
}
/* --- devices ------------------------------------------------------------ */
const cardOf = (name) => $("devices").querySelector(`[data-device="${CSS.escape(name)}"]`);
function card(name) {
  charts[`device-${name}`] = device(name);
  return el(
    "section",
    { class: "card", "data-device": name },
    el(
      "div",
      { class: "card-head" },
      el("h3", {}, name),
      el("span", { class: "muted roles" }),
      el("span", { class: "reading" }, el("b"), " busy"),
    ),
    el("div", { class: "plot plot-s", id: `plot-device-${name}` }),
    el("div", { class: "card-foot row" }, el("span", { class: "idle-words" })),
  );
}
/* Of many devices the least busy of the last steps, by name: persisting devices keep their position and chart. */
function cards(busyOf) {
  const many = view.devices.length > MOST_CARDS;
  const least = new Set(
    view.devices
      .slice()
      .sort((a, b) => busyOf(a) - busyOf(b))
      .slice(0, MOST_CARDS),
  );
  const shown = view.devices.filter((name) => least.has(name));
  setText($("least"), many ? `The ${MOST_CARDS} least busy of ${view.devices.length} devices. ` : "");
  if (shown.join() === view.shown.join()) return;
  view.shown.filter((name) => !shown.includes(name)).forEach((name) => Plotly.purge($(`plot-device-${name}`)));
  view.shown = shown;
  $("devices").className = shown.length > 2 ? "grid-4" : "grid-2";
  $("devices").replaceChildren(...shown.map((name) => cardOf(name) || card(name)));
}
async function readRoles() {
  if (roles || !run.summary.step) return;
  const { lanes } = await api.get(`runs/${run.id}/timeline`, {
    from_step: run.summary.step,
    to_step: run.summary.step,
  });
  roles = {};
  lanes.forEach(([name, role]) => {
    (roles[name] = roles[name] || []).push(role);
  });
}
/* --- the last steps, all of them ------------------------------------------ */
async function recent() {
  const since = Math.max(0, run.summary.step - RECENT);
  const { series: columns } = await api.get(`runs/${run.id}/metrics`, {
    keys: "busy/*,bubble/*,idle_s/*,timing_s/step",
    since_step: since,
  });
  const sum = (key) => ((columns[key] || {}).y || []).filter(f.known).reduce((a, b) => a + b, 0);
  const steps =
    ((columns["timing_s/step"] || {}).y || []).length || Math.max(0, ...Object.values(columns).map((c) => c.y.length));
  const count = (d) => ((columns[`bubble/${d}`] || {}).y || []).filter(f.known).length; // number of these steps with data
  const of = (write) => view.all.reduce((all, d) => all + write(d), 0);
  const total = Math.max(1, of(count));
  const bubble = of((d) => sum(`bubble/${d}`)) / total;
  const idle = Object.fromEntries(run.CAUSES.map((cause) => [cause, of((d) => sum(`idle_s/${d}/${cause}`))]));
  const seconds = Object.values(idle).reduce((a, b) => a + b, 0);
  words({
    steps,
    bubble,
    shares: run.CAUSES.map((cause) => [cause, seconds ? (bubble * idle[cause]) / seconds : 0, idle[cause] / total]),
  });
  const busyOf = (d) => sum(`busy/${d}`) / Math.max(1, count(d));
  cards(busyOf);
  view.shown.forEach((d) => {
    const card = cardOf(d);
    setText(card.querySelector(".reading b"), f.percent(busyOf(d), 0));
    const worst = run.CAUSES.map((cause) => [cause, sum(`idle_s/${d}/${cause}`)]).sort((a, b) => b[1] - a[1])[0];
    setText(
      card.querySelector(".idle-words"),
      worst[1] > 0
        ? `mostly waiting for: ${worst[0]}, ${f.brief(worst[1] / Math.max(1, count(d)))} per step`
        : "never idle",
    );
    setText(card.querySelector(".roles"), roles && roles[d] ? roles[d].join(", ") : "");
  });
}
function words({ steps, bubble, shares }) {
  document
    .querySelectorAll("[data-recent]")
    .forEach((node) => setText(node, `last ${f.whole(steps)} ${steps === 1 ? "step" : "steps"}`));
  setText($("at-causes"), f.percent(bubble));
  const sorted = shares.slice().sort((a, b) => b[1] - a[1]);
  const most = sorted[0][1];
  $("causes").replaceChildren(
    ...sorted.map(([cause, share, s]) =>
      el(
        "tr",
        {},
        el(
          "td",
          {},
          el("span", { class: "row" }, el("span", { class: "swatch swatch-idle", "data-idle": cause }), cause),
        ),
        el("td", { class: "num" }, f.percent(share)),
        el("td", { class: "num" }, f.brief(s)),
        el("td", { class: "hide-narrow" }, bar(cause, most ? share / most : 0)),
      ),
    ),
  );
  $("advice").replaceChildren(
    ...(most > 0
      ? [
          el("strong", {}, `Largest cause, ${sorted[0][0]}: `),
          REMEDY[sorted[0][0]],
          " ",
          el("a", { href: `/runs/${run.id}/timeline` }, "View timeline"),
        ]
      : ["No idle time recorded."]),
  );
}
function bar(cause, share) {
  const meter = el(
    "span",
    { class: "cause-bar" },
    share > 0 ? el("span", { class: "swatch-idle", "data-idle": cause }) : null,
  );
  if (meter.firstChild) meter.firstChild.style.width = `${100 * share}%`; // through the style object, which a strict CSP permits
  return meter;
}
function unmeasured() {
  const latest = run.summary.latest || {};
  const missing = [];
  const cpu = view.devices.some((d) => d.includes("cpu:"));
  const memory = MEMORY in latest;
  const lines = driverLines(latest);
  $("memory-card").hidden = !memory;
  $("resident-card").hidden = !(RESIDENT in latest);
  $("driver-card").hidden = !lines.length;
  $("driver-legend").replaceChildren(
    ...lines.map(({ name, color }) => {
      const line = el("span", { class: "swatch-line" });
      line.style.setProperty("--c", color);
      return el("li", {}, line, name);
    }),
  );
  if (!memory && !(RESIDENT in latest)) missing.push("memory");
  if (!lines.length) missing.push("the driver's utilization figure");
  $("unmeasured").hidden = !view.devices.length;
  const not = missing.length ? `Not recorded by this run: ${missing.join(", and ")}.` : "";
  setText(
    $("unmeasured-words"),
    `${not} ${cpu ? "Its devices are CPU cores, which have no such figure; work on n threads occupies n cores." : "NVML counts a device as used whenever a kernel runs, so it overstates a scorer that waits between chunks; busy does not."}`.trim(),
  );
}
async function refresh() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    view.all = run.devicesOf(run.summary.latest || {});
    view.devices = run.devicesNow(run.summary.latest || {});
    const columns = series.update(run.summary).then((fresh) => {
      due = fresh || due;
    });
    await Promise.all([columns, loadPlotly()]);
    if (due) {
      await readRoles();
      if (view.devices.length) await recent();
      await draw();
      due = false;
    }
  } catch (e) {
    // The connection's status shows that the page is outdated.
    if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
    tryAgain(e, refresh);
  } finally {
    busy = false;
  }
  if (again) {
    again = false;
    refresh();
  }
}
/* The legend of the phases; a dashed line and two shapes are drawn as in the chart. */
function legend() {
  const shape = (name, hue) =>
    ["checkpoint", "eval"].includes(name)
      ? el("span", { class: "mark-shape", "data-shape": name, "data-phase": hue })
      : el("span", { class: "swatch-line", "data-phase": hue });
  $("phases-legend").replaceChildren(
    el("li", {}, el("span", { class: "key-line key-dash" }), "whole step"),
    ...shownPhases(view).map(([, name, hue]) => el("li", {}, shape(name, hue), name)),
  );
}
async function draw() {
  legend();
  $("no-devices").hidden = view.devices.length > 0;
  unmeasured();
  await Promise.all(
    Object.keys(charts)
      .filter(
        (name) =>
          $(`plot-${name}`) &&
          !["memory", "resident", "driver"].some((card) => name === card && $(`${card}-card`).hidden),
      )
      .map(drawOne),
  );
}
const axes = document.querySelectorAll("[data-axis]");
function pressed() {
  axes.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.axis === view.axis)));
}
axes.forEach((button) =>
  button.addEventListener("click", () => {
    view.axis = button.dataset.axis;
    series.setAxis(view.axis);
    keepAxis(view.axis, "step");
    pressed();
    refresh();
  }),
);
series.setAxis(view.axis);
pressed();
T.onChange(() => {
  if (Plotly) draw();
});
run.follow(refresh);
