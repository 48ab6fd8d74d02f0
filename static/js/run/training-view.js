/* What the charts of the Training tab show: the run's series, which are fetched at once, and the user's choices. */
import { axisInAddress } from "../charts/axes.js";
import { runSeries } from "./series.js";
import { run } from "./store.js";
import { KEYS } from "./training-charts.js";

const series = runSeries(run.id, KEYS);
const axis = axisInAddress("step");
if (axis !== "step") series.setAxis(axis);
const firstLoad = series.update(run.summary);

function stored() {
  try {
    const w = parseFloat(localStorage.getItem("oppo-smoothing"));
    return w >= 0 && w < 1 ? w : 0.6;
  } catch (e) {
    return 0.6;
  }
}
function ignored() {
  try {
    return localStorage.getItem("oppo-outliers") === "ignore";
  } catch (e) {
    return false;
  }
}
/* The end of the step axis. */
const endOf = (column) => Math.max(10, Math.ceil(1.12 * (column.x[column.x.length - 1] || 0)));
const limit = (name) => {
  const { alertAbove } = document.getElementById(`plot-${name}`).dataset;
  return alertAbove ? Number(alertAbove) : null;
};
const limits = { kl: limit("kl"), bubble: limit("bubble") };
const view = {
  series,
  limits,
  spec: run.spec,
  colour: run.colour,
  summary: run.summary,
  decisions: [],
  weight: stored(),
  axis,
  outliers: ignored(),
  zoomed: null, // range of the axis, [from, to]
  resets: 0, // of the zoom
};
export { series, firstLoad, axis, view, endOf };
