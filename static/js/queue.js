/* The queue: rendered by the server and refreshed; arrows change the priority of one's own runs. */
import * as api from "./core/api.js";
import { runLabel } from "./core/dom.js";
import { showConnection } from "./core/live.js";
import { liveFragment } from "./core/live-fragment.js";

const queue = document.getElementById("queue");
const join = document.querySelector("details#join");
if (join && location.hash === "#join") join.open = true;
const inFlight = new Set(); // runs whose priority is being changed
const turn = liveFragment(queue, { onState: (state) => showConnection(document.getElementById("live"), state) });

queue.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-priority]");
  if (!button || button.ariaDisabled === "true" || inFlight.has(button.dataset.priority)) return;
  const status = document.getElementById("said");
  const id = button.dataset.priority;
  inFlight.add(id);
  button.ariaDisabled = "true"; // not `disabled`, which would remove the focus
  try {
    const run = await api.post(`runs/${id}/priority`, { priority: Number(button.dataset.to) });
    status.textContent = `${runLabel(run)} has priority ${run.priority} now.`;
  } catch (e) {
    status.textContent = e.message;
  } finally {
    inFlight.delete(id);
    button.ariaDisabled = null; // an unchanged part is not redrawn
  }
  await turn();
});
