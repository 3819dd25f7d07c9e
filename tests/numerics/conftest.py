"""`python -m pytest -n 0 tests/numerics --worst` prints the greatest error of each function and type beside its bound."""

import numbers_of


def pytest_addoption(parser):
    parser.addoption("--worst", action="store_true", help="print the greatest error of each function (with -n 0)")


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--worst", False):
        return
    write = terminalreporter.write_line
    for line in numbers_of.worst_table():
        write(line)
