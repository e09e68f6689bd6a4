"""Ray-traced pictures of plants, animals, fruit, tableware, furniture and rocks, for the training of a starter.

    python -m studies.starter_renders --folder runs/starter/renders --count 3000

The program needs an environment of its own with Python 3.11, ``bpy`` 4.2.0, ``infinigen`` 1.15.5 without its
dependencies, and those of them that it imports (``REQUIRED``). Infinigen (Raistrick et al. 2023, arXiv:2306.09310)
builds the objects, and Cycles renders several views of each (``starter_scenes.py``).

Start the same command again after a kill: ``objects.jsonl`` has a line for each object that is finished or failed, and
a picture is written whole or not at all. A file PAUSE in the folder above lets the program wait between two objects.
"""

import argparse
import importlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from studies.starter_scenes import prepare, render_views

REQUIRED = (
    "bpy==4.2.0 numpy<2 gin-config tqdm shapely<=2.0.5 scipy opencv-python-headless<4.9 trimesh<3.23 networkx "
    "scikit-learn<1.4 scikit-image<0.24 pandas matplotlib imageio psutil rtree python-fcl coacd OpenEXR geomdl submitit"
)
"""Requirements besides infinigen, which is installed with ``--no-deps``: its own limits exclude Python 3.11."""
OBJECTS_PER_PROCESS = 8
"""Blender keeps memory of objects that were deleted, so that a process makes a few objects only."""
PATIENCE = 1500.0
"""Time for an object and its views [s] on a busy machine, after which its process is stopped."""
FACTORIES = """
cactus.ColumnarCactusFactory cactus.GlobularCactusFactory cactus.KalidiumCactusFactory cactus.PrickyPearCactusFactory
corals.BrainCoralFactory corals.BushCoralFactory corals.CauliflowerCoralFactory corals.ElkhornCoralFactory
corals.FanCoralFactory corals.HoneycombCoralFactory corals.LeatherCoralFactory corals.StarCoralFactory
corals.TableCoralFactory corals.TubeCoralFactory corals.TwigCoralFactory
creatures.BeetleFactory creatures.CrabFactory creatures.FishFactory creatures.FishFactory creatures.FrogFactory
creatures.JellyfishFactory creatures.LizardFactory creatures.LobsterFactory creatures.DragonflyFactory
fruits.apple.FruitFactoryApple fruits.blackberry.FruitFactoryBlackberry fruits.durian.FruitFactoryDurian
fruits.pineapple.FruitFactoryPineapple fruits.starfruit.FruitFactoryStarfruit
fruits.strawberry.FruitFactoryStrawberry fruits.coconutgreen.FruitFactoryCoconutgreen
grassland.DandelionFactory grassland.FlowerFactory grassland.FlowerPlantFactory grassland.GrassTuftFactory
lamp.DeskLampFactory lamp.FloorLampFactory
mollusk.AugerFactory mollusk.ClamFactory mollusk.ConchFactory mollusk.MusselFactory mollusk.NautilusFactory
mollusk.ScallopFactory mollusk.SnailBaseFactory mollusk.VoluteFactory
monocot.AgaveMonocotFactory monocot.BananaMonocotFactory monocot.GrassesMonocotFactory monocot.KelpMonocotFactory
monocot.MaizeMonocotFactory monocot.PineconeFactory monocot.TaroMonocotFactory monocot.TussockMonocotFactory
monocot.VeratrumMonocotFactory monocot.WheatMonocotFactory
mushroom.MushroomFactory
rocks.BlenderRockFactory rocks.BoulderFactory
seating.ArmChairFactory seating.BarChairFactory seating.ChairFactory seating.OfficeChairFactory seating.SofaFactory
shelves.SimpleBookcaseFactory shelves.SimpleDeskFactory shelves.TriangleShelfFactory
small_plants.SnakePlantFactory small_plants.SpiderPlantFactory small_plants.SucculentFactory
table_decorations.BookStackFactory table_decorations.VaseFactory
tables.CoffeeTableFactory tables.TableCocktailFactory tables.TableDiningFactory
tableware.BottleFactory tableware.BowlFactory tableware.CanFactory tableware.CupFactory tableware.FoodBagFactory
tableware.FoodBoxFactory tableware.ForkFactory tableware.FruitContainerFactory tableware.JarFactory
tableware.PanFactory tableware.PlantContainerFactory tableware.PlateFactory tableware.PotFactory
tableware.SpoonFactory tableware.WineglassFactory
tropic_plants.LeafBananaTreeFactory tropic_plants.LeafPalmPlantFactory
underwater.SeaweedFactory underwater.UrchinFactory
""".split()  # noqa: SIM905, as a list of lines is easier to read
"""Classes below ``infinigen.assets.objects``. Left out: objects that take minutes each, such as birds and trees."""


def factory_of(number: int) -> str:
    """Return the class of an object: each of them once in a round, in an order that depends on the round."""
    order = random.Random(number // len(FACTORIES)).sample(FACTORIES, len(FACTORIES))
    return order[number % len(FACTORIES)]


def done(folder: Path) -> int:
    """Return the number of objects that are finished or failed."""
    file = folder / "objects.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def write_down(folder: Path, **values: object) -> None:
    """Append a line for an object."""
    with (folder / "objects.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def wait_while_paused(folder: Path) -> None:
    """Wait until there is no file PAUSE in the folder above."""
    while (folder.parent / "PAUSE").exists():
        time.sleep(5)


def render_until(folder: Path, count: int) -> None:
    """Render until the folder has ``count`` pictures, with a process for every few objects."""
    folder.mkdir(parents=True, exist_ok=True)
    while len(list(folder.glob("*.png"))) < count:
        wait_while_paused(folder)
        number = done(folder)
        command = [sys.executable, "-m", "studies.starter_renders", "--folder", str(folder), "--first", str(number)]
        worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder / "errors.txt").open("w"))
        try:
            watch(worker, folder)
        finally:
            worker.kill()
            worker.wait()


def watch(worker: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Wait for a process; write down the object at which it dies or takes longer than ``PATIENCE`` without a pause."""
    number, waited = done(folder), 0.0
    while worker.poll() is None and waited < PATIENCE:
        time.sleep(1)
        waited += 0 if (folder.parent / "PAUSE").exists() else 1
        if done(folder) > number:
            number, waited = done(folder), 0.0
    if worker.poll() != 0:
        reason = f"exit code {worker.poll()}" if worker.poll() is not None else f"more than {PATIENCE:.0f} s"
        write_down(folder, object=number, factory=factory_of(number), error=reason)


# In the process that imports Blender


def render_objects(folder: Path, first: int) -> None:
    """Make some objects, and render the views of each."""
    import bpy  # type: ignore[import-not-found]
    from infinigen.core import init  # type: ignore[import-not-found]

    # Modules of infinigen download Blender add-ons when they are imported. No object above needs them.
    init.require_blender_addon = lambda *_, **__: False
    fixed_seed = importlib.import_module("infinigen.core.util.math").FixedSeed
    for number in range(first, first + OBJECTS_PER_PROCESS):
        wait_while_paused(folder)
        began, name, pictures = time.process_time(), factory_of(number), 0
        error = None
        try:
            prepare(bpy)
            module, kind = name.rsplit(".", 1)
            with fixed_seed(number):
                factory = getattr(importlib.import_module(f"infinigen.assets.objects.{module}"), kind)(number)
                factory.spawn_asset(0)
            pictures = render_views(bpy, folder, number)
        except Exception as caught:  # an object of another library may fail in any way, and the next one may not
            error = f"{type(caught).__name__}: {caught}"[:200]
        seconds = round(time.process_time() - began, 1)
        write_down(folder, object=number, factory=name, pictures=pictures, seconds=seconds, error=error)


def main() -> None:
    """Render until there are enough pictures, or in a child process, some objects."""
    parser = argparse.ArgumentParser(description="render pictures for the training of a starter")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--count", type=int, default=3000, help="number of pictures")
    parser.add_argument("--first", type=int, default=None, help="render a few objects from this one on")
    flags = parser.parse_args()
    if flags.first is None:
        render_until(flags.folder, flags.count)
    else:
        render_objects(flags.folder, flags.first)


if __name__ == "__main__":
    main()
