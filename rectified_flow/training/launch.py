"""Start and end a training program: alone, or as one of the processes of torchrun or accelerate launch."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, parse_flag_from_env, set_seed

from rectified_flow.errors import UsageError
from rectified_flow.training.config import TrainingConfig, parse

C = TypeVar("C", bound=TrainingConfig)


def run(main: Callable[[C], None], config_class: type[C], description: str) -> None:
    """Parse the command line, call ``main(config)`` in every process, and leave with an exit code.

    A :class:`UsageError` in any process ends the program with its sentence, printed once, and exit code 2.
    """
    state = join_processes()
    try:
        config = parse(config_class, description, quiet=not state.is_main_process)
        set_seed(config.seed)
        main(config)
    except UsageError as error:
        _leave(state, f"{os.path.basename(sys.argv[0])}: error: {error}", code=2)
    except KeyboardInterrupt:
        _leave(state, "interrupted: the same command goes on from the last checkpoint", code=130)
    except SystemExit:
        state.wait_for_everyone()  # all parse the same flags: let the one that explains the error finish first
        raise
    state.destroy_process_group()


def join_processes() -> PartialState:
    """Join the processes started beside this one, on the CPU if there is no accelerator.

    Raises:
        SystemExit: if there are more processes than GPUs, or they do not see each other and would each train alone.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if 0 < gpus <= local_rank:
        _refuse(f"process {local_rank + 1} of this machine has no GPU, there are only {gpus}: start {gpus} processes")
    if not torch.accelerator.is_available() or (world_size > 1 and torch.backends.mps.is_available()):
        # Without this, accelerate leaves several processes without a group and each believes it is alone.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    if state.num_processes != world_size:
        _refuse(
            f"{world_size} processes were started but accelerate sees {state.num_processes}, so each would train "
            "alone: start them with torchrun, or with one of the commands in the README"
        )
    return state


def _refuse(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    sys.exit(2)


def build_accelerator(config: TrainingConfig) -> Accelerator:
    """The run's Accelerator; a precision left unset is the launcher's.

    Raises:
        UsageError: if fp16 is asked for on a CPU, where it would silently be float32.
    """
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        log_with=None if config.log_with == "none" else config.log_with,
        project_dir=config.output_dir,
        # Micro-batches are counted by the trainer: this divides the loss and ignores where the loader ends.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.split_batch(PartialState().num_processes).accumulation, sync_with_dataloader=False
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    if accelerator.device.type == "cpu" and accelerator.mixed_precision == "fp16":
        raise UsageError("--mixed_precision fp16 needs a GPU: on a CPU take bf16 or no")
    return accelerator


def _leave(state: PartialState, sentence: str, code: int) -> NoReturn:
    """Exit with ``code``; the first process to get here prints ``sentence``."""
    if _is_first(state):
        print(sentence, file=sys.stderr, flush=True)
    sys.exit(code)


def _is_first(state: PartialState) -> bool:
    # No collective: the others may never come here. The store they met at counts them instead.
    if state.num_processes == 1:
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("leaving", 1) == 1
    except Exception:  # the store went with the process that hosted it, which was here before
        return False
