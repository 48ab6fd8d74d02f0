/* The list of alerts: live rows and acknowledging. Opening its newest page marks all alerts as seen. */
(function () {
  "use strict";
  const { Oppo } = window, { setText } = Oppo;
  const $ = (id) => document.getElementById(id);
  const rows = $("rows"), newest = !new URLSearchParams(location.search).has("cursor");
  let seen = 0;

  async function attempt(wish) {
    try {
      await wish();
      $("refused").hidden = true;
    } catch (e) {
      if (!(e instanceof TypeError) && !(e instanceof Oppo.ApiError)) throw e;
      $("refused").hidden = false;
      setText($("refused"), e instanceof Oppo.ApiError ? e.message : "The server cannot be reached. Try again.");
    }
  }
  function look() {
    $("none").hidden = rows.children.length > 0;
    $("found").hidden = rows.children.length === 0;
    const first = rows.firstElementChild && Number(rows.firstElementChild.dataset.key);
    if (newest && !document.hidden && first > seen) {
      seen = first;
      attempt(async () => Oppo.showUnread((await Oppo.api.post("alerts/seen", { up_to: first })).unread));
    }
  }
  rows.addEventListener("click", (e) => {
    const button = e.target.closest("[data-acknowledge]");
    if (button) attempt(async () => { await Oppo.api.post(`alerts/${button.dataset.acknowledge}/acknowledge`); turn(); });
  });
  const turn = Oppo.refresh(rows, { onState: (state) => Oppo.showConnection($("live"), state), onPatched: look });
  document.addEventListener("visibilitychange", look);
  look();
})();
