"""How the processes of a run find each other."""

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from rectified_flow.errors import UsageError

PATIENCE_AT_START = timedelta(minutes=30)
"""How long processes wait for each other before the first step: some may be reading, compiling, or not even there."""

OTHER_WAYS = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
"""To train on several processes that a launcher may ask for, by the name in its variable."""


def join_processes() -> PartialState:
    """Join the processes started beside this one, on the CPU if there is no accelerator; joined already, do nothing.

    Raises:
        UsageError: if there are more processes than GPUs, they do not see each other and would each train alone, or the
            launcher was told to split the weights between them.
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
    if os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} and not dist.is_initialized():
        _meet(cpu, world_size)
    for name, called in OTHER_WAYS.items():
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            raise UsageError(
                f"{called} is not supported, as every process keeps whole weights here: launch with --multi_gpu "
                "(distributed_type: MULTI_GPU in a config file)"
            )
    state = PartialState(cpu=cpu)
    if state.num_processes != world_size:
        _refuse(
            f"{world_size} processes were started but accelerate sees {state.num_processes}, so each would train "
            "alone: start them with torchrun, or with one of the commands in the README",
            local_rank == 0,
        )
    return state


def _meet(cpu: bool, world_size: int) -> None:
    """Make the process group, which Accelerate then adopts.

    Beside the devices' backend it has one for the CPU, over which processes talk without waiting for their devices.
    Where torchrun starts them again on one machine, they meet under a new prefix: its store still holds the addresses
    of those that died. (Over several machines the count of restarts is not common, and torchrun must make a new store:
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.)
    """
    store, rank, _ = next(rendezvous("env://", timeout=PATIENCE_AT_START))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    device = None if cpu else torch.accelerator.current_accelerator()
    backend = "gloo" if device is None else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=PATIENCE_AT_START)


def _refuse(sentence: str, speaks: bool) -> NoReturn:
    """End this process, which has no group to agree in who explains it."""
    if speaks:
        raise UsageError(sentence)
    sys.exit(2)
