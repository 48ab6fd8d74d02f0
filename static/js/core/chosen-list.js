/* An ordered list of chosen names: reorder by dragging or by buttons, remove.
     const chosen = chosenList(list, { announce, empty, labels: ["Move up:", "Move down:"] })
     chosen.add("actor/entropy", "Entropy");  chosen.keys();  chosen.clear()
   `announce(text)` describes a change to people who do not see it; `empty()` takes the focus when nothing is left. */
import { el, keepFocus, runMark } from "./dom.js";

export function chosenList(list, { announce, empty, labels }) {
  let dragged = null;
  const keys = () => [...list.children].map((node) => node.dataset.key);
  const titleOf = (node) => node.querySelector("span").textContent;
  const place = (node) =>
    announce(`${titleOf(node)} is number ${keys().indexOf(node.dataset.key) + 1} of ${list.children.length}.`);

  function item(key, title) {
    const button = (words, sign, onclick) =>
      el("button", { class: "btn btn-icon btn-small", type: "button", "aria-label": `${words} ${title}`, onclick }, sign);
    const node = el(
      "li",
      { "data-key": key, draggable: "true" },
      el("span", { class: "grow" }, title),
      button(labels[0], "↑", () => move(node, -1)),
      button(labels[1], "↓", () => move(node, 1)),
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
    place(node);
  }
  function remove(node) {
    const next = node.nextElementSibling || node.previousElementSibling;
    node.remove();
    announce(`${titleOf(node)} removed.`);
    if (next) next.querySelector("button:last-child").focus();
    else empty();
  }
  function add(key, title) {
    if (!keys().includes(key)) list.append(item(key, title));
    place([...list.children].find((node) => node.dataset.key === key));
    list.lastElementChild.scrollIntoView({ block: "nearest" });
  }
  function onDrag(e) {
    const over = e.target.closest("li");
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
    if (dragged) place(dragged);
    dragged = null;
  });
  return { add, keys, clear: () => list.replaceChildren() };
}
/* Names in a row, each with a button that removes it. A row without changes is not drawn anew, so that a button keeps the focus
   and the press on it; the focus of a removed one goes to the next, or to `add`. `tokens`: [{ key, text, colour }, …] */
export function drawTokens(row, tokens, { add, remove }) {
  const drawn = JSON.stringify(tokens);
  if (row.dataset.drawn === drawn) return;
  row.dataset.drawn = drawn;
  const buttons = () => [...row.querySelectorAll("button")];
  const at = buttons().indexOf(document.activeElement);
  const token = ({ key, text, colour }) => {
    const attributes = { type: "button", "aria-label": `Remove ${text}`, "data-focus": `${row.id}-${key}` };
    const button = el("button", { ...attributes, onclick: () => remove(key) }, "×");
    return el("span", { class: "token", ...(colour && runMark(colour)) }, el("b", {}, text), button);
  };
  keepFocus(
    () => row.replaceChildren(...tokens.map(token)),
    () => buttons()[at] || add,
  );
}
/* Options that start with the typed text, then those that contain it. */
export function matching(options, typed) {
  const text = typed.trim().toLowerCase();
  const names = (option) => [option.key, option.title].map((name) => name.toLowerCase());
  const begins = options.filter((option) => names(option).some((name) => name.startsWith(text)));
  const has = options.filter((option) => !begins.includes(option) && option.key.toLowerCase().includes(text));
  return [...begins, ...has].map((option) => ({ text: option.key, note: option.note }));
}
