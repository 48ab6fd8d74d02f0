/* Sharing: device-hours per week, one stack per team. */
import { Plotly, loadPlotly } from "./charts/plotly.js";
import * as T from "./charts/plotly-theme.js";
import { el } from "./core/dom.js";
import { deviceTime } from "./core/format.js";

const usage = JSON.parse(document.getElementById("usage").textContent).filter((entry) => entry.weeks.length);
const WIDEST_PX = 96;
const plot = document.getElementById("plot-usage");
const legend = document.getElementById("usage-legend");
document.getElementById("no-usage").hidden = usage.length > 0;
plot.hidden = !usage.length;

const weeks = [...new Set(usage.flatMap((entry) => entry.weeks.map((w) => w.week)))].sort();
const hoursOf = (entry) =>
  weeks.map((week) => entry.weeks.filter((w) => w.week === week).reduce((sum, w) => sum + w.device_hours, 0));
function draw() {
  // Plotly interprets some tags in names, and any user can name a team.
  const width = Math.min(0.65, (WIDEST_PX * weeks.length) / Math.max(1, plot.clientWidth)); // of a week's width: a single week is not a wall
  const data = usage.map((entry, i) => ({
    type: "bar",
    x: weeks,
    y: hoursOf(entry),
    text: hoursOf(entry).map(deviceTime),
    textposition: "none",
    name: entry.team.replace(/[<>&]/g, " "),
    marker: { color: T.run(i + 1) },
    hovertemplate: "%{text}",
  }));
  const layout = T.layout({
    barmode: "stack",
    bargap: 1 - width,
    hovermode: "x unified",
    xaxis: { type: "category" },
    margin: { l: 62 },
    yaxis: { rangemode: "tozero", tickformat: ",", title: { text: "device-hours" } },
  });
  Plotly.react(plot, data, layout, T.config);
}
legend.replaceChildren(
  ...usage.map((entry, i) => el("li", {}, el("span", { class: "swatch-line", "data-run": (i % 8) + 1 }), entry.team)),
);
if (usage.length) {
  await loadPlotly();
  draw();
  T.onChange(draw);
}
