"""The training program: open the data, plan the run, build the flow, train."""

from dataclasses import replace
from math import ceil, gcd
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from rectified_flow.cli import planning
from rectified_flow.cli.build import build_flow, choose_flow, choose_network, join
from rectified_flow.cli.config import UNET, EvaluationConfig, OneStepConfig, TrainConfig, check_outside
from rectified_flow.cli.data import (
    add_degradation,
    build_space,
    check_source,
    find_data,
    open_data,
    split_of,
    summary_of,
    with_space,
)
from rectified_flow.cli.distill import DistillationData, open_distilled
from rectified_flow.cli.plan import MIN_TO_HOLD_OUT, proposed_share
from rectified_flow.cli.record import check_one_step, resolved
from rectified_flow.data.config import RunData
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.distributed import check_equal, on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.evaluation.heldout import HeldOutPictures, Split
from rectified_flow.flags import check_rules, name_of, recorded, refuse, replaced, rules_of, values_of
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import FlowMap, takes_interval
from rectified_flow.registry import build, describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import check_start, describe_run, write_config
from rectified_flow.spaces.space import Space, with_augmentation
from rectified_flow.system.terminal import line, lines, size_text
from rectified_flow.training.evaluations import Callback, EvaluationHook, HeldOutHook
from rectified_flow.training.trainer import Trainer

MEASUREMENTS = 10
"""Least number of measurements of the held-out loss in a run by default, before the limit of MEASURED_SHARE."""
MEASURED_SHARE = 0.05
"""Largest share of a run's computations for the held-out loss, unless a flag asks for its measurement."""


def train(config: TrainConfig) -> bool:
    """Train by the flags; return whether the run finished.

    With ``--one_step``, a one-step generator then learns from the run, and this run has to finish, too.
    """
    program = config.program
    if not program.one_step or program.dry_run:
        return train_run(config)
    one_step = one_step_of(config)
    on_main(join(config), lambda: check_one_step(one_step))
    if not train_run(config):
        return False
    AcceleratorState._reset_state()  # the run may have another precision
    return train_run(one_step)


def one_step_of(config: TrainConfig) -> OneStepConfig:
    """Return the flags of the one-step generator of ``--one_step``: half of the budget, and this machine's flags."""
    run, rules, values = config.run, rules_of(TrainConfig), values_of(config)
    shared = {name: values[name] for name in config.given if rules[name].local and name not in rules_of(RunData)}
    flags: dict[str, Any] = {"teacher": run.output_dir, "output_dir": run.output_dir / "one-step"}
    flags |= {"budget": planning.budget_of(config), "seed": run.seed, **shared}
    if run.checkpoint_dir is not None:
        flags["checkpoint_dir"] = run.checkpoint_dir / "one-step"
    made = replaced(OneStepConfig(), flags)
    object.__setattr__(made.program, "given", frozenset(flags))
    return made


def train_run(config: TrainConfig) -> bool:
    """Train one run by the flags, or print its plan; return whether it finished."""
    check_flags(config)
    state, dry_run = join(config), config.program.dry_run
    set_seed(config.run.seed)

    # Settings that the flags leave open are taken from the folders of the run, of its teacher and of the data.
    config, has_begun = resolved(config)
    config = replace(config, data=with_space(config.data, may_choose=not (has_begun or config.teacher.teacher)))
    found = find_data(config.data)
    if not isinstance(found, ImageSource):
        check_items(config)
    elif not has_begun:
        config = planning.with_recipe(config, found)

    # All checks that need no data precede the decoding of the pictures, which can take hours.
    space = _space_of(config, found, has_begun=has_begun)
    on_main(state, lambda: check_start(config.run, config.origin, writes=not dry_run))
    if not dry_run:
        space.medium.prepare(state.device)
    data = _open_data(config, found)
    distilled, has_pictures = DistillationData.of(config), isinstance(data, ImageDataset)
    teacher = None if distilled is None else build(on_main(state, distilled.described_space))
    space = build_space(config.data, data, teacher)
    split = hold_out_pictures(data, config) if has_pictures and distilled is None else None
    count, conditions = len(data) if split is None else len(split.training), getattr(data, "conditions", {})
    if has_pictures or dry_run:
        config = planning.with_plan(config, has_begun, count, conditions, space)
    check_sides(config, space)

    # The flags are final.
    flow = build_flow(config, conditions, with_augmentation(space, config.data.augment))
    data = add_degradation(data, config.source.degrade, flow.space, config.data.data_seed or 0)
    start_from(config.origin if distilled is None else distilled.teacher, config.run, flow)
    summary: dict[str, object] = {"pictures": summary_of(data)} if has_pictures else {"items": len(data)}
    values = space.medium.summary
    state.print(lines(summary | ({"values": values} if values else {})))
    if dry_run:
        planning.print_dry_run(config, flow, count)
        return True
    if distilled is not None and not has_begun:  # a run that is killed while it generates the data keeps its plan
        document = describe_run(config.run, describe(flow), data, **_records(config))
        on_main(state, lambda: write_config(config.run.output_dir, document))
    rows = _open_rows(config, flow, data)
    training, held_out = (rows, None) if split is None else split.divide(rows)
    callbacks = _callbacks(config, flow, data, split, training, held_out)
    texts_of = data if distilled is not None else held_out  # distillation data have no texts for previews
    return Trainer(flow, training, config.run, callbacks=callbacks, preview_data=texts_of, **_records(config)).train()


def _space_of(config: TrainConfig, found: Any, *, has_begun: bool) -> Space:
    """Return the space of the data, whose scale may be unknown yet, after all checks that need no data."""
    space = build_space(config.data, found)
    check_source(config.source)
    crops = bool(config.data.autoencoder) and "crop" in config.given and config.data.crop == "random" and not has_begun
    refuse({"crop random": crops}, "has no effect with --autoencoder, which encodes the centre: leave it out")
    by_features = config.evaluation.evaluate_every > 0 and "frechet" not in space.medium.metrics
    refuse({"evaluate_every": by_features}, "compares features of photographs: leave it out, and run evaluate.py")
    if has_begun or not planning.chooses_network(config):
        check_sides(config, space)
    return space


def check_flags(config: TrainConfig) -> None:
    """Check relations between flags of different groups, and the names of registered parts."""
    check_rules(config, config.given)
    method, has_teacher = config.method, config.teacher.teacher is not None
    needed = "has no effect with --teacher" if has_teacher else "needs --teacher: pass the run of a rectified flow"
    refuse({f"method {method}": (method in ("distill", "reflow")) != has_teacher}, needed)
    source = config.source.source_path
    run = config.run
    written = {"output_dir": run.output_dir, "checkpoint_dir": run.checkpoint_dir, "cache_dir": config.data.cache_dir}
    check_outside("dataset_path", config.data.dataset_path, **written, source_path=source)
    check_outside("source_path", source, **written)
    network, flow = choose_network(config.network), choose_flow(config)
    noisy = config.source.source_noise > 0 and not config.source.as_start
    refuse({"source_noise": noisy}, "has no effect if the source is a condition: pass --source_as start")
    one_step, is_map = config.program.one_step, issubclass(flow.target, FlowMap)
    refuse({"one_step": one_step and is_map}, f"is for rectified flows, not --method {method}: leave it out")
    if (one_step or is_map) and not takes_interval(network.target):
        needed = "has no input r, the end of an interval, which a one-step generator needs: train only a rectified flow"
        raise UsageError(f"--network {network.target.__name__} {needed}")


def check_items(config: TrainConfig) -> None:
    """Raise a UsageError if a flag is for pictures, and the data are items of a registered dataset."""
    rules, dataset = rules_of(type(config)), name_of(config.data.dataset)
    given = {name: rules[name].for_pictures for name in sorted(config.given & rules.keys())}
    refuse(given, f"is for pictures, and --dataset {dataset} has items of another kind")


def _open_data(config: TrainConfig, found: Any) -> Any:
    """Return the pictures of a source with their columns and sources, or other items unchanged. Collective."""
    if not isinstance(found, ImageSource):
        return found
    pictures = open_data(config.run_data, found)
    # Different numbers of pictures would desynchronise the processes.
    facts = {"the number of pictures": len(pictures), "their fingerprint": pictures.fingerprint}
    check_equal(PartialState(), lambda: facts)
    return pictures


def _open_rows(config: TrainConfig, flow: Flow, data: Any) -> Any:
    """Return the data as the space of the flow stores them, or the data of a teacher. Collective.

    The flow gets the space of these rows, whose scales are known now.
    """
    if (distilled := DistillationData.of(config)) is not None:
        return open_distilled(distilled, data, config)
    rows, flow.space = flow.space.medium.rows(data, mirrored=config.data.horizontal_flip)
    return rows


def _callbacks(
    config: TrainConfig, flow: Flow, data: Any, split: Split | None, training: Any, held_out: Any
) -> list[Callback]:
    """Return the callbacks that evaluate the network during training."""
    flags, callbacks, real, unseen = config.evaluation, list[Callback](), data, None
    if split is not None:
        callbacks.append(build_heldout_hook(config.run, flags, training, held_out))
        real, unseen = split.divide(data)
    elif not hasattr(data, "read_pictures"):  # items of a registered dataset
        real = RenderedItems(data, flow.space, name_of(config.data.dataset))
    if flags.evaluate_every:
        count, seed = flags.evaluation_samples, config.run.seed
        evaluator = Evaluator(real, flags.feature_network, num_samples=count, seed=seed, held_out=unseen)
        callbacks.append(EvaluationHook(evaluator, flags.evaluate_every, keeps_best=not flags.stop_when_memorising))
    return callbacks


def _records(config: TrainConfig) -> dict[str, Any]:
    """Return the description of the data, and the other flags of the run, for its ``config.json``."""
    of_data = rules_of(RunData)
    flags = {name: value for name, value in recorded(config).items() if name not in of_data}
    return {"data": describe(config.run_data), "flags": flags}


def start_from(origin: Path | None, run: TrainingConfig, flow: Flow) -> None:
    """Initialise the network of a new run with the weights of ``origin`` whose shapes match. Collective.

    The weights of a run that resumes are not changed.
    """
    if origin is None or checkpoint.list_checkpoints(run.checkpoints):
        return
    state = PartialState()
    source = on_main(state, lambda: checkpoint.resolve(origin))
    taken, fresh = checkpoint.load_matching(flow.network, source)
    sizes = {name: weight.numel() for name, weight in flow.network.state_dict().items()}
    fits, total = sum(sizes[name] for name in taken), sum(sizes[name] for name in (*taken, *fresh))
    if 2 * fits <= total:
        fitting = f"{fits / total:.0%} of this network's weights would fit"
        raise UsageError(f"{source} is of another architecture ({fitting}): pass the --dim and --dim_mults of its run")
    state.print(line("start from", f"{source}: {fits:,} of {total:,} weights"))


def check_sides(config: TrainConfig, space: Space) -> None:
    """Raise a UsageError if the levels of the Unet cannot halve the sides of the pictures, or of their latents."""
    size, levels = config.data.image_size, len(config.network.dim_mults)
    shape = space.shape or config.data.framing.shape
    if len(shape) < 3:  # items that are not pictures, for a registered network
        return
    height, width = shape[-2:]
    divisor, common = 2 ** (levels - 1), gcd(height, width)
    if name_of(config.network.network) == UNET and common % divisor > 0:
        inputs = f"inputs of {size_text(width, height)}, not divisible by {divisor}"
        problem = f"--image_size {size} gives the network {inputs}"
        remedy = f"pass a multiple of {divisor * (size // common)}"
        raise UsageError(f"{problem}, as the {levels} levels of --dim_mults require: {remedy}")


def hold_out_pictures(pictures: ImageDataset, config: TrainConfig) -> Split | None:
    """Return the split by ``--holdout``, or None if nothing is held out. Collective."""
    state, share, split = PartialState(), config.data.holdout, split_of(pictures, config.data)
    asked = "holdout" in config.given or config.evaluation.stop_when_memorising
    if split is None:
        needed = f"needs pictures to measure on: pass --holdout {proposed_share(len(pictures)):g}"
        refuse({"stop_when_memorising": config.evaluation.stop_when_memorising}, needed)
        if len(pictures) < MIN_TO_HOLD_OUT and not asked:
            text = f"none of {len(pictures)} pictures, as too few would be left: the run cannot warn when it memorises"
            state.print(line("held out", text))
        return None
    if split.problem is not None:
        refuse({f"holdout {share:g}": asked}, f"leaves {split.problem}: change it, or pass --holdout 0")
        state.print(line("held out", f"nothing, as --holdout {share:g} leaves {split.problem}"))
        return None
    state.print(line("held out", split))
    return split


def build_heldout_hook(
    run: TrainingConfig, config: EvaluationConfig, training: StoreDataset, held_out: StoreDataset
) -> HeldOutHook:
    """Return the callback that measures the loss on held-out pictures, and on as many training pictures."""
    batch = run.split_batch(PartialState().num_processes)
    total = run.total_steps(batch, len(training))
    often = max(1, total // MEASUREMENTS)
    every = config.evaluate_every or min(run.save_every or often, often)
    pictures = HeldOutPictures(training, held_out, run.seed)
    if not config.evaluate_every and not config.stop_when_memorising:
        # In a step, the backward pass costs twice as much as the forward pass.
        every = max(every, ceil(pictures.passes / (3 * batch.total * MEASURED_SHARE)))
    return HeldOutHook(pictures, every, stops=config.stop_when_memorising)
