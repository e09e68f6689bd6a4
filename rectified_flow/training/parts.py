"""From flags to the parts of a run that all flows have."""

from collections.abc import Sequence

from accelerate import PartialState

from rectified_flow.data import ImageDataset, open_dataset
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.networks import Unet
from rectified_flow.training.config import TrainingConfig

LABEL_DROPOUT = 0.1


def build_dataset(config: TrainingConfig) -> ImageDataset:
    """Open the pictures, decoding them first if that has not been done.

    Raises:
        UsageError: if they cannot be found, read or stored.
    """
    return open_dataset(
        config.dataset,
        config.dataset_path,
        image_size=config.image_size,
        cache_dir=config.cache_dir,
        skip_broken_images=config.skip_broken_images,
    )


def build_network(config: TrainingConfig, class_names: Sequence[str]) -> Unet:
    """The Unet; the classes count only with ``--use_cfg``.

    Raises:
        UsageError: if that is given and there are no labels.
    """
    if config.use_cfg and not class_names and not config.dry_run:
        raise UsageError(
            "--use_cfg needs labels and these pictures have none: put each class in a subfolder of its own"
        )
    network = Unet(
        config.dim,
        config.dim_mults,
        num_classes=(len(class_names) or None) if config.use_cfg else None,
        image_size=config.image_size,
        dropout=config.dropout,
    )
    network.gradient_checkpointing = config.gradient_checkpointing
    return network


def build_evaluator(config: TrainingConfig, pictures: ImageDataset) -> Evaluator | None:
    """What ``--evaluate_every`` measures by, if that is asked for.

    Raises:
        UsageError: if the feature network is not to be had.
    """
    if config.evaluate_every == 0:
        return None
    return Evaluator(
        pictures,
        config.feature_network,
        PartialState(),
        num_samples=config.evaluation_samples,
        seed=config.seed,
    )


def flow_settings(config: TrainingConfig, class_names: Sequence[str]) -> dict[str, object]:
    """What every flow is told about images and labels."""
    return {
        "label_dropout": LABEL_DROPOUT,
        "horizontal_flip": config.horizontal_flip,
        "coupling": config.coupling,
        "class_names": class_names if config.use_cfg else (),
        "image_shape": (3, config.image_size, config.image_size),
    }
