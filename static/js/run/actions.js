/* Actions on the run: a button for each action that the summary allows, and one dialog that explains its effect. The server
   decides; buttons change with every summary of the live stream. */
import * as api from "../core/api.js";
import { ApiError } from "../core/api.js";
import { runLabel, setText, toast } from "../core/dom.js";
import * as f from "../core/format.js";
import { run } from "./store.js";

export function offerActions() {
  const buttons = [...document.querySelectorAll("[data-wish]")];
  const dialog = document.getElementById("wish-dialog");
  const form = dialog.querySelector("form");
  const input = document.getElementById("wish-value");
  const sure = document.getElementById("wish-confirm");
  const retry = document.getElementById("retry");
  const effect = document.getElementById("retry-effect");
  const error = dialog.querySelector(".error");
  const ASKED = {
    pause: { title: "Pause", confirm: "Pause run", keep: "Cancel" },
    resume: { title: "Resume", confirm: "Resume run", keep: "Cancel" },
    cancel: { title: "Cancel", confirm: "Cancel run", keep: "Keep running", grave: true },
    priority: {
      title: "Priority of",
      confirm: "Set priority",
      keep: "Cancel",
      label: "Priority, 1 to 99",
      min: 1,
      max: 99,
      step: 1,
      value: (s) => s.priority,
      body: (v) => ({ priority: Number(v) }),
    },
    extend: {
      title: "Extend the time limit of",
      confirm: "Extend",
      keep: "Cancel",
      label: "Additional hours",
      min: 0.1,
      max: 8760,
      step: "any",
      value: () => 1,
      body: (v) => ({ hours: Number(v) }),
    },
  };
  let action = null;
  let turn = 0;

  function ask(wish) {
    const words = ASKED[wish];
    action = wish;
    turn += 1;
    sure.disabled = false;
    setText(document.getElementById("wish-title"), `${words.title} ${runLabel(run.summary)}${words.label ? "" : "?"}`);
    setText(document.getElementById("wish-words"), run.summary.wishes[wish]);
    setText(sure, words.confirm);
    setText(document.getElementById("wish-keep"), words.keep);
    sure.classList.toggle("btn-danger", Boolean(words.grave));
    sure.classList.toggle("btn-primary", !words.grave);
    document.getElementById("wish-field").hidden = input.disabled = !words.label;
    if (words.label) {
      setText(document.getElementById("wish-label"), words.label);
      Object.assign(input, { min: words.min, max: words.max, step: words.step, value: words.value(run.summary) });
    }
    setText(error, "");
    dialog.showModal();
    (words.label ? input : sure).focus();
  }
  async function send(event) {
    event.preventDefault();
    const words = ASKED[action];
    const mine = turn;
    sure.disabled = true;
    try {
      run.take(await api.post(`runs/${run.id}/${action}`, words.body ? words.body(input.value) : undefined));
      if (mine === turn) dialog.close(); // otherwise the dialog shows another question by now
    } catch (e) {
      if (mine === turn) setText(error, e.message);
    } finally {
      if (mine === turn) sure.disabled = false;
    }
  }
  function show(summary) {
    buttons.forEach((button) => {
      button.hidden = !(button.dataset.wish in summary.wishes);
    });
    retry.hidden = effect.hidden = !summary.wishes.retry;
    setText(effect, summary.wishes.retry || "");
    document.querySelectorAll("[data-part=priority]").forEach((node) => setText(node, String(summary.priority)));
    document.querySelectorAll("[data-part=limit]").forEach((node) => setText(node, f.duration(summary.max_runtime_s)));
    if (!dialog.open || !action) return;
    if (action in summary.wishes) setText(document.getElementById("wish-words"), summary.wishes[action]);
    else dialog.close(); // the state has changed, and the action no longer applies
  }
  /* One click: nothing is lost by a retry. The banner says from which step it goes on. */
  async function retryRun() {
    retry.disabled = true;
    try {
      run.take(await api.post(`runs/${run.id}/retry`));
    } catch (e) {
      if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
      toast(e instanceof ApiError ? e.message : "The server does not respond. Try again.");
    } finally {
      retry.disabled = false;
    }
  }
  retry.addEventListener("click", retryRun);
  buttons.forEach((button) => button.addEventListener("click", () => ask(button.dataset.wish)));
  form.addEventListener("submit", send);
  run.follow(show);
}
