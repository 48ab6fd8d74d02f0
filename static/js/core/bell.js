/* The bell: number of new alerts that need attention, polled. Pages that learn of an alert earlier call `askUnread`. */
import * as api from "./api.js";
import { setText } from "./dom.js";

const BELL_MS = 30000;
const bell = document.querySelector("[data-bell]");

export function showUnread(count) {
  const badge = bell && bell.querySelector(".bell-count");
  if (!badge) return;
  badge.hidden = count === 0;
  setText(badge.querySelector("[data-count]"), count > 99 ? "99+" : String(count));
}
export async function askUnread() {
  if (!bell || document.hidden) return;
  try {
    showUnread((await api.get("alerts/unread")).unread);
  } catch (e) {
    // the page's own live connection reports an unreachable server
    if (!(e instanceof TypeError) && !(e instanceof api.ApiError)) throw e;
  }
}
if (bell) setInterval(askUnread, BELL_MS);
