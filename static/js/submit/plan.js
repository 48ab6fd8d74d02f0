/* The plan of the spec on the submit page, as the server estimates it: memory of each device, time, start, saving. */
import { el, icon, keepFocus, setText } from "../core/dom.js";
import * as f from "../core/format.js";

const $ = (id) => document.getElementById(id);
const NEARLY_FULL = 0.9;

/* `use(settings)`: called with values by path when the user takes over a remedy. */
export function planCard(use) {
  const memory = $("plan-memory");

  /* `plan`: of `runs/validate`; null while the spec is not valid. */
  function show(plan) {
    $("plan-estimates").hidden = $("plan-memory-part").hidden = !plan;
    if (!plan) return;
    showTime(plan);
    showStart(plan);
    showSaving(plan.saving);
    showMemory(plan.memory);
  }
  function stat(id, value, sub) {
    setText($(id), value);
    setText($(`${id}-sub`), sub);
  }
  function showTime({ time, kind, device }) {
    const known = f.known(time.step_s);
    const step = known ? `${f.brief(time.step_s)} a step; ${time.text}` : `Unknown: ${time.unknown}.`;
    stat("plan-duration", f.duration(time.duration_s), step);
    setText($("plan-hours-label"), kind === "cuda" ? "GPU-hours" : "Device-hours");
    stat("plan-hours", f.deviceHours(time.device_hours), device);
  }
  function showStart({ start, planned_at }) {
    const at = start.at && new Date(start.at);
    const now = at && at - new Date(planned_at) < 1000;
    const why = start.unknown ? `Not shown: ${start.unknown}.` : [start.text, start.sooner].filter(Boolean).join(" ");
    stat("plan-start", now ? "now" : at ? f.when(at) : f.NONE, why);
  }
  function showSaving(saving) {
    if (!saving) return stat("plan-saving", f.NONE, "no overlap, or no time known");
    const gain = saving.seconds > 0;
    return stat(
      "plan-saving",
      gain ? f.percent(saving.share, 0) : "none",
      `${gain ? `${f.duration(saving.seconds)}, ` : ""}${saving.text}`,
    );
  }
  function showMemory({ devices, expected_bytes, remedy, unknown }) {
    const open = [...memory.querySelectorAll("details")].map((node) => node.open);
    const parts = devices.map((device, number) => deviceMemory(device, number, open[number]));
    if (unknown) parts.push(el("p", { class: "help" }, `Memory unknown: ${unknown}.`));
    if (f.known(expected_bytes))
      parts.push(el("p", { class: "help" }, `Earlier runs suggest a peak of ${f.bytes(expected_bytes)}.`));
    if (devices.some((device) => !device.fits)) parts.push(doesNotFit(remedy));
    keepFocus(
      () => memory.replaceChildren(...parts),
      () => memory,
    );
  }
  function deviceMemory(device, number, open) {
    const { needed_bytes: needed, available_bytes: available } = device;
    const names = `${device.count > 1 ? `${device.count} × ` : ""}${device.roles.join(", ")}`;
    const amount = `${f.bytes(needed)} of ${f.bytes(available)}`;
    const tone = !device.fits ? "bad" : needed > NEARLY_FULL * available ? "warn" : null;
    const bar = el("progress", {
      max: available,
      value: Math.min(needed, available),
      "data-tone": tone,
      "aria-label": `Memory of ${names}: ${amount}`,
    });
    const line = el("p", {}, names, el("b", { class: "num" }, amount));
    return el("div", { class: "plan-device" }, line, bar, terms(device, number, open));
  }
  function terms(device, number, open) {
    const row = ({ role, use: name, bytes, arithmetic }) =>
      el(
        "tr",
        { title: arithmetic },
        el("td", {}, role),
        el("td", {}, name),
        el("td", { class: "num nowrap" }, f.bytes(bytes)),
      );
    const head = el(
      "tr",
      {},
      el("th", { scope: "col" }, "Role"),
      el("th", { scope: "col" }, "Use"),
      el("th", { scope: "col", class: "num" }, "Size"),
    );
    return el(
      "details",
      { open },
      el("summary", { "data-focus": `plan-device-${number}` }, "By role"),
      el("table", { class: "dense" }, el("thead", {}, head), el("tbody", {}, device.terms.map(row))),
    );
  }
  function doesNotFit(remedy) {
    const settings = Object.entries(remedy || {});
    const words = settings.length
      ? ["It does not fit. It would with ", ...settings.flatMap(setting), ". "]
      : "It does not fit with any of the settings that were tried. Use fewer rollouts, shorter responses, or a larger device. ";
    return el(
      "p",
      { class: "plan-remedy" },
      el("span", { class: "bad" }, icon("warning")),
      el(
        "span",
        {},
        words,
        settings.length > 0 &&
          el(
            "button",
            { type: "button", class: "link", "data-focus": "plan-remedy", onclick: () => use(remedy) },
            "Use this",
          ),
      ),
    );
  }
  const setting = ([path, value], place) => [
    place ? " and " : "",
    el("code", {}, path),
    typeof value === "object" ? "" : ` ${f.known(value) ? f.whole(value) : value}`,
  ];
  return { show };
}
