/* Completion for the filter of runs: fields, existing values, and metrics, offered while the user types.
     filterWords(input, list, onPick)   arrows choose, Tab or Enter accepts, Escape closes */
import * as api from "../core/api.js";
import { combobox } from "../core/combobox.js";

/* What could stand in place of the term under the cursor: [{ text, note, open }]; `open` terms want a value next. */
function offers(words, term) {
  const minus = term.startsWith("-") ? "-" : "";
  const inner = term.slice(minus.length).toLowerCase();
  const colon = inner.indexOf(":");
  const field = colon > 0 ? inner.slice(0, colon) : "";
  if (words.values[field]) {
    const done = inner.slice(0, inner.lastIndexOf(",") + 1) || `${field}:`;
    const begun = inner.slice(Math.max(colon, inner.lastIndexOf(",")) + 1).replace(/"/g, "");
    return words.values[field]
      .filter((v) => v.toLowerCase().startsWith(begun) && v.toLowerCase() !== begun)
      .map((v) => ({ text: minus + done + (/[\s,]/.test(v) ? `"${v}"` : v), note: "", open: false }));
  }
  const fields = words.fields
    .filter((f) => f.name.startsWith(inner))
    .map((f) => ({ text: minus + f.name + (f.kind === "text" ? ":" : ">"), note: f.says, open: true }));
  const metrics =
    inner.length < 2
      ? []
      : words.metrics
          .filter((m) => m.toLowerCase().includes(inner) && !/[<>=]/.test(inner))
          .map((m) => ({ text: `${minus}${m}>`, note: "metric", open: true }));
  return [...fields, ...metrics];
}
function termAt(input) {
  const before = input.value.slice(0, input.selectionStart);
  const from = before.search(/(?:"[^"]*"?|[^\s"])*$/);
  const after = input.value.slice(input.selectionStart).match(/^\S*/)[0];
  return { from, to: input.selectionStart + after.length, text: before.slice(from) };
}
export function filterWords(input, list, onPick) {
  let words = null;

  async function load() {
    if (!words) words = await api.get("runs/words").catch(() => null); // without it there is no completion
  }
  function take({ text, open }) {
    const { from, to } = termAt(input);
    const rest = input.value.slice(to);
    const gap = open || rest.startsWith(" ") ? "" : " ";
    input.value = input.value.slice(0, from) + text + gap + rest;
    const place = from + text.length + (open ? 0 : 1);
    input.setSelectionRange(place, place);
    onPick();
  }
  combobox(input, list, { load, offer: () => (words ? offers(words, termAt(input).text) : []), onTake: take });
}
