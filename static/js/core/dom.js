/* DOM helpers of every page script: elements, icons, state pills. Text is inserted as text, never as HTML. */
const SVG = "http://www.w3.org/2000/svg";

/* el("td", { class: "num", "data-run": 3 }, "1.24", child); null and false children are skipped */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
function sprite(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `${document.documentElement.dataset.icons}#${name}`);
  svg.append(use);
  return svg;
}
function icon(name) {
  const svg = sprite(name);
  svg.setAttribute("class", "icon");
  return svg;
}
function pill(state) {
  return el(
    "span",
    { class: "pill", "data-state": state },
    sprite(`state-${state}`),
    state === "lost" ? "Lost contact" : state[0].toUpperCase() + state.slice(1),
  );
}
/* kl_above → KL above, as in the server's pages. */
const alertTitle = (condition) =>
  (condition[0].toUpperCase() + condition.slice(1)).replace(/_/g, " ").replace(/^Kl /, "KL ");
/* One of eight colours and one of three patterns (plain, stripes, dots), the same for a run on every page. */
const runColour = (id) => ((id - 1) % 8) + 1;
const runPattern = (id) => Math.floor((id - 1) / 8) % 3;
const runMark = (id) => ({ "data-run": runColour(id), "data-pattern": runPattern(id) });
/* Name and number, as in /runs/57: runs may have the same name. */
const runLabel = (run) => `${run.name} #${run.id}`;
const readJson = (id) => JSON.parse(document.getElementById(id).textContent);
const setText = (node, text) => {
  if (node && node.textContent !== text) node.textContent = text;
};
/* Redraw. The focus stays on the element with the same `data-focus`; where that is gone, it goes to `heir()`. */
function keepFocus(redraw, heir = () => null) {
  const focused = document.activeElement;
  const key = focused && focused.dataset.focus;
  redraw();
  if (!key || focused.isConnected) return;
  const twin = document.querySelector(`[data-focus="${CSS.escape(key)}"]`) || heir();
  if (twin) twin.focus({ preventScroll: true });
}
/* Show or hide a button. Where it is hidden after it was pressed, the focus goes to `heir`. */
function setShown(button, isShown, heir) {
  const isFocused = document.activeElement === button;
  button.hidden = !isShown;
  if (isShown || !isFocused) return;
  if (heir.tabIndex < 0) heir.tabIndex = -1;
  heir.focus();
}

let toasts;
/* With an action ({ label, act }) it stays longer, and while the pointer is on it. */
function toast(message, action) {
  if (!toasts) document.body.append((toasts = el("div", { class: "toasts", role: "status" })));
  const box = el(
    "div",
    { class: "toast" },
    message,
    action &&
      el(
        "button",
        {
          class: "btn btn-small",
          type: "button",
          onclick: () => {
            box.remove();
            action.act();
          },
        },
        action.label,
      ),
  );
  toasts.replaceChildren(box);
  const leave = () => (box.matches(":hover, :focus-within") ? setTimeout(leave, 1000) : box.remove());
  setTimeout(leave, action ? 12000 : 4000);
}
export {
  el, icon, pill, alertTitle, runColour, runLabel, runMark, runPattern, readJson, setText, setShown, keepFocus, toast,
};
