/* The charts of the Training tab: pure functions from the run's series to Plotly traces, layout and a reading. */
import { furthest } from "../charts/axes.js";
import { idleShares } from "./idle-shares.js";
import * as T from "../charts/plotly-theme.js";
import * as f from "../core/format.js";
import { run } from "./store.js";

const SCORE = "critic/score/mean";
const QUANTILES = ["p10", "p25", "p50", "p75", "p90"].map((q) => `response_length/${q}`);
const METRIC_OF_CHART = {
  kl: "objective/kl",
  entropy: "actor/entropy",
  clipfrac: "actor/pg_clipfrac",
  vf: "critic/vf_loss",
  ev: "critic/vf_explained_var",
  step_time: "timing_s/step",
  delta: "oppo/overcommit",
  chunk: "oppo/chunk_size",
};
const KEYS = [
  SCORE,
  ...QUANTILES,
  "response_length/mean",
  ...Object.values(METRIC_OF_CHART),
  "busy/*",
  "bubble/*",
  "idle_s/*",
];
const NEAR = 0.6; // fraction of an alert's threshold from which it is drawn
const BIG_CAUSES = ["decode", "update", "score", "tail"];
const SMALL_CAUSES = ["weights", "data", "checkpoint", "eval", "unknown"];

const endLabel = (x, y, text, color) => ({
  x,
  y,
  text,
  xanchor: "left",
  xshift: 4,
  showarrow: false,
  font: { size: 11, color: color || T.css("--text-3") },
});
const level = (y, color) => ({
  type: "line",
  xref: "paper",
  x0: 0,
  x1: 1,
  y0: y,
  y1: y,
  line: { color: color || T.css("--border-strong"), width: 1, dash: "dot" },
});
const levelLabel = (y, text, below) => ({
  xref: "paper",
  x: 0,
  y,
  text,
  showarrow: false,
  xanchor: "left",
  yanchor: below ? "top" : "bottom",
  font: { size: 11, color: T.css("--text-3") },
});
const last = (list) => list[list.length - 1];
const lastKnown = (list) => {
  for (let i = list.length - 1; i >= 0; i--) if (f.known(list[i])) return i;
  return -1;
};

/* The extremes of the steps that a row merges; with an outline, so that a spike of one step is visible. */
function spread(column, color) {
  if (!column.thinned) return [];
  return T.band(column.x, column.low, column.high, color, 0.16).map((trace) => ({
    ...trace,
    line: { width: 0.75, color: T.fade(color, 0.4) },
  }));
}
function smooth(column, v) {
  const color = T.run(v.colour);
  const soft = T.ema(column.y, v.weight);
  return {
    soft,
    data: [
      ...spread(column, color),
      {
        x: column.x,
        y: column.y,
        mode: "lines",
        line: { width: 1, color: T.fade(color, v.weight ? 0.28 : 1) },
        hoverinfo: "none",
      },
      { x: column.x, y: soft, mode: "lines", line: { width: 2, color }, hoverinfo: "none", visible: v.weight > 0 },
      ...T.gaps(column),
    ],
  };
}
/* Labels at the ends of lines, moved apart so that none covers another; `gap` in the axis' own units. */
function apart(labels, gap) {
  const sorted = labels.slice().sort((a, b) => a.y - b.y);
  for (let i = 1; i < sorted.length; i++) if (sorted[i].y - sorted[i - 1].y < gap) sorted[i].y = sorted[i - 1].y + gap;
  return labels;
}
function line(key, { axis = {}, digits = 2, unit = "", raw = true } = {}) {
  return (v) => {
    const column = v.series.get(key);
    const { soft, data } = smooth(column, v);
    const i = lastKnown(soft);
    const write = column.y.every((y) => Math.abs(y) < 0.1) ? f.figure : (y) => f.fixed(y, digits);
    const say = (k) => [
      write(soft[k]),
      `${unit}${raw && v.weight ? `${unit ? " · " : ""}raw ${write(column.y[k])}` : ""}`,
    ];
    return {
      column,
      data,
      odd: [column],
      layout: { yaxis: axis, annotations: i < 0 ? [] : [endLabel(column.x[i], soft[i], write(soft[i]))] },
      say,
    };
  };
}
function reward(v) {
  const made = line(SCORE, { axis: { nticks: 6 } })(v);
  const target = v.summary.target_reward;
  if (f.known(target)) {
    made.layout.shapes = [level(target)];
    made.layout.annotations.push(levelLabel(target, `target ${f.figure(target)}`));
    made.keep = [target];
    made.layout.yaxis = { ...made.layout.yaxis, range: around(made.column.y.concat(target)) };
  }
  return made;
}
/* The threshold of the team's alert, once the values come near it. */
function alertLine(made, values, limit, text) {
  const top = Math.max(...values.filter(f.known));
  if (!f.known(limit) || !(top > NEAR * limit)) return made;
  made.layout.shapes = [level(limit, T.css("--warn"))];
  made.layout.annotations = [...(made.layout.annotations || []), levelLabel(limit, text, top <= limit)];
  made.layout.yaxis = { ...made.layout.yaxis, range: [0, 1.1 * Math.max(top, limit)] };
  return { ...made, keep: [limit] };
}
function kl(v) {
  const made = line(METRIC_OF_CHART.kl, { axis: { rangemode: "tozero" }, unit: "nats" })(v);
  const limit = v.limits.kl;
  return alertLine(made, made.column.y, limit, `alert above ${f.plain(limit)}`);
}
function around(values) {
  // Plotly does not count lines drawn as shapes
  const known = values.filter(f.known);
  const lo = Math.min(...known);
  const hi = Math.max(...known);
  const room = 0.08 * (hi - lo || 1);
  return [lo - room, hi + room];
}
function length(v) {
  const columns = QUANTILES.map((key) => v.series.get(key));
  const p50 = columns[2];
  const color = T.run(v.colour);
  if (!p50.y.length)
    return line("response_length/mean", { digits: 0, unit: "tokens, mean", axis: { rangemode: "tozero" } })(v);
  const cap = v.spec.rollout && v.spec.rollout.max_new_tokens;
  const top = Math.max(...columns[4].y.filter(f.known));
  const names = ["p10", "p25", "p50", "p75", "p90"];
  const i = p50.x.length - 1;
  const capped = cap && top > 0.75 * cap;
  const high = 1.1 * (capped ? cap : top);
  const labels = apart(
    columns.map((c, k) => endLabel(p50.x[i], last(c.y), names[k])),
    0.055 * high,
  );
  const layout = { yaxis: { range: [0, high], tickformat: ",d" }, annotations: labels };
  if (capped) {
    // drawn only where it is reached
    layout.shapes = [level(cap)];
    layout.annotations.push(levelLabel(cap, `cap ${f.whole(cap)}`, true));
  }
  return {
    column: p50,
    odd: columns.slice(0, 5),
    layout,
    data: [
      ...T.band(p50.x, columns[0].y, columns[4].y, color, 0.14),
      ...T.band(p50.x, columns[1].y, columns[3].y, color, 0.24),
      { x: p50.x, y: p50.y, mode: "lines", line: { width: 2, color }, hoverinfo: "none" },
    ],
    say: (k) => [f.whole(p50.y[k]), `tokens, median · p90 ${f.whole(columns[4].y[k])}`],
  };
}
/* Only BIG_CAUSES are smoothed: spikes of checkpoints and evaluations must stay visible. */
function bubble(v) {
  const { base, bubble: whole, shares } = idleShares(v.series, run.devicesOf(v.summary.latest || {}), run.CAUSES);
  const i = base.step.length - 1;
  const rest = base.step.map((_, k) => SMALL_CAUSES.reduce((sum, cause) => sum + shares[cause][k], 0));
  const bands = [
    ...BIG_CAUSES.map((cause) => [cause, cause, T.ema(shares[cause], Math.min(v.weight, 0.7))]),
    ["rest", "unknown", rest],
  ];
  let under = 0;
  const labels =
    i < 0
      ? []
      : bands
          .map(([name, cause, y]) => {
            under += y[i];
            return { name, share: y[i], label: endLabel(base.x[i], under - y[i] / 2, name, T.idle(cause)) };
          })
          .filter((b) => b.share > 0.4)
          .map((b) => b.label);
  const top = Math.max(5, ...whole);
  const made = {
    column: base,
    odd: [{ y: whole }],
    data: bands.map(([name, cause, y]) =>
      Object.assign(T.idleArea(base.x, y, cause, "a"), { hoverinfo: "none", name }),
    ),
    layout: {
      yaxis: { ticksuffix: " %", rangemode: "tozero", range: [0, 1.1 * top] },
      annotations: apart(labels, 0.06 * top),
    },
    say: (k) => [`${whole[k].toFixed(1)} %`, mostly(shares, k)],
  };
  const limit = f.known(v.limits.bubble) ? 100 * v.limits.bubble : null;
  return alertLine(made, whole, limit, `alert above ${f.plain(limit)} %`);
}
function mostly(shares, k) {
  const [cause, share] = Object.entries(shares)
    .map(([c, y]) => [c, y[k]])
    .sort((a, b) => b[1] - a[1])[0];
  return share > 0 ? `of device time · ${cause} ${share.toFixed(1)} %` : "of device time";
}
const DASHES = ["solid", "6px,3px", "2px,3px", "8px,3px,2px,3px"];
function busy(v) {
  const devices = run.devicesOf(v.summary.latest || {});
  const color = T.run(v.colour);
  const columns = devices.map((d) => v.series.get(`busy/${d}`));
  const soft = columns.map((c) =>
    T.ema(
      c.y.map((y) => (y === null ? null : 100 * y)),
      v.weight,
    ),
  );
  const labels = apart(
    columns.map((c, k) => endLabel(last(c.x), last(soft[k]), devices[k])).filter((l) => f.known(l.y)),
    9,
  );
  return {
    column: furthest(columns),
    layout: { yaxis: { ticksuffix: " %", range: [0, 104], dtick: 25 }, annotations: labels.slice(0, 12) },
    data: columns.map((c, k) => ({
      x: c.x,
      y: soft[k],
      name: devices[k],
      mode: "lines",
      line: { width: 1.75, color, dash: DASHES[k % 4] },
      hovertemplate: "%{y:.0f} %",
    })),
    hover: "x unified",
  };
}
function stepped(key, controller, axis) {
  return (v) => {
    const column = v.series.get(key);
    const color = T.run(v.colour);
    const dots = v.decisions
      .filter((d) => d.controller === controller)
      .map((d) => ({ d, i: v.series.nearest(column.step, d.step) }))
      .filter(({ i }) => i >= 0);
    return {
      column,
      hover: "closest",
      layout: { yaxis: axis(column.y.filter(f.known)) },
      data: [
        { x: column.x, y: column.y, mode: "lines", line: { width: 2, color, shape: "hv" }, hoverinfo: "none" },
        {
          x: dots.map(({ i }) => column.x[i]),
          y: dots.map(({ d }) => d.new),
          mode: "markers",
          marker: {
            size: dots.map(({ d }) => (d.new === d.old ? 5 : 8)),
            color: T.css("--surface"),
            line: { color, width: dots.map(({ d }) => (d.new === d.old ? 1 : 2)) },
          },
          text: dots.map(({ d }) => wrapped(d)),
          hovertemplate: "%{text}<extra></extra>",
        },
      ],
    };
  };
}
function wrapped(d) {
  // Plotly interprets some HTML: the reason is shown as text
  const safe = d.reason.replace(/[<>&]/g, (c) => ({ "<": "‹", ">": "›", "&": "+" })[c]);
  const lines = safe.match(/.{1,60}(\s|$)/g) || [safe];
  return `<b>step ${d.step}: ${d.old === d.new ? `keeps ${f.plain(d.new)}` : `${f.plain(d.old)} → ${f.plain(d.new)}`}</b><br>${lines.join("<br>")}`;
}
const counts = (y) => ({ rangemode: "tozero", range: [0, Math.max(4, ...y) * 1.15], tickformat: ",d" });
function powers(y) {
  const lo = Math.floor(Math.log2(Math.max(1, Math.min(...y, 64)))) - 1;
  const hi = Math.ceil(Math.log2(Math.max(...y, 2))) + 1;
  const ticks = Array.from({ length: Math.max(1, hi - lo + 1) }, (_, k) => 2 ** (lo + k)).filter((t) => t >= 1);
  return { type: "log", tickvals: ticks, range: [Math.log10(ticks[0] * 0.8), Math.log10(last(ticks) * 1.2)] };
}
const share = { axis: { rangemode: "tozero", tickformat: ".2f" }, digits: 3, raw: false };
const CHARTS = {
  reward,
  kl,
  length,
  bubble,
  entropy: line(METRIC_OF_CHART.entropy, { raw: false }),
  clipfrac: line(METRIC_OF_CHART.clipfrac, share),
  vf: line(METRIC_OF_CHART.vf, { axis: { rangemode: "tozero" }, digits: 3, raw: false }),
  ev: line(METRIC_OF_CHART.ev, { raw: false }),
  delta: stepped(METRIC_OF_CHART.delta, "overcommit", counts),
  chunk: stepped(METRIC_OF_CHART.chunk, "chunk", powers),
  busy,
  step_time: line(METRIC_OF_CHART.step_time, {
    axis: { rangemode: "tozero", ticksuffix: " s" },
    digits: 2,
    unit: "s",
    raw: true,
  }),
};
export { KEYS, CHARTS };
