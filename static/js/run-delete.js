/* Deletes the run, once it has ended. The page then shows that it is in the trash, with a button to restore it. */
(function () {
  "use strict";
  const { Oppo } = window, { run, setText } = Oppo;
  const button = document.getElementById("delete"), dialog = document.getElementById("delete-dialog");
  const sure = document.getElementById("delete-confirm");

  sure.addEventListener("click", async () => {
    sure.disabled = true;
    try {
      await Oppo.api.remove(`runs/${run.id}`);
      location.href = `/runs/${run.id}`;
    } catch (e) {
      setText(dialog.querySelector(".error"), e.message);
      sure.disabled = false;
    }
  });
  run.follow((summary) => { button.hidden = !summary.ended_at; });
})();
