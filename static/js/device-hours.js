/* Header of a run: its device-hours. Fetched when its state changes; in between it grows with the devices held. */
(function () {
  "use strict";
  const { Oppo } = window, { run, format: f, setText } = Oppo;
  const place = document.querySelector('#run [data-part="cost"]');
  let state = "", usage = null, at = 0;

  function show() {
    if (!usage) return;
    const hours = usage.device_hours + usage.devices * (Date.now() - at) / 3600000;
    setText(place, hours ? ` · ${f.figure(hours)} device-hours` : "");
  }
  async function ask() {
    usage = await Oppo.api.get(`runs/${run.id}/usage`);
    at = Date.now();
    show();
  }
  run.follow((summary) => {
    if (summary.state === state) return show();
    state = summary.state;
    return ask().catch((e) => {                          // the connection's status shows it; retried with the next event
      if (!(e instanceof TypeError) && !(e instanceof Oppo.ApiError)) throw e;
      state = "";
    });
  });
})();
