/* Checkpoints tab: rendered by the server and refetched while the run lives; a paused run can resume from any checkpoint. */
import * as api from "../core/api.js";
import { setText } from "../core/dom.js";
import { liveFragment } from "../core/live-fragment.js";
import { run } from "./store.js";

const rows = document.getElementById("checkpoints");
const dialog = document.getElementById("resume-dialog");
const again = liveFragment(rows);
let state = run.summary.state;
let chosen = null;
run.follow((summary) => {
  if (summary.state !== state) {
    state = summary.state;
    again();
  }
});

function ask(button) {
  chosen = button.dataset.resumeAt;
  setText(document.getElementById("resume-title"), `Resume from step ${button.dataset.step}?`);
  setText(dialog.querySelector(".error"), "");
  dialog.showModal();
}
async function resume() {
  try {
    await api.post(`runs/${run.id}/checkpoints/${chosen}/resume`);
    dialog.close();
    again();
  } catch (e) {
    setText(dialog.querySelector(".error"), e.message);
  }
}
if (dialog) {
  rows.addEventListener("click", (e) => {
    const button = e.target.closest("[data-resume-at]");
    if (button) ask(button);
  });
  document.getElementById("resume-sure").addEventListener("click", resume);
}
