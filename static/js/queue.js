/* The queue: its parts are drawn by the server and kept fresh. */
(function () {
  "use strict";
  const { Oppo } = window;
  Oppo.refresh(document.getElementById("queue"), { onState: (state) => Oppo.showConnection(document.getElementById("live"), state) });
})();
