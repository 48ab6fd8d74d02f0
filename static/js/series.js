/* The metrics of one run, by column, growing while it trains: only steps that are not here yet are fetched.
     const series = Oppo.series(runId, ["objective/kl", "bubble/*"]);  await series.update(summary);  series.get("objective/kl") → {step, x, y} */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {});
  const MAX_POINTS = 2000, REFETCH_AT = 3000;            // appended points are raw; past this the server thins them out again

  Oppo.series = function (runId, keys) {
    let columns = {}, lastStep = 0, axis = "step", anew = true;

    const empty = { step: [], x: [], y: [] };
    const get = (key) => columns[key] || empty;
    const longest = () => Math.max(0, ...Object.values(columns).map((c) => c.step.length));

    function append(reply) {
      for (const [key, more] of Object.entries(reply.series)) {
        const have = columns[key] || (columns[key] = { step: [], x: [], y: [] });
        const from = have.step.length ? more.step.findIndex((s) => s > have.step[have.step.length - 1]) : 0;
        if (from < 0) continue;
        ["step", "x", "y"].forEach((c) => { have[c] = have[c].concat(more[c].slice(from)); });
      }
      lastStep = Math.max(lastStep, reply.last_step || 0);
    }
    /* Resolves to whether anything is new. */
    async function update(summary) {
      const whole = anew || longest() > REFETCH_AT;
      if (!whole && summary.step <= lastStep) return false;
      const query = { keys: keys.join(","), x: axis, max_points: MAX_POINTS, since_step: whole ? 0 : lastStep };
      const reply = await Oppo.api.get(`runs/${runId}/metrics`, query);
      if (whole) { columns = {}; lastStep = 0; anew = false; }
      const before = lastStep;
      append(reply);
      return whole || lastStep > before;
    }
    function setAxis(name) { axis = name; anew = true; }

    /* The index of the point nearest to `x`, -1 when there is none. */
    function nearest(list, x) {
      let lo = 0, hi = list.length - 1;
      if (hi < 0) return -1;
      while (lo < hi) { const mid = (lo + hi) >> 1; if (list[mid] < x) lo = mid + 1; else hi = mid; }
      return lo > 0 && x - list[lo - 1] < list[lo] - x ? lo - 1 : lo;
    }
    /* `key`, read at the steps of another column; where it has no point, `otherwise`. Thinned columns keep different steps, so
       the nearest within one gap counts. */
    function along(key, steps, otherwise) {
      const column = get(key), gap = steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) : 1;
      return steps.map((step) => {
        const i = nearest(column.step, step);
        return i >= 0 && Math.abs(column.step[i] - step) < Math.max(1, gap) && column.y[i] !== null ? column.y[i] : otherwise;
      });
    }
    return { update, get, along, nearest, setAxis, get lastStep() { return lastStep; }, get axis() { return axis; } };
  };
})();
