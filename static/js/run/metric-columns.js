/* Columns of any metrics of the run, on the chosen axis, fetched when a chart needs them.
     const columns = metricColumns(view, 400);  await columns.load(["actor/entropy"], step)
     columns.get("actor/entropy") → {step, x, y, low, high}
     columns.whole("actor/entropy")   the whole run's also while a range is zoomed
   `step`: the run's step up to which the columns are needed. A caller keeps to one step until all is loaded: while requests take
   longer than a step, no column is as new as the run.
   Beyond the number of points, rows merge many steps: `low` and `high` are their extremes. For a zoomed range, finer rows are fetched. */
import * as api from "../core/api.js";
import { run } from "./store.js";

const KEYS_A_REQUEST = 50;

export function metricColumns(view, points) {
  const all = new Map(); // key → { rows, axis, step }
  const near = new Map(); // key → { rows, axis, zoom, step }

  const isOf = (entry) => Boolean(entry) && entry.axis === view.axis;
  const isWhole = (key, step) => isOf(all.get(key)) && all.get(key).step === step;
  function isNear(key) {
    const { rows, step } = all.get(key);
    if (!view.zoomed || !rows.low) return true;
    return isOf(near.get(key)) && near.get(key).zoom === view.zoomed && near.get(key).step === step;
  }
  const whole = (key) => (isOf(all.get(key)) ? all.get(key).rows : null);
  function get(key) {
    const entry = near.get(key);
    return view.zoomed && isOf(entry) && entry.zoom === view.zoomed ? entry.rows : whole(key);
  }
  const isFresh = (key, step) => isWhole(key, step) && isNear(key);

  async function fetch(keys, range) {
    const { axis } = view;
    const query = { keys: keys.join(","), x: axis, max_points: points, ...range };
    return { axis, series: (await api.get(`runs/${run.id}/metrics`, query)).series };
  }
  async function loadWhole(keys, step) {
    const { axis, series } = await fetch(keys, {});
    keys.forEach((key) => all.set(key, { rows: placed(series, key), axis, step }));
  }
  async function loadNear(keys) {
    const zoom = view.zoomed;
    const { step } = all.get(keys[0]);
    const bounds = keys.map((key) => stepsIn(all.get(key).rows, zoom));
    const since_step = Math.min(...bounds.map(([from]) => from));
    const { axis, series } = await fetch(keys, { since_step, to_step: Math.max(...bounds.map(([, to]) => to)) });
    keys.forEach((key) => near.set(key, { rows: placed(series, key), axis, zoom, step }));
  }
  /* Fetches what is missing of the keys, in requests of bounded size. Resolves to the keys that have changed. */
  async function load(keys, step) {
    const outdated = keys.filter((key) => !isWhole(key, step)).slice(0, KEYS_A_REQUEST);
    if (outdated.length) {
      await loadWhole(outdated, step);
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
/* The steps that a range of the axis covers, with a row more on both sides: `[after, to]`. */
function stepsIn({ x, step }, [from, to]) {
  const first = x.findIndex((place) => place >= from);
  const last = x.findLastIndex((place) => place <= to);
  const at = (i) => step[Math.max(0, Math.min(step.length - 1, i))];
  return [Math.max(0, at(first < 0 ? step.length : first - 1) - 1), at(last + 1)];
}
