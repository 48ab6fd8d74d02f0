/* The steps that stand side by side: a token for each, and a list of further ones.
     stepChoice({ tokens, add }, onChange) → { draw(steps, reply) }
   `steps` and what `onChange` gets: numbers, "common" and "latest" separated by commas, as in the address; empty: the usual ones. */
import { drawTokens } from "../core/chosen-list.js";
import { el } from "../core/dom.js";
import * as f from "../core/format.js";

const MOST_COLUMNS = 12;
const WORDS = { common: "latest common step", latest: "each run’s latest step" };

const list = (text) => text.split(",").filter(Boolean);
const order = (word) => (word in WORDS ? Infinity : Number(word));
/* What the usual steps are: of one run those that the server chose. */
function shown(steps, reply) {
  if (steps) return list(steps);
  if (reply.runs.length > 1) return ["common"];
  return reply.columns.filter((c) => c.step !== null).map((c) => String(c.step));
}
function label(word, reply, current) {
  if (word === "latest" && reply.runs.length === 1) return "latest step";
  if (word !== "common") return WORDS[word] || `step ${f.whole(Number(word))}`;
  const [column] = reply.columns; // its step is the common one only where that alone is shown
  return current.join() === "common" && column.step !== null
    ? `${WORDS.common} (${f.whole(column.step)})`
    : WORDS.common;
}
export function stepChoice({ tokens, add }, onChange) {
  let current = [];
  const set = (words) => {
    current = words.sort((a, b) => order(a) - order(b));
    onChange(current.join(","));
  };
  add.addEventListener("change", () => {
    const word = add.value;
    add.value = "";
    if (word && !current.includes(word)) set([...current, word]);
  });
  function draw(steps, reply) {
    current = shown(steps, reply);
    const words = reply.runs.length > 1 ? ["common", "latest"] : ["latest"];
    const further = [...words, ...reply.steps.map(String)].filter((word) => !current.includes(word));
    add.replaceChildren(
      el("option", { value: "" }, "add step …"),
      ...further.map((word) => el("option", { value: word }, label(word, reply, current))),
    );
    add.disabled = (current.length + 1) * reply.runs.length > MOST_COLUMNS;
    drawTokens(
      tokens,
      current.map((word) => ({ key: word, text: label(word, reply, current) })),
      { add, remove: (word) => set(current.filter((other) => other !== word)) },
    );
  }
  return { draw };
}
