"""Show runs in a browser while they train; see rectified_flow/cli/watch.py."""

from rectified_flow.cli.programs import watch

if __name__ == "__main__":
    watch()
