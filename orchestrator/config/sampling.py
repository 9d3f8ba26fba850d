"""Sampling parameters: what a request of the chat API may carry, and what is wrong with a table of them.

A misspelt parameter would be sent and ignored by most engines, so that a run samples otherwise than it was told to. So
names are held against those that OpenAI, vLLM and SGLang know. Whatever else an engine understands goes into the table
`extra_body`, which is unpacked into the request as OpenAI's own client does.
"""

import difflib
import math
from collections.abc import Iterator, Mapping

from envs.model import RESERVED
from orchestrator.config.shapes import Problem

EXTRA = "extra_body"
_OF_THE_CHAT_API = """
    temperature top_p max_tokens max_completion_tokens stop seed presence_penalty frequency_penalty logit_bias
    top_logprobs response_format tool_choice parallel_tool_calls reasoning_effort user metadata service_tier store
    verbosity
"""
_OF_VLLM = """
    top_k min_p min_tokens repetition_penalty length_penalty best_of use_beam_search stop_token_ids
    include_stop_str_in_output ignore_eos skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    prompt_logprobs allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens
    chat_template chat_template_kwargs documents mm_processor_kwargs guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag structured_outputs priority
    request_id cache_salt kv_transfer_params vllm_xargs logits_processors return_tokens_as_token_ids include_reasoning
    thinking_token_budget
"""
_OF_SGLANG = """
    regex ebnf no_stop_trim stop_regex separate_reasoning stream_reasoning lora_path session_params rid
    custom_logit_processor custom_params return_hidden_states
"""
KNOWN = frozenset(f"{_OF_THE_CHAT_API} {_OF_VLLM} {_OF_SGLANG}".split())


def find_bad_sampling(data: Mapping[str, object]) -> Iterator[Problem]:
    """What is wrong with every table of sampling parameters of a configuration."""
    for name in ("train", "eval"):
        table = data.get(name)
        if not isinstance(table, Mapping):
            continue
        yield from _bad(table.get("sampling"), f"{name}.sampling")
        envs = table.get("env")
        for position, env in enumerate(envs if isinstance(envs, list) else []):
            if isinstance(env, Mapping):
                yield from _bad(env.get("sampling"), f"{name}.env[{position}].sampling")


def _bad(sampling: object, path: str) -> Iterator[Problem]:
    if not isinstance(sampling, Mapping):
        return
    yield from _not_json(sampling, path)
    extra = sampling.get(EXTRA)
    for name in RESERVED.intersection([*sampling, *(extra if isinstance(extra, Mapping) else ())]):
        yield f"{path}.{name}", "is not a sampling parameter: it is decided for every request by itself"
    for name in sampling:
        if name not in KNOWN | RESERVED | {EXTRA}:
            close = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.6)
            guess = f'did you mean "{close[0]}"? ' if close else ""
            yield (
                f"{path}.{name}",
                f"no such sampling parameter is known; {guess}what only your engine knows goes into {path}.{EXTRA}",
            )


def _not_json(value: object, path: str) -> Iterator[Problem]:
    """Requests are JSON, which has neither dates nor numbers that are not finite."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _not_json(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _not_json(inner, f"{path}[{position}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"input should be a finite number (got {value})"
    elif value is not None and not isinstance(value, (str, int, float)):
        yield path, f"a {type(value).__name__} cannot be sent as JSON; write it as text"
