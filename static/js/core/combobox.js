/* A text input with suggestions, an ARIA combobox: arrows choose, Enter takes the chosen one, Tab also a single one, Escape
   closes.
     const { refresh, close } = combobox(input, list, { load, offer, onTake, onEnter })
   `load()`: called on focus, resolves when suggestions can be offered; `offer()` → [{ text, note, … }]; `onTake(option)`, after
   which the list shows what is offered next, unless it returns false; `onEnter()`: Enter with none chosen, otherwise the form's
   own. */
import { el } from "./dom.js";

const MOST = 9;

export function combobox(input, list, { load = async () => {}, offer, onTake, onEnter = null }) {
  let shown = [];
  let chosen = -1;

  function show(options) {
    shown = options.slice(0, MOST);
    chosen = -1;
    list.replaceChildren(
      ...shown.map((option, i) =>
        el(
          "li",
          { role: "option", id: `${list.id}-${i}`, "aria-selected": "false" },
          el("span", { class: "num" }, option.text),
          el("span", { class: "note" }, option.note),
        ),
      ),
    );
    list.hidden = shown.length === 0;
    input.setAttribute("aria-expanded", String(shown.length > 0));
    input.removeAttribute("aria-activedescendant");
  }
  const close = () => show([]);
  const refresh = () => show(document.activeElement === input ? offer() : []);
  const open = () => load().then(refresh);
  function choose(i) {
    chosen = (i + shown.length) % shown.length;
    [...list.children].forEach((node, k) => node.setAttribute("aria-selected", String(k === chosen)));
    input.setAttribute("aria-activedescendant", `${list.id}-${chosen}`);
    list.children[chosen].scrollIntoView({ block: "nearest" });
  }
  function take(i) {
    if (onTake(shown[i]) !== false) refresh();
  }
  function actOf(e) {
    const { key } = e;
    if (key === "Enter") return chosen >= 0 ? () => take(chosen) : onEnter;
    if (!shown.length) return key === "ArrowDown" ? open : null;
    if (key === "ArrowDown") return () => choose(chosen + 1);
    if (key === "ArrowUp") return () => choose(chosen < 0 ? -1 : chosen - 1);
    if (key === "Escape") return close;
    const one = chosen >= 0 || shown.length === 1;
    return key === "Tab" && !e.shiftKey && one ? () => take(Math.max(0, chosen)) : null;
  }
  input.addEventListener("keydown", (e) => {
    const act = actOf(e);
    if (!act) return;
    e.preventDefault();
    e.stopImmediatePropagation(); // Escape closes the list only, not the dialog around it
    act();
  });
  input.addEventListener("focus", open);
  input.addEventListener("input", refresh);
  input.addEventListener("click", refresh);
  input.addEventListener("blur", close);
  list.addEventListener("mousedown", (e) => {
    const node = e.target.closest("li");
    e.preventDefault(); // the input keeps the focus
    if (node) take([...list.children].indexOf(node));
  });
  return { refresh, close };
}
