// The list of conversations, beside or over the talk.

import { button, part } from "./messages.js";
import { conversations, titleOf } from "./store.js";

const $ = (id) => document.getElementById(id);
const isWide = matchMedia("(min-width: 100rem)");

export class ConversationList {
  // `open` and `remove` are called with the conversation that was chosen.
  constructor(open, remove) {
    this.open = open;
    this.remove = remove;
    $("open-list").addEventListener("click", () => this.toggle($("list").hidden));
    $("list").addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      this.toggle(false);
      $("open-list").focus();
    });
    this.toggle(isWide.matches);
  }

  toggle(isShown) {
    $("list").hidden = !isShown;
    $("open-list").setAttribute("aria-expanded", String(isShown));
  }

  // Draw it anew. `current` is marked.
  show(current) {
    const items = conversations().map((each) => {
      const item = document.createElement("li");
      const isCurrent = each.id === current.id;
      const name = button(item, titleOf(each), () => {
        if (!isWide.matches) this.toggle(false);
        this.open(each);
      });
      if (isCurrent) name.setAttribute("aria-current", "true");
      const away = button(item, "×", () => this.remove(each));
      away.setAttribute("aria-label", `Delete: ${titleOf(each)}`);
      away.title = "Delete";
      return item;
    });
    $("list").firstElementChild.replaceChildren(...items);
    if (!items.length) part($("list").firstElementChild, "li", "note", "No chats are kept yet.");
  }
}
