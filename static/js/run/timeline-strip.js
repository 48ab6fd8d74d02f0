/* The strip of the whole run above the lanes: drag the window, its edges, or a new one; by keyboard arrows move and + − zoom.
   While the window moves only the strip is redrawn; lanes follow when it stops, so nothing is fetched in between. */
const EDGE = 7;
const REST_MS = 160;

/* `acts`: last() steps trained, at() the window as [from, to] in steps trained, go(from, to), jump(step), paint(). */
export function timelineStrip(canvas, painter, acts) {
  const { state } = painter;
  let drag = null;
  let timer = 0;
  const clip = (p) => Math.max(0, Math.min(acts.last(), p));
  const at = () => state.ghost || acts.at();
  function moved([from, to], by) {
    // same width, within the run
    const shift = Math.max(-from, Math.min(acts.last() - to, by));
    return [from + shift, to + shift];
  }
  function ghost(window_) {
    state.ghost = window_;
    acts.paint();
  }
  /* Until the lanes are loaded, the next key continues from the position of the last one. */
  async function rest() {
    const window_ = state.ghost;
    clearTimeout(timer);
    timer = 0;
    if (!window_) return;
    await acts.go(...window_);
    if (state.ghost === window_) ghost(null);
  }
  function begin(e) {
    if (!acts.last()) return;
    const window_ = at();
    const [a, b] = window_.map(painter.stripX);
    const x = e.offsetX;
    const wide = b - a > 3 * EDGE;
    const free = window_[1] - window_[0] < acts.last() - 0.01; // the whole run cannot be moved: a drag draws a part of it
    const part =
      wide && Math.abs(x - a) <= EDGE
        ? "from"
        : wide && Math.abs(x - b) <= EDGE
          ? "to"
          : free && x >= a && x <= Math.max(b, a + 8)
            ? "all"
            : "new";
    drag = { x, part, window: window_, p: clip(painter.stripStep(x)), moved: false };
    canvas.setPointerCapture(e.pointerId);
  }
  function move(e) {
    if (!drag || (!drag.moved && Math.abs(e.offsetX - drag.x) < 3)) return;
    drag.moved = true;
    const p = clip(painter.stripStep(e.offsetX));
    const [from, to] = drag.window;
    if (drag.part === "all") return ghost(moved(drag.window, p - drag.p));
    const [one, other] = { from: [p, to], to: [from, p], new: [drag.p, p] }[drag.part];
    const low = Math.min(one, other, acts.last() - 1);
    ghost([Math.max(0, low), Math.max(one, other, low + 1)]);
  }
  function end(e) {
    const was = drag;
    drag = null;
    if (was && was.moved) rest();
    else if (was && e.type === "pointerup") acts.jump(Math.floor(was.p) + 1);
  }
  function onKey(e) {
    if (e.ctrlKey || e.metaKey || e.altKey || !acts.last()) return;
    const window_ = at();
    const [from, to] = window_;
    const wide = to - from;
    const last = acts.last();
    const scaled = (by) => {
      const half = Math.max(0.5, (wide * by) / 2);
      const mid = (from + to) / 2;
      return moved(
        [mid - half, mid + half].map((p, i, all) => (2 * half >= last ? [0, last][i] : all[i])),
        0,
      );
    };
    const step = Math.max(1, wide / 4);
    const act = {
      ArrowLeft: () => moved(window_, -step),
      ArrowRight: () => moved(window_, step),
      PageUp: () => moved(window_, -wide),
      PageDown: () => moved(window_, wide),
      Home: () => moved(window_, -last),
      End: () => moved(window_, last),
      "+": () => scaled(0.5),
      "=": () => scaled(0.5),
      "-": () => scaled(2),
      0: () => [0, last],
    }[e.key];
    if (!act) return;
    e.preventDefault();
    ghost(act());
    clearTimeout(timer);
    timer = setTimeout(rest, REST_MS);
  }
  canvas.addEventListener("pointerdown", begin);
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("keydown", onKey);
}
