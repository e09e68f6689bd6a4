"""The errors a person is meant to read: the programs print them without a traceback."""


class UsageError(ValueError):
    """Input the run cannot start with: one sentence naming the flag or file and what to do. Exit code 2."""


class RunError(RuntimeError):
    """What a run that had started cannot go on with: one sentence on what happened and what to do. Exit code 1."""


def first_line(error: BaseException) -> str:
    """What an error of some library says, cut to a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
