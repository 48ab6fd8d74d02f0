/* The menu of saved views: save the address under a name, rename, replace, set as default, delete with undo. */
import * as api from "../core/api.js";
import { setText, toast } from "../core/dom.js";

const $ = (id) => document.getElementById(id);
const menu = $("views");
const list = $("views-list");
const dialog = $("view-dialog");
const input = $("view-name");
const wrong = $("view-wrong");
const KEPT = ["show", "project", "q", "sort", "cols"];
let action = null;

const query = () =>
  Object.fromEntries([...new URLSearchParams(location.search)].filter(([name, value]) => KEPT.includes(name) && value));
function open(id) {
  const params = new URLSearchParams(query());
  params.set("view", id);
  location.assign(`?${params}`);
}
function ask(title, sure, name, whose, what) {
  action = what;
  setText($("view-title"), title);
  setText($("view-sure"), sure);
  input.value = name;
  $("view-whose").hidden = $("view-words").hidden = !whose;
  wrong.hidden = true;
  dialog.showModal();
  input.select();
}
async function carryOut() {
  try {
    await action();
  } catch (e) {
    setText(wrong, e.message);
    wrong.hidden = false;
    input.focus();
  }
}
async function save() {
  const made = await api.post("views", {
    name: input.value,
    query: query(),
    team: $("view-team").value ? Number($("view-team").value) : null,
  });
  open(made.id);
}
const ACTIONS = {
  rename: (item) =>
    ask("Rename view", "Rename", item.dataset.name, false, async () => {
      await api.post(`views/${item.dataset.id}`, { name: input.value });
      location.reload();
    }),
  async default(item, button) {
    const on = button.getAttribute("aria-pressed") !== "true";
    await api.post("views/default", { view: on ? Number(item.dataset.id) : null });
    list.querySelectorAll("[data-action=default]").forEach((other) => {
      other.setAttribute("aria-pressed", String(on && other === button));
      setText(other, on && other === button ? "★" : "☆");
    });
    toast(on ? `${item.dataset.name} is your default view` : "All runs is your default view");
  },
  async delete(item) {
    await api.post(`views/${item.dataset.id}/delete`);
    const next = item.nextElementSibling || item.previousElementSibling;
    next.querySelector("a").focus();
    item.remove();
    toast(`${item.dataset.name} deleted`, {
      label: "Undo",
      act: () =>
        guard(async () => {
          await api.post(`views/${item.dataset.id}/restore`);
          next.before(item);
          item.querySelector("a").focus();
        }),
    });
  },
};
const guard = (what) => what().catch((e) => toast(e.message));

list.addEventListener("click", (e) => {
  const button = e.target.closest("[data-action]");
  if (button) guard(async () => ACTIONS[button.dataset.action](button.closest("li"), button));
});
$("view-save").addEventListener("click", () => ask("Save view", "Save", "", true, save));
if ($("view-replace"))
  $("view-replace").addEventListener("click", (e) =>
    guard(async () => {
      const { id, name } = e.currentTarget.dataset;
      await api.post(`views/${id}`, { query: query() });
      toast(`${name} updated`);
      menu.open = false;
    }),
  );
$("view-sure").addEventListener("click", carryOut);
input.addEventListener("keydown", (e) => {
  if (e.key === "Enter") {
    e.preventDefault();
    carryOut();
  }
});
