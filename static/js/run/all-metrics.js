/* Every metric of the run as a small chart, grouped by the first part of its name and searched by text or regular expression;
   above them the pinned charts. Charts are fetched and drawn when they are scrolled to: 300 metrics open as fast as a dozen.
   `link`, once Plotly is loaded: until then their lines are shown without ticks and cursor. */
import { el, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { fullScreen } from "./full-screen.js";
import { metricColumns } from "./metric-columns.js";
import { metricPanel } from "./metric-panel.js";
import { panelDrawer } from "./panel-drawer.js";
import { pinnedCharts } from "./pinned-charts.js";
import { run } from "./store.js";
import { view } from "./training-view.js";

const POINTS = 400; // of a chart, which is about as wide
const $ = (id) => document.getElementById(id);
const search = $("metric-search");
const { compare: order } = new Intl.Collator("en", { numeric: true });
const prefixOf = (key) => (key.includes("/") ? key.slice(0, key.indexOf("/")) : "other");
const keysNow = () => Object.keys(run.summary.latest || {}).sort(order);

/* --- groups and search ----------------------------------------------------------------------------------- */
function group(prefix) {
  const id = `metric-group-${prefix}`;
  const found = document.getElementById(id);
  if (found) return found.querySelector(".grid-4");
  const grid = el("div", { class: "grid-4" });
  const count = el("span", { class: "note", "data-count": true });
  const node = el("details", { id, open: true }, el("summary", {}, el("b", {}, `${prefix} `), count), grid);
  const after = [...$("metric-groups").children].find((other) => other.id.localeCompare(id) > 0);
  $("metric-groups").insertBefore(node, after || null);
  return grid;
}
function insert(panel) {
  const [key] = panel.chart.keys;
  const grid = group(prefixOf(key));
  const after = [...grid.children].find((other) => order(other.dataset.name, key) > 0);
  grid.insertBefore(panel.node, after || null);
}
/* A regular expression if the text is one, otherwise the text itself. */
function matcher(text) {
  try {
    const pattern = new RegExp(text, "i");
    return (key) => pattern.test(key);
  } catch (e) {
    return (key) => key.toLowerCase().includes(text.toLowerCase());
  }
}
function filter(panels) {
  const matches = matcher(search.value.trim());
  let found = 0;
  panels.forEach(({ node }, key) => {
    node.hidden = !matches(key);
    if (!node.hidden) found += 1;
  });
  document.querySelectorAll("#metric-groups > details").forEach((node) => {
    const shown = node.querySelectorAll(".metric:not([hidden])").length;
    node.hidden = shown === 0;
    setText(node.querySelector("[data-count]"), String(shown));
  });
  const all = panels.size;
  setText(
    $("metric-count"),
    found === all ? `${f.whole(all)} metrics` : `${f.whole(found)} of ${f.whole(all)} metrics`,
  );
  $("metrics-none").hidden = found > 0 || all === 0;
}

/* --- panels ------------------------------------------------------------------------------------------------- */
const columns = metricColumns(view, POINTS);
const drawer = panelDrawer(columns);
const panels = new Map(); // by key
const openFull = (charts, i) => fullScreen(charts, i, view);
const visible = () => [...document.querySelectorAll("#metric-groups .metric:not([hidden])")].map((n) => n.dataset.name);

const menuOf = (key) => () => {
  const { chart } = panels.get(key);
  return [
    pinned.hasPinned(key) ? null : ["Pin", () => pinned.pin(chart)],
    [
      "Full screen",
      () => {
        const names = visible();
        openFull(
          names.map((name) => panels.get(name).chart),
          names.indexOf(key),
        );
      },
    ],
    [chart.log ? "Linear axis" : "Logarithmic axis", () => setLog(key, !chart.log)],
  ].filter(Boolean);
};
const panelOf = (key, log) => metricPanel({ title: "", keys: [key], log }, { view, columns, menu: menuOf(key) });
function setLog(key, log) {
  const old = panels.get(key);
  const panel = panelOf(key, log);
  drawer.forget(old);
  old.node.replaceWith(panel.node);
  panels.set(key, panel);
  drawer.watch(panel);
  panel.node.querySelector("summary").focus();
}
/* Panels of metrics that the run has reported since. */
function addPanels() {
  const fresh = keysNow().filter((key) => !panels.has(key));
  fresh.forEach((key) => {
    const panel = panelOf(key, false);
    panels.set(key, panel);
    insert(panel);
    drawer.watch(panel);
  });
  if (fresh.length) filter(panels);
}
const pinned = pinnedCharts({ view, columns, drawer, keys: keysNow, openFull });
$("all-metrics").hidden = false;
search.addEventListener("input", () => filter(panels));
filter(panels);
run.follow(() => {
  addPanels();
  drawer.renew();
});
export const { load, redraw, read, link } = drawer;
