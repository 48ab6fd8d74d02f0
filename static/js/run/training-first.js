/* The Training tab before Plotly is loaded, which takes longest: draws the first charts as SVG once the metrics are there.
   Plotly and training.js are loaded afterwards, so that megabytes of code do not delay the metrics. */
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
let begun = false;
async function loadCharts() {
  if (begun) return;
  begun = true;
  try {
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
  .finally(() => requestAnimationFrame(() => setTimeout(loadCharts))); // after the frame in which they are visible
setTimeout(loadCharts, LATEST_MS); // also in a background tab
