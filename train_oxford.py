"""Train a rectified flow on Oxford Flowers, or on your own pictures with --dataset_path FOLDER.

Start it with python on one device, and with torchrun or accelerate launch on several. The same command goes on from the
newest checkpoint.
"""


from rectified_flow import RectifiedFlow, Trainer, TrainingConfig, Unet, open_dataset
from rectified_flow.flows.timesteps import LogitNormal, Uniform
from rectified_flow.training.launch import run

LABEL_DROPOUT = 0.1


def main(config: TrainingConfig) -> None:
    dataset = None
    if config.use_cfg or not config.dry_run:
        dataset = open_dataset(
            config.dataset,
            config.dataset_path,
            image_size=config.image_size,
            cache_dir=config.cache_dir,
            skip_broken_images=config.skip_broken_images,
        )
    flow = build_flow(config, dataset.num_classes if dataset is not None and config.use_cfg else None)
    if dataset is None or config.dry_run:
        raise SystemExit
    else:
        Trainer(flow, dataset, config).train()


def build_flow(config: TrainingConfig, num_classes: int | None) -> RectifiedFlow:
    network = Unet(
        config.dim,
        config.dim_mults,
        num_classes=num_classes,
        image_size=config.image_size,
        dropout=config.dropout,
    )
    uniform = config.time_distribution == "uniform"
    return RectifiedFlow(
        network,
        prediction=config.prediction,
        loss=config.loss,
        time_distribution=Uniform(config.time_shift)
        if uniform
        else LogitNormal(config.time_mean, config.time_std, config.time_shift),
        label_dropout=LABEL_DROPOUT,
        horizontal_flip=config.horizontal_flip,
        image_shape=(network.channels, config.image_size, config.image_size),
    )


if __name__ == "__main__":
    run(main, TrainingConfig, __doc__)
