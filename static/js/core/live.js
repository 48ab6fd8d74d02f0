/* One live connection per page. Summaries of runs arrive by server-sent events; while the stream is down they are polled every
   three seconds; after a quiet time they are read once, because a node that falls silent causes no event; while the tab is hidden there is no connection, and the page catches up when it is shown again. An event only
   announces new data, which is then read from the API by step, so nothing is lost.
     live({ runs: [3], onRun(summary), onState({ ok, since }) }) */
import * as api from "./api.js";
import { setText } from "./dom.js";
import * as f from "./format.js";

const POLL_MS = 3000;
const LONGEST_WAIT_MS = 15000;
const QUIET_MS = 20000;

export function live({ runs, onRun, onState }) {
  let source = null;
  let cursor = "";
  let retry = 0;
  let wait = 1000;
  let poller = 0;
  let lastContact = Date.now();
  let ok = null;
  let asked = Date.now();
  const ended = new Set();

  function say(now) {
    if (now) lastContact = Date.now();
    if (now !== ok || !now) onState({ ok: now, since: new Date(lastContact) });
    ok = now;
  }
  function take(summary) {
    say(true);
    if (summary.ended_at) ended.add(summary.id);
    else ended.delete(summary.id);
    onRun(summary);
  }
  function open() {
    if (source || document.hidden || !runs.length) return;
    const query = new URLSearchParams({ runs: runs.join(",") });
    if (cursor) query.set("cursor", cursor);
    source = new EventSource(`${api.ROOT}stream?${query}`);
    source.addEventListener("open", () => {
      wait = 1000;
      stopPolling();
      say(true);
    });
    source.addEventListener("run", (e) => {
      cursor = e.lastEventId || cursor;
      take(JSON.parse(e.data));
    });
    source.addEventListener("error", () => {
      close();
      startPolling();
      scheduleReconnect();
    });
  }
  function close() {
    if (source) source.close();
    source = null;
    clearTimeout(retry);
  }
  function scheduleReconnect() {
    // own delay: a browser does not reconnect after an HTTP error
    retry = setTimeout(open, wait);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  }
  async function poll() {
    asked = Date.now();
    try {
      for (const id of runs) take(await api.get(`runs/${id}`));
    } catch (e) {
      if (!source || source.readyState !== EventSource.OPEN) say(false); // otherwise the stream is back, and this response is outdated
    }
  }
  function startPolling() {
    if (poller || document.hidden) return;
    poller = setInterval(poll, POLL_MS);
    poll();
  }
  function stopPolling() {
    clearInterval(poller);
    poller = 0;
  }
  function onVisibility() {
    close();
    stopPolling();
    if (!document.hidden) {
      wait = 1000;
      poll();
      open();
    }
  }
  document.addEventListener("visibilitychange", onVisibility);
  window.addEventListener("online", onVisibility);
  window.addEventListener("pagehide", () => {
    close();
    stopPolling();
  });
  window.addEventListener("pageshow", (e) => {
    if (e.persisted) onVisibility();
  });
  setInterval(() => {
    const quiet = Date.now() - Math.max(lastContact, asked) > QUIET_MS;
    if (quiet && !document.hidden && !poller && runs.some((id) => !ended.has(id))) poll();
  }, QUIET_MS / 4);
  open();
  return {
    watch(ids) {
      if (ids.join() !== runs.join()) {
        runs = ids;
        cursor = "";
        close();
        open();
      }
    },
  };
}

/* The status beside a page's title: "live", or since when it is not. */
export function showConnection(node, { ok, since }) {
  node.hidden = false;
  node.toggleAttribute("data-stale", !ok);
  setText(node, ok ? "live" : `stale since ${f.clock(since)}, reconnecting`);
}
