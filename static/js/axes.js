/* The x axes of charts: steps, training time, trained tokens, device time, each in a unit that fits its length.
     Oppo.axisOf("wall", 7300) → {size: 3600, word: "h", title: "hours of training"}   size: data units per axis unit
     Oppo.axisInAddress("step") → `?x=` of the address; Oppo.keepAxis("wall", "step") writes it, unless it is the default */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {});
  const AXES = ["step", "wall", "tokens", "gpu_seconds"];

  Oppo.axisOf = function (name, top) {
    const hours = (what) => (top > 7200 ? { size: 3600, word: "h", title: `hours ${what}` } : top > 180 ? { size: 60, word: "min", title: `minutes ${what}` } : { size: 1, word: "s", title: `seconds ${what}` });
    if (name === "wall") return hours("of training");
    if (name === "gpu_seconds") return hours("of device time");
    if (name === "tokens") return top > 2e6 ? { size: 1e6, word: "M", title: "million response tokens" } : { size: 1000, word: "k", title: "thousand response tokens" };
    return { size: 1, word: "", title: "step" };
  };
  /* The longest of several columns: those of devices that a run no longer uses end earlier. */
  Oppo.furthest = function (columns) {
    const end = (column) => column.x[column.x.length - 1] || 0;
    return columns.reduce((best, column) => (end(column) > end(best) ? column : best), columns[0] || { step: [], x: [], y: [] });
  };
  Oppo.axisInAddress = function (usual) {
    const param = new URLSearchParams(location.search).get("x");
    return AXES.includes(param) ? param : usual;
  };
  Oppo.keepAxis = function (name, usual) {
    const url = new URL(location.href);
    if (name === usual) url.searchParams.delete("x"); else url.searchParams.set("x", name);
    history.replaceState(null, "", url);
  };
  Oppo.AXES = AXES;
})();
