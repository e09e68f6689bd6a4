"""Draw pictures from a trained flow; see rectified_flow/cli/sample.py."""

from rectified_flow.cli.programs import sample

if __name__ == "__main__":
    sample()
