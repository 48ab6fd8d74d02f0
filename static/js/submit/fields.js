/* The inputs of the submit form: each shows one path of the spec and writes it back. */
import { el, icon } from "../core/dom.js";
import * as S from "./spec.js";

/* By kind of field, the problem paths whose suggestion is a value for the field. */
const EXACT = {
  actor: ["models.actor.path"],
  reward: ["models.reward.model.path", "models.reward.rule"],
  critic: ["models.critic.path"],
};
const $ = (id) => document.getElementById(id);

/* A typed number; other text is passed unchanged, so that the server can report the error. */
function parse(kind, text) {
  const t = text.trim();
  if (kind === "text" || kind === "choice") return text;
  if (t === "") return null;
  const n = Number(t);
  return Number.isFinite(n) && t !== "" ? n : t;
}
const shown = (value) =>
  value === null || value === undefined ? "" : typeof value === "number" ? short(value) : String(value);
const short = (n) => (n !== 0 && Math.abs(n) < 1e-3 ? n.toExponential().replace("e-", "e-") : String(n));

export function submitFields(form, catalogue, presets, onChange) {
  let checkedSpec = {};
  /* Values of settings without effect, by path: their last ones, or a preset's. A spec that has them may be refused. */
  const unused = new Map(presets.flatMap((p) => Object.entries(p.settings)).filter(([, value]) => value !== null));
  const inputs = [...form.querySelectorAll("[data-path]")];
  const models = (task) => catalogue.filter((c) => c.kind === "model" && (!task || c.task === task || !c.task));

  function options(select, entries, current) {
    const known = entries.some(([value]) => value === current);
    const all = known || !current ? entries : [...entries, [current, `${current} (not in the catalogue)`]];
    if (!all.length) all.push(["", "none available"]);
    select.replaceChildren(
      ...all.map(([value, words, problem]) =>
        el("option", { value, disabled: Boolean(problem) && value !== current, title: problem || null }, words),
      ),
    );
    select.value = current ?? "";
    if (select.selectedIndex < 0) {
      select.prepend(el("option", { value: "" }, "choose …"));
      select.value = "";
    }
  }
  /* Entries that no run can use come last and cannot be chosen; a spec that names one is refused with the reason. */
  const named = (list, prefix = "") =>
    [...list]
      .sort((a, b) => Boolean(a.problem) - Boolean(b.problem))
      .map((c) => [prefix + c.id, c.problem ? `${c.id} (unusable)` : c.id, c.problem]);
  const pathOrTiny = (value) => (value && value.tiny ? "tiny:" : (value && value.path) || "");
  const SHOW = {
    actor(input, value) {
      options(
        input,
        [...named(models("causal_lm")), ...(value && value.tiny ? [["tiny:", "built-in, random weights"]] : [])],
        pathOrTiny(value),
      );
    },
    reward(input, value) {
      const given = (key) => Boolean(value && value[key] !== undefined && value[key] !== null);
      const rule = given("rule");
      const source = given("parts")
        ? "several sources (see YAML)"
        : given("http")
          ? "HTTP service (see YAML)"
          : given("reads") && value.reads !== "tokens"
            ? "text-input model (see YAML)"
            : "";
      const current = rule ? "rule:" : source ? "kept:" : pathOrTiny(value && value.model);
      options(
        input,
        [
          ...named(models("sequence_classification")),
          ...(value && value.model && value.model.tiny ? [["tiny:", "built-in, random weights"]] : []),
          ["rule:", "rule (Python) …"],
          ...(source ? [["kept:", source]] : []),
        ],
        current,
      );
      const box = $(`${input.id}-rule`);
      box.hidden = !rule;
      if (rule && document.activeElement !== box) box.value = value.rule;
    },
    critic(input, value) {
      const current =
        typeof value === "string" ? value : pathOrTiny(value) && (value.tiny ? "tiny:" : `path:${value.path}`);
      options(
        input,
        [
          ["actor", "copy of the actor"],
          ["reward", "copy of the reward model"],
          ...named(models(""), "path:"),
          ...(value && value.tiny ? [["tiny:", "built-in, random weights"]] : []),
        ],
        current,
      );
    },
    prompts(input, value) {
      const several = Array.isArray(value);
      options(
        input,
        [
          ...named(catalogue.filter((c) => c.kind === "prompts")),
          ...(several ? [["kept:", "several files (see YAML)"]] : []),
        ],
        several ? "kept:" : value || "",
      );
    },
  };
  const keepTiny = (spec, path, then) => (S.get(spec, `${path}.tiny`) ? S.get(spec, path) : then);
  const READ = {
    actor: (input, spec) => (input.value === "tiny:" ? keepTiny(spec, "models.actor", null) : { path: input.value }),
    reward: (input, spec) =>
      input.value === "rule:"
        ? { rule: $(`${input.id}-rule`).value }
        : ["tiny:", "kept:"].includes(input.value)
          ? S.get(spec, "models.reward")
          : { model: { path: input.value } },
    critic: (input, spec) =>
      input.value.startsWith("path:")
        ? { path: input.value.slice(5) }
        : input.value === "tiny:"
          ? S.get(spec, "models.critic")
          : input.value,
    prompts: (input, spec) => (input.value === "kept:" ? S.get(spec, "data.prompts") : input.value),
  };
  /* `path=value,value`: whether the spec has one of these values. */
  function hasEffect(only, spec) {
    const [path, values] = only.split("=");
    return values.split(",").includes(S.get(spec, path));
  }
  /* Show `spec`; the focused input keeps its text. */
  function fill(spec) {
    inputs.forEach((input) => {
      const value = S.get(spec, input.dataset.path);
      const special = SHOW[input.dataset.kind];
      if (special) special(input, value);
      else if (document.activeElement !== input || parse(input.dataset.kind, input.value) !== value)
        input.value = shown(value);
      if (input.dataset.only) input.disabled = !hasEffect(input.dataset.only, spec);
    });
  }
  function write(input, spec) {
    const dependents = inputs.filter((i) => i.dataset.only && i.dataset.only.startsWith(`${input.dataset.path}=`));
    const before = dependents.map((i) => hasEffect(i.dataset.only, spec));
    const read = READ[input.dataset.kind];
    const value = read ? read(input, spec) : parse(input.dataset.kind, input.value);
    if (value === null)
      S.unset(spec, input.dataset.path); // an empty field has its default
    else S.set(spec, input.dataset.path, value);
    dependents.forEach((i, n) => {
      const has = hasEffect(i.dataset.only, spec);
      if (has !== before[n]) (has ? restore : putAside)(i.dataset.path, spec);
    });
  }
  function putAside(path, spec) {
    const value = S.get(spec, path);
    if (value !== undefined) unused.set(path, value);
    S.unset(spec, path);
  }
  function restore(path, spec) {
    if (unused.has(path)) S.set(spec, path, unused.get(path));
  }
  /* The field of a problem: its own path, a path inside it, or its section. */
  function fieldOf(path) {
    return (
      inputs.find((i) => i.dataset.path === path) ||
      inputs.find((i) => path.startsWith(`${i.dataset.path}.`)) ||
      (path && inputs.find((i) => i.dataset.path.startsWith(`${path}.`))) ||
      null
    );
  }
  /* The label of a problem's field, without its unit; null if it has none. */
  function labelOf(path) {
    const input = fieldOf(path);
    return input && form.querySelector(`label[for="${input.id}"]`).firstChild.textContent.trim();
  }
  function complain(problems, apply) {
    inputs.forEach((input) => {
      const mine = problems.filter((p) => fieldOf(p.path) === input);
      const box = $(`${input.id}-e`);
      input.toggleAttribute("aria-invalid", false);
      if (mine.length) input.setAttribute("aria-invalid", "true");
      box.hidden = !mine.length;
      $(`${input.id}-h`).hidden = mine.length > 0;
      box.replaceChildren(
        ...mine.flatMap((p) => [
          icon("warning"),
          el(
            "span",
            { class: "text" },
            sentence(p),
            p.suggestion ? " " : null,
            p.suggestion ? (isExact(p, input) ? fix(p, input, apply) : `Did you mean ${p.suggestion}?`) : null,
          ),
        ]),
      );
    });
  }
  /* What a run will use for settings that are left empty: as placeholder, and with the reason below the input. */
  function showDefaults(chosen, valid) {
    if (valid) checkedSpec = valid; // after an error elsewhere, those of the last valid spec
    inputs
      .filter((i) => i.tagName === "INPUT")
      .forEach((input) => {
        const one = chosen[input.dataset.path];
        const help = $(`${input.id}-h`);
        const note = help.querySelector(".chosen");
        input.placeholder = one ? shown(one.value) : shown(S.get(checkedSpec, input.dataset.path));
        if (note) note.remove();
        if (one) help.append(el("span", { class: "chosen" }, `This run: ${shown(one.value)}, because ${one.reason}.`));
      });
  }
  /* Whether the suggestion is a value for the field, not the name of a key or of one of several files. */
  function isExact({ path }, input) {
    return (EXACT[input.dataset.kind] || [input.dataset.path]).includes(path) && input.value !== "kept:";
  }
  function fix(problem, input, apply) {
    return el("button", { type: "button", onclick: () => apply(problem, input) }, `Use ${problem.suggestion}`);
  }
  const sentence = (p) =>
    `${p.message}${p.value !== undefined ? `, given ${p.value}` : ""}${p.allowed ? `; allowed: ${p.allowed}` : ""}.`;

  form.addEventListener("input", (e) => {
    if (e.target.dataset.path && e.target.tagName === "INPUT") onChange(e.target);
  });
  form.addEventListener("change", (e) => {
    if (e.target.dataset.path && e.target.tagName === "SELECT") onChange(e.target);
  });
  inputs
    .filter((i) => i.dataset.kind === "reward")
    .forEach((i) => $(`${i.id}-rule`).addEventListener("input", () => onChange(i)));
  /* The value of a path in the last checked spec: also of what the form leaves empty. */
  const effective = (path) => S.get(checkedSpec, path);
  return { fill, write, showDefaults, effective, complain, fieldOf, labelOf, sentence };
}
