"""Export: a trained flow in the formats of other software, as an ONNX program or as a web page.

A format is a function with the role ``format``, see :class:`rectified_flow.export.format.Export`. Those of the package
are registered by the imports below, and one of your own by the argument ``import``.
"""

from rectified_flow.export import onnx, web_page

__all__ = ["onnx", "web_page"]
