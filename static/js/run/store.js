/* The run that a page shows: its summary, which the live connection renews, and its spec.
     run.follow(callback)   calls back at once and with every newer summary, until run.unfollow(callback) */
import { readJson, runColour } from "../core/dom.js";
import * as f from "../core/format.js";

const CAUSES = ["decode", "tail", "score", "update", "weights", "data", "checkpoint", "eval", "unknown"];
const followers = new Set();
let summary = readJson("run-summary");

/* All devices that the run has had; figures of those that it no longer holds are null. */
const devicesOf = (latest) =>
  Object.keys(latest)
    .filter((k) => k.startsWith("busy/"))
    .map((k) => k.slice("busy/".length))
    .sort();
const devicesNow = (latest) => devicesOf(latest).filter((device) => f.known(latest[`busy/${device}`]));

function take(next) {
  if (next.cursor !== null && summary.cursor !== null && next.cursor < summary.cursor) return;
  summary = next;
  followers.forEach((callback) => callback(summary));
}
function follow(callback) {
  followers.add(callback);
  callback(summary);
}
/* Returns a predicate: whether the run has resumed since the previous summary, in a newer attempt or (older versions) from a
   checkpoint. Known steps may have been trained again then, and their data is outdated. */
function resumeDetector() {
  let before = null;
  return (now) => {
    const was = before;
    before = { attempt: now.attempt, step: now.step };
    return was !== null && was.attempt !== null && (now.attempt !== was.attempt || now.step < was.step);
  };
}
export const run = {
  id: summary.id,
  spec: readJson("run-spec"),
  colour: runColour(summary.id),
  CAUSES,
  devicesOf,
  devicesNow,
  take,
  follow,
  unfollow: (callback) => followers.delete(callback),
  resumeDetector,
  get summary() {
    return summary;
  },
};
