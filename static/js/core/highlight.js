/* Search hits in a text. The text is inserted as text; a hit is an element around it.
     splitQuery('sea "grey sky"') → ["sea", "grey sky"]     marked("the sea", ["sea"]) → ["the ", <mark>, ""] */
import { el } from "./dom.js";

export const splitQuery = (words) => [...(words || "").matchAll(/"([^"]+)"|(\S+)/g)].map((m) => m[1] || m[2]);
export function marked(text, pieces) {
  const escaped = pieces.filter(Boolean).map((piece) => piece.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  if (!escaped.length) return [text];
  return text
    .split(new RegExp(`(${escaped.join("|")})`, "giu"))
    .map((part, i) => (i % 2 ? el("mark", {}, part) : part));
}
