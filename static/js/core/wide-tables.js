/* A table wider than its container scrolls sideways; it is focusable then, so that the keyboard can scroll it. */
function mark(wrap) {
  if (!wrap.isConnected) return; // replaced since it was observed
  const heading = wrap.closest("section, article, main").querySelector("h1, h2, h3");
  const label = `${heading ? heading.textContent.trim() : "Table"}, scrolls sideways`;
  const attributes = { tabindex: "0", role: "region", "aria-label": label };
  const wide = wrap.scrollWidth > wrap.clientWidth;
  Object.entries(attributes).forEach(([name, value]) =>
    wide ? wrap.setAttribute(name, value) : wrap.removeAttribute(name),
  );
}
const sizes = new ResizeObserver((entries) =>
  new Set(entries.map((e) => e.target.closest(".table-wrap"))).forEach((wrap) => wrap && mark(wrap)),
);
/* Mark the tables in `root`, and again whenever their size changes. */
export function markWideTables(root) {
  root.querySelectorAll(".table-wrap").forEach((wrap) => {
    mark(wrap);
    [wrap, ...wrap.children].forEach((part) => sizes.observe(part));
  });
}
