/* Columns of any metrics of the run, on the chosen axis, fetched when a chart needs them.
     const columns = metricColumns(view, 400);  await columns.load(["actor/entropy"], versionOf(run.summary))
     columns.get("actor/entropy") → {step, x, y, low, high}
     columns.whole("actor/entropy")   the whole run's also while a range is zoomed
   `version`: up to where the columns are needed. A caller keeps to one until all is loaded: while requests take longer than a step,
   no column is as new as the run.
   Beyond the number of points, rows merge many steps: `low` and `high` are their extremes. For a zoomed range, finer rows are fetched. */
import * as api from "../core/api.js";
import { run } from "./store.js";

const KEYS_A_REQUEST = 50;
/* Attempt and step: a new attempt may train the same steps again. */
export const versionOf = ({ attempt, step }) => `${attempt} ${step}`;

export function metricColumns(view, points) {
  const all = new Map(); // key → { rows, axis, version }
  const near = new Map(); // key → { rows, axis, zoom, version }

  const isOf = (entry) => Boolean(entry) && entry.axis === view.axis;
  const isWhole = (key, version) => isOf(all.get(key)) && all.get(key).version === version;
  function isNear(key) {
    const { rows, version } = all.get(key);
    if (!view.zoomed || !rows.low || !reaches(rows, view.zoomed)) return true;
    return isOf(near.get(key)) && near.get(key).zoom === view.zoomed && near.get(key).version === version;
  }
  const whole = (key) => (isOf(all.get(key)) ? all.get(key).rows : null);
  function get(key) {
    const entry = near.get(key);
    return view.zoomed && isOf(entry) && entry.zoom === view.zoomed ? entry.rows : whole(key);
  }
  const isFresh = (key, version) => isWhole(key, version) && isNear(key);

  async function fetch(keys, range) {
    const { axis } = view;
    const query = { keys: keys.join(","), x: axis, max_points: points, ...range };
    return { axis, series: (await api.get(`runs/${run.id}/metrics`, query)).series };
  }
  async function loadWhole(keys, version) {
    const { axis, series } = await fetch(keys, {});
    keys.forEach((key) => all.set(key, { rows: placed(series, key), axis, version }));
  }
  async function loadNear(keys) {
    const zoom = view.zoomed;
    const { version } = all.get(keys[0]);
    const bounds = keys.map((key) => stepsIn(all.get(key).rows, zoom));
    const since_step = Math.min(...bounds.map(([from]) => from));
    const { axis, series } = await fetch(keys, { since_step, to_step: Math.max(...bounds.map(([, to]) => to)) });
    keys.forEach((key) => near.set(key, { rows: placed(series, key), axis, zoom, version }));
  }
  /* Fetches what is missing of the keys, in requests of bounded size. Resolves to the keys that have changed. */
  async function load(keys, version) {
    const outdated = keys.filter((key) => !isWhole(key, version)).slice(0, KEYS_A_REQUEST);
    if (outdated.length) {
      await loadWhole(outdated, version);
      return outdated;
    }
    const finer = keys.filter((key) => !isNear(key)).slice(0, KEYS_A_REQUEST);
    if (finer.length) await loadNear(finer);
    return finer;
  }
  return { get, whole, isFresh, load };
}
/* Rows with a known position on the axis. */
function placed(series, key) {
  const rows = Object.hasOwn(series, key) ? series[key] : { step: [], x: [], y: [] };
  return Object.fromEntries(
    Object.entries(rows).map(([name, list]) => [name, list.filter((_, i) => rows.x[i] !== null)]),
  );
}
/* Whether a column overlaps a range of the axis; some metrics end before others. */
const reaches = ({ x }, [from, to]) => x.length > 0 && x[0] <= to && x[x.length - 1] >= from;
/* The steps that a range of the axis covers, with a row more on both sides: `[after, to]`. */
function stepsIn({ x, step }, [from, to]) {
  const first = x.findIndex((place) => place >= from);
  const last = x.findLastIndex((place) => place <= to);
  const at = (i) => step[Math.max(0, Math.min(step.length - 1, i))];
  return [Math.max(0, at(first - 1) - 1), at(last + 1)];
}
