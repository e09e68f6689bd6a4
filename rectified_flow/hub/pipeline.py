"""Opens the model of this folder in diffusers by ``DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)``.

The code is that of the package rectified-flow-trainer, which must be installed.
"""

from importlib import import_module

try:
    # For an import statement, diffusers would advise `pip install rectified_flow`, which is another package.
    code = import_module("rectified_flow.hub.flow_pipeline")
except ImportError as error:
    raise ImportError(
        "this model needs a recent version of the package rectified-flow-trainer: install it, or upgrade it"
    ) from error

FlowPipeline, TrainedFlow = code.FlowPipeline, code.TrainedFlow
