/* Cards for further metrics of the compared runs, chosen by name; the choice is in the address.
     const more = moreCharts({ view(), metrics(), choose(changes, how), leave(plot), save(name, plot, title, format) });  more.show();  more.plot("actor/entropy") */
import { matching } from "../core/chosen-list.js";
import { combobox } from "../core/combobox.js";
import { el, icon, setText } from "../core/dom.js";
import { MOST_CHARTS } from "./view.js";

const $ = (id) => document.getElementById(id);
const grid = $("more-charts");
const input = $("chart-add");

export function moreCharts({ view, metrics, choose, leave, save }) {
  const cards = new Map(); // by key

  function card(key) {
    const plot = el("div", { class: "plot plot-m" });
    const quiet = (label, text, onclick, more = {}) =>
      el("button", { class: "btn btn-quiet btn-small", type: "button", "aria-label": label, onclick, ...more }, text);
    const log = quiet(`${key} on a logarithmic axis`, "log", () => toggleLog(key), { "aria-pressed": "false" });
    const node = el(
      "section",
      { class: "card" },
      el(
        "div",
        { class: "card-head" },
        el("h3", { class: "metric-name grow", title: key }, key),
        el(
          "span",
          { class: "take" },
          log,
          quiet(`${key} as PNG`, "PNG", () => save(key.replace(/\W+/g, "-"), plot, key, "png")),
          quiet(`${key} as SVG`, "SVG", () => save(key.replace(/\W+/g, "-"), plot, key, "svg")),
          quiet(`Remove ${key}`, icon("cross"), () => remove(key)),
        ),
      ),
      plot,
    );
    return { node, plot, log };
  }
  function toggleLog(key) {
    const { log } = view();
    choose({ log: log.includes(key) ? log.filter((other) => other !== key) : [...log, key] }, { again: false });
  }
  function remove(key) {
    choose({ charts: view().charts.filter((other) => other !== key) }, { again: false });
    input.focus();
  }
  function add(key) {
    const { charts } = view();
    if (!metrics().includes(key)) return setText($("chart-status"), `None of these runs has a metric “${key}”.`);
    if (charts.length >= MOST_CHARTS) return setText($("chart-status"), `At most ${MOST_CHARTS} charts can be added.`);
    input.value = "";
    close();
    setText($("chart-status"), "");
    return choose({ charts: [...charts, key] });
  }
  /* A card for every chosen metric, in their order. */
  function show() {
    const { charts, log } = view();
    cards.forEach(({ node, plot }, key) => {
      if (charts.includes(key)) return;
      leave(plot);
      node.remove();
      cards.delete(key);
    });
    charts.forEach((key, i) => {
      if (!cards.has(key)) cards.set(key, card(key));
      const { node, log: button } = cards.get(key);
      button.setAttribute("aria-pressed", String(log.includes(key)));
      if (grid.children[i] !== node) grid.insertBefore(node, grid.children[i] || null);
    });
    $("more-none").hidden = charts.length > 0;
  }
  const offer = () =>
    matching(
      metrics()
        .filter((key) => !view().charts.includes(key))
        .map((key) => ({ key, title: key, note: "" })),
      input.value,
    );
  const { close } = combobox(input, $("chart-words"), {
    offer,
    onTake(option) {
      add(option.text);
      return false;
    },
    onEnter() {
      const found = offer();
      if (input.value.trim()) add(found.length === 1 ? found[0].text : input.value.trim());
    },
  });
  return { show, plot: (key) => cards.get(key).plot };
}
