/* The pinned charts, above all metrics: one's own, or else the project's. Every change is saved at once. */
import * as api from "../core/api.js";
import { readJson, setShown, setText, toast } from "../core/dom.js";
import { editChart } from "./chart-editor.js";
import { metricPanel, titleOf } from "./metric-panel.js";

const MOST = 60;
const $ = (id) => document.getElementById(id);
const grid = $("pinned-charts");
/* A layout as text, its fields in one order: PostgreSQL's jsonb returns them in another. */
const FIELDS = ["project", "charts", "title", "keys", "log", "own", "shared", "may_share"];
const asText = (layout) => JSON.stringify(layout, FIELDS);

/* `host`: { view, columns, drawer, keys(), openFull(charts, i) } */
export function pinnedCharts(host) {
  let layout = readJson("chart-layout");
  let panels = [];
  let dragged = null;
  let stored = layout; // as the server has it
  let queue = Promise.resolve(true);
  let saving = 0;
  const charts = () => panels.map((panel) => panel.chart);
  const path = `projects/${layout.project}/charts`;

  const menuOf = (panel) => () => {
    const i = panels.indexOf(panel);
    const { chart } = panel;
    return [
      ["Full screen", () => host.openFull(charts(), i)],
      [chart.log ? "Linear axis" : "Logarithmic axis", () => replace(i, { ...chart, log: !chart.log })],
      i > 0 ? ["Move left", () => move(i, i - 1)] : null,
      i < panels.length - 1 ? ["Move right", () => move(i, i + 1)] : null,
      ["Edit", () => editChart(chart, host.keys(), (edited) => replace(i, edited))],
      ["Unpin", () => unpin(i)],
    ].filter(Boolean);
  };
  function show() {
    const focused = panels.findIndex(({ node }) => node.contains(document.activeElement));
    panels.forEach(host.drawer.forget);
    panels = layout.charts.map((chart) => {
      const panel = metricPanel(chart, { view: host.view, columns: host.columns, menu: () => menuOf(panel)() });
      panel.node.querySelector("h3").draggable = true;
      return panel;
    });
    grid.replaceChildren(...panels.map((panel) => panel.node));
    panels.forEach(host.drawer.watch);
    if (focused >= 0) (panels[focused]?.node.querySelector("summary") || $("pinned-new")).focus();
    $("pinned-none").hidden = panels.length > 0;
    setText($("pinned-whose"), !panels.length ? "" : layout.own ? "only for you" : "for everyone in the project");
    setShown($("pinned-share"), layout.own && layout.may_share, $("pinned-new"));
    setShown($("pinned-reset"), layout.own && layout.shared, $("pinned-new"));
  }
  /* Changes are saved one after the other, since each replaces all charts. When the last one is answered, the page shows what the
     server has. Resolves to whether it was saved and is still the last one: a late message would replace the Undo of a newer
     change. */
  function send(to, body) {
    saving += 1;
    queue = queue.then(async () => {
      let done = true;
      try {
        stored = await api.post(to, body);
      } catch (e) {
        done = false;
        toast(`Not saved: ${e.message}`);
      }
      saving -= 1;
      if (!saving && asText(stored) !== asText(layout)) {
        layout = stored;
        show();
      }
      return done && !saving;
    });
    return queue;
  }
  function save(list, focused = null) {
    layout = { ...layout, charts: list, own: true };
    show();
    if (focused !== null) panels[focused].node.querySelector("summary").focus();
    return send(path, { charts: list });
  }
  const replace = (i, chart) => save(charts().with(i, chart), i);
  function move(from, to) {
    const list = charts();
    list.splice(to, 0, ...list.splice(from, 1));
    save(list, to);
  }
  function unpin(i) {
    const list = charts();
    const [gone] = list.splice(i, 1);
    save(list);
    $("pinned-new").focus();
    toast(`${titleOf(gone)} unpinned`, { label: "Undo", act: () => save(charts().toSpliced(i, 0, gone), i) });
  }
  async function pin(chart) {
    if (panels.length >= MOST) toast(`At most ${MOST} charts can be pinned. Unpin one first.`);
    else if (await save([...charts(), chart])) toast(`${titleOf(chart)} pinned`);
  }
  const hasPinned = (key) => panels.some(({ chart }) => chart.keys.length === 1 && chart.keys[0] === key);

  const panelAt = (e) => panels.findIndex(({ node }) => node.contains(e.target));
  grid.addEventListener("dragstart", (e) => {
    dragged = panelAt(e);
    e.dataTransfer.effectAllowed = "move";
    e.dataTransfer.setData("text/plain", titleOf(panels[dragged].chart));
  });
  grid.addEventListener("dragover", (e) => dragged !== null && e.preventDefault());
  grid.addEventListener("drop", (e) => {
    e.preventDefault();
    const to = panelAt(e);
    if (dragged !== null && to >= 0 && to !== dragged) move(dragged, to);
  });
  grid.addEventListener("dragend", () => {
    dragged = null;
  });
  $("pinned-new").addEventListener("click", () => editChart({ title: "", keys: [], log: false }, host.keys(), pin));
  $("pinned-share").addEventListener("click", async () => {
    if (await send(`${path}/share`, { charts: charts() })) toast("Everyone in the project sees these charts");
  });
  $("pinned-reset").addEventListener("click", async () => {
    const own = charts();
    const takeBack = () => {
      save(own);
      $("pinned-new").focus();
    };
    if (await send(`${path}/reset`, {})) toast("The project’s charts are shown", { label: "Undo", act: takeBack });
  });
  show();
  return { pin, hasPinned };
}
