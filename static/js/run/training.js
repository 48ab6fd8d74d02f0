/* Training tab: fetches new points, draws the visible charts; all of them have one cursor and one zoom. */
import { axisOf as unitOf, keepAxis, roundTicks } from "../charts/axes.js";
import { outliers, outliersNote } from "../charts/outliers.js";
import { Plotly } from "../charts/plotly.js";
import * as T from "../charts/plotly-theme.js";
import { MARGIN, removePreview } from "../charts/svg-preview.js";
import * as api from "../core/api.js";
import { ApiError, tryAgain } from "../core/api.js";
import { setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { shortcut } from "../core/keys.js";
import * as metrics from "./all-metrics.js";
import { sampleCard } from "./sample-card.js";
import { run } from "./store.js";
import { CHARTS } from "./training-charts.js";
import { axis as begun, endOf, firstLoad, series, view } from "./training-view.js";

const $ = (id) => document.getElementById(id);
const slider = $("smoothing");
const CHARACTER_PX = 7; // maximum width of a label's character
const inView = new Set();
const drawn = {};
const newest = {}; // as `drawn`, of the whole run: a zoomed range of merged steps has only its own
const hasResumed = run.resumeDetector();
let loaded = false;
let painted = false;
let busy = false;
let again = false;
let decisionsAt = -1;
let end = 0;
let due = false;
const linked = T.linked(read, onZoom);
metrics.link(linked);

function axisOf(column) {
  const top = column.x[column.x.length - 1] || 0;
  const { size, title } = unitOf(view.axis, top);
  return { end: view.axis === "step" ? endOf(column) : Math.max(1, 1.12 * top), size, title };
}
/* On a small chart the label at a line's end may be longer than the space behind it. */
function marginOf(name, made, axis) {
  const { x } = made.column;
  const labels = (made.layout.annotations || []).filter((a) => a.xanchor === "left" && a.xshift);
  const free = ($(`plot-${name}`).clientWidth - MARGIN.l - MARGIN.r) * (1 - (x[x.length - 1] || 0) / axis.end);
  return {
    ...MARGIN,
    r: Math.max(MARGIN.r, Math.ceil(CHARACTER_PX * Math.max(0, ...labels.map((a) => a.text.length + 1)) - free)),
  };
}
function layoutOf(name, made, axis) {
  const base = {
    margin: marginOf(name, made, axis),
    hovermode: made.hover || "x",
    xaxis: { range: view.zoomed || [0, axis.end], ...ticks(axis) },
    uirevision: `${view.axis} ${view.resets}`,
  };
  end = axis.end;
  if (!made.column.x.length) return emptyLayout(base);
  const layout = T.layout({ ...base, ...made.layout });
  const odd =
    view.outliers && made.odd
      ? outliers(made.odd, { tozero: layout.yaxis.rangemode === "tozero", keep: made.keep })
      : null;
  layout.yaxis.uirevision = `${view.axis} ${view.outliers} ${view.resets}`;
  if (odd) layout.yaxis.range = odd.range;
  const note = (text, more) => ({
    xref: "paper",
    yref: "paper",
    text,
    showarrow: false,
    font: { size: 11, color: T.css("--text-3") },
    ...more,
  });
  const title = note(axis.title, { x: 1, y: 0, yshift: -3, xanchor: "right", yanchor: "top" });
  const notes = odd ? [note(outliersNote(odd), { x: 0, y: 1, xanchor: "left", yanchor: "top" })] : [];
  layout.annotations = [
    ...(made.layout.annotations || []),
    ...($(`plot-${name}`).clientWidth > 420 ? [title] : []),
    ...notes,
  ];
  return layout;
}
function emptyLayout(base) {
  const bare = { showticklabels: false, showgrid: false, zeroline: false };
  const text = view.summary.step
    ? "Not reported by this run"
    : view.summary.ended_at
      ? "The run ended before its first step"
      : "Appears after the first step";
  return T.layout({
    ...base,
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
/* None at the right end, where the unit is shown. Plotly's own ticks once the user zooms. */
function ticks(axis) {
  const steps = view.axis === "step";
  return view.zoomed ? { nticks: 8 } : roundTicks(axis, { whole: steps, share: steps ? 0.93 : 0.78 });
}
function drawOne(name) {
  const made = CHARTS[name](view);
  const plot = $(`plot-${name}`);
  drawn[name] = made;
  newest[name] = view.zoomed ? CHARTS[name]({ ...view, series: series.whole }) : made;
  return Plotly.react(plot, T.dotted(made.data), layoutOf(name, made, axisOf(made.column)), T.config).then(() => {
    removePreview(plot);
    linked.add(plot);
  });
}
async function draw() {
  view.summary = run.summary;
  for (const name of Object.keys(CHARTS).filter((n) => inView.has(n))) {
    await drawOne(name);
    if (!painted) await new Promise((done) => setTimeout(done)); // the first chart is painted before the next is drawn
    painted = true;
  }
  read(linked.at);
}
/* The zoom is stored here, because Plotly drops it at the next redraw unless the user zoomed that chart. */
function onZoom(e) {
  if (!("xaxis.range[0]" in e || "xaxis.autorange" in e)) return;
  const isReset = "xaxis.autorange" in e; // a double click, which drops ranges of y axes too
  const [from, to] = [e["xaxis.range[0]"], e["xaxis.range[1]"]];
  const isWhole = isReset || (Math.abs(from) < 1e-9 && Math.abs(to - end) < 1e-6 * end);
  const { zoomed } = view;
  const isSame = isWhole ? zoomed === null : zoomed && zoomed[0] === from && zoomed[1] === to;
  if (isSame && !isReset) return;
  view.zoomed = isWhole ? null : [from, to];
  if (isWhole) view.resets += 1; // otherwise the axis would no longer grow with the run
  requestAnimationFrame(draw);
  metrics.redraw();
  series.zoom(view.zoomed).then((changed) => {
    if (changed) draw();
  }, stale);
}
function read(x) {
  // the header of a card shows the value under the cursor, or the newest
  metrics.read(x);
  Object.entries(x === null ? newest : drawn).forEach(([name, made]) => {
    if (!made.say || !$(`at-${name}`)) return;
    const i = x === null ? made.column.x.length - 1 : series.nearest(made.column.x, x);
    const [figure, detail] = i < 0 ? ["", ""] : made.say(i);
    setText($(`at-${name}`), figure);
    setText($(`by-${name}`), i >= 0 && x !== null ? `${detail} · step ${f.whole(made.column.step[i])}` : detail);
  });
}
/* The cursor by keys, a point at a time; behind the last one are the newest values. */
function moveCursor(key) {
  const { x } = (Object.values(drawn).find((made) => made.column.x.length) || { column: { x: [] } }).column;
  const at = linked.at === null ? x.length : series.nearest(x, linked.at);
  const next = Math.max(0, at + (key === "ArrowLeft" ? -1 : 1));
  linked.mark(next < x.length ? x[next] : null);
  read(linked.at);
}
async function refresh() {
  if (busy) {
    again = true;
    return;
  }
  const first = !loaded && view.axis === begun;
  busy = true;
  try {
    // Also the steps that were reported after the first load was requested; without new steps no request is sent.
    const begin = first ? firstLoad : Promise.resolve(false);
    const columns = begin.then((fresh) => {
      due = due || fresh;
      return series.update(run.summary).then((newer) => {
        due = due || newer;
      });
    });
    await Promise.all([columns, decisions(run.summary)]);
    loaded = true;
    if (due) {
      await draw();
      await samples();
      due = false;
    }
  } catch (e) {
    stale(e);
    tryAgain(e, refresh);
  } finally {
    busy = false;
  }
  if (!loaded) {
    loaded = true;
    await draw();
  } // draw charts that came into view meanwhile; without a response, empty ones
  if (again) {
    again = false;
    refresh();
  }
}
function stale(e) {
  // the connection's status shows it; the next event or poll retries
  if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
}
async function decisions(summary) {
  if (hasResumed(summary)) decisionsAt = -1;
  if (summary.step === decisionsAt) return;
  const since = Math.max(0, decisionsAt - 1); // a step's decision may arrive after it, so the last step is fetched again
  const fresh = await api.all(`runs/${run.id}/decisions`, { since_step: since });
  view.decisions = [...view.decisions.filter((d) => d.step <= since), ...fresh];
  decisionsAt = summary.step;
}
async function samples() {
  const { items } = await api.get(`runs/${run.id}/samples`, { limit: 4 });
  $("samples").replaceChildren(...items.map((s) => sampleCard(s)));
  $("samples-none").hidden = items.length > 0;
}
const seen = new IntersectionObserver(
  (entries) => {
    entries.forEach((e) => {
      const name = e.target.id.replace("plot-", "");
      if (!e.isIntersecting) return inView.delete(name);
      inView.add(name);
      if (loaded) drawOne(name).then(() => read(linked.at)); // before the first response there is nothing to draw
    });
  },
  { rootMargin: "200px" },
);

document.querySelectorAll(".plot[id]").forEach((plot) => seen.observe(plot));
slider.value = view.weight;
setText($("smoothing-value"), view.weight.toFixed(2));
slider.addEventListener("input", () => {
  view.weight = Number(slider.value);
  setText($("smoothing-value"), view.weight.toFixed(2));
  try {
    localStorage.setItem("oppo-smoothing", view.weight);
  } catch (e) {
    /* storage may be refused */
  }
  draw();
  metrics.redraw();
});
document.querySelectorAll("[data-axis]").forEach((button) =>
  button.addEventListener("click", () => {
    view.axis = button.dataset.axis;
    view.zoomed = null;
    linked.mark(null);
    document.querySelectorAll("[data-axis]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
    series.setAxis(view.axis);
    keepAxis(view.axis, "step");
    refresh();
    metrics.load();
  }),
);
document
  .querySelectorAll("[data-axis]")
  .forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.axis === view.axis)));
$("outliers").checked = view.outliers;
$("outliers").addEventListener("change", (e) => {
  view.outliers = e.target.checked;
  try {
    localStorage.setItem("oppo-outliers", view.outliers ? "ignore" : "show");
  } catch (refused) {
    /* then the choice lasts for this page */
  }
  draw();
});
T.onChange(() => {
  draw();
  metrics.redraw();
});
shortcut("← →", "move the cursor of all charts", moveCursor, { keys: ["ArrowLeft", "ArrowRight"] });
run.follow(refresh);
