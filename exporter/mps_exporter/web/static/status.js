// Keeps the page up to date. The event stream says when something happened; values that change all
// the time are fetched every few seconds. The page is fetched whole and what differs is changed in
// place, so that opened rows, the order of tables, focus and scroll position stay.
"use strict";
(() => {
  const EVERY_MS = 5000;
  const BETWEEN_MS = 250;
  const TIMEOUT_MS = 8000;
  const STREAM_AGAIN_MS = 30000;
  const $ = (id) => document.getElementById(id);
  const sorted = new Map(); // id of a table -> [column, direction]
  let updated = Date.now();
  let failed = false;
  let streaming = false;
  let running = false;
  let again = false;
  let told = $("headline").textContent;
  document.documentElement.classList.add("js");

  // ---- changing in place

  const keyOf = (node) => (node.nodeType === 1 ? node.id || node.dataset.key || "" : "");

  function attributes(node, wanted) {
    for (const { name } of [...node.attributes]) {
      const ofReader = name === "open" && node.tagName === "DETAILS";
      if (!ofReader && !wanted.hasAttribute(name)) node.removeAttribute(name);
    }
    for (const { name, value } of wanted.attributes) {
      if (name === "open" && node.tagName === "DETAILS") continue;
      if (node.getAttribute(name) !== value) node.setAttribute(name, value);
    }
  }

  function morph(node, wanted) {
    if (node.nodeType !== 1) {
      if (node.data !== wanted.data) node.data = wanted.data;
      return;
    }
    attributes(node, wanted);
    const keyed = new Map();
    for (const child of node.children) if (keyOf(child)) keyed.set(keyOf(child), child);
    let here = node.firstChild;
    for (const child of wanted.childNodes) {
      const key = keyOf(child);
      let match = null;
      if (key) {
        match = keyed.get(key) ?? null;
        if (match !== null && match.nodeName !== child.nodeName) match = null;
        keyed.delete(key);
      } else if (here !== null && here.nodeName === child.nodeName && !keyOf(here)) {
        match = here;
      }
      if (match === null) {
        node.insertBefore(document.importNode(child, true), here);
      } else {
        if (match === here) here = here.nextSibling;
        else node.insertBefore(match, here);
        morph(match, child);
      }
    }
    while (here !== null) {
      const next = here.nextSibling;
      here.remove();
      here = next;
    }
  }

  // ---- tables

  function sortTable(table, [column, direction]) {
    const body = table.tBodies[0];
    const value = (row) => row.cells[column].dataset.v;
    const compare = (one, other) => {
      const [a, b] = [value(one), value(other)];
      const numbers = a !== "" && b !== "" && !Number.isNaN(Number(a)) && !Number.isNaN(Number(b));
      return direction * (numbers ? a - b : a.localeCompare(b));
    };
    for (const row of [...body.rows].sort(compare)) body.append(row);
    [...table.tHead.rows[0].cells].forEach((cell, index) => {
      if (index === column) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
  }

  // ---- fetching

  // What must not move: what has the focus, else the first row, if the page is scrolled at all.
  function fixedPoint() {
    if (window.scrollY === 0) return undefined;
    const inView = (one) => {
      const { top } = one.getBoundingClientRect();
      return top >= 0 && top < window.innerHeight;
    };
    const rows = document.querySelectorAll("main [data-key]");
    return [document.activeElement, ...rows].find((one) => one !== document.body && inView(one));
  }

  async function load() {
    const answer = await fetch(".", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = fresh.getElementById("status");
    if (main === null) throw new Error("not the status page");
    for (const [id, order] of sorted) {
      const table = fresh.getElementById(id);
      if (table === null) sorted.delete(id);
      else sortTable(table, order);
    }
    const focused = document.activeElement;
    const seen = fixedPoint();
    const top = seen?.getBoundingClientRect().top;
    morph($("status"), main);
    // What is read stays where it is, whatever came or went above it.
    if (seen?.isConnected) window.scrollBy(0, seen.getBoundingClientRect().top - top);
    if (focused !== document.activeElement && focused?.isConnected) {
      focused.focus({ preventScroll: true });
    }
    if (document.title !== fresh.title) document.title = fresh.title;
    const headline = $("headline").textContent;
    // Without its numbers: how long somebody has waited is no news every second.
    if (headline.replace(/\d+/g, "") !== told.replace(/\d+/g, "")) $("announcement").textContent = headline;
    told = headline;
  }

  async function refresh() {
    if (running) {
      again = true;
      return;
    }
    running = true;
    try {
      await load();
      updated = Date.now();
      failed = false;
    } catch {
      failed = true;
    }
    tell();
    setTimeout(() => {
      running = false;
      if (again) {
        again = false;
        refresh();
      }
    }, BETWEEN_MS);
  }

  function tell() {
    const seconds = Math.round((Date.now() - updated) / 1000);
    const how = streaming ? "Live" : `Fetched every ${EVERY_MS / 1000} s`;
    const text = failed
      ? `The exporter does not answer. What you see is ${seconds} s old.`
      : `${how} · updated ${seconds < 2 ? "just now" : `${seconds} s ago`}`;
    if ($("freshness").textContent !== text) $("freshness").textContent = text;
    document.body.classList.toggle("stale", failed);
  }

  function stream() {
    const source = new EventSource("api/v1/events");
    source.addEventListener("open", () => {
      streaming = true;
      tell();
    });
    source.addEventListener("incident", refresh);
    source.addEventListener("lost", refresh);
    source.addEventListener("error", () => {
      streaming = false;
      // After a refusal a browser does not try again by itself.
      if (source.readyState === EventSource.CLOSED) setTimeout(stream, STREAM_AGAIN_MS);
      tell();
    });
  }

  // ---- the reader

  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Over plain HTTP a browser gives no clipboard: the old way, from a selection.
      getSelection().selectAllChildren(code);
      if (!document.execCommand("copy")) return;
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }

  async function goTo(chapter) {
    await fetch(`api/v1/demo/chapters/${encodeURIComponent(chapter)}`, { method: "POST" });
    refresh();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.classList.contains("chapter")) goTo(button.dataset.chapter);
    if (button?.classList.contains("copy")) copy(button);
    if (button?.classList.contains("sort")) {
      const cell = button.closest("th");
      const table = button.closest("table");
      const order = [cell.cellIndex, cell.getAttribute("aria-sort") === "ascending" ? -1 : 1];
      sorted.set(table.id, order);
      sortTable(table, order);
    }
  });
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  setInterval(tell, 1000);
  setInterval(() => document.hidden || refresh(), EVERY_MS);
  stream();
  tell();
})();
