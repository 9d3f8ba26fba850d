"""The local tokenizer: exact round trips and a template whose prompts extend each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.local.tokenizer import (
    CHARACTERS,
    END,
    NUM_OUTPUTS,
    OTHER,
    ChatError,
    apply_chat_template,
    decode,
    describe,
    encode,
)

texts = st.text(alphabet=CHARACTERS, max_size=12)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts}
    ),
    min_size=1,
    max_size=5,
)


@given(texts)
def test_printable_text_survives_a_round_trip(text: str) -> None:
    """Encoding and decoding printable ASCII gives the same text."""
    assert decode(encode(text)) == text


def test_other_characters_become_one_token_each() -> None:
    """A character outside of the vocabulary is one token of its own kind, so prompts in any language work."""
    assert encode("a\né") == [*encode("a"), OTHER, OTHER]


@given(conversation=messages, written=st.lists(st.integers(0, NUM_OUTPUTS - 1), max_size=6), reply=texts)
def test_what_was_written_is_a_prefix_of_the_next_prompt(
    conversation: list[dict[str, str]], written: list[int], reply: str
) -> None:
    """Prompt and completion of one turn, ended or cut short, are a prefix of the next turn's prompt."""
    completion = written[: written.index(END) + 1] if END in written else written
    prompt = apply_chat_template(conversation)
    answer = {"role": "assistant", "content": decode(completion)}
    longer = apply_chat_template([*conversation, answer, {"role": "user", "content": reply}])
    assert longer[: len(prompt) + len(completion)] == prompt + completion


@pytest.mark.parametrize(
    ("conversation", "complaint"),
    [
        ([], "must not be empty"),
        ([{"role": "wizard", "content": "a"}], r"messages\[0\]\.role"),
        ([{"content": "a"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": None}], r"messages\[1\]\.content"),
    ],
)
def test_a_conversation_that_cannot_be_expressed_is_refused(
    conversation: list[dict[str, object]], complaint: str
) -> None:
    """The error names the message and the field."""
    with pytest.raises(ChatError, match=complaint):
        apply_chat_template(conversation)


def test_every_output_can_be_shown() -> None:
    """Each token that a policy may write has a text of its own."""
    assert len({describe(token) for token in range(NUM_OUTPUTS)}) == NUM_OUTPUTS
