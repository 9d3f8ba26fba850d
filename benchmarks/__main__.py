"""`python -m benchmarks [NAME] [--quick]`: run the benchmarks and print their figures."""

import argparse
import sys

from rich.console import Console

from benchmarks.frame import find_benchmarks, print_figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="run only this benchmark")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, rougher figures")
    arguments = parser.parse_args()
    benchmarks = find_benchmarks(arguments.name)
    if not benchmarks:
        names = ", ".join(sorted(find_benchmarks()))
        print(f'no benchmark is named "{arguments.name}"; there are: {names}', file=sys.stderr)
        return 2
    console = Console(width=160 if not sys.stdout.isatty() else None)
    missed = 0
    for name, measure in benchmarks.items():
        figures = measure(arguments.quick)
        print_figures(name, figures, console)
        missed += sum(figure.met is False for figure in figures)
    console.print(f"{missed} goals missed" if missed else "every goal met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
