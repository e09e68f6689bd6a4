"""The plan of a dry run as data, for programs that show it."""

import json
from collections.abc import Mapping, Sequence

from accelerate import PartialState

from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed import on_main
from rectified_flow.system.files import replace_file, writing
from rectified_flow.system.terminal import line


def write_plan(flags: Mapping[str, object], pictures: ImageDataset, words: Sequence[str]) -> None:
    """Write the plan of a run beside the store of its pictures, and print the path. Collective.

    Args:
        flags: the flags that the run would record.
        pictures: the pictures to train on.
        words: sentences about all pictures.
    """
    path = pictures.path.with_name(f"{pictures.path.name}-plan.json")
    facts = {"pictures": len(pictures), "classes": [*pictures.class_names], "columns": [*pictures.table]}

    def write() -> None:
        with writing(path):
            replace_file(path, json.dumps({**facts, "words": [*words], "flags": flags}, indent=1), durable=False)

    on_main(PartialState(), write)
    PartialState().print(line("plan", path))
