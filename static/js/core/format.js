/* Number formats of the design. The page templates have the same rules in pages/templatetags/oppo_format.py. */
const known = (x) => typeof x === "number" && Number.isFinite(x);
const NONE = "–";

const whole = (x) => (known(x) ? Math.round(x).toLocaleString("en-US").replace("-", "−") : NONE);
const fixed = (x, digits) => (known(x) ? x.toFixed(digits).replace("-", "−") : NONE);
const percent = (share, digits = 1) => (known(share) ? `${(100 * share).toFixed(digits)} %` : NONE);

/* Three significant digits: 0.00123, 0.123, 1.23, 12.3, 123, 1,234. */
function figure(x) {
  if (!known(x)) return NONE;
  if (x === 0) return "0";
  const size = Number(Math.abs(x).toPrecision(3)); // 9.999 is 10.0
  if (size >= 1e6 || size < 1e-4) return x.toExponential(1).replace("-", "−").replace("e−", "e-").replace("e+", "e");
  return size >= 1000 ? whole(x) : fixed(x, Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(size)))));
}
/* A setting as entered: 4, not 4.00. */
const plain = (x) => (Number.isInteger(x) ? whole(x) : figure(x));
/* 3.4 s, 48 s, 6 m 40 s, 2 h 13 m, 3 d 4 h */
function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} m`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}
/* 1.42, or 0.00195: never 0.00. */
const ratio = (x) => (x < 0.1 ? figure(x) : x.toFixed(2));
/* Below a label "Device-hours": 3.2; few as a duration, 1.4 s or 3 m 20 s. */
const deviceHours = (hours) => (known(hours) && hours < 0.1 ? duration(3600 * hours) : figure(hours));
/* Time on devices: 3.2 device-hours; shorter ones as a duration, 1.4 s or 3 m 20 s of device time. */
const deviceTime = (hours) =>
  `${deviceHours(hours)} ${hours >= 0.1 ? "device-hours" : "of device time"}`;
/* A duration within a step: 76 ms, 1.75 s. */
const brief = (seconds) =>
  !known(seconds) ? NONE : seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${figure(seconds)} s`;
/* 71.8 GiB, 310 MiB, 12 KiB: three significant digits. */
function bytes(count) {
  if (!known(count)) return NONE;
  const [unit, one] = [
    ["TiB", 2 ** 40],
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
  ].find(([, size]) => count >= 0.9995 * size) || ["bytes", 1];
  return `${figure(count / one)} ${unit}`;
}
const two = (n) => String(n).padStart(2, "0");
const clock = (date) => `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
function when(date) {
  const hm = `${two(date.getHours())}:${two(date.getMinutes())}`;
  if (date.toDateString() === new Date().toDateString()) return hm;
  const day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return date.getFullYear() === new Date().getFullYear() ? `${day}, ${hm}` : `${day} ${date.getFullYear()}`;
}
/* Templates write UTC into <time>; the page shows the browser's time zone, and UTC on hover. */
function times(root) {
  root.querySelectorAll("time[datetime]:not([data-local])").forEach((node) => {
    const date = new Date(node.dateTime);
    if (Number.isNaN(date.getTime())) return;
    node.title = node.textContent;
    node.textContent = node.dataset.as === "clock" ? clock(date) : when(date);
    node.dataset.local = "";
  });
}
export { known, NONE, whole, fixed, percent, figure, plain, duration, deviceHours, deviceTime, ratio, brief, bytes, clock, when, times };
