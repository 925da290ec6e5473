"""What a tokenizer.json computes, as text, and a checksum of it. Not run by itself: tokenizer.py uses it.

The text has the tokens with their bytes, the merges, and the rules for words, and leaves out what changes no token. So
two files of the same tokenizer have one checksum, whoever wrote them. Shards have it in their header, and the program
computes it too (docs/interface.md).
"""

import xxhash

from bpe_files import GPT2_WORDS, characters_of_bytes

BYTE_OF = {character: byte for byte, character in enumerate(characters_of_bytes())}


def checksum(parts):
    """XXH3-64 of the text of a tokenizer.json, given as a dictionary. Raises ValueError with the name of a part that is
    not supported."""
    return xxhash.xxh3_64_intdigest(text(parts))


def text(parts):
    lines = [b"tokens", *tokens(parts), b"merges", *merges(parts["model"])]
    lines += [b"ignore_merges"] * bool(parts["model"].get("ignore_merges"))
    lines += [b"words", *[b"nfc"] * normalizes(parts)]
    lines += [line(*step) for step in steps(parts)]
    lines += [line("begin", token) for token in begin_tokens(parts)]
    return b"".join(line + b"\n" for line in lines)


def line(*words):
    return " ".join(map(str, words)).encode()


def counted(words, content):
    """The words, and bytes behind their number."""
    return line(*words, len(content)) + b" " + content


def bytes_of(token):
    """The bytes of a token in the alphabet of encoder.json; of another token, its UTF-8."""
    return bytes(map(BYTE_OF.get, token)) if BYTE_OF.keys() >= set(token) else token.encode()


def tokens(parts):
    kinds = {number: ("t", bytes_of(token)) for token, number in parts["model"]["vocab"].items()}
    for added in parts.get("added_tokens") or []:
        flags = {"l": added.get("lstrip"), "r": added.get("rstrip"), "w": added.get("single_word"),
                 "n": added.get("normalized") and normalizes(parts)}
        kind = ("s" if added.get("special") else "a") + "".join(flag for flag, is_set in flags.items() if is_set)
        kinds[added["id"]] = kind, added["content"].encode()
    return [counted((number, kind), content) for number, (kind, content) in sorted(kinds.items())]


def merges(model):
    """Each merge is two tokens, or in older files a text with a space between them."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [line(*map(model["vocab"].__getitem__, pair)) for pair in pairs]


def members(part, name):
    """A part of a tokenizer that may be missing, one, or a Sequence of several, as a list."""
    if part is None:
        return []
    return [each for one in part[name] for each in members(one, name)] if part["type"] == "Sequence" else [part]


def normalizes(parts):
    """Whether text becomes NFC before it becomes tokens."""
    kinds = {part["type"] for part in members(parts.get("normalizer"), "normalizers")}
    if kinds - {"NFC"}:
        raise ValueError(f"a normalizer of type {min(kinds - {'NFC'})}")
    return bool(kinds)


def pre_tokenizers(parts):
    return members(parts.get("pre_tokenizer"), "pretokenizers")


def steps(parts):
    """The steps that divide text into words: (split, length, pattern), (string, length, text) or (digits, 0 or 1)."""
    found = []
    for part in pre_tokenizers(parts):
        kind = part["type"]
        if kind == "ByteLevel" and not part.get("add_prefix_space"):
            found += [sized("split", GPT2_WORDS)] * part.get("use_regex", True)
        elif kind == "Digits":
            found.append(("digits", int(part["individual_digits"])))
        elif kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            (name, pattern), = part["pattern"].items()
            found.append(sized({"Regex": "split", "String": "string"}[name], pattern))
        else:
            raise ValueError(f"a pre-tokenizer of type {kind}" + {
                "ByteLevel": " with add_prefix_space", "Split": " that is not Isolated or is inverted"}.get(kind, ""))
    return found


def sized(name, content):
    return name, len(content.encode()), content


def begin_tokens(parts):
    """The ids that the post-processor puts before a text."""
    found = []
    for part in members(parts.get("post_processor"), "processors"):
        if part["type"] == "TemplateProcessing":
            names = [next(iter(piece.items())) for piece in part["single"]]
            for kind, piece in names[:[kind for kind, _ in names].index("Sequence")]:
                found += part["special_tokens"][piece["id"]]["ids"]
    return found
