"""Cost of a mean flow step: time and peak memory relative to rectified flow, here and in rectified-flow-pytorch.

All schemes run in one call and take turns. Peak memory needs Linux. Needs `pip install -e ".[benchmark]"`.
"""

import ctypes
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from turns import PEER, Row, Times, Turns, describe_machine, ratio, take_turns

from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import DistilledFlow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet, to_device

OURS = "here"
RECTIFIED = "rectified flow"
DEFAULT = "improved mean flow, half of the rows"
OUR_SCHEMES = (
    RECTIFIED,
    "mean flow, half of the rows",
    DEFAULT,
    "improved mean flow, a quarter of the rows",
    "from a teacher's paths",
)
PATH_STEPS = 16
PEER_SCHEMES = (RECTIFIED, "mean flow, a step with derivatives", "mean flow, a step without derivatives")


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    image_size: int = 32
    """Side of the images [px]."""
    batch_size: int = 16
    """Images per step."""
    dim: int = 56
    """Channels of this project's Unet. With 56 it has as many parameters as the peer's Unet with 32."""
    peer_dim: int = 32
    """Channels of the peer's Unet."""
    rounds: int = 7
    """Number of timed rounds per scheme."""
    compile: bool = False
    """Compile this project's objectives."""
    minutes: float = math.inf
    """Start no further round once this time is over [minutes]."""


def build_ours(scheme: str, flags: Flags) -> nn.Module:
    """One of this project's schemes."""
    network = Unet(flags.dim, (1, 2, 2, 2), image_size=flags.image_size)
    build: dict[str, Callable[[], Flow]] = {
        RECTIFIED: lambda: RectifiedFlow(network),
        OUR_SCHEMES[1]: lambda: MeanFlow(network, objective="mean_flow"),
        DEFAULT: lambda: MeanFlow(network),
        OUR_SCHEMES[3]: lambda: MeanFlow(network, mean_fraction=0.25),
        OUR_SCHEMES[4]: lambda: DistilledFlow(network),
    }
    return build[scheme]()


def build_peer(scheme: str, flags: Flags) -> nn.Module:
    """One of the peer's schemes. The peer picks one of its two mean flow steps at random; here the choice is fixed."""
    from rectified_flow_pytorch import RectifiedFlow as PeerRectifiedFlow
    from rectified_flow_pytorch import Unet as PeerUnet
    from rectified_flow_pytorch.mean_flow import MeanFlow as PeerMeanFlow

    if scheme == RECTIFIED:
        return PeerRectifiedFlow(PeerUnet(dim=flags.peer_dim))
    network = PeerUnet(dim=flags.peer_dim, accept_dest_time=True)
    return PeerMeanFlow(network, prob_default_flow_obj=float(scheme == PEER_SCHEMES[2]))


def train(who: str, scheme: str, flags: Flags, turns: Turns) -> None:
    """Repeat the forward and backward pass of one scheme."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flow = to_device((build_ours if who == OURS else build_peer)(scheme, flags), device, "no").train()
    if flags.compile and who == OURS:
        flow.compile()
    shape = 3, flags.image_size, flags.image_size
    images = torch.rand(flags.batch_size, *shape, device=device) * 2 - 1
    batch = {"images": images}
    if isinstance(flow, DistilledFlow):
        batch["path"] = torch.rand(flags.batch_size, PATH_STEPS, *shape, dtype=torch.float16, device=device)

    def step() -> None:
        flow.zero_grad()
        loss: Tensor = flow(**batch) if who == OURS else flow(images)
        loss.backward()

    turns.facts["parameters"] = sum(p.numel() for p in flow.parameters())
    turns.facts["peak"] = peak_memory(step, device)
    while True:
        step()
        turns.done()


def peak_memory(step: Callable[[], None], device: torch.device) -> float:
    """Peak memory of a step, minus the memory of the process before the step [MB]."""
    step()  # allocates the gradients and loads all libraries
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - allocated) / 1e6
    ctypes.CDLL(None).malloc_trim(0)  # glibc: return freed memory to the system
    Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak
    before = _process_memory("VmRSS")
    step()
    return _process_memory("VmHWM") - before


def _process_memory(which: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(which))


def measure(flags: Flags, schemes: list[tuple[str, str]]) -> dict[tuple[str, str], Times]:
    """Measure the times of schemes, each given by its project and its name."""
    contenders = {f"{who}: {scheme}": partial(train, who, scheme, flags) for who, scheme in schemes}
    times = take_turns(contenders, rounds=flags.rounds, minutes=flags.minutes)
    return dict(zip(schemes, times.values(), strict=True))


def measure_rows(flags: Flags) -> list[Row]:
    """Return the row on the cost of the default scheme."""
    times = measure(flags, [(OURS, RECTIFIED), (OURS, DEFAULT)])
    how = "compiled" if flags.compile else "eager"
    seconds = f"{times[OURS, DEFAULT].median:.3f} s and {times[OURS, RECTIFIED].median:.3f} s per step"
    measured = str(ratio(times[OURS, DEFAULT], times[OURS, RECTIFIED]))
    return [Row(f"mean flow step ({how})", "rectified flow step", "<= 1.5 compiled", measured, seconds)]


def main(flags: Flags) -> None:
    """Measure, and print the table."""
    schemes = [(OURS, scheme) for scheme in OUR_SCHEMES]
    if find_spec("rectified_flow_pytorch"):
        schemes += [(PEER, scheme) for scheme in PEER_SCHEMES]
        peer = f", {PEER} {version(PEER)}"
    else:
        print(f'{PEER} is not installed and is skipped; pip install -e ".[benchmark]" installs it')
        peer = ""
    times = measure(flags, schemes)
    size = f"{flags.image_size} px, batch {flags.batch_size}, float32{', compiled' * flags.compile}"
    print(f"{describe_machine()}; torch {torch.__version__}{peer}; {size}")
    print("\n| scheme | M parameters | seconds | x own rectified flow | x ours | peak MB | x own | x ours |")
    print("|---|---|---|---|---|---|---|---|")
    for (who, scheme), each in times.items():
        own, ours = times[who, RECTIFIED], times[OURS, RECTIFIED]
        peak = each.facts["peak"]
        cells = [f"{who}: {scheme}", f"{each.facts['parameters'] / 1e6:.1f}", f"{each.median:.3f}"]
        cells += [str(ratio(each, own)), str(ratio(each, ours))]
        cells += [f"{peak:.0f}", f"{peak / own.facts['peak']:.2f}", f"{peak / ours.facts['peak']:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
