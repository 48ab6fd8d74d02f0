/* Checkpoints tab: drawn by the server, fetched anew while the run lives. */
(function () {
  "use strict";
  const { Oppo } = window, { run } = Oppo;
  const again = Oppo.refresh(document.getElementById("checkpoints"), {});
  let state = run.summary.state;
  run.follow((summary) => { if (summary.state !== state) { state = summary.state; again(); } });
})();
