/* Converts the API's reply to the curves of the page: one per run, or one per group with its mean and band. Pure; charts, the
   cursor's table and the CSV use them. */
import { joined } from "../charts/axes.js";
import { runLabel, runPattern } from "../core/dom.js";
import { known } from "../core/format.js";

const REWARD = "critic/score/mean";
const KL = "objective/kl";
const MOST_PLACES = 400;
const MANY = 8; // points of a group's mean; runs above which all but one are faint

function placed(column) {
  // the rows with a known position on the axis
  const rows = column || { step: [], x: [], y: [] };
  return Object.fromEntries(
    Object.entries(rows).map(([name, list]) => [name, list.filter((_, i) => rows.x[i] !== null)]),
  );
}
/* Mean over the devices that have data at a step: attempts may have had others, and merged rows end at other steps. */
function bubbleOf(series) {
  const columns = Object.entries(series)
    .filter(([key]) => key.startsWith("bubble/"))
    .map(([, column]) => placed(column));
  const { step, x } = joined(columns);
  const mean = (at) => {
    const ys = columns.map((c) => valueAt({ x: c.step, y: c.y }, at)).filter(known);
    return ys.length ? (100 * ys.reduce((a, b) => a + b, 0)) / ys.length : null;
  };
  return { x, step, y: step.map(mean) };
}
const PICK = { reward: (s) => placed(s[REWARD]), kl: (s) => placed(s[KL]), bubble: bubbleOf };
/* The name of the chart of a further metric, which may itself be called "reward". */
const chartOf = (key) => `metric:${key}`;
const metricOf = (name) => (name.startsWith("metric:") ? name.slice("metric:".length) : null);
function columnOf(name, series) {
  const key = metricOf(name);
  if (key === null) return PICK[name](series);
  return placed(Object.hasOwn(series, key) ? series[key] : null);
}

/* An exponential moving average whose memory is a length on the axis, not a number of points: a value `memory` back has the
   weight e⁻¹. So a curve looks the same from 300 buckets and from 10,000 points. Starts at the first value; gaps stay gaps. */
function smooth(x, y, memory) {
  if (!(memory > 0)) return y;
  let mean = null;
  let at = 0;
  return y.map((value, i) => {
    if (value === null) return null;
    mean = mean === null ? value : mean + (1 - Math.exp(-Math.max(0, x[i] - at) / memory)) * (value - mean);
    at = x[i];
    return mean;
  });
}
/* The value at a position, interpolated linearly; null outside the curve and next to a gap. */
function valueAt(curve, x) {
  const { x: xs, y: ys } = curve;
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  let lo = 0;
  let hi = xs.length - 1;
  while (hi - lo > 1) {
    const mid = (lo + hi) >> 1;
    if (xs[mid] <= x) lo = mid;
    else hi = mid;
  }
  if (x <= xs[lo]) return ys[lo];
  if (x >= xs[hi]) return ys[hi];
  if (ys[lo] === null || ys[hi] === null) return null;
  return ys[lo] + ((x - xs[lo]) / (xs[hi] - xs[lo])) * (ys[hi] - ys[lo]);
}
function places(curves) {
  // positions of a mean: every point of every run, thinned evenly
  const all = [...new Set(curves.flatMap((c) => c.x))].sort((a, b) => a - b);
  if (all.length <= MOST_PLACES) return all;
  return Array.from({ length: MOST_PLACES }, (_, i) => all[Math.round((i * (all.length - 1)) / (MOST_PLACES - 1))]);
}
/* Mean over runs where at least half of them have a value; otherwise a curve would jump when the first runs end. Band: minimum
   to maximum, or, with three or more runs, the mean ± its standard error. */
function averaged(curves, band) {
  const out = { x: [], y: [], low: [], high: [], n: [] };
  places(curves).forEach((x) => {
    const ys = curves.map((c) => valueAt(c, x)).filter(known);
    const n = ys.length;
    if (!n || 2 * n < curves.length) return;
    const mean = ys.reduce((a, b) => a + b, 0) / n;
    const error = Math.sqrt(ys.reduce((a, y) => a + (y - mean) ** 2, 0) / (n - 1) / n);
    const spread =
      band === "se" ? (n >= 3 ? [mean - error, mean + error] : [null, null]) : [Math.min(...ys), Math.max(...ys)];
    [x, mean, ...spread, n].forEach((value, i) => out[["x", "y", "low", "high", "n"][i]].push(value));
  });
  return out;
}
/* The curves and table rows: {key, label, count, ids, colour, dash, hit, speedup}. */
function entries(reply, colours) {
  const dash = (k, colour, count) => (count > MANY ? runPattern(colour) : k % 4);
  if (reply.groups.length) {
    return reply.groups.map((g, k) => ({
      key: `group-${k}`,
      label: g.value,
      count: g.runs.length,
      ids: g.runs,
      colour: k + 1,
      dash: dash(k, k + 1, reply.groups.length),
      hit: g.reached ? g : null,
      group: g,
    }));
  }
  return reply.runs.map((run, k) => ({
    key: run.id,
    label: runLabel(run),
    count: 1,
    ids: [run.id],
    colour: colours.get(run.id),
    dash: dash(k, colours.get(run.id), reply.runs.length),
    hit: reply.time_to_target[run.id],
    group: null,
  }));
}
function furthest(reply) {
  return Math.max(
    0,
    ...Object.values(reply.series)
      .flatMap((s) => (s[REWARD] && s[REWARD].x.length ? [s[REWARD].x[s[REWARD].x.length - 1]] : []))
      .filter(known),
  );
}
/* The curves of one chart: `runs` by id, and one per entry. `size`: units of the reply's x per unit of the axis. */
function curves(name, reply, listed, view, size) {
  const runs = new Map();
  reply.runs.forEach((run) => {
    const column = columnOf(name, reply.series[run.id] || {});
    const x = column.x.map((place) => place / size);
    const memory = (view.smooth / 100) * (x.length ? x[x.length - 1] - x[0] : 0); // of its own length: a short run keeps its shape
    const counted = name === "reward" && view.counted && (reply.counted || {})[run.id];
    runs.set(run.id, {
      x,
      y: counted ? counted.filter((_, i) => reply.series[run.id][REWARD].x[i] !== null) : smooth(x, column.y, memory),
      raw: column.y,
      low: column.low,
      high: column.high,
      step: column.step,
    });
  });
  const shown = listed.map((entry) => ({
    entry,
    ...(entry.group
      ? averaged(
          entry.ids.map((id) => runs.get(id)),
          view.band,
        )
      : runs.get(entry.ids[0])),
  }));
  return { runs, shown };
}
const KEYS = [REWARD, KL, "bubble/*"];
export { KEYS, MANY, chartOf, metricOf, smooth, valueAt, averaged, entries, curves, furthest };
