"""Run a function on several ranks of a real process group, in a fraction of a second.

A fork server imports and prepares everything once, see :mod:`tests.warm`. The ranks fork from it and use a file as
their store, so no ports are involved.
What hangs ends after :data:`~tests.patience.PATIENCE`: the process group, each rank with a stack dump, and the parent,
which kills all ranks.
"""

import contextlib
import datetime
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.patience import PATIENCE

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch", "torch.distributed", "torch._dynamo", "torch._decomp.decompositions_for_jvp", "torch.utils.data",
        "torch.nn.parallel", "torch.optim", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        "torchvision.utils", "accelerate", "accelerate.data_loader", "datasets", "ema_pytorch", "safetensors.torch",
        "matplotlib.figure", "pydantic", "tyro", "typeguard", "pytest", "einops._torch_specific", "ot",
        "transformers.models.bert.modeling_bert",
        "torchmetrics.image.fid", "torchmetrics.image.kid", "efficientnet_lite_pytorch",
        "rectified_flow.cli.programs", "rectified_flow.cli.train", "rectified_flow.cli.sample",
        "rectified_flow.cli.evaluate", "rectified_flow.cli.export", "rectified_flow.training.trainer",
        "tests.programs", "tests.training.runs", "tests.contract.kinds", "tests.test_docs", "tests.test_user_files",
        "tests.warm",
    ]
)  # fmt: skip


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on every rank of a gloo group and return the results by rank."""
    with tempfile.TemporaryDirectory() as meeting:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(rank, world_size, f"{meeting}/store", theirs, function, args)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(processes, pipes)
        finally:
            for process in processes:
                if process.is_alive() and process.pid is not None:
                    with contextlib.suppress(ProcessLookupError):  # it has just left
                        os.killpg(process.pid, signal.SIGKILL)
                process.join()


def _collect(processes: list[Any], pipes: list[Connection]) -> list[Any]:
    until = time.monotonic() + PATIENCE
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        if time.monotonic() > until:
            raise TimeoutError(f"ranks {sorted(set(range(len(processes))) - set(results))} did not finish")
        for rank, pipe in enumerate(pipes):
            if rank in results or not pipe.poll(0.01):
                continue
            try:
                results[rank], failure = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                raise AssertionError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if failure is not None:
                raise AssertionError(f"rank {rank} failed:\n{failure}")
    return [results[rank] for rank in range(len(processes))]


def _rank(
    rank: int,
    world_size: int,
    store_path: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.setsid()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    import torch
    import torch.distributed as dist
    from accelerate import PartialState
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if world_size > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
            store = FileStore(store_path, world_size)
            timeout = datetime.timedelta(seconds=PATIENCE)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            dist.barrier()  # a rank that ended at once would break the connection that another is still making
        assert PartialState(cpu=True).num_processes == world_size
        # Plain pickle: tensors travel by value, so that this process may end before they are read.
        pipe.send_bytes(pickle.dumps((function(*args), None)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((None, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
