"""Secrets that stand in what a person typed, left out of what a run stores and publishes."""

import re
from typing import Any

MASK = "<redacted>"
# A word before = or : whose value is a secret, in an address or on the command line.
_NAMES = r"(?:api[-_]?key|access[-_]?key|auth|authorization|bearer|credential|key|passw(?:or)?d|pass|pwd|secret|sig|signature|token)"
_SECRETS = (
    (re.compile(r"//[^/@\s]+@"), "//"),  # a name and a password in an address
    (re.compile(rf"(?i)((?:^|[^a-z0-9])(?:[a-z0-9-]+[-_])?{_NAMES}(?:=|%3d|:\s*))([^\s&;,'\"\]}}]+)"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}"), rf"\1{MASK}"),
    # The forms in which Hugging Face, OpenAI and its like, GitHub, GitLab, Slack, AWS and Google give out keys; and signed tokens (JWT).
    (re.compile(r"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{16,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])(?:sk|pk|rk)-[\w-]{16,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])(?:gh[pousr]_|github_pat_|glpat-|xox[a-z]-)[\w-]{8,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA|AIza)[\w-]{12,}"), MASK),
    (re.compile(r"(?<![A-Za-z0-9])eyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), MASK),
)


def redacted(value: Any) -> Any:
    """The value with secrets masked: those in addresses (https://user:password@host, ?token=…), after words such as `password=`, and keys in
    the forms of the usual services. Lists and dictionaries are followed; other values stay as they are."""
    if isinstance(value, str):
        for pattern, instead in _SECRETS:
            value = pattern.sub(instead, value)
        return value
    if isinstance(value, dict):
        return {key: redacted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redacted(item) for item in value)
    return value
