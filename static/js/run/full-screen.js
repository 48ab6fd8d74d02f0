/* One chart in a dialog of the window's size, in finer resolution; the arrow keys go to the previous and next one. */
import { loadPlotly } from "../charts/plotly.js";
import * as T from "../charts/plotly-theme.js";
import { tryAgain, ApiError } from "../core/api.js";
import { el, setText } from "../core/dom.js";
import { metricColumns, versionOf } from "./metric-columns.js";
import { metricPanel } from "./metric-panel.js";
import { run } from "./store.js";

const POINTS = 2000;

export function fullScreen(charts, first, view) {
  const columns = metricColumns({ ...view, zoomed: null }, POINTS);
  const place = el("div", { class: "grow" });
  const problem = el("p", { class: "note", role: "status" });
  let at = first;
  let panel = null;
  let retry = 0;
  let busy = false;
  let again = false;

  function show(i) {
    at = (i + charts.length) % charts.length;
    if (panel) panel.purge();
    panel = metricPanel(charts[at], { view: { ...view, zoomed: null }, columns, large: true });
    place.replaceChildren(panel.node);
    refresh();
  }
  async function refresh() {
    again = true;
    if (busy || !panel) return;
    busy = true;
    clearTimeout(retry);
    try {
      while (again && box.open) {
        again = false;
        await loadAndDraw(panel);
      }
    } catch (e) {
      if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
      setText(problem, e instanceof ApiError ? e.message : "The server does not respond. Retrying.");
      retry = tryAgain(e, refresh);
    } finally {
      busy = false;
    }
  }
  async function loadAndDraw(shown) {
    const version = versionOf(run.summary);
    while ((await columns.load(shown.chart.keys, version)).length);
    setText(problem, "");
    shown.preview();
    shown.read(null);
    await loadPlotly();
    if (shown !== panel || !box.open) return;
    await shown.draw();
    shown.read(null);
  }
  const button = (label, sign, by) =>
    el("button", { class: "btn btn-icon", type: "button", "aria-label": label, onclick: () => show(at + by) }, sign);
  const box = el(
    "dialog",
    { class: "full", "aria-label": "Chart in full screen" },
    place,
    problem,
    el(
      "div",
      { class: "row" },
      charts.length > 1 ? button("Previous chart", "←", -1) : null,
      charts.length > 1 ? button("Next chart", "→", 1) : null,
      el("button", { class: "btn push", type: "button", onclick: () => box.close() }, "Close"),
    ),
  );
  box.addEventListener("keydown", (e) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (by) show(at + by);
  });
  box.addEventListener("close", () => {
    run.unfollow(refresh);
    unwatch();
    clearTimeout(retry);
    panel.purge();
    box.remove();
  });
  document.body.append(box);
  box.showModal();
  box.querySelector(".push").focus();
  run.follow(refresh);
  const unwatch = T.onChange(() => panel.drawn && panel.draw());
  show(first);
}
