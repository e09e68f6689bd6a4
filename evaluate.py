"""Measure how near a trained flow's pictures are to the pictures it was trained on.

`python evaluate.py --checkpoint RUN` prints distances and writes them to the run's evaluation.json. Start it with
torchrun or accelerate launch to share the work between several devices.
"""

from rectified_flow.evaluating import EvaluateConfig, evaluate
from rectified_flow.processes.launch import run

if __name__ == "__main__":
    run(evaluate, EvaluateConfig, __doc__)
