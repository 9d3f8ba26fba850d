"""OpenEnv servers behind a proxy that wants a token and speaks TLS, played by the adapter as it is."""

import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from envs import EnvironmentLoadError, Model, ModelSettings
from envs.loader import load_environment
from tests.envs.test_dataset import Script

TOKEN = "hf_secret"


@asynccontextmanager
async def server(certificate: Path | None) -> AsyncIterator[str]:
    """As much of an OpenEnv server as a rollout needs, for those who have the token."""

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized
        answer: web.StreamResponse = await handler(request)
        return answer

    async def schema(_: web.Request) -> web.Response:
        action = {"type": "object", "properties": {"text": {"type": "string"}}}
        return web.json_response({"action": action})

    async def play(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT and message.json()["type"] in ("reset", "step"):
                done = message.json()["type"] == "step"
                data = {"observation": {"text": "Say hi"}, "reward": 1.0 if done else None, "done": done}
                await socket.send_json({"type": "observation", "data": data})
        return socket

    app = web.Application(middlewares=[guard])
    app.add_routes([web.get("/schema", schema), web.get("/ws", play)])
    runner = web.AppRunner(app)
    await runner.setup()
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"http{'s' if context else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """One that only this test trusts."""
    if which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path / "server.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    )
    files = f"-addext subjectAltName=IP:127.0.0.1 -keyout {path.with_suffix('.key')} -out {path}"
    subprocess.run([*command.split(), *files.split()], check=True, capture_output=True)
    return path


async def reward(url: str, **args: Any) -> float:
    """Of one rollout."""
    environment = load_environment(f"openenv::{url}", {"sessions": 1, **args})
    model = Model(ModelSettings("m"), client=Script("hi"), base_url="local")
    try:
        await environment.setup()
        return (await environment.rollout(environment.tasks("train")[0], model)).reward
    finally:
        await environment.close()


async def test_a_server_that_wants_a_token_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the variable that `token_env` names, for the schema and for every session; without it the remedy is told."""
    monkeypatch.setenv("SOME_TOKEN", TOKEN)
    async with server(None) as url:
        assert await reward(url, token_env="SOME_TOKEN") == 1.0
        with pytest.raises(EnvironmentLoadError, match=r"answered 401 to /schema; .*token_env"):
            await reward(url)
        with pytest.raises(EnvironmentLoadError, match="token is not in the variable NO_TOKEN"):
            await reward(url, token_env="NO_TOKEN")


async def test_a_certificate_of_ones_own_authority_is_trusted_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, certificate: Path
) -> None:
    """By `ca_file`; nobody else's is trusted, and a file that is none is told."""
    monkeypatch.setenv("SOME_TOKEN", TOKEN)
    async with server(certificate) as url:
        assert await reward(url, token_env="SOME_TOKEN", ca_file=str(certificate)) == 1.0
        with pytest.raises(EnvironmentLoadError, match="certificate"):
            await reward(url, token_env="SOME_TOKEN")
        with pytest.raises(EnvironmentLoadError, match="ca_file"):
            await reward(url, ca_file=str(certificate.with_name("nowhere.pem")))
