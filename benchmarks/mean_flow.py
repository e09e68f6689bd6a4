"""What a mean flow step costs: time and peak memory as ratios to rectified flow, here and in rectified-flow-pytorch.

All schemes run in this one call, interleaved, each ratio the median over rounds: on a CPU by processor time of one
thread, on a GPU by wall clock. Needs `pip install -e ".[benchmark]"`.
"""

import ctypes
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow import MeanFlow, RectifiedFlow, Unet
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import Objective

OURS, PEER = "here", "rectified-flow-pytorch"


@dataclass(frozen=True)
class Flags:
    image_size: int = 32
    """Side of the images [px]."""
    batch_size: int = 16
    """Images per step."""
    dim: int = 56
    """Channels of this project's Unet; with 56 it has as many parameters as the peer's with 32."""
    peer_dim: int = 32
    """Channels of the peer's Unet."""
    rounds: int = 7
    """How often every scheme is timed."""
    compile: bool = False
    """Compile this project's objectives."""
    measure_memory_of: str | None = None
    """Used by the program itself: print the peak memory of this scheme [MB] and exit."""


Builders = dict[str, Callable[[], nn.Module]]


def our_builders(flags: Flags) -> Builders:
    """This project's schemes by name; the first is what the others are compared with."""

    def network() -> Unet:
        torch.manual_seed(0)
        return Unet(flags.dim, (1, 2, 2, 2), image_size=flags.image_size)

    finite = Objective(step=lambda _progress: 0.5)
    return {
        "rectified flow": lambda: RectifiedFlow(network()),
        "mean flow, half of the rows": lambda: MeanFlow(network(), objective="mean_flow"),
        "improved mean flow, half of the rows": lambda: MeanFlow(network()),
        "improved mean flow, a quarter of the rows": lambda: MeanFlow(network(), mean_fraction=0.25),
        "finite step, half of the rows": lambda: MeanFlow(network(), objective=finite),
    }


def peer_builders(flags: Flags) -> Builders:
    """The peer's schemes by name, its own rectified flow first."""
    from rectified_flow_pytorch import RectifiedFlow as PeerRectifiedFlow
    from rectified_flow_pytorch import Unet as PeerUnet
    from rectified_flow_pytorch.mean_flow import MeanFlow as PeerMeanFlow

    def network(**settings: object) -> nn.Module:
        torch.manual_seed(0)
        return PeerUnet(dim=flags.peer_dim, **settings)

    return {
        "rectified flow": lambda: PeerRectifiedFlow(network()),
        "mean flow, a step with derivatives": lambda: PeerMeanFlow(
            network(accept_dest_time=True), prob_default_flow_obj=0.0
        ),
        "mean flow, a step without": lambda: PeerMeanFlow(network(accept_dest_time=True), prob_default_flow_obj=1.0),
    }


def find_builders(flags: Flags) -> Builders:
    """Every scheme by its full name; the peer's only if it is installed."""
    builders = {f"{OURS}: {name}": build for name, build in our_builders(flags).items()}
    try:
        builders |= {f"{PEER}: {name}": build for name, build in peer_builders(flags).items()}
    except ImportError:
        print(f'{PEER} is not installed and left out; pip install -e ".[benchmark]" brings it')
    return builders


def build_step(flow: nn.Module, flags: Flags, device: torch.device) -> Callable[[], None]:
    """A function that does one forward and backward pass."""
    images = torch.rand(flags.batch_size, 3, flags.image_size, flags.image_size, device=device) * 2 - 1
    flow.to(device).train()
    if flags.compile and isinstance(flow, Flow):
        flow.compile()

    def step() -> None:
        flow.zero_grad()
        loss: Tensor = flow(images)
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def peak_memory(step: Callable[[], None], device: torch.device) -> float:
    """What a step adds at its peak to what the process held before [MB]."""
    step()  # so that gradients are there, and everything is loaded
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - allocated) / 1e6
    ctypes.CDLL(None).malloc_trim(0)  # glibc: hand back what the first step left
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = _process_memory("VmRSS")
    step()
    return _process_memory("VmHWM") - before


def _process_memory(which: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(which))


def main(flags: Flags) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    builders = find_builders(flags)
    if flags.measure_memory_of:
        print(peak_memory(build_step(builders[flags.measure_memory_of](), flags, device), device))
        return
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    flows = {name: build() for name, build in builders.items()}
    steps = {name: build_step(flow, flags, device) for name, flow in flows.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(flags.rounds + 1):
        for name, step in steps.items():
            began = clock()
            step()
            if round_ > 0:  # the first one warms up
                seconds[name].append(clock() - began)
    memory = {name: _memory_in_own_process(name, flags) for name in steps}

    what = torch.cuda.get_device_name() if device.type == "cuda" else f"{_processor()}, one thread"
    peer = f", {PEER} {version(PEER)}" if any(name.startswith(PEER) for name in steps) else ""
    print(f"{what}; torch {torch.__version__}{peer}; {flags.image_size} px, batch {flags.batch_size}, float32")
    print("\n| scheme | M parameters | seconds | x own rectified flow | x ours | peak MB | x own | x ours |")
    print("|---|---|---|---|---|---|---|---|")
    ours = f"{OURS}: rectified flow"
    for name, flow in flows.items():
        own = f"{name.split(':')[0]}: rectified flow"
        parameters = sum(p.numel() for p in flow.parameters()) / 1e6
        print(
            f"| {name} | {parameters:.1f} | {statistics.median(seconds[name]):.3f} | {_ratio(seconds, name, own)} | "
            f"{_ratio(seconds, name, ours)} | {memory[name]:.0f} | {memory[name] / memory[own]:.2f} | "
            f"{memory[name] / memory[ours]:.2f} |"
        )


def _ratio(seconds: dict[str, list[float]], name: str, to: str) -> str:
    """Median of the rounds' ratios, and their range."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[to], strict=True)]
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def _memory_in_own_process(name: str, flags: Flags) -> float:
    command = [sys.executable, __file__, "--measure_memory_of", name]
    for flag in ("image_size", "batch_size", "dim", "peer_dim"):
        command += [f"--{flag}", str(getattr(flags, flag))]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(run.stdout.splitlines()[-1])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
