/* The view "Side by side" of a run's Samples tab. Nothing moves by itself: newer samples load on request. */
import { setShown, setText } from "../core/dom.js";
import * as SideBySide from "../samples/side-by-side.js";
import { run } from "./store.js";

const fresh = document.getElementById("fresh");
const hasResumed = run.resumeDetector();
let seen = run.summary.step;
let outdated = false;

SideBySide.start({
  ids: () => [run.id],
  onReply() {
    seen = run.summary.step;
    outdated = false;
    setShown(fresh, false, document.getElementById("prompts").firstElementChild || document.getElementById("q"));
  },
});
/* Evaluations come every so many steps, and at the end. */
function hasNewer({ step, ended_at }) {
  const heldOut = SideBySide.showsHeldOut();
  if (step <= seen || (heldOut && !run.spec.evaluation)) return false;
  const every = heldOut ? run.spec.evaluation.every_steps : 1;
  return Math.floor(step / every) > Math.floor(seen / every) || Boolean(ended_at);
}
fresh.addEventListener("click", () => SideBySide.load());
run.follow((summary) => {
  outdated = hasResumed(summary) || outdated;
  if (!outdated && !hasNewer(summary)) return;
  if (SideBySide.isEmpty()) {
    SideBySide.load();
    return;
  }
  fresh.hidden = false;
  setText(fresh, outdated ? "The run was resumed: reload" : "Newer samples: reload");
});
