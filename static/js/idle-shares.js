/* Idle share of all of a run's devices together, split by cause, step by step: the causes' seconds say how, the bubble how much. */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {});
  const NOTHING = { step: [], x: [], y: [] };

  /* {base: {step, x}, bubble: [%], shares: {cause: [%]}}; `series` from series.js, `devices` and `causes` names. */
  Oppo.idleShares = function (series, devices, causes) {
    const base = devices.length ? series.get(`bubble/${devices[0]}`) : NOTHING;
    const mean = (columns) => base.step.map((_, i) => columns.reduce((sum, c) => sum + c[i], 0) / Math.max(1, columns.length));
    const bubble = mean(devices.map((d) => series.along(`bubble/${d}`, base.step, 0)));
    const seconds = causes.map((cause) => mean(devices.map((d) => series.along(`idle_s/${d}/${cause}`, base.step, 0))));
    const all = base.step.map((_, i) => seconds.reduce((sum, s) => sum + s[i], 0));
    const share = (s, i) => (all[i] > 0 ? 100 * bubble[i] * s / all[i] : 0);
    return { base, bubble: bubble.map((b) => 100 * b), shares: Object.fromEntries(causes.map((cause, k) => [cause, seconds[k].map(share)])) };
  };
})();
