"""Earlier name of train_one_step.py."""

from rectified_flow.cli.programs import train_one_step

if __name__ == "__main__":
    train_one_step()
