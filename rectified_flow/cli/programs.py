"""The programs, as scripts at the top of the project and as console commands of the installed package."""

from rectified_flow.cli.launch import run


def train_oxford() -> None:
    """``train_oxford.py`` and ``rectified-flow-train``."""
    run(
        "rectified_flow.cli.train:train_rectified_flow",
        "rectified_flow.cli.flags:TrainRectifiedFlow",
        "Train a rectified flow on Oxford Flowers, or on your own pictures with --dataset_path FOLDER.\n\n"
        "Start it with python on one device, and with torchrun or accelerate launch on several. The same command "
        "resumes from the newest checkpoint. With --dataset_path, some flags that are not given are chosen by "
        "the number of pictures, and printed.",
    )


def train_mean_flow() -> None:
    """``train_mean_flow.py`` and ``rectified-flow-train-mean-flow``."""
    run(
        "rectified_flow.cli.train:train_mean_flow",
        "rectified_flow.cli.flags:TrainMeanFlow",
        "Train a mean flow, which generates in one step, on Oxford Flowers, or on your own pictures with "
        "--dataset_path FOLDER.\n\nStart it with python on one device, and with torchrun or accelerate launch on "
        "several. The same command resumes from the newest checkpoint. With --dataset_path, some flags that are "
        "not given are chosen by the number of pictures, and printed.",
    )


def sample() -> None:
    """``sample.py`` and ``rectified-flow-sample``."""
    run(
        "rectified_flow.cli.sample:sample",
        "rectified_flow.cli.trained_flags:SampleConfig",
        "Draw pictures from a trained flow: numbered PNGs and a grid of them.\n\nThe model is built from the "
        "description in its checkpoint. Start it with torchrun or accelerate launch to draw on several devices.",
    )


def evaluate() -> None:
    """``evaluate.py`` and ``rectified-flow-evaluate``."""
    run(
        "rectified_flow.cli.evaluate:evaluate",
        "rectified_flow.cli.trained_flags:EvaluateConfig",
        "Measure how near a trained flow's pictures are to the pictures it was trained on.\n\nDistances are printed "
        "and written to the run's evaluation.json. Start it with torchrun or accelerate launch to share the work "
        "between several devices.",
    )


def export() -> None:
    """``export.py`` and ``rectified-flow-export``."""
    run(
        "rectified_flow.cli.export:export",
        "rectified_flow.cli.trained_flags:ExportConfig",
        "Write one network call of a trained flow as a program that other software runs, beside a model.json that "
        "says what goes in and comes out.\n\nThe program is compared with the flow before it is written. It needs the "
        "packages of the extra export: pip install '.[export]'.",
    )


def watch() -> None:
    """``watch.py`` and ``rectified-flow-watch``."""
    run(
        "rectified_flow.cli.watch:watch",
        "rectified_flow.cli.trained_flags:WatchConfig",
        "Show runs in a browser while they train: losses, samples, distances, and how long they will take.\n\nThe "
        "page is served to this machine alone, unless --host says otherwise. It reads the folders of the runs, and "
        "writes nothing.",
    )
