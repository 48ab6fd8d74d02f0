/* Refetches parts of a page periodically, on pages without another script for them. */
(function () {
  "use strict";
  document.querySelectorAll("[data-refresh]").forEach((part) => window.Oppo.refresh(part, {}));
})();
