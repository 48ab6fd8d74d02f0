/* The dialog for a run's name, tags and notes. Saves only what was changed, since others may edit the rest meanwhile. */
import * as api from "../core/api.js";
import { setText } from "../core/dom.js";
import { run } from "./store.js";

const $ = (id) => document.getElementById(id);

export function offerLabels() {
  const dialog = $("labels-dialog");
  const error = dialog.querySelector(".error");
  const [name, tags, notes] = ["label-name", "label-tags", "label-notes"].map($);
  const words = (text) => text.split(/[\s,]+/).filter(Boolean);

  async function save(event) {
    event.preventDefault();
    $("labels-save").disabled = true;
    setText(error, "");
    const before = words(tags.defaultValue);
    const now = words(tags.value);
    const add = now.filter((tag) => !before.includes(tag));
    const remove = before.filter((tag) => !now.includes(tag));
    try {
      if (name.value !== name.defaultValue) await api.post(`runs/${run.id}/rename`, { name: name.value.trim() });
      if (add.length || remove.length) await api.post(`runs/${run.id}/tags`, { add, remove });
      if (notes.value !== notes.defaultValue) await api.post(`runs/${run.id}/notes`, { text: notes.value, before: notes.defaultValue });
      location.reload(); // the server renders notes
    } catch (e) {
      setText(error, e.message);
    } finally {
      $("labels-save").disabled = false;
    }
  }
  dialog.querySelector("form").addEventListener("submit", save);
}
