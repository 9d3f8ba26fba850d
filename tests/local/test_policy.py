"""The local policy: probabilities, gradients, and weights on disk."""

from pathlib import Path

import numpy as np
import pytest

from orchestrator.local.policy import (
    WEIGHTS_FILE,
    Experience,
    Policy,
    WeightsError,
    find_rows,
    load_policy,
    read_prompt,
)
from orchestrator.local.tokenizer import ASSISTANT, END, NUM_OUTPUTS, apply_chat_template, encode


def prompt_of(*contents: str) -> list[int]:
    """A conversation in which user and assistant take turns."""
    return apply_chat_template(
        [
            {"role": ("user", "assistant")[number % 2], "content": content}
            for number, content in enumerate(contents)
        ]
    )


def random_policy(seed: int = 0) -> Policy:
    policy = Policy()
    policy.table = np.random.default_rng(seed).normal(0, 0.5, policy.table.shape).astype(np.float32)
    return policy


def logprobs_of(
    policy: Policy, prompt: list[int], answer: list[int]
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Log-probability of each token of an answer, token by token, as the engine computes them."""
    keys, last = read_prompt(prompt)
    found = []
    for position, token in enumerate(answer):
        previous = answer[position - 1] if position else ASSISTANT
        rows = find_rows(np.array([keys], np.uint64), np.array([position]), np.array([previous]))
        found.append(policy.log_probabilities(rows, np.array([last]))[0, token])
    return np.array(found, np.float32)


def experience_of(policy: Policy, prompt: list[int], answer: list[int], advantage: float) -> Experience:
    tokens = np.array(prompt + answer, np.int32)
    mask = np.array([0] * len(prompt) + [1] * len(answer), np.uint8)
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[len(prompt) :] = logprobs_of(policy, prompt, answer)
    experience = Experience()
    experience.add(tokens, mask, logprobs, mask * np.float32(advantage))
    return experience


def test_probabilities_sum_to_one_and_start_near_uniform_over_letters_and_digits() -> None:
    """A new policy knows nothing: every letter and digit is equally likely."""
    policy = Policy()
    keys, last = read_prompt(prompt_of("reverse abc"))
    rows = find_rows(np.array([keys], np.uint64), np.array([0]), np.array([ASSISTANT]))
    probabilities = np.exp(policy.log_probabilities(rows, np.array([last])))[0]
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-5)
    alphanumeric = probabilities[encode("abcdefghijklmnopqrstuvwxyz0123456789")]
    assert alphanumeric.min() == pytest.approx(alphanumeric.max())
    assert alphanumeric.max() < 0.05


def test_training_sees_the_probabilities_that_sampling_saw() -> None:
    """Features computed from a whole sequence of two turns equal those of decoding, so ratios start at one."""
    policy = random_policy()
    first, second = [*encode("ab"), END], [*encode("7"), END]
    opening = prompt_of("lookup c")
    follow_up = prompt_of("lookup c", "ab", "unknown")
    tokens = np.array(follow_up + second, np.int32)
    mask = np.zeros(len(tokens), np.uint8)
    mask[len(opening) : len(opening) + 3] = 1
    mask[len(follow_up) :] = 1
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[mask == 1] = np.concatenate(
        (logprobs_of(policy, opening, first), logprobs_of(policy, follow_up, second))
    )
    experience = Experience()
    experience.add(tokens, mask, logprobs, np.ones(len(tokens), np.float32))
    rows, last, actions, old, _ = experience.arrays()
    assert actions.tolist() == first + second
    now = policy.log_probabilities(rows, last)[np.arange(len(actions)), actions]
    np.testing.assert_allclose(now, old, atol=1e-5)


def test_a_step_follows_the_gradient_of_the_log_probability() -> None:
    """The change of the table is the numerical gradient of the advantage-weighted log-probability."""
    policy, prompt, answer = random_policy(), prompt_of("copy xx"), [*encode("xq"), END]
    before = policy.table.copy()
    experience = experience_of(policy, prompt, answer, advantage=-1.5)
    policy.learn(experience, learning_rate=1e-3)
    change = (policy.table - before) / 1e-3
    probe = random_policy()
    touched = np.argwhere(np.abs(change) > 1e-4)
    assert len(touched) > 100
    for row, column in touched[:: len(touched) // 40]:
        values = []
        for shift in (1e-2, -1e-2):
            probe.table = before.copy()
            probe.table[row, column] += shift
            values.append(-1.5 * float(logprobs_of(probe, prompt, answer).sum()))
        assert change[row, column] == pytest.approx((values[0] - values[1]) / 2e-2, abs=2e-3)


@pytest.mark.parametrize(("advantage", "rises"), [(1.0, True), (-1.0, False)])
def test_learning_moves_an_answer_the_way_its_advantage_points(advantage: float, rises: bool) -> None:
    """What earned more than its group becomes likelier, what earned less becomes rarer."""
    policy, prompt, answer = Policy(), prompt_of("say b"), [*encode("b"), END]
    before = logprobs_of(policy, prompt, answer).sum()
    policy.learn(experience_of(policy, prompt, answer, advantage), learning_rate=0.1)
    assert bool(logprobs_of(policy, prompt, answer).sum() > before) is rises


def test_without_a_learning_rate_nothing_is_learned() -> None:
    """A learning rate of 0 leaves every weight as it was."""
    policy, prompt = Policy(), prompt_of("say b")
    policy.learn(experience_of(policy, prompt, encode("b"), 1.0), learning_rate=0.0)
    assert not policy.table.any()


def test_tokens_that_moved_far_enough_are_left_out() -> None:
    """Beyond the clip range a token gets no further push the same way, but may come back."""
    policy, prompt, answer = Policy(), prompt_of("say b"), encode("b")
    good = experience_of(policy, prompt, answer, 1.0)
    bad = experience_of(policy, prompt, answer, -1.0)
    policy.learn(good, learning_rate=1.0)
    table = policy.table.copy()
    assert policy.learn(good, learning_rate=1.0)["clipped"] == 1.0
    np.testing.assert_array_equal(policy.table, table)
    assert policy.learn(bad, learning_rate=1.0)["clipped"] == 0.0
    assert not np.array_equal(policy.table, table)


def test_copying_carries_over_to_letters_never_seen() -> None:
    """Having learned to repeat some letters, the policy repeats others too."""
    policy = Policy()
    for letter in "abcde" * 8:
        prompt = prompt_of(f"say {letter}")
        policy.learn(experience_of(policy, prompt, encode(letter), 1.0), learning_rate=0.3)
    assert np.exp(logprobs_of(policy, prompt_of("say z"), encode("z")))[0] > 0.5


def test_weights_survive_a_round_trip(tmp_path: Path) -> None:
    """Saved weights are loaded as they were, from the folder and from the file; nothing else is left there."""
    policy = random_policy()
    folder = policy.save(tmp_path / "step_1")
    np.testing.assert_array_equal(load_policy(folder).table, policy.table)
    np.testing.assert_array_equal(load_policy(folder / WEIGHTS_FILE).table, policy.table)
    assert [path.name for path in folder.iterdir()] == [WEIGHTS_FILE]


def test_unusable_weights_are_refused_by_name(tmp_path: Path) -> None:
    """Missing, damaged, foreign and infinite weights raise an error that names the file."""
    with pytest.raises(WeightsError, match="no weights at"):
        load_policy(tmp_path / "nowhere")
    (tmp_path / "damaged").write_bytes(b"PK\x03\x04 not a zip file")
    with pytest.raises(WeightsError, match="cannot be read"):
        load_policy(tmp_path / "damaged")
    np.savez(tmp_path / "foreign.npz", table=np.zeros((2, NUM_OUTPUTS)))
    with pytest.raises(WeightsError, match="not of this policy"):
        load_policy(tmp_path / "foreign.npz")
    np.savez(tmp_path / "infinite.npz", table=np.full(Policy().table.shape, np.inf))
    with pytest.raises(WeightsError, match="not of this policy"):
        load_policy(tmp_path / "infinite.npz")
