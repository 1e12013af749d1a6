"""Errors are part of the interface: what was given, what is allowed, how to mend it."""

from __future__ import annotations


class IsoError(Exception):
    """Base of every refusal that IsoJAX raises on purpose; the CLI turns it into one line and exit code 2."""


class RegionError(IsoError, ValueError):
    """A region was defined or called wrongly."""


class Unsupported(RegionError):
    """An operand or static lies outside what an implementation supports. Nothing falls back silently.

    Attributes: region, given, allowed, mend.
    """

    def __init__(self, region: str, given: str, allowed: str, mend: str):
        self.region, self.given, self.allowed, self.mend = region, given, allowed, mend
        super().__init__(f"{region}: given {given}; allowed {allowed}; {mend}")


class Refused(IsoError, TypeError):
    """A traced function holds something that no contract can cover; the message names it and its source line."""


class ConfigError(IsoError, ValueError):
    """A model configuration asks for something that is not implemented; names the field."""


class CheckpointError(IsoError, ValueError):
    """A checkpoint is missing, truncated, or does not have the shapes its configuration promises."""


class InputError(IsoError, ValueError):
    """A prompt, token id or request that no runtime may turn into a number."""


class Unavailable(IsoError, RuntimeError):
    """A runtime, device or package that the call needs is not on this machine."""
