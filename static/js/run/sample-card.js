/* A recorded response: its figures, the prompt (of a chat prompt every turn), and the response with stale tokens underlined. All text from models and users is
   inserted as text. */
import { el } from "../core/dom.js";
import * as f from "../core/format.js";
import { marked } from "../core/highlight.js";

const versions = ({ versions: [from, to] }) => (from === to ? String(from) : `${from} → ${to}`);
const fact = (name, value) => el("span", {}, `${name} `, el("b", {}, value));

function facts(s) {
  return el(
    "div",
    { class: "facts" },
    fact("reward", f.fixed(s.score, 2)),
    s.held_out ? null : fact("KL", f.fixed(s.kl, 2)),
    fact("length", f.whole(s.length)),
    fact("staleness", s.age),
    s.ending ? fact("finish reason", s.ending) : null,
    fact("policy version", versions(s)),
    fact(s.held_out ? "eval prompt" : "sequence", `#${f.whole(s.sequence_id)}`),
    fact("step", f.whole(s.step)),
  );
}
function answer(s, pieces) {
  const head = s.stale_response || "";
  const stale = head && s.response.startsWith(head);
  return el(
    "p",
    { class: "text" },
    stale ? el("span", { class: "v-old", title: "sampled under an older policy version" }, marked(head, pieces)) : null,
    marked(stale ? s.response.slice(head.length) : s.response, pieces),
  );
}
const turn = (role, text) => el("div", { class: "turn" }, el("dt", {}, role), el("dd", {}, text));
function turns(s, pieces) {
  return el(
    "dl",
    { class: "turns" },
    s.messages.map(({ role, content }) => turn(role, el("p", { class: "text" }, marked(content, pieces)))),
    turn("response", answer(s, pieces)),
  );
}
export const sampleCard = (s, pieces = []) =>
  el(
    "article",
    { class: "card sample" },
    facts(s),
    s.messages ? turns(s, pieces) : [el("p", { class: "text prompt" }, marked(s.prompt, pieces)), answer(s, pieces)],
  );
sampleCard.versions = versions;
