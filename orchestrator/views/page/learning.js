"use strict";
// The charts over steps: what is learned, what the batches are made of, and where the time goes. With one run a line
// stands for an environment; with several a line stands for a run, and every environment has a chart of its own.

class Charts {
  constructor() {
    this.node = h("div");
    this.sections = new Map();
    this.charts = new Map();
  }

  /** A chart that is made once and drawn again whenever there is more to show. */
  #chart(section, title, options, lines) {
    if (!this.sections.has(section)) {
      const grid = h("div.charts");
      this.sections.set(section, { node: h("div", null, h("h2", null, section), grid), grid, charts: [] });
      this.node.append(this.sections.get(section).node);
    }
    const place = this.sections.get(section);
    if (!this.charts.has(title)) {
      const chart = new Chart(title, options);
      this.charts.set(title, chart);
      place.charts.push(chart);
      place.grid.append(chart.node);
    }
    this.charts.get(title).draw(lines);
    place.node.hidden = place.charts.every((chart) => chart.node.hidden);
  }

  draw(runs) {
    const drawn = runs.filter((run) => run.series && run.series.steps.length);
    if (!drawn.length) return;
    if (drawn.length === 1) this.#one(drawn[0]); else this.#several(drawn);
  }

  #one(run) {
    const { series } = run, envs = Object.entries(series.envs), x = along(run);
    const perEnv = (name) => envs.map(([env, columns], place) => ({ label: env, color: color(place), x, y: columns[name] || [] }));
    const overall = (...names) => names.map(([label, name], place) => ({ label, color: color(place), x, y: series.run[name] || [] }));
    this.#chart("Learning", "Reward", { what: "mean of each batch" }, [...(envs.length > 1 ? [{ label: "all", color: "c7", x, y: series.run.reward, dashed: true }] : []), ...perEnv("reward")]);
    this.#chart("Learning", "Reward of all rollouts", { what: "also those not trained on" }, perEnv("sampled_reward"));
    this.#chart("Learning", "Evaluations", { what: "avg@k, or the first score" }, evalLines(run, (place) => color(place)));
    for (const [name, y] of Object.entries(series.trainer)) this.#chart("Trainer", name, { what: "reported by the trainer", small: true }, [{ label: name, color: "c0", x, y }]);
    this.#chart("Batches", "Delivered mix", { what: "share of each batch; dashed: target", zero: true, format: percent },
      envs.flatMap(([env, columns], place) => [{ label: env, color: color(place), x, y: columns.share }, { label: env, color: color(place), x, y: columns.target, dashed: true, quiet: true }]));
    this.#chart("Batches", "Length", { what: "tokens of a sequence", zero: true }, envs.length > 1 ? perEnv("length_mean") : overall(["mean", "length_mean"], ["p90", "length_p90"]));
    this.#chart("Batches", "Truncated", { what: "share of sequences that a limit cut", zero: true, format: percent }, perEnv("truncated"));
    this.#chart("Batches", "Filtered", { what: "share of rollouts in groups of equal rewards", zero: true, format: percent }, overall(["filtered", "filtered"]));
    this.#chart("Batches", "Staleness", { what: "versions", zero: true }, overall(["mean", "staleness_mean"], ["max", "staleness_max"]));
    this.#chart("Flow", "Where the time goes", { what: "seconds between batches", stacked: true, format: duration }, timeLines(run));
    this.#chart("Flow", "Rollouts per second", { zero: true }, overall(["rollouts/s", "rollouts_per_s"]));
    this.#chart("Flow", "Tokens per second", { zero: true }, overall(["tokens/s", "tokens_per_s"]));
    this.#chart("Flow", "In flight", { what: "rollouts as a batch was formed", zero: true }, perEnv("inflight"));
    this.#chart("Flow", "Latency", { what: "mean of a rollout", zero: true, format: duration }, perEnv("latency_mean"));
    this.#chart("Flow", "Failed", { what: "share of rollouts", zero: true, format: percent }, perEnv("failed"));
    for (const [env, columns] of envs) {
      const own = Object.keys(columns).filter((name) => name.startsWith("metric "));
      this.#chart("What environments measure", env, { small: true }, own.map((name, place) => ({ label: name.slice(7), color: color(place), x, y: columns[name] })));
    }
  }

  #several(runs) {
    const lines = (read) => runs.map((run) => ({ label: run.name, color: run.color, x: along(run), y: read(run.series) || [] }));
    const envs = [...new Set(runs.flatMap((run) => Object.keys(run.series.envs)))];
    const trainer = [...new Set(runs.flatMap((run) => Object.keys(run.series.trainer)))];
    this.#chart("Learning", "Reward", { what: "mean of each batch" }, lines((series) => series.run.reward));
    for (const env of envs) this.#chart("Learning", `Reward of ${env}`, {}, lines((series) => series.envs[env]?.reward));
    const evaluated = [...new Set(runs.flatMap((run) => (run.evals || []).map((result) => result.env)))];
    for (const env of evaluated) this.#chart("Learning", `Evaluation of ${env}`, {}, runs.flatMap((run) => evalLines({ ...run, evals: run.evals.filter((result) => result.env === env) }, () => run.color).map((line) => ({ ...line, label: run.name }))));
    for (const name of trainer) this.#chart("Trainer", name, { what: "reported by the trainer", small: true }, lines((series) => series.trainer[name]));
    for (const env of envs) this.#chart("Batches", `Share of ${env}`, { small: true, zero: true, format: percent }, lines((series) => series.envs[env]?.share));
    this.#chart("Batches", "Length", { what: "mean tokens of a sequence", zero: true }, lines((series) => series.run.length_mean));
    this.#chart("Batches", "Truncated", { zero: true, format: percent }, lines((series) => series.run.truncated));
    this.#chart("Batches", "Filtered", { zero: true, format: percent }, lines((series) => series.run.filtered));
    this.#chart("Batches", "Staleness", { what: "mean, versions", zero: true }, lines((series) => series.run.staleness_mean));
    this.#chart("Flow", "Rollouts per second", { zero: true }, lines((series) => series.run.rollouts_per_s));
    this.#chart("Flow", "Tokens per second", { zero: true }, lines((series) => series.run.tokens_per_s));
    for (const [what, title] of TIMES) this.#chart("Flow", `Seconds: ${title}`, { what: "of each step", small: true, zero: true }, lines((series) => series.run[`time ${what}`]));
  }
}

const TIMES = [["rollouts", "waiting for rollouts"], ["trainer", "waiting for the trainer"], ["weights", "loading weights"], ["paused", "paused"]];

const along = (run) => (shared.axis === "time" ? run.series.run.seconds : run.series.steps);

function timeLines(run) {
  const shades = ["c0", "c2", "c1", "c7"];
  return TIMES.map(([what, label], place) => ({ label, color: shades[place], x: along(run), y: run.series.run[`time ${what}`] || [] })).filter((line) => line.y.some((value) => value > 0));
}

/** Scores over the steps at which they were evaluated. */
function evalLines(run, colorOf) {
  const found = new Map();
  for (const result of run.evals || []) {
    const [name, value] = scoreOf(result);
    if (!isNumber(value)) continue;
    const label = `${result.env} ${name}`;
    if (!found.has(label)) found.set(label, { label, color: colorOf(found.size), x: [], y: [], dots: true });
    const line = found.get(label);
    line.x.push(shared.axis === "time" ? secondsAt(run, result.step) : result.step);
    line.y.push(value);
  }
  return [...found.values()];
}

function secondsAt(run, step) {
  const place = nearest(run.series.steps, step);
  return place < 0 ? 0 : run.series.run.seconds[place];
}

function histograms(run) {
  const { histograms: told } = run;
  if (!told?.steps.length) return [];
  const what = told.steps[0] === told.steps[1] ? `step ${told.steps[0]}` : `steps ${told.steps[0]} to ${told.steps[1]}`;
  const first = told.lengths.findIndex((n) => n);
  const lengths = told.lengths.slice(Math.max(0, first));
  return [
    bars("Lengths", lengths.map((_, place) => `<${number(2 ** (place + Math.max(0, first) + 1))}`), lengths, `tokens of a sequence, ${what}`),
    bars("Ages", told.staleness.map((_, age) => String(age)), told.staleness, `versions when trained on, ${what}`),
  ];
}
