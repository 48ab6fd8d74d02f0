/* Compare, page "Samples": the responses of several runs to the same prompt side by side. The runs are in the address. */
import * as SideBySide from "../samples/side-by-side.js";
import { drawRuns, onAdd, runColours } from "./runs.js";
import { readIds } from "./view.js";

const MOST_RUNS = 12;
const $ = (id) => document.getElementById(id);
const ids = () => readIds(location.search);
let runs = [];

function draw() {
  const all = ids();
  drawRuns(all, runColours(all), runs, (id) => choose(all.filter((other) => other !== id)));
  $("choose-runs").hidden = all.length > 0;
  $("wanted").hidden = !all.length;
  $("too-many").hidden = all.length <= MOST_RUNS;
}
function choose(all) {
  const params = new URLSearchParams(location.search);
  if (all.length) params.set("runs", all.join(","));
  else params.delete("runs");
  history.pushState(null, "", `${location.pathname}?${params}`.replace(/%2C/g, ",").replace(/\?$/, ""));
  draw();
  SideBySide.load();
}
onAdd((id) => {
  if (!ids().includes(id)) choose([...ids(), id]);
});
window.addEventListener("popstate", draw);
draw();
SideBySide.start({
  ids: () => ids().slice(0, MOST_RUNS),
  colour: (id) => runColours(ids()).get(id),
  onReply(reply) {
    ({ runs } = reply);
    draw();
  },
});
