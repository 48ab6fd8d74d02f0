/* Header of a run: its device-hours. Fetched when its state changes; in between it grows with the devices held. */
import * as api from "../core/api.js";
import { ApiError } from "../core/api.js";
import { setText } from "../core/dom.js";
import * as f from "../core/format.js";
import { run } from "./store.js";

export function showHours() {
  const place = document.querySelector('#run [data-part="cost"]');
  let state = "";
  let usage = null;
  let at = 0;
  let requests = 0;

  function show() {
    if (!usage) return;
    const hours = usage.device_hours + (usage.devices * (Date.now() - at)) / 3600000;
    setText(place, hours ? ` · ${f.deviceTime(hours)}` : "");
  }
  async function ask() {
    const request = ++requests;
    const reply = await api.get(`runs/${run.id}/usage`);
    if (request !== requests) return; // that of an earlier state
    usage = reply;
    at = Date.now();
    show();
  }
  run.follow((summary) => {
    if (summary.state === state) return show();
    state = summary.state;
    return ask().catch((e) => {
      // the connection's status shows it; retried with the next event
      if (!(e instanceof TypeError) && !(e instanceof ApiError)) throw e;
      state = "";
    });
  });
}
