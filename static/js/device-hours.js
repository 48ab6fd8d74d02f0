/* In the head of a run: the device-hours that it has cost. Asked when its state changes; in between it grows by the devices held. */
(function () {
  "use strict";
  const { Oppo } = window, { run, format: f, setText } = Oppo;
  const place = document.querySelector('#run [data-part="cost"]');
  let state = "", told = null, at = 0;

  function show() {
    if (!told) return;
    const hours = told.device_hours + told.devices * (Date.now() - at) / 3600000;
    setText(place, hours ? ` · ${f.figure(hours)} device-hours` : "");
  }
  async function ask() {
    told = await Oppo.api.get(`runs/${run.id}/usage`);
    at = Date.now();
    show();
  }
  run.follow((summary) => {
    if (summary.state === state) return show();
    state = summary.state;
    return ask().catch((e) => {                          // the connection's note says so; asked again with the next news
      if (!(e instanceof TypeError) && !(e instanceof Oppo.ApiError)) throw e;
      state = "";
    });
  });
})();
