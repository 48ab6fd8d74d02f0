/* The choices on the compare page, and their form in the address: links and the back button work.
     ?runs=3,4,5&x=wall&target=1.2&smooth=5&group=-seed&band=se&baseline=4&highlight=5&zoom=120,480&outliers=ignore&counted=1
     &charts=actor/entropy,critic/vf_loss&log=critic/vf_loss
   `zoom` is a range of the axis, in steps, seconds or tokens; `counted` draws the curve that decides when the target is reached;
   `charts` are further metrics, `log` those with a logarithmic axis. */
const AXES = ["step", "wall", "tokens", "gpu_seconds"];
const SMOOTH = 2;
const MOST_SMOOTH = 20; // percent of a curve's length
const MOST_CHARTS = 24;
const whole = (text) => (/^[1-9]\d{0,15}$/.test(text || "") ? Number(text) : null);
const number = (text) => (text !== null && text.trim() !== "" && Number.isFinite(Number(text)) ? text : null);

function range(text) {
  const ends = (text || "").split(",").map((word) => (word.trim() === "" ? NaN : Number(word)));
  return ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
}

const names = (text) => [...new Set((text || "").split(",").filter((key) => key.trim()))].slice(0, MOST_CHARTS);
const ids = (text) => [...new Set((text || "").split(",").map(whole).filter(Boolean))];
const readIds = (search) => ids(new URLSearchParams(search).get("runs"));

function read(search) {
  const params = new URLSearchParams(search);
  const smooth = number(params.get("smooth"));
  return {
    ids: ids(params.get("runs")),
    axis: AXES.includes(params.get("x")) ? params.get("x") : "wall",
    target: number(params.get("target")),
    smooth: smooth === null ? SMOOTH : Math.min(MOST_SMOOTH, Math.max(0, Number(smooth))),
    group: params.get("group") || "",
    band: params.get("band") === "se" ? "se" : "range",
    baseline: whole(params.get("baseline")),
    picked: whole(params.get("highlight")),
    zoom: range(params.get("zoom")),
    outliers: params.get("outliers") === "ignore",
    counted: params.get("counted") === "1",
    charts: names(params.get("charts")),
    log: names(params.get("log")),
  };
}
function write(view) {
  const query = new URLSearchParams();
  const put = (name, value, usual) => {
    if (value !== null && value !== "" && value !== usual) query.set(name, value);
  };
  put("runs", view.ids.join(","));
  query.set("x", view.axis);
  put("target", view.target);
  put("smooth", view.smooth, SMOOTH);
  put("group", view.group);
  put("band", view.band, "range");
  put("baseline", view.baseline);
  put("highlight", view.picked);
  put("zoom", view.zoom && view.zoom.map((x) => Number(x.toPrecision(6))).join(","));
  put("outliers", view.outliers ? "ignore" : "");
  put("counted", view.counted ? "1" : "");
  put("charts", view.charts.join(","));
  put("log", view.log.filter((key) => view.charts.includes(key)).join(","));
  return `?${query}`.replace(/%2C/g, ",").replace(/%2F/g, "/");
}
/* Removed runs are neither the baseline nor highlighted. */
function without(view, id) {
  const remaining = (other) => (other === id ? null : other);
  return {
    ...view,
    ids: view.ids.filter((other) => other !== id),
    baseline: remaining(view.baseline),
    picked: remaining(view.picked),
  };
}
export { MOST_CHARTS, read, readIds, write, without };
