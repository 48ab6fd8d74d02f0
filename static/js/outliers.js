/* "Ignore outliers", as in other trackers: the y axis follows the middle nine tenths of the values. Only the range of the
   axis changes; the number of points outside is shown.
     Oppo.outliers([{y, low, high}, …], {tozero, keep: [1.2]}) → {range, outside, of}, or null if nothing is outside */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {}), known = (x) => typeof x === "number" && Number.isFinite(x);
  const TAIL = 0.05, ROOM = 0.1, FEWEST = 10;

  function quantile(sorted, share) {
    const at = share * (sorted.length - 1), lo = Math.floor(at), hi = Math.ceil(at);
    return sorted[lo] + (at - lo) * (sorted[hi] - sorted[lo]);
  }
  /* `keep`: values that must stay visible, such as a target. A merged row is outside if its extremes are. With fewer than ten
     values nothing counts as an outlier. */
  Oppo.outliers = function (columns, { tozero = false, keep = [] } = {}) {
    const sorted = columns.flatMap((c) => c.y).filter(known).sort((a, b) => a - b);
    if (sorted.length < FEWEST) return null;
    const [low, high] = [quantile(sorted, TAIL), quantile(sorted, 1 - TAIL)], room = ROOM * (high - low || Math.abs(high) || 1), visible = keep.filter(known);
    const bottom = Math.min(tozero && low >= 0 ? 0 : low - room, ...visible), top = Math.max(high + room, ...visible);
    const odd = (y) => known(y) && (y < bottom || y > top);
    const outside = columns.reduce((sum, c) => sum + c.y.filter((y, i) => odd(y) || (c.low && odd(c.low[i])) || (c.high && odd(c.high[i]))).length, 0);
    return outside ? { range: [bottom, top], outside, of: sorted.length } : null;
  };
  Oppo.outliersNote = ({ outside, of }) => `${outside} of ${of} outside`;
})();
