/* The JSON API of /api/v1: one function; errors are sentences. */
export const ROOT = "/api/v1/";

export class ApiError extends Error {
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
/* After a login in another tab, the cookie is newer than the page's token. */
function csrfToken() {
  const cookie = document.cookie.split("; ").find((pair) => pair.startsWith("oppo_csrf="));
  return cookie ? cookie.slice(cookie.indexOf("=") + 1) : document.querySelector('meta[name="csrf-token"]').content;
}
const TIMEOUT_MS = 60_000;
let reads = new AbortController();
/* A GET without a response in time, or after stopReads, fails with a TypeError, as if the server were unreachable. */
async function request(method, path, body, { signal, key } = {}) {
  if (method !== "GET") return send(method, path, body, { signal, key });
  const ends = [AbortSignal.timeout(TIMEOUT_MS), reads.signal];
  try {
    return await send(method, path, body, { signal: AbortSignal.any(signal ? [signal, ...ends] : ends) });
  } catch (e) {
    if (signal?.aborted || !ends.some((end) => end.aborted)) throw e;
    throw new TypeError(`No response to ${path}`);
  }
}
/* Aborts the page's pending GETs and refuses further ones, until the returned function is called. For a page whose object is
   being deleted: a read that arrives afterwards is answered with 404. A page restored by the browser's Back reads again. */
export function stopReads() {
  reads.abort();
  return allowReads;
}
function allowReads() {
  reads = new AbortController();
}
addEventListener("pageshow", ({ persisted }) => persisted && allowReads());
async function send(method, path, body, { signal, key }) {
  const headers = { Accept: "application/json" };
  if (method !== "GET") headers["X-CSRFToken"] = csrfToken();
  if (key) headers["Idempotency-Key"] = key;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const reply = await fetch(ROOT + path, {
    method,
    headers,
    signal,
    credentials: "same-origin",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const data = await read(reply);
  if (reply.status === 401) signedOut();
  if (!reply.ok) throw new ApiError(reply.status, data);
  return data;
}
/* Called when the session has ended: reloads the page, which redirects to the login. Pages with unsaved input replace it. */
let signedOut = () => location.reload();
export function onSignedOut(handler) {
  signedOut = handler;
}
const LEAVE_MS = 5000;
/* While a form signs out, requests of the page are refused, and a reload would abort the form's own navigation to the login. If
   the page is still open later, or comes back by the browser's Back, it reloads. */
document.addEventListener("submit", ({ target }) => {
  const handler = signedOut;
  if (target.matches('[action$="/logout/"]')) onSignedOut(() => setTimeout(handler, LEAVE_MS));
});
const RETRY_MS = 3000;
/* Retry a failed read, unless the server refused it: the live connection may be back before the server can answer, and its
   next event may be minutes away. Returns the timer. */
export const tryAgain = (e, read) => (!(e instanceof ApiError) || e.status >= 500 ? setTimeout(read, RETRY_MS) : 0);
export const get = (path, query, signal) =>
  request("GET", query ? `${path}?${new URLSearchParams(query)}` : path, undefined, { signal });
/* All items of a list, over all pages. */
export async function all(path, query = {}) {
  const items = [];
  for (let cursor = ""; cursor !== null;) {
    const page = await get(path, cursor ? { ...query, cursor } : query);
    items.push(...page.items);
    cursor = page.next;
  }
  return items;
}
export const post = (path, body, signal) => request("POST", path, body, { signal });
/* A POST with an idempotency key, which may be sent again if no response arrived. */
export const postOnce = (path, body, key) => request("POST", path, body, { key });
export const remove = (path) => request("DELETE", path);
