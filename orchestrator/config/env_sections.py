"""The tables of environments: [train] and [eval] with an entry for each env, [domains.NAME], and [ray]."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from orchestrator.config.section import Entries, Positive, Seconds, Section, Share
from orchestrator.config.sections import CurriculumConfig

RESOURCES = {"CPU": 1.0}
"""What a server on Ray takes up unless an env says otherwise."""


def _one_or_several(value: Any) -> Any:
    several = isinstance(value, list) and value and all(isinstance(part, str) for part in value)
    if not isinstance(value, str) and not several:
        raise PydanticCustomError("ids", "Input should be a valid string, or a list of them")
    return value


class EnvSection(Section):
    """What training and evaluation environments have in common."""

    id: Annotated[str | list[str], BeforeValidator(_one_or_several)]
    """<loader>::<environment>[@split], a built-in's name, or "module:Class" of an Environment. A list of ids makes
    one env of several datasets, whose tasks come one after the other; args go to each of them."""
    name: str = ""
    """Unique name; the id when empty, several joined by " + "."""
    args: dict[str, Any] = {}
    """Passed to the environment's constructor."""
    python: str | None = None
    """Interpreter of the env servers, when the environment needs its own virtualenv."""
    workers: Positive = 1
    """Env server processes to spawn."""
    addresses: Entries = []
    """Servers that run elsewhere, instead of spawned ones: addresses, or sources that name them and are followed
    (dns+tcp://NAME:PORT, file:PATH; docs/discovery.md)."""
    launcher: Literal["process", "ray"] = "process"
    """Where servers are started: as processes of this machine, or as actors on the nodes of a Ray cluster (docs/ray.md)."""
    resources: dict[str, Annotated[float, Field(ge=0)]] = RESOURCES
    """What a server on Ray takes up of its node: CPU, GPU, memory, or resources of the cluster's own."""
    capacity: Positive = 256
    """Rollouts that one spawned server runs at once."""
    system_prompt: str | None = None
    """Put in front of every conversation."""
    sampling: dict[str, Any] = {}
    """Overrides of the table's sampling parameters; tables inside (extra_body) are merged key by key."""
    ready_timeout_s: Seconds = 120
    """How long a server may take to load its environment."""
    silence_timeout_s: Seconds = 30
    """A server that does not answer for this long is restarted."""
    reconnect_timeout_s: Seconds = 600
    """How long there may be no ready server, where they run elsewhere; then the run ends."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one server within restart_window_s before the environment counts as lost."""
    restart_window_s: Seconds = 600
    """See max_restarts."""
    rollout_timeout_s: Seconds | None = None
    """Longest attempt of this env; unset: dispatch.rollout_timeout_s."""
    group_timeout_s: Seconds | None = None
    """Longest group of this env, retries included; unset: dispatch.group_timeout_s."""
    max_attempts: Positive | None = None
    """Attempts at one rollout of this env before it counts as failed; unset: dispatch.max_attempts."""
    server_key_file: str | None = None
    """CURVE public key of servers at tcp:// addresses: a file, or "env:NAME"."""
    secret_key_file: str | None = None
    """CURVE secret key of this side for these servers: a file, or "env:NAME"."""
    insecure: bool = False
    """Allow tcp:// addresses off loopback without keys."""

    @property
    def label(self) -> str:
        """The env's name."""
        return self.name or " + ".join(self.ids)

    @property
    def ids(self) -> list[str]:
        """The id, or all of them."""
        return [self.id] if isinstance(self.id, str) else self.id


class TrainEnvSection(EnvSection):
    """A training environment; its settings override those of [train]."""

    ratio: Annotated[float, Field(ge=0)] | None = None
    """Share in the mix, or in its domain where [mix.domains] has targets; all envs set one or none does (then the number
    of tasks counts)."""
    min_batch_allocation: Share = 0.0
    """At least this share of every batch: ceil(share x batch.size) sequences. Kept by splitting groups where whole
    ones do not fit; with batch.on_stuck = "wait" lowered to what whole groups can give, and said so."""
    on_unmet_minimum: Literal["waive", "wait"] = "waive"
    """What happens to the minimum while the env yields nothing or its servers are down. waive: batches are made
    without it, and it is said; wait: no batch is made until the env delivers again."""
    group_size: Positive | None = None
    """Rollouts per task."""
    max_inflight: Positive | None = None
    """Most rollouts of this env in flight."""
    rollouts_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Most rollouts of this env started per minute."""
    curriculum: CurriculumConfig | None = None
    """Which task of this env next; takes the place of [curriculum] as a whole."""


class TrainConfig(Section):
    """Training environments and what they share."""

    group_size: Positive = 8
    """Rollouts per task, compared with each other."""
    sampling: dict[str, Any] = {}
    """Sampling parameters, as the inference servers name them. What shapes the distribution is neutral unless it is set
    here: temperature = 1, top_p = 1, top_k = -1, min_p = 0, repetition_penalty = 1. A name that neither the chat API nor
    vLLM nor SGLang has is refused; what only your engine knows goes into the table extra_body, which is unpacked into
    the request."""
    neutral_sampling: bool = True
    """Whether the neutral values are sent; false for servers that refuse such fields. What is not sent, vLLM takes from
    generation_config.json in the model's folder."""
    env: Annotated[list[TrainEnvSection], Field(min_length=1)]
    """The environments, one [[train.env]] each."""


class EvalEnvSection(EnvSection):
    """An evaluation environment; its settings override those of [eval]."""

    num_examples: Positive | None = None
    """Tasks of the split that are evaluated; all when unset."""
    rollouts_per_example: Positive | None = None
    """Attempts at each task (the k of avg@k and pass@k)."""
    interval: Positive | None = None
    """Steps between evaluations of this env; unset: eval.interval."""


class EvalConfig(Section):
    """Evaluations during the run."""

    interval: Positive = 20
    """Steps between evaluations; one also runs before the first step, and one after the last. Each waits until the
    version of its step is loaded, and is booked with the version that it starts with: where versions are published
    less often than every interval steps, evaluations come as often as new versions do."""
    num_examples: Positive | None = None
    """Tasks of the split that are evaluated; all when unset."""
    rollouts_per_example: Positive = 1
    """Attempts at each task."""
    sampling: dict[str, Any] = {}
    """Sampling parameters of evaluations, as in [train]; those are not taken over. For what is not set, the model's own
    defaults (generation_config.json) hold."""
    env: list[EvalEnvSection] = []
    """The environments, one [[eval.env]] each."""


class RayConfig(Section):
    """The cluster of environments with launcher = "ray"."""

    address: str | None = None
    """Where it is: host:port of its head, or "auto" for the one that this machine is a node of. Unset: what the variable
    RAY_ADDRESS names, else a small one on this machine that ends with the run."""
    runtime_env: dict[str, Any] = {}
    """Handed to Ray as it is, to bring an environment's modules, packages and variables to the nodes (working_dir, pip,
    env_vars, …)."""


class DomainConfig(Section):
    """Environments without a class: ids of the form <domain>::<dataset>[@subset]."""

    rollout: str
    """ "module:function" of an async function (task, model, **args) that returns a Rollout."""
    dataset: str
    """ "module:function" of a function (name, subset, **args) that returns tasks."""
    system_prompt: str | None = None
    """Put in front of every conversation, unless the env sets its own."""
