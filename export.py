"""Write a trained flow as a program for other software; see rectified_flow/cli/export.py.

It needs the packages of an extra: ``pip install '.[export]'``.
"""

from rectified_flow.cli.programs import export

if __name__ == "__main__":
    export()
