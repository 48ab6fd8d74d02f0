/* Logs tab: the last lines, earlier ones on scrolling up, new ones as they are written. Search, stream and linked line are in
   the address. The view follows the end until the user scrolls up; then new lines are counted. */
import * as api from "../core/api.js";
import { ApiError, tryAgain } from "../core/api.js";
import { el, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { describeKey } from "../core/keys.js";
import { marked, splitQuery } from "../core/highlight.js";
import { ansi } from "./ansi.js";
import { run } from "./store.js";

const MOST_SHOWN = 5000;
const A_PAGE = 1000;
const AROUND = 200;
const EVERY_MS = 2000;
const TYPING_MS = 250;
const NEAR_PX = 24;
const $ = (id) => document.getElementById(id);
const form = $("wanted");
const list = $("log");
const follow = $("follow-log");
let state = {};
let after = 0;
let first = 0;
let earlier = false;
let atEnd = false;
let news = 0;
let turn = 0;
let busy = false;
let timer = 0;

/* --- the address ---------------------------------------------------------- */
function fromAddress() {
  const params = new URLSearchParams(location.search);
  state = { q: params.get("q") || "", stream: params.get("stream") || "", line: params.get("line") || "" };
  form.elements.q.value = state.q;
  form.elements.stream.value = state.stream;
}
function change(edit, how) {
  clearTimeout(timer);
  Object.assign(state, edit);
  const query = new URLSearchParams(Object.entries(state).filter(([, value]) => value));
  history[how](null, "", `${location.pathname}${`${query}` ? `?${query}` : ""}`);
  begin();
}

/* --- fetching --------------------------------------------------------------- */
function get(query) {
  if (state.q) query.q = state.q;
  if (state.stream) query.stream = state.stream;
  return api.get(`runs/${run.id}/logs`, query);
}
/* One request at a time; results of another search are dropped. `turn` counts the searches. */
async function reading(work) {
  if (busy) return;
  const mine = turn;
  let done = false;
  busy = true;
  try {
    await work(() => mine !== turn);
    done = true;
    $("refused").hidden = true;
  } catch (e) {
    if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
    if (e instanceof ApiError) {
      // the connection's status shows an unreachable server
      $("refused").hidden = false;
      setText($("refused").querySelector("p"), e.message);
    }
    if (!after && !first) tryAgain(e, () => begin(true)); // nothing was read yet, so no live updates follow
  } finally {
    busy = false;
  }
  if (mine !== turn) begin(true);
  else {
    words();
    if (done) further(); // the user may have scrolled meanwhile
  }
}
/* More lines at the end that is in view. */
function further() {
  if (list.scrollTop < NEAR_PX && earlier && first) reading(older);
  else if (below() < NEAR_PX && !atEnd && after) reading(more);
}
const below = () => list.scrollHeight - list.scrollTop - list.clientHeight;
function begin(again) {
  if (!again) turn += 1;
  after = first = news = 0;
  list.replaceChildren();
  reading(state.line ? around : newest);
}
async function newest(stale) {
  const reply = await get({ limit: A_PAGE });
  if (stale()) return;
  earlier = reply.earlier;
  atEnd = true;
  follow.checked = true;
  append(reply);
}
async function around(stale) {
  // the linked line with its neighbours
  const line = Number(state.line) || 1;
  const [upTo, on] = await Promise.all([get({ before: line + 1, limit: AROUND }), get({ after: line, limit: AROUND })]);
  if (stale()) return;
  earlier = upTo.earlier;
  atEnd = on.lines.length < AROUND;
  follow.checked = false;
  append(upTo);
  append({ lines: on.lines, next: Math.max(on.next, upTo.next) });
  news = 0;
  const at = list.querySelector(`[data-id="${line}"]`);
  if (at) {
    at.setAttribute("aria-current", "true");
    at.scrollIntoView({ block: "center" });
  }
}
async function more(stale) {
  // lines written since
  for (;;) {
    const reply = await get({ after: after || 0, limit: A_PAGE });
    if (stale() || !reply.lines.length) return;
    atEnd = reply.lines.length < A_PAGE;
    append(reply);
    if (atEnd || !follow.checked) return;
  }
}
async function older(stale) {
  const reply = await get({ before: first, limit: A_PAGE });
  if (stale()) return;
  earlier = reply.earlier;
  const from = list.scrollHeight - list.scrollTop;
  list.prepend(...reply.lines.map(item));
  if (reply.lines.length) first = reply.lines[0].id;
  list.scrollTop = list.scrollHeight - from; // the visible lines stay in place
  bound();
}
/* The page holds a limited number of lines: those furthest from the view are removed, and fetched again when needed. */
function bound() {
  const over = list.children.length - MOST_SHOWN;
  if (over <= 0) return;
  if (follow.checked || list.scrollTop > below()) {
    const from = list.scrollHeight - list.scrollTop;
    for (let i = 0; i < over; i++) list.firstChild.remove();
    earlier = true;
    first = Number(list.firstChild.dataset.id);
    list.scrollTop = list.scrollHeight - from;
  } else {
    for (let i = 0; i < over; i++) list.lastChild.remove();
    after = Number(list.lastChild.dataset.id);
    atEnd = false;
    news = 0;
  }
}

/* --- rendering ------------------------------------------------------------------ */
function level(text) {
  if (/\b(error|exception|traceback|fatal)\b/i.test(text)) return "error";
  return /\bwarn(ing)?\b/i.test(text) ? "warn" : "info";
}
function item(line) {
  const query = new URLSearchParams({ line: line.id });
  const link = el(
    "a",
    {
      href: `?${query}`,
      tabindex: -1,
      title: `${line.time}, attempt ${line.attempt}: show in context`,
      onclick: (e) => {
        if (e.metaKey || e.ctrlKey || e.shiftKey) return;
        e.preventDefault();
        change({ q: "", stream: "", line: String(line.id) }, "pushState");
        fromAddress();
      },
    },
    el("time", { datetime: line.time }, f.clock(new Date(line.time))),
  );
  return el(
    "li",
    { "data-level": level(line.text), "data-id": line.id },
    link,
    el("span", { class: "lvl" }, line.stream),
    el("span", { class: "msg" }, message(line.text)),
  );
}
function message(text) {
  // with the program's colours and the hits marked
  const pieces = splitQuery(state.q);
  return ansi(text).flatMap(({ text: part, classes }) =>
    classes.length ? [el("span", { class: classes.join(" ") }, marked(part, pieces))] : marked(part, pieces),
  );
}
function append({ lines, next }) {
  if (lines.length && !first) first = lines[0].id;
  after = Math.max(after, next);
  list.append(...lines.map(item));
  if (lines.length) list.hidden = false; // a hidden element cannot be scrolled
  if (!follow.checked) news += lines.length;
  bound();
  if (follow.checked) list.scrollTop = list.scrollHeight;
}
function words() {
  const shown = list.children.length;
  const filtered = state.q || state.stream;
  $("log-none").hidden = shown > 0;
  list.hidden = shown === 0;
  setText(
    $("log-none"),
    filtered
      ? "No line matches. A line must contain every search word; case is ignored."
      : run.summary.ended_at
        ? "The log is empty."
        : "No log lines yet. They appear as the engine and the supervisor write them.",
  );
  setText(
    $("log-count"),
    shown
      ? `${f.whole(shown)} ${filtered ? "matching " : ""}${shown === 1 ? "line" : "lines"}${earlier ? "; scroll up for older lines" : ""}`
      : "",
  );
  $("clear").hidden = !filtered && !state.line;
  $("news").hidden = news === 0 && atEnd;
  setText($("news"), news ? `${f.whole(news)} new ${news === 1 ? "line" : "lines"} ↓` : "Latest ↓");
}
function toEnd() {
  if (!atEnd || state.line) {
    change({ line: "" }, "pushState");
    return;
  }
  news = 0;
  follow.checked = true;
  list.scrollTop = list.scrollHeight;
  words();
}

/* --- input ---------------------------------------------------------------------- */
list.addEventListener("scroll", () => {
  follow.checked = atEnd && below() < NEAR_PX;
  if (follow.checked && news) {
    news = 0;
    words();
  }
  further();
});
/* Tabbing through a thousand links is no navigation: inside the list n and p move between lines, Enter follows the link. */
list.addEventListener("keydown", (e) => {
  if (!["n", "p"].includes(e.key) || e.metaKey || e.ctrlKey || e.altKey) return;
  const at = document.activeElement.closest("#log li");
  const side = e.key === "n" ? "nextElementSibling" : "previousElementSibling";
  const to = at ? at[side] : e.key === "n" ? firstInView() : list.lastElementChild;
  if (to) to.querySelector("a").focus();
});
const firstInView = () =>
  [...list.children].find((line) => line.offsetTop - list.offsetTop >= list.scrollTop) || list.lastElementChild;
follow.addEventListener("change", () => {
  if (follow.checked) toEnd();
});
$("news").addEventListener("click", toEnd);
form.addEventListener("submit", (e) => e.preventDefault());
form.addEventListener("input", (e) => {
  clearTimeout(timer);
  if (e.target.name === "q")
    timer = setTimeout(() => change({ q: form.elements.q.value.trim(), line: "" }, "replaceState"), TYPING_MS);
  if (e.target.name === "stream") change({ stream: form.elements.stream.value, line: "" }, "pushState");
});
form.addEventListener("reset", (e) => {
  e.preventDefault();
  change({ q: "", stream: "", line: "" }, "pushState");
  fromAddress();
});
$("q").addEventListener("keydown", (e) => {
  if (e.key === "Escape") {
    $("q").value = "";
    change({ q: "", line: "" }, "replaceState");
    $("q").blur();
  }
});
window.addEventListener("popstate", () => {
  clearTimeout(timer);
  fromAddress();
  begin();
});

describeKey("n p", "in the log: next, previous line");
fromAddress();
begin();
// A line may come without a step, so the summary's events do not suffice while the run lives.
const look = () => {
  if (atEnd) reading(more);
};
setInterval(() => {
  if (!document.hidden && !run.summary.ended_at) look();
}, EVERY_MS);
run.follow(look);
