/* The detail below a row of the Samples tab: the whole response, and how responses to the same prompt changed over the steps.
     sampleDetail(id, { pieces, diff: [older id, newer id] or null, onDiff(pair), onPrompt(key), onOpen(id) }) → element */
import * as api from "../core/api.js";
import { ApiError } from "../core/api.js";
import { el, icon } from "../core/dom.js";
import * as f from "../core/format.js";
import { sampleCard } from "./sample-card.js";
import { run } from "./store.js";
import { wordDiff } from "./word-diff.js";

const WORDS = { gone: "del", new: "ins" };

const get = (id) => api.get(`runs/${run.id}/samples/${id}`);
const title = (s) =>
  `step ${f.whole(s.step)} · reward ${f.fixed(s.score, 2)} · ${f.whole(s.length)} tokens${s.held_out ? " · eval" : ""}`;

function choice(name, same, id, onChange) {
  const select = el(
    "select",
    { class: "input select-inline", "aria-label": name, onchange: () => onChange(Number(select.value)) },
    same.map((s) => el("option", { value: s.id, selected: s.id === id }, title(s))),
  );
  return el("label", { class: "row" }, `${name} `, select);
}
async function difference(pair) {
  const [older, newer] = await Promise.all(pair.map(get));
  const parts = wordDiff(older.response, newer.response);
  const changed = parts.some(([kind]) => kind !== "same");
  return [
    changed
      ? el(
          "p",
          { class: "note" },
          el("del", {}, `only in step ${f.whole(older.step)}`),
          " ",
          el("ins", {}, `only in step ${f.whole(newer.step)}`),
        )
      : el("p", { class: "note" }, "Identical responses."),
    el(
      "p",
      { class: "text" },
      parts.map(([kind, text]) => (kind === "same" ? text : el(WORDS[kind], {}, text))),
    ),
  ];
}
/* Two responses to one prompt: the oldest and the newest unless the user picks others. */
function comparison(same, first, onDiff) {
  const pair = first.slice();
  const place = el("div", { class: "diff-text", "aria-live": "polite" });
  let newest = 0;
  async function show() {
    const mine = ++newest;
    let nodes;
    onDiff(pair.slice());
    try {
      nodes = await difference(pair);
    } catch (e) {
      if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
      nodes = [
        el("p", { class: "bad" }, e instanceof ApiError ? e.message : "The server does not respond. Try again."),
      ];
    }
    if (mine === newest) place.replaceChildren(...nodes); // otherwise another pair was picked meanwhile
  }
  const pick = (k) => (id) => {
    pair[k] = id;
    show();
  };
  show();
  return el(
    "div",
    { class: "comparison" },
    el("div", { class: "row" }, choice("older", same, pair[0], pick(0)), choice("newer", same, pair[1], pick(1))),
    place,
  );
}
/* The rewards of all responses to the prompt by step; a ring marks the open one. Each point shows its figures and opens on a
   click. */
function course(sample, same, onOpen) {
  const known = same.filter((s) => f.known(s.score));
  if (known.length < 2) return null;
  const scores = known.map((s) => s.score);
  const low = Math.min(...scores);
  const span = Math.max(...scores) - low || 1;
  const first = known[0].step;
  const steps = known[known.length - 1].step - first || 1;
  const x = (s) => 6 + (308 * (s.step - first)) / steps;
  const y = (s) => 42 - (34 * (s.score - low)) / span;
  const node = (tag, attributes, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...children);
    return made;
  };
  const dots = known.map((s) => {
    const dot = node(
      "circle",
      { cx: x(s), cy: y(s), r: s.id === sample.id ? 4 : 2.5, class: s.id === sample.id ? "now" : "" },
      node("title", {}, title(s)),
    );
    dot.addEventListener("click", () => onOpen(s.id));
    return dot;
  });
  return node(
    "svg",
    {
      class: "course",
      viewBox: "0 0 320 48",
      role: "img",
      "aria-label": `Reward of the responses to this prompt: ${f.fixed(scores[0], 2)} at step ${f.whole(first)}, ${f.fixed(scores[scores.length - 1], 2)} at step ${f.whole(first + steps)}`,
    },
    node("polyline", { points: known.map((s) => `${x(s)},${y(s)}`).join(" ") }),
    ...dots,
  );
}
const sideBySide = ({ prompt_key, held_out }) =>
  `/runs/${run.id}/samples/side-by-side?prompt=${prompt_key}${held_out ? "" : "&held_out=false"}`;
function others(sample, same, { diff, onDiff, onPrompt, onOpen }) {
  if (same.length < 2) return el("p", { class: "note" }, "No other response to this prompt is recorded.");
  const ids = same.map((s) => s.id);
  const pair = diff && diff.every((id) => ids.includes(id)) ? diff : [ids[0], ids[ids.length - 1]];
  const box = el("div", {});
  const open = () => {
    button.hidden = true;
    box.append(comparison(same, pair, onDiff));
  };
  const button = el(
    "button",
    { class: "btn btn-small", type: "button", onclick: open },
    icon("compare"),
    "Compare over steps",
  );
  if (diff) open();
  return el(
    "div",
    { class: "same-prompt" },
    el(
      "div",
      { class: "row" },
      el(
        "span",
        { class: "note" },
        `${f.whole(same.length)} responses to this prompt, steps ${f.whole(same[0].step)} to ${f.whole(same[same.length - 1].step)}`,
      ),
      button,
      el(
        "button",
        { class: "btn btn-small btn-quiet", type: "button", onclick: () => onPrompt(sample.prompt_key) },
        "Show all",
      ),
      el("a", { class: "btn btn-small btn-quiet", href: sideBySide(sample) }, "Side by side"),
    ),
    course(sample, same, onOpen),
    box,
  );
}
export function sampleDetail(id, options) {
  const place = el("div", { class: "sample-detail", "aria-busy": "true" }, el("div", { class: "card skeleton" }));
  get(id)
    .then(
      (sample) => {
        const card = sampleCard(sample, options.pieces);
        card.append(el("div", { class: "card-foot" }, others(sample, sample.same_prompt, options)));
        place.replaceChildren(card);
      },
      (e) => {
        if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
        const words =
          e instanceof ApiError && e.status === 404
            ? "This response no longer exists: a newer attempt trained its step again."
            : "This response could not be loaded. Close it and open it again.";
        place.replaceChildren(el("p", { class: "card card-body" }, words));
      },
    )
    .finally(() => place.removeAttribute("aria-busy"));
  return place;
}
