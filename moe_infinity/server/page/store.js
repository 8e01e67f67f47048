// Conversations and settings, kept in the browser's localStorage.

const CONVERSATION = "moe-infinity conversation "; // and its id: two tabs may keep two at once
const SETTINGS = "moe-infinity settings";
const TITLE_LENGTH = 60;

// {id, changed, messages}; `changed` is a time in ms.
export function newConversation() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, changed: Date.now(), messages: [] };
}

// The newest first.
export function conversations() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(CONVERSATION));
  const found = names.map(read).filter((each) => Array.isArray(each?.messages) && each.messages.length);
  return found.sort((one, other) => other.changed - one.changed);
}

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

// Returns false where the browser has no room. One without messages is not kept.
export function keep(conversation) {
  const name = CONVERSATION + conversation.id;
  try {
    if (conversation.messages.length) localStorage.setItem(name, JSON.stringify(conversation));
    else localStorage.removeItem(name);
    return true;
  } catch {
    return false;
  }
}

export function remove(conversation) {
  localStorage.removeItem(CONVERSATION + conversation.id);
}

// The first words of its first question.
export function titleOf(conversation) {
  const words = (conversation.messages[0]?.content ?? "").replace(/[*`#]+/g, "").replace(/\s+/g, " ").trim();
  if (!words) return "New chat";
  return words.length > TITLE_LENGTH ? `${words.slice(0, TITLE_LENGTH).trimEnd()}…` : words;
}

// {name: text}; those that were never set are missing.
export function settings() {
  return read(SETTINGS) ?? {};
}

export function keepSettings(values) {
  localStorage.setItem(SETTINGS, JSON.stringify(values));
}
