/* Terminal colour codes as spans with CSS classes. A line is inserted as text: nothing in it becomes HTML. Sequences other than
   colours (cursor movements, titles, links) and other control characters are removed.
     ansi("\x1b[31mred\x1b[0m") → [{ text: "red", classes: ["ansi-1"] }] */
/* Colour, other CSI sequences, string sequences up to their end (or the line's), two-byte escapes, and control characters
   except tab. */
const CODES =
  /(?:\x1b\[|\x9b)([\d;:]*)m|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]?|[\x00-\x08\x0a-\x1f\x7f-\x9f]/g;
const MARKS = { 1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "inverse", 9: "strike" };
const ENDS = { 22: ["bold", "dim"], 23: ["italic"], 24: ["underline"], 27: ["inverse"], 29: ["strike"] };
const bit = (value, n) => (value > 127 ? n : 0);

/* The nearest of eight colours, readable in light and dark themes. */
function eighth(r, g, b) {
  return bit(r, 1) + bit(g, 2) + bit(b, 4);
}
function of256(n) {
  if (n < 16) return n % 8;
  if (n > 231) return n > 243 ? 7 : 0;
  const cube = n - 16;
  const part = (k) => (Math.floor(cube / k) % 6) * 51;
  return eighth(part(36), part(6), part(1));
}
/* The colour after 38 or 48: [its number or null, codes used]. */
function extended(codes, at) {
  if (codes[at + 1] === 5) return [of256(Math.min(255, codes[at + 2] || 0)), 2];
  if (codes[at + 1] === 2) return [eighth(codes[at + 2] || 0, codes[at + 3] || 0, codes[at + 4] || 0), 4];
  return [null, codes.length];
}
function apply(state, codes) {
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i];
    if (code === 0) {
      state.marks.clear();
      state.ink = state.ground = null;
    } else if (MARKS[code]) state.marks.add(MARKS[code]);
    else if (ENDS[code]) ENDS[code].forEach((mark) => state.marks.delete(mark));
    else if (code === 38 || code === 48) {
      const [colour, used] = extended(codes, i);
      state[code === 38 ? "ink" : "ground"] = colour;
      i += used;
    } else if (code === 39) state.ink = null;
    else if (code === 49) state.ground = null;
    else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) state.ink = code % 10;
    else if ((code >= 40 && code <= 47) || (code >= 100 && code <= 107)) state.ground = code % 10;
  }
}
function classes({ marks, ink, ground }) {
  return [
    ...[...marks].map((mark) => `ansi-${mark}`),
    ...(ink === null ? [] : [`ansi-${ink}`]),
    ...(ground === null ? [] : [`ansi-on-${ground}`]),
  ];
}
export function ansi(text) {
  const pieces = [];
  const state = { marks: new Set(), ink: null, ground: null };
  let from = 0;
  const keep = (to) => {
    if (to <= from) return;
    const own = classes(state);
    const last = pieces[pieces.length - 1];
    const more = text.slice(from, to);
    if (last && last.classes.join() === own.join()) last.text += more;
    else pieces.push({ text: more, classes: own });
  };
  for (const match of text.matchAll(CODES)) {
    keep(match.index);
    from = match.index + match[0].length;
    if (match[1] !== undefined) apply(state, match[1].split(/[;:]/).map(Number));
  }
  keep(text.length);
  return pieces;
}
