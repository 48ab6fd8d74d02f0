/* Idle share of all of a run's devices together, by cause and step: the causes' seconds give the split, the bubbles the total. A
   step's devices are those with data for it: other attempts may have had others. */
import { joined } from "../charts/axes.js";

/* {base: {step, x}, bubble: [%], shares: {cause: [%]}}; `series` from series.js, `devices` and `causes` names. */
export function idleShares(series, devices, causes) {
  const base = joined(devices.map((d) => series.get(`bubble/${d}`)));
  const bubbles = devices.map((d) => series.along(`bubble/${d}`, base.step, null));
  const there = base.step.map((_, i) => Math.max(1, bubbles.filter((c) => c[i] !== null).length));
  const mean = (columns) =>
    base.step.map((_, i) => columns.reduce((sum, c, d) => (bubbles[d][i] === null ? sum : sum + c[i]), 0) / there[i]);
  const bubble = mean(bubbles);
  const seconds = causes.map((cause) => mean(devices.map((d) => series.along(`idle_s/${d}/${cause}`, base.step, 0))));
  const all = base.step.map((_, i) => seconds.reduce((sum, s) => sum + s[i], 0));
  const share = (s, i) => (all[i] > 0 ? (100 * bubble[i] * s) / all[i] : 0);
  return {
    base,
    bubble: bubble.map((b) => 100 * b),
    shares: Object.fromEntries(causes.map((cause, k) => [cause, seconds[k].map(share)])),
  };
}
