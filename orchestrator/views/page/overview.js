"use strict";
// What a run does now, in words and tables: its state, what it waits for, its environments, servers and failures.

const STATES = { running: "good", finished: "", starting: "warn", draining: "warn", paused: "warn", ended: "", busy: "good", failed: "bad", crashed: "bad" };

function showHead(run, runs) {
  const status = run.status;
  const title = runs.length > 1 ? `${runs.length} runs` : run.name;
  byId("name").textContent = title;
  document.title = runs.length > 1 ? title : `${status.state === "running" ? `${status.step}${status.max_steps ? "/" + status.max_steps : ""} ` : ""}${run.name}`;
  const pill = byId("state");
  pill.hidden = runs.length > 1;
  pill.textContent = status.state;
  pill.className = `pill ${STATES[status.state] ?? "bad"}`;
  fill(byId("notices"), runs.length > 1 ? [] : notices(run));
}

/** What people should know, the worst first. */
function notices(run) {
  const { status } = run, found = [];
  const say = (kind, head, text, remedy) => found.push(h("p", { class: kind, "data-key": head + text }, head && h("b", null, head, " "), text, remedy && h("span.dim", null, ` If it lasts: ${remedy}`)));
  if (run.trouble) say("bad", "", run.trouble);
  if (status.refused) say("bad", "Weights:", status.refused);
  if (status.mismatch) say("bad", "Trainer:", status.mismatch);
  for (const [name, env] of Object.entries(status.envs)) {
    if (env.quarantined) say("warn", name, `is only probed: hardly any of its rollouts can be trained on.${env.failure ? " Its last failure: " + env.failure : ""}`);
    if (env.minimum_waived) say("warn", name, `has its minimum waived: ${env.minimum_waived}`);
    if (env.servers && env.servers_ready < env.servers) say("warn", name, `has ${env.servers_ready} of ${env.servers} servers ready.`);
  }
  for (const endpoint of status.endpoints) if (!endpoint.healthy) say("warn", endpoint.url, endpoint.error || "is not in service");
  for (const source of status.sources || []) if (source.trouble) say("warn", source.source, `(${source.of}): ${source.trouble}; it names ${source.members}`);
  if (status.changes?.length) say("", "Changed by hand:", status.changes.join("; "));
  const waits = status.waits.map((wait) => wait.text);
  if (waits.length) {
    const [first] = status.waits;
    say("", "Waits for", waits.slice(0, 4).join("; ") + (waits.length > 4 ? ` and ${waits.length - 4} more` : ""), first.remedy);
  } else if (status.waiting_for) say("", "", status.waiting_for);
  return found;
}

/** Seconds until the last step, by the pace of the last ones. */
function eta(run) {
  const { status, series } = run;
  if (isNumber(status.eta_s)) return status.eta_s;
  const times = series?.run.seconds;
  if (!status.max_steps || status.state !== "running" || !times || times.length < 3) return null;
  const back = Math.min(20, times.length - 1);
  const pace = (times[times.length - 1] - times[times.length - 1 - back]) / (series.steps[times.length - 1] - series.steps[times.length - 1 - back]);
  return pace * Math.max(0, status.max_steps - status.step);
}

function facts(run) {
  const { status, series } = run;
  const now = (name) => { const column = series?.run[name]; return column ? column[lastKnown(column)] : null; };
  const fact = (name, value, after = "", extra = null) => h("div", { "data-key": name }, h("dt", null, name), h("dd", null, value, h("small", null, after)), extra);
  const living = status.state !== "finished" && status.limit > 0;
  const change = isNumber(status.first_reward) && isNumber(status.reward) ? `from ${number(status.first_reward)}` : "";
  const items = [
    fact("step", number(status.step), status.max_steps ? `of ${status.max_steps}` : "",
      status.max_steps > 0 && h("progress", { max: status.max_steps, value: status.step, "aria-label": "steps" })),
    living && fact("time left", duration(eta(run))),
    fact("reward", number(status.reward), change),
    fact("version", number(status.version), status.published > status.version ? `${status.published} published` : ""),
    fact("rollouts/s", number(status.rollouts_per_s, 1)),
    fact("tokens/s", number(isNumber(status.tokens_per_s) && status.tokens_per_s ? status.tokens_per_s : now("tokens_per_s"), 0)),
    living && fact("in flight", number(status.inflight), `of ${status.limit}`),
    living && fact("queued", number(status.queued_sequences), `of ${status.batch_size}`),
    fact("staleness", number(isNumber(status.staleness?.mean) ? status.staleness.mean : now("staleness_mean"), 2), `max ${number(isNumber(status.staleness?.max) ? status.staleness.max : now("staleness_max"))}`),
    fact("trained", number(status.trained), "steps"),
    fact("running for", duration(status.seconds)),
    living && fact("loop lag p99", duration(status.loop_lag_p99_s)),
  ].filter(Boolean);
  return [h("dl.facts", { "data-key": "facts" }, items), living && status.buffer && h("p.note", { "data-key": "buffer" }, `Next batch: ${status.buffer}.`)];
}

/** Several runs in a table, each with the colour of its curves. */
function runsTable(runs) {
  return table([
    { name: "run", left: true, cls: "name", cell: (run) => [h("span.swatch", { class: `swatch ${run.color}` }), run.name] },
    { name: "state", left: true, cell: (run) => run.status.state },
    { name: "steps", cell: (run) => number(run.status.step) },
    { name: "first reward", cell: (run) => number(run.status.first_reward) },
    { name: "last reward", cell: (run) => number(run.status.reward) },
    { name: "best 10 steps", cell: (run) => number(best(run.series.run.reward)) },
    { name: "last evaluation", left: true, cell: (run) => lastEvals(run.evals) },
    { name: "rollouts", cell: (run) => number(Object.values(run.status.outcomes).reduce((a, b) => a + b, 0)) },
    { name: "completed", cell: (run) => percent((run.status.outcomes.completed || 0) / Math.max(1, Object.values(run.status.outcomes).reduce((a, b) => a + b, 0))) },
    { name: "rollouts/s", cell: (run) => number(mean(run.series.run.rollouts_per_s), 1) },
    { name: "tokens/s", cell: (run) => number(mean(run.series.run.tokens_per_s), 0) },
    { name: "time", cell: (run) => duration(run.status.seconds) },
  ], runs, { key: (run) => run.color + run.name });
}

const mean = (values) => { const known = (values || []).filter(isNumber); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };

function best(values) {
  const known = (values || []).filter(isNumber);
  if (!known.length) return null;
  const over = Math.min(10, known.length);
  let top = -Infinity;
  for (let i = over; i <= known.length; i++) top = Math.max(top, mean(known.slice(i - over, i)));
  return top;
}

function scoreOf(result) {
  const name = Object.keys(result).find((key) => key.startsWith("avg@")) || Object.keys(result).find((key) => key.includes("@"));
  return name ? [name, result[name]] : ["", null];
}

function lastEvals(evals) {
  const last = new Map((evals || []).map((result) => [result.env, result]));
  return [...last.values()].map((result) => `${result.env} ${scoreOf(result)[0]} ${number(scoreOf(result)[1])}`).join(", ") || "–";
}

function envTable(run, act) {
  const { status, totals } = run;
  const rows = Object.entries(status.envs).map(([name, env], place) => ({ name, ...env, color: color(place) }));
  const living = rows.some((env) => env.servers);
  const failed = (env) => env.failed ?? 0;
  const why = (counts) => Object.entries(counts || {}).filter(([, n]) => n).sort((a, b) => b[1] - a[1]).map(([name, n]) => `${name} ${number(n)}`).join(", ");
  return table([
    { name: "environment", left: true, cls: "name", cell: (env) => [h("span.swatch", { class: `swatch ${env.color}` }), h("button.link", { type: "button", "data-key": env.name, title: `${env.name}: show its rollouts`, click: () => openRollouts({ env: env.name }) }, env.name)] },
    rows.some((env) => env.domain !== env.name) && { name: "domain", left: true, cell: (env) => (env.domain === env.name ? "" : env.domain) },
    { name: "reward", cell: (env) => [number(env.reward), h("span.dim", null, ` from ${number(env.first_reward)}`)] },
    { name: "delivered / target", cell: (env) => [`${percent(env.actual)} / ${percent(env.target)}`, meter(env.actual, env.target, env.color)] },
    { name: "last batches", cell: (env) => percent(env.recent) },
    living && { name: "in flight", cell: (env) => number(env.inflight) },
    living && { name: "queued", cell: (env) => number(env.queued) + (env.minimum ? ` (min ${env.minimum})` : "") },
    { name: "latency", cell: (env) => duration(env.mean_latency_s) },
    { name: "completed", cell: (env) => number(env.completed) },
    { name: "failed", cell: (env) => h("span", { class: failed(env) ? "warn" : "dim" }, number(failed(env))) },
    { name: "accepted", cell: (env) => percent(env.acceptance) },
    living && { name: "servers", cell: (env) => h("span", { class: env.servers_ready < env.servers ? "bad" : "", title: nodes(env, run.status.sources) }, `${env.servers_ready}/${env.servers}`) },
    living && { name: "restarts", cls: "restarts", cell: (env) => h("span", { class: env.restarts ? "warn" : "dim" }, number(env.restarts)) },
    { name: "", left: true, cell: (env) => [env.quarantined && h("span.pill.warn", null, "quarantined"), " ", act && act(env)] },
    { name: "not trained on", left: true, cell: (env) => why(Object.keys(env.dropped).length ? env.dropped : totals?.[env.name]?.dropped) || "–" },
  ].filter(Boolean), rows, { key: (env) => env.name, empty: "no environment has reported yet" });
}

/** How well each environment's tasks are solved, and which pools of the curriculum they are in. */
function taskBars(run) {
  return Object.entries(run.status.envs).filter(([, env]) => env.tasks?.tried).map(([name, { tasks }]) => {
    const ends = tasks.solve_rates.map((_, place) => `${Math.round((100 * place) / tasks.solve_rates.length)} %`);
    const pools = Object.entries(tasks.pools).map(([pool, n]) => `${pool} ${number(n)}`).join(", ");
    const tried = isNumber(tasks.num_tasks) ? `${number(tasks.tried)} of ${number(tasks.num_tasks)} tried` : `the last ${number(tasks.tried)}`;
    return h("div", { "data-key": `tasks ${name}` }, bars(name, ends, tasks.solve_rates, `${tried}${pools && `; ${tasks.strategy}: ${pools}`}`),
      taskTable(name, "solved least", tasks.hardest), taskTable(name, "tried most", tasks.most_tried));
  });
}

/** A few single tasks of an environment; nothing of a run that did not tell. */
function taskTable(name, title, rows) {
  if (!rows?.length) return null;
  return h("details", { "data-key": `${name} ${title}` }, h("summary", null, title), table([
    { name: "task", cell: (row) => h("button.link", { type: "button", "data-key": `${title} ${row.task}`, title: "show its rollouts", click: () => openRollouts({ env: name, task: row.task }) }, String(row.task)) },
    { name: "solve rate", cell: (row) => percent(row.solve_rate) },
    { name: "groups", cell: (row) => number(row.groups) },
    { name: "reward", cell: (row) => number(row.reward) },
    { name: "equal rewards", cell: (row) => percent(row.equal_share) },
    { name: "version", cell: (row) => number(row.version) },
  ], rows, { key: (row) => row.task }));
}

/** Where an environment's servers come from and run, one a line; nothing of those on the orchestrator's machine. */
function nodes(env, sources) {
  const named = (sources || []).filter((one) => one.of === `env "${env.name}"`).map((one) => `${one.members} named by ${one.source}\n`);
  return named.join("") + Object.entries(env.nodes || {}).map(([server, node]) => `${server} on ${node}`).join("\n");
}

function endpointTable(run) {
  return table([
    { name: "inference server", left: true, cls: "name", cell: (endpoint) => endpoint.url },
    { name: "health", left: true, cell: (endpoint) => h("span", { class: endpoint.healthy ? "good" : "bad" }, endpoint.healthy ? "in service" : "out of service") },
    { name: "in flight", cell: (endpoint) => number(endpoint.inflight) },
    { name: "version", cell: (endpoint) => number(endpoint.version) },
    run.status.endpoints.some((endpoint) => endpoint.source) && { name: "named by", left: true, cell: (endpoint) => endpoint.source || "–" },
    { name: "what it said", wrap: true, cell: (endpoint) => endpoint.error || "–" },
  ].filter(Boolean), run.status.endpoints, { key: (endpoint) => endpoint.url });
}

function failureTable(run) {
  const known = new Map((run.failures || []).map((failure) => [`${failure.env}: ${failure.kind}`, failure]));
  const rows = Object.entries(run.status.failures).map(([name, count]) => ({ name, count, text: run.status.failure_reasons?.[name] || "", ...known.get(name), ...{ count } }));
  for (const [name, failure] of known) if (!(name in run.status.failures)) rows.push({ name, ...failure });
  rows.sort((a, b) => b.count - a.count);
  return table([
    { name: "environment: kind", left: true, cell: (row) => row.name },
    { name: "times", cell: (row) => number(row.count) },
    { name: "an example", wrap: true, cell: (row) => [h("pre.example", null, row.text || "–"), row.detail && h("details", { "data-key": row.name }, h("summary", null, "traceback"), h("pre.example", null, row.detail))] },
    { name: "last", cell: (row) => (row.last_at ? clockTime(row.last_at) : "–") },
  ], rows.slice(0, 50), { key: (row) => row.name, empty: "no rollout has failed" });
}

function evalTable(run) {
  return table([
    { name: "evaluation", left: true, cls: "name", cell: (result) => result.env },
    { name: "step", cell: (result) => number(result.step) },
    { name: "version", cell: (result) => number(result.version) },
    { name: "scores", left: true, cell: (result) => Object.entries(result).filter(([name, value]) => name.includes("@") && isNumber(value)).map(([name, value]) => `${name} ${number(value)}`).join("  ") },
    { name: "failures", cell: (result) => number(result.failures) },
  ], [...(run.evals || [])].reverse().slice(0, 30), { key: (result) => `${result.env} ${result.step} ${result.version}` });
}
