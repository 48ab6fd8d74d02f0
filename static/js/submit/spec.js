/* Reads and changes a spec (plain data) by dotted path; finds a path in YAML text. */
const isMap = (x) => x !== null && typeof x === "object" && !Array.isArray(x);

const get = (data, path) => path.split(".").reduce((at, key) => (isMap(at) ? at[key] : undefined), data);
function set(data, path, value) {
  const keys = path.split(".");
  const last = keys.pop();
  let at = data;
  keys.forEach((key) => {
    if (!isMap(at[key])) at[key] = {};
    at = at[key];
  });
  at[last] = value;
}
function unset(data, path) {
  const keys = path.split(".");
  const last = keys.pop();
  const section = keys.length ? get(data, keys.join(".")) : data;
  if (isMap(section)) delete section[last];
}
const copy = (data) => JSON.parse(JSON.stringify(data));
/* Number of different leaves. Null and absent are equal: both mean "empty" in the schema. */
function differences(a, b) {
  if (isMap(a) || isMap(b)) {
    const keys = new Set([...Object.keys(isMap(a) ? a : {}), ...Object.keys(isMap(b) ? b : {})]);
    return [...keys].reduce(
      (sum, key) => sum + differences(isMap(a) ? a[key] : undefined, isMap(b) ? b[key] : undefined),
      0,
    );
  }
  return JSON.stringify(a ?? null) === JSON.stringify(b ?? null) ? 0 : 1;
}
/* [start, end] of the line with `path` in block-style YAML, or of its nearest parent; null if neither is present. */
function lineOf(text, path) {
  const parts = path.split(".");
  let depth = 0;
  let indents = [-1];
  let from = 0;
  let position = null;
  for (const line of text.split("\n")) {
    const m = /^(\s*)(?:- )?["']?([\w.-]+)["']?\s*:/.exec(line);
    if (m) {
      const indent = m[1].length;
      while (depth && indent <= indents[depth]) {
        depth--;
        indents.pop();
      }
      if (m[2] === parts[depth]) {
        position = [from, from + line.length];
        depth++;
        indents.push(indent);
        if (depth === parts.length) return position;
      }
    }
    from += line.length + 1;
  }
  return position;
}
export { get, set, unset, copy, differences, lineOf };
