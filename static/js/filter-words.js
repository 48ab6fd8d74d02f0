/* Completion for the filter of runs: fields, existing values, and metrics, offered while the user types.
     Oppo.filterWords(input, list, onPick)   arrows choose, Tab or Enter accepts, Escape closes */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {}), { el } = Oppo;
  const MOST = 9;

  /* What could stand in place of the term under the cursor: [{ text, says, open }]; `open` terms want a value next. */
  function offers(words, term) {
    const minus = term.startsWith("-") ? "-" : "", inner = term.slice(minus.length).toLowerCase();
    const colon = inner.indexOf(":"), field = colon > 0 ? inner.slice(0, colon) : "";
    if (words.values[field]) {
      const done = inner.slice(0, inner.lastIndexOf(",") + 1) || `${field}:`, begun = inner.slice(Math.max(colon, inner.lastIndexOf(",")) + 1).replace(/"/g, "");
      return words.values[field].filter((v) => v.toLowerCase().startsWith(begun) && v.toLowerCase() !== begun)
        .map((v) => ({ text: minus + done + (/[\s,]/.test(v) ? `"${v}"` : v), says: "", open: false }));
    }
    const fields = words.fields.filter((f) => f.name.startsWith(inner)).map((f) => ({ text: minus + f.name + (f.kind === "text" ? ":" : ">"), says: f.says, open: true }));
    const metrics = inner.length < 2 ? [] : words.metrics.filter((m) => m.toLowerCase().includes(inner) && !/[<>=]/.test(inner)).map((m) => ({ text: `${minus}${m}>`, says: "metric", open: true }));
    return [...fields, ...metrics];
  }
  function termAt(input) {
    const before = input.value.slice(0, input.selectionStart), from = before.search(/(?:"[^"]*"?|[^\s"])*$/);
    const after = input.value.slice(input.selectionStart).match(/^\S*/)[0];
    return { from, to: input.selectionStart + after.length, text: before.slice(from) };
  }
  Oppo.filterWords = function (input, list, onPick) {
    let words = null, shown = [], chosen = -1;

    async function load() {
      if (!words) words = await Oppo.api.get("runs/words").catch(() => null);     // without it there is no completion
      offer();
    }
    function offer() {
      if (!words || document.activeElement !== input) return close();
      shown = offers(words, termAt(input).text).slice(0, MOST);
      chosen = -1;
      list.replaceChildren(...shown.map((o, i) => el("li", { role: "option", id: `word-${i}`, "aria-selected": "false" }, el("span", { class: "num" }, o.text), el("span", { class: "note" }, o.says))));
      list.hidden = shown.length === 0;
      input.setAttribute("aria-expanded", String(shown.length > 0));
      input.removeAttribute("aria-activedescendant");
    }
    function close() {
      shown = [];
      list.hidden = true;
      input.setAttribute("aria-expanded", "false");
      input.removeAttribute("aria-activedescendant");
    }
    function choose(i) {
      chosen = (i + shown.length) % shown.length;
      [...list.children].forEach((node, k) => node.setAttribute("aria-selected", String(k === chosen)));
      input.setAttribute("aria-activedescendant", `word-${chosen}`);
      list.children[chosen].scrollIntoView({ block: "nearest" });
    }
    function take(i) {
      const { from, to } = termAt(input), { text, open } = shown[i], rest = input.value.slice(to), gap = open || rest.startsWith(" ") ? "" : " ";
      input.value = input.value.slice(0, from) + text + gap + rest;
      const place = from + text.length + (open ? 0 : 1);
      input.setSelectionRange(place, place);
      offer();
      onPick();
    }
    function onKey(e) {
      if (list.hidden) { if (e.key === "ArrowDown") { load(); e.preventDefault(); } return; }
      if (e.key === "ArrowDown" || e.key === "ArrowUp") { choose(chosen + (e.key === "ArrowDown" ? 1 : chosen < 0 ? 0 : -1)); e.preventDefault(); }
      else if ((e.key === "Enter" && chosen >= 0) || (e.key === "Tab" && !e.shiftKey && (chosen >= 0 || shown.length === 1))) { take(Math.max(0, chosen)); e.preventDefault(); }
      else if (e.key === "Escape") { close(); e.preventDefault(); e.stopImmediatePropagation(); }
    }
    input.addEventListener("focus", load);
    input.addEventListener("input", offer);
    input.addEventListener("click", offer);
    input.addEventListener("keydown", onKey);
    input.addEventListener("blur", close);
    list.addEventListener("mousedown", (e) => {
      const node = e.target.closest("li");
      e.preventDefault();                                // the input keeps the focus
      if (node) take([...list.children].indexOf(node));
    });
  };
})();
