"""The wait for inference servers at the start of a run: what it says while it goes on."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
import structlog
from structlog.typing import EventDict

from orchestrator.inference import InferenceError
from tests.support.inference_engine import ScriptedEngine
from tests.support.inference_pool import build_pool, until


def awaited(logs: list[EventDict]) -> dict[str, str]:
    """What was logged about each endpoint that is waited for."""
    return {entry["endpoint"]: entry["error"] for entry in logs if entry["event"] == "endpoint.awaited"}


async def test_the_wait_says_soon_what_each_server_says() -> None:
    """Nobody looks at a silent log for ten minutes; servers that are ready are not mentioned."""
    gone = ScriptedEngine()
    await gone.start()
    await gone.stop()
    async with ScriptedEngine() as good, ScriptedEngine(stuck={"/health"}) as mute:
        pool = build_pool(good, mute, gone)
        with structlog.testing.capture_logs() as logs:
            async with pool, asyncio.TaskGroup() as group:
                waiting = group.create_task(pool.wait_ready(1000))
                await until(lambda: awaited(logs))
                assert not waiting.done()
                mute.unstick()
                await gone.start()
                await waiting
        await gone.stop()
    said = awaited(logs)
    assert set(said) == {mute.base_url, gone.base_url}
    assert said[mute.base_url] == "has not answered yet"
    assert "cannot connect (Connection refused)" in said[gone.base_url]


@pytest.mark.parametrize(
    ("served", "configured", "guess"),
    [
        ("", "/v1", "GET /v1/models answered 404: .*; it answers without /v1: take /v1 off its entry"),
        ("/v1", "", "GET /models answered 404: .*; it answers with /v1: add /v1 to its entry"),
        ("/api", "/v1", r'GET /v1/models answered 404: "[^;]*"\);'),
        ("/api", "", r'GET /models answered 404: "[^;]*"\);'),
    ],
)
async def test_a_base_url_with_a_wrong_path_is_guessed(served: str, configured: str, guess: str) -> None:
    """A /v1 too many or too few is the usual mistake; it is named where the server shows it, and nowhere else."""
    async with ScriptedEngine(prefix=served) as engine:
        url = f"http://127.0.0.1:{engine.port}{configured}"
        async with build_pool(urls=[url]) as pool:
            with pytest.raises(InferenceError, match=guess):
                await pool.wait_ready(0.5)


async def test_the_wrong_scheme_is_guessed() -> None:
    """A TLS port without https://, and https:// where nobody speaks TLS."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(Path(__file__).parent.parent / "support" / "certificate.pem")
    server = await asyncio.start_server(_close, "127.0.0.1", 0, ssl=tls)
    async with server, ScriptedEngine() as plain:
        port = server.sockets[0].getsockname()[1]
        async with build_pool(urls=[f"http://127.0.0.1:{port}/v1"]) as pool:
            with pytest.raises(InferenceError, match="it is a TLS port: write https://"):
                await pool.wait_ready(1.0)
        async with build_pool(urls=[plain.base_url.replace("http://", "https://")]) as pool:
            with pytest.raises(InferenceError, match="does not speak TLS there: write http://"):
                await pool.wait_ready(1.0)


async def _close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer anything with nothing but a status."""
    await reader.readline()
    writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
    writer.close()


@pytest.mark.parametrize(
    ("key", "says"), [(None, "it wants an API key"), ("wrong", "it refuses the API key")]
)
async def test_a_missing_or_wrong_key_is_told(
    monkeypatch: pytest.MonkeyPatch, key: str | None, says: str
) -> None:
    """With the setting that names it."""
    if key is not None:
        monkeypatch.setenv("KEY_OF_THE_TEST", key)
    async with (
        ScriptedEngine(token="right") as engine,
        build_pool(engine, api_key_env=key and "KEY_OF_THE_TEST") as pool,
    ):
        with pytest.raises(InferenceError, match=f"answered 401: .*; {says}.* inference.api_key_env"):
            await pool.wait_ready(0.5)


async def test_a_name_that_does_not_exist_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as an error with a number below zero."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    async with build_pool(urls=["http://nowhere.invalid/v1"]) as pool:
        with pytest.raises(InferenceError, match=r"cannot connect \(Name or service not known\)"):
            await pool.wait_ready(1.0)


async def test_a_page_instead_of_a_list_of_models_is_quoted() -> None:
    """What a proxy says in place of the server helps to find the proxy."""
    page = (200, "<h1>Sign in</h1>")
    async with ScriptedEngine(answers={"/v1/models": page}) as engine, build_pool(engine) as pool:
        with pytest.raises(InferenceError, match=r"did not answer with a list of models: .*Sign in"):
            await pool.wait_ready(0.5)


async def test_credentials_in_a_url_are_not_shown() -> None:
    """Errors are logged and shown; a password in the address is not."""
    async with ScriptedEngine(broken={"/health": 503}) as engine:
        url = f"http://user:secret@127.0.0.1:{engine.port}/v1"
        with structlog.testing.capture_logs() as logs:
            async with build_pool(urls=[url]) as pool:
                with pytest.raises(InferenceError) as caught:
                    await pool.wait_ready(0.5)
                pool.enter(pool.endpoints[0])
                pool.lose(pool.endpoints[0], "test")
        assert [entry["event"] for entry in logs] == ["endpoint.lost"]
        assert "secret" not in f"{caught.value} {pool.explain()} {logs}"
        assert f"127.0.0.1:{engine.port}" in pool.explain()
