/* The command palette (Ctrl-K, on a Mac Command-K): pages, the actions of this page, and runs by name or number. */
import * as api from "./api.js";
import { combobox } from "./combobox.js";
import { el } from "./dom.js";

const RUNS = 6;
const WAIT_MS = 150;
let box = null;

/* A control's name, without the number of new alerts. */
function words(node) {
  const parts = [...node.childNodes].filter((part) => !part.classList?.contains("bell-count"));
  const text = node.getAttribute("aria-label") || parts.map((part) => part.textContent).join("");
  return text.replace(/\s+/g, " ").trim();
}
const isShown = (node) => node.offsetParent !== null && !node.disabled && node.getAttribute("aria-disabled") !== "true";

/* What this page offers as links and buttons: navigation, tabs, and the actions in its head. */
function commands() {
  const pages = [...document.querySelectorAll(".rail a, .tabs a")].map((node) => ({ text: words(node), note: "page", node }));
  const selector = ".page-head .btn, .page-head .menu-body .btn, .account .menu-body .btn";
  const actions = [...document.querySelectorAll(selector)]
    .filter((node) => node.tagName !== "SUMMARY" && (isShown(node) || (node.closest(".menu-body") && !node.hidden)))
    .map((node) => ({ text: words(node), note: "action", node }));
  return [...pages, ...actions].filter(({ text }, i, all) => text && all.findIndex((other) => other.text === text) === i);
}
/* Runs whose name has the text, or with this number; none for an empty text. */
async function runs(text) {
  if (!text) return [];
  const number = /^#?[1-9]\d*$/.test(text) ? `#${text.replace("#", "")}` : null;
  const filter = number || `"${text.replace(/["\\]/g, " ")}"`;
  const reply = await api.get("runs", { filter, limit: RUNS }).catch(() => ({ items: [] }));
  return reply.items.map((run) => ({ text: `${run.name} #${run.id}`, note: `run, ${run.state}`, href: run.url }));
}
function open() {
  const all = commands();
  const input = el("input", {
    class: "input",
    type: "search",
    role: "combobox",
    "aria-label": "Page, action or run",
    "aria-expanded": "false",
    "aria-controls": "palette-words",
    "aria-autocomplete": "list",
    autocomplete: "off",
    spellcheck: "false",
    maxlength: "200",
    placeholder: "page, action, or name or number of a run",
  });
  const list = el("ul", { class: "words", id: "palette-words", role: "listbox", "aria-label": "Matches", hidden: true });
  let found = [];
  let newest = 0;
  let searching = Promise.resolve();
  const typed = () => input.value.trim();
  const offer = () => {
    const text = typed().toLowerCase();
    return [...all.filter((one) => one.text.toLowerCase().includes(text)).slice(0, text ? 5 : 9), ...found];
  };
  function go(option) {
    box.close();
    if (option.href) location.href = option.href;
    else option.node.click();
    return false;
  }
  box = el("dialog", { class: "palette", "aria-label": "Go to", onclose: () => box.remove() }, input, list);
  /* Before the combobox listens: what was found for another text is not offered. */
  input.addEventListener("input", () => {
    const mine = ++newest;
    found = [];
    searching = new Promise((done) => setTimeout(done, WAIT_MS)).then(async () => {
      const fresh = mine === newest ? await runs(typed()) : [];
      if (mine !== newest || !box.open) return;
      found = fresh;
      refresh();
    });
  });
  const { refresh } = combobox(input, list, {
    offer,
    onTake: go,
    async onEnter() {
      if (!offer().length) await searching;
      const [first] = offer();
      if (first && box.open) go(first);
    },
  });
  const leave = (e) => e.key === "Escape" && box.close();
  box.addEventListener("keydown", leave, true); // at once, not after the list
  document.body.append(box);
  box.showModal();
  input.focus();
}
export function togglePalette() {
  if (box && box.open) box.close();
  else open();
}
