"""A format of one's own: the weights of the network as arrays of NumPy."""

from io import BytesIO

import numpy as np

from rectified_flow import register
from rectified_flow.export.format import Export, Files
from rectified_flow.load import Trained


@register(role="format")
def arrays(trained: Trained, *, compressed: bool = False) -> Export:
    """Write ``arrays.npz``; NumPy can compress the arrays."""

    def saved() -> tuple[Files, str]:
        weights = {name: each.numpy() for name, each in trained.flow.network.state_dict().items()}
        content = BytesIO()
        (np.savez_compressed if compressed else np.savez)(content, **weights)
        return {"arrays.npz": content.getvalue()}, f"{len(weights)} arrays"

    return Export(["arrays.npz"], {"weights": saved})
