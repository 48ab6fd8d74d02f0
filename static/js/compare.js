/* Compare: which runs, which axis and which target stand in the address, so that a link shows the same view. */
(function () {
  "use strict";
  const { Oppo, OppoTheme: T, Plotly } = window, { el, format: f, setText } = Oppo;
  const { KEYS, NAMES, axisOf, build } = Oppo.compareCharts;
  const LIVE_MS = 4000;
  const $ = (id) => document.getElementById(id);
  const asked = new URLSearchParams(location.search);
  let ids = [...new Set((asked.get("runs") || "").split(",").map(Number).filter((n) => Number.isInteger(n) && n > 0))];
  let axisName = ["step", "wall", "tokens", "gpu_seconds"].includes(asked.get("x")) ? asked.get("x") : "wall";
  let target = asked.get("target"), weight = 0.9, reply = null, newest = 0, timer = 0, since = new Date();
  const colours = new Map();

  /* A run keeps its own colour unless another one in view has it; then the lowest free one of the eight. */
  function giveColours() {
    colours.clear();
    ids.forEach((id) => {
      const taken = new Set(colours.values()), own = Oppo.runColour(id);
      colours.set(id, taken.has(own) ? [1, 2, 3, 4, 5, 6, 7, 8].find((c) => !taken.has(c)) || own : own);
    });
  }
  function address() {
    const query = new URLSearchParams();
    if (ids.length) query.set("runs", ids.join(","));
    query.set("x", axisName);
    if (target !== null && target !== "") query.set("target", target);
    history.replaceState(null, "", `?${query}`.replace(/%2C/g, ","));
    setText($("address"), location.href);
  }
  async function load() {
    clearTimeout(timer);
    address();
    tokens();
    $("nothing").hidden = ids.length > 1;
    if (!ids.length) { $("result").hidden = true; return; }
    const mine = ++newest, query = { runs: ids.join(","), keys: KEYS.join(","), x: axisName };
    if (target !== null && target !== "") query.target = target;
    try {
      const got = await Oppo.api.get("compare", query);
      if (mine !== newest) return;
      reply = got;
      since = new Date();
      draw();
      connection(true);
    } catch (e) {
      if (mine !== newest) return;
      if (e instanceof Oppo.ApiError) refuse(e); else connection(false);
    }
    if (reply && reply.runs.some((run) => !run.ended_at)) timer = setTimeout(() => { if (!document.hidden) load(); }, LIVE_MS);
  }
  function refuse(e) {
    $("refused").hidden = false;
    setText($("refused").querySelector("p"), e.status === 404 ? "One of these runs does not exist, or belongs to a team that you are not in. Remove it above." : e.message);
    if (!reply) $("result").hidden = true;
  }
  function connection(ok) {
    const open = !ok || (reply && reply.runs.some((run) => !run.ended_at));
    if (open) Oppo.showConnection($("live"), { ok, since }); else $("live").hidden = true;
    if (!ok) timer = setTimeout(load, LIVE_MS);
  }
  function tokens() {
    giveColours();
    const name = (id) => (reply && (reply.runs.find((r) => r.id === id) || {}).name) || ($("add").querySelector(`option[value="${id}"]`) || { textContent: `run ${id}` }).textContent.split(" · ")[0];
    $("tokens").replaceChildren(...ids.map((id) => el("span", { class: "token", "data-run": colours.get(id) }, el("b", {}, name(id)), el("button", { type: "button", "aria-label": `Remove ${name(id)}`, onclick: () => { ids = ids.filter((i) => i !== id); load(); } }, "×"))));
    [...$("add").options].forEach((option) => { option.disabled = ids.includes(Number(option.value)); });
    setText($("count"), ids.length > 1 ? `${ids.length} runs` : "");
  }
  function draw() {
    $("result").hidden = false;
    $("refused").hidden = true;
    tokens();
    const top = Math.max(0, ...Object.values(reply.series).flatMap((s) => (s[KEYS[0]] ? s[KEYS[0]].x : [])).filter(f.known));
    const v = { runs: reply.runs, series: reply.series, reached: reply.time_to_target, target: reply.target, weight, colours, axisName, axis: axisOf(axisName, top) };
    NAMES.forEach((name) => { const made = build(name, v); Plotly.react($(`plot-${name}`), made.data, made.layout, T.config); });
    $("legend").replaceChildren(...reply.runs.map((run) => el("li", {}, swatch(run), run.name)));
    figures();
    differences();
  }
  const DASH_MARK = [null, "2", "8", "8"];
  const swatch = (run) => el("span", { class: "swatch-line", "data-run": colours.get(run.id), "data-dash": DASH_MARK[reply.runs.findIndex((r) => r.id === run.id) % 4] });
  const unit = (text) => { const at = text.lastIndexOf(" "); return at < 0 ? text : [text.slice(0, at), el("span", { class: "unit" }, text.slice(at))]; };

  function figures() {
    setText($("target-now"), f.known(reply.target) ? f.figure(reply.target) : "");
    if (document.activeElement !== $("target")) $("target").value = f.known(reply.target) ? String(reply.target) : "";
    const cell = (content, more = "") => el("td", { class: `num ${more}` }, content);
    $("figures").replaceChildren(...reply.runs.map((run, k) => {
      const hit = reply.time_to_target[run.id], own = reply.figures[run.id], speedup = reply.speedup[run.id];
      const reached = hit ? unit(hit.elapsed_s < 120 ? `${f.figure(hit.elapsed_s)} s` : f.duration(hit.elapsed_s)) : el("span", { class: "muted" }, f.known(reply.target) ? (run.ended_at ? "not reached" : "not yet") : "–");
      return el("tr", k === 0 ? { "data-pinned": true } : {},
        el("td", {}, el("span", { class: "row" }, swatch(run), el("span", {}, el("a", { href: run.url }, run.name), el("span", { class: "sub" }, `${run.preset} · ${run.state}`)))),
        cell(reached), cell(hit ? f.whole(hit.step) : "–", "hide-narrow"), cell(k === 0 ? "baseline" : f.known(speedup) ? `${speedup.toFixed(2)}×` : "–", "strong"),
        cell(f.known(own.step_s) ? unit(`${f.figure(own.step_s)} s`) : "–"), cell(f.percent(own.bubble)), cell(f.percent(own.occupancy), "hide-narrow"), cell(f.fixed(own.reward_last_tenth, 2), "hide-narrow"), cell(f.percent(own.deferred_share), "hide-narrow"), cell(f.duration(own.wall_s), "hide-narrow"));
    }));
  }
  function differences() {
    const count = reply.config_diff.length, base = reply.runs[0];
    setText($("diff-count"), count === 0 ? "no setting differs" : `${count} setting${count === 1 ? " differs" : "s differ"}`);
    $("diff-head").replaceChildren(el("th", {}, "Setting"), ...reply.runs.map((run) => el("th", {}, el("span", { class: "row" }, swatch(run), run.name))));
    $("diff").replaceChildren(...reply.config_diff.map((d) => el("tr", {}, el("td", {}, d.path), ...reply.runs.map((run) => {
      const text = d.values[run.id] ?? "–";
      return el("td", {}, base && text !== d.values[base.id] ? el("span", { class: "diff" }, text) : text);
    }))));
  }
  function setSmoothing() {
    weight = Number($("smoothing").value);
    setText($("smoothing-value"), weight.toFixed(2));
    if (reply) draw();
  }
  $("add").addEventListener("change", (e) => { const id = Number(e.target.value); e.target.value = ""; if (id && !ids.includes(id)) { ids.push(id); load(); } });
  document.querySelectorAll("[data-axis]").forEach((b) => {
    b.setAttribute("aria-pressed", String(b.dataset.axis === axisName));
    b.addEventListener("click", () => { axisName = b.dataset.axis; document.querySelectorAll("[data-axis]").forEach((q) => q.setAttribute("aria-pressed", String(q === b))); load(); });
  });
  $("target").addEventListener("change", (e) => {
    const text = e.target.value.trim().replace(",", ".").replace("−", "-");
    const bad = text !== "" && !Number.isFinite(Number(text));
    e.target.toggleAttribute("aria-invalid", false);
    if (bad) { e.target.setAttribute("aria-invalid", "true"); return; }
    target = text;
    load();
  });
  $("smoothing").value = weight;
  $("smoothing").addEventListener("input", setSmoothing);
  setText($("smoothing-value"), weight.toFixed(2));
  document.addEventListener("visibilitychange", () => { if (!document.hidden && ids.length) load(); });
  T.onChange(() => { if (reply) draw(); });
  load();
})();
