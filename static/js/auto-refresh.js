/* Parts of a page that are fetched again now and then, on pages that do nothing else with them. */
(function () {
  "use strict";
  document.querySelectorAll("[data-refresh]").forEach((part) => window.Oppo.refresh(part, {}));
})();
