"""``python -m experiments.fuzz``."""

import sys

from experiments.fuzz.running import main

if __name__ == "__main__":
    sys.exit(main())
