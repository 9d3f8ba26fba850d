"""The service's end of the trainer link for tests: what a test does not name does nothing, and at once."""

from collections.abc import Callable
from typing import Any

from orchestrator.trainer_link.leases import Leases, Transport
from orchestrator.trainer_link.publications import Began, Ended, Loads
from orchestrator.trainer_link.server import BatchServer, open_link


def ignore(*_: object) -> None:
    """A callback that nobody looks at."""


def at_once(callback: Callable[[], None]) -> None:
    """Everything is durable as soon as it is said."""
    callback()


def accept(version: int, path: str | None, decided: Callable[[str], None]) -> None:
    """Every version can be loaded."""
    decided("")


def loaded_at_once(version: int, wait_s: float, then: Loads) -> None:
    """One engine, which has every version."""
    then("", {"engine": ""})


class UpdatesAtOnce:
    """Two engines that stand still for whoever asks; `told` is what was asked, `refuse` why they do not."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.refuse = ""
        self.waiting = 0

    def begin(self, client: str, version: int, then: Began) -> None:
        self.told.append(("begin", version))
        then(self.refuse, ["http://one/v1", "http://two/v1"])

    def end(self, client: str, version: int, failed: str, untouched: bool, then: Ended) -> None:
        self.told.append(("end", version, failed, *(["untouched"] if untouched else [])))
        then(self.refuse, "(sent)")

    def gone(self, client: str) -> None:
        self.told.append(("gone",))


_COMMON: dict[str, Any] = {
    "run": "",
    "rewound": (),
    "token": None,
    "keep": 1,
    "last_step": 0,
    "check_version": accept,
    "wait_loaded": loaded_at_once,
    "on_ack": ignore,
    "on_rank_ack": ignore,
    "on_publish": ignore,
    "on_trained": ignore,
    "on_report": lambda step, metrics: "",
    "on_checkpoint": ignore,
    "on_done": ignore,
    "when_durable": at_once,
}


def make_leases(transport: Transport, **options: Any) -> Leases:
    """Leases without a service behind them."""
    own = {"updates": UpdatesAtOnce(), "can_load": False, "on_told": ignore, "begin_rewind": None}
    return Leases(transport, **{**_COMMON, **own, **_booked(options)})


def make_server(**options: Any) -> BatchServer:
    """A trainer link without a service behind it."""
    link = open_link(options.pop("bind"), keys=options.pop("keys", None), probe_s=options.pop("probe_s", 5.0))
    own = {"updates": UpdatesAtOnce(), "load": None, "link": link, "find_obstacle": None, "on_rewind": ignore}
    return BatchServer(**{**_COMMON, **own, **_booked(options)})


def _booked(options: dict[str, Any]) -> dict[str, Any]:
    """With a book of versions, which a run would keep; `version` is the newest at the start."""
    on_publish, versions = options.pop("on_publish", ignore), [options.pop("version", 0)]

    def publish(version: int, path: str | None, step: int) -> None:
        versions.append(version)
        on_publish(version, path)

    return {**options, "on_publish": publish, "newest_version": lambda: versions[-1]}
