"""Text from data, models and servers, made safe to print."""

import unicodedata


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with control and format characters as escapes such as \\x1b, so that none of them reaches the terminal.

    Args:
        text: from outside: data, a model, a server, a file's name.
        keep: control characters that stay. "" makes a single line.
    """
    return "".join(_escape(c) if c not in keep and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else c for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
