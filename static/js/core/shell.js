/* Shared by all pages: theme switch, shortcuts, dialogs, times in the browser's time zone. */
import "./bell.js";
import "./clipboard.js";
import { times } from "./format.js";
import { describeKey, shortcut } from "./keys.js";
import { togglePalette } from "./palette.js";
import { markWideTables } from "./wide-tables.js";

function toggleTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("oppo-theme", next);
  } catch (e) {
    /* storage may be refused; then the choice lasts for this page */
  }
}
function openTab(side) {
  const now = document.querySelector('.tabs [aria-current="page"]');
  const next = now && now[side];
  if (next && next.matches("a")) location.href = next.href;
}
document.querySelectorAll(".rail a[data-go]").forEach((link) => {
  shortcut(`g ${link.dataset.go}`, link.dataset.words, () => (location.href = link.href));
});
if (document.querySelector(".filter input")) {
  const shown = (input) => input.offsetParent !== null;
  shortcut("/", "search", () => [...document.querySelectorAll(".filter input")].find(shown)?.focus());
}
if (document.querySelector(".tabs")) {
  const sides = { "[": "previousElementSibling", "]": "nextElementSibling" };
  shortcut("[ ]", "previous, next tab", (key) => openTab(sides[key]), { keys: ["[", "]"] });
}
shortcut("t", "light or dark", toggleTheme);

const IS_MAC = navigator.platform.startsWith("Mac");
describeKey(IS_MAC ? "⌘ K" : "Ctrl K", "page, action or run by its name");
document.addEventListener("keydown", (e) => {
  const isPressed = IS_MAC ? e.metaKey && !e.ctrlKey : e.ctrlKey && !e.metaKey;
  if (e.key.toLowerCase() !== "k" || !isPressed || e.altKey || e.shiftKey) return;
  if (document.querySelector("dialog[open]:not(.palette)")) return; // its input would be lost
  e.preventDefault();
  togglePalette();
});

markWideTables(document);
const current = document.querySelector('.tabs [aria-current="page"]');
if (current) current.parentNode.scrollLeft = current.offsetLeft - 40; // on a phone the tabs scroll sideways
document.querySelectorAll("[data-toggle-theme]").forEach((b) => b.addEventListener("click", toggleTheme));
document
  .querySelectorAll("[data-dialog]")
  .forEach((b) => b.addEventListener("click", () => document.getElementById(b.dataset.dialog).showModal()));
document
  .querySelectorAll("[data-close]")
  .forEach((b) => b.addEventListener("click", () => b.closest("dialog").close()));
document
  .querySelectorAll("select[data-submits]")
  .forEach((s) =>
    s.addEventListener("change", () => {
      const { next } = s.form.elements;
      if (next) next.value = location.pathname + location.search; // choices on the page change its address
      s.form.requestSubmit();
    }),
  );
/* Menus close on Escape, on a press elsewhere, and when one of their buttons was used. */
document.addEventListener("keydown", (e) => {
  const menu = e.key === "Escape" && e.target.closest("details.menu[open]");
  if (!menu) return;
  menu.open = false;
  menu.querySelector("summary").focus();
  e.stopPropagation();
});
document.addEventListener("pointerdown", (e) => {
  if (e.target.closest("dialog, .toasts")) return;
  document.querySelectorAll("details.menu[open]").forEach((menu) => {
    if (!menu.contains(e.target)) menu.open = false;
  });
});
document.addEventListener(
  "click",
  (e) => {
    const menu = e.target.closest(".menu-end .menu-body button") && e.target.closest("details.menu");
    if (!menu) return;
    menu.open = false;
    menu.querySelector("summary").focus(); // before the action, so that a dialog gives the focus back to it
  },
  true,
);
times(document);
