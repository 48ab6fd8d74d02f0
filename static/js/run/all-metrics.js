/* Every metric of the run as a small chart, grouped by the first part of its name and searched by text or regular expression.
   A chart is fetched and drawn when it is scrolled to, so that 300 metrics open as fast as a dozen. */
import { axisOf } from "../charts/axes.js";
import { Plotly } from "../charts/plotly.js";
import * as T from "../charts/plotly-theme.js";
import * as api from "../core/api.js";
import { el, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { run } from "./store.js";

const POINTS = 400; // of a chart, which is about as wide
const KEYS_A_REQUEST = 50;
const RENEW_MS = 4000;
const $ = (id) => document.getElementById(id);
const section = $("all-metrics");
const search = $("metric-search");
const charts = new Map(); // key → { card, plot, at, column, step, stale }
const near = new Set(); // keys of the charts that are in view or close to it
const waiting = new Set(); // keys of charts to draw
let view = null;
let timer = 0;
let loading = false;

const prefixOf = (key) => (key.includes("/") ? key.slice(0, key.indexOf("/")) : "other");
const order = (a, b) => a.localeCompare(b, "en", { numeric: true });
const keysNow = () => Object.keys(run.summary.latest || {}).sort(order);

/* --- cards --------------------------------------------------------------------------------------------- */
function card(key) {
  const plot = el("div", { class: "plot plot-s", "data-key": key });
  const at = el("b");
  const head = el(
    "div",
    { class: "card-head" },
    el("h3", { class: "metric-name", title: key }, key),
    el("span", { class: "reading" }, at),
  );
  charts.set(key, {
    card: el("section", { class: "card metric", "data-name": key }, head, plot),
    plot,
    at,
    column: null,
    step: -1,
  });
  seen.observe(plot);
  return charts.get(key).card;
}
function group(prefix) {
  const id = `metric-group-${prefix}`;
  const found = document.getElementById(id);
  if (found) return found.querySelector(".grid-4");
  const grid = el("div", { class: "grid-4" });
  const count = el("span", { class: "note", "data-count": true });
  const node = el("details", { id, open: true }, el("summary", {}, el("b", {}, `${prefix} `), count), grid);
  const after = [...$("metric-groups").children].find((other) => other.id.localeCompare(id) > 0);
  $("metric-groups").insertBefore(node, after || null);
  return grid;
}
/* Cards of metrics that the run has reported since, each at its name's place in its group. */
function addCards() {
  const fresh = keysNow().filter((key) => !charts.has(key));
  fresh.forEach((key) => {
    const grid = group(prefixOf(key));
    const after = [...grid.children].find((other) => order(other.dataset.name, key) > 0);
    grid.insertBefore(card(key), after || null);
  });
  if (fresh.length) filter();
}

/* --- search -------------------------------------------------------------------------------------------- */
/* A regular expression if the text is one, otherwise the text itself. */
function matcher(text) {
  try {
    const pattern = new RegExp(text, "i");
    return (key) => pattern.test(key);
  } catch (e) {
    return (key) => key.toLowerCase().includes(text.toLowerCase());
  }
}
function filter() {
  const matches = matcher(search.value.trim());
  let found = 0;
  charts.forEach(({ card: node }, key) => {
    node.hidden = !matches(key);
    if (!node.hidden) found += 1;
  });
  document.querySelectorAll("#metric-groups details").forEach((node) => {
    const shown = node.querySelectorAll(".metric:not([hidden])").length;
    node.hidden = shown === 0;
    setText(node.querySelector("[data-count]"), String(shown));
  });
  const all = charts.size;
  setText(
    $("metric-count"),
    found === all ? `${f.whole(all)} metrics` : `${f.whole(found)} of ${f.whole(all)} metrics`,
  );
  $("metrics-none").hidden = found > 0 || all === 0;
}

/* --- data and drawing ---------------------------------------------------------------------------------- */
const seen = new IntersectionObserver(
  (entries) => {
    entries.forEach((e) => (e.isIntersecting ? enter : leave)(e.target.dataset.key));
    load();
  },
  { rootMargin: "400px" },
);
function enter(key) {
  near.add(key);
  if (charts.get(key).column) waiting.add(key);
}
/* What is out of view is not kept drawn: hundreds of charts would be redrawn at every change of the window's size. */
function leave(key) {
  near.delete(key);
  waiting.delete(key);
  const chart = charts.get(key);
  if (chart.drawn) Plotly.purge(chart.plot);
  chart.drawn = false;
}
const isStale = (chart) => chart.step !== run.summary.step || chart.axis !== view.axis;

async function load() {
  drawWaiting();
  if (loading) return;
  loading = true;
  clearTimeout(timer);
  timer = 0;
  try {
    for (;;) {
      const keys = [...near].filter((key) => isStale(charts.get(key))).slice(0, KEYS_A_REQUEST);
      if (!keys.length) break;
      const { axis } = view;
      const { step } = run.summary;
      const reply = await api.get(`runs/${run.id}/metrics`, { keys: keys.join(","), x: axis, max_points: POINTS });
      keys.forEach((key) => {
        Object.assign(charts.get(key), { column: placed(reply.series[key]), step, axis });
        if (near.has(key)) waiting.add(key);
      });
      await drawWaiting();
    }
  } catch (e) {
    if (!(e instanceof TypeError) && !(e instanceof api.ApiError)) throw e; // the connection's status shows it
    api.tryAgain(e, load);
  } finally {
    loading = false;
  }
}
/* Rows with a known position on the axis. */
function placed(column) {
  const rows = column || { step: [], x: [], y: [] };
  return Object.fromEntries(
    Object.entries(rows).map(([name, list]) => [name, list.filter((_, i) => rows.x[i] !== null)]),
  );
}
/* One chart in each task, so that scrolling stays smooth. */
async function drawWaiting() {
  while (waiting.size) {
    const [key] = waiting;
    waiting.delete(key);
    draw(key);
    await new Promise((done) => setTimeout(done));
  }
}
function draw(key) {
  const chart = charts.get(key);
  const { plot, at, column, axis } = chart;
  const color = T.run(view.colour);
  const end = column.x[column.x.length - 1] || 0;
  const { size, word } = axisOf(axis, end);
  const x = column.x.map((place) => place / size);
  const soft = T.ema(column.y, view.weight);
  const known = column.y.filter(f.known);
  const data = [
    ...(column.low ? T.band(x, column.low, column.high, color, 0.16) : []),
    {
      x,
      y: column.y,
      mode: "lines",
      line: { width: 1, color: T.fade(color, view.weight ? 0.28 : 1) },
      hovertemplate: "%{y:.4~g}<extra></extra>",
    },
    { x, y: soft, mode: "lines", line: { width: 1.75, color }, hoverinfo: "skip", visible: view.weight > 0 },
  ];
  const margin = { l: 44, r: 10, t: 6, b: 20 };
  const xaxis = { nticks: 4, ticksuffix: word ? ` ${word}` : "", showticksuffix: "last" };
  chart.drawn = true;
  Plotly.react(plot, data, T.layout({ margin, uirevision: axis, xaxis, yaxis: { nticks: 3 } }), T.config);
  setText(at, known.length ? f.figure(known[known.length - 1]) : f.NONE);
}
function redraw() {
  near.forEach((key) => charts.get(key).column && waiting.add(key));
  drawWaiting();
}

export function showAllMetrics(shared) {
  view = shared;
  section.hidden = false;
  addCards();
  filter();
  search.addEventListener("input", filter);
  T.onChange(redraw);
  $("smoothing").addEventListener("change", redraw);
  document
    .querySelectorAll("[data-axis]")
    .forEach((button) => button.addEventListener("click", () => setTimeout(load)));
  run.follow(() => {
    addCards();
    timer ||= setTimeout(load, RENEW_MS);
  });
}
