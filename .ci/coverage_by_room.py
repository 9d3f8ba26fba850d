"""Shows how much of each room the measured tests reached: statements of its modules, and the share that ran."""

import sys
from collections import Counter

import coverage


def main() -> int:
    """Print a line per room and one for all."""
    data = coverage.Coverage()
    data.load()
    statements, missed = Counter[str](), Counter[str]()
    for path in sorted(data.get_data().measured_files()):
        parts = path.split("/")
        package = max(at for at, part in enumerate(parts) if part in ("orchestrator", "envs"))
        inner = parts[package + 1 : -1]
        room = "/".join(parts[package : package + 1] + inner[:1])
        _, lines, _, missing, _ = data.analysis2(path)
        for name in (room, "all"):
            statements[name] += len(lines)
            missed[name] += len(missing)
    print(f"{'room':<28} {'statements':>10} {'covered':>8}")
    for name in sorted(statements, key=lambda name: (name == "all", name)):
        share = 1 - missed[name] / statements[name] if statements[name] else 1.0
        print(f"{name:<28} {statements[name]:>10} {share:>8.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
