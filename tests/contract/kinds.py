"""The kinds of data and of training that a user chooses by flags. A new kind is one row of :data:`KINDS`."""

import shutil
import wave
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tifffile
from filelock import FileLock
from PIL import Image

from tests.programs import constant_speed, program
from tests.ranks import run_on_ranks
from tests.text.tiny_encoder import write_encoder

COUNT, SIDE = 24, 8
UNET = "--image_size 8 --dim 8 --dim_mults 1"
PLAIN = f"{UNET} --augment 0 --holdout 0"
LATENT = "--image_size 16 --autoencoder small --dim 8 --dim_mults 1 --augment 0.3 --crop random --holdout 0"
SCHEDULE = (
    "--global_batch_size 8 --learning_rate 1e-2 --lr_warmup_steps 2 --ema_decay 0.9"
    " --save_every 2 --log_every 1 --train_num_steps 4 --num_samples 3 --sample_steps 2"
)
MIDDLE, LAST = "checkpoints/step_00000002", "checkpoints/step_00000004"


def no_files(_data: Path) -> None:
    """Write nothing, for data that the program makes."""


@dataclass(frozen=True)
class Kind:
    """A kind of data, a way to train or a custom part, and what every program is expected to make of it.

    Args:
        flags: flags of the training program; they may name files of ``{data}``.
        write_data: writes the files that the flags name into a folder.
        program: the training program.
        imports: modules of custom parts, for ``--import``.
        sample: flags of sample.py; they may name files of ``{data}``.
        written: files that sample.py writes, besides the grid.
        preview_is_grid: whether a preview of training has the size of the grid of sample.py.
        samples: number of samples of evaluate.py.
        metrics: metrics of evaluate.py, where they are not its default.
        scores: some scores of evaluate.py.
        format: format of export.py, and its arguments.
        exported: a file that export.py writes.
        export: the sentence by which export.py refuses the kind, or "" if it exports the file.
        one_step: the sentence by which the one-step program refuses the run as a teacher, "" if it learns from it, or
            None if the network of the run takes no second time.
        resumed_on: number of processes of the run that is resumed.
        slow: the contracts that are slow tests for this kind, because another kind calls the same code.
    """

    flags: str
    write_data: Callable[[Path], object] = no_files
    program: str = "train_oxford.py"
    imports: tuple[str, ...] = ()
    sample: str = "--num_samples 3 --steps 2"
    written: tuple[str, ...] = ("00000.png", "00001.png", "00002.png")
    preview_is_grid: bool = True
    samples: int = 8
    metrics: str = ""
    scores: tuple[str, ...] = ("efficientnet_lite0_frechet_distance", "copies")
    format: str = "page"
    exported: str = "index.html"
    export: str = ""
    one_step: str | None = ""
    resumed_on: Literal[1, 2] = 2
    slow: tuple[str, ...] = ()


def random_pixels(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def write_pictures(data: Path) -> None:
    """Write noisy pictures of two classes."""
    for number in range(COUNT):
        write_png(data / f"pictures/{'ab'[number % 2]}/{number:02}.png", random_pixels(number, SIDE, SIDE, 3))


def write_png(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_cutouts(data: Path) -> None:
    """Write wide pictures with a hole, of which an opaque margin is left."""
    for number in range(COUNT):
        pixels = random_pixels(number, 24, 30, 4)
        pixels[..., 3] = 255
        pixels[8:16, 8:16, 3] = 0
        write_png(data / f"cutouts/{number:02}.png", pixels)


def write_columns(data: Path) -> None:
    """Write pictures with a caption, a number and a label each, and a text encoder."""
    rows = ["file_name,text,size,parity"]
    for number in range(COUNT):
        write_png(data / f"columns/{number:02}.png", random_pixels(number, SIDE, SIDE, 3))
        text = f"a {'red' if number % 3 else 'blue'} heart"
        rows.append(f"{number:02}.png,{text},{number},{'odd' if number % 2 else 'even'}")
    (data / "columns/metadata.csv").write_text("\n".join(rows))
    write_encoder(data / "encoder")


def write_translations(data: Path) -> None:
    """Write pictures, and beside them the same with inverted colours."""
    for number in range(COUNT):
        pixels = random_pixels(number, SIDE, SIDE, 3)
        write_png(data / f"from/{number:02}.png", pixels)
        write_png(data / f"to/{number:02}.png", 255 - pixels)


def write_floats(data: Path) -> None:
    """Write two channels of about 280 units, some values of which are unknown."""
    (data / "floats").mkdir(parents=True)
    for number in range(COUNT):
        values = np.random.default_rng(number).uniform(280.1, 286, (2, SIDE, SIDE)).astype(np.float32)
        values[0, 0, : number % 3] = np.nan
        np.save(data / f"floats/{number:02}.npy", values)


def write_counts(data: Path) -> None:
    """Write 16-bit GeoTIFF files of five channels."""
    (data / "counts").mkdir(parents=True)
    how: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "separate", "resolutionunit": 3}
    for number in range(COUNT):
        values = np.random.default_rng(number).integers(1000, 60000, (5, SIDE, SIDE), dtype=np.uint16)
        tifffile.imwrite(data / f"counts/{number:02}.tif", values, resolution=(50, 50), **how)


def write_sounds(data: Path) -> None:
    """Write WAV files of noise."""
    (data / "sounds").mkdir(parents=True)
    for number in range(COUNT):
        with wave.open(str(data / f"sounds/{number:02}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(np.random.default_rng(number).integers(-9999, 9999, 100, dtype=np.int16).tobytes())


def train_teacher(data: Path) -> None:
    """Train the run of labelled pictures that a student learns from."""
    write_pictures(data)
    run_on_ranks(1, train, KINDS["labels"], data, data / "teacher")


def guest(name: str, flags: str, *, calls: tuple[str, ...] = (), trains: bool = True, **more: Any) -> Kind:
    """Return the row of a module in tests/extension; most of them are trained on the pictures of one of them.

    Args:
        name: the module.
        flags: flags of the training program.
        calls: the contracts, besides training on one process and loading, whose programs call code of the module, and
            "train" if that code might behave otherwise on two processes; without "resume" among them, the run on one
            process is resumed, in half of the time.
        trains: whether training calls code of the module that no other row calls.
        more: other arguments of :class:`Kind`.
    """
    imports = tuple(f"tests.extension.{module}" for module in dict.fromkeys((name, "own_pictures")))
    slow = {"train", "sample", "evaluate", "export", "one_step"} | (set() if trains else {"resume"})
    resumed_on: Literal[1, 2] = 2 if "resume" in calls else 1
    return Kind(flags, imports=imports, resumed_on=resumed_on, slow=tuple(slow - {*calls}), **more)


@dataclass(frozen=True)
class Translation(Kind):
    """A kind whose samples begin at pictures, or show pictures beside them, as previews do."""

    sample: str = "--num_samples 3 --steps 2 --from_images {data}/from"
    written: tuple[str, ...] = ("00.png", "01.png", "02.png")
    preview_is_grid: bool = False
    scores: tuple[str, ...] = ("partner_distance",)


TAUGHT = "--teacher {data}/teacher --teacher_samples 24 --teacher_steps 2 --holdout 0"
NO_TEACHER = "--teacher is for pictures"
NOT_RECTIFIED = "not a RectifiedFlow"
MEASURED = ("channel_2_wasserstein", "channel_1_spectrum_error_of_real")

KINDS: dict[str, Kind] = {
    "pictures": Kind(f"--dataset_path {{data}}/pictures {UNET} --augment 0.15 --holdout 0.4", write_pictures),
    "labels": Kind(
        f"--dataset_path {{data}}/pictures {PLAIN} --use_cfg",
        write_pictures,
        sample="--num_samples 3 --steps 2 --guidance_scale 2 --classes b,0",
        preview_is_grid=False,  # the grid has a column for each class
    ),
    "cutouts": Kind(
        f"--dataset_path {{data}}/cutouts {PLAIN} --aspect_ratio 3:2 --crop random --alpha",
        write_cutouts,
        export="a page supports grey and RGB pictures",
        slow=("evaluate",),
    ),
    "columns": Kind(
        f"--dataset_path {{data}}/columns {PLAIN} --condition_on all text=caption"
        " --text_encoder {data}/encoder --text_tokens 4",
        write_columns,
        sample="--num_samples 3 --steps 2 --set size=3",
        preview_is_grid=False,  # it has captions below
        scores=("size_correlation", "parity_accuracy"),
    ),
    "latents": Kind(
        f"--dataset_path {{data}}/pictures {LATENT} --aspect_ratio 2:1",
        write_pictures,
        slow=("one_step",),
    ),
    "floats": Kind(
        f"--dataset_path {{data}}/floats {PLAIN} --space transform=log show=2:magma",
        write_floats,
        written=("00000.npy", "00001.npy", "00002.npy"),
        scores=MEASURED,
    ),
    "counts": Kind(
        f"--dataset_path {{data}}/counts {UNET} --augment 0.1 --holdout 0.5",
        write_counts,
        written=("00000.tif", "00001.tif", "00002.tif"),
        scores=MEASURED,
        slow=("one_step",),
    ),
    "paired": Translation(
        f"--dataset_path {{data}}/to --source_path {{data}}/from --paired --source_noise 0.1 {PLAIN}",
        write_translations,
        samples=2 * COUNT,
        scores=("partner_distance", "neighbour_partner_distance"),
    ),
    "unpaired": Translation(
        f"--dataset_path {{data}}/to --source_path {{data}}/from --coupling ot {PLAIN}",
        write_translations,
        scores=("structure_found", "copy_efficientnet_lite0_frechet_distance"),
        slow=("one_step",),
    ),
    "paired latents": Translation(
        f"--dataset_path {{data}}/to --source_path {{data}}/from --paired --source_as condition {PLAIN}"
        " --autoencoder Haar",
        write_translations,
        imports=("tests.extension.own_autoencoder",),
        export="a page reads no measurements or latents to translate",
        slow=("evaluate", "one_step"),
    ),
    "degraded": Translation(
        f"--dataset_path {{data}}/to --degrade mask:box {PLAIN}",
        write_translations,
        slow=("evaluate",),
    ),
    "mean flow": Kind(
        f"--dataset_path {{data}}/pictures {PLAIN} --use_cfg",
        write_pictures,
        program="train_mean_flow.py",
        one_step=NOT_RECTIFIED,
    ),
    "distilled": Kind(TAUGHT, train_teacher, program="train_mean_flow.py", one_step=NOT_RECTIFIED, slow=("export",)),
    "reflow": Kind(f"--method reflow {TAUGHT}", train_teacher, slow=("evaluate", "export", "one_step")),
    "own network": guest(
        "own_network",
        "--dataset squares --image_size 8 --use_cfg --network TwoConvolutions width=8",
        calls=("train", "resume", "sample", "export"),
    ),
    "own adapter": guest(
        "own_adapter",
        "--dataset squares --image_size 8 --network Adapted width=8",
        one_step=None,
        calls=("resume", "sample"),
    ),
    "own flow": guest(
        "own_flow",
        f"--dataset squares {UNET} --flow CircleFlow",
        calls=("train", "resume", "sample", "evaluate", "export", "one_step"),
        export="a CircleFlow cannot be exported",
        one_step=NOT_RECTIFIED,
    ),
    "own objective": guest("own_objective", f"--dataset squares {UNET} --flow AbsoluteFlow"),
    "own space": guest(
        "own_space",
        "--dataset rings --space Clouds scale=300 --network PointNetwork width=16",
        calls=("train", "sample", "evaluate", "export"),
        export="a flow of clouds",
        one_step=NO_TEACHER,
    ),
    "own dataset": guest(
        "own_dataset",
        f"--dataset ramps {UNET} --use_cfg",
        calls=("train", "evaluate", "export", "one_step"),
        export="the condition level",
        one_step=NO_TEACHER,
    ),
    "own pictures": guest("own_pictures", f"--dataset squares {UNET} --use_cfg", trains=False),
    "own condition": guest(
        "own_condition",
        f"--dataset dials {UNET} --condition_on turn=angle",
        calls=("sample", "export", "one_step"),
        preview_is_grid=False,  # it has the angles below
        export="angle cannot be exported",
    ),
    "own autoencoder": guest(
        "own_autoencoder",
        f"--dataset squares {UNET} --autoencoder Haar levels=1",
        calls=("sample", "evaluate", "one_step"),
    ),
    "own optimizer": guest(
        "own_optimizer", f"--dataset squares {UNET} --optimizer sign_descent momentum=0.8", calls=("resume",)
    ),
    "own times": guest("own_times", f"--dataset squares {UNET} --time_distribution PowerOfUniform power=2"),
    "own sounds": Kind(
        f"--dataset_path {{data}}/sounds {UNET}",
        write_sounds,
        imports=("tests.extension.own_sounds",),
        written=("00000.wav", "00001.wav", "00002.wav"),
        export="a flow of spectrograms",
    ),
    "own metric": guest(
        "own_metric",
        f"--dataset squares {UNET}",
        calls=("evaluate",),
        trains=False,
        metrics="frechet mean_gap brightness",
        scores=("mean_gap", "brightness"),
    ),
    "own format": Kind(
        f"--dataset squares {UNET}",
        imports=("tests.extension.own_format", "tests.extension.own_pictures"),
        format="arrays compressed=true",
        exported="arrays.npz",
        slow=("train", "resume", "sample", "evaluate", "one_step"),
    ),
    "own degradation": guest(
        "own_degradation",
        f"--dataset squares {UNET} --degrade Posterised:3",
        calls=("sample", "export"),
        preview_is_grid=False,  # it shows the sources beside the samples
        export="a page cannot apply Posterised",
    ),
}


def words(kind: Kind, flags: str, data: Path, output_dir: Path) -> list[str]:
    """Return the words of a command line for a kind."""
    imports = ["--import", *kind.imports] if kind.imports else []
    return [*flags.format(data=data).split(), *imports, "--output_dir", str(output_dir)]


def train(kind: Kind, data: Path, output_dir: Path) -> None:
    """Train on this rank; the program must not end well on several ranks, so the function that it calls does.

    The speed of the kind is measured where the program trains it on one process.
    """
    from rectified_flow.cli.settings import read_settings
    from rectified_flow.cli.train import train
    from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig

    for module in kind.imports:
        import_module(module)
    config = TrainConfig if kind.program == "train_oxford.py" else OneStepConfig
    with constant_speed():
        assert train(read_settings(config, "", words(kind, f"{SCHEDULE} {kind.flags}", data, output_dir)))


def sample(kind: Kind, flags: list[str]) -> None:
    """Sample on this rank."""
    from rectified_flow.cli.model_flags import SampleConfig
    from rectified_flow.cli.sample import sample
    from rectified_flow.cli.settings import parse

    for module in kind.imports:
        import_module(module)
    sample(parse(SampleConfig, "", flags))


class Runs:
    """The data and runs of a kind: made when a test of any process first asks for them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.kind, self.folder = KINDS[name], folder / name.replace(" ", "-")
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def data(self) -> Path:
        """The folder of the files that the flags name."""
        data, finished = self.folder / "data", self.folder / "data.finished"
        with FileLock(self.folder / "data.lock"):
            if not finished.exists():
                data.mkdir()
                self.kind.write_data(data)
                finished.touch()
        return data

    @property
    def one(self) -> Path:
        """The run on one process, by the program."""
        return self._made("one", self._run_program)

    @property
    def two(self) -> Path:
        """The run on two processes."""
        return self._made("two", self._run_on_two)

    @property
    def straight(self) -> Path:
        """The run that :attr:`resumed` must equal."""
        return self.two if self.kind.resumed_on == 2 else self.one

    @property
    def resumed(self) -> Path:
        """A copy of a run that lost its last checkpoint, and was started again."""
        return self._made("resumed", self._resume)

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        run = self.folder / name
        with FileLock(self.folder / f"{name}.lock"):
            if not (run / LAST / "manifest.json").exists():
                make(run)
        return run

    def _run_program(self, run: Path) -> None:
        flags = words(self.kind, f"{SCHEDULE} {self.kind.flags}", self.data, run)
        [(code, errors)] = run_on_ranks(1, program, self.kind.program, flags)
        assert code == 0, errors

    def _run_on_two(self, run: Path) -> None:
        run_on_ranks(2, train, self.kind, self.data, run)

    def _resume(self, run: Path) -> None:
        shutil.copytree(self.straight, run)
        shutil.rmtree(run / LAST)
        run_on_ranks(self.kind.resumed_on, train, self.kind, self.data, run)

    def call(self, name: str, flags: str, output_dir: Path, run: Callable[..., tuple[int, str]] = program) -> str:
        """Run a program on the run of one process, and return the sentence by which it refuses that, or ""."""
        line = words(self.kind, f"--checkpoint {self.one} {flags}", self.data, output_dir)
        [(code, errors)] = run_on_ranks(1, run, name, line)
        assert "Traceback" not in errors
        assert code == (2 if errors.count(": error: ") else 0), errors
        return errors if code else ""
