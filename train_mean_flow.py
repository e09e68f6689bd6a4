"""Train a mean flow; see rectified_flow/cli/train.py."""

from rectified_flow.cli.programs import train_mean_flow

if __name__ == "__main__":
    train_mean_flow()
