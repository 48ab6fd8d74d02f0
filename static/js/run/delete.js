/* Deletes the run, once it has ended. The page then shows that it is in the trash, with a button to restore it. */
import * as api from "../core/api.js";
import { setText } from "../core/dom.js";
import { run } from "./store.js";

export function offerDeletion() {
  const button = document.getElementById("delete");
  const dialog = document.getElementById("delete-dialog");
  const sure = document.getElementById("delete-confirm");

  sure.addEventListener("click", async () => {
    sure.disabled = true;
    const allowReads = api.stopReads();
    try {
      await api.remove(`runs/${run.id}`);
      location.href = `/runs/${run.id}`;
    } catch (e) {
      allowReads();
      run.take(run.summary); // what was refused meanwhile is read now
      setText(dialog.querySelector(".error"), e.message);
      sure.disabled = false;
    }
  });
  run.follow((summary) => {
    button.hidden = !summary.ended_at;
  });
}
