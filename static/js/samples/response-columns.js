/* One prompt with its responses side by side. All text from models and users is inserted as text.
     promptCard(prompt, { columns, labels, colours, heldOut, several, marks, pieces }) → element
   `labels`: a heading of each column; `colours`: that of each column's run; `pieces`: search hits to mark. `marks`: how words are
   marked that differ from the response on the left: "new", "removed" (these too), or "none". */
import { el, runMark } from "../core/dom.js";
import * as f from "../core/format.js";
import { marked } from "../core/highlight.js";
import { sampleCard } from "../run/sample-card.js";
import { wordDiff } from "../run/word-diff.js";

/* Whether the server sent a part of the response. */
const isCut = (s) => f.known(s.excerpt_start);
/* Excerpts from different places of two responses cannot be compared. */
const comparable = (s, left) => (s.excerpt_start ?? 0) === (left.excerpt_start ?? 0);
const signed = (x) => `${x > 0 ? "+" : ""}${f.fixed(x, 2)}`;
const fact = (...parts) => el("span", {}, ...parts);

function facts(s, left, ranged) {
  const delta = left && f.known(s.score) && f.known(left.score) ? ` (${signed(s.score - left.score)})` : "";
  return el(
    "p",
    { class: "facts" },
    ranged ? fact("step ", el("b", {}, f.whole(s.step))) : null,
    fact("reward ", el("b", {}, f.fixed(s.score, 2)), delta),
    fact("length ", el("b", {}, f.whole(s.length))),
    s.ending ? fact("finish reason ", el("b", {}, s.ending)) : null,
    s.age ? fact("staleness ", el("b", {}, f.whole(s.age))) : null,
    fact("policy version ", el("b", {}, sampleCard.versions(s))),
  );
}
function words(s, left, { marks, pieces }) {
  if (!left || marks === "none" || !comparable(s, left)) return marked(s.response, pieces);
  const tags = marks === "removed" ? { new: "ins", gone: "del" } : { new: "ins" };
  return wordDiff(left.response, s.response)
    .filter(([kind]) => kind === "same" || tags[kind])
    .flatMap(([kind, text]) => (kind === "same" ? marked(text, pieces) : el(tags[kind], {}, marked(text, pieces))));
}
function comparison(s, left, { marks }) {
  if (!left) return null;
  if (!comparable(s, left))
    return marks === "none" ? null : "The excerpts start at different places, so differences are not marked.";
  return left.response === s.response && !isCut(s) && !isCut(left) ? "Same as on the left." : null;
}
function cell(s, left, label, colour, view, ranged) {
  const note = s && comparison(s, left, view);
  const heading = s ? el("a", { href: `/runs/${s.run}/samples?open=${s.id}` }, label) : label;
  return el(
    "section",
    { class: "response", ...(colour && runMark(colour)) },
    el("h3", {}, heading),
    s ? facts(s, left, ranged) : el("p", { class: "note" }, "No response recorded."),
    note ? el("p", { class: "note" }, note) : null,
    s ? el("p", { class: "text" }, words(s, left, view)) : null,
    s && isCut(s)
      ? el("p", { class: "note" }, "An excerpt. ", el("a", { href: `/runs/${s.run}/samples?open=${s.id}` }, "Whole response"))
      : null,
  );
}
function change(prompt, several) {
  if (!f.known(prompt.change)) return "";
  return several ? `rewards differ by ${f.fixed(prompt.change, 2)}` : `reward ${signed(prompt.change)}`;
}
export function promptCard(prompt, view) {
  const { columns, labels, colours, heldOut, several, pieces } = view;
  const first = prompt.samples.find(Boolean);
  let left = null;
  const cells = columns.map((column, k) => {
    const s = prompt.samples[k];
    const made = cell(s, left, labels[k], several ? colours[k] : null, view, column.first !== column.last);
    left = s || left;
    return made;
  });
  return el(
    "article",
    { class: "card prompt-row", "data-prompt": prompt.prompt_key },
    el(
      "div",
      { class: "card-head wraps" },
      el("h2", {}, heldOut ? `Eval prompt #${f.whole(first && first.sequence_id)}` : "Training prompt"),
      el("span", { class: "reading" }, change(prompt, several)),
    ),
    el("p", { class: "text" }, marked(first ? first.prompt : "", pieces)),
    el("div", { class: "table-wrap" }, el("div", { class: "responses" }, cells)),
  );
}
/* A button below cut texts that shows them whole; call it once the card is on the page. */
export function addExpander(card) {
  const cut = [...card.querySelectorAll(".text")].some((text) => text.scrollHeight > text.clientHeight + 1);
  if (!cut) return;
  const button = el(
    "button",
    {
      class: "btn btn-small btn-quiet",
      type: "button",
      "aria-expanded": "false",
      onclick: () => {
        const whole = card.toggleAttribute("data-whole");
        button.setAttribute("aria-expanded", String(whole));
        button.textContent = whole ? "Show less" : "Show all";
      },
    },
    "Show all",
  );
  card.append(el("div", { class: "card-foot" }, button));
}
