"""Turns become sequences: every sampled token once, with its own log-probability, nothing else trained on."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from envs.merging import Turn, extends, merge_turns


def turn(prompt: list[int], completion: list[int], logprobs: list[float] | None = None) -> Turn:
    values = [-0.25] * len(completion) if logprobs is None else logprobs
    return Turn(np.array(prompt, np.int32), np.array(completion, np.int32), np.array(values, np.float32))


def test_a_single_turn_is_one_sequence_whose_completion_is_trained_on() -> None:
    """Prompt tokens are masked out and have log-probability zero."""
    (sequence,) = merge_turns([turn([1, 2], [3, 4], [-0.5, -1.5])])
    assert sequence.tokens.tolist() == [1, 2, 3, 4]
    assert sequence.mask.tolist() == [0, 0, 1, 1]
    assert sequence.logprobs.tolist() == [0.0, 0.0, -0.5, -1.5]
    sequence.check()


def test_turns_that_extend_each_other_are_one_sequence() -> None:
    """Tokens between two completions (tool results, user turns) are part of the sequence but not trained on."""
    (sequence,) = merge_turns([turn([1], [2, 3], [-1, -2]), turn([1, 2, 3, 9, 9], [4], [-3])])
    assert sequence.tokens.tolist() == [1, 2, 3, 9, 9, 4]
    assert sequence.mask.tolist() == [0, 1, 1, 0, 0, 1]
    assert sequence.logprobs.tolist() == [0, -1, -2, 0, 0, -3]


def test_a_prompt_that_rewrites_the_past_starts_a_new_sequence() -> None:
    """A template that drops the reasoning of earlier turns changes their tokens."""
    first, second = merge_turns([turn([1], [2, 3]), turn([1, 2, 9], [4])])
    assert first.tokens.tolist() == [1, 2, 3]
    assert second.tokens.tolist() == [1, 2, 9, 4]
    assert second.mask.tolist() == [0, 0, 0, 1]


def test_a_prompt_shorter_than_what_was_said_starts_a_new_sequence() -> None:
    """A prompt that is only a prefix of the last turn does not extend it."""
    assert len(merge_turns([turn([1, 2], [3]), turn([1, 2], [4])])) == 2


def test_a_prompt_that_is_exactly_the_last_turn_extends_it() -> None:
    """Going on after a length limit adds no token in between."""
    (sequence,) = merge_turns([turn([1], [2]), turn([1, 2], [3])])
    assert sequence.tokens.tolist() == [1, 2, 3]
    assert sequence.mask.tolist() == [0, 1, 1]


def test_sequences_in_which_nothing_was_sampled_are_left_out() -> None:
    """A trainer cannot use a sequence whose mask is all zero."""
    assert merge_turns([turn([1, 2], [])]) == []
    assert merge_turns([]) == []
    assert len(merge_turns([turn([1], []), turn([7], [8])])) == 1


def test_the_arrays_keep_their_compact_types() -> None:
    """int32, uint8 and float32, as the wire sends them."""
    (sequence,) = merge_turns([turn([1], [2])])
    names = [array.dtype.name for array in (sequence.tokens, sequence.mask, sequence.logprobs)]
    assert names == ["int32", "uint8", "float32"]


tokens = st.lists(st.integers(0, 3), max_size=5)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns that extend the last one, or do not, from a tiny vocabulary so that accidents happen too."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(0, 6))):
        goes_on: bool = draw(st.booleans())
        past = [*turns[-1].prompt.tolist(), *turns[-1].completion.tolist()] if turns and goes_on else []
        completion = draw(tokens)
        logprobs = [-(number + 1) - index / 8 for index in range(len(completion))]
        turns.append(turn(past + draw(tokens), completion, logprobs))
    return turns


@given(conversations())
def test_every_sampled_token_is_trained_on_exactly_once_and_in_order(turns: list[Turn]) -> None:
    """Whatever the conversation, masks pick out the completions with their own log-probabilities."""
    sequences = merge_turns(turns)
    sampled = [token for sequence in sequences for token in sequence.tokens[sequence.mask == 1].tolist()]
    logprobs = [value for sequence in sequences for value in sequence.logprobs[sequence.mask == 1].tolist()]
    assert sampled == [token for one in turns for token in one.completion.tolist()]
    assert logprobs == [value for one in turns for value in one.logprobs.tolist()]
    for sequence in sequences:
        sequence.check()
        assert not sequence.logprobs[sequence.mask == 0].any()


@given(conversations())
def test_sequences_break_exactly_where_a_prompt_does_not_extend_the_last_turn(turns: list[Turn]) -> None:
    """Compared with lists, as the definition reads."""
    expected: list[list[int]] = []
    samples = 0
    for index, one in enumerate(turns):
        full = [*one.prompt.tolist(), *one.completion.tolist()]
        past = [*turns[index - 1].prompt.tolist(), *turns[index - 1].completion.tolist()] if index else None
        if past is not None and one.prompt.tolist()[: len(past)] == past:
            assert extends(one, turns[index - 1])
            if samples:
                expected.pop()
            samples += len(one.completion)
        else:
            samples = len(one.completion)
        if samples:
            expected.append(full)
    assert [sequence.tokens.tolist() for sequence in merge_turns(turns)] == expected
