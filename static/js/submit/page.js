/* Submit: one spec, shown as form and as YAML. The server checks every change and returns the problems and the spec in both
   forms; nothing is validated here. */
import * as api from "../core/api.js";
import { ApiError, onSignedOut } from "../core/api.js";
import { el, icon, readJson, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { liveFragment } from "../core/live-fragment.js";
import { submitFields } from "./fields.js";
import { planCard } from "./plan.js";
import * as S from "./spec.js";

const WAIT_MS = 250;
const RETRY_MS = 3000;
const ALGORITHM = "ppo.algorithm";
const $ = (id) => document.getElementById(id);
const { spec: start, catalogue, presets, examples, fork } = readJson("submit-data");
const form = $("submit");
const yaml = $("yaml");
const send = $("send");
const project = $("project");
const nameBox = form.querySelector('[data-path="name"]');
let spec = S.copy(start);
let from = "form";
let unread = false; // whether the YAML was changed since the server read it
let view = "form";
let timer = 0;
let requests = 0;
let sending = false;
let named = Boolean(fork);
let verdict = { ok: false, problems: [], pending: true };
let readable = true; // whether the last checked text was a spec at all
let unreadable = false; // whether the YAML cannot be parsed
let touched = Boolean(fork); // an untouched form names what it needs, without complaints
let replaced = {}; // values that the chosen preset replaced, by path
let presetAlgorithm; // the algorithm after the preset was applied
let tried = { text: "", key: "" }; // the last submission, and its idempotency key
let waiting = []; // inputs of the form that were used before the server could read the YAML
const fields = submitFields(form, catalogue, presets, (input) => {
  touched = true;
  if (input === nameBox) named = true;
  if (isOutdated()) {
    waiting.push(input);
    return;
  }
  fields.write(input, spec);
  suggestName();
  changed("form");
});

const card = planCard((settings) => {
  if (isOutdated()) return;
  touched = true;
  Object.entries(settings).forEach(([path, value]) => S.set(spec, path, value));
  fill();
  changed("form");
});

/* Whether `spec` is older than the YAML, which the server has not parsed: a change of `spec` would overwrite that text. */
const isOutdated = () => unread || unreadable;

/* --- one spec, two views -------------------------------------------------------------------------------- */
function changed(side) {
  from = side;
  unread = side === "yaml";
  requests += 1; // a running request is about the previous text
  verdict = { ...verdict, pending: true };
  showSend();
  plan();
  clearTimeout(timer);
  timer = setTimeout(check, WAIT_MS);
}
const body = () => ({ ...(from === "yaml" ? { yaml: yaml.value } : { spec }), project: Number(project.value) });
async function check() {
  const request = ++requests;
  const side = from;
  let reply;
  try {
    reply = await api.post("runs/validate", body());
  } catch (e) {
    if (request !== requests) return;
    verdict = {
      ok: false,
      problems: [],
      pending: false,
      failed: e instanceof ApiError ? e.message : "The server cannot be reached; your input is kept.",
    };
    if (passes(e)) checkLater();
    return showVerdict();
  }
  if (request !== requests) return; // a newer request is running
  unread = false;
  $("signed-out").hidden = true;
  verdict = { ok: reply.ok, problems: reply.problems, pending: false };
  if (side === "form" && reply.yaml) yaml.value = reply.yaml;
  readable = Boolean(reply.spec);
  unreadable = side === "yaml" && !readable && yaml.value.trim() !== "";
  if (side === "yaml" && readable) useYaml(reply.spec);
  fields.showDefaults(reply.chosen || {}, reply.ok ? reply.spec : null);
  card.show(reply.plan);
  if (unreadable) plan();
  else writeWaiting();
  showVerdict();
}
function useYaml(parsed) {
  if (parsed.name !== S.get(spec, "name")) named = true;
  replaced = {};
  spec = parsed;
}
/* Apply the inputs that were changed while the spec was outdated. */
function writeWaiting() {
  const inputs = waiting;
  waiting = [];
  inputs.forEach((input) => fields.write(input, spec));
  fill();
  if (inputs.length) changed("form");
}
/* Whether the server may give another answer later without a change here. */
const passes = (e) => !(e instanceof ApiError) || e.status >= 500 || [401, 409, 429].includes(e.status);
function checkLater() {
  clearTimeout(timer);
  timer = setTimeout(check, RETRY_MS);
}
function askToSignIn() {
  // for any request; a login in another tab ends it
  $("signed-out").hidden = false;
  checkLater();
}
onSignedOut(askToSignIn);
function fill() {
  fields.fill(spec);
  const chosen = examples.find((e) => hasModes(e) && hasInputs(e)) || matchingPreset();
  form.querySelectorAll('[name="preset"]').forEach((radio) => {
    radio.checked = Boolean(chosen) && radio.value === chosen.key;
  });
  $("custom").hidden = Boolean(chosen);
  showExample();
  const changes = $("changes");
  const count = fork ? S.differences({ ...spec, name: "" }, { ...start, name: "" }) : 0;
  if (changes) setText(changes, `, ${count === 0 ? "no changes" : `${count} change${count === 1 ? "" : "s"}`}`);
  plan();
}
function showExample() {
  // what the chosen preset needs
  const chosen = form.querySelector('[name="preset"]:checked');
  document.querySelectorAll("#examples [data-key]").forEach((box) => {
    box.hidden = !chosen || box.dataset.key !== chosen.value;
  });
}
const hasModes = (preset) =>
  Object.entries(preset.overlap).every(([key, value]) => S.get(spec, `overlap.${key}`) === value);
/* The preset of the algorithm first: its other settings may have been changed. */
function matchingPreset() {
  const fitting = presets.filter(hasModes);
  return fitting.find((p) => p.settings[ALGORITHM] === S.get(spec, ALGORITHM)) || fitting.find((p) => !p.settings[ALGORITHM]);
}
const hasInputs = (example) =>
  ["models.actor.path", "data.prompts"].every((path) => S.get(spec, path) === S.get(example.spec, path));
function suggestName() {
  // until the user names it
  if (named) return;
  const actor = S.get(spec, "models.actor.path");
  const preset = form.querySelector('[name="preset"]:checked');
  const words = [actor && actor.split("/").pop(), preset && preset.value].filter(Boolean).join(" ");
  const example = examples.find((e) => preset && e.key === preset.value);
  if (example) S.set(spec, "name", example.spec.name);
  else if (words) S.set(spec, "name", words);
  fields.fill(spec);
}
function choosePreset(key) {
  touched = true;
  const example = examples.find((e) => e.key === key);
  const name = S.get(spec, "name");
  if (example) spec = { ...S.copy(example.spec), name };
  else applySettings(presets.find((p) => p.key === key));
  if (example) replaced = {};
  suggestName();
  fill();
  changed("form");
}
/* The settings of a preset, in place of those of the one before. */
function applySettings({ overlap, settings }) {
  const apply = (values) =>
    Object.entries(values).forEach(([path, value]) =>
      value === null || value === undefined ? S.unset(spec, path) : S.set(spec, path, value),
    );
  // An algorithm that was chosen from the list has restored its own fields.
  if (S.get(spec, ALGORITHM) === presetAlgorithm) apply(replaced);
  replaced = Object.fromEntries(Object.keys(settings).map((path) => [path, S.get(spec, path)]));
  apply({ ...settings, "overlap.intra_step": overlap.intra_step, "overlap.inter_step": overlap.inter_step });
  presetAlgorithm = S.get(spec, ALGORITHM);
}
function show(which) {
  view = which;
  $("view-form").hidden = which !== "form";
  $("view-yaml").hidden = which !== "yaml";
  document
    .querySelectorAll("[data-view]")
    .forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.view === which)));
  if (which === "yaml" && from === "form" && verdict.pending === false && !verdict.ok && !yaml.value)
    setText($("yaml-note"), "The form has an error; the YAML appears when it is fixed.");
  showVerdict();
}

/* --- the server's reply ----------------------------------------------------------------------------------- */
function go(problem) {
  if (view === "yaml") {
    const line = S.lineOf(yaml.value, problem.path);
    yaml.focus();
    if (line) {
      yaml.setSelectionRange(...line);
      yaml.scrollTop = (yaml.value.slice(0, line[0]).split("\n").length - 5) * 19;
    }
    return;
  }
  const input = fields.fieldOf(problem.path);
  if (input) {
    input.focus();
    input.scrollIntoView({ block: "center" });
  } else show("yaml");
}
function apply(problem, input) {
  if (isOutdated()) return;
  const value = problem.suggestion;
  S.set(spec, problem.path, Number.isFinite(Number(value)) ? Number(value) : value);
  input.focus(); // its button goes with the error
  fill();
  changed("form");
}
function listed(problem) {
  const label = fields.labelOf(problem.path);
  const where = problem.path ? [label ? el("b", {}, `${label} `) : null, el("code", {}, problem.path)] : null;
  return el(
    "li",
    {},
    el("span", { class: "bad" }, icon("cross")),
    el(
      "span",
      {},
      where,
      where ? " " : null,
      fields.sentence(problem),
      problem.suggestion ? ` Did you mean ${problem.suggestion}?` : null,
      " ",
      problem.path
        ? el(
            "button",
            { type: "button", onclick: () => go(problem) },
            view === "yaml" ? "Go to the line" : "Go to the field",
          )
        : unreadable && view === "form"
          ? el("button", { type: "button", onclick: () => show("yaml") }, "Go to the YAML")
          : null,
    ),
  );
}
/* What an untouched form still needs, by the names of its fields. */
function needed() {
  const labels = verdict.problems.map((problem) => fields.labelOf(problem.path)).filter(Boolean);
  if (!verdict.problems.length) return [];
  const words = labels.length ? `To choose: ${[...new Set(labels)].join(", ")}.` : fields.sentence(verdict.problems[0]);
  return [el("li", {}, el("span", { class: "muted" }, icon("info")), el("span", {}, words))];
}
function showVerdict() {
  fields.complain(touched ? verdict.problems : [], apply);
  const items = touched ? verdict.problems.map(listed) : needed();
  if (verdict.ok)
    items.push(
      el(
        "li",
        {},
        el("span", { class: "good" }, icon("check")),
        el("span", {}, "All fields are valid, and a connected worker can run this spec."),
      ),
    );
  $("problems").replaceChildren(...items);
  yaml.toggleAttribute("aria-invalid", false);
  if (touched && verdict.problems.length) yaml.setAttribute("aria-invalid", "true");
  showSend();
}
function showSend() {
  form.querySelectorAll('[name="preset"]').forEach((radio) => {
    radio.disabled = isOutdated(); // a preset would replace what was typed in the YAML
  });
  const n = verdict.problems.length;
  const why = sending
    ? "Submitting …"
    : verdict.pending
      ? "Checking …"
      : verdict.failed
        ? verdict.failed
        : verdict.ok
          ? "The run joins the queue immediately."
          : unreadable && view === "form"
            ? "Correct the YAML first. Changes of the form are applied after that."
            : !touched
              ? "Complete the form to submit."
              : n === 1
                ? "Fix 1 problem to submit."
                : `Fix ${n} problems to submit.`;
  send.setAttribute("aria-disabled", String(sending || verdict.pending || !verdict.ok));
  setText($("why-not"), why);
}
function plan() {
  const n = (path) => {
    const v = S.get(spec, path) ?? fields.effective(path);
    return readable && typeof v === "number" ? v : NaN;
  };
  const group = n("ppo.group_size") || 1;
  const answers = (n("steps") - (n("fork.step") || 0)) * n("ppo.batch_size") * group;
  const prompts = catalogue.find((c) => c.kind === "prompts" && c.id === S.get(spec, "data.prompts"));
  const defers = S.get(spec, "overlap.inter_step") === "defer";
  const delta = defers ? n("overlap.overcommit.max") : 0;
  setText($("plan-answers"), f.whole(answers));
  setText(
    $("plan-epochs"),
    prompts && prompts.rows && f.known(answers)
      ? `${f.figure(answers / group / prompts.rows)} × the ${f.whole(prompts.rows)} prompts`
      : group > 1
        ? "steps × B × G"
        : "steps × B",
  );
  setText($("plan-flight"), f.whole((n("ppo.batch_size") + delta) * group));
  setText($("plan-flight-sub"), `${defers ? "B + max Δ" : "B, no deferral"}${group > 1 ? `, × G ${group}` : ""}`);
  setText($("plan-tokens"), compact(answers * n("rollout.max_new_tokens")));
  setText($("plan-tokens-sub"), "all responses at max length");
  setText($("plan-devices"), f.whole(n("resources.devices")));
}
const compact = (x) =>
  f.known(x) ? Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 }).format(x) : f.NONE;

async function submit(e) {
  e.preventDefault();
  touched = true;
  if (sending || verdict.pending || !verdict.ok) {
    showVerdict();
    if (verdict.problems[0]) go(verdict.problems[0]);
    if (!sending && !verdict.pending) check(); // a worker may have started, or a quota changed
    return;
  }
  sending = true;
  showSend();
  const payload = { ...body(), tags: $("tags").value.split(/[\s,]+/).filter(Boolean) };
  try {
    const run = await api.postOnce("runs", payload, keyFor(payload));
    tried = { text: "", key: "" }; // submitting the same again after coming back is another run
    location.href = run.url;
    return;
  } catch (error) {
    refused(error);
  }
  sending = false;
  showVerdict();
}
/* The same for every attempt to submit the same spec: they create one run, also when the first response was lost. */
function keyFor(payload) {
  const text = JSON.stringify(payload);
  if (text !== tried.text)
    tried = { text, key: Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("-") };
  return tried.key;
}
/* Problems require a change first; after any other error the button can be used again. */
function refused(error) {
  const fromServer = error instanceof ApiError;
  const problems = error.errors || [];
  verdict = {
    ok: problems.length === 0,
    pending: false,
    problems,
    failed: problems.length ? "" : fromServer ? error.message : "The server did not respond.",
  };
  if (!fromServer || [502, 503, 504].includes(error.status)) $("lost").hidden = false;
}
form.addEventListener("submit", submit);
form.addEventListener("change", (e) => {
  if (e.target.name === "preset") choosePreset(e.target.value);
});
project.addEventListener("change", () => changed(from));
$("tags").addEventListener("input", () => verdict.ok || changed(from)); // a tag may have been refused
/* The back/forward cache restores the page as it was during its submission. */
addEventListener("pageshow", (e) => {
  if (!e.persisted) return;
  sending = false;
  changed(from);
});
yaml.addEventListener("input", () => {
  touched = true;
  changed("yaml");
});
document.querySelectorAll("[data-view]").forEach((b) => b.addEventListener("click", () => show(b.dataset.view)));
/* While an example lacks something: what the workers have, so that its step is ticked and the spec is checked again. */
const needs = $("examples");
if (needs && needs.hasAttribute("hx-get")) liveFragment(needs, { onSwapped: offered, onSignedOut: askToSignIn });
function offered() {
  const fresh = readJson("catalogue");
  if (JSON.stringify(fresh) === JSON.stringify(catalogue)) {
    showExample();
    return;
  }
  catalogue.splice(0, catalogue.length, ...fresh);
  changed(from);
  fill();
}
fill();
check();
