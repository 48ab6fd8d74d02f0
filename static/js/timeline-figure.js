/* The steps in the window as a Plotly figure, made by the server for pages and notebooks, to view and to download. Plotly is a
   megabyte that the timeline itself does not need, so it is fetched when a figure is requested. */
(function () {
  "use strict";
  const { Oppo, OppoTheme: T } = window, { run, setText } = Oppo;
  const $ = (id) => document.getElementById(id);
  const dialog = $("figure-dialog"), plot = $("figure-plot"), status = $("figure-told");
  const LEGEND_FROM_PX = 640;                            // narrower, the page's own legend must suffice
  let steps = null, shown = null, loaded = null;

  function plotly() {
    loaded ||= new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = dialog.dataset.plotly;
      script.addEventListener("load", done);
      script.addEventListener("error", () => { loaded = null; script.remove(); failed(new TypeError("Plotly could not be loaded")); });
      document.body.append(script);
    });
    return loaded;
  }
  function theme() {
    const chosen = document.documentElement.dataset.theme;
    return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  }
  async function draw() {
    const [from_step, to_step] = steps, query = { from_step, to_step, theme: theme() };
    const address = `/api/v1/runs/${run.id}/timeline/figure?${new URLSearchParams(query)}`;
    $("figure-json").href = address;
    setText(status, shown ? "" : "Drawing …");
    const [figure] = await Promise.all([Oppo.api.get(`runs/${run.id}/timeline/figure`, query), plotly()]);
    const wide = plot.clientWidth > LEGEND_FROM_PX, margin = wide ? figure.layout.margin : { ...figure.layout.margin, l: 100, b: 32 };
    figure.layout.font.family = getComputedStyle(document.body).fontFamily;
    await window.Plotly.react(plot, figure.data, { ...figure.layout, margin, showlegend: wide }, T.config);
    shown = figure;
    setText(status, "");
  }
  const drawn = () => draw().catch((e) => { Oppo.again(e, draw); setText(status, "The figure could not be drawn. Close it and try again."); });
  function save(format) {
    const [from, to] = steps, { width, height } = plot.getBoundingClientRect();
    const size = { width: Math.max(900, Math.round(width)), height: Math.round(height), scale: format === "png" ? 2 : 1 };
    return window.Plotly.downloadImage({ ...shown, config: T.config }, { format, filename: `run-${run.id}-steps-${from}-${to}`, ...size });
  }
  function open(stepsNow) {
    steps = stepsNow;
    setText($("figure-title"), steps[0] === steps[1] ? `Step ${steps[0]}` : `Steps ${steps[0]}–${steps[1]}`);
    dialog.showModal();
    drawn();
  }
  dialog.querySelectorAll("[data-picture]").forEach((b) => b.addEventListener("click", () => shown && save(b.dataset.picture)));
  T.onChange(() => { if (dialog.open) drawn(); });
  /* `window_()`: the first and the last step that the timeline shows now. */
  Oppo.timelineFigure = (window_) => $("figure").addEventListener("click", () => open(window_()));
})();
