"""``python -m rectified_flow`` is the command ``rectified-flow``; see rectified_flow/cli/programs.py."""

from rectified_flow.cli.programs import main

if __name__ == "__main__":
    main()
