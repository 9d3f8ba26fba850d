"""The launcher that starts an environment's servers as Ray actors.

They can be reached over the network, so they get CURVE keys that are made for this run and stay in memory, and they hold
a lease like any server that does not end with us.
"""

import os
from dataclasses import replace

import structlog

from envs.curve import ClientKeys, ServerKeys, generate_pair
from envs.importing import module_path
from orchestrator.env_servers.child_servers import hash_seed, server_log
from orchestrator.env_servers.launcher import instructions
from orchestrator.env_servers.on_ray.cluster import RayCluster, RayServer
from orchestrator.env_servers.spec import EnvSpec

log = structlog.get_logger()


class RayLauncher:
    """Starts the servers of one environment as actors."""

    def __init__(self, spec: EnvSpec, cluster: RayCluster) -> None:
        own, servers = generate_pair(), generate_pair()
        self.keys = ClientKeys(own, servers.public)
        self.lease_s = spec.lease_s
        self.python = spec.python or "python"
        self._server_keys = ServerKeys(servers, (own.public,))
        # A report would be written to the disk of a node.
        self._spec = replace(spec, report=None)
        self._cluster = cluster
        self._closed = False
        cluster.join()

    async def prepare(self) -> None:
        """Nothing: the driver takes orders before it is ready."""

    def start(self, server: str, life: int) -> RayServer:
        spec, key = self._spec, self._spec.api_key_env
        started = self._cluster.start_server(
            server=server,
            instructions=instructions(spec, server, bind="", keys=self._server_keys),
            python=spec.python,
            path=module_path(*spec.module_dirs),
            environ={
                **({key: os.environ[key]} if key and key in os.environ else {}),
                "PYTHONHASHSEED": hash_seed(),
                "PYTHONUNBUFFERED": "1",
            },
            resources=dict(spec.resources),
            log=str(server_log(spec, server).absolute()),
        )
        log.info("env.server_ordered", env=spec.name, server=server, launcher="ray", life=life)
        return started

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._cluster.leave()
