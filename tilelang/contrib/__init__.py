"""Helpers around other toolchains."""
