"""Frozen modules of other libraries, whose weights must be the same in sampling as in training."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from rectified_flow.errors import UsageError


class Pretrained:
    """A module that a library loads from a folder or the hub.

    Args:
        source: a folder or hub id.
        fingerprint: the hash of the weights, if they must be the same as in training; None takes any.
    """

    flag: ClassVar[str]
    """The flag that names the source."""

    def __init__(self, source: str, fingerprint: str | None = None) -> None:
        folder = Path(source).expanduser()
        self.source = self.name = str(folder.resolve()) if folder.is_dir() else source
        self._expected = fingerprint

    @staticmethod
    @abstractmethod
    def identity(source: str) -> tuple[object, nn.Module]:
        """Return the settings and the module of a source; the fingerprint is the hash of both."""

    @property
    def fingerprint(self) -> str:
        """The hash of the settings and weights, which are not read if the constructor got the hash."""
        return self._expected or hash_of(self.identity, self.source)

    def check(self) -> None:
        """Raise a UsageError if the weights differ from those of the training."""
        if self._expected not in (None, hash_of(self.identity, self.source)):
            raise UsageError(f"`{self.flag}` {self.source} differs from the one used in training: pass that one")


@cache
def hash_of(identity: Callable[[str], tuple[object, nn.Module]], source: str) -> str:
    """Return the hash of the settings and of the weights of a source."""
    settings, module = identity(source)
    digest = blake2b(repr(settings).encode(), digest_size=16)
    for name, weights in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(weights.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
