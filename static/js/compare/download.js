/* Downloads of the compare page: curves and tables as CSV, charts as PNG and SVG. */
import { Plotly } from "../charts/plotly.js";
import * as T from "../charts/plotly-theme.js";
import { metricOf } from "./curves.js";
import { el } from "../core/dom.js";

/* Prefix texts that a spreadsheet would execute as a formula with an apostrophe; any user can name a run. */
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}
const csv = (rows) => rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
/* One row per point of every curve. `low` and `high`: a group's band, or the extremes of the steps that a point merges. */
function curveRows(drawn, v) {
  const rows = [["chart", "curve", "runs", v.axis.title, "shown", "recorded", "low", "high"]];
  Object.entries(drawn).forEach(([chart, { shown }]) =>
    shown.forEach((c) =>
      c.x.forEach((x, i) => {
        const at = (list) => (list ? list[i] : null);
        rows.push([metricOf(chart) ?? chart, c.entry.label, c.n ? c.n[i] : 1, x, c.y[i], at(c.raw), at(c.low), at(c.high)]);
      }),
    ),
  );
  return rows;
}
function tableRows(reply) {
  const paths = reply.config_diff.map((d) => d.path);
  const owner = (id) => (reply.groups.find((g) => g.runs.includes(id)) || {}).value;
  const figures = Object.keys(reply.figures[reply.runs[0].id]);
  const head = [
    "id",
    "run",
    "state",
    "group",
    "target",
    "steps_to_target",
    "seconds_to_target",
    "speedup",
    ...figures,
    ...paths,
  ];
  return [
    head,
    ...reply.runs.map((run) => {
      const hit = reply.time_to_target[run.id] || {};
      return [
        run.id,
        run.name,
        run.state,
        owner(run.id),
        reply.target,
        hit.step,
        hit.elapsed_s,
        reply.speedup[run.id],
        ...figures.map((name) => reply.figures[run.id][name]),
        ...reply.config_diff.map((d) => d.values[run.id]),
      ];
    }),
  ];
}
/* As on the page, with background, legend and axis titles. */
function image(name, plot, title, format, axisTitle) {
  const { width, height } = plot.getBoundingClientRect();
  const ground = T.css("--surface");
  const layout = {
    ...plot.layout,
    paper_bgcolor: ground,
    plot_bgcolor: ground,
    showlegend: true,
    legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, font: { size: 11 } },
    margin: { l: 56, r: 16, t: 56, b: 44 },
    xaxis: {
      ...plot.layout.xaxis,
      range: plot._fullLayout.xaxis.range.slice(),
      title: { ...plot.layout.xaxis.title, text: axisTitle },
    },
    title: { text: title, x: 0.01, font: { size: 14 } },
  };
  return Plotly.downloadImage(
    { data: plot.data, layout, config: T.config },
    {
      format,
      filename: `compare-${name}`,
      width: Math.max(640, Math.round(width)),
      height: Math.max(360, Math.round(height)),
      scale: format === "png" ? 2 : 1,
    },
  );
}
export { csv, save, curveRows, tableRows, image };
