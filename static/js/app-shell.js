/* Shared by all pages: theme switch, keyboard shortcuts, help, times in the browser's time zone. */
(function () {
  "use strict";
  const { el } = window.Oppo;
  const GO = Object.fromEntries([...document.querySelectorAll(".rail a[data-go]")].map((link) => [link.dataset.go, link.href]));
  let pending = 0;

  function toggleTheme() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("oppo-theme", next); } catch (e) { /* storage may be refused; then the choice lasts for this page */ }
  }
  const KEYS = [["g r", "runs"], ["g q", "queue"], ["g c", "compare"], ["g a", "alerts"], ["g n", "new run"], ["/", "filter"], ["[ ]", "previous, next tab"], ["t", "light or dark"], ["?", "this list"], ["Esc", "close"]];
  function help() {
    let box = document.querySelector("dialog.keys");
    if (!box) {
      const entries = KEYS.flatMap(([keys, words]) => [el("dt", {}, keys.split(" ").map((key) => el("kbd", {}, key))), el("dd", {}, words)]);
      box = el("dialog", { class: "keys", "aria-label": "Keyboard" }, el("h2", {}, "Keyboard"), el("dl", {}, entries));
      document.body.append(box);
    }
    if (!box.open) box.showModal();
  }
  function tab(side) {
    const now = document.querySelector('.tabs [aria-current="page"]'), next = now && now[side];
    if (next && next.matches("a")) location.href = next.href;
  }
  function onKey(e) {
    if (e.target.matches("input, select, textarea") || e.metaKey || e.ctrlKey || e.altKey || document.querySelector("dialog[open]")) return;
    if (e.timeStamp - pending < 900 && GO[e.key]) { location.href = GO[e.key]; return; }
    pending = e.key === "g" ? e.timeStamp : 0;
    if (e.key === "/") { const box = document.querySelector(".filter input"); if (box) { e.preventDefault(); box.focus(); } }
    if (e.key === "[" || e.key === "]") tab(e.key === "[" ? "previousElementSibling" : "nextElementSibling");
    if (e.key === "t") toggleTheme();
    if (e.key === "?") help();
  }
  async function copy(button) {
    const source = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.value === undefined ? source.textContent : source.value);
      window.Oppo.toast("Copied");
    } catch (e) {                                        // refused, or not a secure origin: select it, so that Ctrl-C works
      select(source);
    }
  }
  function select(source) {
    if (source.select) source.select();
    else getSelection().selectAllChildren(source);
    window.Oppo.toast("Selected; press Ctrl C to copy");
  }
  /* Copies the text of an address; where the clipboard is refused, a dialog shows the text selected. */
  async function copyUrl(button) {
    const menu = button.closest("details");
    let text = null;
    if (menu) { menu.open = false; menu.querySelector("summary").focus(); }
    try {
      const reply = await fetch(button.dataset.copyUrl);
      text = reply.ok ? await reply.text() : null;
      if (text !== null) await navigator.clipboard.writeText(text);
      window.Oppo.toast(text === null ? "Could not be loaded. Reload the page." : "Copied");
    } catch (e) {
      if (text === null) return window.Oppo.toast("The server does not respond. Try again.");
      const area = el("textarea", { class: "input", rows: "16", readonly: true, "aria-label": "Text to copy" });
      area.value = text;
      const box = el("dialog", { class: "ask copied", "aria-label": button.textContent.trim(), onclose: () => box.remove() }, area,
        el("div", { class: "row" }, el("button", { class: "btn push", type: "button", onclick: () => box.close() }, "Close")));
      document.body.append(box);
      box.showModal();
      select(area);
    }
  }
  /* The bell: number of unread alerts, polled. Pages that learn of an alert earlier call `Oppo.askUnread`. */
  const bell = document.querySelector("[data-bell]"), BELL_MS = 30000;
  function showUnread(count) {
    const badge = bell && bell.querySelector(".bell-count");
    if (!badge) return;
    badge.hidden = count === 0;
    window.Oppo.setText(badge.querySelector("[data-count]"), count > 99 ? "99+" : String(count));
  }
  async function askUnread() {
    if (!bell || document.hidden) return;
    try {
      showUnread((await window.Oppo.api.get("alerts/unread")).unread);
    } catch (e) {                                        // the page's own live connection reports an unreachable server
      if (!(e instanceof TypeError) && !(e instanceof window.Oppo.ApiError)) throw e;
    }
  }
  Object.assign(window.Oppo, { showUnread, askUnread });
  if (bell) setInterval(askUnread, BELL_MS);
  /* A table wider than its container scrolls sideways; it is focusable, so that the keyboard can scroll it. */
  const sideways = new ResizeObserver((entries) => new Set(entries.map((e) => e.target.closest(".table-wrap"))).forEach((wrap) => {
    const heading = wrap.closest("section, main").querySelector("h1, h2, h3"), wide = wrap.scrollWidth > wrap.clientWidth;
    const given = wide ? { tabindex: "0", role: "region", "aria-label": `${heading ? heading.textContent.trim() : "Table"}, scrolls sideways` } : {};
    ["tabindex", "role", "aria-label"].forEach((name) => (name in given ? wrap.setAttribute(name, given[name]) : wrap.removeAttribute(name)));
  }));
  document.querySelectorAll(".table-wrap").forEach((wrap) => [wrap, ...wrap.children].forEach((part) => sideways.observe(part)));
  const current = document.querySelector('.tabs [aria-current="page"]');
  if (current) current.parentNode.scrollLeft = current.offsetLeft - 40;      // on a phone the tabs scroll sideways
  document.addEventListener("keydown", onKey);
  document.querySelectorAll("[data-toggle-theme]").forEach((b) => b.addEventListener("click", toggleTheme));
  document.addEventListener("click", (e) => { const button = e.target.closest("[data-copy]"); if (button) copy(button); });      // refreshed parts included
  document.querySelectorAll("[data-copy-url]").forEach((b) => b.addEventListener("click", () => copyUrl(b)));
  document.querySelectorAll("[data-dialog]").forEach((b) => b.addEventListener("click", () => document.getElementById(b.dataset.dialog).showModal()));
  document.querySelectorAll("[data-close]").forEach((b) => b.addEventListener("click", () => b.closest("dialog").close()));
  document.querySelectorAll("select[data-submits]").forEach((s) => s.addEventListener("change", () => s.form.requestSubmit()));
  window.Oppo.times(document);
})();
