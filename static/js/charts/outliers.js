/* "Ignore outliers", as in other trackers: the y axis follows the middle nine tenths of the values. Only the range of the
   axis changes; the number of points outside is shown.
     outliers([{y, low, high}, …], {tozero, keep: [1.2]}) → {range, outside, of}, or null if nothing is outside */
import { known } from "../core/format.js";

const TAIL = 0.05;
const ROOM = 0.1;
const FEWEST = 10;

function quantile(sorted, share) {
  const at = share * (sorted.length - 1);
  const lo = Math.floor(at);
  const hi = Math.ceil(at);
  return sorted[lo] + (at - lo) * (sorted[hi] - sorted[lo]);
}
/* `keep`: values that must stay visible, such as a target. A merged row is outside if its extremes are. With fewer than ten
   values nothing counts as an outlier. */
export function outliers(columns, { tozero = false, keep = [] } = {}) {
  const sorted = columns
    .flatMap((c) => c.y)
    .filter(known)
    .sort((a, b) => a - b);
  if (sorted.length < FEWEST) return null;
  const [low, high] = [quantile(sorted, TAIL), quantile(sorted, 1 - TAIL)];
  const room = ROOM * (high - low || Math.abs(high) || 1);
  const visible = keep.filter(known);
  const bottom = Math.min(tozero && low >= 0 ? 0 : low - room, ...visible);
  const top = Math.max(high + room, ...visible);
  const odd = (y) => known(y) && (y < bottom || y > top);
  const outside = columns.reduce(
    (sum, c) => sum + c.y.filter((y, i) => odd(y) || (c.low && odd(c.low[i])) || (c.high && odd(c.high[i]))).length,
    0,
  );
  return outside ? { range: [bottom, top], outside, of: sorted.length } : null;
}
export const outliersNote = ({ outside, of }) => `${outside} of ${of} outside`;
