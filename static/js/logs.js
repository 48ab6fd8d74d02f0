/* Logs tab: the lines so far, then the new ones as they come; follows the end unless the reader scrolls up. */
(function () {
  "use strict";
  const { Oppo } = window, { run, el, format: f, setText } = Oppo;
  const MOST_SHOWN = 5000, EVERY_MS = 2000;
  const $ = (id) => document.getElementById(id);
  const list = $("log"), follow = $("follow-log");
  let after = 0, count = 0, busy = false;

  function level(line) {
    if (/\b(error|exception|traceback|fatal)\b/i.test(line.text)) return "error";
    return /\bwarn(ing)?\b/i.test(line.text) ? "warn" : "info";
  }
  function item(line) {
    const date = new Date(line.time);
    return el("li", { "data-level": level(line) }, el("time", { datetime: line.time, title: line.time }, f.clock(date)), el("span", { class: "lvl" }, line.stream), el("span", { class: "msg" }, line.text));
  }
  async function read() {
    if (busy) return;
    busy = true;
    try {
      for (;;) {
        const reply = await Oppo.api.get(`runs/${run.id}/logs`, { after });
        if (!reply.lines.length) break;
        after = reply.next;
        count += reply.lines.length;
        list.append(...reply.lines.map(item));
        while (list.children.length > MOST_SHOWN) list.firstChild.remove();
      }
      $("log-none").hidden = count > 0;
      setText($("log-count"), count > MOST_SHOWN ? `the last ${f.whole(MOST_SHOWN)} of ${f.whole(count)} lines` : `${f.whole(count)} lines`);
      if (follow.checked) list.scrollTop = list.scrollHeight;
    } catch (e) {
      if (!(e instanceof TypeError) && !(e instanceof Oppo.ApiError)) throw e;      // the connection's note says "stale"
    } finally {
      busy = false;
    }
  }
  list.addEventListener("scroll", () => { follow.checked = list.scrollHeight - list.scrollTop - list.clientHeight < 24; });
  follow.addEventListener("change", () => { if (follow.checked) list.scrollTop = list.scrollHeight; });
  // A line may come without a step, so the summary's news is not enough while the run lives.
  setInterval(() => { if (!document.hidden && !run.summary.ended_at) read(); }, EVERY_MS);
  run.follow(read);
})();
