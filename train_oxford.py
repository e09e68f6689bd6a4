"""Train a rectified flow; see rectified_flow/cli/train.py."""

from rectified_flow.cli.programs import train_oxford

if __name__ == "__main__":
    train_oxford()
