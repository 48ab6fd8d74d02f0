/* The steps in the window as a Plotly figure, made by the server for pages and notebooks, to view and to download. Plotly is a
   megabyte that the timeline itself does not need, so it is fetched when a figure is requested. */
import { Plotly, loadPlotly } from "../charts/plotly.js";
import * as T from "../charts/plotly-theme.js";
import * as api from "../core/api.js";
import { tryAgain } from "../core/api.js";
import { setText } from "../core/dom.js";
import { run } from "./store.js";

const $ = (id) => document.getElementById(id);
const dialog = $("figure-dialog");
const plot = $("figure-plot");
const status = $("figure-status");
const LEGEND_FROM_PX = 640; // narrower, the page's own legend must suffice
let steps = null;
let shown = null;

function theme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}
async function draw() {
  const [from_step, to_step] = steps;
  const query = { from_step, to_step, theme: theme() };
  const address = `/api/v1/runs/${run.id}/timeline/figure?${new URLSearchParams(query)}`;
  $("figure-json").href = address;
  setText(status, shown ? "" : "Drawing …");
  const [figure] = await Promise.all([api.get(`runs/${run.id}/timeline/figure`, query), loadPlotly()]);
  const wide = plot.clientWidth > LEGEND_FROM_PX;
  const margin = wide ? figure.layout.margin : { ...figure.layout.margin, l: 100, b: 32 };
  figure.layout.font.family = getComputedStyle(document.body).fontFamily;
  await Plotly.react(plot, figure.data, { ...figure.layout, margin, showlegend: wide }, T.config);
  shown = figure;
  setText(status, "");
}
const drawn = () =>
  draw().catch((e) => {
    tryAgain(e, draw);
    setText(status, "The figure could not be drawn. Close it and try again.");
  });
function save(format) {
  const [from, to] = steps;
  const { width, height } = plot.getBoundingClientRect();
  const size = { width: Math.max(900, Math.round(width)), height: Math.round(height), scale: format === "png" ? 2 : 1 };
  return Plotly.downloadImage(
    { ...shown, config: T.config },
    { format, filename: `run-${run.id}-steps-${from}-${to}`, ...size },
  );
}
function open(stepsNow) {
  steps = stepsNow;
  setText($("figure-title"), steps[0] === steps[1] ? `Step ${steps[0]}` : `Steps ${steps[0]}–${steps[1]}`);
  dialog.showModal();
  drawn();
}
dialog
  .querySelectorAll("[data-picture]")
  .forEach((b) => b.addEventListener("click", () => shown && save(b.dataset.picture)));
T.onChange(() => {
  if (dialog.open) drawn();
});
/* `window_()`: the first and the last step that the timeline shows now. */
export const timelineFigure = (window_) => $("figure").addEventListener("click", () => open(window_()));
