"""Train a rectified flow on Oxford Flowers, or on your own pictures with --dataset_path FOLDER.

Start it with python on one device, and with torchrun or accelerate launch on several. The same command goes on from the
newest checkpoint.
"""

from collections.abc import Sequence

from rectified_flow import RectifiedFlow, RectifiedFlowConfig, Trainer
from rectified_flow.flows.timesteps import LogitNormal, TimeDistribution, Uniform
from rectified_flow.processes.launch import run
from rectified_flow.training.parts import build_dataset, build_evaluator, build_network, flow_settings
from rectified_flow.training.plan import print_plan


def main(config: RectifiedFlowConfig) -> None:
    if config.dry_run:
        print_plan(config, build_flow(config, class_names=()))
        return
    dataset = build_dataset(config)
    flow = build_flow(config, dataset.class_names)
    Trainer(flow, dataset, config, build_evaluator(config, dataset)).train()


def build_flow(config: RectifiedFlowConfig, class_names: Sequence[str]) -> RectifiedFlow:
    times: TimeDistribution = LogitNormal(config.time_mean, config.time_std, config.time_shift)
    if config.time_distribution == "uniform":
        times = Uniform(config.time_shift)
    return RectifiedFlow(
        build_network(config, class_names),
        prediction=config.prediction,
        time_distribution=times,
        loss=config.loss,
        **flow_settings(config, class_names),
    )


if __name__ == "__main__":
    run(main, RectifiedFlowConfig, __doc__)
