/* The column chooser: add with completion, remove, reorder by dragging or by buttons; the choice is in the address. */
(function () {
  "use strict";
  const { Oppo } = window, { el, setText } = Oppo;
  const $ = (id) => document.getElementById(id);
  const dialog = $("columns-dialog"), list = $("columns-list"), input = $("columns-add"), words = $("columns-words"), status = $("columns-told");
  const MOST_SHOWN = 9, MOST = 30;
  let known = null, shown = [], at = -1, dragged = null;

  const keys = () => [...list.children].map((item) => item.dataset.key);
  function item(key, title) {
    const button = (words, sign, deed) => el("button", { class: "btn btn-icon btn-small", type: "button", "aria-label": `${words} ${title}`, onclick: deed }, sign);
    const node = el("li", { "data-key": key, draggable: "true" }, el("span", { class: "grow" }, title),
      button("Move left:", "↑", () => move(node, -1)), button("Move right:", "↓", () => move(node, 1)), button("Remove", "×", () => remove(node)));
    return node;
  }
  function move(node, by) {
    const other = by < 0 ? node.previousElementSibling : node.nextElementSibling, focused = document.activeElement;
    if (!other) return;
    if (by < 0) other.before(node); else other.after(node);
    focused.focus();                                     // moving a node removes the focus
    tell(node);
  }
  function tell(node) { setText(status, `${node.querySelector("span").textContent} is column ${keys().indexOf(node.dataset.key) + 1} of ${list.children.length}.`); }
  function remove(node) {
    const next = node.nextElementSibling || node.previousElementSibling;
    node.remove();
    setText(status, `${node.querySelector("span").textContent} removed.`);
    (next ? next.querySelector("button:last-child") : input).focus();
  }
  async function add(key) {
    if (!known) await load();                            // the user may type before they are loaded
    const column = known && known.find((c) => c.key === key);
    if (!column) { setText(status, known ? `There is no column “${key}”. Choose one from the list.` : "The columns cannot be loaded. Try again."); return; }
    if (list.children.length >= MOST) { setText(status, `A table has at most ${MOST} columns.`); return; }
    if (!keys().includes(key)) list.append(item(key, column.title));
    input.value = "";
    offer();
    tell([...list.children].find((node) => node.dataset.key === key));
    list.lastElementChild.scrollIntoView({ block: "nearest" });
  }
  async function load() {
    if (!known) {
      const reply = await Oppo.api.get("runs/words").catch(() => null);
      if (reply) known = [...reply.columns.map((c) => ({ key: c.name, title: c.title, says: c.says })), ...reply.metrics.map((m) => ({ key: m, title: m, says: "metric" })), ...reply.settings.map((s) => ({ key: s, title: s, says: "setting" }))];
    }
    offer();
  }
  /* Names that start with the typed text, then names that contain it. */
  function offer() {
    const typed = input.value.trim().toLowerCase(), rest = (known || []).filter((c) => !keys().includes(c.key));
    const begins = rest.filter((c) => c.key.toLowerCase().startsWith(typed) || c.title.toLowerCase().startsWith(typed)), has = rest.filter((c) => !begins.includes(c) && c.key.toLowerCase().includes(typed));
    shown = document.activeElement === input ? [...begins, ...has].slice(0, MOST_SHOWN) : [];
    words.replaceChildren(...shown.map((c, i) => el("li", { role: "option", id: `column-${i}`, "aria-selected": "false" }, el("span", { class: "num" }, c.key), el("span", { class: "note" }, c.says))));
    point(-1);
    words.hidden = !shown.length;
    input.setAttribute("aria-expanded", String(shown.length > 0));
  }
  function point(i) {
    at = i;
    [...words.children].forEach((node, k) => node.setAttribute("aria-selected", String(k === at)));
    if (at < 0) input.removeAttribute("aria-activedescendant"); else input.setAttribute("aria-activedescendant", `column-${at}`);
  }
  function onKey(e) {
    if (e.key === "ArrowDown" && shown.length) { point((at + 1) % shown.length); e.preventDefault(); }
    else if (e.key === "ArrowUp" && shown.length) { point((at - 1 + shown.length) % shown.length); e.preventDefault(); }
    else if (e.key === "Escape" && shown.length) { shown = []; words.hidden = true; input.setAttribute("aria-expanded", "false"); e.preventDefault(); e.stopPropagation(); }
    else if (e.key === "Enter") {
      e.preventDefault();
      if (at >= 0) add(shown[at].key);
      else if (!input.value.trim()) show();
      else add(shown.length === 1 ? shown[0].key : input.value.trim());
    }
  }
  function show() {
    const url = new URL(location.href), usual = list.dataset.usual, now = keys().join(",");
    url.searchParams.delete("cursor");
    if (now && now !== usual) url.searchParams.set("cols", now); else url.searchParams.delete("cols");
    location.assign(url.href.replace(/%2C/g, ",").replace(/%2F/g, "/"));
  }
  function onDrag(e) {
    const over = e.target.closest("#columns-list li");
    if (!dragged || !over) return;
    e.preventDefault();
    if (over === dragged) return;
    const box = over.getBoundingClientRect();
    if (e.clientY < box.top + box.height / 2) over.before(dragged); else over.after(dragged);
  }
  list.replaceChildren(...[...list.children].map((node) => item(node.dataset.key, node.textContent)));
  list.addEventListener("dragstart", (e) => { dragged = e.target.closest("li"); e.dataTransfer.effectAllowed = "move"; e.dataTransfer.setData("text/plain", dragged.dataset.key); });
  list.addEventListener("dragover", onDrag);
  list.addEventListener("drop", (e) => e.preventDefault());
  list.addEventListener("dragend", () => { if (dragged) tell(dragged); dragged = null; });
  input.addEventListener("focus", load);
  input.addEventListener("input", offer);
  input.addEventListener("keydown", onKey);
  input.addEventListener("blur", offer);
  words.addEventListener("mousedown", (e) => { const node = e.target.closest("li"); e.preventDefault(); if (node) add(shown[[...words.children].indexOf(node)].key); });
  $("columns-show").addEventListener("click", show);
  $("columns-usual").addEventListener("click", () => { list.replaceChildren(); show(); });
})();
