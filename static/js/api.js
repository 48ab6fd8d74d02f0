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
  async function request(method, path, body, signal) {
    const headers = { Accept: "application/json" };
    if (method !== "GET") headers["X-CSRFToken"] = document.querySelector('meta[name="csrf-token"]').content;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const reply = await fetch(ROOT + path, { method, headers, signal, credentials: "same-origin", body: body === undefined ? undefined : JSON.stringify(body) });
    const data = await read(reply);
    if (reply.status === 401) location.reload();        // signed out elsewhere: the page itself leads to the login
    if (!reply.ok) throw new ApiError(reply.status, data);
    return data;
  }
  const RETRY_MS = 3000;
  /* What could not be read is read again, unless the server has said no: a live connection may be back before the rest is, and its
     next event may be far away. */
  Oppo.again = (e, deed) => { if (!(e instanceof ApiError) || e.status >= 500) setTimeout(deed, RETRY_MS); };
  const get = (path, query, signal) => request("GET", query ? `${path}?${new URLSearchParams(query)}` : path, undefined, signal);
  /* Every item of a list, however many pages it has. */
  async function all(path) {
    const items = [];
    for (let cursor = ""; cursor !== null;) {
      const page = await get(path, cursor ? { cursor } : undefined);
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
    post: (path, body, signal) => request("POST", path, body, signal),
    remove: (path) => request("DELETE", path),
  };
})();
