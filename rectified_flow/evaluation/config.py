"""The flags of evaluations during training."""

from dataclasses import dataclass
from typing import Literal

from rectified_flow.errors import require, require_natural
from rectified_flow.machine import require_memory

FeatureNetwork = Literal["inception", "efficientnet_lite0"]
BYTES_PER_FEATURES = 5120
"""Of a picture's features, at least: 1280 of them in float32."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations on the way, see evaluate.py."""

    evaluate_every: int = 0
    """Steps between evaluations (see evaluate.py) at --sample_steps, whose best checkpoint is kept; 0 makes none."""
    evaluation_samples: int = 2000
    """Pictures drawn for each evaluation."""
    feature_network: FeatureNetwork = "inception"
    """Features that pictures are compared by: inception, for FID and KID, or efficientnet_lite0, which needs no
    download."""
    stop_when_memorising: bool = False
    """End the run when the loss on --holdout pictures rises; the best checkpoint is then that of its least value."""

    def __post_init__(self) -> None:
        require_natural(self, "evaluate_every")
        require(
            self.evaluation_samples >= 2,
            f"--evaluation_samples is {self.evaluation_samples}; a distance needs at least 2",
        )
        what = f"--evaluation_samples {self.evaluation_samples}"
        require_memory(self.evaluation_samples * BYTES_PER_FEATURES, what, "draw fewer")
