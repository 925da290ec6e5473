"""Places where a long document may be cut, so that the tokens of the pieces are those of the whole. Not run by itself:
tokenizer.py uses it.

A tokenizer divides text into words by one or several patterns, each searched from left to right, and no token crosses
a word. A cut between two characters is right if no match of any pattern goes on from the first to the second, and
if a match begins at the second. Both follow from the pattern. It is read as alternatives, each a sequence of atoms:
parts that match one character. A match goes on only if an atom of the first character is repeated, or comes before
an atom of the second one. Otherwise each atom that looks at the second character refuses it, as it refuses the end of
a text; so what is found before the cut does not depend on what is behind it. A match begins if an alternative needs
nothing but the second character.

Patterns with anything but atoms, groups, (?i:..), (?=..), (?!..) and greedy or possessive quantifiers have no such
places. Neither has a text that is one word.
"""

import dataclasses
import re
import unicodedata

from documents import boundary

WINDOW = 4096  # bytes that are searched at once
CONTEXT = 8  # characters that must be in NFC before a cut

# What patterns are made of.
LEXICON = re.compile(r"""
    (?P<atom> \\[pP]\{\^?\w+\} | \\[sSdDwWrnt] | \\\W | \[ (?: \\. | [^][\\] )+ \] | [^][\\()|?*+{}^$] )
  | (?P<open> \( (?: \? (?: i?: | ! | = ) )? )
  | (?P<close> \) )
  | (?P<alternative> \| )
  | (?P<quantifier> [?*+] | \{\d+(,\d*)?\} )
""", re.VERBOSE | re.DOTALL)


@dataclasses.dataclass
class Atom:
    """A part of a pattern that matches one character."""

    pattern: str
    optional: bool = False
    repeated: bool = False
    several: bool = False  # one alone may be too few
    ahead: bool = False  # it stands in (?=..) or (?!..)


def alternatives(pattern):
    """The pattern as a list of lists of Atom; None if it has other parts. The alternatives of a group stand one behind
    the other, so that more can follow an atom here than in the pattern; no less can."""
    found, groups, place = [[]], [], 0
    last, quantified = None, False  # the index of the first atom that a quantifier concerns; whether it has one
    while place < len(pattern):
        token = LEXICON.match(pattern, place)
        if token is None:
            return None
        kind, text, atoms, place = token.lastgroup, token[0], found[-1], token.end()
        if kind == "atom":
            folded = any(opened == "(?i:" for opened, _ in groups)
            ahead = any(opened in ("(?=", "(?!") for opened, _ in groups)
            atoms.append(Atom(f"(?i:{text})" if folded else text, ahead=ahead))
            last = len(atoms) - 1
        elif kind == "open":
            groups.append((text, len(atoms)))
            last = None
        elif kind == "close":
            if not groups:
                return None
            last = groups.pop()[1]
        elif kind == "alternative":
            if not groups:
                found.append([])
            last = None
        elif last is None or (quantified and text != "+"):
            return None  # a quantifier of nothing, or a lazy one
        else:
            for atom in atoms[last:]:
                atom.optional |= text in "?*" or text.startswith("{0")
                atom.repeated |= text != "?"
                atom.several |= text[0] == "{" and int(re.match(r"\d+", text[1:])[0]) > 1
            if text != "?":  # a group may begin again
                atoms += [dataclasses.replace(atom) for atom in atoms[last:]] * (len(atoms) - last > 1)
        quantified = kind == "quantifier"
    return None if groups else found


class Cuts:
    """The places of a tokenizer: `steps` are those of tokenizer_checksum.steps(), `added` the added tokens (from
    tokenizer.json) that are found in text or decide which are, and `nfc` says whether text becomes NFC first."""

    def __init__(self, steps, added, nfc):
        read = {"split": lambda size, pattern: alternatives(pattern),
                "string": lambda size, text: [[Atom(re.escape(character)) for character in text]],
                "digits": lambda single: [[Atom(r"\p{N}", repeated=not single)]]}
        self.steps = [read[name](*rest) for name, *rest in steps]
        self.added, self.nfc = added, nfc
        self.any = bool(self.steps) and None not in self.steps
        self.known, self.matchers, self.matched = {}, {}, {}

    def first(self, document, position):
        """The first place of a document (bytes) from `position` on; its end if there is none."""
        begin = boundary(document, position) if self.any else len(document)
        while begin < len(document):
            end = boundary(document, min(begin + WINDOW, len(document)))
            # A byte that is no UTF-8 becomes a character of its own, which is never beside a cut.
            text = bytes(document[begin:end]).decode(errors="surrogateescape")
            for i, pair in enumerate(zip(text, text[1:]), 1):
                if self.between(*pair) and (not self.nfc or self.stays(text[:i + 1])):
                    return begin + len(text[:i].encode(errors="surrogateescape"))
            begin = end
        return len(document)

    @staticmethod
    def stays(text):
        """Whether the last characters of a text are the same in NFC, with whatever before them."""
        return len(text) > CONTEXT and unicodedata.is_normalized("NFC", text[-CONTEXT:])

    def between(self, one, two):
        """Whether each text may be cut between these characters."""
        if (one, two) not in self.known:
            self.known[one, two] = self.decide(one, two)
        return self.known[one, two]

    def decide(self, one, two):
        if any("\ud800" <= c <= "\udfff" or unicodedata.combining(c) for c in (one, two)):
            return False
        if any(self.is_touched(added, one, two) for added in self.added):
            return False
        every = [alternative for step in self.steps for alternative in step]
        return (any(self.begins(alternative, two) for alternative in every)
                and not any(self.goes_on(alternative, one, two) for alternative in every))

    @staticmethod
    def is_touched(added, one, two):
        """Whether an added token may cross the cut, or swallow or look at characters beyond it."""
        content = added["content"]
        looks = added.get("lstrip") or added.get("rstrip") or added.get("single_word")
        return one + two in content or (looks and (one in content or two in content or (one + two).isspace()))

    def goes_on(self, alternative, one, two):
        before = False
        for atom in alternative:
            here = self.matches(atom, one)
            if (before or (here and atom.repeated)) and self.matches(atom, two):
                return True
            before |= here
        return False

    def begins(self, alternative, character):
        """Whether each text that begins with the character has a match of this alternative there."""
        needed = [atom for atom in alternative if not atom.optional]
        if len(needed) != 1 or needed[0].several or any(atom.ahead for atom in alternative) or not self.matches(needed[0], character):
            return False
        first = next(i for i, atom in enumerate(alternative) if atom is needed[0])
        return not any(self.matches(atom, character) for atom in alternative[:first])

    def matches(self, atom, character):
        """Asks the library's own engine for patterns."""
        key = atom.pattern, character
        if key not in self.matched:
            from tokenizers import Regex, pre_tokenizers
            if atom.pattern not in self.matchers:
                self.matchers[atom.pattern] = pre_tokenizers.Split(Regex(atom.pattern), "removed")
            self.matched[key] = not self.matchers[atom.pattern].pre_tokenize_str(character)
        return self.matched[key]
