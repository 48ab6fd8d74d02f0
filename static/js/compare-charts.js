/* The three charts of the compare page: pure functions from the API's reply to Plotly traces and layout. */
(function () {
  "use strict";
  const Oppo = window.Oppo, T = window.OppoTheme, f = Oppo.format;
  const REWARD = "critic/score/mean", KL = "objective/kl";
  const BANDS_UP_TO = 6;                                 // more lie over each other
  const DASHES = ["solid", "6px,3px", "2px,3px", "8px,3px,2px,3px"];

  /* The axis in a unit that fits its length: {size, title, word} per unit of `x`. */
  function axisOf(name, top) {
    const hours = (what) => (top > 7200 ? { size: 3600, word: "h", title: `hours ${what}` } : top > 180 ? { size: 60, word: "min", title: `minutes ${what}` } : { size: 1, word: "s", title: `seconds ${what}` });
    if (name === "wall") return hours("of training");
    if (name === "gpu_seconds") return hours("of device time");
    if (name === "tokens") return top > 2e6 ? { size: 1e6, word: "M", title: "trained response tokens, millions" } : { size: 1000, word: "k", title: "trained response tokens, thousands" };
    return { size: 1, word: "", title: "step" };
  }
  function known(column) {                               // the rows whose place on the axis is known
    const rows = column || { step: [], x: [], y: [] };
    return Object.fromEntries(Object.entries(rows).map(([name, list]) => [name, list.filter((_, i) => rows.x[i] !== null)]));
  }
  function bubbleOf(series) {
    const columns = Object.entries(series).filter(([key]) => key.startsWith("bubble/")).map(([, column]) => known(column));
    if (!columns.length) return { x: [], y: [], step: [] };
    const [base] = columns, at = columns.map((c) => new Map(c.step.map((s, i) => [s, c.y[i]])));
    const mean = (step) => { const ys = at.map((m) => m.get(step)).filter(f.known); return ys.length ? 100 * ys.reduce((a, b) => a + b, 0) / ys.length : null; };
    return { ...base, y: base.step.map(mean) };
  }
  /* Starts at the first value, as the server's "reached the target" does; its weight is 0.9, and so is the page's default. */
  function smooth(y, weight) {
    let m = null;
    return y.map((v) => (v === null ? null : (m = m === null ? v : weight * m + (1 - weight) * v)));
  }
  const PICK = { reward: (s) => known(s[REWARD]), kl: (s) => known(s[KL]), bubble: bubbleOf };

  function build(name, v) {
    const curves = v.runs.map((run, k) => {
      const column = PICK[name](v.series[run.id] || {});
      return { run, k, x: column.x.map((x) => x / v.axis.size), raw: column.y, low: column.low, high: column.high, y: smooth(column.y, v.weight), color: T.run(v.colours.get(run.id)), dash: DASHES[k % DASHES.length] };
    });
    const main = name === "reward", data = [];
    curves.forEach((c) => {
      if (c.low && curves.length <= BANDS_UP_TO) data.push(...T.band(c.x, c.low, c.high, c.color, 0.12));
      if (main && v.weight > 0) data.push({ x: c.x, y: c.raw, mode: "lines", line: { width: 0.75, color: T.fade(c.color, 0.25) }, hoverinfo: "skip" });
      data.push({ x: c.x, y: c.y, name: shortened(c.run.name), mode: "lines", line: { width: 2, color: c.color, dash: c.dash }, hovertemplate: name === "bubble" ? "%{y:.1f} %" : "%{y:.2f}" });
    });
    const axes = { reward: { nticks: 6 }, kl: { nticks: 5, rangemode: "tozero" }, bubble: { nticks: 4, ticksuffix: " %", rangemode: "tozero" } };
    const layout = { hovermode: "x unified", margin: { l: 48, r: 14, t: 8, b: main ? 38 : 24 }, uirevision: v.axisName, shapes: [], annotations: [],
      xaxis: { nticks: main ? 9 : 5, rangemode: "tozero", title: { text: main ? v.axis.title : "" } }, yaxis: { ...axes[name] } };
    if (main && f.known(v.target)) target(layout, curves, v);
    return { data, layout: T.layout(layout) };
  }
  const shortened = (text) => text.replace(/[<>&]/g, (c) => ({ "<": "‹", ">": "›", "&": "+" })[c]).slice(0, 40);

  /* A line at the target, and from each curve that reaches it a drop to the axis with the place where it did. */
  function target(layout, curves, v) {
    const ys = curves.flatMap((c) => c.raw.concat(v.target)).filter(f.known), lo = Math.min(...ys), hi = Math.max(...ys), room = 0.06 * (hi - lo || 1);
    layout.yaxis.range = [lo - room, hi + room];
    layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: v.target, y1: v.target, line: { color: T.css("--border-strong"), width: 1, dash: "dot" } });
    layout.annotations.push({ xref: "paper", x: 0, y: v.target, text: `target ${f.figure(v.target)}`, showarrow: false, xanchor: "left", yanchor: "bottom", font: { size: 11, color: T.css("--text-3") } });
    curves.forEach((c) => {
      const hit = v.reached[c.run.id];
      if (!hit) return;
      const x = placeOf(hit, c, v);
      if (x === null) return;
      layout.shapes.push({ type: "line", x0: x, x1: x, y0: lo - room, y1: v.target, line: { color: c.color, width: 1, dash: "dot" } });
      layout.annotations.push({ x, y: lo - room, text: `${f.figure(x)}${v.axis.word ? ` ${v.axis.word}` : ""}`, showarrow: false, xanchor: "left", xshift: 4, yanchor: "bottom", yshift: 14 * c.k, font: { size: 12, color: T.css("--text-2") } });
    });
  }
  function placeOf(hit, curve, v) {
    if (v.axisName === "step") return hit.step;
    if (v.axisName === "wall") return hit.elapsed_s / v.axis.size;
    const column = known(v.series[curve.run.id][REWARD]), i = column.step.findIndex((s) => s >= hit.step);
    return i < 0 ? null : column.x[i] / v.axis.size;
  }
  Oppo.compareCharts = { KEYS: [REWARD, KL, "bubble/*"], NAMES: ["reward", "kl", "bubble"], axisOf, build, DASHES };
})();
