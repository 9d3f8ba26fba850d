"use strict";
// Buttons that change a run. They need a token, on loopback too: it is asked for once and kept for this tab.

const CONTROL = "orchestrator control token";

/** What a run can be told; a run that is over, and a page that is no run's own, has no buttons. */
function controls(run) {
  if (!isControlled(run)) return [];
  const paused = run.status.waits.some((wait) => wait.kind === "paused") || run.status.state === "paused";
  return [
    paused ? button("Resume", "go on", { command: "resume" }) : button("Pause", "open no new groups; what is open ends", { command: "pause" }),
    button("Drain", "let open groups end, save, and end the run", { command: "drain" }, "Let what is open end, and end the run?"),
  ];
}

function envControls(run, env) {
  if (!isControlled(run)) return null;
  return env.quarantined
    ? button("Restore", `take ${env.name} back`, { command: "restore", env: env.name }, null, "link")
    : button("Quarantine", `leave ${env.name} out until it is restored`, { command: "quarantine", env: env.name }, `Leave ${env.name} out until it is restored?`, "link");
}

const isControlled = (run) => parts.source instanceof Live && run.status.state === "running" && run.status.limit > 0;

function button(text, title, command, question = null, kind = null) {
  return h("button", { type: "button", title, "data-key": JSON.stringify(command), class: command.command === "drain" ? "danger" : kind, click: () => (!question || confirm(question)) && send(command) }, text);
}

/** Send a command; what became of it is said at the top. */
async function send(command) {
  for (;;) {
    const token = sessionStorage.getItem(CONTROL) || sessionStorage.getItem(TOKEN);
    if (!token) {
      if (!(await askForToken("What changes a run needs the token in control.token of its run directory.", CONTROL))) return;
      continue;
    }
    let reply;
    try {
      reply = await fetch("/api/control", { method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` }, body: JSON.stringify({ ...command, by: "the page" }) });
    } catch (error) {
      return tell("bad", `${command.command}: ${error.message}`);
    }
    const told = await reply.json().catch(() => ({ error: `${reply.status} ${reply.statusText}` }));
    if (reply.status !== 401) return tell(reply.ok ? "" : "bad", told.text || told.error);
    sessionStorage.removeItem(CONTROL);
    if (!(await askForToken("That was not the token of this run; it is in control.token of its run directory.", CONTROL))) return;
  }
}

let forget = 0;

function tell(kind, text) {
  const place = byId("told");
  place.className = kind ? `note ${kind}` : "note";
  place.textContent = text;
  clearTimeout(forget);
  forget = setTimeout(() => { place.textContent = ""; }, 15000);
}
