/* Keeps all fragments of a page current that no other script of the page follows. */
import { liveFragment } from "./live-fragment.js";

document.querySelectorAll("[hx-get]").forEach((part) => liveFragment(part));
