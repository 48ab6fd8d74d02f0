/* Search hits in a text. The text is inserted as text; a hit is an element around it.
     Oppo.pieces('sea "grey sky"') → ["sea", "grey sky"]     Oppo.marked("the sea", ["sea"]) → ["the ", <mark>, ""] */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {});
  Oppo.pieces = (words) => [...(words || "").matchAll(/"([^"]+)"|(\S+)/g)].map((m) => m[1] || m[2]);
  Oppo.marked = function (text, pieces) {
    const escaped = pieces.filter(Boolean).map((piece) => piece.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    if (!escaped.length) return [text];
    return text.split(new RegExp(`(${escaped.join("|")})`, "giu")).map((part, i) => (i % 2 ? Oppo.el("mark", {}, part) : part));
  };
})();
