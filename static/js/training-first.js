/* The Training tab's figures are asked for before Plotly, which takes longest, is read: both take their time at once. */
(function () {
  "use strict";
  const { Oppo } = window, series = Oppo.series(Oppo.run.id, Oppo.trainingCharts.KEYS), asked = series.update(Oppo.run.summary);
  asked.catch(() => { /* whoever waits for it says so */ });
  Oppo.trainingFirst = { series, asked };
})();
