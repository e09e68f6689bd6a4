"""Data: from files to batches.

A picture passes through these modules in order:

- ``open`` finds the source that the arguments name. ``source`` is the contract of a source.
- ``build`` decodes each picture once, into a store.
- ``store`` reads a batch of the store, with its conditions.
- ``stream`` decides which pictures each batch contains.

``format`` describes the files of a store. ``fill`` writes a store on all processes, also for latents, captions and the
data of a teacher.
"""

OXFORD_FLOWERS = "nelorth/oxford-flowers"
