/* Samples side by side, on a run's page and on that of compared runs: a column for each step of each run, a card for each
   prompt.
     start({ ids, colour, onReply })   `ids()`: the runs, in order; `colour(id)`: that of a run; `onReply(reply)`: called with
                                       every first page
     load(), isEmpty(), showsHeldOut()
   Runs, steps, order and filter are in the address, so that a link shows the same and the back button works. */
import * as api from "../core/api.js";
import { ApiError, tryAgain } from "../core/api.js";
import { runLabel, setShown, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { splitQuery } from "../core/highlight.js";
import { markWideTables } from "../core/wide-tables.js";
import { emptyState } from "./empty-state.js";
import { addExpander, promptCard } from "./response-columns.js";
import { stepChoice } from "./step-choice.js";

const $ = (id) => document.getElementById(id);
const FILTERS = ["q", "min_score", "max_score", "min_length", "max_length", "ending"];
const FIELDS = [...FILTERS, "held_out", "sort", "marks"];
const USUAL = { held_out: "true", sort: "change", marks: "new" };
const A_PAGE = 10;
const EXCERPT = 4000;
const TYPING_MS = 250;
const form = $("wanted");
const place = $("prompts");
const options = { ids: () => [], colour: () => null, onReply: () => {} };
let state = {};
let reply = null;
let count = 0;
let newest = 0;
let timer = 0;

/* --- the address ------------------------------------------------------ */
function fromAddress() {
  const params = new URLSearchParams(location.search);
  state = { steps: params.get("steps") || "", prompt: params.get("prompt") || "" };
  FIELDS.forEach((name) => {
    const field = form.elements[name];
    field.value = params.get(name) || USUAL[name] || "";
    if (!field.value && USUAL[name]) field.value = USUAL[name]; // the address has no value of the list
    state[name] = field.value;
  });
}
/* The choices that differ from the usual ones: only these are in the address and in requests. */
const chosen = (names) =>
  Object.fromEntries(names.filter((name) => state[name] && state[name] !== USUAL[name]).map((n) => [n, state[n]]));
function toAddress(how) {
  const params = new URLSearchParams(location.search);
  [...FIELDS, "steps", "prompt"].forEach((name) => params.delete(name));
  Object.entries(chosen(["steps", ...FIELDS, "prompt"])).forEach(([name, value]) => params.set(name, value));
  const url = `${location.pathname}${`${params}` ? `?${params}` : ""}`.replace(/%2C/g, ",");
  if (url !== location.pathname + location.search) history[how](null, "", url);
}
const query = () => ({
  runs: options.ids().join(","),
  ...chosen(["steps", ...FILTERS, "held_out", "sort", "prompt"]),
});
const filtered = () => [...FILTERS, "prompt"].some((name) => state[name]);
function change(edit, how = "pushState") {
  clearTimeout(timer);
  edit();
  toAddress(how);
  load();
}
function fromForm() {
  FIELDS.forEach((name) => {
    state[name] = form.elements[name].value.trim();
  });
}
const steps = stepChoice({ tokens: $("steps"), add: $("add-step") }, (words) =>
  change(() => {
    state.steps = words;
  }),
);

/* --- fetching --------------------------------------------------------- */
export async function load(cursor) {
  const mine = ++newest;
  setText($("address"), location.href);
  if (!options.ids().length) {
    clearPage();
    return;
  }
  const page = { limit: A_PAGE, excerpt: EXCERPT, ...(cursor ? { cursor } : {}) };
  try {
    const got = await api.get("compare/samples", { ...query(), ...page });
    if (mine === newest) take(got, Boolean(cursor));
  } catch (e) {
    if (mine !== newest) return;
    if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
    refuse(e);
    tryAgain(e, () => {
      if (mine === newest) load(cursor);
    });
  }
}
function take(got, more) {
  if (more && JSON.stringify(got.columns) !== JSON.stringify(reply.columns)) {
    load(); // there are newer steps: the prompts that are shown have other columns
    return;
  }
  reply = got;
  count = more ? count + got.items.length : got.items.length;
  draw(got.items, more);
  if (!more) options.onReply(got);
}
function refuse(e) {
  $("loading").hidden = true;
  $("refused").hidden = false;
  const problems = e instanceof ApiError ? e.errors.map((p) => `${p.path.split(".").pop()}: ${p.message}`) : [];
  const words = !(e instanceof ApiError)
    ? "The server does not respond. Retrying."
    : e.status === 404
      ? "One of these runs does not exist or belongs to a team that you are not a member of."
      : e.message;
  setText($("refused").querySelector("p"), [words, ...problems].join(" "));
}
function clearPage() {
  reply = null;
  place.replaceChildren();
  ["loading", "refused", "nothing", "more", "download"].forEach((id) => {
    $(id).hidden = true;
  });
  setText($("count"), "");
}

/* --- rendering -------------------------------------------------------- */
function stepsOf({ first, last, step }) {
  if (last === null) return step === null ? "no step" : `up to step ${f.whole(step)}`;
  return first === last ? `step ${f.whole(last)}` : `steps ${f.whole(first)}–${f.whole(last)}`;
}
function columnLabel(column) {
  const words = stepsOf(column);
  if (reply.runs.length === 1) return words[0].toUpperCase() + words.slice(1);
  return `${runLabel(reply.runs.find((run) => run.id === column.run))} · ${words}`;
}
function draw(items, added) {
  const view = {
    columns: reply.columns,
    labels: reply.columns.map(columnLabel),
    colours: reply.columns.map((column) => options.colour(column.run)),
    heldOut: state.held_out === "true",
    several: reply.runs.length > 1,
    marks: state.marks,
    pieces: splitQuery(state.q),
  };
  const cards = items.map((prompt) => promptCard(prompt, view));
  if (added) place.append(...cards);
  else place.replaceChildren(...cards);
  cards.forEach(addExpander);
  cards.forEach(markWideTables);
  steps.draw(state.steps, reply);
  controls(cards[0] || place);
  nothing();
}
function controls(newest) {
  $("loading").hidden = $("refused").hidden = true;
  setShown($("more"), reply.next !== null, newest);
  $("clear").hidden = !filtered();
  $("one-prompt").hidden = !state.prompt;
  $("download").hidden = !count;
  $("download").href = `${api.ROOT}compare/samples.ndjson?${new URLSearchParams(query())}`;
  const prompts = `${f.whole(count)} ${count === 1 ? "prompt" : "prompts"}${reply.next ? ", and more" : ""}`;
  setText($("count"), count ? prompts : "");
}
function nothing() {
  $("nothing").hidden = count > 0;
  if (count) return;
  const empty = emptyState(reply, { heldOut: state.held_out === "true", filtered: filtered() });
  setText($("nothing").querySelector("h2"), empty.title);
  setText($("nothing").querySelector("p"), empty.text);
  $("clear-too").hidden = !empty.clear;
  $("show-training").hidden = !empty.training;
  if ($("fork")) $("fork").hidden = !empty.fork;
}

/* --- input ------------------------------------------------------------ */
/* The pressed button is hidden with the reply, so the focus goes to a control that stays. */
function clear() {
  form.elements.ending.focus();
  change(() => {
    [...FILTERS, "prompt"].forEach((name) => {
      state[name] = "";
    });
  });
  fromAddress();
}
function listen() {
  form.addEventListener("submit", (e) => e.preventDefault());
  form.addEventListener("reset", (e) => {
    e.preventDefault();
    clear();
  });
  form.addEventListener("input", (e) => {
    clearTimeout(timer);
    if (!e.target.name) return; // the list of further steps
    // while the user types, the address follows without history entries
    if (e.target.matches("input")) timer = setTimeout(() => change(fromForm, "replaceState"), TYPING_MS);
    else change(fromForm);
  });
  $("clear-too").addEventListener("click", clear);
  $("one-prompt")
    .querySelector("button")
    .addEventListener("click", () => {
      form.elements.q.focus();
      change(() => {
        state.prompt = "";
      });
    });
  $("show-training").addEventListener("click", () => {
    form.elements.held_out.focus();
    change(() => Object.assign(state, { held_out: "false", steps: "" }));
    fromAddress();
  });
  $("more").addEventListener("click", () => load(reply.next));
  window.addEventListener("popstate", () => {
    clearTimeout(timer);
    fromAddress();
    load();
  });
}
export const isEmpty = () => reply !== null && count === 0 && !filtered();
export const showsHeldOut = () => state.held_out === "true";
export function start(chosenOptions) {
  Object.assign(options, chosenOptions);
  fromAddress();
  listen();
  load();
}
