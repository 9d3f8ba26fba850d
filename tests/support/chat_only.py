"""The half of a `ChatClient` that most fakes do not need."""

from collections.abc import Mapping


class ChatOnly:
    """To be subclassed with `chat`; whoever asks for a raw completion fails its test."""

    async def complete(self, base_url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        raise AssertionError("a raw completion was asked for, which nothing here does")
