"""Exclude all objects of the fork server of :mod:`tests.ranks` from garbage collection; it imports this module last.

Otherwise the first full collection in a rank writes to nearly all memory shared with the server. Copying these pages
takes a second.
"""

import gc

gc.freeze()
