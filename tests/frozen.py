"""Imported last by the fork server of :mod:`tests.ranks`: what it has imported is never collected as garbage.

Otherwise the first full collection in each rank would copy nearly all memory of these modules, which takes a second.
"""

import gc

gc.freeze()
