/* The Training tab before Plotly is loaded, which takes longest: draws the first charts as SVG once the metrics are there.
   All metrics, as far as they are in view, follow; then Plotly and training.js, so that megabytes of code delay no metrics. */
import { loadPlotly } from "../charts/plotly.js";
import { drawPreview } from "../charts/svg-preview.js";
import { tryAgain } from "../core/api.js";
import { setText } from "../core/dom.js";
import { CHARTS } from "./training-charts.js";
import { axis, endOf, firstLoad, view } from "./training-view.js";

const DRAWN_FIRST = ["reward", "kl", "length"];
const LATEST_MS = 1000;

function draw() {
  if (axis !== "step") return; // in other units Plotly draws first
  DRAWN_FIRST.forEach((name) => {
    const made = CHARTS[name](view);
    drawPreview(document.getElementById(`plot-${name}`), made, endOf(made.column));
    const last = made.column.x.length - 1;
    if (last >= 0)
      ["at", "by"].forEach((place, k) => setText(document.getElementById(`${place}-${name}`), made.say(last)[k]));
  });
}
const later = (ms) => new Promise((done) => setTimeout(done, ms));
/* Resolves after the next frame: what was drawn is visible, and older observers have been called. A background tab has no
   frames. */
function framed() {
  const observed = new Promise((done) => {
    const seen = new IntersectionObserver(() => {
      seen.disconnect();
      done();
    });
    seen.observe(document.body);
  });
  return Promise.race([observed, later(LATEST_MS)]);
}
let begun = false;
async function loadCharts() {
  if (begun) return;
  begun = true;
  try {
    const { load } = await import("./all-metrics.js");
    await framed();
    await Promise.race([load().catch(reportError), later(LATEST_MS)]);
    await loadPlotly();
    await import("./training.js");
  } catch (e) {
    if (!(e instanceof TypeError)) throw e;
    begun = false; // the server cannot be reached: the previews stay until it can
    tryAgain(e, loadCharts);
  }
}
firstLoad
  .then(draw, () => {
    /* training.js awaits the same promise and reports the error */
  })
  .finally(() => framed().then(loadCharts));
later(LATEST_MS).then(loadCharts); // also while the first request hangs
