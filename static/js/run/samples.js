/* Samples tab. Search, order and open response are in the address, so that a link shows the same and the back button works. Rows
   never move by themselves: newer responses load on request. */
import * as api from "../core/api.js";
import { ApiError, tryAgain } from "../core/api.js";
import { el, setShown, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { describeKey } from "../core/keys.js";
import { marked, splitQuery } from "../core/highlight.js";
import { sampleCard } from "./sample-card.js";
import { sampleDetail } from "./sample-detail.js";
import { run } from "./store.js";

const $ = (id) => document.getElementById(id);
const form = $("wanted");
const rows = $("rows");
const headings = [...document.querySelectorAll("[data-sort]")];
const FIELDS = [
  "q",
  "from_step",
  "to_step",
  "min_score",
  "max_score",
  "min_length",
  "max_length",
  "min_age",
  "max_age",
  "ending",
  "held_out",
  "sort",
];
const NEWEST = "-step";
const A_PAGE = 50;
const TYPING_MS = 250;
const EXCERPT = 400;
const hasResumed = run.resumeDetector();
let state = {};
let items = [];
let next = null;
let newest = 0;
let seen = 0;
let timer = 0;
let loading = false;
let outdated = false;

/* --- the address ------------------------------------------------------ */
function fromAddress() {
  const params = new URLSearchParams(location.search);
  state = Object.fromEntries(
    [...params].filter(([name, value]) => value && [...FIELDS, "prompt", "open", "diff"].includes(name)),
  );
  FIELDS.forEach((name) => {
    form.elements[name].value = state[name] || (name === "sort" ? NEWEST : "");
  });
}
function toAddress(how) {
  const query = new URLSearchParams(Object.entries(state).filter(([, value]) => value));
  const url = `${location.pathname}${`${query}` ? `?${query}` : ""}`.replace(/%2C/g, ",");
  if (url !== location.pathname + location.search) history[how](null, "", url);
}
function fromForm() {
  FIELDS.forEach((name) => {
    state[name] = form.elements[name].value.trim();
  });
  if (state.sort === NEWEST) state.sort = "";
  state.open = state.diff = "";
}
const filters = () => [...FIELDS.filter((name) => name !== "sort"), "prompt"].filter((name) => state[name]);
const pieces = () => splitQuery(state.q);

/* --- fetching --------------------------------------------------------- */
async function load(cursor) {
  const mine = ++newest;
  const query = { limit: A_PAGE, excerpt: EXCERPT };
  [...FIELDS, "prompt"].forEach((name) => {
    if (state[name]) query[name] = state[name];
  });
  if (cursor) query.cursor = cursor;
  const step = run.summary.step;
  loading = true;
  if (!cursor) outdated = false;
  try {
    const reply = await api.get(`runs/${run.id}/samples`, query);
    if (mine !== newest) return;
    items = cursor ? items.concat(reply.items) : reply.items;
    next = reply.next;
    if (!cursor) seen = Math.max(step, ...reply.items.map((s) => s.step));
    $("refused").hidden = true;
    draw(cursor ? reply.items : null);
    loading = false;
    news(run.summary); // for summaries that arrived meanwhile
  } catch (e) {
    if (mine !== newest) return;
    if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
    refuse(e);
    tryAgain(e, () => {
      if (mine === newest) load(cursor);
    });
  } finally {
    if (mine === newest) loading = false;
  }
}
function refuse(e) {
  $("loading").hidden = true;
  $("refused").hidden = false;
  const detail =
    e instanceof ApiError
      ? [e.message, ...e.errors.map((p) => `${p.path.split(".").pop()}: ${p.message}`)].join(" ")
      : "The server does not respond. These are the last loaded samples; retrying.";
  setText($("refused").querySelector("p"), detail);
}

/* --- rendering --------------------------------------------------------- */
function row(s) {
  const opener = el(
    "button",
    { class: "opener", type: "button", "aria-expanded": "false", onclick: () => toggle(s) },
    el("span", { class: "line muted" }, marked(s.prompt, pieces())),
    el("span", { class: "line" }, marked(s.response, pieces())),
  );
  return el(
    "tr",
    { "data-id": s.id },
    el("td", { class: "what" }, opener),
    el("td", { class: "num", "data-name": "step" }, f.whole(s.step)),
    el("td", { class: "num strong", "data-name": "reward" }, f.fixed(s.score, 2)),
    el(
      "td",
      { class: "num", "data-name": "KL", title: s.held_out ? "not measured for eval responses" : null },
      s.held_out ? f.NONE : f.fixed(s.kl, 2),
    ),
    el("td", { class: "num", "data-name": "length" }, f.whole(s.length)),
    el("td", { class: "num", "data-name": "staleness" }, f.whole(s.age)),
    el("td", { class: "num", "data-name": "policy version" }, sampleCard.versions(s)),
    el(
      "td",
      { "data-name": "finish reason" },
      s.ending || f.NONE,
      s.held_out ? el("span", { class: "tag" }, "eval") : null,
    ),
  );
}
function draw(added) {
  $("loading").hidden = true;
  const drawn = (added || items).map(row);
  const first = drawn.length ? drawn[0].querySelector(".opener") : $("q");
  if (added) rows.append(...drawn);
  else rows.replaceChildren(...drawn);
  const any = items.length > 0;
  $("found").hidden = $("keys").hidden = !any;
  setShown($("more"), next !== null, first);
  $("clear").hidden = !filters().length;
  $("same-prompt").hidden = !state.prompt;
  setShown($("fresh"), false, first);
  setText(
    $("count"),
    any ? `${f.whole(items.length)} ${items.length === 1 ? "response" : "responses"}${next ? ", and more" : ""}` : "",
  );
  headings.forEach((button) => {
    const sort = state.sort || NEWEST;
    const mine = sort.replace("-", "") === button.dataset.sort;
    if (mine) button.closest("th").setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
    else button.closest("th").removeAttribute("aria-sort");
  });
  nothing(any);
  showOpen();
}
function nothing(any) {
  const filtered = filters().length > 0;
  const off = run.spec.logging && run.spec.logging.samples_per_step === 0;
  const ended = Boolean(run.summary.ended_at);
  $("nothing").hidden = any;
  $("clear-too").hidden = !filtered;
  if ($("fork")) $("fork").hidden = filtered || !off;
  const [title, words] = filtered
    ? [
        "No response matches",
        "The prompt and response together must contain every search word; case is ignored. Relax or clear the filters.",
      ]
    : off
      ? [
          "This run records no samples",
          "logging.samples_per_step is 0. A fork with 2, for example, records two responses per step.",
        ]
      : ended
        ? ["No sample was recorded", "The run ended before its first step finished."]
        : [
            "No samples yet",
            "Samples appear after the first step: logging.samples_per_step responses per step, plus eval responses if evaluation is configured.",
          ];
  setText($("nothing").querySelector("h2"), title);
  setText($("nothing").querySelector("p"), words);
}

/* --- the open response -------------------------------------------------- */
function options() {
  const diff = (state.diff || "").split(",").map(Number);
  return {
    pieces: pieces(),
    diff: diff.length === 2 && diff.every((id) => id > 0) ? diff : null,
    onOpen(id) {
      if (Number(state.open) !== id) toggle({ id });
    },
    onDiff(pair) {
      state.diff = pair.join(",");
      toAddress("replaceState");
    },
    onPrompt(key) {
      change(() => {
        FIELDS.forEach((name) => {
          state[name] = "";
        });
        Object.assign(state, { prompt: key, sort: "step", open: "", diff: "" });
      });
      fromAddress();
    },
  };
}
function showOpen() {
  rows.querySelectorAll(".detail").forEach((node) => node.remove());
  rows.querySelectorAll("[aria-expanded=true]").forEach((node) => node.setAttribute("aria-expanded", "false"));
  $("linked").hidden = true;
  const id = Number(state.open);
  if (!id) return;
  const at = rows.querySelector(`[data-id="${id}"]`);
  if (!at) return linked(id);
  at.querySelector(".opener").setAttribute("aria-expanded", "true");
  at.after(el("tr", { class: "detail" }, el("td", { colspan: 8 }, sampleDetail(id, options()))));
}
function linked(id) {
  // not among the loaded rows: shown above them
  $("linked").replaceChildren(sampleDetail(id, options()));
  $("linked").hidden = false;
}
function toggle(s) {
  state.open = Number(state.open) === s.id ? "" : String(s.id);
  state.diff = "";
  toAddress("pushState");
  showOpen();
}
function close() {
  state.open = state.diff = "";
  toAddress("pushState");
  showOpen();
}
function change(edit, how = "pushState") {
  clearTimeout(timer);
  edit();
  toAddress(how);
  load();
}

/* --- input -------------------------------------------------------------- */
form.addEventListener("submit", (e) => e.preventDefault());
form.addEventListener("input", (e) => {
  // while the user types, the address follows without history entries
  clearTimeout(timer);
  if (e.target.matches("input")) timer = setTimeout(() => change(fromForm, "replaceState"), TYPING_MS);
  else change(fromForm);
});
const clear = () => {
  change(() => {
    const { sort } = state;
    state = { sort };
  });
  fromAddress();
};
form.addEventListener("reset", (e) => {
  e.preventDefault();
  clear();
});
$("clear-too").addEventListener("click", clear);
$("same-prompt")
  .querySelector("button")
  .addEventListener("click", () =>
    change(() => {
      state.prompt = "";
    }),
  );
headings.forEach((button) =>
  button.addEventListener("click", () => {
    const by = button.dataset.sort;
    const now = state.sort || NEWEST;
    form.elements.sort.value = now === `-${by}` ? by : `-${by}`;
    change(fromForm);
  }),
);
$("more").addEventListener("click", () => load(next));
$("fresh").addEventListener("click", () => load());
rows.addEventListener("keydown", (e) => {
  if (e.key === "Escape" && state.open) {
    const at = rows.querySelector(`[data-id="${state.open}"] .opener`);
    close();
    if (at) at.focus();
  }
  if (!e.target.matches(".opener") || !["ArrowDown", "ArrowUp"].includes(e.key)) return;
  const all = [...rows.querySelectorAll(".opener")];
  const to = all[all.indexOf(e.target) + (e.key === "ArrowDown" ? 1 : -1)];
  if (to) {
    e.preventDefault();
    to.focus();
  }
});
$("q").addEventListener("keydown", (e) => {
  if (e.key === "Escape") {
    $("q").value = "";
    change(fromForm, "replaceState");
    $("q").blur();
  }
});
window.addEventListener("popstate", () => {
  clearTimeout(timer);
  fromAddress();
  load();
});

describeKey("↑ ↓", "in the list: move; Enter opens, Esc closes");
fromAddress();
load();
function news(summary) {
  const steps = summary.step - seen;
  outdated = hasResumed(summary) || outdated;
  if ((steps <= 0 && !outdated) || loading) return;
  if (!items.length && !filters().length) {
    load();
    return;
  }
  $("fresh").hidden = false;
  setText(
    $("fresh"),
    outdated ? "The run was resumed: reload" : `${f.whole(steps)} newer ${steps === 1 ? "step" : "steps"}: reload`,
  );
}
run.follow(news);
