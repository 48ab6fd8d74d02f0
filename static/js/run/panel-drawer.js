/* Draws the panels that are in view or close to it, and fetches what they need.
     const drawer = panelDrawer(columns);  drawer.watch(panel);  drawer.forget(panel)
     drawer.load();  drawer.redraw();  drawer.renew()
     drawer.link(linked)   once Plotly is loaded: until then panels show previews
   `load` fetches what panels lack, `renew` the run's newer steps, RENEW_MS after the previous ones are drawn.
   What is out of view is not kept drawn: hundreds of charts would be redrawn at every change of the window's size. */
import * as api from "../core/api.js";
import { versionOf } from "./metric-columns.js";
import { run } from "./store.js";

const RENEW_MS = 4000;

export function panelDrawer(columns) {
  const byPlot = new Map();
  const near = new Set();
  const waiting = new Set(); // panels to draw
  let linked = null; // the cursor and zoom of all charts
  let version = versionOf(run.summary); // up to which the panels show the run
  let drawing = false;
  let pass = null;
  let again = false;
  let retry = 0;
  let renewal = 0;

  const seen = new IntersectionObserver(
    (entries) => {
      entries.forEach((e) => {
        const panel = byPlot.get(e.target);
        if (panel) (e.isIntersecting ? enter : leave)(panel);
      });
      draw();
      load();
    },
    { rootMargin: "400px" },
  );
  const isDrawable = (panel) => panel.chart.keys.every((key) => columns.get(key));
  function enter(panel) {
    near.add(panel);
    if (isDrawable(panel)) queue(panel);
  }
  function queue(panel) {
    waiting.add(panel);
    panel.preview();
    if (!panel.drawn) panel.read(linked ? linked.at : null);
  }
  function leave(panel) {
    near.delete(panel);
    waiting.delete(panel);
    linked?.remove(panel.plot);
    panel.purge();
  }
  function watch(panel) {
    byPlot.set(panel.plot, panel);
    seen.observe(panel.plot);
  }
  function forget(panel) {
    seen.unobserve(panel.plot);
    byPlot.delete(panel.plot);
    leave(panel);
  }
  const missing = (target) =>
    [...new Set([...near].flatMap((panel) => panel.chart.keys))].filter((key) => !columns.isFresh(key, target));

  /* Resolves when nothing is missing, or the server could not be asked. */
  function load() {
    again = true;
    pass ||= loadAll().finally(() => {
      pass = null;
    });
    return pass;
  }
  async function loadAll() {
    clearTimeout(retry);
    try {
      while (again) {
        again = false;
        await loadMissing();
      }
    } catch (e) {
      if (!(e instanceof TypeError) && !(e instanceof api.ApiError)) throw e; // the connection's status shows it
      retry = api.tryAgain(e, load);
    }
  }
  async function loadMissing() {
    const target = version;
    for (let keys = missing(target); keys.length; keys = missing(target)) {
      const changed = new Set(await columns.load(keys, target));
      near.forEach((panel) => {
        if (panel.chart.keys.some((key) => changed.has(key)) && isDrawable(panel)) queue(panel);
      });
      await draw();
    }
  }
  function renew() {
    if (renewal || version === versionOf(run.summary)) return;
    renewal = setTimeout(() => {
      version = versionOf(run.summary);
      load().finally(() => {
        renewal = 0;
        renew(); // for summaries that came meanwhile
      });
    }, RENEW_MS);
  }
  /* One chart in each task, so that scrolling stays smooth. It does not wait for requests. */
  async function draw() {
    if (drawing) return; // the running loop also draws panels that are queued meanwhile
    drawing = true;
    try {
      while (linked && waiting.size) await drawOne();
    } finally {
      drawing = false;
    }
  }
  async function drawOne() {
    const [panel] = waiting;
    waiting.delete(panel);
    if (!isDrawable(panel)) return; // another axis was chosen; the preview stays until its columns are loaded
    await panel.draw();
    if (near.has(panel)) {
      linked.add(panel.plot);
      panel.read(linked.at);
    } else leave(panel);
    await new Promise((done) => setTimeout(done));
  }
  function redraw() {
    near.forEach((panel) => isDrawable(panel) && queue(panel));
    draw();
    load();
  }
  function link(charts) {
    linked = charts;
    draw();
    load();
  }
  const read = (x) => near.forEach((panel) => panel.drawn && panel.read(x));
  return { watch, forget, load, redraw, renew, read, link };
}
