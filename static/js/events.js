/* Events tab: the states are drawn by the server, the decisions come from the API. */
(function () {
  "use strict";
  const { Oppo } = window, { run, el, format: f } = Oppo;
  const NAMES = { overcommit: "Δ", chunk: "C", kl: "KL coefficient", nonfinite: "Not finite" };
  const table = document.getElementById("decisions");
  let at = -1;

  async function decisions(summary) {
    if (summary.step === at) return;
    at = summary.step;
    let items;
    try {
      ({ items } = await Oppo.api.get(`runs/${run.id}/decisions`));
    } catch (e) {
      at = -1;
      if (!(e instanceof TypeError) && !(e instanceof Oppo.ApiError)) throw e;      // the connection's note says "stale"
      return;
    }
    document.getElementById("decisions-none").hidden = items.length > 0;
    table.replaceChildren(...items.slice().reverse().map((d) => el("tr", {}, el("td", { class: "num" }, f.whole(d.step)), el("td", { class: "nowrap" }, NAMES[d.controller] || d.controller),
      el("td", { class: "nowrap" }, d.old === d.new ? `keeps ${f.plain(d.new)}` : `${f.plain(d.old)} → ${f.plain(d.new)}`), el("td", {}, d.reason))));
  }
  const again = Oppo.refresh(document.getElementById("transitions"), {});
  let state = run.summary.state;
  run.follow((summary) => { decisions(summary); if (summary.state !== state) { state = summary.state; again(); } });
})();
