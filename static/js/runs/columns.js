/* The column chooser: add with completion, remove, reorder by dragging or by buttons; the choice is in the address. */
import * as api from "../core/api.js";
import { combobox } from "../core/combobox.js";
import { el, setText } from "../core/dom.js";

const $ = (id) => document.getElementById(id);
const list = $("columns-list");
const input = $("columns-add");
const words = $("columns-words");
const status = $("columns-status");
const MOST = 30;
let known = null;
let dragged = null;

const keys = () => [...list.children].map((item) => item.dataset.key);
function item(key, title) {
  const button = (words, sign, onclick) =>
    el("button", { class: "btn btn-icon btn-small", type: "button", "aria-label": `${words} ${title}`, onclick }, sign);
  const node = el(
    "li",
    { "data-key": key, draggable: "true" },
    el("span", { class: "grow" }, title),
    button("Move left:", "↑", () => move(node, -1)),
    button("Move right:", "↓", () => move(node, 1)),
    button("Remove", "×", () => remove(node)),
  );
  return node;
}
function move(node, by) {
  const other = by < 0 ? node.previousElementSibling : node.nextElementSibling;
  const focused = document.activeElement;
  if (!other) return;
  if (by < 0) other.before(node);
  else other.after(node);
  focused.focus(); // moving a node removes the focus
  announce(node);
}
function announce(node) {
  setText(
    status,
    `${node.querySelector("span").textContent} is column ${keys().indexOf(node.dataset.key) + 1} of ${list.children.length}.`,
  );
}
function remove(node) {
  const next = node.nextElementSibling || node.previousElementSibling;
  node.remove();
  setText(status, `${node.querySelector("span").textContent} removed.`);
  (next ? next.querySelector("button:last-child") : input).focus();
}
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
  if (!keys().includes(key)) list.append(item(key, column.title));
  input.value = "";
  refresh();
  announce([...list.children].find((node) => node.dataset.key === key));
  list.lastElementChild.scrollIntoView({ block: "nearest" });
}
async function load() {
  if (!known) {
    const reply = await api.get("runs/words").catch(() => null);
    if (reply)
      known = [
        ...reply.columns.map((c) => ({ key: c.name, title: c.title, says: c.says })),
        ...reply.metrics.map((m) => ({ key: m, title: m, says: "metric" })),
        ...reply.settings.map((s) => ({ key: s, title: s, says: "setting" })),
      ];
  }
}
/* Names that start with the typed text, then names that contain it. */
function offer() {
  const typed = input.value.trim().toLowerCase();
  const rest = (known || []).filter((c) => !keys().includes(c.key));
  const begins = rest.filter((c) => c.key.toLowerCase().startsWith(typed) || c.title.toLowerCase().startsWith(typed));
  const has = rest.filter((c) => !begins.includes(c) && c.key.toLowerCase().includes(typed));
  return [...begins, ...has].map((c) => ({ text: c.key, says: c.says }));
}
function enter() {
  const typed = input.value.trim();
  const found = offer();
  if (!typed) show();
  else add(found.length === 1 ? found[0].text : typed);
}
function show() {
  const url = new URL(location.href);
  const usual = list.dataset.usual;
  const now = keys().join(",");
  url.searchParams.delete("cursor");
  if (now && now !== usual) url.searchParams.set("cols", now);
  else url.searchParams.delete("cols");
  location.assign(url.href.replace(/%2C/g, ",").replace(/%2F/g, "/"));
}
function onDrag(e) {
  const over = e.target.closest("#columns-list li");
  if (!dragged || !over) return;
  e.preventDefault();
  if (over === dragged) return;
  const box = over.getBoundingClientRect();
  if (e.clientY < box.top + box.height / 2) over.before(dragged);
  else over.after(dragged);
}
list.replaceChildren(...[...list.children].map((node) => item(node.dataset.key, node.textContent)));
list.addEventListener("dragstart", (e) => {
  dragged = e.target.closest("li");
  e.dataTransfer.effectAllowed = "move";
  e.dataTransfer.setData("text/plain", dragged.dataset.key);
});
list.addEventListener("dragover", onDrag);
list.addEventListener("drop", (e) => e.preventDefault());
list.addEventListener("dragend", () => {
  if (dragged) announce(dragged);
  dragged = null;
});
const refresh = combobox(input, words, { load, offer, onTake: (option) => add(option.text), onEnter: enter });
$("columns-show").addEventListener("click", show);
$("columns-usual").addEventListener("click", () => {
  list.replaceChildren();
  show();
});
