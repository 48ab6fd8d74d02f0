/* The charts of the Utilization tab: pure functions from the run's series to Plotly traces, layout and a reading. */
import { furthest } from "../charts/axes.js";
import { idleShares } from "./idle-shares.js";
import * as T from "../charts/plotly-theme.js";
import * as f from "../core/format.js";
import { run } from "./store.js";

const STEP = "timing_s/step";
/* Seconds of a step by phase, in the timeline's colours. */
const PHASES = [
  ["timing_s/gen", "decode", "decode"],
  ["timing_s/score", "score", "reward-prefill"],
  ["timing_s/adv", "advantages", "actor-forward"],
  ["timing_s/update_actor", "update actor", "update-actor"],
  ["timing_s/update_critic", "update critic", "update-critic"],
  ["timing_s/sync_weights", "weights", "weight-sync"],
  ["timing_s/save_checkpoint", "checkpoint", "checkpoint"],
  ["timing_s/eval", "eval", "weight-sync"],
];
const MEMORY = "perf/max_memory_allocated_gb";
const RESIDENT = "perf/rss_gb"; // on a GPU, and without one
/* The driver's metrics, each in the colour of the most related phase. */
const DRIVER = [
  ["utilization", "NVML", "decode"],
  ["sm_util", "SM active", "update-actor"],
  ["sm_occupancy", "SM occupancy", "actor-forward"],
  ["tensor_util", "tensor cores", "reward-prefill"],
  ["dram_util", "memory", "update-critic"],
];
const KEYS = [
  "busy/*",
  "bubble/*",
  "idle_s/*",
  "nvml/*",
  "gpm/*",
  "overlap_factor",
  "decode_occupancy",
  "perf/cpu_s",
  STEP,
  MEMORY,
  RESIDENT,
  ...PHASES.map(([key]) => key),
];
const RAW = ["checkpoint", "eval"]; // their spikes matter: never smoothed

const last = (list) => list[list.length - 1];
const lastKnown = (list) => {
  for (let i = list.length - 1; i >= 0; i--) if (f.known(list[i])) return i;
  return -1;
};
const endLabel = (x, y, text, color) => ({
  x,
  y,
  text,
  xanchor: "left",
  xshift: 4,
  showarrow: false,
  font: { size: 11, color: color || T.css("--text-3") },
});
const scaled = (column, by) => column.y.map((y) => (f.known(y) ? by * y : null));
/* Labels at the ends of lines, moved apart so that none covers another; `gap` in the axis' own units. */
function apart(labels, gap) {
  const sorted = labels.slice().sort((a, b) => a.y - b.y);
  for (let i = 1; i < sorted.length; i++) if (sorted[i].y - sorted[i - 1].y < gap) sorted[i].y = sorted[i - 1].y + gap;
  return labels;
}
const device = (name) => (v) => {
  const column = v.series.get(`busy/${name}`);
  const color = T.run(v.colour);
  const y = scaled(column, 100);
  const soft = T.ema(y, v.weight);
  return {
    column,
    data: [
      { x: column.x, y, mode: "lines", line: { width: 1, color: T.fade(color, 0.28) }, hoverinfo: "skip" },
      {
        x: column.x,
        y: soft,
        name: "busy",
        mode: "lines",
        line: { width: 2, color },
        hovertemplate: "%{y:.0f} %<extra></extra>",
      },
    ],
    layout: { margin: { l: 34, r: 8, t: 4, b: 22 }, yaxis: { range: [0, 105], dtick: 50 } },
  };
};
function causes(v) {
  const { base, shares } = idleShares(v.series, v.all, run.CAUSES);
  const i = base.x.length - 1;
  const bands = run.CAUSES.filter((cause) => shares[cause].some((share) => share > 0)).map((cause) => [
    cause,
    T.ema(shares[cause], RAW.includes(cause) ? 0 : v.weight),
  ]);
  const top = base.x.reduce(
    (most, _, k) =>
      Math.max(
        most,
        bands.reduce((sum, [, y]) => sum + y[k], 0),
      ),
    5,
  );
  const labels = [];
  let under = 0;
  const data = bands.map(([cause, y]) => {
    if (last(y) > 0.04 * top) labels.push(endLabel(base.x[i], under + last(y) / 2, cause, T.idle(cause)));
    under += last(y);
    return Object.assign(T.idleArea(base.x, y, cause, "a"), { hovertemplate: "%{y:.1f} %" });
  });
  return {
    column: base,
    data,
    layout: {
      hovermode: "x unified",
      margin: { r: 74 },
      yaxis: { ticksuffix: " %", rangemode: "tozero", range: [0, 1.1 * top] },
      annotations: apart(labels, 0.05 * top),
    },
  };
}
/* One metric: raw faint, smoothed on top, its newest value at the end. */
function line(key, { by = 1, write, axis }) {
  return (v) => {
    const column = v.series.get(key);
    const color = T.run(v.colour);
    const y = scaled(column, by);
    const soft = T.ema(y, v.weight);
    const i = lastKnown(soft);
    return {
      column,
      data: [
        {
          x: column.x,
          y,
          mode: "lines",
          line: { width: 1, color: T.fade(color, v.weight ? 0.28 : 1) },
          hoverinfo: "skip",
        },
        {
          x: column.x,
          y: soft,
          mode: "lines",
          line: { width: 2, color },
          text: soft.map(write),
          hovertemplate: "%{text}<extra></extra>",
        },
      ],
      layout: { yaxis: axis, annotations: i < 0 ? [] : [endLabel(column.x[i], soft[i], write(soft[i]))] },
      say: i < 0 ? "" : write(soft[i]),
    };
  };
}
/* Side by side, not stacked: phases overlap, so their sum exceeds the step. Rare phases are drawn as dots. */
function phases(v) {
  const whole = v.series.get(STEP);
  const top = Math.max(0, ...whole.y.filter(f.known));
  const data = shownPhases(v).map(([key, name, hue]) => {
    const column = v.series.get(key);
    const rare = RAW.includes(name);
    const color = T.phase(hue);
    return {
      x: column.x,
      y: rare ? column.y : T.ema(column.y, v.weight),
      name,
      mode: rare ? "markers" : "lines",
      marker: { size: 6, color, symbol: name === "eval" ? "diamond" : "square" },
      line: { width: 2, color },
      hovertemplate: "%{y:.2f} s",
    };
  });
  data.push({
    x: whole.x,
    y: whole.y,
    name: "whole step",
    mode: "lines",
    line: { width: 1.25, color: T.css("--text-2"), dash: "5px,3px" },
    hovertemplate: "%{y:.2f} s",
  });
  return {
    column: whole,
    data,
    layout: { hovermode: "x unified", yaxis: { ticksuffix: " s", rangemode: "tozero", range: [0, 1.1 * top || 1] } },
  };
}
/* (metric, label, colour) of the driver's metrics for the GPUs that the run holds; with several GPUs only NVML's. */
function driverLines(latest) {
  const metrics = Object.keys(latest)
    .filter((key) => /^(nvml|gpm)\/.*\/[a-z_]+$/.test(key) && f.known(latest[key]))
    .map((key) => ({
      key,
      device: key.split("/").slice(1, -1).join("/"),
      line: DRIVER.find(([name]) => key.endsWith(`/${name}`)),
    }))
    .filter(({ line }) => line)
    .sort((a, b) => DRIVER.indexOf(a.line) - DRIVER.indexOf(b.line));
  const several = new Set(metrics.map(({ device }) => device)).size > 1;
  return metrics
    .filter(({ line }) => !several || line[0] === "utilization")
    .map(({ key, device, line: [, name, hue] }, k) => ({
      key,
      name: several ? device : name,
      color: several ? T.run(k + 1) : T.phase(hue),
    }));
}
function driver(v) {
  const lines = driverLines(run.summary.latest || {}).map((one) => ({ ...one, column: v.series.get(one.key) }));
  const data = lines.map(({ name, color, column }) => ({
    x: column.x,
    y: T.ema(scaled(column, 100), v.weight),
    name,
    mode: "lines",
    line: { width: 2, color },
    hovertemplate: "%{y:.0f} %",
  }));
  return {
    column: furthest(lines.map(({ column }) => column)),
    data,
    layout: { hovermode: "x unified", yaxis: { ticksuffix: " %", range: [0, 104], dtick: 25 } },
  };
}
const shownPhases = (v) => PHASES.filter(([key]) => v.series.get(key).y.some((y) => y > 0));
const CHARTS = {
  causes,
  phases,
  driver,
  overlap: line("overlap_factor", {
    write: (y) => `${f.fixed(y, 2)}×`,
    axis: { ticksuffix: "×", rangemode: "tozero", nticks: 5 },
  }),
  occupancy: line("decode_occupancy", {
    by: 100,
    write: (y) => `${f.fixed(y, 0)} %`,
    axis: { ticksuffix: " %", range: [0, 104], dtick: 25 },
  }),
  cpu: line("perf/cpu_s", {
    write: (y) => `${f.fixed(y, 2)} s`,
    axis: { ticksuffix: " s", rangemode: "tozero", nticks: 5 },
  }),
  memory: line(MEMORY, { write: (y) => `${f.fixed(y, 1)} GB`, axis: { ticksuffix: " GB", rangemode: "tozero" } }),
  resident: line(RESIDENT, { write: (y) => `${f.fixed(y, 1)} GB`, axis: { ticksuffix: " GB", rangemode: "tozero" } }),
};
export { KEYS, MEMORY, RESIDENT, CHARTS, device, shownPhases, driverLines };
