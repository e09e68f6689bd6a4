"""Errors whose sentence the programs print without a traceback."""

LONGEST = 100  # maximum length of a refused path or value in an error message


class UsageError(ValueError):
    """Input that a run cannot start with: one sentence naming the argument or file and what to do. Exit code 2.

    The name of an argument is in backticks, such as ```image_size``` in Python, which a program prints as its flag.
    """


class DamageError(UsageError):
    """A file that was written earlier and is now missing, damaged or altered; the sentence names it."""


class NewerError(UsageError):
    """A file of a newer version of this project: not damaged, and to be left as it is."""


class BusyError(UsageError):
    """A file or folder that another process is writing; the sentence names it."""


class RunError(RuntimeError):
    """A failure that ends a run which had started: one sentence on what happened and what to do. Exit code 1."""


def quoted(argument: str) -> str:
    """Return an argument as messages have it: its name in backticks, then its value, such as ```image_size` 64``."""
    name, space, value = argument.partition(" ")
    return f"`{name}`{space}{value}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in torch or in a library of the device, on the device or on the CPU."""
    # Classes are compared by name, since torch may not be imported, and it has none for a full CPU memory.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
    is_told = "RuntimeError" in kinds and any(each in str(error) for each in words)
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or is_told


def first_line(error: BaseException) -> str:
    """Return the first line of an error message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
