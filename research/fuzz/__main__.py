"""``python -m research.fuzz``."""

import sys

from research.fuzz.running import main

if __name__ == "__main__":
    sys.exit(main())
