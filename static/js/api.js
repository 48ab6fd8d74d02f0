/* The JSON API of /api/v1: one function, errors as sentences. */
(function () {
  "use strict";
  const Oppo = (window.Oppo = window.Oppo || {});
  const ROOT = "/api/v1/";

  class ApiError extends Error {
    constructor(status, problem) {
      super((problem && (problem.detail || problem.title)) || `The server answered ${status}.`);
      this.status = status;
      this.errors = (problem && problem.errors) || [];
    }
  }
  async function read(reply) {
    if (!(reply.headers.get("content-type") || "").includes("json")) return null;
    return reply.json();
  }
  /* The cookie's is newer than the page's after a login in another tab. */
  function csrfToken() {
    const cookie = document.cookie.split("; ").find((pair) => pair.startsWith("oppo_csrf="));
    return cookie ? cookie.slice(cookie.indexOf("=") + 1) : document.querySelector('meta[name="csrf-token"]').content;
  }
  async function request(method, path, body, { signal, key } = {}) {
    const headers = { Accept: "application/json" };
    if (method !== "GET") headers["X-CSRFToken"] = csrfToken();
    if (key) headers["Idempotency-Key"] = key;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const reply = await fetch(ROOT + path, { method, headers, signal, credentials: "same-origin", body: body === undefined ? undefined : JSON.stringify(body) });
    const data = await read(reply);
    if (reply.status === 401) Oppo.signedOut();
    if (!reply.ok) throw new ApiError(reply.status, data);
    return data;
  }
  /* Signed out elsewhere: the page itself leads to the login. A page that holds what somebody typed does otherwise. */
  Oppo.signedOut = () => location.reload();
  const RETRY_MS = 3000;
  /* What could not be read is read again, unless the server has said no: a live connection may be back before the rest is, and its
     next event may be far away. */
  Oppo.again = (e, deed) => { if (!(e instanceof ApiError) || e.status >= 500) setTimeout(deed, RETRY_MS); };
  const get = (path, query, signal) => request("GET", query ? `${path}?${new URLSearchParams(query)}` : path, undefined, { signal });
  /* Every item of a list, however many pages it has. */
  async function all(path, query = {}) {
    const items = [];
    for (let cursor = ""; cursor !== null;) {
      const page = await get(path, cursor ? { ...query, cursor } : query);
      items.push(...page.items);
      cursor = page.next;
    }
    return items;
  }
  Oppo.ApiError = ApiError;
  Oppo.api = {
    root: ROOT,
    get,
    all,
    post: (path, body, signal) => request("POST", path, body, { signal }),
    /* A POST that the server does once for each key, so that it may be sent again when no answer came. */
    postOnce: (path, body, key) => request("POST", path, body, { key }),
    remove: (path) => request("DELETE", path),
  };
})();
