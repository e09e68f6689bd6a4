"""The choice of the size of the pictures, and of an autoencoder, by the time and by the speeds of trials."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from rectified_flow.cli.planning.limits import (
    AUGMENTED_LENGTH,
    MIN_IMAGES,
    UNAUGMENTED_PASSES,
    for_pictures,
    limit_of,
    passes_of,
)
from rectified_flow.cli.planning.plan import TRAINED_SHARE, Plan
from rectified_flow.cli.settings import command_line
from rectified_flow.system.terminal import duration
from rectified_flow.training.speed import Speed

Size = tuple[int, tuple[str, ...]]
"""Side of the pictures [px], and the autoencoder, if the network is trained on latents."""
SIZES: Mapping[Size, int] = {  # images from which a size and its --autoencoder give better pictures than the next entry
    (256, ("small",)): 400_000,  # a guess: four times the images of an hour at 128 px
    (128, ("small",)): 0,  # latents of 128 px process three times as many images as pixels of 32 px (docs/latents.md)
    (64, ()): MIN_IMAGES,
    (32, ()): 0,
}
SPOILED = 14.0  # error above which an autoencoder spoils pictures (docs/latents.md)
MOST_FASTER = 1.5  # assumed bound: how many times as fast per pixel a size is as a smaller one
MIN_SHARE_OF_SIDE = 0.75  # smallest ratio of the side of the pictures to the chosen size; a guess
MIN_SIDE = 8  # least side of pictures [px]
REDUCTION = 8  # the autoencoders in SIZES divide the sides of pictures by this number
MeasureSize = Callable[[int, tuple[str, ...], float], Speed]
"""Function that returns the training speed for a side of the pictures [px], the words of ``--autoencoder`` (empty for
pixels) and a probability of augmentation."""
MeasureError = Callable[[int, tuple[str, ...]], float]
"""Function that returns the error of pictures of a side [px] after an autoencoder: the median over the pictures of the
root mean square difference [levels of 256]."""


def sizes_for(
    given: Collection[str], sides: Sequence[int], autoencoder: tuple[str, ...], divisor: int = 2
) -> Mapping[Size, int]:
    """Return the sizes to choose from. For a given size, only the autoencoder and augmentation may be chosen.

    Args:
        given: names of the flags that the user gave, of those that fix the size.
        sides: height and width of the pictures by the flags [px].
        autoencoder: the autoencoder of the flags.
        divisor: the network needs sides of the data that are divisible by this number; 2 suits a Unet of two levels.
    """
    if not given:
        fitting = {(side, kind): side % (REDUCTION * divisor if kind else divisor) == 0 for side, kind in SIZES}
        return {each: images for each, images in SIZES.items() if fitting[each]}
    size = min(sides)
    if autoencoder:
        return {(size, autoencoder): 0}
    kinds = [kind for side, kind in SIZES if kind and size >= MIN_SHARE_OF_SIDE * side]
    is_free = "image_size" in given and {*given} <= {"image_size", "aspect_ratio", "crop"}
    fits = not any(side % (REDUCTION * divisor) for side in sides)
    return {(size, kinds[-1]): 0} if kinds and is_free and fits else {}


def choose_size(
    pictures: int,
    side: int,
    seconds: float,
    measure: MeasureSize,
    error: MeasureError = lambda _size, _autoencoder: 0.0,
    *,
    sizes: Mapping[Size, int] = SIZES,
    augmentable: Callable[[int, tuple[str, ...]], bool] = lambda _size, _autoencoder: True,
    override: str = "--image_size overrides the choice",
) -> Plan:
    """Choose the largest size of the pictures for which there is enough time; a plan without settings if no size fits.

    The augmentation of latents is chosen here, before the pictures are read, because augmented pictures are encoded in
    each step. The augmentation of pixels is chosen later, when the number of passes is known.

    Args:
        pictures: number of pictures.
        side: median of the shorter sides of the pictures [px].
        seconds: the time that is left [s].
        measure: returns the speed at a size, with or without augmentation.
        error: returns how much an autoencoder changes the pictures at a size.
        sizes: the sizes to choose from.
        augmentable: returns whether pictures can be augmented at a size.
        override: the end of a message, which says how to choose another size.
    """
    spoiled, rate_of = "", cache(lambda size, autoencoder, augment=0.0: measure(size, autoencoder, augment).rate)
    for (size, autoencoder), min_images in sizes.items():
        if side < MIN_SHARE_OF_SIDE * size:
            continue
        # Steps of a large size take long on a busy machine, so the speed of a smaller size rules it out.
        smaller = max((each for each, kind in sizes if each < size and kind == autoencoder), default=None)
        if smaller is not None:
            most = MOST_FASTER * rate_of(smaller, autoencoder) * (smaller / size) ** 2
            if TRAINED_SHARE * seconds * most < min_images:
                continue
        fitting = TRAINED_SHARE * seconds * rate_of(size, autoencoder)
        few = for_pictures(pictures, augmentable=augmentable(size, autoencoder)).get("augment", 0.0)
        unaugmented = limit_of(pictures, 0.0, latents=True)
        enough = AUGMENTED_LENGTH * unaugmented if autoencoder else UNAUGMENTED_PASSES * pictures
        copies = bool(autoencoder) and min(fitting, unaugmented) > passes_of(pictures, 0.0, latents=True) * pictures
        augment = few if copies or fitting > enough else 0.0
        if augment and autoencoder:  # each step then encodes its pictures
            slower = TRAINED_SHARE * seconds * rate_of(size, autoencoder, augment)
            augment, fitting = (augment, slower) if copies or slower > enough else (0.0, fitting)
        images = min(fitting, limit_of(pictures, augment, latents=bool(autoencoder)))
        if images >= min_images:
            if (changed := error(size, autoencoder) if autoencoder else 0.0) > SPOILED:
                spoiled = f", as --autoencoder {autoencoder[0]} changes these pictures by {changed:.0f} of 255"
                continue
            settings: dict[str, Any] = {"image_size": size, "autoencoder": autoencoder}
            text = f"about {images:,.0f} images in {duration(seconds)}{spoiled}; {override}"
            reasons = {"size": f"{' '.join(command_line(settings))}: {text}"}
            return Plan(settings | ({"augment": augment} if augment and autoencoder else {}), reasons)
    return Plan({}, {"size": f"pixels{spoiled}"} if spoiled else {})
