"""The token that a TCP listener asks for: a file with one line."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError

#: Shorter tokens can be guessed. 16 characters of base64 are 96 bits.
TOKEN_CHARACTERS_MIN: Final = 16


def read_token(path: Path | str) -> str:
    """Reads a token file.

    Raises:
        ConfigError: it cannot be read, or does not hold one printable ASCII word of at least 16 characters. The message
            never repeats what is in the file.
    """
    advice = "make one with: head -c 24 /dev/urandom | base64"
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror}; {advice}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"token file {path} is not ASCII text; {advice}") from None
    if len(text) < TOKEN_CHARACTERS_MIN or not text.isprintable() or " " in text:
        raise ConfigError(
            f"token file {path} must hold one word of at least {TOKEN_CHARACTERS_MIN} printable characters; {advice}"
        )
    return text
