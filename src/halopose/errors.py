"""The one exception type for mistakes a user can make and mend.

Its message is a single line that says what is wrong and what to do; the command line prints it and exits 2.
"""


class HaloposeError(ValueError):
    """Something in the input is not usable; the message says what to do about it."""
