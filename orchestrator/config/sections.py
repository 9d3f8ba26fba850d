"""The sections of a configuration file, one class a table; every field's docstring is its documentation.

Those of environments are in `env_sections`. Only shapes and ranges live here. What relates fields to each other is in `checks`, so that every problem of
a file is reported at once.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from orchestrator.config.section import Entries, Positive, Seconds, Section
from orchestrator.mix.breaker import PROBE, RESTORE, TRIP, WINDOW

MOST_SEQUENCES = 1_000_000
"""Of a batch: forming one keeps a bit for every number of sequences up to its size."""
MOST_TOKENS = 10**9


FROM_TRAINER = "trainer"
"""In place of a folder of initial weights."""


class ModelConfig(Section):
    """The policy, as the inference servers know it."""

    name: str = "local"
    """Model name sent with every request."""


class InferenceConfig(Section):
    """The inference servers."""

    base_urls: Entries = []
    """OpenAI-compatible endpoints, each with its /v1; or sources that name them and are followed (dns+http://NAME:PORT/v1,
    file:PATH; docs/discovery.md)."""
    weight_update: str = "none"
    """How new weights reach the servers: none (they never do), vllm (from a folder), sglang (the same, untried: written by its documentation), vllm_lora (a folder with a LoRA
    adapter), trainer (it sends them itself, see `trainer.updating`), or "module:attr" of an async function that takes an UpdateRequest. With [local] it is not looked at: the policy server there loads every published version."""
    initial_weights: str | None = None
    """Folder of the weights that a fresh run begins with; every server loads it before it gets work. "trainer": the trainer
    publishes version 0 before the first batch. Unset: the weights that the servers were started with, and a server that
    says it was given others since is refused."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    ready_timeout_s: Seconds = 600
    """How long to wait for the servers before giving up."""
    health_interval_s: Seconds = 2
    """Time between health checks of an endpoint, and between looks at its metrics."""
    progress_timeout_s: Seconds = 120
    """An endpoint that has rollouts in flight and yields no token for this long gets a probe; if that fails too, it
    gets no work until it answers again, and its rollouts are asked elsewhere. Raise it where prompts take long."""
    straggler_grace_s: Seconds = 30
    """How long a weight update waits for the last servers once half of them are done."""
    check_weights: bool = True
    """Whether a published path is looked at before engines are told; false where only the engines see it."""
    update_timeout_s: Seconds = 300
    """Longest weight update of one server before it is taken out of the pool."""
    accept_raw_logprobs: bool = False
    """Train although a server returns log-probabilities from before temperature and cuts, where train.sampling uses them."""


class LocalConfig(Section):
    """Run a small policy server and the reference trainer beside the orchestrator; no GPU needed."""

    learning_rate: Annotated[float, Field(ge=0)] = 2.5
    """Step size of the reference trainer; 0 learns nothing."""
    latency_s: Annotated[float, Field(ge=0)] = 0.0
    """Time added to every completion of the policy server."""
    trainer: bool = True
    """Whether to start the reference trainer too."""


class BreakerConfig(Section):
    """The circuit breaker in front of every strategy; `breaker = false` in [mix] turns it off. An env that hardly
    yields anything is quarantined: it only gets probes, and the others share its place, until it recovers."""

    enabled: bool = True
    """Whether envs are quarantined at all."""
    trip: Annotated[float, Field(ge=0, lt=1)] = TRIP
    """Quarantine an env whose recent acceptance, accepted rollouts per finished one, falls below this."""
    restore: Annotated[float, Field(ge=0, lt=1)] = RESTORE
    """Let it return when its recent acceptance is above this again; at least trip."""
    probe: Annotated[float, Field(gt=0, le=1)] = PROBE
    """Largest share of the picks, and of the rollouts in flight, that a quarantined env gets."""
    window: Positive = WINDOW
    """Reports after which a result has lost two thirds of its weight in the recent acceptance."""


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "Input should be a number")
    return value


def _breaker_table(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


class MixConfig(Section):
    """Which environment next."""

    strategy: str = "flow"
    """flow: keeps what is delivered on target, whatever the latencies and losses. adaptive: draws at random, envs that
    are behind more often. weighted_random, or weighted: draws at random by weight for every task, which some other
    systems call a weighted round robin. weighted_round_robin: takes turns by weight, without chance. Or "module:Class"
    of your own."""
    options: dict[str, Any] = {}
    """Passed to the strategy. flow has gain (1.0: how much of a debt is ordered at once, above 0 and at most 2) and
    window (300: rollouts of an env after which a measurement has lost two thirds of its weight). adaptive has warmup
    (50: accepted rollouts before it corrects). weighted_random and weighted_round_robin have none. A strategy of your
    own gets what its constructor names. A table breaker = {…} or breaker = false here is read as [mix.breaker]."""
    domains: dict[str, Annotated[float, Field(gt=0), BeforeValidator(_no_truth)]] = {}
    """Share of each domain in the mix, for example { math = 0.6, code = 0.4 }; the ratio of an env is then its share
    within its domain. Empty: envs are weighed against each other. The domain of an env is what stands before "::" in its
    ids where a [domains.NAME] table has that name, else the env's own name."""
    breaker: Annotated[BreakerConfig, BeforeValidator(_breaker_table)] = BreakerConfig()

    def arguments(self) -> dict[str, Any]:
        """What the mix is built with beside the strategy's name: the options, and the breaker's settings."""
        if "breaker" in self.options:
            return dict(self.options)
        settings = self.breaker.model_dump(exclude={"enabled"})
        return {**self.options, "breaker": settings if self.breaker.enabled else False}


class CurriculumConfig(Section):
    """Which task of an environment next. A train env's own table `curriculum` takes the place of this one for it."""

    strategy: str = "uniform"
    """uniform: every task once, in a shuffled order, then again in another one. difficulty: pools of easy, medium and hard
    tasks by their recent solve rate, each with its share. frontier: prefers tasks that are sometimes solved and sometimes
    not, whose groups teach most. Or "module:Class" of your own. Tasks without end come in their order under each."""
    options: dict[str, Any] = {}
    """Passed to the strategy. difficulty has the shares easy (0.05), medium (0.9) and hard (0.05), which sum to 1; the solve
    rates hard_below (0.2) and easy_above (0.8), which part the pools; retire_above (0.95), from which an easy task
    retires (2: never); and checkup (0.02), the share of tasks that look at a retired one. uniform and frontier have
    none. A strategy of your own gets what its constructor names."""
    explore: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Share of the tasks that come in turn, whatever the strategy says, so that none is left out for ever. uniform does
    not look at it."""
    reward_range: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """Mean rewards of a task that is never solved and of one that always is; what lies between is its solve rate, what
    lies outside counts as the nearer end."""


class BatchConfig(Section):
    """What the trainer gets."""

    size: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 256
    """Sequences in a batch, exactly, at most 1,000,000; with unit = "tokens", the token budget that is never exceeded."""
    unit: Literal["sequences", "tokens"] = "sequences"
    """What size counts."""
    mix: Literal["even", "oldest"] = "even"
    """Which of the queued groups make the next batch. even: of each env its oldest, as many as its share of a batch, as nearly
    as what is queued allows; and with staleness.mode = "pace", max_versions above 0 and a trainer that publishes with every
    step no env takes more than its share of the work under way while another has less, and a batch waits for its share of what is
    in flight where later batches would be crowded with it (after a start; never the first batch, and never for work that was started
    since). oldest: the oldest of all, so that only many batches together follow the mix targets; right for a strategy of your own
    that means another mix than the ratios say. With quotas, or unit = "tokens", batches are made as these say."""
    quotas: bool = False
    """Give every env an exact number of sequences in each batch, following the mix targets; minimums then only raise
    the targets."""
    on_starved: Literal["redistribute", "wait"] = "redistribute"
    """With quotas: what happens to the quota of an env that has too little."""
    on_stuck: Literal["split", "wait"] = "split"
    """When the queue holds a full batch but no exact one. split: a group is split over two batches as soon as waiting
    cannot help, or after stuck_after_s. wait: never; minimums that whole groups cannot keep are lowered then."""
    stuck_after_s: Seconds = 10
    """How long a queue may be stuck before on_stuck = "split" splits a group, where waiting might still help."""
    max_buffered: Annotated[float, Field(ge=1)] = 8
    """Bound on what is queued, in batches; no group is started above it. With staleness.mode = "pace" at most
    staleness.max_versions + 1 batches are under way in all, so that this binds only where it is lower; with "drop" it
    is the only bound. trainer.keep_batches bounds neither: it counts batches that were trained on."""

    @property
    def splits(self) -> bool:
        """Whether groups may be split; a token budget is not filled exactly, so that it never needs to."""
        return self.on_stuck == "split" and self.unit == "sequences"


class DispatchConfig(Section):
    """How many rollouts run, and what happens when they fail."""

    max_inflight: Positive = 256
    """Rollouts in flight, training and evaluation together."""
    min_inflight: Positive = 8
    """Lower bound of adaptive concurrency."""
    concurrency: Literal["fixed", "adaptive"] = "fixed"
    """Keep max_inflight in flight, or follow the engines' own metrics between min_inflight and max_inflight."""
    ramp_s: Annotated[float, Field(ge=0)] = 1.0
    """A raised limit is filled over this time, so that not all prefills land at once."""
    rollout_timeout_s: Seconds = 600
    """Longest attempt."""
    group_timeout_s: Seconds = 1800
    """Longest group, retries included."""
    max_attempts: Positive = 3
    """Attempts at one rollout before it counts as failed. Not charged, up to eight times: a server that stops, an engine that
    cannot be reached."""
    backoff_s: Seconds = 0.5
    """Pause before the second attempt; doubles for each further one."""
    max_backoff_s: Seconds = 30
    """Longest pause between attempts."""
    min_valid: Positive | None = None
    """Keep a group when at least this many of its rollouts are valid; unset: all must be (strict)."""
    extra_rollouts: Annotated[int, Field(ge=0)] = 0
    """Rollouts started beyond group_size; the first group_size to finish win, the rest are cancelled."""
    advantage: str = "grpo"
    """grpo, rloo, mean, none, or "module:attr" of a function from rewards to advantages."""
    keep_equal_rewards: bool = False
    """Train on groups whose rewards are all equal too (they carry no gradient with grpo and rloo)."""
    max_barren_batches: Positive = 20
    """End the run when this many batches' worth of rollouts in a row yields nothing to train on, or, with
    batch.on_stuck = "wait", when so much is queued and still no exact batch can be made of it."""
    drain_s: Seconds = 10
    """After the first SIGINT or SIGTERM: how long open groups may take to end; what runs then is asked again by the
    next run. A supervisor must wait a little longer before it kills."""
    stall_timeout_s: Seconds = 300
    """No rollout ends and no batch is taken for this long: one diagnostic record says what is waited for."""
    exit_on_stall: bool = False
    """End the run with an error when it stalls."""


class StalenessConfig(Section):
    """How old data may be when it is trained on."""

    max_versions: Annotated[int, Field(ge=0)] = 2
    """Most policy versions between sampling and training. With mode = "pace" it also bounds what is under way, in
    flight and queued together, to max_versions + 1 batches; batch.max_buffered binds first where it is lower."""
    mode: Literal["pace", "drop"] = "pace"
    """pace admits new work only while it can be trained in time; drop cancels and evicts what became too old."""


class TrainerConfig(Section):
    """The link to the trainer."""

    transport: Literal["zmq", "filesystem"] = "zmq"
    """How batches reach the trainer."""
    bind: str = "tcp://127.0.0.1:5555"
    """Where the trainer connects: tcp://host:port, port 0 picks a free one, or ipc:///path/socket."""
    directory: Path | None = None
    """Shared directory of the filesystem transport; <run_dir>/trainer when unset."""
    world_size: Positive = 1
    """Ranks of the trainer, each of which gets its share of every batch."""
    ahead: Positive = 2
    """Batches that may be formed and not trained on: the one in the trainer's hands, and the next. Raise it for a trainer that takes more
    of them before it trains (orchestrator bridge atropos --ahead); staleness.max_versions must be at least ahead - 1 for it to be reached."""
    keep_batches: Annotated[int, Field(ge=0)] | Literal["checkpoint"] = 4
    """Acknowledged batches that can be asked for again; it costs disk, and neither starts nor holds back rollouts.
    "checkpoint": all since the last step that the trainer reported as saved (trainer.checkpointed)."""
    allow_rewind: bool = False
    """Whether a trainer that resumes from an older step than batches are kept of (TrainerClient(…, resume_after=N, rewind=True)) has
    the run set back to that step: it restarts as with `orchestrator run --rewind-to N`, when every rank asks for it."""
    versions_dir: Path | None = None
    """Directory of step_N folders with a STABLE marker, when versions are published that way."""
    secret_key_file: str | None = None
    """CURVE secret key of this side: a file, or "env:NAME"."""
    trainer_key_files: list[str] = []
    """CURVE public keys of the trainers that are let in: files, or "env:NAME"."""
    token_env: str | None = None
    """Name of the environment variable that holds a token which trainers must present."""
    insecure: bool = False
    """Allow a bind address off loopback without a key."""


class JournalConfig(Section):
    """The record that survives a crash."""

    commit_interval_s: Seconds = 0.05
    """Longest time a finished group waits for the disk."""
    commit_bytes: Positive = 8 * 1024 * 1024
    """A commit is made earlier when this much waits."""
    max_backlog_bytes: Positive = 512 * 1024 * 1024
    """Dispatch pauses while more than this waits for the disk."""
    fsync: bool = True
    """Bring batches and acknowledgements to disk before the trainer relies on them; false survives kill -9 only."""
    compress_level: Annotated[int, Field(ge=0, le=9)] = 0
    """zlib level of payloads; 0 stores them raw."""


class ArchiveConfig(Section):
    """What is kept of the rollouts for people to read: numbers of every group, conversations of a sample."""

    enabled: bool = True
    """Whether to keep anything; the run itself never reads it."""
    groups_per_step: Annotated[int, Field(ge=0)] = 3
    """Groups of each env and step whose conversations are kept, the best and the worst among them."""
    groups_per_evaluation: Annotated[int, Field(ge=0)] = 16
    """Tasks of each evaluation whose conversations are kept."""
    max_bytes: Annotated[int, Field(ge=2**20)] = 2**30
    """Size of the file; above it conversations of older steps are thinned out, and then the oldest rows go."""
    max_days: Annotated[float, Field(gt=0)] = 90
    """Groups that ended longer ago are forgotten."""


class HttpConfig(Section):
    """Status, metrics and health over HTTP."""

    enabled: bool = True
    """Whether to serve at all."""
    host: str = "127.0.0.1"
    """Address; off loopback a token is required."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8600
    """Port; 0 picks a free one."""
    token_env: str | None = None
    """Name of the environment variable that holds the bearer token; who has it may read the status and change the run."""


class LogConfig(Section):
    """What is said, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important events that are shown."""
    format: Literal["auto", "pretty", "json"] = "auto"
    """auto: pretty on a terminal, JSON otherwise."""
    progress: Literal["auto", "on", "off"] = "auto"
    """Live progress display; auto: on a terminal."""
