"""Hints at the flag that was meant, for words of a command line that no flag has."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise, takewhile
from os.path import exists
from pathlib import Path
from typing import get_args

FOLDER, MODEL, TEACHER, WEIGHTS = "--dataset_path", "--checkpoint", "--teacher", "--init_from"
OF_OTHERS: dict[str, tuple[str, ...]] = {
    "weight_decay": ("--optimizer weight_decay=0.01",),
    "adam_weight_decay": ("--optimizer weight_decay=0.01",),
    "adam_betas": ("--optimizer betas=[0.9,0.95]",),
    "use_ema": ("--ema_decay 0.9999, which is the default, or --ema_decay 0 for none",),
    "train_batch_size": ("--batch_size",),
    "max_train_steps": ("--train_num_steps",),
    "max_steps": ("--train_num_steps",),
    "num_train_epochs": ("--num_epochs",),
    "epochs": ("--num_epochs",),
    "lr": ("--learning_rate",),
    "train_data_dir": (FOLDER,),
    "instance_data_dir": (FOLDER,),
    "dataset_name": ("--dataset",),
    "resolution": ("--image_size",),
    "checkpointing_steps": ("--save_every",),
    "checkpoints_total_limit": ("--keep_checkpoints",),
    "dataloader_num_workers": ("--num_workers",),
    "report_to": ("--log_with",),
    "lr_scheduler": ("--lr_decay",),
    **dict.fromkeys(("folder", "dir", "path", "input"), (FOLDER, MODEL)),
    **dict.fromkeys(("data", "data_dir", "data_path", "dataset_dir", "images", "image_dir", "pictures"), (FOLDER,)),
    **dict.fromkeys(
        ("model", "model_path", "run", "run_dir", "ckpt", "ckpt_path", "weights"), (MODEL, WEIGHTS, TEACHER)
    ),
    "checkpoint": (WEIGHTS, TEACHER),
    **dict.fromkeys(("output", "out", "outdir", "out_dir", "save_dir", "results_folder"), ("--output_dir",)),
    **dict.fromkeys(("num_images", "n_samples", "count"), ("--num_samples",)),
    **dict.fromkeys(("time", "max_time", "duration"), ("--budget",)),
}
"""Flags of other programs that people type, and the flags here; a program has the first one that it knows."""

SEPARATED = {"classes"}
"""Flags whose values are one word with commas."""
ALONE = {"from_images"}
"""Flags that take one file or a folder, but are often given several files."""


def hints(
    unknown: Sequence[str], arguments: Sequence[str], known: Mapping[str, object], run_flag: str = ""
) -> list[str]:
    """Return a line for each unknown word of a command line that a flag of the program may replace.

    Args:
        unknown: the words that belong to no flag.
        arguments: all words of the command line.
        known: types of the flags of the program by name.
        run_flag: the program's preferred flag for the path of a run; empty if there is none.
    """
    texts = []
    before = {word: previous for previous, word in pairwise(["", *arguments])}
    for previous, word in pairwise(["", *unknown]):
        name = word.split("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("--"):
            meant = _known(OF_OTHERS.get(name, ()), known, run_flag)
            texts += [f"{word.split('=')[0]}: pass {text}" for text in meant[:1]]
        elif previous.startswith("--") and before.get(word) == previous:
            continue  # the value of an unknown flag
        elif (text := _cut_value(word, arguments, known)) is not None:
            texts.append(text)
        else:
            meant = _known((MODEL, FOLDER, TEACHER), known, run_flag)
            texts += [f"{word}: pass {text} {word}" for text in meant[:1] if text not in arguments]
    return list(dict.fromkeys(texts))


def _known(texts: Sequence[str], known: Collection[str], first: str) -> list[str]:
    """Return the texts whose first flag the program has; the text ``first`` precedes the others."""
    return sorted(
        (text for text in texts if text.split()[0].removeprefix("--") in known), key=lambda text: text != first
    )


def _cut_value(word: str, arguments: Sequence[str], known: Mapping[str, object]) -> str | None:
    """Return a line on a flag whose value was cut at its spaces, if ``word`` is one of the later parts."""
    if word not in arguments:
        return None
    at = arguments.index(word)
    start = next((place for place in range(at, -1, -1) if arguments[place].startswith("--")), at)
    flag, *parts = arguments[start], *takewhile(lambda each: not each.startswith("--"), arguments[start + 1 :])
    name = flag.lstrip("-").replace("-", "_")
    if at > start + 1 and name in SEPARATED:
        return f"{flag}: separate the values by commas: {flag} {','.join(part.strip(',') for part in parts)}"
    if name in ALONE and exists(word):
        return f"{flag}: pass one file, or the folder of the files: {flag} {Path(word).parent}"
    if at > start + 1 and _has_paths(known.get(name)) and not exists(word):  # a folder of its own lacks its flag
        return f'{flag}: put the path in quotation marks: {flag} "{" ".join(parts)}"'
    return None


def _has_paths(kind: object) -> bool:
    return kind is Path or any(map(_has_paths, get_args(kind)))
