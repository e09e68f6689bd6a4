"""Start and end a training program: alone, or as one of the processes of torchrun or accelerate launch."""

import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, parse_flag_from_env, set_seed

from rectified_flow.errors import UsageError
from rectified_flow.training.command_line import parse
from rectified_flow.training.config import TrainingConfig

C = TypeVar("C", bound=TrainingConfig)


def run(main: Callable[[C], None], config_class: type[C], description: str) -> None:
    """Parse the command line, call ``main(config)`` in every process, and leave with an exit code.

    A :class:`UsageError` in any process ends the program with its sentence, printed once, and exit code 2.
    """
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=FutureWarning)  # torch's own, in jvp
    try:
        state = join_processes()
        config = parse(config_class, description, quiet=not state.is_main_process)
        set_seed(config.seed)
        main(config)
    except UsageError as error:
        _leave(f"{os.path.basename(sys.argv[0])}: error: {error}", code=2)
    except KeyboardInterrupt:
        _leave("interrupted: the same command goes on from the last checkpoint", code=130)
    except SystemExit:
        if dist.is_initialized():
            dist.barrier()  # all parse the same flags: let the one that explains the error finish first
        raise
    state.destroy_process_group()


def join_processes() -> PartialState:
    """Join the processes started beside this one, on the CPU if there is no accelerator; joined already, do nothing.

    Raises:
        UsageError: if there are more processes than GPUs, or they do not see each other and would each train alone.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.accelerator.is_available() or (world_size > 1 and torch.backends.mps.is_available()):
        # Without this, accelerate leaves several processes without a group and each believes it is alone.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    gpus = torch.cuda.device_count()
    if not cpu and 0 < gpus <= local_rank:
        _refuse(f"there are more processes than the {gpus} GPUs of this machine: start {gpus}", local_rank == gpus)
    state = PartialState(cpu=cpu)
    if state.num_processes != world_size:
        _refuse(
            f"{world_size} processes were started but accelerate sees {state.num_processes}, so each would train "
            "alone: start them with torchrun, or with one of the commands in the README",
            local_rank == 0,
        )
    return state


def _refuse(sentence: str, speaks: bool) -> NoReturn:
    """End this process, which has no group to agree in who explains it."""
    if speaks:
        raise UsageError(sentence)
    sys.exit(2)


def build_accelerator(config: TrainingConfig) -> Accelerator:
    """The run's Accelerator; a precision left unset is the launcher's.

    Raises:
        UsageError: if fp16 is asked for on a CPU, where it would silently be float32; or as :func:`join_processes`.
    """
    state = join_processes()
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        log_with=None if config.log_with == "none" else config.log_with,
        project_dir=config.output_dir,
        # Micro-batches are counted by the trainer: this divides the loss and ignores where the loader ends.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.split_batch(state.num_processes).accumulation, sync_with_dataloader=False
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if accelerator.device.type == "cpu" and accelerator.mixed_precision == "fp16":
        raise UsageError("--mixed_precision fp16 needs a GPU: on a CPU take bf16 or no")
    return accelerator


def _leave(sentence: str, code: int) -> NoReturn:
    """Exit with ``code``; the first process to get here prints ``sentence``."""
    if _is_first():
        print(sentence, file=sys.stderr, flush=True)
    sys.exit(code)


def _is_first() -> bool:
    # No collective: the others may never come here. The store they met at counts them instead.
    if not dist.is_initialized():
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("leaving", 1) == 1
    except Exception:  # the store went with the process that hosted it, which was here before
        return False
