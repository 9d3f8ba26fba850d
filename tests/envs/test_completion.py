"""Completions: token ids are read as they are written, and nothing else is taken for them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.completion import decode_completion, decode_text_completion, read_turn
from envs.errors import RolloutFailure
from tests.support.chat_endpoint import completion, text_completion

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50)


@given(prompt=IDS, sampled=IDS, indent=st.sampled_from([None, 0, 3, "\t"]))
def test_token_ids_and_log_probabilities_arrive_as_they_were_written(
    prompt: list[int], sampled: list[int], indent: int | str | None
) -> None:
    """To the last bit, with any white space around them."""
    logprobs = [-(token % 97) / 7 for token in sampled]
    body = json.dumps(completion(prompt=prompt, sampled=sampled, logprobs=logprobs), indent=indent).encode()
    turn = read_turn(decode_completion(body, endpoint="e"), endpoint="e")
    assert (turn.prompt.tolist(), turn.completion.tolist()) == (prompt, sampled)
    assert turn.logprobs.tolist() == np.array(logprobs, np.float32).tolist()
    arrays = (turn.prompt, turn.completion, turn.logprobs)
    assert [array.dtype.name for array in arrays] == ["int32", "int32", "float32"]


@pytest.mark.parametrize("place", ["prompt_token_ids", "token_ids"])
@pytest.mark.parametrize(
    "ids",
    [[-1], [2**31], [10**30], [1.5], [1e3], ["1"], [None], [[1]], [True], {"0": 1}, "12", 7, "", [1, [2]]],
)
def test_what_is_no_token_id_is_a_bad_response(place: str, ids: object) -> None:
    """Another attempt may do better; the endpoint is named."""
    answer = completion(sampled=[10], logprobs=[-0.5])
    (answer if place in answer else answer["choices"][0])[place] = ids
    with pytest.raises(RolloutFailure, match="http://e did not answer with a") as caught:
        read_turn(decode_completion(json.dumps(answer).encode(), endpoint="http://e"), endpoint="http://e")
    assert (caught.value.kind, caught.value.retryable) == ("bad_response", True)


def test_a_server_that_does_not_repeat_the_prompt_is_believed_to_have_used_it() -> None:
    """Where token ids were asked with, those; where the server says which, the server's."""
    answer = text_completion(prompt=[1, 2], sampled=[3])
    said = decode_text_completion(json.dumps(answer).encode(), endpoint="e")
    assert read_turn(said, endpoint="e", prompt=[9, 9]).prompt.tolist() == [1, 2]
    del answer["choices"][0]["prompt_token_ids"]
    unsaid = decode_text_completion(json.dumps(answer).encode(), endpoint="e")
    assert read_turn(unsaid, endpoint="e", prompt=[9, 9]).prompt.tolist() == [9, 9]
