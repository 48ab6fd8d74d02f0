/* A chart's lines and bands as plain SVG, shown until Plotly is loaded.
     drawPreview(plot, made, end)   made: Plotly's {data, layout}, linear, from x = 0; end: of the x axis
     removePreview(plot)       once Plotly has drawn. The preview has no ticks and no cursor. */
import * as T from "./plotly-theme.js";
import * as f from "../core/format.js";

const SVG = "http://www.w3.org/2000/svg";
export const MARGIN = { l: 48, r: 14, t: 8, b: 24 };

function node(name, attributes) {
  const made = document.createElementNS(SVG, name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  return made;
}
const drawn = (data) => data.filter((t) => t.visible !== false && t.mode === "lines" && t.x.length);
/* As Plotly chooses it: 5 % of the height free above and below. */
function rangeOf(made) {
  const { range, rangemode } = made.layout.yaxis || {};
  if (range) return range;
  const known = drawn(made.data).flatMap((t) => t.y.filter(f.known));
  let lo = Infinity;
  let hi = -Infinity;
  for (const y of known) {
    lo = Math.min(lo, y);
    hi = Math.max(hi, y);
  }
  if (hi === lo) return [lo - 1, hi + 1];
  if (rangemode === "tozero" && lo >= 0) return [0, hi / 0.95];
  const room = (hi - lo) / 18;
  return [lo - room, hi + room];
}
/* A point without a neighbour is a line of no length, which round ends show as a dot. */
function path(xs, ys, px, py) {
  let text = "";
  xs.forEach((x, i) => {
    if (!f.known(ys[i])) return;
    const isFirst = !f.known(ys[i - 1]);
    text += `${isFirst ? "M" : "L"}${px(x).toFixed(1)} ${py(ys[i]).toFixed(1)}`;
    if (isFirst && !f.known(ys[i + 1])) text += "h0";
  });
  return text;
}
export function drawPreview(plot, made, end) {
  const { clientWidth: width, clientHeight: height } = plot;
  const lines = drawn(made.data);
  if (!lines.length || !width) return;
  const [lo, hi] = rangeOf(made);
  const margin = made.layout.margin || MARGIN;
  const across = width - margin.l - margin.r;
  const down = height - margin.t - margin.b;
  const px = (x) => margin.l + (across * x) / end;
  const py = (y) => margin.t + (down * (hi - y)) / (hi - lo);
  // It stretches with the window: charts out of view keep their preview until they are scrolled to.
  const box = { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" };
  const svg = node("svg", { class: "preview", ...box, "aria-hidden": "true" });
  const inner = { x: margin.l, y: margin.t, width: across, height: down };
  const clipped = node("svg", { ...inner, viewBox: Object.values(inner).join(" ") });
  svg.append(clipped);
  lines.forEach((trace, i) => {
    const d = path(trace.x, trace.y, px, py);
    const under = lines[i - 1];
    if (trace.fill === "tonexty")
      clipped.append(
        node("path", {
          d: d + path(under.x.slice().reverse(), under.y.slice().reverse(), px, py).replace("M", "L"),
          fill: trace.fillcolor,
        }),
      );
    if (trace.line.width)
      clipped.append(
        node("path", {
          class: "curve",
          d,
          fill: "none",
          stroke: trace.line.color,
          "stroke-width": trace.line.width,
          "stroke-linecap": "round",
          "stroke-dasharray": /\d/.test(trace.line.dash) ? trace.line.dash : "none",
        }),
      );
  });
  svg.append(
    node("line", {
      x1: margin.l,
      x2: width - margin.r,
      y1: margin.t + down,
      y2: margin.t + down,
      stroke: T.css("--axis"),
    }),
  );
  plot.replaceChildren(svg);
}
export const removePreview = (plot) => plot.querySelectorAll(".preview").forEach((svg) => svg.remove());
