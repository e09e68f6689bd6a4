"""The scenes of ``starter_renders.py``: views of an object that differ in camera, light, ground and number of copies.

Some views have no ground and keep their alpha channel. All functions need the scene of ``bpy``.
"""

import math
import os
import random
from pathlib import Path
from typing import Any

SIDE, SAMPLES, VIEWS = 128, 16, 8
TRANSPARENT, SEVERAL, SKY = 0.2, 0.4, 0.6
"""Shares of views without ground and sky, with several copies of the object, and under a sky."""


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
