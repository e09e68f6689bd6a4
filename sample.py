"""Draw pictures from a trained flow: numbered PNGs and a grid of them.

`python sample.py --checkpoint RUN` is all it takes; the model is built from what its checkpoint says. Start it with
torchrun or accelerate launch to draw on several devices.
"""

from rectified_flow.processes.launch import run
from rectified_flow.sampling import SampleConfig, sample

if __name__ == "__main__":
    run(sample, SampleConfig, __doc__)
