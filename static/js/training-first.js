/* The Training tab before Plotly is loaded, which takes longest: fetches the metrics and draws the first charts as SVG.
   Scripts named by `<link rel="later">` are fetched and run afterwards, in order, so that megabytes of code do not delay the
   metrics. */
(function () {
  "use strict";
  const { Oppo } = window, { run, preview } = Oppo, { CHARTS, KEYS } = Oppo.trainingCharts;
  const series = Oppo.series(run.id, KEYS), axis = Oppo.axisInAddress("step");
  if (axis !== "step") series.setAxis(axis);
  const firstLoad = series.update(run.summary);
  const DRAWN_FIRST = ["reward", "kl", "length"], LATEST_MS = 1000;

  function stored() {
    try { const w = parseFloat(localStorage.getItem("oppo-smoothing")); return w >= 0 && w < 1 ? w : 0.6; } catch (e) { return 0.6; }
  }
  function ignored() {
    try { return localStorage.getItem("oppo-outliers") === "ignore"; } catch (e) { return false; }
  }
  /* The end of the step axis. */
  const endOf = (column) => Math.max(10, Math.ceil(1.12 * (column.x[column.x.length - 1] || 0)));
  const limit = (name) => { const { alertAbove } = document.getElementById(`plot-${name}`).dataset; return alertAbove ? Number(alertAbove) : null; };
  const limits = { kl: limit("kl"), bubble: limit("bubble") };
  const view = { series, limits, spec: run.spec, colour: run.colour, summary: run.summary, decisions: [], weight: stored(), axis, outliers: ignored() };

  function draw() {
    if (axis !== "step") return;                         // in other units Plotly draws first
    DRAWN_FIRST.forEach((name) => {
      const made = CHARTS[name](view);
      preview(document.getElementById(`plot-${name}`), made, endOf(made.column));
      const last = made.column.x.length - 1;
      if (last >= 0) ["at", "by"].forEach((place, k) => Oppo.setText(document.getElementById(`${place}-${name}`), made.say(last)[k]));
    });
  }
  let begun = false;
  function loadLaterScripts() {
    if (begun) return;
    begun = true;
    document.querySelectorAll("link[rel=later]").forEach((link) => {
      const script = document.createElement("script");
      script.src = link.href;
      script.async = false;
      document.body.append(script);
    });
  }
  firstLoad.then(draw, () => { /* training.js awaits the same promise and reports the error */ })
    .finally(() => requestAnimationFrame(() => setTimeout(loadLaterScripts)));       // after the frame in which they are visible
  setTimeout(loadLaterScripts, LATEST_MS);                                           // also in a background tab
  Oppo.trainingFirst = { series, firstLoad, axis, view, endOf };
})();
