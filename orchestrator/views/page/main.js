"use strict";
// Puts the parts together: what is drawn when data comes, which tab is open, and the choices that people make.

const THEME = "orchestrator theme";
const data = byId("data") ? JSON.parse(byId("data").textContent) : null;
const parts = { overview: null, charts: new Charts(), browser: null, source: null, runs: [], failuresAt: 0 };

function overview(runs, changed) {
  if (!parts.overview) {
    parts.overview = Object.fromEntries(["facts", "envs", "charts", "histograms", "tasks", "servers", "evals", "failures", "notes"].map((name) => [name, h("div")]));
    const titled = (title, node) => h("div", null, h("h2", null, title), node);
    const one = parts.overview;
    one.titled = { envs: titled("Environments", one.envs), histograms: titled("Of the last batches", one.histograms), tasks: titled("Tasks by solve rate", one.tasks), servers: titled("Inference servers", one.servers), evals: titled("Evaluations", one.evals), failures: titled("Failures", one.failures), notes: titled("Notes of the configuration", one.notes) };
    one.histograms.className = one.tasks.className = "charts";
    one.charts.append(parts.charts.node);
    byId("overview").append(one.facts, one.titled.envs, one.charts, one.titled.histograms, one.titled.tasks, one.titled.servers, one.titled.evals, one.titled.failures, one.titled.notes);
  }
  const shown = parts.overview, single = runs.length === 1, run = runs[0];
  fill(shown.facts, single ? facts(run) : runsTable(runs));
  for (const name of ["envs", "histograms", "failures"]) shown.titled[name].hidden = !single;
  shown.titled.servers.hidden = !single || !run.status.endpoints.length;
  shown.titled.tasks.hidden = !single || !taskBars(run).length;
  shown.titled.evals.hidden = !single || !run.evals?.length;
  shown.titled.notes.hidden = !single || !run.status.notes.length;
  if (changed) parts.charts.draw(runs);
  if (!single) return;
  fill(shown.envs, envTable(run, (env) => envControls(run, env)));
  fill(shown.tasks, taskBars(run));
  fill(shown.servers, endpointTable(run));
  fill(shown.failures, failureTable(run));
  fill(shown.notes, run.status.notes.map((note) => h("p.note", null, note)));
  if (changed) { fill(shown.evals, evalTable(run)); fill(shown.histograms, histograms(run)); }
}

function show(runs, changed) {
  parts.runs = runs;
  for (const run of runs) run.failures ??= parts.failures;
  showHead(runs[0], runs);
  fill(byId("controls"), runs.length === 1 ? controls(runs[0]) : []);
  overview(runs, changed);
  if (!parts.browser) { parts.browser = new Browser(parts.source, runs); byId("rollouts").append(parts.browser.node); route(); }
  refreshFailures(runs);
}

/** What failures said is asked for when there are others than before, and not more often than every ten seconds. */
async function refreshFailures(runs) {
  if (!(parts.source instanceof Live) || Date.now() - parts.failuresAt < 10000) return;
  const count = Object.values(runs[0].status.failures).reduce((a, b) => a + b, 0);
  if (count === parts.failuresOf) return;
  parts.failuresAt = Date.now();
  parts.failuresOf = count;
  try { parts.failures = runs[0].failures = await parts.source.failures(); } catch { /* they are shown without their tracebacks */ }
}

function say(text) {
  byId("connection").textContent = text;
  document.body.classList.toggle("lost", Boolean(text) && parts.runs.length > 0);
}

/** The tab and what is looked for stand behind the #, so that they can be sent to somebody and gone back to. */
function route() {
  const [tab, query] = location.hash.slice(1).split("?");
  const open = tab === "rollouts" ? "rollouts" : "overview";
  for (const name of ["overview", "rollouts"]) {
    byId(name).hidden = name !== open;
    byId(`tab-${name}`).setAttribute("aria-selected", String(name === open));
    byId(`tab-${name}`).tabIndex = name === open ? 0 : -1;
  }
  byId("options").hidden = open !== "overview";
  if (open === "rollouts" && parts.browser) parts.browser.show(Object.fromEntries(new URLSearchParams(query)));
}

function openRollouts(wanted) {
  const query = new URLSearchParams(Object.entries(wanted).filter(([, value]) => value !== null && value !== undefined && value !== "")).toString();
  location.hash = `rollouts${query ? "?" + query : ""}`;
}

function choice(label, options, choose) {
  return h("label", null, label, " ", h("select", { change: (event) => { choose(event.target.value); parts.charts.draw(parts.runs); } }, options.map(([value, text]) => h("option", { value }, text))));
}

function begin() {
  const theme = (name) => { if (name) document.documentElement.dataset.theme = name; };
  try { theme(localStorage.getItem(THEME)); } catch { /* a browser may refuse to remember */ }
  byId("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    theme(dark ? "light" : "dark");
    try { localStorage.setItem(THEME, dark ? "light" : "dark"); } catch { /* same */ }
  });
  byId("options").append(choice("over", [["step", "steps"], ["time", "time"]], (value) => { shared.axis = value; }), choice("smooth", [["0", "no"], ["5", "5"], ["20", "20"], ["100", "100"]], (value) => { shared.smooth = Number(value); }));
  const tabs = ["overview", "rollouts"];
  for (const [place, name] of tabs.entries()) {
    byId(`tab-${name}`).addEventListener("click", () => { location.hash = name === "rollouts" ? "rollouts" : ""; });
    byId(`tab-${name}`).addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = byId(`tab-${tabs[1 - place]}`);
      other.click();
      other.focus();
    });
  }
  addEventListener("hashchange", route);
  shared.pick = (step) => {
    const width = parts.runs[0]?.series?.width || 1;
    openRollouts({ step: width > 1 ? `${Math.max(1, step - width + 1)}-${step}` : String(step) });
  };
  route();
  if (data) {
    parts.source = new Inside(data);
    byId("connection").textContent = data.made ? `a report of ${clockTime(data.made)}` : "";
    show(parts.source.runs, true);
  } else {
    parts.source = new Live(show, say);
    say("connecting");
    parts.source.follow();
  }
}

begin();
