"""The Accelerator of a run and its precision."""

import os
from typing import get_args

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from rectified_flow.distributed import join_processes
from rectified_flow.errors import UsageError
from rectified_flow.runs.config import MixedPrecision, TrainingConfig


def choose_precision(config: TrainingConfig, device: torch.device) -> str:
    """Choose the precision of a run: that of the flag, else of Accelerate or its launcher, else the fastest safe one.

    The fastest is bf16 on a GPU with native support, and float32 (``no``) otherwise.

    Raises:
        UsageError: if fp16 is requested on a CPU, where Accelerate would silently use float32, or the precision of
            Accelerate is another, such as fp8.
    """
    inherited = AcceleratorState().mixed_precision if is_initialized() else os.environ.get("ACCELERATE_MIXED_PRECISION")
    made_for_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    fastest = "bf16" if made_for_bf16 else "no"
    precision = config.mixed_precision or (inherited or fastest).lower()
    if precision not in get_args(MixedPrecision):
        raise UsageError(f"Accelerate's precision {precision:.20} is not supported: pass --mixed_precision bf16 or no")
    if device.type == "cpu" and precision == "fp16":
        raise UsageError("--mixed_precision fp16 needs a GPU: on a CPU pass bf16 or no")
    return precision


def build_accelerator(config: TrainingConfig) -> Accelerator:
    """Build the Accelerator of a run.

    Raises:
        UsageError: if the precision is unavailable, or the processes cannot join.
    """
    state = join_processes()
    return Accelerator(
        mixed_precision=choose_precision(config, state.device),
        log_with=None if config.log_with == "none" else config.log_with,
        project_dir=config.output_dir,
        # The trainer counts micro-batches. The plugin divides the loss and ignores the end of the loader.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.split_batch(state.num_processes).accumulation, sync_with_dataloader=False
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
