"""`python -m orchestrator` is the command line too."""

import sys

from orchestrator.cli import main

if __name__ == "__main__":
    sys.exit(main())
