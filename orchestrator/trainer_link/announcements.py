"""What a rank says of versions: that one is published, that it sends one to the engines itself, that it has sent it. No I/O."""

from collections.abc import Callable, Mapping

from orchestrator.trainer.protocol import (
    Engines,
    Missing,
    Ok,
    Publish,
    Published,
    ToTrainer,
    Updated,
    Updating,
)
from orchestrator.trainer_link.publications import Decision, Loads, Publications, Updates, WaitLoaded
from orchestrator.trainer_link.ranks import Rank


class Announcements:
    """Decides by `publications` and `updates`, and answers."""

    def __init__(
        self,
        publications: Publications,
        *,
        send: Callable[[bytes, ToTrainer], None],
        updates: Updates,
        wait_loaded: WaitLoaded,
        on_trained: Callable[[int], None],
        when_durable: Callable[[Callable[[], None]], None],
    ) -> None:
        self._publications = publications
        self._send = send
        self._updates = updates
        self._wait_loaded = wait_loaded
        self._on_trained = on_trained
        self._when_durable = when_durable

    def publish(self, rank: Rank, message: Publish) -> None:
        """A rank has saved a version; it is told once that is recorded, or once the engines have loaded it, as it asked."""

        def answer(decision: Decision) -> None:
            if not decision.accepted:
                self._send(rank.peer, Missing(message.id, decision.note))
                return
            if message.step:
                self._on_trained(message.step)
            if message.wait_s:
                self._when_durable(
                    lambda: self._wait_loaded(message.version, message.wait_s, loaded(decision))
                )
            else:
                self._when_durable(lambda: self._send(rank.peer, Ok(message.id, decision.note)))

        def loaded(decision: Decision) -> Loads:
            def tell(refused: str, engines: Mapping[str, str]) -> None:
                answer = Published(message.id, dict(engines), decision.note)
                self._send(rank.peer, Missing(message.id, refused) if refused else answer)

            return tell

        source = f"rank {rank.number}"
        self._publications.publish(
            message.version, message.path, step=message.step, source=source, then=answer
        )

    def updating(self, rank: Rank, message: Updating) -> None:
        """A rank is about to send a version to the engines itself; it is told where they are, once they stand still."""

        def answer(refused: str, urls: list[str]) -> None:
            reply = Missing(message.id, refused) if refused else Engines(message.id, urls)
            self._send(rank.peer, reply)

        self._updates.begin(rank.client, message.version, answer)

    def updated(self, rank: Rank, message: Updated) -> None:
        """A rank has sent it, or could not."""

        def answer(refused: str, path: str) -> None:
            if refused:
                self._send(rank.peer, Missing(message.id, refused))
            elif message.failed:
                self._send(rank.peer, Ok(message.id))
            else:
                self.publish(rank, Publish(message.id, message.version, path, message.step, message.wait_s))

        self._updates.end(rank.client, message.version, message.failed, message.untouched, answer)
