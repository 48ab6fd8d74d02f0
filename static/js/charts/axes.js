/* The x axes of charts: steps, training time, trained tokens, device time, each in a unit that fits its length.
     axisOf("wall", 7300) → {size: 3600, word: "h", title: "hours of training", write}
       size: data units per axis unit; write(x): a position on the axis as text, "7.0 s" also where the axis has hours
     axisInAddress("step") → `?x=` of the address; keepAxis("wall", "step") writes it, unless it is the default */
import { duration, figure, plain, whole } from "../core/format.js";

const AXES = ["step", "wall", "tokens", "gpu_seconds"];

function timeAxis(top, what) {
  const [size, word, unit] =
    top > 7200 ? [3600, "h", "hours"] : top > 180 ? [60, "min", "minutes"] : [1, "s", "seconds"];
  return { size, word, title: `${unit} ${what}`, write: (x) => duration(x * size) };
}
export function axisOf(name, top) {
  if (name === "wall") return timeAxis(top, "of training");
  if (name === "gpu_seconds") return timeAxis(top, "of device time");
  if (name === "tokens") {
    const [size, word, unit] = top > 2e6 ? [1e6, "M", "million"] : [1000, "k", "thousand"];
    return { size, word, title: `${unit} response tokens`, write: (x) => `${figure(x)} ${word} tokens` };
  }
  return { size: 1, word: "", title: "step", write: (x) => `step ${whole(x)}` };
}
/* Round numbers in the axis' own unit, about `count` of them up to `share` of its end, where its title stands. */
export function roundTicks({ size, end }, { count = 8, share = 1, whole = false } = {}) {
  const length = end / size;
  const power = 10 ** Math.floor(Math.log10(length / count));
  const apart = Math.max(
    whole ? 1 : 0,
    [1, 2, 5, 10].map((n) => n * power).find((n) => length / n <= count),
  );
  const vals = Array.from({ length: Math.floor((share * length) / apart) + 1 }, (_, i) => i * apart);
  return {
    tickmode: "array",
    tickvals: vals.map((v) => v * size),
    ticktext: vals.map((v) => plain(Number(v.toPrecision(6)))),
  };
}
/* The longest of several columns: those of devices that a run no longer uses end earlier. */
export function furthest(columns) {
  const end = (column) => column.x[column.x.length - 1] || 0;
  return columns.reduce(
    (best, column) => (end(column) > end(best) ? column : best),
    columns[0] || { step: [], x: [], y: [] },
  );
}
/* The steps of all columns, without duplicates, with their places on the axis. */
export function joined(columns) {
  const at = new Map(columns.flatMap((c) => c.step.map((step, i) => [step, c.x[i]])));
  const step = [...at.keys()].sort((a, b) => a - b);
  return { step, x: step.map((s) => at.get(s)), y: [] };
}
export function axisInAddress(usual) {
  const param = new URLSearchParams(location.search).get("x");
  return AXES.includes(param) ? param : usual;
}
export function keepAxis(name, usual) {
  const url = new URL(location.href);
  if (name === usual) url.searchParams.delete("x");
  else url.searchParams.set("x", name);
  history.replaceState(null, "", url);
}
export { AXES };
