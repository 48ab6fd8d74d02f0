/* Events tab: states, requests, decisions, checkpoints and alerts in one list, newest first. Kind and search are in the address.
   While only the first page is shown, new events appear on top; otherwise a button announces them. */
import * as api from "../core/api.js";
import { ApiError, tryAgain } from "../core/api.js";
import { alertTitle, el, icon, pill, setShown, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { marked, splitQuery } from "../core/highlight.js";
import { run } from "./store.js";

const NAMES = { overcommit: "Δ", chunk: "C", kl: "KL coefficient", nonfinite: "Not finite", memory: "Tokens per pass" };
const BY = { decision: "controller", alert: "alerts", alert_closed: "alerts" };
const A_PAGE = 100;
const TYPING_MS = 250;
const NEWS_MS = 2500;
const $ = (id) => document.getElementById(id);
const form = $("wanted");
const table = $("events");
const kinds = [...document.querySelectorAll("[data-kinds]")];
let state = {};
let next = null;
let pages = 0;
let newest = 0;
let cursor = -1;
let timer = 0;
let coming = 0;
let shown = "";

function fromAddress() {
  const params = new URLSearchParams(location.search);
  state = { q: params.get("q") || "", kinds: params.get("kinds") || "", keeps: params.get("keeps") || "" };
  form.elements.q.value = state.q;
  form.elements.keeps.checked = state.keeps === "true";
}
function change(edit, how) {
  clearTimeout(timer);
  Object.assign(state, edit);
  const query = new URLSearchParams(Object.entries(state).filter(([, value]) => value));
  history[how](null, "", `${location.pathname}${`${query}` ? `?${query}` : ""}`.replace(/%2C/g, ","));
  load();
}
async function load(from) {
  const mine = ++newest;
  const query = { ...Object.fromEntries(Object.entries(state).filter(([, value]) => value)), limit: A_PAGE };
  if (from) query.cursor = from;
  const at = run.summary.cursor;
  try {
    const reply = await api.get(`runs/${run.id}/events`, query);
    if (mine !== newest) return;
    next = reply.next;
    pages = from ? pages + 1 : 1;
    if (!from) cursor = at;
    $("refused").hidden = true;
    const same = JSON.stringify(reply); // unchanged parts are not redrawn, so that a selection in them stays
    if (from || same !== shown) draw(reply.items, Boolean(from));
    shown = from ? "" : same;
  } catch (e) {
    if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
    if (mine !== newest) return;
    tryAgain(e, () => {
      if (mine === newest) load(from);
    });
    if (!(e instanceof ApiError)) return; // the connection's status shows an unreachable server
    $("loading").hidden = true;
    $("refused").hidden = false;
    setText($("refused").querySelector("p"), e.message);
  }
}
function what(event) {
  if (event.kind === "state") return pill(event.new);
  if (event.kind === "change") return el("span", { class: "tag" }, event.what);
  if (event.kind === "alert")
    return el(
      "span",
      { class: "alert-mark", "data-condition": event.what },
      icon(event.what === "finished" ? "check" : "warning"),
      alertTitle(event.what),
    );
  if (event.kind === "alert_closed")
    return el("span", { class: "alert-mark", "data-over": true }, icon("check"), `${alertTitle(event.what)}: closed`);
  if (event.kind === "checkpoint") return el("a", { class: "tag", href: `/runs/${run.id}/checkpoints` }, "checkpoint");
  const name = NAMES[event.what] || event.what;
  return el(
    "span",
    { class: "nowrap" },
    `${name} `,
    event.old === event.new
      ? `keeps ${f.plain(event.new)}`
      : el("b", {}, `${f.plain(event.old)} → ${f.plain(event.new)}`),
  );
}
function time(event) {
  if (!event.at) return f.NONE;
  const date = new Date(event.at);
  const today = date.toDateString() === new Date().toDateString();
  return el("time", { datetime: event.at, title: event.at }, today ? f.clock(date) : f.when(date));
}
function row(event) {
  const pieces = splitQuery(state.q);
  return el(
    "tr",
    { "data-kind": event.kind },
    el("td", { class: "nowrap muted" }, time(event)),
    el("td", { class: "num", "data-name": "step" }, event.step === null ? "" : f.whole(event.step)),
    el("td", {}, what(event)),
    el("td", { class: "why" }, marked(event.text || f.NONE, pieces)),
    el("td", { class: "muted by" }, marked(BY[event.kind] || event.actor, pieces)),
  );
}
function draw(items, further) {
  $("loading").hidden = true;
  const drawn = items.map(row);
  const first = drawn[0] || $("q");
  if (further) table.append(...drawn);
  else table.replaceChildren(...drawn);
  const any = table.children.length > 0;
  const filtered = state.q || state.kinds;
  $("found").hidden = !any;
  setShown($("more"), next !== null, first);
  setShown($("fresh"), false, first);
  $("nothing").hidden = any;
  setText(
    $("nothing"),
    filtered
      ? "No event matches the filter. Decisions that did not change the value are hidden unless you include them."
      : "No events yet.",
  );
  setText(
    $("count"),
    any
      ? `${f.whole(table.children.length)} ${table.children.length === 1 ? "event" : "events"}${next ? ", and more" : ""}`
      : "",
  );
  kinds.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.kinds === state.kinds)));
}
form.addEventListener("submit", (e) => e.preventDefault());
form.addEventListener("input", (e) => {
  clearTimeout(timer);
  if (e.target.name === "q")
    timer = setTimeout(() => change({ q: form.elements.q.value.trim() }, "replaceState"), TYPING_MS);
  if (e.target.name === "keeps") change({ keeps: e.target.checked ? "true" : "" }, "pushState");
});
$("q").addEventListener("keydown", (e) => {
  if (e.key === "Escape") {
    $("q").value = "";
    change({ q: "" }, "replaceState");
    $("q").blur();
  }
});
kinds.forEach((button) => button.addEventListener("click", () => change({ kinds: button.dataset.kinds }, "pushState")));
$("more").addEventListener("click", () => load(next));
$("fresh").addEventListener("click", () => load());
window.addEventListener("popstate", () => {
  clearTimeout(timer);
  fromAddress();
  load();
});

fromAddress();
load();
run.follow((summary) => {
  // every step moves the cursor: at most one request at a time
  if (cursor < 0 || summary.cursor === cursor || coming) return;
  if (pages > 1) {
    $("fresh").hidden = false;
    return;
  }
  coming = setTimeout(() => {
    coming = 0;
    if (pages === 1) load();
  }, NEWS_MS);
});
