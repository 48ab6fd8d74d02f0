/* A card with the chart of one metric, or of several.
     const panel = metricPanel({ title, keys, log }, { view, columns, menu, large })
     panel.preview();  panel.draw();  panel.read(x);  panel.purge();  panel.node, panel.plot
   Plotly takes a tenth of a second for a chart: `preview` shows the lines of one that is not drawn yet. */
import { axisOf, roundTicks } from "../charts/axes.js";
import { Plotly } from "../charts/plotly.js";
import * as T from "../charts/plotly-theme.js";
import { drawPreview, removePreview } from "../charts/svg-preview.js";
import { el, icon, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { run } from "./store.js";

const ROUNDING = 1e-6; // of a value, somewhat above float32's
export const titleOf = (chart) => chart.title || chart.keys.join(", ");

export function metricPanel(chart, { view, columns, menu = null, large = false }) {
  const title = titleOf(chart);
  const several = chart.keys.length > 1;
  const plot = el("div", { class: `plot ${large ? "plot-full" : "plot-s"}`, "data-key": chart.keys.join(",") });
  const at = el("b");
  const legend = el("ul", { class: "legend" });
  const node = el(
    "section",
    { class: "card metric", "data-name": title },
    el(
      "div",
      { class: "card-head" },
      el("h3", { class: "metric-name", title }, title),
      several ? null : el("span", { class: "reading" }, at),
      menu ? menuButton(title, menu) : null,
    ),
    several ? legend : null,
    plot,
  );
  const colourOf = (i) => T.run(several ? i + 1 : view.colour);
  const rows = (columnOf = columns.get) =>
    chart.keys.map((key) => withMiddles(columnOf(key) || { step: [], x: [], y: [] }));
  const endOf = () => Math.max(0, ...rows().map(({ x }) => x[x.length - 1] || 0));

  function traces(column, i) {
    const color = colourOf(i);
    const { x } = column;
    const y = chart.log ? column.y.map((value) => (value > 0 ? value : null)) : column.y;
    const band = column.low && !several && !chart.log ? T.band(x, column.low, column.high, color, 0.16) : [];
    const line = { x, mode: "lines", hoverinfo: "none" };
    return [
      ...band,
      { ...line, y, line: { width: 1, color: T.fade(color, view.weight ? 0.28 : 1) } },
      { ...line, y: T.ema(y, view.weight), line: { width: 1.75, color }, visible: view.weight > 0, hoverinfo: "skip" },
      ...T.gaps(column),
    ];
  }
  function layout() {
    const steps = view.axis === "step";
    const end = endOf();
    const { size, title: unit } = axisOf(view.axis, end);
    const ticks = view.zoomed
      ? { nticks: 4 }
      : roundTicks({ size, end: end || 1 }, { count: large ? 10 : 4, whole: steps });
    const noValue = chart.log && !rows().some(({ y }) => y.some((value) => value > 0));
    return T.layout({
      margin: large ? { l: 56, r: 16, t: 8, b: 40 } : { l: 44, r: 10, t: 6, b: 20 },
      uirevision: `${view.axis} ${view.resets} ${chart.log}`,
      xaxis: { range: view.zoomed || [0, end || 1], title: { text: large ? unit : "" }, ...ticks },
      yaxis: { nticks: large ? 8 : 3, ...(chart.log ? { type: "log" } : { type: "linear", ...rangeOf(rows()) }) },
      annotations: noValue ? [centred("No value above 0 for a logarithmic axis")] : [],
    });
  }
  function preview() {
    if (panel.drawn) return;
    removePreview(plot);
    if (!chart.log && !view.zoomed)
      drawPreview(plot, { data: rows().flatMap(traces), layout: layout() }, endOf() || 1);
  }
  async function draw() {
    panel.drawn = true;
    const data = T.dotted(rows().flatMap(traces));
    await Plotly.react(plot, data, layout(), large ? T.config : { ...T.config, doubleClick: false });
    removePreview(plot);
  }
  function purge() {
    if (panel.drawn) Plotly.purge(plot);
    else removePreview(plot);
    panel.drawn = false;
  }
  function newest(key, i) {
    const { latest } = run.summary;
    if (Object.hasOwn(latest || {}, key)) return f.figure(latest[key]);
    const { y } = rows(columns.whole)[i];
    return f.figure(y.findLast(f.known));
  }
  /* Values at a place of the axis; the run's newest for null. */
  function read(x) {
    const values = x === null ? chart.keys.map(newest) : rows().map((column) => figureAt(column, x));
    if (!several) setText(at, values[0]);
    else
      legend.replaceChildren(
        ...chart.keys.map((key, i) =>
          el("li", { "data-run": i + 1 }, el("span", { class: "swatch-line" }), `${key} `, el("b", {}, values[i])),
        ),
      );
  }
  const panel = { chart, node, plot, preview, draw, purge, read, drawn: false };
  read(null);
  return panel;
}
function centred(text) {
  const font = { size: 12, color: T.css("--text-3") };
  return { xref: "paper", yref: "paper", x: 0.5, y: 0.5, text, showarrow: false, font };
}
/* The range of the y axis where values differ only by rounding: Plotly's own would magnify that, with ticks of ten digits. */
function rangeOf(columns) {
  const known = columns.flatMap(({ y, low, high }) => [y, low || [], high || []].flat().filter(f.known));
  const [lo, hi] = known.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, -Infinity]);
  const size = Math.max(Math.abs(lo), Math.abs(hi));
  return hi > lo && hi - lo < ROUNDING * size ? { range: [lo - size / 10, hi + size / 10] } : {};
}
/* A row of merged steps has no mean where one of them is not a number: the line passes half-way between its extremes. */
function withMiddles(column) {
  const { low, high } = column;
  return low ? { ...column, y: column.y.map((y, i) => y ?? (low[i] === null ? null : (low[i] + high[i]) / 2)) } : column;
}
/* The value of the last row up to a place, so that a longer metric's cursor reads nothing that came later. */
const figureAt = ({ x, y }, place) => f.figure(y[x.findLastIndex((other) => other <= place)]);
/* `menu()` → [[label, action], …], asked when the summary is clicked, also by a key: `toggle` comes only after the menu is open, and
   a Tab in between would pass an empty menu. */
function menuButton(title, menu) {
  const body = el("div", { class: "menu-body" });
  const fill = () =>
    body.replaceChildren(
      ...menu().map(([label, onclick]) => el("button", { class: "btn btn-small", type: "button", onclick }, label)),
    );
  const button = { class: "btn btn-quiet btn-icon btn-small", "aria-label": `Actions for ${title}`, onclick: fill };
  return el("details", { class: "menu menu-end menu-more" }, el("summary", button, icon("more")), body);
}
