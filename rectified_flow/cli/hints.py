"""Hints at the flag that was meant, for words of a command line that no flag has."""

from collections.abc import Collection, Sequence
from itertools import pairwise

FOLDER, MODEL = "--dataset_path", "--checkpoint"
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
    **dict.fromkeys(("model", "model_path", "run", "run_dir", "ckpt", "ckpt_path", "weights"), (MODEL, "--init_from")),
    **dict.fromkeys(("output", "out", "outdir", "out_dir", "save_dir", "results_folder"), ("--output_dir",)),
    **dict.fromkeys(("num_images", "n_samples", "count"), ("--num_samples",)),
    **dict.fromkeys(("time", "max_time", "duration"), ("--budget",)),
}
"""Flags of other programs that people type, and the flags here; a program has the first one that it knows."""


def hints(unknown: Sequence[str], arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return a line for each unknown word of a command line that a flag of the program may replace.

    Args:
        unknown: the words that belong to no flag.
        arguments: all words of the command line.
        known: names of the flags of the program.
    """
    texts = []
    before = {word: previous for previous, word in pairwise(["", *arguments])}
    for previous, word in pairwise(["", *unknown]):
        name = word.split("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("--"):
            texts += [f"{word.split('=')[0]}: pass {text}" for text in _known(OF_OTHERS.get(name, ()), known)[:1]]
        elif previous.startswith("--") and before.get(word) == previous:
            continue  # the value of an unknown flag
        else:
            texts += [f"{word}: pass {text} {word}" for text in _known((MODEL, FOLDER), known)[:1]]
    return list(dict.fromkeys(texts))


def _known(texts: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the texts whose first flag the program knows."""
    return [text for text in texts if text.split()[0].removeprefix("--") in known]
