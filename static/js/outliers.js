/* "Ignore outliers", as other trackers have it: the picture's height follows the middle nine tenths of the values. Only the range of
   the y axis changes; every point stays where it is, and how many lie outside is said.
     Oppo.outliers([{y, low, high}, …], {tozero, keep: [1.2]}) → {range, outside, of}, or null when nothing lies outside */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {}), known = (x) => typeof x === "number" && Number.isFinite(x);
  const TAIL = 0.05, ROOM = 0.1, FEWEST = 10;

  function quantile(sorted, share) {
    const at = share * (sorted.length - 1), lo = Math.floor(at), hi = Math.ceil(at);
    return sorted[lo] + (at - lo) * (sorted[hi] - sorted[lo]);
  }
  /* `keep`: values that must be seen whatever they are, such as a target. A row that stands for many steps is outside when its
     extremes are. With fewer than ten values there is no saying which are odd. */
  Oppo.outliers = function (columns, { tozero = false, keep = [] } = {}) {
    const sorted = columns.flatMap((c) => c.y).filter(known).sort((a, b) => a - b);
    if (sorted.length < FEWEST) return null;
    const [low, high] = [quantile(sorted, TAIL), quantile(sorted, 1 - TAIL)], room = ROOM * (high - low || Math.abs(high) || 1), kept = keep.filter(known);
    const bottom = Math.min(tozero && low >= 0 ? 0 : low - room, ...kept), top = Math.max(high + room, ...kept);
    const odd = (y) => known(y) && (y < bottom || y > top);
    const outside = columns.reduce((sum, c) => sum + c.y.filter((y, i) => odd(y) || (c.low && odd(c.low[i])) || (c.high && odd(c.high[i]))).length, 0);
    return outside ? { range: [bottom, top], outside, of: sorted.length } : null;
  };
  Oppo.outliersNote = ({ outside, of }) => `${outside} of ${of} outside`;
})();
