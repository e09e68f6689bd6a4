"""Train a rectified flow on Oxford Flowers, or on your own pictures with --dataset_path FOLDER.

Start it with python on one device, and with torchrun or accelerate launch on several. The same command goes on from the
newest checkpoint.
"""

from rectified_flow import RectifiedFlow, Trainer, TrainingConfig, Unet, open_dataset
from rectified_flow.data.oxford_flowers import FLOWER_NAMES
from rectified_flow.flows.timesteps import LogitNormal, TimeDistribution, Uniform
from rectified_flow.training.launch import run
from rectified_flow.training.plan import print_plan

LABEL_DROPOUT = 0.1


def main(config: TrainingConfig) -> None:
    if config.dry_run:  # without opening the data: the embedding of its classes is a rounding error of the size
        print_plan(config, build_flow(config, len(FLOWER_NAMES)))
        return
    dataset = open_dataset(
        config.dataset,
        config.dataset_path,
        image_size=config.image_size,
        cache_dir=config.cache_dir,
        skip_broken_images=config.skip_broken_images,
    )
    Trainer(build_flow(config, dataset.num_classes), dataset, config).train()


def build_flow(config: TrainingConfig, num_classes: int | None) -> RectifiedFlow:
    network = Unet(
        config.dim,
        config.dim_mults,
        num_classes=num_classes if config.use_cfg else None,
        image_size=config.image_size,
        dropout=config.dropout,
    )
    times: TimeDistribution = LogitNormal(config.time_mean, config.time_std, config.time_shift)
    if config.time_distribution == "uniform":
        times = Uniform(config.time_shift)
    return RectifiedFlow(
        network,
        prediction=config.prediction,
        time_distribution=times,
        loss=config.loss,
        label_dropout=LABEL_DROPOUT,
        horizontal_flip=config.horizontal_flip,
        image_shape=(network.channels, config.image_size, config.image_size),
    )


if __name__ == "__main__":
    run(main, TrainingConfig, __doc__)
