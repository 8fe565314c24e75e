"""Memory that was freed is used again rather than asked for anew.

glibc hands large arrays back to the system when they go, and the system clears every page of the next one: a third
of what it takes to read a photograph. It stops once it has seen an array go that is nearly as large as those it
always hands back.
"""

import numpy as np

_LARGE = 4_000_000  # numbers: just under the 32 MiB above which glibc always asks for fresh pages


def keep_freed_memory() -> None:
    """Make and free one large array; nothing is written into it, so that it takes no memory and no time.

    From then on up to 64 MiB of what a thread frees stay with the process. Without glibc nothing changes.
    """
    np.empty(_LARGE)
