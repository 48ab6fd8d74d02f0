/* The header of every run page: state, reason, key figures, actions; and the page's live connection. */
import * as api from "../core/api.js";
import { ApiError } from "../core/api.js";
import { alertTitle, el, icon, pill, setText, toast } from "../core/dom.js";
import * as f from "../core/format.js";
import { live, showConnection } from "../core/live.js";
import { askUnread } from "../core/bell.js";
import { offerActions } from "./actions.js";
import { offerDeletion } from "./delete.js";
import { offerLabels } from "./labels.js";
import { showHours } from "./device-hours.js";
import { showSavings } from "./overlap-savings.js";
import { run } from "./store.js";

const head = document.getElementById("run");
const ENDED = ["succeeded", "failed", "cancelled"];
let connection = null;
let summary = run.summary;

const part = (name) => head.querySelector(`[data-part="${name}"]`);
const hasEnded = () => ENDED.includes(summary.state);
/* Idle share of all device time of the newest step, and its causes; null before the first step. */
function idleNow(latest) {
  const devices = run.devicesNow(latest);
  if (!devices.length) return null;
  const bubble =
    devices.reduce((sum, d) => sum + (latest[`bubble/${d}`] ?? 1 - latest[`busy/${d}`]), 0) / devices.length;
  const seconds = run.CAUSES.map((cause) => [
    cause,
    devices.reduce((sum, d) => sum + (latest[`idle_s/${d}/${cause}`] || 0), 0),
  ]);
  const all = seconds.reduce((sum, [, s]) => sum + s, 0);
  return {
    bubble,
    causes: seconds.map(([cause, s]) => [cause, all ? (bubble * s) / all : 0]).filter(([, share]) => share > 0),
  };
}
function progress() {
  const share = summary.total_steps ? summary.step / summary.total_steps : 0;
  setText(part("name"), summary.name);
  setText(part("step"), f.whole(summary.step));
  setText(part("total"), `/ ${f.whole(summary.total_steps)} steps`);
  setText(part("share"), `${Math.floor(100 * share)} %`);
  const bar = part("bar");
  bar.max = summary.total_steps || 1;
  bar.value = summary.step || 0;
  bar.toggleAttribute("data-ended", hasEnded());
}
const lostAt = () => f.when(new Date(summary.lost_contact_at));
function time() {
  const taken = summary.step ? f.duration(summary.elapsed_s) : f.NONE;
  const live = f.known(summary.eta_s) && !hasEnded() && !summary.lost_contact_at;
  if (summary.lost_contact_at) {
    setText(part("time-label"), "Last contact");
    setText(part("time"), lostAt());
    setText(part("time-sub"), `${taken} so far`);
    return;
  }
  setText(part("time-label"), live ? "Time left" : "Training time");
  setText(part("time"), live ? f.duration(summary.eta_s) : taken);
  const sub = live
    ? `ends ${f.when(new Date(Date.now() + 1000 * summary.eta_s))} · ${taken} so far`
    : summary.ended_at
      ? `ended ${f.when(new Date(summary.ended_at))}`
      : "";
  setText(part("time-sub"), sub);
}
function speed(latest) {
  const step = latest["timing_s/step"];
  setText(part("throughput"), f.known(latest["perf/throughput"]) ? f.whole(latest["perf/throughput"]) : f.NONE);
  setText(part("step-time"), f.known(step) ? `${f.figure(step)} s per step` : "");
  setText(part("delta"), f.whole(latest["oppo/overcommit"]));
  setText(part("chunk"), f.whole(latest["oppo/chunk_size"]));
  const share = latest["oppo/deferred_token_share"];
  setText(part("deferred"), f.known(share) ? `${f.percent(share, 0)} of tokens deferred` : "");
}
function idle(latest) {
  const now = idleNow(latest);
  setText(part("idle"), now ? f.percent(now.bubble) : f.NONE);
  if (!now) return setText(part("idle-sub"), "");
  const worst = now.causes.slice().sort((a, b) => b[1] - a[1])[0];
  setText(part("idle-sub"), worst ? `mostly waiting for ${worst[0]}` : "no idle time");
  drawBar(part("idle-bar"), now);
}
/* Work solid, idle time hatched by its cause. Widths through the style object, which a strict CSP permits. */
function drawBar(bar, now) {
  const parts = [["busy", 1 - now.bubble], ...now.causes].map(([name, share]) => {
    const part = el("span", name === "busy" ? { class: "busy" } : { class: "swatch-idle", "data-idle": name });
    part.style.width = `${100 * share}%`;
    part.title = `${name} ${f.percent(share)}`;
    return part;
  });
  bar.replaceChildren(...parts);
  bar.setAttribute("aria-label", parts.map((part) => part.title).join(", "));
}
function state() {
  const shown = part("state").querySelector(".pill");
  const state = summary.lost_contact_at ? "lost" : summary.state;
  if (!shown || shown.dataset.state !== state) part("state").replaceChildren(pill(state));
  const tone = { failed: "bad", lost: "warn" }[state];
  const words =
    {
      failed: summary.error || summary.reason,
      lost: `No heartbeat from ${summary.where.length > 1 ? "one of its nodes" : summary.where[0]} since ${lostAt()}. The run may still be training; if the node stays silent, the run restarts from its last checkpoint.`,
      running: "",
      succeeded: "",
    }[state] ?? summary.reason;
  const banner = part("banner");
  banner.hidden = !words;
  if (tone) banner.dataset.tone = tone;
  else delete banner.dataset.tone;
  setText(part("reason"), words || "");
  part("log").hidden = !(summary.state === "failed" && summary.last_log_lines && summary.last_log_lines.length);
  setText(part("log"), (summary.last_log_lines || []).join("\n"));
  document.title = `${summary.state === "running" ? `${Math.floor((100 * summary.step) / summary.total_steps)} % · ` : ""}${document.title.replace(/^\d+ % · /, "")}`;
}
/* The run's nodes; while it waits, the number of nodes requested, if more than one. */
function where() {
  const { nodes, where: names } = summary;
  const words =
    names.length > 1
      ? `on ${names.length} nodes: ${names.join(", ")}`
      : names.length
        ? `on ${names[0]}`
        : `needs ${nodes} nodes`;
  setText(part("where"), names.length || nodes > 1 ? ` · ${words}` : "");
}
/* Open alerts with their reasons; users who may control the run may acknowledge them. */
let shownAlerts = "[]";
function alerts() {
  const now = JSON.stringify(summary.alerts);
  if (now === shownAlerts) return;
  if (connection) askUnread();
  shownAlerts = now;
  part("alerts").hidden = summary.alerts.length === 0;
  part("alerts").replaceChildren(
    ...summary.alerts.map((alert) =>
      el(
        "li",
        {},
        icon("warning"),
        el("b", {}, alertTitle(alert.condition)),
        el("span", {}, alert.why),
        alert.acknowledged_by
          ? el("span", { class: "note push" }, `acknowledged by ${alert.acknowledged_by}`)
          : "acknowledges" in head.dataset &&
              el(
                "button",
                {
                  class: "btn btn-small push",
                  type: "button",
                  onclick: () => change(`alerts/${alert.id}/acknowledge`),
                },
                "Acknowledge",
              ),
      ),
    ),
  );
}
/* What the run is, and a button that changes it: the same one after the change, so that it keeps the focus. No button where the
   user may only read. */
function offer(place, { words, label, turn }) {
  const button = place.querySelector("button");
  const before = words ? `${words} ` : " · ";
  if (!label || "reads" in place.dataset) setText(place, words);
  else if (button) {
    place.firstChild.data = before;
    setText(button, label);
  } else place.replaceChildren(before, el("button", { class: "link", type: "button", onclick: turn }, label));
}
/* Whether messages about its alerts are sent. Not shown after the end. */
function silence() {
  offer(part("silence"), {
    words: summary.silent ? " · alerts silenced" : "",
    label: hasEnded() ? null : summary.silent ? "unsilence" : "silence alerts",
    turn: () => change(`runs/${summary.id}/silence`, { silent: !summary.silent }),
  });
}
/* Whether lists show it; can be changed after its end. */
function archived() {
  offer(part("archived"), {
    words: summary.archived ? " · archived" : "",
    label: !hasEnded() ? null : summary.archived ? "unarchive" : "archive",
    turn: () => change(`runs/${summary.id}/${summary.archived ? "unarchive" : "archive"}`),
  });
}
async function change(path, body) {
  try {
    await api.post(path, body);
    run.take(await api.get(`runs/${summary.id}`));
  } catch (e) {
    if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
    toast(e instanceof ApiError ? e.message : "The server cannot be reached. Try again.");
  }
}
function draw(next) {
  summary = next;
  const latest = summary.latest || {};
  where();
  state();
  alerts();
  silence();
  archived();
  progress();
  time();
  speed(latest);
  idle(latest);
  showLive();
}
function showLive() {
  // an ended run is not live
  if (!connection) return;
  showConnection(part("live"), connection);
  if (hasEnded() && connection.ok) part("live").hidden = true;
}
run.follow(draw);
live({
  runs: [run.id],
  onRun: run.take,
  onState: (s) => {
    connection = s;
    showLive();
  },
});
showHours();
showSavings();
if (document.getElementById("wish-dialog")) {
  offerActions();
  offerDeletion();
}
if (document.getElementById("labels-dialog")) offerLabels();
