/* Converts the API's steps (columns, as the engine wrote them) to what the timeline paints: devices with lanes, spans, bubbles,
   chunk links, deferred sequences. Times in seconds from the first loaded step; steps are placed end to end, because a resumed
   attempt restarts its clock and not every step is recorded. Zoomed out, several steps are merged. */
const FORWARD = ["score", "actor-prefill", "actor-forward"];

/* The colour of a span: the hue is the model, the shade the kind of work. */
function colourOf(phase, role) {
  if (phase === "decode" || phase.endsWith("checkpoint") || phase.startsWith("update-")) return phase;
  if (FORWARD.includes(phase)) return role === "actor" ? "actor-forward" : `${role}-prefill`;
  return phase.endsWith("-prefill") ? phase : "weight-sync";
}
function devicesOf(reply) {
  // a role that worked on a device without being announced gets a lane, too
  const worked = reply.steps.flatMap((step) => step.device.map((device, i) => `${device} ${step.role[i]}`));
  const lanes = new Set([...reply.lanes.map(([device, role]) => `${device} ${role}`), ...worked]);
  return reply.devices.map((id) => ({
    id,
    roles: [...lanes]
      .map((lane) => lane.split(" "))
      .filter(([device]) => device === id)
      .map(([, role]) => role),
  }));
}
function spansOf(step, shift, deviceIndex) {
  return step.start_s
    .map((start, i) => ({
      step: step.step,
      last: step.to_step || step.step,
      dev: deviceIndex.get(step.device[i]),
      role: step.role[i],
      phase: step.phase[i],
      colour: colourOf(step.phase[i], step.role[i]),
      a: start + shift,
      b: step.end_s[i] + shift,
      chunk: step.chunk[i],
      rows: step.rows[i],
      id: step.chunk[i] ? `${step.step}.${step.chunk[i]}` : null,
    }))
    .filter((span) => span.dev !== undefined);
}
/* The scorers' spans that prefilled a decoded chunk. */
function linksOf(spans) {
  const decoded = new Map();
  spans.forEach((s) => {
    if (s.id && s.phase === "decode" && !(decoded.has(s.id) && decoded.get(s.id).b >= s.b)) decoded.set(s.id, s);
  });
  return spans
    .filter((s) => s.id && s.phase !== "decode" && decoded.has(s.id))
    .map((s) => ({ id: s.id, from: decoded.get(s.id), to: s }));
}
function sequencesOf(steps, shifts) {
  const byId = new Map();
  steps.forEach((step, i) =>
    step.deferred.forEach((q) => {
      if (!byId.has(q.sequence_id)) byId.set(q.sequence_id, { id: q.sequence_id, segments: [] });
      byId.get(q.sequence_id).segments.push({
        step: step.step,
        a: q.start_s + shifts[i],
        b: q.end_s + shifts[i],
        age: q.age,
        tokens: q.tokens,
        trained: q.trained,
        isOld: q.age - (q.trained ? 0 : 1) > 0,
      });
    }),
  );
  return [...byId.values()].sort((p, q) => p.segments[0].a - q.segments[0].a || p.id - q.id);
}
/* For merged steps the server names the worst bubbles: their lengths are exact, their positions are fetched when selected. */
function farAway(reply, index) {
  return reply.worst
    .filter((x) => index.has(x.device))
    .map((x) => ({
      step: x.step,
      last: x.step,
      dev: index.get(x.device),
      cause: x.cause,
      a: 0,
      b: x.length_s,
      words: x.words,
      away: true,
    }));
}
export function timelineModel(reply) {
  const devices = devicesOf(reply);
  const index = new Map(devices.map((d, i) => [d.id, i]));
  const model = { devices, steps: [], spans: [], bubbles: [], links: [], sequences: [] };
  const shifts = [];
  let end = 0;
  reply.steps.forEach((step) => {
    const shift = end - step.window_s[0];
    const [from, to] = step.window_s.map((t) => t + shift);
    const spans = spansOf(step, shift, index);
    const ends = (test, pick, otherwise) =>
      spans.filter((s) => test(s.phase)).reduce((at, s) => pick(at, s), otherwise);
    const marks =
      step.merged > 1
        ? []
        : [
            ends(
              (p) => p === "decode",
              (at, s) => Math.max(at, s.b),
              from,
            ),
            ends(
              (p) => p.startsWith("update-"),
              (at, s) => Math.min(at, s.a),
              to,
            ),
          ];
    const bubbles = step.idle
      .filter(([d]) => index.has(d))
      .map(([d, cause, a, b]) => ({
        step: step.step,
        last: step.to_step || step.step,
        dev: index.get(d),
        cause,
        a: a + shift,
        b: b + shift,
      }));
    const measured = new Set([...spans, ...bubbles].map(({ dev }) => dev)); // steps of an earlier attempt have no data for newer devices
    model.steps.push({ n: step.step, last: step.to_step || step.step, a: from, b: to, marks, measured });
    model.spans.push(...spans);
    model.links.push(...linksOf(spans));
    model.bubbles.push(...bubbles);
    shifts.push(shift);
    end = to;
  });
  model.sequences = sequencesOf(reply.steps, shifts);
  const length = model.steps.reduce((sum, s) => sum + s.b - s.a, 0);
  model.idle = devices.map((_, d) => model.bubbles.filter((x) => x.dev === d).reduce((sum, x) => sum + x.b - x.a, 0));
  model.measured = devices.map((_, d) =>
    model.steps.filter((s) => s.measured.has(d)).reduce((sum, s) => sum + s.b - s.a, 0),
  );
  model.busy = model.idle.map((idle, d) => (model.measured[d] ? 1 - idle / model.measured[d] : null));
  model.worst = reply.far
    ? farAway(reply, index)
    : model.bubbles
        .slice()
        .sort((p, q) => q.b - q.a - (p.b - p.a))
        .slice(0, 10);
  model.far = Boolean(reply.far);
  model.length = length;
  return model;
}
