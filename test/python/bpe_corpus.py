"""Texts on which GPT-2's byte-pair encoders are compared, made from a seed without any library's random numbers.

They are not for timing: only the groups `prose` and `code` resemble the text that people write.
"""

import hashlib

DOCUMENTS, LENGTH = 60, 3000  # in each group; characters of the longest

WORDS = """the of and to a in is it you that he was for on are with as his they be at one have this from or had by hot but
    some what there we can out other were all your when up use word how said an each she which do their time if will way about
    many then them would write like so these her long make thing see him two has look more day could go come did my sound no
    most number who over know water than call first people may down side been now find Antidisestablishmentarianism Zürich
    naïve café straße ΑΒΓ привет 東京 한국어 हिन्दी عربى""".split()
MARKS = [" ", " ", " ", " ", ", ", ". ", "! ", "? ", "; ", "'s ", "'ll ", "'re ", "'ve ", "'d ", "'m ", "'t ", "'S ", " '", "-",
         " (", ") ", "\n", "\n\n", "\t", "  ", "...", " — ", "1", " 42 ", "3.14", "’s "]
CODE = ["def ", "return ", "    ", "        ", "\t", "if (", ") {\n", "}\n", ";\n", "==", " != ", "->", "::", "self.", "_x", "i++",
        "0x1f", "// ", "/* */", "\"\\n\"", "for i in range(10):\n", "std::vector<int>", "#include <a.h>\n", "\r\n", " += 1", "<|endoftext|>"]
SPACES = [" ", " ", "\n", "\t", "\r", "\v", "\f", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u202f", "\u205f", "\u3000",
          "\u200b", "\x1c", "\ufeff", "a", "1", ".", "'", "é"]
# Ranges of scripts, symbols and unassigned code points. Some are common, most are rare.
BLOCKS = [(0x20, 0x7F), (0x20, 0x7F), (0, 0x20), (0x80, 0x250), (0x2B0, 0x590), (0x590, 0x900), (0x900, 0x1100), (0x1100, 0x2000),
          (0x2000, 0x2C00), (0x2C00, 0x3400), (0x3400, 0xA000), (0xA000, 0xD800), (0xE000, 0x10000), (0x10000, 0x12000),
          (0x12000, 0x1F000), (0x1F000, 0x20000), (0x20000, 0x33480), (0xE0000, 0xE0200), (0x33480, 0x110000)]


class Random:
    """The same numbers everywhere: SHA-256 in counter mode."""

    def __init__(self, name):
        self.name, self.count, self.block = name, 0, b""

    def below(self, limit):
        if len(self.block) < 8:
            self.block = hashlib.sha256(f"{self.name} {self.count}".encode()).digest()
            self.count += 1
        number, self.block = int.from_bytes(self.block[:8], "little"), self.block[8:]
        return number % limit

    def choice(self, options):
        return options[self.below(len(options))]


def from_parts(parts):
    return lambda random, length: "".join(random.choice(parts) for _ in range(length // 3)).encode()


def prose(random, length):
    return "".join(random.choice(WORDS) + random.choice(MARKS) for _ in range(length // 5)).encode()


def blocks(random, length):
    def character():
        first, end = random.choice(BLOCKS)
        return chr(first + random.below(end - first))
    return "".join(character() for _ in range(length)).encode()


def runs(random, length):
    """The same character many times: long words and long white space."""
    text = ""
    while len(text) < length:
        first, end = random.choice(BLOCKS[:12])
        text += random.choice([chr(first + random.below(end - first)), " ", "a", "\n", "=", "0"]) * (1 + random.below(200))
    return text.encode()


def letters(random, length):
    """Words that nobody has written, which need many merges."""
    return "".join(random.choice("eeeettaaooinshrdlucmfwypvbgkjqxzETAOIN   é") for _ in range(length)).encode()


def any_bytes(random, length):
    """Mostly invalid UTF-8."""
    return bytes(random.below(256) for _ in range(length))


def damaged(random, length):
    """UTF-8 with lost, changed or cut-off bytes."""
    text = bytearray(blocks(random, length))
    for _ in range(max(1, len(text) // 10)):
        place = random.below(len(text))
        if random.below(2):
            text[place] = random.below(256)
        elif len(text) > 1:
            del text[place]
    return bytes(text)


GROUPS = {"prose": prose, "code": from_parts(CODE), "spaces": from_parts(SPACES), "blocks": blocks, "runs": runs,
          "letters": letters, "any_bytes": any_bytes, "damaged": damaged}


def all_code_points():
    """Every code point, between others so that its class shows."""
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    per_document = 1 << 16
    for begin in range(0, len(codes), per_document):
        yield "".join(f"a{chr(code)}a0{chr(code)}0" for code in codes[begin:begin + per_document]).encode()


def documents(group, seed=0):
    """The documents of a group, as bytes objects."""
    if group == "code_points":
        return list(all_code_points())
    random = Random(f"{group} {seed}")
    return [GROUPS[group](random, 1 + random.below(LENGTH)) for _ in range(DOCUMENTS)]


ALL_GROUPS = [*GROUPS, "code_points"]
