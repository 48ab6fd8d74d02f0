/* The list of runs: live rows, the filter (parsed by the server), and the selection of runs. */
import * as api from "../core/api.js";
import { setShown, setText, toast } from "../core/dom.js";
import { showConnection } from "../core/live.js";
import { liveFragment } from "../core/live-fragment.js";
import { filterWords } from "./filter-words.js";

const $ = (id) => document.getElementById(id);
const rows = $("rows");
const filter = $("filter");
const compare = $("compare");
const base = compare.getAttribute("href");
const wrong = $("filter-wrong");
const pin = $("pin");
const TYPED_MS = 250;
let typed = 0;
let lastTicked = null;

/* The address follows the filter, so that it can be shared and is in the history; a change of the filter begins at the first
   page. */
function applyFilter() {
  const page = new URL(location.href);
  const part = new URL(rows.getAttribute("hx-get"), location.href);
  if ((page.searchParams.get("q") || "") === filter.value.trim()) return;
  [page, part].forEach((url) => {
    url.searchParams.delete("cursor");
    if (filter.value.trim()) url.searchParams.set("q", filter.value.trim());
    else url.searchParams.delete("q");
  });
  history.replaceState(null, "", page);
  rows.setAttribute("hx-get", part.pathname + part.search);
  document.querySelectorAll(".tabs a, a.sorts").forEach((link) => {
    const url = new URL(link.href);
    if (filter.value.trim()) url.searchParams.set("q", filter.value.trim());
    else url.searchParams.delete("q");
    link.href = url;
  });
  if ($("further")) $("further").hidden = true; // it continues the previous list
  turn();
}
function soon() {
  clearTimeout(typed);
  typed = setTimeout(applyFilter, TYPED_MS);
}
function onRefused(text) {
  setText(wrong, text);
  wrong.hidden = false;
  filter.setAttribute("aria-invalid", "true");
}
function onSwapped() {
  wrong.hidden = true;
  filter.removeAttribute("aria-invalid");
  $("none-match").hidden = rows.querySelector("tr:not([data-pinned])") !== null;
  applyChoice();
}
function applyChoice() {
  const ids = [...rows.querySelectorAll("input:checked")].map((box) => box.value).reverse(); // oldest first: the baseline
  const few = ids.length < 2;
  compare.setAttribute("aria-disabled", String(few));
  compare.href = few ? base : `${base}?runs=${ids.join(",")}`;
  setText(
    $("picked"),
    ids.length === 0
      ? "Select two or more runs to compare them."
      : ids.length === 1
        ? "1 run selected."
        : `${ids.length} runs selected.`,
  );
  document.querySelectorAll("[data-bulk]").forEach((button) => setShown(button, ids.length > 0, $("select-all")));
  if (pin) {
    setShown(pin, ids.length === 1, $("select-all"));
    setText(pin, pinned(ids[0]) ? "Unpin" : "Pin as baseline");
  }
  const all = boxes();
  $("select-all").checked = all.length > 0 && ids.length === all.length;
  $("select-all").indeterminate = ids.length > 0 && ids.length < all.length;
  rows.querySelectorAll("tr").forEach((row) => row.toggleAttribute("data-picked", row.querySelector("input").checked));
}
const pinned = (id) => rows.querySelector(`tr[data-pinned][data-key="${id}"]`) !== null;
async function turnPin() {
  const [run] = selectedRuns();
  const was = pinned(run.id);
  try {
    await api.post(`runs/${run.id}/${was ? "unpin" : "pin"}`);
    toast(was ? `${run.name} is no longer pinned` : `${run.name} is the baseline of its project`);
    turn();
  } catch (e) {
    toast(e.message);
  }
}
export const selectedRuns = () =>
  [...rows.querySelectorAll("input:checked")].map((box) => ({
    id: Number(box.value),
    name: box.closest("tr").dataset.name,
    state: box.closest("tr").dataset.state,
  }));

filterWords(filter, $("filter-words"), soon);
if (pin) pin.addEventListener("click", turnPin);
filter.addEventListener("input", soon);
filter.form.addEventListener("submit", (e) => {
  if (document.activeElement === filter) {
    e.preventDefault();
    clearTimeout(typed);
    applyFilter();
  }
});
filter.addEventListener("keydown", (e) => {
  if (e.key === "Escape") {
    filter.value = "";
    applyFilter();
    filter.blur();
  }
});
const boxes = () => [...rows.querySelectorAll("input[type=checkbox]")];
/* With Shift, all runs between the previous selected one and this one. */
function onTick(e) {
  const all = boxes();
  const [from, to] = [all.findIndex((box) => box.value === lastTicked), all.indexOf(e.target)].sort((a, b) => a - b);
  if (e.shiftKey && from >= 0) all.slice(from, to).forEach((box) => (box.checked = e.target.checked));
  lastTicked = e.target.value;
  applyChoice();
}
rows.addEventListener("click", (e) => e.target.matches("input[type=checkbox]") && onTick(e));
rows.addEventListener("change", applyChoice);
$("select-all").addEventListener("change", (e) => {
  boxes().forEach((box) => (box.checked = e.target.checked));
  applyChoice();
});
compare.addEventListener("click", (e) => {
  if (compare.getAttribute("aria-disabled") === "true") e.preventDefault();
});
applyChoice(); // a browser keeps ticks over a reload
const turn = liveFragment(rows, { onState: (state) => showConnection($("live"), state), onSwapped, onRefused });
export const refreshRuns = turn;
