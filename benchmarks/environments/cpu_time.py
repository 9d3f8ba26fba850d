"""CPU time of processes, read from the kernel; shared by both sides of a comparison."""

import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    """CPU time of a process and of all below it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_s(child) for child in children)
