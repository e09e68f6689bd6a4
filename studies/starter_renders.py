"""Ray-traced pictures of plants, animals, fruit, tableware, furniture and rocks, for the training of a starter.

    python studies/starter_renders.py --folder runs/starter/renders --count 3000

The program needs an environment of its own with Python 3.11, ``bpy`` 4.2.0, ``infinigen`` 1.15.5 without its
dependencies, and those of them that it imports (``REQUIRED``). Infinigen (Raistrick et al. 2023, arXiv:2306.09310)
builds the objects, and Cycles renders them. Each object is drawn in several views, which differ in camera, light,
ground and number of copies; some views have no ground and keep their alpha channel.

Start the same command again after a kill: ``objects.jsonl`` has a line for each object that is finished or failed, and
a picture is written whole or not at all. A file PAUSE in the folder above lets the program wait between two objects.
"""

import argparse
import importlib
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REQUIRED = (
    "bpy==4.2.0 numpy<2 gin-config tqdm shapely<=2.0.5 scipy opencv-python-headless<4.9 trimesh<3.23 networkx "
    "scikit-learn<1.4 scikit-image<0.24 pandas matplotlib imageio psutil rtree python-fcl coacd OpenEXR geomdl submitit"
)
"""Requirements besides infinigen, which is installed with ``--no-deps``: its own limits exclude Python 3.11."""
SIDE, SAMPLES, VIEWS = 128, 16, 8
OBJECTS_PER_PROCESS = 8
"""Blender keeps memory of objects that were deleted, so that a process makes a few objects only."""
PATIENCE = 300.0
"""Time for an object and its views [s], after which its process is stopped."""
TRANSPARENT, SEVERAL, SKY = 0.2, 0.4, 0.6
"""Shares of views without ground and sky, with several copies of the object, and under a sky."""
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
        command = [sys.executable, __file__, "--folder", str(folder), "--first", str(number)]
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


def prepare(bpy: Any) -> None:
    """Empty the scene, and set the renderer."""
    bpy.ops.wm.read_factory_settings(use_empty=True)
    scene = bpy.context.scene
    scene.render.engine = "CYCLES"
    scene.render.resolution_x = scene.render.resolution_y = SIDE
    scene.render.threads_mode, scene.render.threads = "FIXED", 1
    scene.render.image_settings.file_format = "PNG"
    scene.render.image_settings.color_mode = "RGBA"
    scene.cycles.samples, scene.cycles.use_denoising, scene.cycles.denoiser = SAMPLES, True, "OPENIMAGEDENOISE"
    scene.cycles.max_bounces, scene.cycles.device = 5, "CPU"


def render_views(bpy: Any, folder: Path, number: int) -> int:
    """Render the views of the object in the scene, and return their number.

    Raises:
        ValueError: if the scene has nothing that is seen.
    """
    import numpy as np
    from mathutils import Vector  # type: ignore[import-not-found]

    shown = [each for each in bpy.data.objects if each.type == "MESH" and not each.hide_render]
    points = [points_of(bpy, each, np) for each in shown]
    if not sum(map(len, points)):
        raise ValueError("no visible mesh")
    every = np.concatenate(points)
    low, high = Vector(every.min(axis=0).tolist()), Vector(every.max(axis=0).tolist())
    centre, radius = (low + high) / 2, (high - low).length / 2
    if not 1e-4 < radius < 1e4:
        raise ValueError(f"the radius is {radius}")
    for view in range(VIEWS):
        rng = random.Random(f"{number} {view}")
        made = [] if rng.random() > SEVERAL else add_copies(bpy, rng, shown, centre, low.z, radius)
        transparent = rng.random() < TRANSPARENT
        made += [] if transparent else [add_ground(bpy, rng, low.z, radius, centre)]
        bpy.context.scene.render.film_transparent = transparent
        made += add_light(bpy, rng, centre, radius)
        made.append(add_camera(bpy, rng, centre, radius))
        file = folder / f"{number:06d}-{view}.png"
        bpy.context.scene.render.filepath = str(file.with_suffix(".part.png"))
        bpy.ops.render.render(write_still=True)
        os.replace(file.with_suffix(".part.png"), file)
        for each in made:
            bpy.data.objects.remove(each, do_unlink=True)
    return VIEWS


def points_of(bpy: Any, shown: Any, np: Any) -> Any:
    """Return the points of a mesh ``[n, 3]``, as its modifiers move them, in the coordinates of the scene."""
    bpy.context.view_layer.update()
    evaluated = shown.evaluated_get(bpy.context.evaluated_depsgraph_get())
    mesh = evaluated.to_mesh()
    points = np.empty(3 * len(mesh.vertices), np.float32)
    mesh.vertices.foreach_get("co", points)
    matrix = np.array(shown.matrix_world)
    return points.reshape(-1, 3) @ matrix[:3, :3].T + matrix[:3, 3]


def add_copies(bpy: Any, rng: random.Random, shown: list[Any], centre: Any, floor: float, radius: float) -> list[Any]:
    """Add one to four copies of the object around it, turned and of other sizes."""
    from mathutils import Matrix, Vector

    made = []
    for _ in range(rng.randint(1, 4)):
        angle, distance, size = rng.uniform(0, 2 * math.pi), rng.uniform(0.9, 2.2) * radius, rng.uniform(0.5, 1.1)
        foot = Vector((centre.x, centre.y, floor))
        to = foot + Vector((distance * math.cos(angle), distance * math.sin(angle), 0))
        turn = Matrix.Rotation(rng.uniform(0, 2 * math.pi), 4, "Z") @ Matrix.Scale(size, 4)
        for each in shown:
            copy = each.copy()
            copy.parent = None
            copy.matrix_world = Matrix.Translation(to) @ turn @ Matrix.Translation(-foot) @ each.matrix_world
            bpy.context.scene.collection.objects.link(copy)
            made.append(copy)
    return made


def colour(rng: random.Random, most: float = 0.9) -> tuple[float, float, float, float]:
    """Return a random colour, at times a grey."""
    red, green, blue = (0.01 + most * rng.random() ** 2 for _ in range(3))
    return (red, red, red, 1.0) if rng.random() < 0.3 else (red, green, blue, 1.0)


def add_ground(bpy: Any, rng: random.Random, floor: float, radius: float, centre: Any) -> Any:
    """Add a plane with one colour, or with two in a pattern."""
    bpy.ops.mesh.primitive_plane_add(size=60 * radius, location=(centre.x, centre.y, floor))
    plane, material = bpy.context.active_object, bpy.data.materials.new("ground")
    material.use_nodes = True
    nodes, links = material.node_tree.nodes, material.node_tree.links
    shader = nodes["Principled BSDF"]
    shader.inputs["Roughness"].default_value = rng.uniform(0.1, 1.0)
    shader.inputs["Base Color"].default_value = colour(rng)
    kind = rng.choice(
        (
            "plain",
            "plain",
            "ShaderNodeTexNoise",
            "ShaderNodeTexNoise",
            "ShaderNodeTexVoronoi",
            "ShaderNodeTexChecker",
            "ShaderNodeTexWave",
            "ShaderNodeTexBrick",
        )
    )
    if kind != "plain":
        pattern, mix = nodes.new(kind), nodes.new("ShaderNodeValToRGB")
        place = nodes.new("ShaderNodeTexCoord")
        pattern.inputs["Scale"].default_value = rng.uniform(0.15, 3) / radius
        for name in ("Detail", "Distortion"):
            if name in pattern.inputs:
                pattern.inputs[name].default_value = rng.uniform(0, 8)
        mix.color_ramp.elements[0].color, mix.color_ramp.elements[1].color = colour(rng), colour(rng)
        mix.color_ramp.elements[0].position, mix.color_ramp.elements[1].position = 0.3, 0.7
        links.new(place.outputs["Object"], pattern.inputs["Vector"])
        links.new(pattern.outputs["Distance" if "Distance" in pattern.outputs else "Fac"], mix.inputs["Fac"])
        links.new(mix.outputs["Color"], shader.inputs["Base Color"])
    plane.data.materials.append(material)
    return plane


def add_light(bpy: Any, rng: random.Random, centre: Any, radius: float) -> list[Any]:
    """Set a sky with a sun, or a plain surrounding with an area light, and return the lights."""
    from mathutils import Vector

    world = bpy.data.worlds.new("world")
    bpy.context.scene.world = world
    world.use_nodes = True
    nodes, links = world.node_tree.nodes, world.node_tree.links
    surrounding = nodes["Background"]
    if rng.random() < SKY:
        sky = nodes.new("ShaderNodeTexSky")
        sky.sun_elevation, sky.sun_rotation = math.radians(rng.uniform(5, 80)), rng.uniform(0, 2 * math.pi)
        sky.dust_density, sky.sun_size = rng.uniform(0, 4), math.radians(rng.uniform(0.5, 10))
        links.new(sky.outputs["Color"], surrounding.inputs["Color"])
        surrounding.inputs["Strength"].default_value = rng.uniform(0.1, 0.25)
        return []
    surrounding.inputs["Color"].default_value = colour(rng)
    surrounding.inputs["Strength"].default_value = rng.uniform(0.2, 1.0)
    light = bpy.data.lights.new("light", "AREA")
    light.size, light.color = rng.uniform(0.3, 4) * radius, [rng.uniform(0.7, 1) for _ in range(3)]
    light.energy = rng.uniform(60, 200) * radius**2
    made = bpy.data.objects.new("light", light)
    angle, height = rng.uniform(0, 2 * math.pi), rng.uniform(0.3, 1.5)
    away = Vector((math.cos(angle), math.sin(angle), height)).normalized()
    made.location = centre + 4 * radius * away
    made.rotation_euler = (-away).to_track_quat("-Z", "Y").to_euler()
    bpy.context.scene.collection.objects.link(made)
    return [made]


def add_camera(bpy: Any, rng: random.Random, centre: Any, radius: float) -> Any:
    """Add a camera that looks at the object, from near or far."""
    from mathutils import Vector

    data = bpy.data.cameras.new("camera")
    data.lens = math.exp(rng.uniform(math.log(30), math.log(90)))
    camera = bpy.data.objects.new("camera", data)
    azimuth, height = rng.uniform(0, 2 * math.pi), math.radians(rng.uniform(5, 65))
    away = Vector((math.cos(azimuth) * math.cos(height), math.sin(azimuth) * math.cos(height), math.sin(height)))
    fit = radius / math.sin(data.angle / 2)
    target = centre + Vector([rng.gauss(0, 0.15) * radius for _ in range(3)])
    camera.location = target + rng.uniform(0.4, 1.0) * fit * away
    camera.rotation_euler = (-away).to_track_quat("-Z", "Y").to_euler()
    data.clip_start, data.clip_end = 0.01 * radius, 1000 * radius
    if rng.random() < 0.3:
        data.dof.use_dof, data.dof.aperture_fstop = True, rng.uniform(0.5, 4)
        data.dof.focus_distance = (camera.location - centre).length
    bpy.context.scene.collection.objects.link(camera)
    bpy.context.scene.camera = camera
    return camera


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
