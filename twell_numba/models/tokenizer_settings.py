"""Beside ``tokenizer.json``: which tokens begin and end a text, and how chats are written.

Hugging Face keeps it in several files, of which any may be missing: ``tokenizer_config.json``,
``special_tokens_map.json``, ``generation_config.json``, ``config.json`` and
``chat_template.jinja``.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twell_numba.atomic import write_file_atomically
from twell_numba.errors import TwellError, shown
from twell_numba.models.reading import is_file, unreadable

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# As much as a file of settings may have; the largest there are list some thousand added tokens.
LARGEST_FILE = 1 << 26

TokenId = Callable[[str], int | None]


@dataclass(frozen=True)
class TokenizerSettings:
    """What a tokenizer's own file does not say.

    Attributes
    ----------
    bos_token : int or None
        The token that begins a text.
    eos_tokens : tuple of int
        All tokens that end a text. The first is the one that chat templates call ``eos_token``.
    adds_bos : bool or None
        Whether a text is to begin with ``bos_token``; None: as ``tokenizer.json`` says.
    chat_template : str or None
        A Jinja template that writes a list of messages as one text.
    named_tokens : dict
        The texts of special tokens by the names that chat templates use: ``bos_token``,
        ``eos_token``, ``unk_token``, ``pad_token``, and so on.
    tokenizer_config : dict
        What ``tokenizer_config.json`` held, kept for other tools.
    """

    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()
    adds_bos: bool | None = None
    chat_template: str | None = None
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer_config.json`` and ``generation_config.json``, as far as needed."""
        content = {**self.tokenizer_config, **self.named_tokens}
        if self.adds_bos is not None:
            content["add_bos_token"] = self.adds_bos
        if self.chat_template is not None:
            content["chat_template"] = self.chat_template
        if content:
            # Else transformers builds a tokenizer by the kind of model, not by what is in the file.
            content.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
            _write_json(Path(folder, TOKENIZER_CONFIG), content)
        if self.bos_token is not None or self.eos_tokens:
            ids: dict[str, Any] = {"bos_token_id": self.bos_token}
            if self.eos_tokens:
                one = len(self.eos_tokens) == 1
                ids["eos_token_id"] = self.eos_tokens[0] if one else list(self.eos_tokens)
            _write_json(Path(folder, GENERATION_CONFIG), ids)


def read_settings(
    folder: str | os.PathLike[str], token_id: TokenId, known: Callable[[int], bool]
) -> TokenizerSettings:
    """Read what a folder says about its tokenizer.

    Parameters
    ----------
    folder : path
    token_id : callable
        Returns the id of a token's text, None if there is no such token.
    known : callable
        Says whether an id is one of the tokenizer's.

    Raises
    ------
    TwellError
        If a file cannot be read or holds what makes no sense: one line naming the file.
    """
    folder = Path(folder)
    config = _read_json(folder / TOKENIZER_CONFIG)
    named = _named_tokens(folder / TOKENIZER_CONFIG, config)
    for name, text in _named_tokens(
        folder / SPECIAL_TOKENS_MAP, _read_json(folder / SPECIAL_TOKENS_MAP)
    ).items():
        if name not in config:
            named[name] = text
    bos, eos = _ids_by_name(folder, ("bos_token_id", "eos_token_id"), known)
    if "bos_token" in named:
        bos = [token_id(named["bos_token"])]
    elif "bos_token" in config:  # said to be none
        bos = []
    first_eos = token_id(named["eos_token"]) if "eos_token" in named else None
    return TokenizerSettings(
        bos_token=next((token for token in bos if token is not None), None),
        eos_tokens=_without_repeats([first_eos, *eos]),
        adds_bos=_flag(folder / TOKENIZER_CONFIG, config, "add_bos_token"),
        chat_template=_chat_template(folder, config),
        named_tokens=named,
        tokenizer_config=config,
    )


def _named_tokens(path: Path, content: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts under keys such as ``bos_token``; a text, or an object with ``content``."""
    named = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        match content.get(name):
            case None:
                continue
            case str(text) | {"content": str(text)}:
                named[name] = text
            case other:
                raise TwellError(
                    f"{path} has {name} {shown(other)}, a token's text wanted; fetch it again"
                )
    return named


def _ids_by_name(
    folder: Path, names: tuple[str, ...], known: Callable[[int], bool]
) -> list[list[int | None]]:
    """Return for each key the token ids that the model's files give, without those not known."""
    found: list[list[int | None]] = [[] for _ in names]
    for path in (folder / GENERATION_CONFIG, folder / MODEL_CONFIG):
        content = _read_json(path)
        for ids, name in zip(found, names, strict=True):
            value = content.get(name)
            for token in value if isinstance(value, list) else [value]:
                if token is None:
                    continue
                if isinstance(token, bool) or not isinstance(token, int):
                    raise TwellError(
                        f"{path} has {name} {shown(value)}, a token id or a list of them wanted"
                    )
                if known(token):
                    ids.append(token)
    return found


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if is_file(folder / CHAT_TEMPLATE):
        return _read_text(folder / CHAT_TEMPLATE)
    match config.get("chat_template"):
        case None:
            return None
        case str(template):
            return template
        case {"default": str(template)}:
            return template
        case list(templates):
            for entry in templates:
                match entry:
                    case {"name": "default", "template": str(template)}:
                        return template
            return None
        case other:
            raise TwellError(
                f"{folder / TOKENIZER_CONFIG} has chat_template {shown(other)}, a text wanted"
            )


def _flag(path: Path, content: Mapping[str, Any], name: str) -> bool | None:
    value = content.get(name)
    if value is not None and not isinstance(value, bool):
        raise TwellError(f"{path} has {name} {shown(value)}, true or false wanted")
    return value


def _without_repeats(tokens: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for token in tokens if token is not None))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, an empty one where the file is missing."""
    if not is_file(path):
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TwellError(
            f"{path} cannot be read as JSON: {error}; fetch or save it again"
        ) from error
    if not isinstance(content, dict):
        raise TwellError(f"{path} holds {shown(content)}, an object wanted; fetch it again")
    return content


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise TwellError(f"{path} has more than {LARGEST_FILE >> 20} MiB: fetch it again")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise TwellError(f"{path} is not UTF-8 text: {error}; fetch or save it again") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with write_file_atomically(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
