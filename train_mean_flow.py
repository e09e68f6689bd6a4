"""Train a one-step generator; see rectified_flow/cli/programs.py."""

from rectified_flow.cli.programs import train_mean_flow

if __name__ == "__main__":
    train_mean_flow()
