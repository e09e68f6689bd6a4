"""Train a mean flow, which generates in one step, on Oxford Flowers or on your own pictures with --dataset_path FOLDER.

Start it with python on one device, and with torchrun or accelerate launch on several. The same command goes on from the
newest checkpoint.
"""

from collections.abc import Sequence

from rectified_flow import MeanFlow, MeanFlowConfig, Trainer
from rectified_flow.checkpoint import load_network
from rectified_flow.flows.timesteps import LogitNormal
from rectified_flow.processes.launch import run
from rectified_flow.training.parts import build_dataset, build_evaluator, build_network, flow_settings
from rectified_flow.training.plan import print_plan


def main(config: MeanFlowConfig) -> None:
    if config.dry_run:
        print_plan(config, build_flow(config, class_names=("any",)))
        return
    dataset = build_dataset(config)
    flow = build_flow(config, dataset.class_names)
    if config.init_from is not None:
        load_network(flow.network, config.init_from)
    Trainer(flow, dataset, config, build_evaluator(config, dataset)).train()


def build_flow(config: MeanFlowConfig, class_names: Sequence[str]) -> MeanFlow:
    return MeanFlow(
        build_network(config, class_names),
        objective=config.objective,
        mean_fraction=config.mean_fraction,
        weight_power=config.weight_power,
        weight_epsilon=config.weight_epsilon,
        time_distribution=LogitNormal(config.time_mean, config.time_std),
        earlier_distribution=LogitNormal(config.earlier_mean, config.earlier_std),
        guidance_scale=config.guidance_scale,
        guidance_mixing=config.guidance_mixing,
        **flow_settings(config, class_names),
    )


if __name__ == "__main__":
    run(main, MeanFlowConfig, __doc__)
