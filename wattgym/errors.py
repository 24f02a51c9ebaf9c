"""The one exception that a user can cause and read."""


class UserError(ValueError):
    """Bad input: one line that says what is wrong, where, and what would be valid.

    The command line prints the message without a traceback and exits with code 2; library callers catch it as
    a `ValueError`. Messages name the value, the place (file, row, key) and the valid range or choices.
    """
