/* Plotly in the design of OPPO.
     T.layout({ height: 240, yaxis: { title: … } })   a layout for the current theme
     T.config                                         no modebar, no logo, responsive
     T.run(3) / .phase("decode") / .idle("tail")      colours, resolved from tokens.css
     T.onChange(redraw)                               calls redraw when the theme changes
   CSP: no inline script; Plotly's own style sheets need two hashes in style-src (oppo_platform/web/headers.py). */
import { Plotly } from "./plotly.js";
import * as f from "../core/format.js";

const DOT_PX = 6;
const PHASES = [
  "decode",
  "actor-forward",
  "reward-prefill",
  "reference-prefill",
  "critic-prefill",
  "update-actor",
  "update-critic",
  "weight-sync",
  "checkpoint",
];
const IDLE = ["decode", "tail", "score", "update", "weights", "data", "checkpoint", "eval", "unknown"];
const HATCH = {
  decode: "/",
  tail: "x",
  score: "\\",
  update: "-",
  weights: "|",
  data: ".",
  checkpoint: "+",
  eval: "/",
  unknown: ".",
};

let probe;
function css(name) {
  // resolves var(), light-dark() and color-mix()
  if (!probe) {
    probe = document.createElement("span");
    probe.hidden = true;
    document.documentElement.appendChild(probe);
  }
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
function fade(color, alpha) {
  const [r, g, b] = color.match(/[\d.]+/g).map(Number);
  return `rgba(${r},${g},${b},${alpha})`;
}
const text = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const run = (i) => css(`--run-${((i - 1) % 8) + 1}`);
const phase = (name) => css(`--phase-${name}`);
const idle = (name) => css(`--idle-${name}`);

function axis(more) {
  return Object.assign(
    {
      gridcolor: css("--grid"),
      linecolor: css("--axis"),
      zerolinecolor: css("--grid"),
      zerolinewidth: 1,
      showline: false,
      ticks: "",
      tickfont: { size: 11, color: css("--text-3") },
      automargin: false,
      fixedrange: false,
      title: { font: { size: 11, color: css("--text-3") }, standoff: 4 },
    },
    more,
  );
}
function merge(base, extra) {
  for (const key in extra || {}) {
    const v = extra[key];
    const isPlain = v && typeof v === "object" && !Array.isArray(v);
    base[key] = isPlain ? merge(base[key] && typeof base[key] === "object" ? base[key] : {}, v) : v;
  }
  return base;
}
function layout(extra) {
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: text("--font"), size: 12, color: css("--text-2") },
    colorway: [1, 2, 3, 4, 5, 6, 7, 8].map(run),
    margin: { l: 46, r: 14, t: 8, b: 26 },
    showlegend: false, // lines are labelled at their ends, or in a table
    hovermode: "x",
    hoverdistance: -1,
    spikedistance: -1,
    dragmode: "zoom",
    hoverlabel: {
      bgcolor: css("--overlay"),
      bordercolor: css("--border"),
      align: "left",
      namelength: -1,
      font: { family: text("--font"), size: 12, color: css("--text") },
    },
    uirevision: "keep", // live updates keep the user's zoom
    transition: { duration: 0 },
    xaxis: axis({
      showgrid: false,
      showline: true,
      showspikes: true,
      spikemode: "across",
      spikesnap: "hovered data",
      spikethickness: 1,
      spikedash: "solid",
      spikecolor: css("--cursor"),
    }),
    yaxis: axis({ nticks: 5, side: "left", ticklabelstandoff: 4 }),
    newshape: { line: { color: css("--accent") } },
  };
  return merge(base, extra);
}
const config = {
  displayModeBar: false,
  displaylogo: false,
  responsive: true,
  doubleClick: "reset",
  scrollZoom: false,
  showTips: false,
};

function band(x, lo, hi, color, alpha, name) {
  // two traces: a filled min/max band
  const edge = { x, mode: "lines", line: { width: 0, color }, hoverinfo: "skip", showlegend: false, name };
  return [
    { ...edge, y: lo },
    { ...edge, y: hi, fill: "tonexty", fillcolor: fade(color, alpha) },
  ];
}
function idleArea(x, y, cause, group) {
  // one cause in a stack: hatched, as on the timeline
  const color = idle(cause);
  return {
    x,
    y,
    name: cause,
    mode: "lines",
    stackgroup: group,
    line: { width: 0.75, color },
    fillpattern: {
      shape: HATCH[cause],
      fgcolor: color,
      bgcolor: fade(color, 0.14),
      size: 7,
      solidity: 0.24,
      fillmode: "overlay",
    },
  };
}
function ema(y, weight) {
  if (!weight) return y;
  // bias-corrected, as in other trackers; by differences, so that a constant stays exactly constant
  let mean = 0;
  let n = 0;
  return y.map((v) => {
    if (v === null) return null; // not finite when it was recorded: a gap, not a zero
    n = weight * n + (1 - weight);
    mean += ((1 - weight) / n) * (v - mean);
    return mean;
  });
}
/* Points without a neighbour as dots, such as those of a run's first step: nothing is seen of a line with one point. */
function dotted(data) {
  const isAlone = ({ y, stackgroup }, i) =>
    f.known(y[i]) && !f.known(y[i - 1]) && !f.known(y[i + 1]) && !(stackgroup && !y[i]);
  const isLine = (t) => t.mode === "lines" && t.line.width > 0;
  return data.map((t) => {
    const sizes = isLine(t) ? t.x.map((_, i) => (isAlone(t, i) ? DOT_PX : 0)) : [];
    if (!sizes.some(Boolean)) return t;
    const marker = { color: t.line.color, size: sizes, opacity: 1, line: { width: 0 } };
    return { ...t, mode: "lines+markers", marker, cliponaxis: false };
  });
}
/* A cross at the last finite value wherever a value is NaN or infinite. */
function gaps({ step, x, y }) {
  const at = y.flatMap((value, i) => (value === null ? [i] : []));
  if (!at.length) return [];
  let last = y.find(f.known) ?? 0;
  const heights = y.map((value) => {
    last = value ?? last;
    return last;
  });
  return [
    {
      x: at.map((i) => x[i]),
      y: at.map((i) => heights[i]),
      mode: "markers",
      marker: { symbol: "x-thin", size: 7, line: { width: 1.5, color: css("--bad") } },
      text: at.map((i) => f.whole(step[i])),
      hovertemplate: "NaN or infinite, step %{text}<extra></extra>",
      cliponaxis: false,
    },
  ];
}
/* Returns a function that removes the listeners. */
function onChange(redraw) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = new MutationObserver(redraw);
  dark.addEventListener("change", redraw);
  chosen.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  return () => {
    dark.removeEventListener("change", redraw);
    chosen.disconnect();
  };
}

/* Charts with one cursor and one zoom, which come and go.
     const linked = T.linked(read, zoomed);  linked.add(plot);  linked.remove(plot);  linked.mark(x);  linked.at
   `add`, called after every drawing, places the cursor, and returns whether the chart is new. `read(x, e)` is called on every
   move of the pointer with Plotly's event, and with null alone on leave; `zoomed(e)` with Plotly's event for the chart
   that the user zoomed. `at`: where the cursor is, or null. */
function linked(read, zoomed) {
  const plots = new Set();
  const watched = new WeakSet(); // a purged plot keeps its DOM listeners and loses Plotly's
  let busy = false;
  let at = null;
  function point(x, e) {
    move(x);
    read(at, e);
  }
  function move(x) {
    at = x;
    mark(plots, at);
  }
  function zoom(plot, e) {
    if (busy || !("xaxis.range[0]" in e || "xaxis.autorange" in e)) return;
    busy = true;
    zoomed(e);
    const to =
      "xaxis.autorange" in e
        ? { "xaxis.autorange": true }
        : { "xaxis.range": [e["xaxis.range[0]"], e["xaxis.range[1]"]] };
    const others = [...plots].filter((other) => other !== plot);
    Promise.all(others.map((other) => Plotly.relayout(other, to))).finally(() => {
      busy = false;
      mark(plots, at);
    });
  }
  function add(plot) {
    mark([plot], at);
    if (plots.has(plot)) return false;
    plots.add(plot);
    // Plotly emits no unhover while a drag covers the plot, and repeats the last hover when it redraws after one that ended elsewhere
    plot.on("plotly_hover", (e) => plot.matches(":hover") && point(e.points[0].x, e));
    plot.on("plotly_unhover", () => point(null));
    if (!watched.has(plot)) plot.addEventListener("mouseleave", () => plots.has(plot) && point(null));
    watched.add(plot);
    plot.on("plotly_relayout", (e) => zoom(plot, e));
    plot.on("plotly_doubleclick", () => zoomed({ "xaxis.autorange": true })); // Plotly's own goes to the first range drawn
    return true;
  }
  return {
    add,
    remove: (plot) => plots.delete(plot),
    mark: move,
    get at() {
      return at;
    },
  };
}
function mark(plots, x) {
  // an SVG line over the plot: cheaper than a relayout
  plots.forEach((plot) => {
    const full = plot._fullLayout;
    const svg = plot.querySelector(".main-svg");
    let line = plot.querySelector("line.linked-cursor");
    if (!line) {
      line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      line.setAttribute("class", "linked-cursor");
      svg.appendChild(line);
    }
    if (x === null || x < full.xaxis.range[0] || x > full.xaxis.range[1])
      return line.setAttribute("visibility", "hidden");
    const px = full.margin.l + full.xaxis.d2p(x);
    const top = full.margin.t;
    Object.entries({
      x1: px,
      x2: px,
      y1: top,
      y2: top + full.yaxis._length,
      stroke: css("--cursor"),
      "stroke-width": 1,
      "stroke-dasharray": "2 2",
      visibility: "visible",
    }).forEach(([k, v]) => line.setAttribute(k, v));
  });
}

export {
  PHASES,
  IDLE,
  HATCH,
  css,
  fade,
  run,
  phase,
  idle,
  layout,
  axis,
  config,
  band,
  idleArea,
  ema,
  dotted,
  gaps,
  onChange,
  linked,
};
