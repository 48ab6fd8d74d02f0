/* The list of runs: live rows, a filter by words, and the choice of runs to compare. */
(function () {
  "use strict";
  const { Oppo } = window, { setText } = Oppo;
  const $ = (id) => document.getElementById(id);
  const rows = $("rows"), filter = $("filter"), compare = $("compare"), base = compare.getAttribute("href");

  function applyFilter() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    [...rows.children].forEach((row) => {
      row.hidden = !words.every((word) => row.dataset.words.includes(word));
      shown += !row.hidden;
    });
    $("none-match").hidden = shown > 0;
  }
  function applyChoice() {
    const ids = [...rows.querySelectorAll("input:checked")].map((box) => box.value).reverse();    // oldest first: the baseline
    const few = ids.length < 2;
    compare.setAttribute("aria-disabled", String(few));
    compare.href = few ? base : `${base}?runs=${ids.join(",")}`;
    setText($("picked"), ids.length === 0 ? "Tick two runs or more to compare them." : ids.length === 1 ? "One run ticked: tick another one." : `${ids.length} runs ticked.`);
    rows.querySelectorAll("tr").forEach((row) => row.toggleAttribute("data-picked", row.querySelector("input").checked));
  }
  filter.addEventListener("input", applyFilter);
  filter.form.addEventListener("submit", (e) => { if (document.activeElement === filter) e.preventDefault(); });
  filter.addEventListener("keydown", (e) => { if (e.key === "Escape") { filter.value = ""; applyFilter(); filter.blur(); } });
  rows.addEventListener("change", applyChoice);
  compare.addEventListener("click", (e) => { if (compare.getAttribute("aria-disabled") === "true") e.preventDefault(); });
  applyChoice();                                         // a browser keeps ticks over a reload
  Oppo.refresh(rows, { onState: (state) => Oppo.showConnection($("live"), state), onPatched: () => { applyFilter(); applyChoice(); } });
})();
