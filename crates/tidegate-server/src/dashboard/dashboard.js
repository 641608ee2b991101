"use strict";

// The colours first, so that the page is never shown in others.
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const remembered = () => {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
};
if (remembered()) root.dataset.theme = remembered();

const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

const startThemeSwitch = () => {
  const button = document.getElementById("theme");
  if (!button) return;
  const label = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("theme", root.dataset.theme);
    } catch {
      // Without storage the choice lasts as long as the page.
    }
    label();
  });
  prefersDark.addEventListener("change", label);
  label();
  button.hidden = false;
};

const keyOf = (node) => node.dataset?.key ?? node.id ?? "";

// Makes an element like another one, and keeps the nodes that both have, so that focus and selection stay.
const update = (node, next) => {
  for (const { name } of [...node.attributes]) if (!next.hasAttribute(name)) node.removeAttribute(name);
  for (const { name, value } of next.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  const keyed = new Map([...node.children].filter(keyOf).map((child) => [keyOf(child), child]));
  let place = node.firstChild;
  for (const wanted of [...next.childNodes]) {
    const key = keyOf(wanted);
    let found = key ? keyed.get(key) : place;
    if (!found || found.nodeName !== wanted.nodeName || keyOf(found) !== key) {
      node.insertBefore(document.importNode(wanted, true), place);
      continue;
    }
    if (found !== place) node.insertBefore(found, place);
    else place = place.nextSibling;
    if (found.nodeType === Node.ELEMENT_NODE) update(found, wanted);
    else if (found.data !== wanted.data) found.data = wanted.data;
  }
  while (place) {
    const rest = place.nextSibling;
    place.remove();
    place = rest;
  }
};

let isUpdating = false;

// Loads the page again and takes over its live parts.
const refresh = async () => {
  if (isUpdating) return;
  isUpdating = true;
  const connection = document.getElementById("connection");
  try {
    const reply = await fetch(location.pathname, { signal: AbortSignal.timeout(5000) });
    if (reply.redirected) return location.assign(reply.url);
    if (!reply.ok) throw new Error(reply.statusText);
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    const focused = document.activeElement;
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = page.getElementById(part.id);
      if (next) update(part, next);
    }
    if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
    if (connection.textContent !== "Live") connection.textContent = "Live";
    connection.classList.remove("lost");
  } catch {
    const lost = "Connection lost, trying again";
    if (connection.textContent !== lost) connection.textContent = lost;
    connection.classList.add("lost");
  } finally {
    isUpdating = false;
  }
};

const tell = (text, isGood) => {
  const message = document.getElementById("message");
  message.className = `message ${isGood ? "good" : "bad"}`;
  message.classList.toggle("code", text.includes("\n"));
  message.hidden = false;
  message.textContent = text;
  message.scrollIntoView({ block: "nearest" });
};

// Asks for a change, and tells the result.
const post = async (element, body) => {
  const { post: path, done, leave } = element.dataset;
  const headers = { "Content-Type": "application/json" };
  const csrf = document.querySelector("meta[name=csrf]");
  if (csrf) headers["X-Tidegate-CSRF"] = csrf.content;
  try {
    const reply = await fetch(path, { method: "POST", headers, body });
    if (reply.ok && leave) return location.assign(leave);
    const answer = await reply.json();
    const restart = answer.restart_needed?.length ? ` A restart is needed for ${answer.restart_needed.join(", ")}.` : "";
    tell(reply.ok ? done + restart : answer.message ?? answer.error, reply.ok);
  } catch (error) {
    tell(`The request has failed: ${error.message}`, false);
  }
  await refresh();
};

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button[data-post]");
  if (!button || (button.dataset.confirm && !confirm(button.dataset.confirm))) return;
  post(button, button.dataset.body ?? "{}");
});

document.addEventListener("submit", (event) => {
  if (!event.target.dataset.post) return;
  event.preventDefault();
  const given = [...new FormData(event.target)].filter(([, value]) => value.trim());
  post(event.target, JSON.stringify(Object.fromEntries(given.map(([name, value]) => [name, value.trim()]))));
});

document.addEventListener("DOMContentLoaded", () => {
  startThemeSwitch();
  const { refresh: interval } = document.getElementById("main").dataset;
  if (!interval) return;
  setInterval(() => document.hidden || refresh(), Number(interval));
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  const events = document.querySelector("[data-events]");
  if (!events) return;
  // Only a shown page has a stream: a browser has six connections to a host for all of its pages.
  let stream;
  const follow = () => {
    stream?.close();
    if (document.hidden) return;
    stream = new EventSource(`/v1/events?after=${events.dataset.events}`);
    stream.addEventListener("message", refresh);
  };
  document.addEventListener("visibilitychange", follow);
  follow();
});
