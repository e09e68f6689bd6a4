"""Measure a trained flow's pictures; see rectified_flow/cli/evaluate.py."""

from rectified_flow.cli.programs import evaluate

if __name__ == "__main__":
    evaluate()
