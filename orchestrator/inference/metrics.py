"""What an engine says about itself on `/metrics`: vLLM's and SGLang's names, read into one shape.

Only a handful of samples out of several hundred lines is wanted, so lines are picked by name and not parsed
as a whole. Several engines behind one server (data parallelism) are summed, except the cache usage, of which
the fullest counts.
"""

import math

import msgspec


class EngineMetrics(msgspec.Struct, frozen=True):
    """One reading. Counters (`preemptions`, `generated_tokens`) restart at zero with the engine."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    preemptions: int = 0
    generated_tokens: int = 0


_RUNNING = frozenset({"vllm:num_requests_running", "sglang:num_running_reqs"})
_WAITING = frozenset({"vllm:num_requests_waiting", "sglang:num_queue_reqs"})
_USAGE = frozenset({"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"})
# SGLang's gauge `num_retracted_reqs` counts the last round only; the counter is the one that adds up.
_PREEMPTIONS = frozenset({"vllm:num_preemptions_total", "sglang:num_retracted_requests_total"})
_GENERATED = frozenset({"vllm:generation_tokens_total", "sglang:generation_tokens_total"})
_PREFIXES = ("vllm:", "sglang:")


def parse_metrics(text: str) -> EngineMetrics | None:
    """The reading in a Prometheus text page, or None if it has none of the known engines' queue gauges."""
    running = waiting = preemptions = generated = 0.0
    usage = 0.0
    known = False
    for line in text.splitlines():
        if not line.startswith(_PREFIXES):
            continue
        name, value = _sample(line)
        if math.isnan(value):
            continue
        if name in _RUNNING:
            running += value
            known = True
        elif name in _WAITING:
            waiting += value
        elif name in _USAGE:
            usage = max(usage, value)
        elif name in _PREEMPTIONS:
            preemptions += value
        elif name in _GENERATED:
            generated += value
    if not known:
        return None
    return EngineMetrics(
        running=int(running),
        waiting=int(waiting),
        cache_usage=usage,
        preemptions=int(preemptions),
        generated_tokens=int(generated),
    )


def _sample(line: str) -> tuple[str, float]:
    """Name and value of a sample line; NaN if it cannot be read (a bad line is no reason to lose the others)."""
    opening = line.find("{")
    if opening >= 0:
        name, rest = line[:opening], line[line.rfind("}") + 1 :]
    else:
        name, _, rest = line.partition(" ")
    try:
        value = float(rest.split()[0])
    except (ValueError, IndexError):
        return name, math.nan
    return name, value if math.isfinite(value) else math.nan
