"""The one error a person is meant to read."""


class UsageError(ValueError):
    """Input the run cannot start with: one sentence naming the flag or file and what to do.

    The command-line programs print it without a traceback and exit with code 2.
    """


def first_line(error: BaseException) -> str:
    """What an error of some library says, cut to a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
