"""`python -m benchmarks report`: plots and a table from the result files."""

import sys

from benchmarks import report

if __name__ == "__main__":
    if sys.argv[1:2] != ["report"]:
        sys.exit("usage: python -m benchmarks report [RESULTS_FOLDER]")
    report.main(*sys.argv[2:])
