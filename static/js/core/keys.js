/* The keyboard shortcuts of a page, in one place: "?" lists them, and a switch in that list turns single keys off.
     shortcut("t", "light or dark", toggleTheme)
     shortcut("g r", "runs", open)                    one key after the other
     shortcut("← →", "pan", pan, { keys: ["ArrowLeft", "ArrowRight"] })   `pan(key)`; shown differently from the keys
   A shortcut does nothing while the user types, and in dialogs. */
import { el } from "./dom.js";

const SEQUENCE_MS = 900;
const OFF = "oppo-keys-off";
const shortcuts = [];
let before = { key: "", at: 0 };

export function shortcut(shown, words, act, { keys = [shown] } = {}) {
  shortcuts.push({ shown, words, act, keys });
}
/* A key that a list or an input handles itself: only shown. */
export const describeKey = (shown, words) => shortcut(shown, words, null, { keys: [] });
function areOff() {
  try {
    return localStorage.getItem(OFF) === "1";
  } catch (e) {
    return false; // storage may be refused
  }
}
function setOff(off) {
  try {
    if (off) localStorage.setItem(OFF, "1");
    else localStorage.removeItem(OFF);
  } catch (e) {
    /* storage may be refused; then they stay on */
  }
}
/* Whether the focused element uses the key itself. One in a closed dialog does not, but has the focus until the next frame. */
function isTaken(e) {
  if (document.querySelector("dialog[open]")) return true;
  if (e.target.closest("dialog")) return false;
  const scrolls = e.key.startsWith("Arrow") && e.target.closest(".table-wrap[tabindex]");
  return scrolls || e.target.matches("input, select, textarea, [contenteditable]");
}
document.addEventListener("keydown", (e) => {
  if (e.defaultPrevented || e.metaKey || e.ctrlKey || e.altKey || isTaken(e)) return;
  const sequence = e.timeStamp - before.at < SEQUENCE_MS ? `${before.key} ${e.key}` : null;
  const found = [sequence, e.key].flatMap((pressed) => shortcuts.filter(({ keys }) => keys.includes(pressed)))[0];
  before = { key: e.key, at: found && found.keys.includes(sequence) ? 0 : e.timeStamp };
  if (!found || (areOff() && e.key !== "?")) return;
  e.preventDefault();
  found.act(e.key);
});

function help() {
  const list = shortcuts.flatMap(({ shown, words }) => [
    el(
      "dt",
      {},
      shown.split(" ").map((key) => el("kbd", {}, key)),
    ),
    el("dd", {}, words),
  ]);
  const single = el("input", { type: "checkbox", checked: !areOff(), onchange: (e) => setOff(!e.target.checked) });
  const box = el(
    "dialog",
    { class: "keys", "aria-label": "Keyboard shortcuts", onclose: () => box.remove() },
    el("h2", {}, "Keyboard shortcuts"),
    el("dl", {}, list),
    el("label", { class: "row" }, single, "Single keys act as shortcuts"),
    el(
      "div",
      { class: "row" },
      el("button", { class: "btn push", type: "button", onclick: () => box.close() }, "Close"),
    ),
  );
  document.body.append(box);
  box.showModal();
}
shortcut("?", "this list", help);
