/* Samples side by side, on a run's page and on that of compared runs: a column for each step of each run, a card for each prompt.
     sideBySide({ ids, colour, onReply }) → { load(), isEmpty(), shows() }
   `ids()`: the runs, in order; `colour(id)`: that of a run; `onReply(reply)`: called with every first page. Runs, steps, order and
   filter are in the address, so that a link shows the same and the back button works. */
import * as api from "../core/api.js";
import { ApiError, tryAgain } from "../core/api.js";
import { runLabel, setText } from "../core/dom.js";
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

export function sideBySide({ ids, colour = () => null, onReply = () => {} }) {
  const form = $("wanted");
  const place = $("prompts");
  let state = {};
  let reply = null;
  let count = 0;
  let newest = 0;
  let timer = 0;

  /* --- the address ---------------------------------------------------- */
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
  /* What the address and requests have of the choices: those that differ from the usual ones. */
  const chosen = (names) =>
    Object.fromEntries(names.filter((name) => state[name] && state[name] !== USUAL[name]).map((n) => [n, state[n]]));
  function toAddress(how) {
    const params = new URLSearchParams(location.search);
    [...FIELDS, "steps", "prompt"].forEach((name) => params.delete(name));
    Object.entries(chosen(["steps", ...FIELDS, "prompt"])).forEach(([name, value]) => params.set(name, value));
    const url = `${location.pathname}${`${params}` ? `?${params}` : ""}`.replace(/%2C/g, ",");
    if (url !== location.pathname + location.search) history[how](null, "", url);
  }
  const query = () => ({ runs: ids().join(","), ...chosen(["steps", ...FILTERS, "held_out", "sort", "prompt"]) });
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

  /* --- fetching ------------------------------------------------------- */
  async function load(cursor) {
    const mine = ++newest;
    if (!ids().length) return clearPage();
    setText($("address"), location.href);
    const more = cursor ? { cursor } : {};
    try {
      const got = await api.get("compare/samples", { ...query(), limit: A_PAGE, excerpt: EXCERPT, ...more });
      if (mine !== newest) return;
      if (cursor && JSON.stringify(got.columns) !== JSON.stringify(reply.columns)) return load(); // newer steps since
      const { items } = got;
      reply = got;
      count = cursor ? count + items.length : items.length;
      draw(items, Boolean(cursor));
      if (!cursor) onReply(got);
    } catch (e) {
      if (mine !== newest) return;
      if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
      refuse(e);
      tryAgain(e, () => {
        if (mine === newest) load(cursor);
      });
    }
  }
  function refuse(e) {
    $("loading").hidden = true;
    $("refused").hidden = false;
    const problems = e instanceof ApiError ? e.errors.map((p) => `${p.path.split(".").pop()}: ${p.message}`) : [];
    const missing = "One of these runs does not exist or belongs to a team that you are not a member of.";
    const words = e instanceof ApiError ? (e.status === 404 ? missing : e.message) : "The server does not respond. Retrying.";
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

  /* --- rendering ------------------------------------------------------ */
  function columnLabel(column, several) {
    const range = column.first === column.last ? f.whole(column.last) : `${f.whole(column.first)}–${f.whole(column.last)}`;
    const number = column.last === null ? column.step : null;
    const word = column.first === column.last ? "step" : "steps";
    const at = column.last !== null ? `${word} ${range}` : number === null ? "no step" : `up to step ${f.whole(number)}`;
    const run = reply.runs.find((each) => each.id === column.run);
    return several ? `${runLabel(run)} · ${at}` : at[0].toUpperCase() + at.slice(1);
  }
  function draw(items, added) {
    const several = reply.runs.length > 1;
    const heldOut = state.held_out === "true";
    const labels = reply.columns.map((column) => columnLabel(column, several));
    const colours = reply.columns.map((column) => colour(column.run));
    const view = { ...reply, labels, colours, heldOut, several, marks: state.marks, pieces: splitQuery(state.q) };
    const cards = items.map((prompt) => promptCard(prompt, view));
    if (added) place.append(...cards);
    else place.replaceChildren(...cards);
    cards.forEach(addExpander);
    cards.forEach(markWideTables);
    ["loading", "refused"].forEach((id) => {
      $(id).hidden = true;
    });
    $("more").hidden = reply.next === null;
    $("clear").hidden = !filtered();
    $("one-prompt").hidden = !state.prompt;
    $("download").hidden = !count;
    $("download").href = `${api.ROOT}compare/samples.ndjson?${new URLSearchParams(query())}`;
    setText($("count"), count ? `${f.whole(count)} ${count === 1 ? "prompt" : "prompts"}${reply.next ? ", and more" : ""}` : "");
    steps.draw(state.steps, reply);
    nothing(heldOut);
  }
  function nothing(heldOut) {
    $("nothing").hidden = count > 0;
    if (count) return;
    const { title, text, clear, training, fork } = emptyState(reply, { heldOut, filtered: filtered() });
    setText($("nothing").querySelector("h2"), title);
    setText($("nothing").querySelector("p"), text);
    $("clear-too").hidden = !clear;
    $("show-training").hidden = !training;
    if ($("fork")) $("fork").hidden = !fork;
  }

  /* --- input ---------------------------------------------------------- */
  const clear = () => {
    change(() => [...FILTERS, "prompt"].forEach((name) => (state[name] = "")));
    fromAddress();
  };
  form.addEventListener("submit", (e) => e.preventDefault());
  form.addEventListener("reset", (e) => {
    e.preventDefault();
    clear();
  });
  form.addEventListener("input", (e) => {
    clearTimeout(timer);
    if (!e.target.name) return; // the choice of steps
    // while the user types, the address follows without history entries
    if (e.target.matches("input")) timer = setTimeout(() => change(fromForm, "replaceState"), TYPING_MS);
    else change(fromForm);
  });
  $("clear-too").addEventListener("click", clear);
  $("one-prompt")
    .querySelector("button")
    .addEventListener("click", () => change(() => (state.prompt = "")));
  $("show-training").addEventListener("click", () => {
    change(() => Object.assign(state, { held_out: "false", steps: "" }));
    fromAddress();
  });
  $("more").addEventListener("click", () => load(reply.next));
  window.addEventListener("popstate", () => {
    clearTimeout(timer);
    fromAddress();
    load();
  });
  fromAddress();

  return {
    load: () => load(),
    isEmpty: () => count === 0 && !filtered(),
    shows: () => ({ heldOut: state.held_out === "true", reply }),
  };
}
