/* The tables of the compare page: values at the cursor, groups and runs with their time to the target, differing settings. */
import { chartOf, valueAt } from "./curves.js";
import { el, runColour, runLabel, runPattern, setText } from "../core/dom.js";
import * as f from "../core/format.js";

const SHOWN = 10;
const FIXED = 5; // columns of the values, before those of further metrics
const $ = (id) => document.getElementById(id);
const unit = (text) => {
  const at = text.lastIndexOf(" ");
  return at < 0 ? text : [text.slice(0, at), el("span", { class: "unit" }, text.slice(at))];
};
const cell = (content, more = "") => el("td", { class: `num ${more}` }, content);
const swatch = ({ colour, dash }) =>
  el("span", { class: "swatch-line", "data-run": runColour(colour), "data-pattern": dash });
const seconds = (s) => unit(s < 120 ? `${f.figure(s)} s` : f.duration(s));
const NONE = () => el("span", { class: "muted" }, "–");

/* At most ten rows, the highest rewards first; always includes the highlighted run. */
function values(v, x) {
  const { reward, kl, bubble } = v.drawn;
  const last = (c) => (c.x.length ? c.x[c.x.length - 1] : null);
  const at = (c) => valueAt(c, x === null ? last(c) : x);
  let rows = v.entries.map((entry, i) => ({ entry, i, reward: at(reward.shown[i]) }));
  if (rows.length > SHOWN) {
    rows.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    const picked = rows.findIndex((row) => row.entry.key === v.view.picked);
    rows = [...(picked >= SHOWN ? [rows[picked]] : []), ...rows].slice(0, SHOWN);
  }
  const spread = (c) => {
    const place = x === null ? last(c) : x;
    const ends = c.n && place !== null ? [c.low, c.high].map((y) => valueAt({ x: c.x, y }, place)) : [null];
    return ends.every(f.known) ? `${f.fixed(ends[0], 2)} to ${f.fixed(ends[1], 2)}` : "";
  };
  const shortened = v.entries.length > SHOWN ? `, the ${SHOWN} highest of ${v.entries.length}` : "";
  setText($("cursor-at"), (x === null ? "at the end of each curve" : `at ${v.axis.write(x)}`) + shortened);
  const head = $("values-head");
  [...head.children].slice(FIXED).forEach((node) => node.remove());
  head.append(...v.view.charts.map((key) => el("th", { class: "num metric-name", title: key }, key)));
  $("values").replaceChildren(
    ...rows.map(({ entry, i, reward: y }) =>
      el(
        "tr",
        { "data-picked": entry.key === v.view.picked },
        el(
          "td",
          {},
          el("span", { class: "row nowrap-row" }, swatch(entry), el("span", { class: "cut" }, entry.label)),
        ),
        cell(f.fixed(y, 3)),
        cell(spread(reward.shown[i]) || "–", "muted hide-narrow"),
        cell(f.fixed(at(kl.shown[i]), 3)),
        cell(f.known(at(bubble.shown[i])) ? `${f.fixed(at(bubble.shown[i]), 1)} %` : "–"),
        ...v.view.charts.map((key) => cell(f.known(at(v.drawn[chartOf(key)].shown[i])) ? f.figure(at(v.drawn[chartOf(key)].shown[i])) : "–")),
      ),
    ),
  );
}
const times = (ratio) => `${f.ratio(ratio)}×`;

function interval(ratio, most) {
  // a line from low to high, a dot at the mean, a rule at one
  const NS = "http://www.w3.org/2000/svg";
  const make = (tag, a) => {
    const n = document.createElementNS(NS, tag);
    Object.entries(a).forEach(([k, value]) => n.setAttribute(k, value));
    return n;
  };
  const at = (value) => (4 + (132 * value) / most).toFixed(1);
  const svg = make("svg", { class: "interval", viewBox: "0 0 140 18", "aria-hidden": "true" });
  svg.append(
    make("path", { class: "rule", d: `M${at(1)},1V17` }),
    make("path", { d: `M${at(ratio.low)},9H${at(ratio.high)}` }),
    make("circle", { cx: at(ratio.mean), cy: 9, r: 3.5 }),
  );
  return svg;
}
function groups(v) {
  const { groups: all, baseline } = v.reply;
  const most = 1.05 * Math.max(1, ...all.flatMap((g) => (g.speedup ? [g.speedup.high ?? g.speedup.mean] : [])));
  $("groups-card").hidden = !all.length;
  $("groups").replaceChildren(
    ...v.entries
      .filter((e) => e.group)
      .map((entry) => {
        const g = entry.group;
        const own = g.runs.includes(baseline);
        const s = g.speedup;
        const reached = !f.known(v.reply.target) ? "–" : `${g.reached} of ${g.runs.length}`;
        return el(
          "tr",
          { "data-pinned": own },
          el(
            "td",
            {},
            el(
              "span",
              { class: "row nowrap-row" },
              swatch(entry),
              el(
                "span",
                {},
                g.value,
                el("span", { class: "sub" }, `${g.runs.length} run${g.runs.length === 1 ? "" : "s"}`),
              ),
            ),
          ),
          cell(reached),
          cell(f.known(g.elapsed_s) ? seconds(g.elapsed_s) : NONE(), "hide-narrow"),
          cell(f.known(g.step) ? f.fixed(g.step, 1) : "–", "hide-narrow"),
          cell(own ? "baseline" : s ? times(s.mean) : "–", "strong"),
          el(
            "td",
            {},
            own || !s || !f.known(s.low)
              ? el("span", { class: "note" }, own || !s ? "" : "needs two runs per group")
              : el(
                  "span",
                  { class: "row nowrap-row" },
                  el("span", { class: "num" }, `${f.ratio(s.low)} to ${times(s.high)}`),
                  el("span", { class: "hide-narrow ink", "data-run": runColour(entry.colour) }, interval(s, most)),
                ),
          ),
        );
      }),
  );
}
function runs(v, { onPick }) {
  const entryOf = new Map(v.entries.flatMap((entry) => entry.ids.map((id) => [id, entry])));
  $("figures").replaceChildren(
    ...v.reply.runs.map((run) => {
      const hit = v.reply.time_to_target[run.id];
      const own = v.reply.figures[run.id];
      const speedup = v.reply.speedup[run.id];
      const base = run.id === v.reply.baseline;
      const entry = entryOf.get(run.id);
      const reached = hit
        ? seconds(hit.elapsed_s)
        : el("span", { class: "muted" }, f.known(v.reply.target) ? (run.ended_at ? "not reached" : "not yet") : "–");
      const pick = el(
        "button",
        {
          class: "pick",
          type: "button",
          "aria-pressed": String(run.id === v.view.picked),
          "aria-label": `Highlight ${runLabel(run)}`,
          title: "Highlight in the charts",
          "data-focus": `pick-${run.id}`,
          onclick: () => onPick(run.id),
        },
        swatch(entry.group ? { ...entry, dash: 0 } : entry),
      );
      return el(
        "tr",
        { "data-key": run.id, "data-pinned": base, "data-picked": run.id === v.view.picked },
        el(
          "td",
          {},
          el(
            "span",
            { class: "row nowrap-row" },
            pick,
            el(
              "span",
              {},
              el("a", { href: run.url, "data-focus": `run-${run.id}` }, runLabel(run)),
              el(
                "span",
                { class: "sub" },
                `${run.preset} · ${run.state}${run.forked_from ? ` · forked from step ${run.forked_from.step} of run ${run.forked_from.run}` : ""}${entry.group ? ` · ${entry.label}` : ""}`,
              ),
            ),
          ),
        ),
        cell(reached),
        cell(hit ? f.whole(hit.step) : "–", "hide-narrow"),
        cell(base && !entry.group ? "baseline" : f.known(speedup) ? times(speedup) : "–", "strong"),
        cell(f.known(own.step_s) ? unit(`${f.figure(own.step_s)} s`) : "–"),
        cell(f.percent(own.bubble)),
        cell(f.percent(own.occupancy), "hide-narrow"),
        cell(f.fixed(own.reward_last_tenth, 2), "hide-narrow"),
        cell(f.percent(own.deferred_share), "hide-narrow"),
        cell(f.duration(own.wall_s), "hide-narrow"),
      );
    }),
  );
}
function differences(v) {
  const { config_diff: all, runs: compared, baseline } = v.reply;
  const count = all.length;
  setText($("diff-count"), count === 0 ? "no differences" : `${count} setting${count === 1 ? " differs" : "s differ"}`);
  $("diff-head").replaceChildren(
    el("th", {}, "Setting"),
    ...compared.map((run) =>
      el(
        "th",
        {},
        el(
          "span",
          { class: "row nowrap-row" },
          swatch({ colour: v.colours.get(run.id), dash: runPattern(v.colours.get(run.id)) }),
          runLabel(run),
        ),
      ),
    ),
  );
  $("diff").replaceChildren(
    ...all.map((d) =>
      el(
        "tr",
        {},
        el("td", {}, d.path),
        ...compared.map((run) => {
          const text = d.values[run.id] ?? "–";
          return el("td", {}, text !== d.values[baseline] ? el("span", { class: "diff" }, text) : text);
        }),
      ),
    ),
  );
}
function legend(v) {
  const shown = v.many ? v.entries.filter((entry) => entry.key === v.view.picked) : v.entries;
  const rest = v.entries.length - shown.length;
  $("legend").replaceChildren(
    ...shown.map((entry) =>
      el(
        "li",
        {},
        swatch(entry),
        entry.label,
        entry.group ? el("span", { class: "muted" }, `${entry.count} run${entry.count === 1 ? "" : "s"}`) : null,
      ),
    ),
    ...(v.many
      ? [
          el(
            "li",
            { class: "muted" },
            shown.length ? `${rest} others faint` : `${rest} runs: hover over a curve, or highlight a run in the table`,
          ),
        ]
      : []),
  );
}
export { values, groups, runs, differences, legend };
