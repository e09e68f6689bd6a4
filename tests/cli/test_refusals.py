"""Tests of flags that a program refuses in one sentence and with exit code 2, before it writes anything."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.contract.kinds import Runs
from tests.programs import refusal, without

TRAIN, ONE_STEP, SAMPLE = "train_oxford.py", "train_mean_flow.py", "sample.py"
EVALUATE, EXPORT = "evaluate.py", "export.py"
UNET = "--image_size 8 --dim 8 --dim_mults 1 2 --global_batch_size 16 --train_num_steps 4"
FLOWERS = f"--dataset synthetic-flowers {UNET} --output_dir {{tmp}}/run"
OWN = f"{UNET} --output_dir {{tmp}}/run --dataset_path"
BROKEN = f"--dataset_path {{tmp}}/broken {UNET}"
OUTPUT = "--output_dir {tmp}/out"
HAAR = "--autoencoder Haar --import tests.extension.own_autoencoder"
PICTURES = f"--dataset_path {{pictures.data}}/pictures {UNET} --output_dir {{tmp}}/run"
COLUMNS = f"--dataset_path {{columns.data}}/columns {UNET} --output_dir {{tmp}}/run"
TRANSLATION = f"--dataset_path {{paired.data}}/to {UNET} --output_dir {{tmp}}/run"
TEACHER = "--teacher {distilled.data}/teacher --output_dir {tmp}/run"
PATHS = "--teacher {distilled.data}/teacher --teacher_dir {distilled.one}/paths --output_dir {tmp}/run"
FIELDS = f"--dataset_path {{floats.data}}/floats {UNET} --output_dir {{tmp}}/run"
PAIRS = "--method reflow --teacher {reflow.data}/teacher --output_dir {tmp}/reflow"

REFUSALS: dict[tuple[str, str], list[tuple[str, str]]] = {
    (TRAIN, FLOWERS): [
        ("--output_dir=", "--output_dir is empty: check whether a variable is unset"),
        ("--num_epochs 2", "--num_epochs and --train_num_steps exclude each other"),
        ("--dataset_path {pictures.data}/pictures", "--dataset and --dataset_path exclude each other: pass one"),
        ("--dim_mults 1 2 3 4 --image_size 20", "not divisible by 8, as this Unet requires"),
        ("--aspect_ratio 3:2 --image_size 10", "gives the network inputs of 15x10, not divisible by 2"),
        (
            "--image_size 12 --autoencoder small",
            "--image_size 12 cannot be halved as often as --autoencoder small does",
        ),
        ("--image_size 24 --autoencoder small", "--image_size 24 gives the network inputs of 3, not divisible by 2"),
        (f"--image_size 16 {HAAR} --crop random", "--crop random has no effect with this --autoencoder"),
        ("--teacher_steps 7", "--teacher_steps needs --teacher"),
        ("--evaluation_samples 50", "--evaluation_samples needs --evaluate_every"),
    ],
    (TRAIN, "--output_dir {paired.one} --train_num_steps 9"): [
        ("--use_cfg", "--use_cfg needs labels"),
        ("--checkpoint_dir {tmp}/elsewhere", "the checkpoints of {paired.one} are in {paired.one}/checkpoints: pass"),
    ],
    (TRAIN, ""): [("--image_size 8 --dim_mults 1 2", "--dataset synthetic-flowers or --dataset_path")],
    # what can be refused before the pictures are decoded, one of which is broken
    (TRAIN, BROKEN): [
        ("--output_dir {labels.one} --resume never", "checkpoints already holds checkpoints"),
        ("--output_dir {tmp}/new --init_from {tmp}/old", "there is no checkpoint at"),
        (f"--output_dir {{tmp}}/new --augment 0.1 {HAAR}", "--augment has no effect on Latents: leave it out"),
        ("--output_dir {tmp}/new --augment 0.1 --method reflow --teacher {tmp}/run", "--teacher and --augment exclude"),
        ("--output_dir {tmp}/new", "broken image {tmp}/broken/1.png ("),
        ("--output_dir {tmp}/new --image_size 0", "--image_size 0 reads the first picture, and {tmp}/broken/1.png is"),
    ],
    (TRAIN, PICTURES): [
        ("--use_cfg --dataset_path {paired.data}/to", "--use_cfg needs labels"),
        ("--init_from {labels.one} --dim 16", "of another architecture"),
        ("--stop_when_memorising", "pass --holdout 0."),
        (
            "--output_dir {tmp}/new --prediction clean --evaluate_every 1 --feature_network efficientnet_lite0"
            " --evaluate_metric likelihood",
            "--evaluate_metric likelihood needs a rectified flow",
        ),
        ("--output_dir {pictures.data}/pictures/run", "lies inside --dataset_path"),
        ("--output_dir {tmp}/out --dataset_path {tmp}/out/checkpoints", "out/checkpoints lies inside --dataset_path"),
        ("--output_dir {tmp}/out --dataset_path {tmp}/out/samples", "out/samples lies inside --dataset_path"),
        ("--cache_dir {pictures.data}/pictures/b", "lies inside --dataset_path"),
        ("--global_batch_size 16000000", "a step of 16,000,000 images "),
        (
            "--output_dir {pictures.one} --dataset_path {paired.data}/to --dim_mults 1",
            "was trained on other data, at another size or with another --holdout",
        ),
        ("--exclude b/99.png", "--exclude names b/99.png, which is no image and no folder of pictures: correct"),
    ],
    (TRAIN, COLUMNS): [
        ("--condition_on text --text_tokens 4", "--text_tokens needs --text_encoder"),
        (
            "--condition_on parity size --coupling ot",
            "--coupling ot pairs rows with equal conditions, and values of size are",
        ),
    ],
    (TRAIN, TRANSLATION): [
        ("--source_path {tmp}/nowhere", "--source_path {tmp}/nowhere is not a folder"),
        ("--source_path {paired.data}/to", "--source_path {paired.data}/to lies inside --dataset_path"),
        ("--source_path {paired.data}/from --degrade grey", "--source_path and --degrade exclude each other"),
        ("--source_path {paired.data}/from --output_dir {paired.data}/from/run", "lies inside --source_path"),
        ("--paired", "--paired needs --source_path"),
        ("--source_as start", "--source_as needs --source_path or --degrade"),
        ("--degrade grey --source_noise 0.1", "--source_noise has no effect if the source is a condition: pass"),
        ("--source_path {paired.data}/from --paired --coupling ot", "--paired and --coupling exclude each other"),
        ("--source_path {paired.data}/from --coupling immiscible", "coupling immiscible is for noise"),
        ("--source_path {paired.data}/from --source_as condition --coupling ot", "coupling ot is for noise"),
        ("--degrade grey --autoencoder small", "--degrade and --autoencoder exclude each other"),
    ],
    (TRAIN, FIELDS): [
        *(
            (f"--space value_range={text}", f"--space value_range={text} must be measured, percentile:P, MIN,MAX, or")
            for text in ("1", "0,x,9", "measured:3", "percentile:x", "percentile:", "percentile:0,1", "percentile:50")
        ),
        ("--space show=1,b", "1,b names no channels from 1 to 2"),
        ("--space value_range=5,1", "pass MIN below MAX"),
        ("--space transform=log value_range=0,9", "transform=log is undefined for the value 0"),
        ("--space transform=cube", "transform cube is not registered: choose Asinh or Linear or Log"),
        ("--evaluate_every 4", "--evaluate_every is for pictures"),
        ("--augment 0 --autoencoder small", "--autoencoder encodes pictures"),
        ("--resize nearest", "--resize has no effect on Fields: leave it out"),
        ("--source_path {floats.data} --source_bits 12", "--source_bits has no effect on Fields: leave it out"),
    ],
    # the flags of pictures that the items of a dataset cannot obey
    (TRAIN, f"--dataset ramps --import tests.extension.own_dataset {UNET} --output_dir {{tmp}}/run"): [
        (flags, f"{flags.split()[0]} is for pictures, and --dataset ramps has other items: leave it out")
        for flags in ("--exclude 3", "--crop random", "--skip_broken_images")
    ],
    (ONE_STEP, FLOWERS): [
        ("--guidance_scale 2", "guidance needs a network that takes conditions"),
        ("--init_from {tmp}/nothing", "there is no checkpoint at"),
        ("--method distill", "--method distill needs --teacher"),
        ("--method reflow", "--method reflow needs --teacher"),
    ],
    (ONE_STEP, TEACHER): [
        ("--teacher {tmp}", "there is no checkpoint at"),
        ("--coupling ot", "--coupling and --teacher exclude each other: pass one"),
        ("--flow objective=mean_flow", "DistilledFlow takes KEY=VALUE with the keys"),
        ("--init_from {labels.one}", "--teacher and --init_from exclude each other"),
        ("--output_dir {distilled.data}/teacher", "belongs to a run with --method rectified: choose another"),
        ("--dim 32", "--dim has no effect with --teacher: the run inherits --dim 8 of"),
        ("--no_use_cfg", "--use_cfg has no effect with --teacher: the run inherits --use_cfg of"),
        ("--stop_when_memorising", "--teacher and --stop_when_memorising exclude each other"),
        ("--method mean_flow", "--method mean_flow has no effect with --teacher"),
        ("--one_step", "--one_step is for rectified flows, not --method distill: leave it out"),
        ("--method reflow --flow whole_fraction=0.4", "RectifiedFlow takes KEY=VALUE"),
        ("--teacher {pictures.one} --guidance_scale 2", "--guidance_scale needs conditions"),
        ("--teacher_dir {tmp}/full", "full is in the way of the paths, and holds a file"),
        (
            "--autoguidance 2 --teacher {distilled.data}/teacher/checkpoints/step_00000004",
            "--autoguidance needs a checkpoint of the first quarter of the teacher's run",
        ),
    ],
    (ONE_STEP, PATHS): [
        ("--teacher_samples 70 --global_batch_size 4", "differ in paths (24 stored, 70 requested)"),
        (
            "--teacher_samples 24 --teacher_steps 2 --guidance_scale 2 --global_batch_size 8",
            "differ in guidance_scale (1.0 stored, 2",
        ),
    ],
    (TRAIN, PAIRS): [
        ("--teacher_dir /proc/nothing", "--teacher_dir /proc cannot be written"),
        ("--teacher_dir {reflow.one}/pairs --teacher_samples 7 --global_batch_size 4", "differ in pairs (24 stored, 7"),
        ("--teacher {tmp} --teacher_dir {reflow.one}/pairs", "contains pairs of"),
        ("--prediction clean", "--prediction has no effect with --teacher: the run inherits --prediction velocity"),
    ],
    (SAMPLE, f"--checkpoint {{labels.one}} {OUTPUT}"): [
        ("--checkpoint {tmp}/nowhere", "no checkpoint at"),
        ("--classes a,bb", "--classes a,bb: bb does not exist: pass names like a, b, or numbers up to 1\n"),
        ("--license mit", "--license needs --save_pretrained: pass both"),
        ("--num_samples 1000000000000000", "--num_samples is 1000000000000000; it must be less than or equal to"),
        ("--strength 0.5", "--strength needs --from_images: pass both"),
        ("--guidance_interval 0.2 0.8", "--guidance_interval needs --guidance_scale or"),
        ("--save_pretrained /proc/nothing", "--save_pretrained /proc/nothing cannot be written"),
        ("--from_images {tmp}/nowhere", "is neither a file nor a folder of files"),
        ("--output_dir /proc/nothing", "--output_dir /proc/nothing cannot be written"),
    ],
    (SAMPLE, f"--checkpoint {{floats.one}} {OUTPUT}"): [
        ("--num_samples 1 --steps 1 --nearest {pictures.data}/pictures", "--nearest pictures has 3 channels"),
    ],
    (SAMPLE, f"--checkpoint {{columns.one}} {OUTPUT}"): [
        ("--set colour=3", "--set colour=3: "),
        ("--set size=nan", "--set size=nan: nan is not a number"),
        ("--grid size=1,x seed", "--grid size=1,x: x is not a number"),
        ("--set parity=off", "off does not exist"),
        ("--set size=large", "large is not a number"),
        ("--guidance colour=3", "--guidance colour: "),
        ("--guidance size=x", "must be NAME=SCALE"),
        (
            "--set size=3 --guidance parity=2",
            "--guidance parity=2 has no effect, as parity has no value: pass --set par",
        ),
        (
            "--from_images {columns.data}/columns/00.png --guidance size=2",
            "--guidance size=2 has no effect, as size has no value",
        ),
        ("--grid colour seed", "--grid colour: "),
        ("--grid size seed=0", "--grid seed=0 must be seed=COUNT"),
        ("--prompts nowhere.txt", "nowhere.txt is missing"),
        ("--prompt a --prompts b", "--prompts and --prompt exclude each other"),
        ("--grid size parity --num_samples 3", "--grid and --num_samples exclude each other"),
        ("--grid size=1,2 size=3", "--grid size has one axis twice"),
        ("--grid size parity --set size=3", "--grid size parity has one axis twice, or one that another flag sets"),
        ("--set size=1e400", "1e400 is not a number"),
        ("--set size", "--set size must be NAME=VALUE, such as unicode_version=9"),
        ("--set size=", "--set size=: a value is empty; pass one, and check whether a variable is unset"),
    ],
    (SAMPLE, f"--checkpoint {{paired.one}} {OUTPUT}"): [
        ("", "translates pictures: pass some with --from_images"),
        ("--from_images {paired.data}/from --strength 0.5", "--strength has no effect"),
        ("--from_images {paired.data}/from --degrade", "--degrade has no effect"),
        ("--from_images {paired.data}/from --mask {tmp}/file", "--mask has no effect"),
        ("--from_images {paired.data}/from --output_dir {paired.data}/from", "lies in the folder of --from_images"),
        ("--from_images {paired.data}/from --output_dir {paired.data}/from/a", "lies in the folder of --from_images"),
        ("--from_images {paired.data}/to/01.png --output_dir {paired.data}/to", "lies in the folder of --from_images"),
        ("--from_images {paired.data}/from/01.png --num_samples 2", "pass --variants for several results of each"),
        ("--variants 2", "--variants needs --from_images"),
        ("--from_images {paired.data}/from --solver stochastic", "--solver stochastic is for paths from noise"),
        ("--from_images {paired.data}/nowhere", "neither a file nor a folder of files"),
    ],
    (SAMPLE, OUTPUT): [
        (
            "--checkpoint {unpaired.one} --from_images {unpaired.data}/from --variants 2",
            "--variants has no effect on the RectifiedFlow",
        ),
        ("--checkpoint {mean_flow.one} --guidance_scale 2", "is guided in training"),
        ("--checkpoint {mean_flow.one} --solver heun", "--solver has no effect"),
        ("--checkpoint {mean_flow.one} --autoguidance 2", "--autoguidance has no effect"),
        ("--checkpoint {pictures.one} --classes cat", "conditions are none; train with --use_cfg or --condition_on"),
    ],
    (EVALUATE, f"--checkpoint {{labels.one}} {OUTPUT}"): [
        ("--checkpoint {tmp}", "there is no checkpoint at"),
        ("--dataset_path {tmp}/moved", "is not a folder"),
        (
            "--metric agreemint",
            "agreemint is not registered: choose copies or frechet or kernel or manifold or ",
        ),
        ("--metric likelihood --guidance_scale 2", "--metric likelihood is measured without guidance"),
        ("--metric likelihood --solver heun", "--metric likelihood is measured without guidance"),
        ("--source_path {paired.data}/from", "--source_path has no effect: "),
        ("--dataset_path {paired.data}/to", "was trained on different classes than to"),
    ],
    (EXPORT, OUTPUT): [("--checkpoint {tmp}/nowhere", "there is no checkpoint at")],
}
ON_TWO = [
    (TRAIN, f"{OWN} {{tmp}}/nowhere", "nowhere is not a folder"),
    (TRAIN, f"{OWN} {{tmp}}/full", "holds no pictures"),
    (TRAIN, f"{FLOWERS} --image_size 9", "--image_size 9"),
    (TRAIN, f"{FLOWERS} --global_batch_size 15 --batch_size 4", "--global_batch_size 15 cannot be split evenly"),
    (TRAIN, f"{FLOWERS} --batch_sise 4", "Perhaps you meant"),
    (TRAIN, f"{FLOWERS} --mixed_precision fp16", "fp16 needs a GPU"),
    (TRAIN, f"{FLOWERS} --output_dir {{tmp}}/file/run", "cannot be written"),
    (TRAIN, f"{FLOWERS} --import tests.nowhere", "--import tests.nowhere failed (ModuleNotFoundError: "),
    (TRAIN, f"{BROKEN} --output_dir {{tmp}}/new", "broken image {tmp}/broken/1.png ("),
    (TRAIN, f"{PICTURES} --holdout 0.99", "--holdout 0.99 leaves"),
    (TRAIN, f"{PICTURES} --output_dir {{labels.one}} --dim 16", "network.dim was 8 and is now 16"),
    (ONE_STEP, f"{PICTURES} --init_from {{labels.one}} --dim 16", "of another architecture"),
    (ONE_STEP, f"{FLOWERS} --flow objective=best", "objective"),
    (SAMPLE, "--checkpoint {labels.one} --classes tulip", "tulip does not exist: pass names like a, b, or"),
    (EVALUATE, "--checkpoint {labels.one} --output_dir /proc/nothing", "/proc/nothing cannot be written"),
]
"""Errors that all ranks detect and rank 0 prints: program, flags and part of the message."""


class Places(dict[str, object]):
    """The runs of a kind by its name, besides the folder ``tmp``."""

    def __init__(self, tmp: Path, kind_runs: Callable[[str], Runs]) -> None:
        super().__init__(tmp=tmp)
        self.kind_runs = kind_runs

    def __missing__(self, name: str) -> Runs:
        return self.kind_runs(name.replace("_", " "))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, kind_runs: Callable[[str], Runs]) -> Places:
    tmp = tmp_path_factory.mktemp("places")
    for folder in ("broken", "full"):
        (tmp / folder).mkdir()
    (tmp / "broken/1.png").write_bytes(b"no picture")
    (tmp / "full/a file").touch()
    (tmp / "file").touch()
    return Places(tmp, kind_runs)


def rows() -> Iterator[tuple[str, str, str]]:
    for (name, start), refused in REFUSALS.items():
        for flags, sentence in refused:
            words = without("--dim_mults", start.split()) if "--dim_mults" in flags else [start]
            yield name, f"{' '.join(words)} {flags}", sentence


@pytest.mark.parametrize(("name", "flags", "sentence"), rows())
def test_flags_that_do_not_fit(name: str, flags: str, sentence: str, places: Places) -> None:
    said = refusal(name, flags.format_map(places).split())
    assert said.count(sentence.format_map(places)) == 1, said


@pytest.mark.parametrize(("name", "flags", "sentence"), ON_TWO)
def test_two_processes_refuse_alike(name: str, flags: str, sentence: str, places: Places) -> None:
    programs.assert_refused(name, 2, flags.format_map(places), sentence.format_map(places))


def test_a_launcher_that_was_told_to_split_the_weights(tmp_path: Path) -> None:
    sentence = "FSDP, DeepSpeed and Megatron-LM are not supported"
    programs.assert_refused(TRAIN, 2, FLOWERS.format(tmp=tmp_path), sentence, ACCELERATE_USE_FSDP="true")
