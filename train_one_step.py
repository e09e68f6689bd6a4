"""Train a one-step generator; see rectified_flow/cli/train.py."""

from rectified_flow.cli.programs import train_one_step

if __name__ == "__main__":
    train_one_step()
