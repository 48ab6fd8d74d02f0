/* The view "Side by side" of a run's Samples tab. Nothing moves by itself: newer samples load on request. */
import { setText } from "../core/dom.js";
import { sideBySide } from "../samples/side-by-side.js";
import { run } from "./store.js";

const fresh = document.getElementById("fresh");
const hasResumed = run.resumeDetector();
let seen = run.summary.step;
let outdated = false;

const view = sideBySide({
  ids: () => [run.id],
  onReply() {
    seen = run.summary.step;
    outdated = false;
    fresh.hidden = true;
  },
});
/* Evaluations come every so many steps, and at the end. */
function hasNewer({ step, ended_at }) {
  const every = view.shows().heldOut && run.spec.evaluation ? run.spec.evaluation.every_steps : 1;
  return step > seen && (Math.floor(step / every) > Math.floor(seen / every) || Boolean(ended_at));
}
fresh.addEventListener("click", () => view.load());
view.load();
run.follow((summary) => {
  outdated = hasResumed(summary) || outdated;
  if (!outdated && !hasNewer(summary)) return;
  if (view.shows().reply && view.isEmpty()) {
    view.load();
    return;
  }
  fresh.hidden = false;
  setText(fresh, outdated ? "The run was resumed: reload" : "Newer samples: reload");
});
