/* The column chooser: add with completion, remove, reorder by dragging or by buttons; the choice is in the address. */
import * as api from "../core/api.js";
import { chosenList, matching } from "../core/chosen-list.js";
import { combobox } from "../core/combobox.js";
import { setText } from "../core/dom.js";

const $ = (id) => document.getElementById(id);
const list = $("columns-list");
const input = $("columns-add");
const words = $("columns-words");
const status = $("columns-status");
const MOST = 30;
let known = null;

async function add(key) {
  if (!known) await load(); // the user may type before they are loaded
  const column = known && known.find((c) => c.key === key);
  if (!column) {
    setText(
      status,
      known ? `There is no column “${key}”. Choose one from the list.` : "The columns cannot be loaded. Try again.",
    );
    return;
  }
  if (list.children.length >= MOST) {
    setText(status, `A table has at most ${MOST} columns.`);
    return;
  }
  input.value = "";
  refresh();
  chosen.add(key, column.title);
}
async function load() {
  if (!known) {
    const reply = await api.get("runs/words").catch(() => null);
    if (reply)
      known = [
        ...reply.columns.map((c) => ({ key: c.name, title: c.title, note: c.says })),
        ...reply.metrics.map((m) => ({ key: m, title: m, note: "metric" })),
        ...reply.settings.map((s) => ({ key: s, title: s, note: "setting" })),
      ];
  }
}
const offer = () => matching((known || []).filter((column) => !chosen.keys().includes(column.key)), input.value);
function enter() {
  const typed = input.value.trim();
  const found = offer();
  if (!typed) show();
  else add(found.length === 1 ? found[0].text : typed);
}
function show() {
  const url = new URL(location.href);
  const usual = list.dataset.usual;
  const now = chosen.keys().join(",");
  url.searchParams.delete("cursor");
  if (now && now !== usual) url.searchParams.set("cols", now);
  else url.searchParams.delete("cols");
  location.assign(url.href.replace(/%2C/g, ",").replace(/%2F/g, "/"));
}
const chosen = chosenList(list, {
  announce: (text) => setText(status, text),
  empty: () => input.focus(),
  labels: ["Move left:", "Move right:"],
});
const { refresh } = combobox(input, words, { load, offer, onTake: (option) => add(option.text), onEnter: enter });
$("columns-show").addEventListener("click", show);
$("columns-usual").addEventListener("click", () => {
  chosen.clear();
  show();
});
