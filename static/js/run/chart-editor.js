/* The dialog for a chart of several metrics: title, metrics in order, kind of axis. */
import { chosenList, matching } from "../core/chosen-list.js";
import { combobox } from "../core/combobox.js";
import { setText } from "../core/dom.js";

const MOST_KEYS = 12;
const $ = (id) => document.getElementById(id);
const dialog = $("chart-editor");
const input = $("chart-key");
const status = $("chart-status");
const chosen = chosenList($("chart-keys"), {
  announce: (text) => setText(status, text),
  empty: () => input.focus(),
  labels: ["Move up:", "Move down:"],
});
let known = [];
let done = null;

function offer() {
  const left = known.filter((key) => !chosen.keys().includes(key));
  return matching(
    left.map((key) => ({ key, title: key, note: "" })),
    input.value,
  );
}
function add(key) {
  if (!known.includes(key)) return setText(status, `This run has no metric “${key}”. Choose one from the list.`);
  if (chosen.keys().length >= MOST_KEYS) return setText(status, `A chart has at most ${MOST_KEYS} metrics.`);
  input.value = "";
  refresh();
  return chosen.add(key, key);
}
function enter() {
  const found = offer();
  if (input.value.trim()) add(found.length === 1 ? found[0].text : input.value.trim());
}
const { refresh } = combobox(input, $("chart-words"), { offer, onTake: (option) => add(option.text), onEnter: enter });
$("chart-save").addEventListener("click", () => {
  if (!chosen.keys().length) {
    setText(status, "Add at least one metric.");
    input.focus();
    return;
  }
  dialog.close();
  done({ title: $("chart-title").value.trim(), keys: chosen.keys(), log: $("chart-log").checked });
});

/* `keys`: all metrics of the run. Calls `onDone(chart)` unless it is cancelled. */
export function editChart(chart, keys, onDone) {
  known = keys;
  done = onDone;
  chosen.clear();
  chart.keys.forEach((key) => chosen.add(key, key));
  $("chart-title").value = chart.title;
  $("chart-log").checked = chart.log;
  input.value = "";
  setText(status, "");
  dialog.showModal();
  input.focus();
}
