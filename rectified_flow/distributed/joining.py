"""Process-group setup."""

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

STARTUP_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives before the first step: other processes may be reading data, compiling, or not started yet."""

OTHER_WAYS = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
"""Unsupported training backends that a launcher may request, by the name in its environment variable."""


def join_processes() -> PartialState:
    """Join the process group of this launch, on the CPU if there is no accelerator; a no-op if it was joined before.

    Raises:
        UsageError: if there are more processes than GPUs, if the processes do not see each other and would each train
            alone, or if the launcher is configured to shard the weights.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.accelerator.is_available() or (world_size > 1 and torch.backends.mps.is_available()):
        # Without this, accelerate creates no process group, and each process runs as if it were the only one.
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
                f"{called} is not supported, since every process keeps a full copy of the weights: launch with "
                "--multi_gpu (distributed_type: MULTI_GPU in a config file)"
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
    """Create the process group, which Accelerate then adopts.

    Besides the backend of the devices, the group has a CPU backend, which communicates without waiting for the devices.
    After a restart by torchrun on one machine, the processes use a new prefix in torchrun's store, since the store
    still holds the addresses of the dead processes. (On several machines the restart count is not shared, and torchrun
    must create a new store: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.)
    """
    store, rank, _ = next(rendezvous("env://", timeout=STARTUP_TIMEOUT))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    device = None if cpu else torch.accelerator.current_accelerator()
    backend = "gloo" if device is None else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=STARTUP_TIMEOUT)


def _refuse(sentence: str, speaks: bool) -> NoReturn:
    """Exit. There is no process group in which to agree on who prints the error; the process with ``speaks`` does."""
    if speaks:
        raise UsageError(sentence)
    sys.exit(2)
