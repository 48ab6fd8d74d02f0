/* Buttons that copy: `data-copy="ID"` the text of an element, `data-copy-url="/api/…"` what an address returns. */
import { el, toast } from "./dom.js";

async function copy(button) {
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.value === undefined ? source.textContent : source.value);
    toast("Copied");
  } catch (e) {
    // refused, or not a secure origin: select it, so that Ctrl-C works
    select(source);
  }
}
function select(source) {
  if (source.select) source.select();
  else getSelection().selectAllChildren(source);
  toast("Selected; press Ctrl C to copy");
}
/* Copies the text of an address; where the clipboard is refused, a dialog shows the text selected. */
async function copyUrl(button) {
  const menu = button.closest("details");
  let text = null;
  if (menu) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
  try {
    const reply = await fetch(button.dataset.copyUrl);
    text = reply.ok ? await reply.text() : null;
    if (text !== null) await navigator.clipboard.writeText(text);
    toast(text === null ? "Could not be loaded. Reload the page." : "Copied");
  } catch (e) {
    if (text === null) return toast("The server does not respond. Try again.");
    const area = el("textarea", { class: "input", rows: "16", readonly: true, "aria-label": "Text to copy" });
    area.value = text;
    const box = el(
      "dialog",
      { class: "ask copied", "aria-label": button.textContent.trim(), onclose: () => box.remove() },
      area,
      el(
        "div",
        { class: "row" },
        el("button", { class: "btn push", type: "button", onclick: () => box.close() }, "Close"),
      ),
    );
    document.body.append(box);
    box.showModal();
    select(area);
  }
}
document.addEventListener("click", (e) => {
  const button = e.target.closest("[data-copy], [data-copy-url]"); // of parts that are refreshed, too
  if (button && button.dataset.copy) copy(button);
  else if (button) copyUrl(button);
});
