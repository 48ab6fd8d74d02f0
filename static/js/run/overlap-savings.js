/* Header of a run with overlap: the time saved so far. Refetched when the run has trained 10 % more. */
import * as api from "../core/api.js";
import { ApiError } from "../core/api.js";
import { el } from "../core/dom.js";
import * as f from "../core/format.js";
import { run } from "./store.js";

export function showSavings() {
  const overlap = run.spec.overlap || {};
  const place = document.querySelector('#run [data-part="saved"]');
  const HOW =
    "Estimated from the run's trace: the same stages run one after another, as in sequential PPO, with the durations measured here; all cores of a CPU share each stage but decoding. The longer wait for a batch's last responses is not included.";
  let requested = 0;

  async function show(step) {
    const savings = await api.get(`runs/${run.id}/saving`);
    if (step !== requested) return undefined; // a newer request is running
    if (savings.saved_s <= 0) return place.replaceChildren();
    const words = `estimated saving vs sequential ${f.duration(savings.saved_s)} (${f.figure(savings.sequential_s / savings.measured_s)}×)`;
    return place.replaceChildren(
      " · ",
      el("span", { title: HOW }, words),
      el("span", { class: "visually-hidden" }, ` ${HOW}`),
    );
  }
  function follow(summary) {
    if (summary.step < Math.max(2, 1.1 * requested)) return;
    requested = summary.step;
    show(requested).catch((e) => {
      if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
      requested = 0;
    }); // the connection status shows it
  }
  if (overlap.intra_step !== "off" || overlap.inter_step !== "off") run.follow(follow);
}
