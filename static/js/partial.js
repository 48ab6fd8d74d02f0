/* Keeps a server-rendered part of a page fresh: fetches it again every few seconds and replaces only the keyed children that
   changed, so that ticks, focus and scroll positions stay.
     <tbody data-refresh="/runs/?part=rows" data-every="2">  with children that carry data-key */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {});

  function patch(target, fresh) {
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
  }
  function carry(was, node) {                            // what the reader did to the old one
    was.querySelectorAll("input[type=checkbox]").forEach((box) => {
      const twin = node.querySelector(`input[type=checkbox][value="${CSS.escape(box.value)}"]`);
      if (twin) twin.checked = box.checked;
    });
    const active = was.contains(document.activeElement) && document.activeElement, name = active && (active.dataset.focus ? "data-focus" : "href");
    const focused = active && active.getAttribute(name);
    if (focused) requestAnimationFrame(() => { const twin = node.querySelector(`[${name}="${CSS.escape(focused)}"]`); if (twin) twin.focus(); });
  }
  Oppo.refresh = function (target, { onState, onPatched, onRefused }) {
    const every = 1000 * Number(target.dataset.every || 3);
    let since = new Date(), timer = 0;

    async function turn() {
      clearTimeout(timer);
      if (document.hidden) return;
      try {
        const reply = await fetch(target.dataset.refresh, { headers: { "X-Part": "1" }, credentials: "same-origin" });
        if (reply.redirected || reply.status === 403) { location.reload(); return; }
        if (onRefused && reply.headers.get("content-type").startsWith("text/plain")) {      // what is asked for makes no sense: the rows stay
          onRefused(await reply.text());
          timer = setTimeout(turn, every);
          return;
        }
        if (!reply.ok) throw new Error(`status ${reply.status}`);
        const holder = document.createElement(target.tagName);
        holder.innerHTML = await reply.text();           // our own template's output, escaped by the server
        patch(target, holder);
        since = new Date();
        if (onState) onState({ ok: true, since });
        if (onPatched) onPatched();
      } catch (e) {
        if (onState) onState({ ok: false, since });
      }
      timer = setTimeout(turn, every);
    }
    document.addEventListener("visibilitychange", turn);
    timer = setTimeout(turn, every);
    return turn;
  };
})();
