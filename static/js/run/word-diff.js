/* Word diff of two texts, in any language: words are those of the browser's segmenter.
     wordDiff("the grey sea", "the blue sea") → [["same", "the "], ["gone", "grey"], ["new", "blue"], ["same", " sea"]]
   "same" and "gone" joined are the first text, "same" and "new" the second. */
const MOST_CELLS = 40e6; // 80 MB for a moment; longer texts are shown as replaced
const words = window.Intl && Intl.Segmenter ? new Intl.Segmenter(undefined, { granularity: "word" }) : null;

const split = (text) =>
  words ? Array.from(words.segment(text), (s) => s.segment) : text.match(/\s+|\w+|[^\s\w]/gu) || [];

/* The longest common subsequence of a and b, as pairs [kind, text] in order. */
function align(a, b) {
  const wide = b.length + 1;
  if (wide * (a.length + 1) > MOST_CELLS)
    return [
      ["gone", a.join("")],
      ["new", b.join("")],
    ];
  const best = new Uint16Array(wide * (a.length + 1));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      best[i * wide + j] =
        a[i] === b[j] ? best[(i + 1) * wide + j + 1] + 1 : Math.max(best[(i + 1) * wide + j], best[i * wide + j + 1]);
  const pieces = [];
  let i = 0;
  let j = 0;
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) {
      pieces.push(["same", a[i]]);
      i++;
      j++;
    } else if (best[(i + 1) * wide + j] >= best[i * wide + j + 1]) pieces.push(["gone", a[i++]]);
    else pieces.push(["new", b[j++]]);
  }
  while (i < a.length) pieces.push(["gone", a[i++]]);
  while (j < b.length) pieces.push(["new", b[j++]]);
  return pieces;
}
/* One piece per stretch. A single space between two changes belongs to them, so that the diff has no tiny pieces. */
function join(parts) {
  const pieces = [];
  let gone = "";
  let fresh = "";
  const flush = () => {
    if (gone) pieces.push(["gone", gone]);
    if (fresh) pieces.push(["new", fresh]);
    gone = fresh = "";
  };
  parts.forEach(([kind, text], k) => {
    const next = parts[k + 1];
    const crumb = kind === "same" && (gone || fresh) && !text.trim() && next && next[0] !== "same";
    if (kind === "gone" || crumb) gone += text;
    if (kind === "new" || crumb) fresh += text;
    if (kind !== "same" || crumb) return;
    flush();
    if (pieces.length && pieces[pieces.length - 1][0] === "same") pieces[pieces.length - 1][1] += text;
    else pieces.push(["same", text]);
  });
  flush();
  return pieces;
}
export function wordDiff(before, after) {
  const a = split(before);
  const b = split(after);
  let head = 0;
  let tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const same = (list) => list.map((text) => ["same", text]);
  return join([
    ...same(a.slice(0, head)),
    ...align(a.slice(head, a.length - tail), b.slice(head, b.length - tail)),
    ...same(a.slice(a.length - tail)),
  ]);
}
