/* The compared runs on both pages of Compare: their colours, a token for each, and the links from one page to the other. */
import { drawTokens } from "../core/chosen-list.js";
import { runLabel, setText } from "../core/dom.js";

const $ = (id) => document.getElementById(id);

/* Run → 1 to 8, a colour; with more runs 1 to 24, a colour and a pattern (`runMark`). Its own unless another run has it; then the
   lowest free one. */
export function runColours(ids) {
  const all = Array.from({ length: ids.length > 8 ? 24 : 8 }, (_, i) => i + 1);
  const colours = new Map();
  ids.forEach((id) => {
    const taken = new Set(colours.values());
    const own = ((id - 1) % all.length) + 1;
    colours.set(id, taken.has(own) ? all.find((c) => !taken.has(c)) || own : own);
  });
  return colours;
}
/* `runs`: those whose names are known already; the others have theirs in the list of further runs. */
export function drawRuns(ids, colours, runs, onRemove) {
  const name = (id) => {
    const run = runs.find((r) => r.id === id);
    const option = $("add").querySelector(`option[value="${id}"]`);
    return run ? runLabel(run) : option ? option.dataset.label : `#${id}`;
  };
  const tokens = ids.map((id) => ({ key: id, text: name(id), colour: colours.get(id) }));
  drawTokens($("tokens"), tokens, { add: $("add"), remove: onRemove });
  [...$("add").options].forEach((option) => {
    option.disabled = ids.includes(Number(option.value));
  });
  setText($("count-runs"), ids.length > 1 ? `${ids.length} runs` : "");
  document.querySelectorAll("[data-compare]").forEach((link) => {
    link.href = `${link.dataset.compare}${ids.length ? `?runs=${ids.join(",")}` : ""}`;
  });
}
/* Calls back with a run that was chosen from the list of further runs. */
export function onAdd(callback) {
  $("add").addEventListener("change", (e) => {
    const id = Number(e.target.value);
    e.target.value = "";
    if (id) callback(id);
  });
}
