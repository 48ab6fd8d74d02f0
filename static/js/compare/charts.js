/* The charts of the compare page: pure functions from curves to Plotly traces and layout. */
import { outliers, outliersNote } from "../charts/outliers.js";
import * as T from "../charts/plotly-theme.js";
import { metricOf } from "./curves.js";
import * as f from "../core/format.js";

const BANDS_UP_TO = 6; // more bands would cover each other
const DASHES = ["solid", "6px,3px", "2px,3px", "8px,3px,2px,3px"];

const shortened = (text) => text.replace(/[<>&]/g, (c) => ({ "<": "‹", ">": "›", "&": "+" })[c]).slice(0, 40);
const titled = (entry) => shortened(entry.label) + (entry.group ? ` · ${entry.count}` : "");

function line(curve, width, colour, more) {
  return {
    x: curve.x,
    y: curve.y,
    mode: "lines",
    line: { width, color: colour, ...more },
    hoverinfo: "none",
    showlegend: false,
  };
}
/* Per curve: its band, its faint raw line, the curve. The highlighted run is drawn last, on top of all others. */
function traces(name, drawn, v) {
  const data = [];
  const last = [];
  drawn.shown.forEach((c) => {
    const colour = T.run(c.entry.colour);
    const picked = v.view.picked;
    const faint = c.entry.group ? false : picked ? c.entry.key !== picked : v.many;
    if (c.low && drawn.shown.length <= BANDS_UP_TO && !faint)
      data.push(...T.band(c.x, c.low, c.high, colour, c.entry.group ? 0.16 : 0.12));
    if (c.entry.group)
      c.entry.ids.forEach((id) =>
        (id === picked ? last : data).push({
          ...line(drawn.runs.get(id), id === picked ? 2.5 : 0.75, T.fade(colour, id === picked ? 1 : 0.35)),
          meta: id,
          hoverinfo: "skip",
        }),
      );
    else if (name === "reward" && v.view.smooth > 0 && !faint)
      data.push({ ...line({ x: c.x, y: c.raw }, 0.75, T.fade(colour, 0.25)), hoverinfo: "skip" });
    const width = faint ? 1 : c.entry.key === picked ? 3 : 2;
    const own = {
      ...line(c, width, faint ? T.fade(colour, 0.25) : colour, { dash: DASHES[c.entry.dash] }),
      name: titled(c.entry),
      meta: c.entry.key,
      showlegend: !faint,
    };
    (c.entry.key === picked ? last : data).push(own);
  });
  return [...data, ...beginnings(drawn, v), ...last];
}
/* A ring at the start of a fork: earlier points are its parent's. */
function beginnings(drawn, v) {
  const forks = v.reply.groups.length
    ? []
    : v.reply.runs.filter((run) => run.forked_from && drawn.runs.get(run.id).x.length);
  return forks.map((run) => {
    const { x, y } = drawn.runs.get(run.id);
    const color = T.run(v.colours.get(run.id));
    return {
      x: [x[0]],
      y: [y[0]],
      mode: "markers",
      marker: { symbol: "circle-open", size: 9, color, line: { width: 2, color } },
      hoverinfo: "skip",
      showlegend: false,
    };
  });
}
function build(name, drawn, v) {
  const main = name === "reward";
  const key = metricOf(name);
  const isLog = key !== null && v.view.log.includes(key);
  const axes = {
    reward: { nticks: 6 },
    kl: { nticks: 5, rangemode: "tozero" },
    bubble: { nticks: 4, ticksuffix: " %", rangemode: "tozero" },
  };
  const layout = {
    hovermode: v.many ? "closest" : "x",
    margin: { l: 48, r: 14, t: 8, b: main ? 38 : 24 },
    uirevision: v.view.axis,
    shapes: [],
    annotations: [],
    xaxis: {
      nticks: main ? 9 : 5,
      uirevision: `${v.view.axis} ${v.view.zoom}`,
      title: { text: main ? v.axis.title : "" },
    },
    yaxis: {
      ...(key === null ? axes[name] : { nticks: 4, type: isLog ? "log" : "linear" }),
      uirevision: `${v.view.axis} ${v.view.outliers} ${v.resets} ${isLog}`,
    },
  };
  layout.xaxis.range = v.view.zoom ? v.view.zoom.map((x) => x / v.axis.size) : [0, endOf(drawn)];
  if (main && f.known(v.reply.target)) target(layout, drawn, v);
  if (v.view.outliers && !isLog) middle(layout, name, drawn, v);
  return { data: traces(name, drawn, v), layout: T.layout(layout) };
}
/* Plotly's own range would count the previous drawing's lines and labels, whose axis may have had another unit. */
const endOf = (drawn) => Math.max(0, ...[...drawn.runs.values()].map(({ x }) => x.at(-1) ?? 0)) || 1;
/* A line at the target, and a drop line from each curve to the axis where it reaches the target. */
function target(layout, drawn, v) {
  const goal = v.reply.target;
  const bands = drawn.shown.length <= BANDS_UP_TO ? drawn.shown.flatMap(({ low, high }) => [low || [], high || []]) : [];
  const ys = [...drawn.runs.values()].flatMap((c) => c.raw).concat(...bands).filter(f.known);
  const [lo, hi] = ys.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [goal, goal]);
  const room = 0.06 * (hi - lo || 1);
  layout.yaxis.range = [lo - room, hi + room];
  layout.shapes.push({
    type: "line",
    xref: "paper",
    x0: 0,
    x1: 1,
    y0: goal,
    y1: goal,
    line: { color: T.css("--border-strong"), width: 1, dash: "dot" },
  });
  layout.annotations.push({
    xref: "paper",
    x: 1, // curves that reach the target at once have the labels of their drop lines on the left
    y: goal,
    text: `target ${f.figure(goal)}`,
    showarrow: false,
    xanchor: "right",
    yanchor: "bottom",
    font: { size: 11, color: T.css("--text-3") },
  });
  const few = v.many ? drawn.shown.filter((c) => c.entry.key === v.view.picked) : drawn.shown;
  const right = layout.xaxis.range[1];
  few.forEach((c, k) => {
    const x = c.entry.hit ? placeOf(c, v) : null;
    if (x === null) return;
    layout.shapes.push({
      type: "line",
      x0: x,
      x1: x,
      y0: lo - room,
      y1: goal,
      line: { color: T.run(c.entry.colour), width: 1, dash: "dot" },
    });
    layout.annotations.push({
      x,
      y: lo - room,
      text: v.axis.write(x),
      showarrow: false,
      xanchor: x > 0.85 * right ? "right" : "left",
      xshift: x > 0.85 * right ? -4 : 4,
      yanchor: "bottom",
      yshift: 14 * k,
      font: { size: 12, color: T.css("--text-2") },
    });
  });
}
/* The range of the middle nine tenths of all points; the number of points outside is shown. */
function middle(layout, name, drawn, v) {
  const columns = [...drawn.runs.values()].map((c) => ({ ...c, y: c.raw }));
  const keep = name === "reward" ? [v.reply.target] : [];
  const outside = outliers(columns, { tozero: layout.yaxis.rangemode === "tozero", keep });
  if (!outside) return;
  const floor = layout.yaxis.range ? layout.yaxis.range[0] : null;
  layout.yaxis.range = outside.range;
  if (floor !== null) {
    // a line at the bottom stays at the bottom
    layout.shapes.forEach((shape) => {
      if (shape.y0 === floor) shape.y0 = outside.range[0];
    });
    layout.annotations.forEach((note) => {
      if (note.y === floor) note.y = outside.range[0];
    });
  }
  layout.annotations.push({
    xref: "paper",
    yref: "paper",
    x: 1,
    y: 1,
    text: outliersNote(outside),
    showarrow: false,
    xanchor: "right",
    yanchor: "top",
    font: { size: 11, color: T.css("--text-3") },
  });
}
function placeOf(curve, v) {
  // groups: the mean of their runs' steps or times; unknown for other curves
  const { hit } = curve.entry;
  if (v.view.axis === "step") return hit.step;
  if (v.view.axis === "wall") return f.known(hit.elapsed_s) ? hit.elapsed_s / v.axis.size : null;
  if (curve.entry.group) return null;
  const i = curve.step.findIndex((s) => s >= hit.step);
  return i < 0 ? null : curve.x[i];
}
/* One run on top of all others while the pointer or the focus is on it: a line in the chart's own SVG, because redrawing 50
   curves at every move is slow. Clipped to the plot. */
function outline(plot, curve, colour) {
  const svg = plot.querySelector(".main-svg");
  const full = plot._fullLayout;
  const old = plot.querySelector("svg.outlined");
  if (old) old.remove();
  if (!curve || !svg) return;
  const make = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([k, value]) => node.setAttribute(k, value));
    return node;
  };
  const box = make("svg", {
    class: "outlined",
    x: full.margin.l,
    y: full.margin.t,
    width: full.xaxis._length,
    height: full.yaxis._length,
  });
  let path = "";
  let pen = "M";
  curve.x.forEach((x, i) => {
    const y = curve.y[i] === null ? null : full.yaxis.d2p(curve.y[i]);
    if (!f.known(y)) {
      pen = "M"; // no value, or none above 0 on a logarithmic axis
      return;
    }
    path += `${pen}${full.xaxis.d2p(x).toFixed(1)},${y.toFixed(1)}`;
    pen = "L";
  });
  box.append(
    make("path", { d: path || "M0,0", fill: "none", stroke: colour, "stroke-width": 2.5, "stroke-linejoin": "round" }),
  );
  svg.append(box);
}
const NAMES = ["reward", "kl", "bubble"];
export { NAMES, build, outline };
