"""Providers for tests of the harness: one that is wrong, one that ends its process, one that cannot, one that fails."""

from __future__ import annotations

import os

from suite.problems import Problem
from suite.provider_torch import plain
from suite.providers import Candidate, Provider, Skip
from suite.workloads import Workload


class Mock(Provider):
    def __init__(self, name: str) -> None:
        self.name = name

    def labels(self, workload: Workload) -> list[str]:
        if self.name == "picky" and workload.kind != "attention":
            raise Skip("attention only")
        return ["one", "two"]

    def candidate(self, problem: Problem, label: str) -> Candidate:
        if self.name == "crashing":
            os._exit(3)
        if self.name == "failing":
            raise RuntimeError("nothing works today")
        good = plain().candidate(problem, "float32").call
        if self.name != "wrong":
            return Candidate(label, good)

        def one_column_short():
            out = good()
            out[..., -1] = 0
            return out

        return Candidate(label, one_column_short)


def wrong():
    return Mock("wrong")


def crashing():
    return Mock("crashing")


def failing():
    return Mock("failing")


def picky():
    return Mock("picky")


def good():
    return Mock("good")
