/* Compare page: fetches, draws, handles events. The choices are in the address (view.js). */
import { axisOf } from "../charts/axes.js";
import { Plotly, loadPlotly } from "../charts/plotly.js";
import * as T from "../charts/plotly-theme.js";
import { drawPreview, removePreview } from "../charts/svg-preview.js";
import { NAMES, build, outline } from "./charts.js";
import { KEYS, MANY, chartOf, curves, entries, furthest, metricOf } from "./curves.js";
import * as Download from "./download.js";
import { moreCharts } from "./more-charts.js";
import * as Parallel from "./parallel.js";
import { drawRuns, onAdd, runColours } from "./runs.js";
import * as Tables from "./tables.js";
import * as View from "./view.js";
import * as api from "../core/api.js";
import { ApiError } from "../core/api.js";
import { el, keepFocus, runLabel, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { showConnection } from "../core/live.js";

const LIVE_MS = 4000;
const MANY_RUNS = 10;
const FEWER_POINTS = 300;
const $ = (id) => document.getElementById(id);
const plot = (name) => (metricOf(name) === null ? $(`plot-${name}`) : more.plot(metricOf(name)));
const names = () => [...NAMES, ...view.charts.map(chartOf)];
const BUT_SEED = "-seed";
const UNGROUPED = [
  ["", "No grouping"],
  [BUT_SEED, "all settings except the seed"],
];
let view = View.read(location.search);
let reply = null;
let v = null;
let newest = 0;
let timer = 0;
let since = new Date();
let linked = null;
let cursor = null; // in the data's own unit, as the zoom: the axis may change its unit as runs grow
let resets = 0;
let colours = new Map();
let chartsDrawn;
const charted = new Promise((done) => {
  chartsDrawn = done; // once Plotly has drawn them
});
const more = moreCharts({
  view: () => view,
  metrics: () => (reply ? reply.metrics : []),
  choose: (...change) => choose(...change),
  leave(gone) {
    if (linked) linked.remove(gone);
    if (Plotly) Plotly.purge(gone);
  },
  save: saveImage,
});

/* Apply a choice: to the address, as a history entry, and to the page. */
function choose(changes, { again = true, how = "pushState" } = {}) {
  view = { ...view, ...changes };
  const query = View.write(view);
  if (query !== location.search) history[how](null, "", query);
  setText($("address"), location.href);
  controls();
  if (again) load();
  else if (reply) draw();
}
async function load() {
  clearTimeout(timer);
  tokens();
  $("nothing").hidden = view.ids.length > 1;
  $("loading").hidden = !view.ids.length || reply !== null;
  const mine = ++newest;
  const { axis } = view;
  if (!view.ids.length) {
    reply = null;
    $("result").hidden = $("refused").hidden = $("live").hidden = true;
    return;
  }
  const query = { runs: view.ids.join(","), keys: [...KEYS, ...view.charts].join(","), x: view.axis };
  if (view.ids.length > MANY_RUNS) query.max_points = FEWER_POINTS;
  if (view.target !== null) query.target = view.target;
  if (view.group) query.group = view.group;
  if (view.counted) query.counted = true;
  if (view.ids.includes(view.baseline)) query.baseline = view.baseline;
  try {
    const got = await api.get("compare", query);
    if (mine !== newest) return;
    if (reply?.axis !== axis) cursor = null;
    reply = { ...got, axis };
    $("refused").hidden = true;
  } catch (e) {
    if (mine !== newest) return;
    if (e instanceof ApiError && e.status < 500) refuse(e);
    else connection(false);
    return;
  }
  since = new Date();
  draw();
  if (!Plotly) await loadCharts(mine);
  if (mine !== newest || !Plotly) return;
  connection(true);
  if (reply && reply.runs.some((run) => !run.ended_at))
    timer = setTimeout(() => {
      if (!document.hidden) load();
    }, LIVE_MS);
}
/* After the frame that shows the figures and previews of the curves: Plotly's megabytes would delay them. */
async function loadCharts(mine) {
  if (!document.hidden) await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  try {
    await loadPlotly();
  } catch (e) {
    if (!(e instanceof TypeError)) throw e;
    if (mine === newest) connection(false);
    return;
  }
  if (reply) draw();
}
function refuse(e) {
  // the server refused: nothing is live until the next request
  $("live").hidden = $("loading").hidden = true;
  $("refused").hidden = false;
  setText(
    $("refused").querySelector("p"),
    e.status === 404
      ? "One of these runs does not exist or belongs to a team that you are not a member of. Remove it above."
      : e.message,
  );
  if (reply) return;
  $("result").hidden = true;
  const grouped = view.group && view.group !== BUT_SEED ? [[view.group, view.group]] : [];
  options($("group"), [...UNGROUPED, ...grouped], view.group); // so that the user can remove a refused grouping
}
function connection(ok) {
  const open = !ok || (reply && reply.runs.some((run) => !run.ended_at));
  if (open) showConnection($("live"), { ok, since });
  else $("live").hidden = true;
  if (!ok) timer = setTimeout(load, LIVE_MS);
}
function tokens() {
  colours = runColours(view.ids);
  drawRuns(view.ids, colours, reply ? reply.runs : [], (id) => choose(View.without(view, id)));
}
/* Update every control to the current choices, also after the back button. */
function controls() {
  document
    .querySelectorAll("[data-axis]")
    .forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.axis === view.axis)));
  $("smoothing").value = view.smooth;
  setText($("smoothing-value"), `${view.smooth} %`);
  $("band").value = view.band;
  $("band").closest("label").hidden = !view.group;
  $("outliers").checked = view.outliers;
  $("counted").checked = view.counted;
  $("smoothing").disabled = view.counted;
}
function options(select, list, chosen) {
  const html = JSON.stringify(list);
  if (select.dataset.list !== html) {
    select.replaceChildren(...list.map(([value, text]) => el("option", { value }, text)));
    select.dataset.list = html;
  }
  select.value = chosen;
}
function choices() {
  const paths = reply.config_diff.map((d) => d.path);
  const chosen = view.group && view.group !== BUT_SEED && !paths.includes(view.group) ? [view.group] : [];
  options(
    $("group"),
    [...UNGROUPED, ...[...paths, ...chosen].map((path) => [path, path])],
    view.group,
  );
  const listed = reply.groups.length
    ? reply.groups.map((g) => [g.runs.includes(reply.baseline) ? reply.baseline : g.runs[0], g.value])
    : reply.runs.map((run) => [run.id, runLabel(run)]);
  options(
    $("baseline"),
    listed.map(([id, text]) => [String(id), text]),
    String(reply.baseline),
  );
  setText($("target-now"), f.known(reply.target) ? f.figure(reply.target) : "");
  if (document.activeElement === $("target")) return;
  $("target").value = f.known(reply.target) ? String(reply.target) : "";
  $("target").removeAttribute("aria-invalid");
}
function draw() {
  $("result").hidden = false;
  $("loading").hidden = true;
  $("cursor").disabled = !Plotly;
  tokens();
  const listed = entries(reply, colours);
  const shown = shownView();
  const axis = axisOf(shown.axis, furthest(reply));
  v = { view: shown, resets, reply, entries: listed, colours, axis, many: !view.group && listed.length > MANY, drawn: {} };
  more.show();
  names().forEach((name) => {
    v.drawn[name] = curves(name, reply, listed, shown, axis.size);
    drawChart(plot(name), build(name, v.drawn[name], v));
  });
  if (Plotly) {
    link();
    chartsDrawn();
  }
  choices();
  keepFocus(() => {
    Tables.runs(v, { onPick: pick });
    Tables.groups(v);
    Tables.differences(v);
    Tables.legend(v);
  });
  showCursor();
  Parallel.draw($("parallel"), v, { onPoint: point, onPick: pick });
  setText(
    $("parallel-note"),
    reply.config_diff.length > Parallel.MOST_SETTINGS
      ? `the first ${Parallel.MOST_SETTINGS} of ${reply.config_diff.length} settings that differ`
      : "",
  );
}
function drawChart(node, made) {
  if (Plotly) Plotly.react(node, T.dotted(made.data), made.layout, { ...T.config, doubleClick: false });
  removePreview(node);
  if (!Plotly && !v.view.zoom && made.layout.yaxis.type !== "log") drawPreview(node, made, made.layout.xaxis.range[1]);
}
/* The choices, on the axis of the reply: another one may be chosen, and its reply not here yet. */
const shownView = () => ({ ...view, axis: reply.axis, zoom: reply.axis === view.axis ? view.zoom : null });
const pick = (id) => choose({ picked: view.picked === id ? null : id }, { again: false });

/* Draw the run under the pointer or the focus on top; null: none. */
function point(id) {
  const entry = v && id !== null && v.entries.find((e) => e.ids.includes(id));
  // only charts that are drawn; a metric that was just added has none yet
  Object.entries(v ? v.drawn : {}).forEach(([name, drawn]) =>
    outline(plot(name), entry ? drawn.runs.get(id) : null, entry ? T.run(entry.colour) : ""),
  );
  Parallel.point($("parallel"), id);
  document
    .querySelectorAll("#figures tr")
    .forEach((row) => row.toggleAttribute("data-pointed", Number(row.dataset.key) === id));
}
/* One cursor and one zoom for all charts; the slider moves the same cursor by keyboard. */
function link() {
  linked ||= T.linked(moved, zoomed);
  names().forEach((name) => {
    if (!linked.add(plot(name))) return;
    plot(name).on("plotly_doubleclick", () => {
      resets += 1;
      choose({ zoom: null }, { again: false });
    });
    plot(name).on("plotly_click", (e) => {
      if (v.many) pick(Number(e.points[0].data.meta));
    });
  });
}
/* The dragged range in the data's own unit. */
function zoomed(e) {
  if (!("xaxis.range[0]" in e) || v.view.axis !== view.axis) return;
  const zoom = [e["xaxis.range[0]"], e["xaxis.range[1]"]].map((x) => x * v.axis.size);
  const close = (a, b) => Math.abs(a - b) < 1e-5 * (zoom[1] - zoom[0]);
  if (!view.zoom || !zoom.every((x, i) => close(x, view.zoom[i]))) choose({ zoom }, { again: false });
}
function moved(x, e) {
  cursor = x === null ? null : x * v.axis.size;
  showValues(x);
  point((e && v.many && Number(e.points[0].data.meta)) || null);
}
function showValues(x) {
  Tables.values(v, x);
  const [from, to] = plot("reward")._fullLayout.xaxis.range;
  $("cursor").value = x === null ? 1000 : Math.round((1000 * (x - from)) / (to - from));
  $("cursor").setAttribute("aria-valuetext", $("cursor-at").textContent);
}
/* After a redraw, whose axis may have another unit or end. */
function showCursor() {
  if (!Plotly) return Tables.values(v, null);
  const x = cursor === null ? null : cursor / v.axis.size;
  linked.mark(x);
  showValues(x);
}
function slide() {
  const [from, to] = plot("reward")._fullLayout.xaxis.range;
  const share = Number($("cursor").value) / 1000;
  const x = share >= 1 ? null : from + share * (to - from);
  linked.mark(x);
  moved(x);
}
async function saveImage(name, node, title, format) {
  await charted;
  if (!node.isConnected) return; // removed meanwhile
  Download.image(name, node, title, format, v.axis.title);
}
function listen() {
  onAdd((id) => {
    if (!view.ids.includes(id)) choose({ ids: [...view.ids, id] });
  });
  document.querySelectorAll("[data-axis]").forEach((b) =>
    b.addEventListener("click", () => choose({ axis: b.dataset.axis, zoom: null })),
  );
  $("outliers").addEventListener("change", (e) => choose({ outliers: e.target.checked }, { again: false }));
  $("counted").addEventListener("change", (e) => choose({ counted: e.target.checked }));
  $("group").addEventListener("change", (e) => choose({ group: e.target.value }));
  $("band").addEventListener("change", (e) => choose({ band: e.target.value }, { again: false }));
  $("baseline").addEventListener("change", (e) => choose({ baseline: Number(e.target.value) }));
  $("target").addEventListener("change", (e) => {
    const text = e.target.value.trim().replace(",", ".").replace("−", "-");
    const bad = text !== "" && !Number.isFinite(Number(text));
    if (bad) e.target.setAttribute("aria-invalid", "true");
    else e.target.removeAttribute("aria-invalid");
    if (!bad) choose({ target: text === "" ? null : text });
  });
  $("smoothing").addEventListener("input", (e) => {
    view = { ...view, smooth: Number(e.target.value) };
    controls();
    if (reply) draw();
  });
  $("smoothing").addEventListener("change", () => choose({}, { again: false }));
  $("cursor").addEventListener("input", slide);
  const rowOf = (e) => {
    const row = e.target.closest("tr[data-key]");
    return row ? Number(row.dataset.key) : null;
  };
  ["pointerover", "focusin"].forEach((kind) => $("figures").addEventListener(kind, (e) => point(rowOf(e))));
  ["pointerleave", "focusout"].forEach((kind) => $("figures").addEventListener(kind, () => point(null)));
  document
    .querySelectorAll("[data-image]")
    .forEach((b) =>
      b.addEventListener("click", () =>
        saveImage(b.dataset.chart, plot(b.dataset.chart), b.dataset.title, b.dataset.image),
      ),
    );
  $("csv-curves").addEventListener("click", () =>
    Download.save("compare-curves.csv", Download.csv(Download.curveRows(v.drawn, v))),
  );
  $("csv-runs").addEventListener("click", () =>
    Download.save("compare-runs.csv", Download.csv(Download.tableRows(reply))),
  );
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && view.ids.length) load();
  });
  window.addEventListener("popstate", () => {
    const before = String(view.zoom);
    view = View.read(location.search);
    if (String(view.zoom) !== before) resets += 1; // a box zoom changed the range of y too
    setText($("address"), location.href);
    controls();
    load();
  });
  T.onChange(() => {
    if (reply) draw();
  });
}
listen();
choose({}, { how: "replaceState" });
