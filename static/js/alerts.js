/* The list of alerts: live rows and acknowledging. Opening its newest page marks all alerts as seen. */
import * as api from "./core/api.js";
import { ApiError } from "./core/api.js";
import { setText } from "./core/dom.js";
import { showConnection } from "./core/live.js";
import { liveFragment } from "./core/live-fragment.js";
import { showUnread } from "./core/bell.js";

const $ = (id) => document.getElementById(id);
const rows = $("rows");
const newest = !new URLSearchParams(location.search).has("cursor");
let seen = 0;

async function attempt(request) {
  try {
    await request();
    $("refused").hidden = true;
  } catch (e) {
    if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
    $("refused").hidden = false;
    setText($("refused"), e instanceof ApiError ? e.message : "The server cannot be reached. Try again.");
  }
}
function look() {
  $("none").hidden = rows.children.length > 0;
  $("found").hidden = rows.children.length === 0;
  const first = rows.firstElementChild && Number(rows.firstElementChild.dataset.key);
  if (newest && !document.hidden && first > seen) {
    seen = first;
    attempt(async () => showUnread((await api.post("alerts/seen", { up_to: first })).unread));
  }
}
rows.addEventListener("click", (e) => {
  const button = e.target.closest("[data-acknowledge]");
  if (button)
    attempt(async () => {
      await api.post(`alerts/${button.dataset.acknowledge}/acknowledge`);
      turn();
    });
});
const turn = liveFragment(rows, { onState: (state) => showConnection($("live"), state), onSwapped: look });
document.addEventListener("visibilitychange", look);
look();
