/* Timeline tab: loads the steps in view, follows the run while it trains, explains bubbles, handles keyboard and pointer. */
import { idleShares } from "./idle-shares.js";
import * as T from "../charts/plotly-theme.js";
import { runSeries } from "./series.js";
import * as api from "../core/api.js";
import { ApiError, tryAgain } from "../core/api.js";
import { el, setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { run } from "./store.js";
import { shortcut } from "../core/keys.js";
import { timelineFigure } from "./timeline-figure.js";
import { timelineModel } from "./timeline-model.js";
import { timelinePainter } from "./timeline-paint.js";
import { timelineStrip } from "./timeline-strip.js";

const HELD = 12;
const MOST = 48;
const NEAR = 40; // steps loaded at first, kept at most, and in a window that shows every span
const REST_MS = 200;
const $ = (id) => document.getElementById(id);
const lanes = $("lanes");
const miniCanvas = $("mini");
const tip = $("tip");
const painter = timelinePainter(lanes, miniCanvas);
const { view, state } = painter;
const series = runSeries(run.id, ["bubble/*", "idle_s/*"]);
const hasResumed = run.resumeDetector();
const linked = (
  /^(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)$/.exec(new URLSearchParams(location.search).get("window") || "") || []
)
  .slice(1)
  .map(Number);
let reply = null;
let follow = true;
let loading = false;
let again = false;
let outdated = false;
let queued = 0;
let resting = 0;
let requests = 0;
let automatic = false; // whether the explained gap was picked by the page

/* --- cause and remedy: only measured figures ---------------------------------------------------------- */
const overlap = run.spec.overlap || {};
const delta = overlap.overcommit || {};
const WHY = {
  decode:
    overlap.intra_step === "off"
      ? "The scorers have no input until decoding ends. overlap.intra_step: per_chunk sends each chunk to them as soon as it is decoded."
      : "The scorer has processed all chunks and waits for the actor's next one. A smaller chunk size shortens the wait but adds kernel launches.",
  tail:
    overlap.inter_step === "off"
      ? "The batch waits for its longest responses. overlap.inter_step: defer carries them into the next step instead."
      : `Only a few responses are still decoding, and the batch needs them. A larger overlap.overcommit.max (now ${delta.max}) keeps more responses in flight.`,
  score:
    "Decoding is done. The last scores, reward shaping and advantages run before the update, with no other work to overlap.",
  update: "This device has no update, or has finished it, while another device still updates.",
  weights: "The actor's new weights are being sent to the sampler.",
  data: "Prompts are being loaded at the start of the step.",
  checkpoint: `A checkpoint is being written. checkpoints.every_steps (now ${(run.spec.checkpoints || {}).every_steps}) sets how often.`,
  eval: "An evaluation is running.",
  unknown: "The trace does not show the cause of this gap.",
};

/* --- loading ------------------------------------------------------------------------------------------ */
const fetchSteps = (from, to) => api.get(`runs/${run.id}/timeline`, { from_step: Math.max(1, from), to_step: to });
function accept(next) {
  reply = next;
  outdated = false;
  painter.setModel(timelineModel(reply));
  $("timeline-none").hidden = reply.steps.length > 0;
  $("timeline-body").hidden = reply.steps.length === 0;
  lists();
}
async function load(from, to) {
  const request = requests;
  const next = await fetchSteps(from, to);
  if (request !== requests) return; // the window has moved meanwhile
  accept({ ...next, from: Math.max(1, from), to });
  if (reply.steps.length) {
    zoomTo("steps");
    if (!state.picked || automatic) pickInWindow();
  }
}
async function extend(to) {
  const last = reply.steps.length ? reply.steps[reply.steps.length - 1].step : 0;
  if (to <= last) return;
  if (to - last > HELD || !reply.steps.length) return load(to - HELD + 1, to);
  const request = requests;
  const more = await fetchSteps(last + 1, to);
  if (!more.steps.length || !follow || request !== requests) return;
  const wide = view.b - view.a;
  const was = zoomed;
  const steps = reply.steps.concat(more.steps).slice(-MOST);
  accept({ ...reply, ...more, steps, from: steps[0].step, to });
  if (was) zoomTo(was);
  else show(state.model.length - wide + 0.02 * wide, state.model.length + 0.02 * wide);
  if (!state.picked || automatic) pickInWindow();
}
/* Loaded steps may have been trained again. If the run is not that far yet, its newest steps are shown. */
async function reload(summary) {
  if (follow) return load(summary.step - HELD + 1, Math.max(1, summary.step));
  if (zoomed === "run") return zoomTo("run");
  const [from, to] = inSteps();
  const end = clip(to);
  return goTo(clip(end - (to - from)), end);
}
function stale(e) {
  if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e; // the connection status shows it
}
async function refresh() {
  if (loading) {
    again = true;
    return;
  }
  loading = true;
  try {
    const { summary } = run;
    if (hasResumed(summary)) {
      outdated = true;
      requests += 1;
    }
    if ((await series.update(summary)) || !state.run) {
      const shares = idleShares(series, run.devicesOf(summary.latest || {}), run.CAUSES);
      state.run = {
        step: shares.base.step,
        bubble: shares.bubble,
        shares: shares.shares,
        causes: run.CAUSES,
        total: summary.total_steps,
        last: summary.step,
        over: Boolean(summary.ended_at),
      };
    }
    if (!reply && linked[0] < linked[1] && linked[0] < summary.step) {
      const [from, to] = linked.splice(0);
      await goTo(from, clip(to));
    } else if (!reply) await load(summary.step - HELD + 1, Math.max(1, summary.step));
    else if (outdated) await reload(summary);
    else if (follow) await extend(summary.step);
    else if (zoomed === "run" && summary.step > 1.02 * reply.to) await zoomTo("run");
    paint();
  } catch (e) {
    stale(e);
    tryAgain(e, refresh);
  } finally {
    loading = false;
  }
  if (again) {
    again = false;
    refresh();
  }
}

/* --- window ------------------------------------------------------------------------------------------- */
let zoomed = "";
function show(a, b) {
  const end = 1.02 * state.model.length;
  const wide = Math.min(end, Math.max(end / 4000, b - a));
  view.a = Math.max(0, Math.min(end - wide, a));
  view.b = view.a + wide;
  zoomed = "";
  clearTimeout(resting);
  resting = setTimeout(rest, REST_MS);
  paint();
}
/* Positions in the whole run are counted in steps trained: the window from 16 to 18 shows steps 17 and 18. */
const last = () => run.summary.step;
const inSteps = () => [painter.stepAt(view.a), painter.stepAt(view.b)];
const stepsOf = (x) =>
  x.last > x.step ? `steps ${f.whole(x.step)}–${f.whole(x.last)} together` : `step ${f.whole(x.step)}`;
const covers = (from, to) => reply && from > reply.from - 1.01 && to < reply.to + 0.01;
const isFine = (wide) =>
  !reply.far || (wide > NEAR && (3 * wide >= reply.to - reply.from || reply.steps.every((s) => s.merged === 1)));
/* Show this window and load its steps: every span of a few steps, or many merged steps, with the same length again on both
   sides. */
async function goTo(from, to) {
  const wide = to - from;
  const room = wide > NEAR ? wide / 2 : Math.max(0, Math.min(HELD / 2, (MOST - wide - 2) / 2));
  const first = Math.max(1, Math.floor(from - room) + 1);
  const end = Math.min(last(), Math.ceil(to + room));
  const known = reply && reply.from === first && reply.to === end;
  follow = false;
  requests += 1;
  if (outdated || (!known && !(covers(from, to) && isFine(wide)))) {
    const request = requests;
    const next = await fetchSteps(first, end);
    if (request !== requests || (reply && !next.steps.length)) return;
    accept({ ...next, from: first, to: end });
  }
  show(painter.timeAtStep(from), painter.timeAtStep(to));
  if (!state.picked || automatic) pickInWindow();
}
const go = (from, to) => goTo(from, to).catch(stale);
const wholeRun = () => go(0, last());
const clip = (p) => Math.max(0, Math.min(last(), p));
/* The window has stopped moving: update the address, and replace merged steps by finer ones. */
function rest() {
  if (!reply || !state.model.steps.length) return;
  const [from, to] = inSteps();
  const asText = (p) => String(Math.round(p * 100) / 100);
  history.replaceState(null, "", follow ? location.pathname : `?window=${asText(from)}-${asText(to)}`);
  if (reply.far && !isFine(to - from)) go(from, to);
  traceLink(...inWindow());
}
function traceLink(first, end) {
  // a trace contains fewer steps than the timeline
  const link = $("trace");
  if (end - first >= 50) {
    link.removeAttribute("href");
    link.setAttribute("aria-disabled", "true");
    return;
  }
  link.href = `/api/v1/runs/${run.id}/trace.json?from_step=${first}&to_step=${end}`;
  link.removeAttribute("aria-disabled");
}
function paint() {
  if (queued) return;
  queued = requestAnimationFrame(() => {
    queued = 0;
    painter.draw();
    range();
  });
}
/* The first and the last step in the window, without steps of which only an edge is visible. */
function inWindow() {
  const all = state.model.steps;
  const newest = all[all.length - 1].last;
  const ofStep = state.model.length / (newest - all[0].n + 1);
  const edge = Math.min((view.b - view.a) / 50, ofStep / 4);
  return [
    Math.floor(painter.stepAt(view.a + edge)) + 1,
    Math.min(newest, Math.floor(painter.stepAt(view.b - edge)) + 1),
  ];
}
function range() {
  if (!state.model || !state.model.steps.length) return;
  const [from, to] = inWindow();
  const words = from === to ? `step ${f.whole(from)}` : `steps ${f.whole(from)}–${f.whole(to)}`;
  setText($("range"), `${words} · ${f.duration(view.b - view.a)}${state.model.far ? " · merged" : ""}`);
  Object.entries({
    valuemin: 1,
    valuemax: Math.max(1, last()),
    valuenow: from,
    valuetext: `${words} of ${f.whole(last())}`,
  }).forEach(([name, value]) => miniCanvas.setAttribute(`aria-${name}`, value));
  document.querySelectorAll("[data-zoom]").forEach((b) => {
    if (b.hasAttribute("aria-pressed")) b.setAttribute("aria-pressed", String(b.dataset.zoom === zoomed));
  });
  $("follow").setAttribute("aria-pressed", String(follow));
}
const away =
  (then) =>
  (...args) => {
    follow = false;
    then(...args);
  };
function zoom(by, at = (view.a + view.b) / 2) {
  if (reply && by > 1 && view.b - view.a >= 0.98 * state.model.length && (reply.from > 1 || reply.to < last()))
    return widen();
  return show(at - (at - view.a) * by, at + (view.b - at) * by);
}
function widen() {
  // beyond the loaded steps
  const [from, to] = inSteps();
  const half = Math.max(1, to - from);
  return go(clip(from - half / 2), clip(to + half / 2));
}
const pan = away((by) => {
  const [from, to] = inSteps();
  const beyond = reply && (by < 0 ? view.a <= 0 && reply.from > 1 : view.b >= state.model.length && reply.to < last());
  const shift = Math.max(-from, Math.min(last() - to, by * (to - from)));
  return beyond ? go(from + shift, to + shift) : show(view.a + by * (view.b - view.a), view.b + by * (view.b - view.a));
});
async function near(then) {
  // the same position, with every span
  if (state.model.far) {
    const step = Math.floor((inSteps()[0] + inSteps()[1]) / 2);
    await go(step, step + 1);
  }
  if (!state.model.far) then();
}
function toSteps(count) {
  const shown = state.model.steps;
  const last = shown[shown.length - 1];
  if (!last) return;
  const anchor = follow ? shown.length - count : shown.findIndex((s) => s.b > (view.a + view.b) / 2);
  const first = shown[Math.max(0, Math.min(anchor, shown.length - count))];
  const end = shown[Math.min(shown.length - 1, Math.max(0, Math.min(anchor, shown.length - count)) + count - 1)];
  const room = 0.015 * (end.b - first.a);
  show(first.a - room, end.b + room);
}
function toChunk() {
  const at = (view.a + view.b) / 2;
  const near = (s) => Math.abs((s.a + s.b) / 2 - at);
  const chunk = state.model.spans.filter((s) => s.chunk && s.phase === "decode").sort((p, q) => near(p) - near(q))[0];
  if (!chunk) return;
  follow = false;
  const fed = state.model.links.filter((l) => l.id === chunk.id).map((l) => l.to.b);
  const end = Math.max(chunk.b, ...fed);
  const room = 0.08 * (end - chunk.a);
  show(chunk.a - room, end + room);
}
const ZOOM = {
  run: wholeRun,
  all: () => show(0, state.model.length * 1.02),
  steps: () => near(() => toSteps(2)),
  step: () => near(() => toSteps(1)),
  chunk: () => near(toChunk),
  in: () => zoom(0.6),
  out: () => zoom(1.6),
};
async function zoomTo(name) {
  await ZOOM[name]();
  if (!["in", "out"].includes(name)) {
    zoomed = name;
    range();
  }
}

/* --- lists beside and below the lanes -------------------------------------------------------------------- */
function lists() {
  const model = state.model;
  const steps = model.steps;
  const words = !steps.length
    ? ""
    : steps.length === 1
      ? stepsOf({ step: steps[0].n, last: steps[0].last })
      : `steps ${f.whole(steps[0].n)}–${f.whole(steps[steps.length - 1].last)}`;
  document.querySelectorAll("[data-held]").forEach((node) => setText(node, words));
  $("worst").replaceChildren(
    ...model.worst.map((x, i) =>
      el(
        "li",
        {},
        el(
          "button",
          { type: "button", "data-rank": i, "aria-pressed": "false", onclick: away(() => visit(x)) },
          el("span", { class: "swatch swatch-idle", "data-idle": x.cause }),
          el("span", { class: "what" }, x.cause, el("small", {}, ` ${model.devices[x.dev].id} · step ${x.step}`)),
          el("span", { class: "num strong" }, f.brief(x.b - x.a)),
        ),
      ),
    ),
  );
  const byCause = run.CAUSES.map((cause) => [
    cause,
    model.bubbles.filter((x) => x.cause === cause).reduce((sum, x) => sum + x.b - x.a, 0),
  ])
    .filter(([, s]) => s > 0)
    .sort((a, b) => b[1] - a[1]);
  const whole = model.measured.reduce((sum, s) => sum + s, 0);
  const idle = byCause.reduce((sum, [, s]) => sum + s, 0);
  setText($("idle-share"), whole ? f.percent(idle / whole) : "");
  $("idle-causes").replaceChildren(
    ...byCause.map(([cause, s]) =>
      el(
        "tr",
        {},
        el(
          "td",
          {},
          el("span", { class: "row" }, el("span", { class: "swatch swatch-idle", "data-idle": cause }), cause),
        ),
        el("td", { class: "num" }, f.figure(s), " ", el("span", { class: "unit" }, "device-s")),
        el("td", { class: "num" }, f.percent(s / whole)),
      ),
    ),
  );
  table(model);
  state.picked = state.picked && sameNow(state.picked);
  if (state.picked) pick(state.picked, automatic);
}
function table(model) {
  const bubbles = Map.groupBy(model.bubbles, (x) => `${x.step} ${x.dev}`);
  $("timeline-table").replaceChildren(
    ...model.steps.flatMap((s) =>
      model.devices
        .map((d, dev) => [d, dev])
        .filter(([, dev]) => s.measured.has(dev))
        .map(([d, dev]) => {
          const gaps = bubbles.get(`${s.n} ${dev}`) || [];
          const idle = gaps.reduce((sum, x) => sum + x.b - x.a, 0);
          const causes = run.CAUSES.map((c) => [
            c,
            gaps.filter((x) => x.cause === c).reduce((sum, x) => sum + x.b - x.a, 0),
          ])
            .filter(([, t]) => t > 0)
            .map(([c, t]) => `${c} ${f.brief(t)}`);
          return el(
            "tr",
            {},
            el("td", { class: "num" }, s.last > s.n ? `${s.n}–${s.last}` : s.n),
            el("td", {}, d.id),
            el("td", { class: "num" }, f.brief(s.b - s.a)),
            el("td", { class: "num" }, f.percent(1 - idle / (s.b - s.a))),
            el("td", {}, causes.join(", ") || "none"),
          );
        }),
    ),
  );
}
function pick(x, byPage = false) {
  state.picked = x;
  automatic = byPage;
  document
    .querySelectorAll("#worst button")
    .forEach((b) => b.setAttribute("aria-pressed", String(state.model.worst[b.dataset.rank] === x)));
  const box = $("explain");
  box.querySelector(".swatch").dataset.idle = x.cause;
  setText(
    box.querySelector("strong"),
    `${x.cause} · ${state.model.devices[x.dev].id} idle for ${f.brief(x.b - x.a)} in ${stepsOf(x)}`,
  );
  setText(box.querySelector("p"), WHY[x.cause]);
}
/* Explain the longest gap of those that the window shows. */
function pickInWindow() {
  const [from, to] = inWindow();
  const seen = state.model.bubbles.filter((x) => x.a < view.b && x.b > view.a && x.last >= from && x.step <= to);
  if (seen.length) pick(seen.reduce((best, x) => (x.b - x.a > best.b - best.a ? x : best)), true);
}
/* The same bubble among the loaded ones. Its position depends on what is loaded, its length does not. */
function sameNow(x) {
  const alike = state.model.far
    ? []
    : state.model.bubbles.filter((y) => y.step === x.step && y.dev === x.dev && y.cause === x.cause);
  const off = (y) => Math.abs(y.b - y.a - (x.b - x.a));
  return alike.sort((y, z) => off(y) - off(z))[0];
}
async function visit(x) {
  if (x.away) {
    await go(clip(x.step - 2), clip(x.step + 1));
    const same = sameNow(x);
    return same && visit(same);
  }
  pick(x);
  const room = Math.max(2 * (x.b - x.a), 0.02 * state.model.length);
  show(x.a - room, x.b + room);
}

/* --- pointer and keyboard --------------------------------------------------------------------------------- */
function describe(item) {
  if (item.sequence) {
    const s = item.segment;
    return [
      `Sequence #${item.sequence.id}`,
      `${f.whole(s.tokens)} tokens, staleness ${s.age}, ${s.trained ? `trained in step ${s.step}` : `deferred from step ${s.step}`}`,
    ];
  }
  if (item.cause)
    return [
      `Idle, waiting for: ${item.cause}`,
      `${state.model.devices[item.dev].id}, ${stepsOf(item)}, ${f.brief(item.b - item.a)}`,
    ];
  const what = item.chunk
    ? `chunk ${item.chunk}, ${f.whole(item.rows)} rows, `
    : item.rows
      ? `${f.whole(item.rows)} rows, `
      : "";
  return [
    `${item.phase.replace("-", " ")} (${item.role})`,
    `${what}${f.brief(item.b - item.a)} on ${state.model.devices[item.dev].id}, ${stepsOf(item)}`,
  ];
}
function onMove(e) {
  const item = painter.itemAt(e.offsetX, e.offsetY);
  const was = state.hover;
  state.hover = item;
  tip.hidden = !item;
  if (item) {
    const [head, body] = describe(item);
    setText(tip.querySelector("b"), head);
    setText(tip.querySelector("span"), body);
    tip.style.left = `${Math.max(0, Math.min(e.offsetX + 14, lanes.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${lanes.offsetTop + e.offsetY + 20}px`;
  }
  if (was !== item) paint();
}
function wire() {
  let drag = null;
  lanes.addEventListener("pointerdown", (e) => {
    drag = { x: e.clientX, a: view.a, b: view.b, moved: false };
    lanes.setPointerCapture(e.pointerId);
  });
  lanes.addEventListener("pointermove", (e) => {
    if (!drag) return onMove(e);
    if (Math.abs(e.clientX - drag.x) < 3 && !drag.moved) return;
    drag.moved = true;
    follow = false;
    const by = ((drag.x - e.clientX) / (lanes.clientWidth - state.gutter)) * (drag.b - drag.a);
    show(drag.a + by, drag.b + by);
  });
  lanes.addEventListener("pointerup", (e) => {
    const item = !drag || drag.moved ? null : painter.itemAt(e.offsetX, e.offsetY);
    drag = null;
    if (item && item.cause) {
      pick(item);
      paint();
    }
  });
  lanes.addEventListener("pointercancel", () => {
    drag = null;
  });
  lanes.addEventListener("pointerleave", () => {
    state.hover = null;
    tip.hidden = true;
    paint();
  });
  lanes.addEventListener("wheel", onWheel, { passive: false });
  const withSteps = (act) => (key) => state.model && state.model.steps.length && act(key);
  const panBy = withSteps((key) => pan(key === "ArrowLeft" ? -0.2 : 0.2));
  const zoomBy = withSteps((key) => (key === "-" ? ZOOM.out() : ZOOM.in()));
  shortcut("← →", "pan the timeline", panBy, { keys: ["ArrowLeft", "ArrowRight"] });
  shortcut("+ −", "zoom the timeline", zoomBy, { keys: ["+", "=", "-"] });
  shortcut(
    "0",
    "all loaded steps",
    withSteps(() => zoomTo("all")),
  );
  timelineStrip(miniCanvas, painter, { last, at: inSteps, go, jump, paint });
  document.querySelectorAll("[data-zoom]").forEach((b) => b.addEventListener("click", () => zoomTo(b.dataset.zoom)));
  $("show-links").addEventListener("click", (e) => {
    state.links = !state.links;
    e.currentTarget.setAttribute("aria-pressed", String(state.links));
    paint();
  });
  $("follow").addEventListener("click", () => {
    follow = !follow;
    if (follow) {
      requests += 1;
      reply = null;
      refresh();
    } else range();
  });
  new ResizeObserver(paint).observe(lanes);
  T.onChange(() => {
    painter.palette();
    paint();
  });
}
function onWheel(e) {
  const sideways = e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY);
  if (!e.ctrlKey && !e.metaKey && !sideways) return;
  e.preventDefault();
  if (sideways) pan((e.deltaX || e.deltaY) / 900);
  else {
    follow = false;
    zoom(e.deltaY > 0 ? 1.18 : 0.85, painter.timeAt(e.offsetX, lanes.clientWidth));
  }
}
function jump(step) {
  const at = Math.max(2, Math.min(last(), step + 1));
  return go(at - 2, at);
}
wire();
timelineFigure(inWindow);
run.follow(refresh);
