"""A pretended H100: the compiler's own Triton code for it, compiled for it, on a machine that has none."""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

M = TypeVar("M", bound=nn.Module)
TARGET = ("cuda", 90, 32)
"""For triton: the backend, the architecture, and the threads of a warp."""
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
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "synchronize": None,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
}
"""What the functions of ``torch.cuda`` return."""
CUDNN = torch._C._ConvBackend.Cudnn  # type: ignore[attr-defined]
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
LAUNCH = re.compile(r"^\s+\w+\.run\(", re.MULTILINE)
CALL = re.compile(r"(?:extern_kernels\.\w+|torch\.ops\.[\w.]+)\(")
_deduce = UniformValueConstantFolder._deduce_value
KERNEL = re.compile(r"async_compile\.triton\('\w+', '''(.*?)'''", re.DOTALL)


@dataclass(frozen=True)
class Graph:
    """A forward or backward pass, as the compiler wrote it.

    Args:
        source: the module that it wrote.
        bytes_moved: that the kernels read and write, by the sizes of their arguments.
    """

    source: str
    bytes_moved: int

    @property
    def kernels(self) -> list[str]:
        """The source of each Triton kernel; one may be launched several times."""
        return KERNEL.findall(self.source)

    @property
    def launches(self) -> int:
        """Launches of Triton kernels."""
        return len(LAUNCH.findall(self._body))

    @property
    def calls(self) -> int:
        """Calls of libraries, each of which may launch several kernels."""
        return len(CALL.findall(self._body))

    @property
    def _body(self) -> str:
        return self.source[self.source.index("def call(") :]


@contextmanager
def pretended_card() -> Iterator[list[Graph]]:
    """Inside the block, tensors on "cuda" have shapes and no contents.

    What `torch.compile` compiles there is added to the list, backward passes too, and is not run.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    graphs: list[Graph] = []
    active = SimpleNamespace(get_current_target=lambda: GPUTarget(*TARGET), get_current_device=lambda: 0)
    compile_all = partial(_compile, compile_fx.compile_fx, partial(_compile_and_interpret, graphs))
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
        # Of the library, which decides on the memory format of what it returns.
        stack.enter_context(patch("torch._C._select_conv_backend", _returning(CUDNN)))
        stack.enter_context(patch("torch.nn.functional.scaled_dot_product_attention", _flash_attention))
        stack.enter_context(patch("torch.autograd.grad", _grad))
        stack.enter_context(patch.object(UniformValueConstantFolder, "_deduce_value", _deduce_on_cpu))
        stack.enter_context(patch.object(compile_fx, "compile_fx", compile_all))
        # Whether to pad matrices would be timed on the card. With one thread, no processes are started.
        stack.enter_context(inductor.patch(force_disable_caches=True, shape_padding=False, compile_threads=1))
        stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield graphs


def move(module: M) -> M:
    """``module`` with its parameters on the pretended card, in their memory format; call it inside the block."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                moved = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cuda")
                each._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
    return module


def compile_kernel(source: str) -> None:
    """Compile a kernel to the card's machine code.

    Raises:
        Exception: triton's, if that fails.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = PyCodeCache.load(source)
    [kernel] = [value for name, value in vars(module).items() if name.startswith("triton_") and hasattr(value, "fn")]
    meta = kernel.triton_meta
    constants = {**meta["constants"], **kernel.configs[0].kwargs}
    triton.compile(ASTSource(kernel.fn, meta["signature"], constants, meta["configs"][0]), target=GPUTarget(*TARGET))


def _compile(original: Callable[..., Any], inner: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return original(*arguments, **{"inner_compile": inner, **options})


def _compile_and_interpret(graphs: list[Graph], graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    original = copy.deepcopy(graph)

    def keep_source(lowering: GraphLowering) -> SimpleNamespace:
        source = lowering.codegen()[0].value
        graphs.append(Graph(source, sum(node.get_read_write_buffers_sizes() for node in lowering.scheduler.nodes)))
        return SimpleNamespace(call=_returning(None), __file__="", __cubin__=None)

    with patch.object(GraphLowering, "_compile_to_module", keep_source):
        compile_fx.compile_fx_inner(graph, inputs, **options)

    def run(values: list[Any]) -> Any:
        return fx.Interpreter(original).run(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What PyTorch chooses on this card in bf16."""
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    return attended


def _deduce_on_cpu(folder: UniformValueConstantFolder, node: fx.Node) -> Any:
    """The compiler computes constants such as ``torch.full`` on the card."""
    kwargs = node.kwargs
    if "device" in kwargs:
        node.kwargs = {**kwargs, "device": torch.device("cpu")}
    try:
        return _deduce(folder, node)
    finally:
        node.kwargs = kwargs


def _grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` in this thread, since PyTorch's engine has a thread of its own for the card."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    seeds = (grad_outputs,) if isinstance(grad_outputs, Tensor) else grad_outputs or [None] * len(outputs)
    ends = [get_gradient_edge(each) for each in inputs]
    order = _topological([get_gradient_edge(each).node for each in outputs])
    useful = {end.node for end in ends}
    for node in order:
        if any(following in useful for following, _ in node.next_functions):
            useful.add(node)
    grads: dict[tuple[Node, int], Tensor] = {}

    def add(edge: GradientEdge | tuple[Node, int], grad: Tensor | None) -> None:
        if grad is None:
            return
        node, index = edge[0], edge[1]
        expected = node._input_metadata[index]
        grad = grad.sum_to_size(expected.shape).to(expected.dtype)
        grads[node, index] = grads[node, index] + grad if (node, index) in grads else grad

    for output, seed in zip(outputs, seeds, strict=True):
        add(get_gradient_edge(output), torch.ones_like(output) if seed is None else seed)
    with torch.set_grad_enabled(create_graph):
        for node in reversed(order):
            given = [grads.get((node, index)) for index in range(len(node._input_metadata))]
            following = [each for each, _ in node.next_functions]
            if not useful.intersection(following) or all(grad is None for grad in given):
                continue
            found = node(*given)  # type: ignore[operator]
            for edge, grad in zip(node.next_functions, found if isinstance(found, tuple) else (found,), strict=False):
                if edge[0] is not None:
                    add((edge[0], edge[1]), grad)
    result = [grads.get((end[0], end[1])) for end in ends]
    if materialize_grads:
        return tuple(torch.zeros_like(x) if grad is None else grad for grad, x in zip(result, inputs, strict=True))
    return tuple(result)


def _topological(starts: Sequence[Node]) -> list[Node]:
    """All nodes behind ``starts``, each after those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(node, False) for node in starts]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    return order


def _returning(answer: Any) -> Callable[..., Any]:
    return lambda *_arguments, **_options: answer
