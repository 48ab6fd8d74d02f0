/* The metrics of one run, by column, growing while it trains: only new steps are fetched.
     const series = runSeries(runId, ["objective/kl", "bubble/*"]);  await series.update(summary);  series.get("objective/kl") → {step, x, y, low, high, thinned}
     series.whole.get("objective/kl")   the whole run's also while a range is zoomed
   In a long run a row merges many steps: y is their mean, low and high their extremes. Zooming fetches the steps themselves. */
import * as api from "../core/api.js";
import { run } from "./store.js";

const MAX_POINTS = 2000;
const REFETCH_AT = 3000; // appended points are raw; beyond this number all are fetched again, thinned by the server

export function runSeries(runId, keys) {
  const hasResumed = run.resumeDetector();
  let columns = {};
  let lastStep = 0;
  let axis = "step";
  let refetch = true;
  let near = null;
  let range = null; // the columns of a zoomed range of merged steps

  const empty = { step: [], x: [], y: [], low: [], high: [], thinned: false };
  const whole = (more) => ({ low: more.y, high: more.y, ...more, thinned: "low" in more });
  const longest = () => Math.max(0, ...Object.values(columns).map((c) => c.step.length));

  function append(reply) {
    for (const [key, more] of Object.entries(reply.series)) {
      if (!columns[key]) {
        columns[key] = whole(more);
        continue;
      }
      const have = columns[key];
      const rows = whole(more);
      const from = have.step.length ? rows.step.findIndex((s) => s > have.step[have.step.length - 1]) : 0;
      if (from < 0) continue;
      ["step", "x", "y", "low", "high"].forEach((c) => {
        have[c] = have[c].concat(rows[c].slice(from));
      });
    }
    lastStep = Math.max(lastStep, reply.last_step || 0);
  }
  /* Resolves to whether anything is new. */
  async function update(summary) {
    if (hasResumed(summary)) refetch = true;
    const all = refetch || longest() > REFETCH_AT;
    if (!all && summary.step <= lastStep) return false;
    const unit = axis;
    const reply = await fetch({ since_step: all ? 0 : lastStep });
    if (unit !== axis) return update(summary); // another axis was chosen meanwhile
    if (all) {
      columns = {};
      lastStep = 0;
      refetch = false;
    }
    const before = lastStep;
    append(reply);
    if (range && lastStep > before) await zoom(range);
    return all || lastStep > before;
  }
  const fetch = (query) =>
    api.get(`runs/${runId}/metrics`, { keys: keys.join(","), x: axis, max_points: MAX_POINTS, ...query });
  function setAxis(name) {
    axis = name;
    refetch = true;
    near = range = null;
  }

  /* Fetches the steps of a range of the axis, `[from, to]`; null drops them. Resolves to whether anything changed. */
  async function zoom(requested) {
    const had = near !== null;
    range = requested;
    const base = Object.values(columns)
      .filter((c) => c.thinned)
      .sort((a, b) => b.step.length - a.step.length)[0];
    if (!requested || !base) {
      near = null;
      return had;
    }
    const [from, to] = [nearest(base.x, requested[0]) - 2, nearest(base.x, requested[1]) + 2].map(
      (i) => base.step[Math.max(0, Math.min(base.step.length - 1, i))],
    );
    const reply = await fetch({ since_step: Math.max(0, from - 1), to_step: to });
    if (range !== requested) return false; // another zoom was faster
    near = Object.fromEntries(Object.entries(reply.series).map(([key, more]) => [key, whole(more)]));
    return true;
  }

  /* The index of the point nearest to `x`, -1 if there is none. */
  function nearest(list, x) {
    let lo = 0;
    let hi = list.length - 1;
    if (hi < 0) return -1;
    while (lo < hi) {
      const mid = (lo + hi) >> 1;
      if (list[mid] < x) lo = mid + 1;
      else hi = mid;
    }
    return lo > 0 && x - list[lo - 1] < list[lo] - x ? lo - 1 : lo;
  }
  function reader(source) {
    const get = (key) => source()[key] || empty;
    /* `key` at the steps of another column; `otherwise` where it has no point. Thinned columns keep different steps, so the
       nearest within one gap counts. */
    function along(key, steps, otherwise) {
      const column = get(key);
      const gap = steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) : 1;
      return steps.map((step) => {
        const i = nearest(column.step, step);
        return i >= 0 && Math.abs(column.step[i] - step) < Math.max(1, gap) && column.y[i] !== null
          ? column.y[i]
          : otherwise;
      });
    }
    return { get, along, nearest };
  }
  return {
    ...reader(() => near || columns),
    whole: reader(() => columns),
    update,
    zoom,
    setAxis,
    get lastStep() {
      return lastStep;
    },
    get axis() {
      return axis;
    },
  };
}
