"""Entry point of `python -m controller.simulator`, the same as `holdfast simulate`."""

import argparse
import sys

from controller.simulator.cli import add_arguments, run_cli

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="holdfast simulate", allow_abbrev=False)
    add_arguments(parser)
    sys.exit(run_cli(parser.parse_args()))
