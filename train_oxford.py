"""Train a rectified flow on Oxford Flowers, or on your own pictures with --dataset_path FOLDER.

Start it with python on one device, and with torchrun or accelerate launch on several. The same command goes on from the
newest checkpoint.
"""

from collections.abc import Sequence

from rectified_flow import RectifiedFlow, RectifiedFlowConfig, Trainer
from rectified_flow.checkpoint import list_checkpoints, load_network
from rectified_flow.flows.timesteps import LogitNormal, TimeDistribution, Uniform, UShaped
from rectified_flow.processes.launch import run
from rectified_flow.training.parts import build_dataset, build_evaluator, build_network, flow_settings
from rectified_flow.training.plan import print_plan
from rectified_flow.training.reflow import inherit, open_pairs


def main(config: RectifiedFlowConfig) -> None:
    if config.reflow_from is not None:
        config = inherit(config)
    if config.dry_run:
        print_plan(config, build_flow(config, class_names=()))
        return
    dataset = pictures = build_dataset(config)
    flow = build_flow(config, pictures.class_names)
    evaluator = build_evaluator(config, pictures)
    if config.reflow_from is not None:
        if not list_checkpoints(config.checkpoints):
            load_network(flow.network, config.reflow_from)
        dataset = open_pairs(config, pictures)
    Trainer(flow, dataset, config, evaluator).train()


def build_flow(config: RectifiedFlowConfig, class_names: Sequence[str]) -> RectifiedFlow:
    times: dict[str, TimeDistribution] = {
        "logit_normal": LogitNormal(config.time_mean, config.time_std, config.time_shift),
        "uniform": Uniform(config.time_shift),
        "u_shaped": UShaped(),
    }
    return RectifiedFlow(
        build_network(config, class_names),
        prediction=config.prediction,
        time_distribution=times[config.times],
        loss=config.loss or ("mse" if config.reflow_from is None else "pseudo_huber"),
        **flow_settings(config, class_names),
    )


if __name__ == "__main__":
    run(main, RectifiedFlowConfig, __doc__)
