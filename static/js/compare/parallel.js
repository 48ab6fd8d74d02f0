/* Parallel coordinates as plain SVG: one line per run through its differing settings and its results. */
import { runColour, runLabel } from "../core/dom.js";
import * as f from "../core/format.js";

const NS = "http://www.w3.org/2000/svg";
const TOP = 34;
const FOOT = 14;
const HEIGHT = 280;
const SIDE = 64;
const GAP = 104;
const MOST_SETTINGS = 8;
const RESULTS = [
  ["final reward", "reward_last_tenth", (x) => f.fixed(x, 2)],
  ["step time", "step_s", (x) => `${f.figure(x)} s`],
  ["bubble", "bubble", (x) => f.percent(x)],
];

function make(tag, attributes, text) {
  const node = document.createElementNS(NS, tag);
  Object.entries(attributes).forEach(([name, value]) => {
    if (value !== null) node.setAttribute(name, value);
  });
  if (text !== undefined) node.textContent = text;
  return node;
}
/* Numbers scaled to 0…1; logarithmically if they are positive and span two decades. */
function numbers(list, write) {
  const known = list.filter(f.known);
  const lo = Math.min(...known);
  const hi = Math.max(...known);
  const log = lo > 0 && hi / lo >= 100;
  const g = log ? Math.log : (x) => x;
  const at = (x) => (!f.known(x) ? null : lo === hi ? 0.5 : (g(x) - g(lo)) / (g(hi) - g(lo)));
  return { at, ticks: known.length ? [...new Set([lo, hi])].map((x) => [at(x), write(x)]) : [], log };
}
function words(list) {
  const all = [...new Set(list)].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const at = (text) => (all.length < 2 ? 0.5 : all.indexOf(text) / (all.length - 1));
  return { at, ticks: all.length > 8 ? [] : all.map((text) => [at(text), text]), log: false };
}
function axes(reply) {
  const settings = reply.config_diff.slice(0, MOST_SETTINGS).map((d) => {
    const texts = reply.runs.map((run) => d.values[run.id]);
    const numeric = texts.every((text) => text.trim() !== "" && Number.isFinite(Number(text)));
    const values = numeric ? texts.map(Number) : texts;
    return {
      title: d.path.startsWith("fork.") ? d.path : d.path.split(".").pop(),
      full: d.path,
      values,
      scale: numeric ? numbers(values, f.plain) : words(values),
    };
  });
  const results = RESULTS.map(([title, key, write]) => {
    const values = reply.runs.map((run) => reply.figures[run.id][key]);
    return { title, full: title, values, scale: numbers(values, write), result: true };
  });
  return [...settings, ...results.filter((axis) => axis.values.some(f.known))];
}
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function draw(holder, v, { onPoint, onPick }) {
  const all = axes(v.reply);
  const gap = Math.max(GAP, (holder.clientWidth - 2 * SIDE) / Math.max(1, all.length - 1));
  const width = 2 * SIDE + gap * (all.length - 1);
  const svg = make("svg", {
    class: "parallel",
    width,
    height: HEIGHT,
    viewBox: `0 0 ${width} ${HEIGHT}`,
    role: "img",
    "aria-label": `Parallel coordinates of ${v.reply.runs.length} runs over ${all.map((axis) => axis.title).join(", ")}; the tables have the same data.`,
  });
  const y = (share) => HEIGHT - FOOT - share * (HEIGHT - TOP - FOOT);
  const x = (i) => SIDE + i * gap;
  const entryOf = new Map(v.entries.flatMap((entry) => entry.ids.map((id) => [id, entry])));
  const lines = make("g", {});
  v.reply.runs.forEach((run, k) => {
    let d = "";
    let pen = "M";
    all.forEach((axis, i) => {
      const share = axis.scale.at(axis.values[k]);
      if (share === null) {
        pen = "M";
        return;
      }
      d += `${pen}${x(i).toFixed(1)},${y(share).toFixed(1)}`;
      pen = "L";
    });
    const on = run.id === v.view.picked;
    const line = make("path", {
      d: d || "M0,0",
      "data-run": runColour(entryOf.get(run.id).colour),
      "data-pattern": entryOf.get(run.id).dash,
      "data-key": run.id,
      class: on ? "on" : v.view.picked || v.reply.runs.length > 8 ? "faint" : null,
    });
    line.append(make("title", {}, runLabel(run)));
    line.addEventListener("pointerenter", () => onPoint(run.id));
    line.addEventListener("pointerleave", () => onPoint(null));
    line.addEventListener("click", () => onPick(run.id));
    if (on) lines.append(line);
    else lines.prepend(line);
  });
  svg.append(lines);
  all.forEach((axis, i) => {
    const title = make(
      "text",
      { class: axis.result ? "result" : "setting", x: x(i), y: 14, "text-anchor": "middle" },
      cut(axis.title, 20) + (axis.scale.log ? " (log)" : ""),
    );
    title.append(make("title", {}, axis.full));
    svg.append(make("path", { class: "axis", d: `M${x(i)},${TOP}V${HEIGHT - FOOT}` }), title);
    axis.scale.ticks.forEach(([share, text]) =>
      svg.append(
        make(
          "text",
          { class: "tick-text", x: x(i) + 5, y: y(share) + (share > 0.9 ? -4 : share < 0.1 ? 11 : 4) },
          cut(text, 15),
        ),
      ),
    );
  });
  holder.replaceChildren(svg);
}
function point(holder, id) {
  holder
    .querySelectorAll("path[data-key]")
    .forEach((line) => line.classList.toggle("pointed", Number(line.dataset.key) === id));
}
export { draw, point, MOST_SETTINGS };
