// Keeps the page fresh: fetches it again and swaps what is inside <main>.
"use strict";
(() => {
  const EVERY_MS = 5000;
  const PATIENCE_MS = 8000;
  const freshness = document.getElementById("freshness");
  const announcement = document.getElementById("announcement");
  let updated = Date.now();
  let failed = false;

  const headline = () => document.getElementById("headline")?.textContent ?? "";
  let told = headline();

  const selecting = () => {
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed;
  };

  async function refresh() {
    const answer = await fetch(".", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = fresh.getElementById("status");
    if (main === null) throw new Error("not the status page");
    document.getElementById("status").replaceWith(document.adoptNode(main));
    document.title = fresh.title;
    if (headline() !== told) {
      told = headline();
      announcement.textContent = told;
    }
  }

  function tell() {
    const seconds = Math.round((Date.now() - updated) / 1000);
    freshness.textContent = failed
      ? `The exporter does not answer. What you see is ${seconds} s old.`
      : `Live · updated ${seconds < 2 ? "just now" : `${seconds} s ago`}`;
    document.body.classList.toggle("stale", failed);
  }

  async function turn() {
    if (!document.hidden && !selecting()) {
      try {
        await refresh();
        updated = Date.now();
        failed = false;
      } catch {
        failed = true;
      }
      tell();
    }
    setTimeout(turn, EVERY_MS);
  }

  document.addEventListener("visibilitychange", tell);
  setInterval(tell, 1000);
  setTimeout(turn, EVERY_MS);
  tell();
})();
