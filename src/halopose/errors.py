"""The one exception type for mistakes a user can make and mend.

Its message is a single line that says what is wrong and what to do; the command line prints it and exits 2.
"""


class HaloposeError(ValueError):
    """Something in the input is not usable; the message says what to do about it.

    >>> from halopose import Artifact
    >>> Artifact.load("nowhere.safetensors")
    Traceback (most recent call last):
    halopose.errors.HaloposeError: no artifact at nowhere.safetensors: make one with `halopose fit`
    """
