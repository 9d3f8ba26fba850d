"""The TextArena adapter against games of the real library, and against its own way to play them."""

from typing import Any

import pytest

from envs.adapters.textarena import refuse_other_releases
from envs.errors import EnvironmentLoadError
from tests.adapters.conftest import Driver

TESTED = "textarena_tested"
MINUTES = 600
"""The library takes many seconds to import where the machine is busy."""

pytestmark = pytest.mark.timeout(MINUTES)

WON = ["[0]", "[3]", "[1]", "[4]", "[2]"]
"""Moves of both players in tic-tac-toe; the first wins with the upper row."""


@pytest.fixture(scope="module", autouse=True)
def _registered(request: pytest.FixtureRequest) -> None:
    """The tests' own games are in the library's registry."""
    if "textarena" in request.fixturenames:
        request.getfixturevalue("textarena").call(f"{TESTED}:register")


def replies(moves: list[str], players: int = 2) -> list[list[dict[str, Any]]]:
    """A script by turn of a conversation: both players' first moves, then both players' second ones."""
    rounds = [moves[start : start + players] for start in range(0, len(moves), players)]
    return [[{"content": move} for move in moves_of_round] for moves_of_round in rounds]


def asked(answer: dict[str, Any], seat: str | None = None) -> list[str]:
    """What a seat was told, turn by turn."""
    messages = answer["transcripts"][0]["messages"]
    return [
        message["content"]
        for message in messages
        if message["role"] == "user" and (seat is None or message.get("seat") == seat)
    ]


def test_self_play_has_one_sequence_and_one_reward_for_each_seat(textarena: Driver) -> None:
    """Zero-sum rewards would vanish in one mean; each seat's turns extend each other."""
    answer = textarena.rollout("textarena::TicTacToe-v0", turns=replies(WON))
    rollout = answer["rollouts"][0]
    assert rollout["seats"] == ["player 0", "player 1"]
    assert rollout["rewards"] == [1.0, -1.0]
    assert rollout["reward"] == 0.0
    assert rollout["stop_reason"] == "game_over"
    assert rollout["metrics"]["turns"] == 5
    sampled = sum(answer["mask"])
    assert sampled == sum(len(move) + 1 for move in WON)


def test_what_seats_see_and_earn_is_what_the_library_shows_and_pays(textarena: Driver) -> None:
    """The library's wrapper repeats everything in each turn; ours is the same, piece by piece, without the own moves."""
    library = textarena.call(f"{TESTED}:library_run", game="TicTacToe-v0", seed=0, players=2, moves=WON)
    answer = textarena.rollout("textarena::TicTacToe-v0", turns=replies(WON))
    assert dict(enumerate(answer["rollouts"][0]["rewards"])) == {
        int(player): reward for player, reward in library["rewards"].items()
    }
    for player, seen in library["seen"].items():
        others = "\n".join(asked(answer, f"player {player}"))
        own = [line for line in seen.splitlines() if line.startswith(f"[Player {player}]")]
        kept = [line for line in seen.strip().splitlines() if line not in own]
        assert others.splitlines() == kept


def test_a_game_for_one_is_a_plain_rollout(textarena: Driver) -> None:
    """No seat, its reward is the rollout's, and its one conversation is one sequence."""
    answer = textarena.rollout("textarena::Dice-v0", turns=[[{"content": "[3]"}]])
    rollout = answer["rollouts"][0]
    assert not rollout.get("seats")
    assert len(rollout["lengths"]) == 1
    assert rollout["reward"] in (0.0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0)
    assert len(asked(answer)) == 3


def test_a_game_follows_from_its_seed_also_among_others(textarena: Driver) -> None:
    """Games share the global generator in the library; here each has its own, so that a retry is the same game."""
    runs = [{"index": index} for index in (5, 6, 7, 8, 5)]
    turns = [[{"content": "[3]"}]]
    together = textarena.play("textarena::Dice-v0", runs, turns=turns)["answers"]
    alone = textarena.rollout("textarena::Dice-v0", runs=[{"index": 5}], turns=turns)
    library = textarena.call(f"{TESTED}:library_run", game="Dice-v0", seed=5, players=1, moves=["[3]"] * 3)
    assert asked(together[0]) == asked(together[-1]) == asked(alone)
    assert [line for line in library["seen"]["0"].strip().splitlines() if "[Player" not in line] == asked(
        alone
    )
    assert len({tuple(asked(answer)) for answer in together}) > 1


def test_a_fixed_opponent_is_another_model_and_is_not_trained_on(textarena: Driver) -> None:
    """The policy plays one seat, whose tokens alone are handed in; the seats change with the task."""
    args = {"opponent": {"model": "frozen", "sampling": {"temperature": 0.1}}}
    turns = replies(WON)
    first = textarena.play("textarena::TicTacToe-v0", [{"index": 0}], turns=turns, args=args)
    second = textarena.play("textarena::TicTacToe-v0", [{"index": 1}], turns=turns, args=args)
    assert [request["model"] for request in first["requests"]] == ["policy", "frozen"] * 2 + ["policy"]
    assert [request["model"] for request in second["requests"]] == ["frozen", "policy"] * 2 + ["frozen"]
    assert first["answers"][0]["rollouts"][0]["reward"] == 1.0
    assert second["answers"][0]["rollouts"][0]["reward"] == -1.0
    assert len(first["answers"][0]["rollouts"][0]["lengths"]) == 1
    assert "return_token_ids" not in first["requests"][1]


def test_an_opponent_elsewhere_that_fails_is_not_the_policys_endpoints_fault(textarena: Driver) -> None:
    """Nothing listens on port 1; the kind of the failure says whose it is."""
    args = {"opponent": {"model": "frozen", "base_url": "http://127.0.0.1:1/v1"}, "seat": 0}
    answer = textarena.rollout("textarena::TicTacToe-v0", turns=replies(WON), args=args)
    assert (answer["kind"], answer["retryable"]) == ("opponent_connection", True)


def test_a_wrong_move_is_told_and_a_second_one_loses(textarena: Driver) -> None:
    """As the library does it."""
    turns = [[{"content": "no brackets"}], [{"content": "none again"}]]
    answer = textarena.rollout("textarena::TicTacToe-v0", turns=turns)
    rollout = answer["rollouts"][0]
    assert rollout["metrics"]["player 0 invalid move"] == 1.0
    assert rollout["metrics"]["player 0 reward"] == -1.0
    assert rollout["seats"] == ["player 0"], "the other seat's turn never came"
    assert "invalid move" in asked(answer, "player 0")[1]


def test_a_game_without_an_end_is_cut(textarena: Driver) -> None:
    """It earns what `unfinished_reward` says, and is truncated."""
    answer = textarena.rollout(
        "textarena::TicTacToe-v0", turns=replies(WON), args={"max_turns": 3, "unfinished_reward": -0.5}
    )
    rollout = answer["rollouts"][0]
    assert (rollout["stop_reason"], rollout["truncated"], rollout["reward"]) == ("max_turns", True, -0.5)
    assert rollout["metrics"]["finished"] == 0.0


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("TicTacTow-v0", {}, 'did you mean "TicTacToe-v0"'),
        ("TicTacToe-v0", {"players": 3}, "cannot be played here: 3 players"),
        ("TicTacToe-v0", {"seat": 0}, "needs an opponent"),
        ("TicTacToe-v0", {"opponent": {"modle": "x"}}, 'no option "modle"; did you mean "model"'),
        ("TicTacToe-v0", {"opponent": {"base_url": "http://x"}}, "opponent needs a model"),
        ("TicTacToe-v0", {"max_turns": 0}, "max_turns must be"),
        ("TicTacToe-v0", {"turns": 0}, "unexpected keyword argument 'turns'"),
        ("Dice-v0", {"opponent": {"model": "x"}}, "is for one player"),
        ("Nobody-v0", {}, "cannot be played here: RuntimeError: no key in SOME_API_KEY"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(
    textarena: Driver, name: str, args: dict[str, Any], said: str
) -> None:
    """Before any game is played."""
    played = textarena.play(f"textarena::{name}", args=args)
    assert said in played["load_error"]
    assert "\n" not in played["load_error"]


def test_games_are_listed_without_their_variants(textarena: Driver) -> None:
    """The variants with and without wrappers are the adapter's affair."""
    names = textarena.names("textarena")
    assert {"TicTacToe-v0", "Wordle-v0", "Dice-v0"} <= set(names)
    assert not [name for name in names if name.endswith(("-raw", "-train"))]


@pytest.mark.parametrize("version", ["0.6.9", "0.8.0", "1.0"])
def test_another_release_is_an_error_that_says_what_to_install(version: str) -> None:
    """The adapter knows one."""
    with pytest.raises(
        EnvironmentLoadError, match=r"not supported.*rollout-orchestrator\[textarena\].*`python`"
    ):
        refuse_other_releases(version)
