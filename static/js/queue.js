/* The queue: rendered by the server and refreshed; arrows change the priority of one's own runs. */
(function () {
  "use strict";
  const { Oppo } = window, queue = document.getElementById("queue");
  const turn = Oppo.refresh(queue, { onState: (state) => Oppo.showConnection(document.getElementById("live"), state) });

  queue.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-priority]");
    if (!button || button.ariaDisabled === "true") return;
    const status = document.getElementById("said");
    button.ariaDisabled = "true";                        // not `disabled`, which would remove the focus
    try {
      const run = await Oppo.api.post(`runs/${button.dataset.priority}/priority`, { priority: Number(button.dataset.to) });
      status.textContent = `${run.name} has priority ${run.priority} now.`;
    } catch (e) {
      status.textContent = e.message;
    } finally {
      button.ariaDisabled = null;                        // an unchanged part is not redrawn
    }
    await turn();
  });
})();
