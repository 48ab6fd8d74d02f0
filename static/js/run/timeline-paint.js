/* Paints the timeline on two canvases: lanes and minimap. Only the window is drawn, so the whole trace and one chunk cost the
   same. Canvas, because thousands of spans as DOM nodes are too slow; the table below it is the accessible equivalent. */
import * as T from "../charts/plotly-theme.js";
import { brief } from "../core/format.js";

const RULER = 26;
const ROW = 30;
const GAP = 8;
const SEQ = 14;
const SEQ_ROWS = 9;
const WORDS = {
  "update-actor": "update actor",
  "update-critic": "update critic",
  "actor-forward": "actor forward",
  weights: "weights",
  checkpoint: "checkpoint",
  advantages: "advantages",
  score: "score",
  eval: "eval",
  data: "data",
};

export function timelinePainter(lanesCanvas, miniCanvas) {
  const view = { a: 0, b: 1 };
  const state = {
    model: null,
    run: null,
    hover: null,
    picked: null,
    ghost: null,
    laneAt: new Map(),
    links: true,
    boxes: [],
    lanes: [],
    bottom: 0,
    seqTop: 0,
    rows: [],
    gutter: 132,
  };
  let colors = {};
  let hatches = {};

  /* --- geometry ------------------------------------------------------------------------------------ */
  function setModel(model) {
    state.model = model;
    state.lanes = [];
    let y = RULER + 4;
    model.devices.forEach((device, dev) => {
      device.top = y;
      device.roles.forEach((role) => {
        state.lanes.push({ dev, role, y });
        y += ROW;
      });
      device.bottom = y;
      y += GAP;
    });
    state.bottom = y;
    state.laneAt = new Map(state.lanes.map((l) => [`${l.dev} ${l.role}`, l]));
    state.seqTop = y + 18;
    placeSequences(model);
    lanesCanvas.style.height = `${state.seqTop + Math.max(2, Math.min(SEQ_ROWS, state.depth)) * SEQ + 2}px`;
  }
  function placeSequences(model) {
    const until = [];
    state.rows = model.sequences.map((q) => {
      let row = until.findIndex((t) => t <= q.segments[0].a + 0.001);
      if (row < 0) row = until.length;
      until[row] = q.segments[q.segments.length - 1].b;
      return { q, row };
    });
    state.depth = until.length;
    state.rows = state.rows.filter((x) => x.row < SEQ_ROWS);
  }
  const laneOf = (dev, role) => state.laneAt.get(`${dev} ${role}`);
  const X = (t, w) => state.gutter + ((t - view.a) / (view.b - view.a)) * (w - state.gutter);
  const timeAt = (px, w) => view.a + ((px - state.gutter) / (w - state.gutter)) * (view.b - view.a);

  /* --- paint --------------------------------------------------------------------------------------- */
  function palette() {
    const pick = (names, f) => Object.fromEntries(names.map((n) => [n, f(n)]));
    colors = {
      phase: pick(T.PHASES, T.phase),
      idle: pick(T.IDLE, T.idle),
      text: T.css("--text"),
      text2: T.css("--text-2"),
      text3: T.css("--text-3"),
      line: T.css("--border"),
      surface: T.css("--surface"),
      well: T.css("--surface-2"),
      accent: T.css("--accent"),
    };
    colors.ink = pick(T.PHASES, (n) => inkOn(colors.phase[n]));
    hatches = pick(T.IDLE, (n) => hatch(colors.idle[n], n));
  }
  function inkOn(color) {
    const [r, g, b] = color
      .match(/[\d.]+/g)
      .map(Number)
      .map((c) => ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.18 ? "#fff" : "#10131a";
  }
  function hatch(color, cause) {
    // a second, colour-free cue: each cause has its own angle
    const s = document.createElement("canvas");
    s.width = s.height = 12;
    const g = s.getContext("2d");
    const kind = T.HATCH[cause];
    const line = (x1, y1, x2, y2) => {
      g.moveTo(x1, y1);
      g.lineTo(x2, y2);
    };
    g.strokeStyle = color;
    g.lineWidth = 1.7;
    g.beginPath();
    if ("/x".includes(kind)) [-12, -6, 0, 6, 12].forEach((o) => line(o, 12, o + 12, 0));
    if ("\\x".includes(kind)) [-12, -6, 0, 6, 12].forEach((o) => line(o, 0, o + 12, 12));
    if ("-+".includes(kind)) [3, 9].forEach((o) => line(0, o, 12, o));
    if ("|+".includes(kind)) [3, 9].forEach((o) => line(o, 0, o, 12));
    if (kind === ".")
      [
        [3, 3],
        [9, 9],
      ].forEach(([x, y]) => line(x, y, x + 1.5, y));
    g.stroke();
    return s;
  }
  function fit(canvas) {
    const ratio = window.devicePixelRatio || 1;
    const w = canvas.clientWidth;
    const h = canvas.clientHeight;
    if (canvas.width !== Math.round(w * ratio)) canvas.width = Math.round(w * ratio);
    if (canvas.height !== Math.round(h * ratio)) canvas.height = Math.round(h * ratio);
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, w, h);
    g.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    g.textBaseline = "middle";
    return { g, w, h };
  }
  function draw() {
    if (!state.model) return;
    const { g, w, h } = fit(lanesCanvas);
    state.gutter = w < 520 ? 84 : 132;
    state.boxes = [];
    g.save();
    g.beginPath();
    g.rect(state.gutter, 0, w - state.gutter, h);
    g.clip();
    tracks(g, w);
    steps(g, w, h);
    bubbles(g, w);
    spans(g, w);
    if (state.links) links(g, w);
    sequences(g, w);
    newest(g, w, h);
    g.restore();
    gutter(g, w, h);
    mini();
  }
  function tracks(g, w) {
    // an empty lane: the role waits while its device does other work
    g.fillStyle = T.fade(colors.well, 0.65);
    state.lanes.forEach((l) => g.fillRect(state.gutter, l.y + 3, w, ROW - 6));
  }
  function steps(g, w, h) {
    state.model.steps.forEach((s) => {
      const a = X(s.a, w);
      const b = X(s.b, w);
      if (b < state.gutter || a > w) return;
      g.fillStyle = colors.line;
      g.fillRect(Math.round(a), 0, 1, h);
      g.fillStyle = colors.text2;
      g.textAlign = "left";
      const from = Math.max(a, state.gutter) + 6;
      const name = s.last > s.n ? `steps ${s.n}–${s.last}` : `step ${s.n}`;
      const words = [`${name} · ${brief(s.b - s.a)}`, name, `${s.n}`].find(
        (t) => b - from > g.measureText(t).width + 4,
      );
      if (words) g.fillText(words, from, 13);
      if (b - a < 64) return;
      s.marks.forEach((t, i) => {
        const x = X(t, w);
        const word = i ? "" : "batch full";
        g.strokeStyle = colors.line;
        g.setLineDash([2, 3]);
        g.beginPath();
        g.moveTo(x, word ? 18 : RULER);
        g.lineTo(x, state.bottom);
        g.stroke();
        g.setLineDash([]);
        if (word && b - a > 300 && x - from > 150) {
          g.fillStyle = colors.text3;
          g.textAlign = "center";
          g.fillText(word, x, 13);
        }
      });
    });
    g.fillStyle = colors.line;
    g.fillRect(state.gutter, RULER - 1, w, 1);
  }
  function bubbles(g, w) {
    const patterns = {};
    state.model.bubbles.forEach((x) => {
      const d = state.model.devices[x.dev];
      const a = X(x.a, w);
      const b = X(x.b, w);
      if (b < state.gutter || a > w) return;
      const y = d.top + 2;
      const tall = d.bottom - d.top - 4;
      const wide = Math.max(1, b - a);
      g.save();
      g.translate(Math.round(a), y);
      g.fillStyle = T.fade(colors.idle[x.cause], 0.1);
      g.fillRect(0, 0, wide, tall);
      g.globalAlpha = wide < 5 ? 0.35 : 0.8;
      g.fillStyle =
        wide < 5 ? colors.idle[x.cause] : (patterns[x.cause] ||= g.createPattern(hatches[x.cause], "repeat"));
      g.fillRect(0, 0, wide, tall);
      g.restore();
      if (x === state.picked || x === state.hover) {
        g.strokeStyle = colors.text;
        g.lineWidth = 2;
        g.strokeRect(a, y, wide, tall);
        g.lineWidth = 1;
      }
      chip(g, a, wide, y + tall / 2, x);
      state.boxes.push({ a, b, y, h: tall, item: x });
    });
  }
  function chip(g, a, wide, y, bubble) {
    // the longest text that fits
    const words = [`${bubble.cause} ${brief(bubble.b - bubble.a)}`, bubble.cause].find(
      (t) => g.measureText(t).width + 12 <= wide,
    );
    if (!words) return;
    const w = g.measureText(words).width + 8;
    const x = a + wide / 2;
    g.fillStyle = colors.surface;
    g.fillRect(x - w / 2, y - 8, w, 16);
    g.fillStyle = colors.idle[bubble.cause];
    g.textAlign = "center";
    g.fillText(words, x, y + 0.5);
  }
  function spans(g, w) {
    state.model.spans.forEach((s) => {
      const a = X(s.a, w);
      const b = X(s.b, w);
      const lane = laneOf(s.dev, s.role);
      if (b < state.gutter || a > w || !lane) return;
      const y = lane.y + 3;
      const tall = ROW - 6;
      const wide = Math.max(1.2, b - a - (b - a > 6 ? 1 : 0));
      g.globalAlpha = state.hover && state.hover.id && s.id !== state.hover.id ? 0.4 : 1;
      g.fillStyle = colors.surface;
      g.fillRect(a, y, wide, tall);
      g.fillStyle = colors.phase[s.colour];
      if (wide < 3) g.fillRect(a, y, wide, tall);
      else {
        g.beginPath();
        g.roundRect(a, y, wide, tall, Math.min(3, wide / 3));
        g.fill();
        label(g, s, a, wide, y + tall / 2);
      }
      g.globalAlpha = 1;
      state.boxes.push({ a, b, y, h: tall, item: s });
    });
  }
  function label(g, s, a, wide, y) {
    const left = Math.max(a, state.gutter);
    const room = a + wide - left - 8;
    const word = WORDS[s.phase] || s.phase.replace("-", " ");
    if (room < 5) return;
    const options = s.chunk
      ? [`chunk ${s.chunk} · ${s.rows} rows`, `${s.chunk} · ${s.rows}`, `${s.chunk}`]
      : [`${word} ${brief(s.b - s.a)}`, word];
    const words = options.find((o) => g.measureText(o).width <= room);
    if (!words) return;
    g.fillStyle = colors.ink[s.colour];
    g.textAlign = "left";
    g.fillText(words, left + 4, y + 0.5);
  }
  function links(g, w) {
    const shown = state.model.links.filter((l) => X(l.to.a, w) >= state.gutter && X(l.from.b, w) <= w);
    shown.forEach((l) => {
      const on = state.hover && state.hover.id === l.id;
      if (shown.length > 160 && !on) return;
      const from = laneOf(l.from.dev, l.from.role);
      const to = laneOf(l.to.dev, l.to.role);
      if (!from || !to) return;
      const x1 = X(l.from.b, w);
      const x2 = X(l.to.a, w);
      const y1 = from.y + ROW - 3;
      const y2 = to.y + ROW / 2;
      const pull = Math.max(8, (x2 - x1) / 2);
      g.strokeStyle = on ? colors.text : T.fade(colors.text2, state.hover && state.hover.id ? 0.1 : 0.32);
      g.lineWidth = on ? 2 : 1;
      g.beginPath();
      g.moveTo(x1, y1);
      g.bezierCurveTo(x1 + pull, y1, x2 - pull, y2, x2, y2);
      g.stroke();
      g.lineWidth = 1;
      g.fillStyle = g.strokeStyle;
      g.beginPath();
      g.arc(x2, y2, on ? 3 : 2, 0, 7);
      g.fill();
    });
  }
  function sequences(g, w) {
    g.fillStyle = colors.line;
    g.fillRect(state.gutter, state.seqTop - 10, w, 1);
    const perSecond = (w - state.gutter) / (view.b - view.a);
    const deep = colors.phase["update-actor"];
    state.rows.forEach(({ q, row }) => {
      const y = state.seqTop + row * SEQ;
      const last = q.segments[q.segments.length - 1];
      q.segments.forEach((s, i) => {
        const a = X(s.a, w);
        const b = X(s.b, w);
        const before = q.segments[i - 1];
        if (before) {
          g.strokeStyle = deep;
          g.lineWidth = 1.5;
          g.setLineDash([3, 3]);
          g.beginPath();
          g.moveTo(X(before.b, w), y);
          g.lineTo(a, y);
          g.stroke();
          g.setLineDash([]);
          g.lineWidth = 1;
        }
        g.fillStyle = s.isOld ? deep : colors.phase.decode;
        g.fillRect(a, y - 3, Math.max(1.5, b - a), 6);
        state.boxes.push({ a, b, y: y - 5, h: 10, item: { sequence: q, segment: s, a: s.a, b: s.b } });
      });
      if (last.trained) {
        g.fillStyle = deep;
        g.beginPath();
        g.arc(X(last.b, w), y, 4.5, 0, 7);
        g.fill();
      }
      const x = X(last.b, w) + 8;
      const words = `#${q.id} · ${last.tokens} tok`;
      const next = state.rows.find((o) => o.row === row && o.q !== q && o.q.segments[0].a >= last.a);
      const room = (next ? X(next.q.segments[0].a, w) : w) - x;
      if (perSecond > 1 && x < w && room > g.measureText(words).width + 6) {
        g.fillStyle = colors.text3;
        g.textAlign = "left";
        g.fillText(words, x, y + 0.5);
      }
    });
  }
  function newest(g, w, h) {
    const all = state.model.steps;
    const x = all.length ? X(all[all.length - 1].b, w) : w;
    if (x > w) return;
    g.fillStyle = T.fade(colors.well, 0.75);
    g.fillRect(x, RULER, w - x, h);
    g.fillStyle = colors.accent;
    g.fillRect(x, 0, 2, h);
  }
  function gutter(g, w, h) {
    g.fillStyle = colors.surface;
    g.fillRect(0, 0, state.gutter, h);
    g.fillStyle = colors.line;
    g.fillRect(state.gutter - 1, 0, 1, h);
    const narrow = state.gutter < 100;
    const left = narrow ? 10 : 16;
    const plain = g.font;
    state.model.devices.forEach((d, i) => {
      const y = d.top + ROW / 2;
      const share = state.model.busy[i];
      g.textAlign = "left";
      g.fillStyle = colors.text;
      g.font = `600 ${plain}`;
      g.fillText(d.id, left, y - 6);
      g.font = plain;
      g.fillStyle = colors.text3;
      g.fillText(narrow ? d.roles[0] || "" : share === null ? "" : `${Math.round(100 * share)} % busy`, left, y + 8);
      g.textAlign = "right";
      d.roles.forEach((r, k) => {
        if (!narrow || k) g.fillText(r === "reference" ? "ref" : r, state.gutter - 10, d.top + ROW * (k + 0.5));
      });
      if (i) {
        g.fillStyle = colors.line;
        g.fillRect(0, d.top - GAP / 2, w, 1);
      }
    });
    g.fillStyle = colors.text;
    g.textAlign = "left";
    g.fillText("Deferred", left, state.seqTop + 4);
    g.fillStyle = colors.text3;
    g.fillText(
      state.model.far ? "zoom in" : state.depth > SEQ_ROWS ? `${SEQ_ROWS} of ${state.depth} rows` : "sequences",
      left,
      state.seqTop + 19,
    );
  }

  /* --- minimap: bubble share of every step of the run, and the window ------------------------------- */
  function mini() {
    const { g, w, h } = fit(miniCanvas);
    const run = state.run;
    const narrow = state.gutter < 100;
    g.textAlign = "left";
    g.fillStyle = colors.text3;
    g.fillText("Whole run", narrow ? 10 : 16, 18);
    g.fillText("bubble, %", narrow ? 10 : 16, 34);
    if (!run || !run.total) return;
    const px = (w - state.gutter) / run.total;
    const base = h - 4;
    const top = Math.max(10, ...run.bubble);
    const scale = (h - 12) / top;
    g.fillStyle = colors.well;
    g.fillRect(state.gutter + run.last * px, 0, w, h);
    run.step.forEach((s, i) => {
      let y = base;
      const wide = Math.max(px * (i + 1 < run.step.length ? run.step[i + 1] - s : 1), 1);
      run.causes.forEach((cause) => {
        const v = run.shares[cause][i] * scale;
        g.fillStyle = T.fade(colors.idle[cause], 0.75);
        g.fillRect(state.gutter + (s - 1) * px, y - v, wide, v);
        y -= v;
      });
    });
    if (run.total - run.last > 0.25 * run.total) {
      g.fillStyle = colors.text3;
      g.textAlign = "center";
      g.fillText(run.over ? "not trained" : "not trained yet", state.gutter + ((run.last + run.total) / 2) * px, h / 2);
    }
    const [a, b] = (state.ghost || [stepAt(view.a), stepAt(view.b)]).map(stripX);
    const wide = Math.max(8, b - a);
    g.fillStyle = T.fade(colors.accent, 0.22);
    g.fillRect(a, 0, wide, h);
    g.strokeStyle = colors.accent;
    g.lineWidth = 2;
    g.strokeRect(a, 1, wide, h - 2);
    g.lineWidth = 1;
  }
  function stepAt(t) {
    // as a number of steps trained, with fractions
    const all = state.model.steps;
    const s = all.find((q) => t < q.b) || all[all.length - 1];
    return s ? s.n - 1 + (s.last - s.n + 1) * Math.max(0, Math.min(1, (t - s.a) / (s.b - s.a))) : 0;
  }
  function timeAtStep(p) {
    // the inverse; outside the loaded steps, the nearest end
    const all = state.model.steps;
    const s = all.find((q) => p < q.last) || all[all.length - 1];
    return s ? s.a + (s.b - s.a) * Math.max(0, Math.min(1, (p - s.n + 1) / (s.last - s.n + 1))) : 0;
  }
  const stripScale = () => (miniCanvas.clientWidth - state.gutter) / ((state.run && state.run.total) || 1);
  const stripX = (p) => state.gutter + p * stripScale();
  const stripStep = (px) => (px - state.gutter) / stripScale();
  function itemAt(x, y) {
    for (let i = state.boxes.length - 1; i >= 0; i--) {
      const b = state.boxes[i];
      if (x >= Math.max(b.a, state.gutter) - 1 && x <= b.b + 1 && y >= b.y && y <= b.y + b.h) return b.item;
    }
    return null;
  }
  palette();
  return { view, state, setModel, draw, palette, timeAt, stepAt, timeAtStep, stripX, stripStep, itemAt };
}
