"""A Ray cluster of three nodes on this machine, as a program that takes orders on standard input, a line each.

"kill N" ends a node as a power cut would, "freeze N" makes all of it answer nobody, "thaw N" wakes it up, "add N" brings one
under that number. Says its address, and then a line for every order that is done. The head takes no servers. Nodes have
addresses of their own on the loopback. Ends, with all nodes, when standard input does.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# So that Ray itself finds a node dead within seconds.
os.environ.setdefault("RAY_health_check_period_ms", "500")
os.environ.setdefault("RAY_health_check_failure_threshold", "2")

from ray.cluster_utils import Cluster  # type: ignore[import-not-found]


def main() -> int:
    """Do what standard input says."""
    nodes: dict[str, Any] = {}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for number in sys.argv[1:]:
            nodes[number] = _add(cluster, number)
        print(cluster.address, flush=True)
        for line in sys.stdin:
            what, number = line.split()
            if what == "kill":
                cluster.remove_node(nodes.pop(number), allow_graceful=False)
            elif what == "add":
                nodes[number] = _add(cluster, number)
            else:
                _send(nodes[number], signal.SIGSTOP if what == "freeze" else signal.SIGCONT)
            print("done", flush=True)
    finally:
        cluster.shutdown()
    return 0


def _add(cluster: Any, number: str) -> Any:
    # A resource that only one node has: servers that need it can be nowhere else.
    return cluster.add_node(
        num_cpus=2, node_ip_address=f"127.0.0.{10 + int(number)}", resources={f"only_{number}": 4}
    )


def _send(node: Any, number: signal.Signals) -> None:
    """To a node's own process and to all that descends from it."""
    pids = [node.all_processes["raylet"][0].process.pid]
    for pid in pids:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
