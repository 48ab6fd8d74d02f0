/* A part of a page that the server renders. htmx requests it every `data-every` seconds and morphs it: only what differs is
   changed, so that focus, selection and scroll positions stay.
     <tbody id="rows" hx-get="/runs/?part=rows" hx-trigger="refresh" hx-swap="innerMorph" hx-sync="replace" data-every="2">
   with children that have ids. No request in a hidden tab, and no change while the pointer is pressed in the part, because the
   pressed element could be gone before the click. The newest request counts.
     const refresh = liveFragment(target, { onState({ ok, since }), onSwapped(), onRefused(text), onSignedOut() })
   A response in plain text says why the request was refused; the part stays. `refresh()` resolves after its response. */
import { times } from "./format.js";
import { markWideTables } from "./wide-tables.js";

const SOON_MS = 150;
const nothing = () => {};

/* A request that fails or is aborted, also while its body is read, gives a response with status 0, not an error in the console. */
async function send(...request) {
  try {
    const response = await fetch(...request);
    const text = await response.text();
    return Object.assign(response, { text: async () => text });
  } catch {
    return Response.error();
  }
}

export function liveFragment(
  target,
  { onState = nothing, onSwapped = nothing, onRefused = null, onSignedOut = () => location.reload() } = {},
) {
  const every = 1000 * Number(target.dataset.every || 3);
  let since = new Date();
  let pressed = false;
  let timer = 0;
  let newest = null;
  let waiting = [];
  let focused = null;
  const on = (event, handler) =>
    target.addEventListener(`htmx:${event}`, (e) => {
      if (e.target === target && handler(e.detail.ctx, e.detail) === false) e.preventDefault();
    });

  function schedule(ms) {
    clearTimeout(timer);
    timer = setTimeout(request, ms);
  }
  function request() {
    if (document.hidden) return;
    if (pressed) schedule(SOON_MS);
    else window.htmx.trigger(target, "refresh");
  }
  on("before:request", (ctx) => {
    newest = ctx;
    ctx.fetch = send;
  });
  on("before:response", (ctx) => {
    if (ctx !== newest) return false;
    if (!ctx.response.raw.redirected && ctx.response.status !== 403) return true;
    onSignedOut();
    return false;
  });
  on("after:request", ({ response, text }) => {
    if (onRefused && (response.headers.get("content-type") || "").startsWith("text/plain")) {
      onRefused(text);
      return false;
    }
    if (!response.raw.ok) onState({ ok: false, since });
    return response.raw.ok && !pressed;
  });
  on("before:swap", (ctx, { tasks }) => {
    tasks.forEach(({ fragment }) => times(fragment)); // before the comparison, so that unchanged times are equal
    focused = target.contains(document.activeElement) ? document.activeElement : null;
  });
  on("after:swap", () => {
    if (focused && focused.isConnected) focused.focus({ preventScroll: true }); // moving a row may remove the focus
    markWideTables(target);
    since = new Date();
    onState({ ok: true, since });
    onSwapped();
  });
  on("error", () => onState({ ok: false, since }));
  on("finally:request", (ctx) => {
    if (ctx !== newest) return;
    schedule(pressed ? SOON_MS : every);
    waiting.splice(0).forEach((resolve) => resolve());
  });

  target.addEventListener("pointerdown", (e) => {
    pressed = e.button === 0;
  });
  const release = () => setTimeout(() => (pressed = false)); // after the click
  ["pointerup", "pointercancel", "contextmenu", "dragend", "blur"].forEach((kind) =>
    window.addEventListener(kind, release),
  );
  document.addEventListener("visibilitychange", request);
  schedule(every);
  return () =>
    new Promise((resolve) => {
      waiting.push(resolve);
      window.htmx.trigger(target, "refresh");
    });
}
