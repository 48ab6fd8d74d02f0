/* Refreshes a server-rendered part of a page: fetches it every few seconds and replaces only the keyed children that
   changed, so that ticks, focus and scroll positions stay. Of several responses the newest request counts. While the
   pointer is pressed nothing is replaced, because the pressed element would be gone before the click.
     <tbody data-refresh="/runs/?part=rows" data-every="2">  with children that have data-key */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {});

  const SOON_MS = 150;

  function patch(target, fresh) {
    const active = target.contains(document.activeElement) ? document.activeElement : null, row = active && active.closest("[data-key]");
    const old = new Map([...target.children].map((child) => [child.dataset.key, child]));
    const keep = new Set();
    let at = null;
    for (const next of [...fresh.children]) {
      const key = next.dataset.key, was = old.get(key), html = next.outerHTML;
      const node = was && was.patchedFrom === html ? was : next;
      if (node === next) {
        node.patchedFrom = html;
        Oppo.times(node);
        if (was) { carry(was, node); was.replaceWith(node); }
      }
      keep.add(node);
      const place = at ? at.nextSibling : target.firstChild;
      if (place !== node) target.insertBefore(node, place);
      at = node;
    }
    [...target.children].forEach((child) => { if (!keep.has(child)) child.remove(); });
    const twin = active && (active.isConnected ? active : twinOf(active, row && target.querySelector(`[data-key="${CSS.escape(row.dataset.key)}"]`)));
    if (twin && twin !== document.activeElement) twin.focus({ preventScroll: true });      // immediately, for the next key
  }
  /* The counterpart of `active` in the redrawn row; null if it is gone. */
  function twinOf(active, row) {
    const name = ["data-focus", "href", "value"].find((each) => active.hasAttribute(each));
    return row && name ? row.querySelector(`[${name}="${CSS.escape(active.getAttribute(name))}"]`) : null;
  }
  function carry(was, node) {                            // the user's changes to the old row
    was.querySelectorAll("input[type=checkbox]").forEach((box) => {
      const twin = node.querySelector(`input[type=checkbox][value="${CSS.escape(box.value)}"]`);
      if (twin) twin.checked = box.checked;
    });
  }
  Oppo.refresh = function (target, { onState, onPatched, onRefused, onSignedOut }) {
    const every = 1000 * Number(target.dataset.every || 3);
    let since = new Date(), timer = 0, newest = 0, pressed = false;

    async function turn() {
      clearTimeout(timer);
      if (document.hidden) return;
      if (pressed) { timer = setTimeout(turn, SOON_MS); return; }
      const mine = ++newest;
      try {
        const reply = await fetch(target.dataset.refresh, { headers: { "X-Part": "1" }, credentials: "same-origin" });
        const text = await reply.text();
        if (mine !== newest) return;
        if (reply.redirected || reply.status === 403) { if (onSignedOut) onSignedOut(); else location.reload(); return; }
        if (pressed) { timer = setTimeout(turn, SOON_MS); return; }
        if (onRefused && reply.headers.get("content-type").startsWith("text/plain")) {      // the request is invalid: the rows stay
          onRefused(text);
          timer = setTimeout(turn, every);
          return;
        }
        if (!reply.ok) throw new Error(`status ${reply.status}`);
        const holder = document.createElement(target.tagName);
        holder.innerHTML = text;                         // our own template's output, escaped by the server
        patch(target, holder);
        since = new Date();
        if (onState) onState({ ok: true, since });
        if (onPatched) onPatched();
      } catch (e) {
        if (mine !== newest) return;
        if (onState) onState({ ok: false, since });
      }
      timer = setTimeout(turn, every);
    }
    target.addEventListener("pointerdown", (e) => { pressed = e.button === 0; });
    ["pointerup", "pointercancel", "contextmenu", "dragend", "blur"].forEach((kind) => window.addEventListener(kind, () => setTimeout(() => { pressed = false; })));      // after the click
    document.addEventListener("visibilitychange", turn);
    timer = setTimeout(turn, every);
    return turn;
  };
})();
