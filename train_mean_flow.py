"""Train a mean flow, or another one-step generator: train_one_step.py under its earlier name."""

from rectified_flow.cli.programs import train_one_step

if __name__ == "__main__":
    train_one_step()
