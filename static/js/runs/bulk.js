/* Actions on all ticked runs: tags, cancelling, deleting. One request per run; a failure is reported and the others continue. */
import * as api from "../core/api.js";
import { el, runLabel, setText, toast } from "../core/dom.js";
import { refreshRuns, selectedRuns } from "./list.js";

const dialog = document.getElementById("bulk-dialog");
const $ = (id) => document.getElementById(id);
const input = $("bulk-value");
const sure = $("bulk-confirm");
const status = $("bulk-status");
const ENDED = ["succeeded", "failed", "cancelled"];
const ACTIONS = {
  tag: {
    title: "Tag",
    confirm: "Change tags",
    words: () => "Filter by tag with, for example, tag:baseline.",
    runs: (all) => all,
    send: (run, tags) => api.post(`runs/${run.id}/tags`, tags),
    done: (done) => toast(`Tags of ${counted(done.length)} changed`),
  },
  cancel: {
    title: "Cancel",
    confirm: "Cancel runs",
    grave: true,
    runs: (all) => all.filter((run) => !ENDED.includes(run.state)),
    send: (run) => api.post(`runs/${run.id}/cancel`),
    words: (runs, all) =>
      (runs.length ? `${named(runs)}: they are stopped and cannot be resumed.` : "") +
      (runs.length < all.length ? ` ${all.length - runs.length} of the selected runs have already ended.` : ""),
    done: (done) => toast(`Cancelling ${counted(done.length)}`),
  },
  delete: {
    title: "Delete",
    confirm: "Move to trash",
    grave: true,
    runs: (all) => all.filter((run) => ENDED.includes(run.state)),
    send: (run) => api.remove(`runs/${run.id}`),
    words: (runs, all) =>
      (runs.length ? `${named(runs)}: they move to the team’s trash and can be restored for some days.` : "") +
      (runs.length < all.length
        ? ` ${all.length - runs.length} of the selected runs have not ended: cancel them first.`
        : ""),
    done: (done) => toast(`${counted(done.length)} deleted`, { label: "Undo", act: () => restore(done) }),
  },
};
let action = null;
let runs = [];
let turn = 0; // number of the question that the dialog shows

function typedTags() {
  const words = input.value.split(/[\s,]+/).filter(Boolean);
  return {
    add: words.filter((w) => !w.startsWith("-")),
    remove: words.filter((w) => w.startsWith("-")).map((w) => w.slice(1)),
  };
}
const counted = (n) => (n === 1 ? "1 run" : `${n} runs`);
const named = (all) =>
  `${all
    .map(runLabel)
    .slice(0, 8)
    .join(", ")}${all.length > 8 ? " …" : ""}`;

async function restore(deleted) {
  const failed = [];
  $("select-all").focus(); // the toast with the pressed button is gone
  for (const run of deleted)
    await api.post(`runs/${run.id}/restore`).catch((e) => failed.push(`${runLabel(run)}: ${e.message}`));
  refreshRuns();
  toast(failed.length ? failed.join(" ") : `${counted(deleted.length)} restored`);
}

function ask(name) {
  action = ACTIONS[name];
  turn += 1;
  const all = selectedRuns();
  runs = action.runs(all);
  setText($("bulk-title"), `${action.title} ${counted(runs.length)}${action.grave ? "?" : ""}`);
  setText($("bulk-words"), action.words(runs, all));
  setText(sure, action.confirm);
  sure.classList.toggle("btn-danger", Boolean(action.grave));
  sure.classList.toggle("btn-primary", !action.grave);
  sure.disabled = runs.length === 0;
  $("bulk-field").hidden = input.disabled = Boolean(action.grave);
  input.value = "";
  status.replaceChildren();
  dialog.showModal();
  (action.grave ? sure : input).focus();
}
/* The dialog may be closed, and show another question, before all runs are done. */
async function carryOut() {
  if (sure.disabled) return;
  const { send, done: report, grave } = action;
  const [mine, chosen, tags] = [turn, runs, typedTags()];
  if (!grave && !tags.add.length && !tags.remove.length) {
    input.focus();
    return;
  }
  sure.disabled = true;
  status.replaceChildren();
  const done = [];
  const failed = [];
  for (const run of chosen) {
    try {
      await send(run, tags);
      done.push(run);
    } catch (e) {
      failed.push(`${runLabel(run)}: ${e.message}`);
      if (mine === turn) status.append(el("li", {}, failed.at(-1)));
    }
  }
  refreshRuns();
  const isShown = mine === turn && dialog.open;
  if (isShown) sure.disabled = false;
  if (failed.length) return isShown || toast(failed.join(" "));
  if (isShown) dialog.close();
  return report(done);
}
document
  .querySelectorAll("[data-bulk]")
  .forEach((button) => button.addEventListener("click", () => ask(button.dataset.bulk)));
sure.addEventListener("click", carryOut);
input.addEventListener("keydown", (e) => {
  if (e.key === "Enter") {
    e.preventDefault();
    carryOut();
  }
});
