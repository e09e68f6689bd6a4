"""A pretended H100: the compiler's own Triton code for it, compiled for it, on a machine that has none."""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
    is_integrated=0,
)
CUDA: dict[str, Any] = {
    "is_available": True,
    "current_device": 0,
    "device_count": 1,
    "get_device_properties": PROPERTIES,
    "get_device_capability": (9, 0),
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": None,
    "is_current_stream_capturing": False,
    "synchronize": None,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
}
"""What the functions of ``torch.cuda`` return."""
INTERFACE: dict[str, Any] = {
    "current_device": 0,
    "device_count": 1,
    "get_device_properties": PROPERTIES,
    "exchange_device": 0,
    "maybe_exchange_device": 0,
    "set_device": None,
    "get_raw_stream": 0,
    "synchronize": None,
}
"""What those of the compiler's interface to it return."""


@contextmanager
def pretended_card() -> Iterator[None]:
    """Inside the block, tensors on "cuda" have shapes and no contents."""
    from triton.runtime import driver

    active = SimpleNamespace(get_current_target=lambda: TARGET, get_current_device=lambda: 0)
    with ExitStack() as stack:
        stack.enter_context(patch.object(driver, "_active", active))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", _returning(None)))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))
        for name, answer in CUDA.items():
            stack.enter_context(patch(f"torch.cuda.{name}", _returning(answer)))
        stack.enter_context(patch("torch.accelerator.is_available", lambda: False))  # else it asks for its driver
        for name, answer in INTERFACE.items():
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(_returning(answer))))
        stack.enter_context(patch.object(CudaInterface, "device", nullcontext))
        stack.enter_context(inductor.patch(force_disable_caches=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def triton_kernels(function: Callable[..., Tensor], *arguments: Tensor) -> list[str]:
    """The source of the kernels that ``function`` is compiled into; call it inside :func:`pretended_card`."""
    modules: list[str] = []

    def keep_source(graph: GraphLowering) -> SimpleNamespace:
        modules.append(graph.codegen()[0].value)
        return SimpleNamespace(call=None, __file__="", __cubin__=None)

    def compile_and_interpret(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        original = copy.deepcopy(graph)
        with patch.object(GraphLowering, "_compile_to_module", keep_source):
            compile_fx.compile_fx_inner(graph, inputs, **options)

        def run(values: list[Any]) -> Any:
            return fx.Interpreter(original).run(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=compile_and_interpret)

    torch.compile(function, backend=backend)(*arguments)
    return [
        source
        for module in modules
        for source in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", module, re.S)
    ]


def compile_kernel(source: str) -> None:
    """Compile a kernel to the card's machine code.

    Raises:
        Exception: triton's, if that fails.
    """
    import triton
    from triton.compiler import ASTSource

    module = PyCodeCache.load(source)
    [kernel] = [value for name, value in vars(module).items() if name.startswith("triton_") and hasattr(value, "fn")]
    meta = kernel.triton_meta
    constants = {**meta["constants"], **kernel.configs[0].kwargs}
    triton.compile(ASTSource(kernel.fn, meta["signature"], constants, meta["configs"][0]), target=TARGET)


def _returning(answer: Any) -> Callable[..., Any]:
    return lambda *_arguments, **_options: answer
