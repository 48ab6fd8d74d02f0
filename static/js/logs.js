/* Logs tab: the last lines, earlier ones when one scrolls up, new ones as they are written. What is searched, the stream and the
   line that a link leads to stand in the address. The end is followed until the reader scrolls up; then new lines are counted. */
(function () {
  "use strict";
  const { Oppo } = window, { run, el, format: f, setText } = Oppo;
  const MOST_SHOWN = 5000, A_PAGE = 1000, AROUND = 200, EVERY_MS = 2000, TYPING_MS = 250, NEAR_PX = 24;
  const $ = (id) => document.getElementById(id);
  const form = $("wanted"), list = $("log"), follow = $("follow-log");
  let state = {}, after = 0, first = 0, earlier = false, atEnd = false, news = 0, turn = 0, busy = false, timer = 0;

  /* --- the address ---------------------------------------------------------- */
  function fromAddress() {
    const asked = new URLSearchParams(location.search);
    state = { q: asked.get("q") || "", stream: asked.get("stream") || "", line: asked.get("line") || "" };
    form.elements.q.value = state.q;
    form.elements.stream.value = state.stream;
  }
  function change(edit, how) {
    clearTimeout(timer);
    Object.assign(state, edit);
    const query = new URLSearchParams(Object.entries(state).filter(([, value]) => value));
    history[how](null, "", `${location.pathname}${`${query}` ? `?${query}` : ""}`);
    begin();
  }

  /* --- reading ---------------------------------------------------------------- */
  function get(query) {
    if (state.q) query.q = state.q;
    if (state.stream) query.stream = state.stream;
    return Oppo.api.get(`runs/${run.id}/logs`, query);
  }
  /* One reading at a time; what came for another search is thrown away. `turn` counts the searches. */
  async function reading(work) {
    if (busy) return;
    const mine = turn;
    let done = false;
    busy = true;
    try {
      await work(() => mine !== turn);
      done = true;
      $("refused").hidden = true;
    } catch (e) {
      if (!(e instanceof TypeError) && !(e instanceof Oppo.ApiError)) throw e;
      if (e instanceof Oppo.ApiError) {                  // a server that is away is told by the connection's own note
        $("refused").hidden = false;
        setText($("refused").querySelector("p"), e.message);
      }
      if (!after && !first) Oppo.again(e, () => begin(true));      // nothing was read yet, so nothing follows the log
    } finally {
      busy = false;
    }
    if (mine !== turn) begin(true);
    else {
      words();
      if (done) further();                               // the reader may have scrolled meanwhile
    }
  }
  /* What lies beyond the end at which the reader is. */
  function further() {
    if (list.scrollTop < NEAR_PX && earlier && first) reading(older);
    else if (below() < NEAR_PX && !atEnd && after) reading(more);
  }
  const below = () => list.scrollHeight - list.scrollTop - list.clientHeight;
  function begin(again) {
    if (!again) turn += 1;
    after = first = news = 0;
    list.replaceChildren();
    reading(state.line ? around : newest);
  }
  async function newest(stale) {
    const reply = await get({ limit: A_PAGE });
    if (stale()) return;
    earlier = reply.earlier;
    atEnd = true;
    follow.checked = true;
    append(reply);
  }
  async function around(stale) {                         // the line that the address names, among its neighbours
    const line = Number(state.line) || 1, [upTo, on] = await Promise.all([get({ before: line + 1, limit: AROUND }), get({ after: line, limit: AROUND })]);
    if (stale()) return;
    earlier = upTo.earlier;
    atEnd = on.lines.length < AROUND;
    follow.checked = false;
    append(upTo);
    append({ lines: on.lines, next: Math.max(on.next, upTo.next) });
    news = 0;
    const at = list.querySelector(`[data-id="${line}"]`);
    if (at) { at.setAttribute("aria-current", "true"); at.scrollIntoView({ block: "center" }); }
  }
  async function more(stale) {                           // what was written since
    for (;;) {
      const reply = await get({ after: after || 0, limit: A_PAGE });
      if (stale() || !reply.lines.length) return;
      atEnd = reply.lines.length < A_PAGE;
      append(reply);
      if (atEnd || !follow.checked) return;
    }
  }
  async function older(stale) {
    const reply = await get({ before: first, limit: A_PAGE });
    if (stale()) return;
    earlier = reply.earlier;
    const from = list.scrollHeight - list.scrollTop;
    list.prepend(...reply.lines.map(item));
    if (reply.lines.length) first = reply.lines[0].id;
    list.scrollTop = list.scrollHeight - from;           // what one was reading stays where it was
    bound();
  }
  /* A page holds so many lines at most: those furthest from the reader go, and are read again when one comes near. */
  function bound() {
    const over = list.children.length - MOST_SHOWN;
    if (over <= 0) return;
    if (follow.checked || list.scrollTop > below()) {
      const from = list.scrollHeight - list.scrollTop;
      for (let i = 0; i < over; i++) list.firstChild.remove();
      earlier = true;
      first = Number(list.firstChild.dataset.id);
      list.scrollTop = list.scrollHeight - from;
    } else {
      for (let i = 0; i < over; i++) list.lastChild.remove();
      after = Number(list.lastChild.dataset.id);
      atEnd = false;
      news = 0;
    }
  }

  /* --- drawing ------------------------------------------------------------------ */
  function level(text) {
    if (/\b(error|exception|traceback|fatal)\b/i.test(text)) return "error";
    return /\bwarn(ing)?\b/i.test(text) ? "warn" : "info";
  }
  function item(line) {
    const query = new URLSearchParams({ line: line.id });
    const link = el("a", { href: `?${query}`, tabindex: -1, title: `${line.time}, attempt ${line.attempt}: show in context`, onclick: (e) => { if (e.metaKey || e.ctrlKey || e.shiftKey) return; e.preventDefault(); change({ q: "", stream: "", line: String(line.id) }, "pushState"); fromAddress(); } },
      el("time", { datetime: line.time }, f.clock(new Date(line.time))));
    return el("li", { "data-level": level(line.text), "data-id": line.id }, link, el("span", { class: "lvl" }, line.stream), el("span", { class: "msg" }, message(line.text)));
  }
  function message(text) {                               // as its writer coloured it, with hits marked
    const wanted = Oppo.pieces(state.q);
    return Oppo.ansi(text).flatMap(({ text: part, classes }) => (classes.length ? [el("span", { class: classes.join(" ") }, Oppo.marked(part, wanted))] : Oppo.marked(part, wanted)));
  }
  function append({ lines, next }) {
    if (lines.length && !first) first = lines[0].id;
    after = Math.max(after, next);
    list.append(...lines.map(item));
    if (lines.length) list.hidden = false;               // what is not shown cannot be scrolled
    if (!follow.checked) news += lines.length;
    bound();
    if (follow.checked) list.scrollTop = list.scrollHeight;
  }
  function words() {
    const shown = list.children.length, wanted = state.q || state.stream;
    $("log-none").hidden = shown > 0;
    list.hidden = shown === 0;
    setText($("log-none"), wanted ? "No line matches. A line must contain every search word; case is ignored." : run.summary.ended_at ? "The log is empty." : "No log lines yet. They appear as the engine and the supervisor write them.");
    setText($("log-count"), shown ? `${f.whole(shown)} ${wanted ? "matching " : ""}${shown === 1 ? "line" : "lines"}${earlier ? "; scroll up for older lines" : ""}` : "");
    $("clear").hidden = !wanted && !state.line;
    $("news").hidden = news === 0 && atEnd;
    setText($("news"), news ? `${f.whole(news)} new ${news === 1 ? "line" : "lines"} ↓` : "Latest ↓");
  }
  function toEnd() {
    if (!atEnd || state.line) { change({ line: "" }, "pushState"); return; }
    news = 0;
    follow.checked = true;
    list.scrollTop = list.scrollHeight;
    words();
  }

  /* --- hands ---------------------------------------------------------------------- */
  list.addEventListener("scroll", () => {
    follow.checked = atEnd && below() < NEAR_PX;
    if (follow.checked && news) { news = 0; words(); }
    further();
  });
  /* A thousand links are no way through with the tab key: inside the list n and p lead from line to line, Enter follows. */
  list.addEventListener("keydown", (e) => {
    if (!["n", "p"].includes(e.key) || e.metaKey || e.ctrlKey || e.altKey) return;
    const at = document.activeElement.closest("#log li"), side = e.key === "n" ? "nextElementSibling" : "previousElementSibling";
    const to = at ? at[side] : e.key === "n" ? firstInView() : list.lastElementChild;
    if (to) to.querySelector("a").focus();
  });
  const firstInView = () => [...list.children].find((line) => line.offsetTop - list.offsetTop >= list.scrollTop) || list.lastElementChild;
  follow.addEventListener("change", () => { if (follow.checked) toEnd(); });
  $("news").addEventListener("click", toEnd);
  form.addEventListener("submit", (e) => e.preventDefault());
  form.addEventListener("input", (e) => {
    clearTimeout(timer);
    if (e.target.name === "q") timer = setTimeout(() => change({ q: form.elements.q.value.trim(), line: "" }, "replaceState"), TYPING_MS);
    if (e.target.name === "stream") change({ stream: form.elements.stream.value, line: "" }, "pushState");
  });
  form.addEventListener("reset", (e) => { e.preventDefault(); change({ q: "", stream: "", line: "" }, "pushState"); fromAddress(); });
  $("q").addEventListener("keydown", (e) => { if (e.key === "Escape") { $("q").value = ""; change({ q: "", line: "" }, "replaceState"); $("q").blur(); } });
  window.addEventListener("popstate", () => { clearTimeout(timer); fromAddress(); begin(); });

  fromAddress();
  begin();
  // A line may come without a step, so the summary's news is not enough while the run lives.
  const look = () => { if (atEnd) reading(more); };
  setInterval(() => { if (!document.hidden && !run.summary.ended_at) look(); }, EVERY_MS);
  run.follow(look);
})();
