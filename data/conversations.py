"""Makes rows of conversations: their tokens, and which of them the loss counts. Not run by itself: chat.py uses it.

A row is the text that the model's chat template makes of a conversation. Counted is what answers add to the text that
asks for them, with the end of the turn, or what the template marks. Where later turns change what was said before, as
some templates leave out earlier thoughts, each answer has a row in which it alone counts.
"""

import collections
import contextlib
import functools
import json

import numpy as np

from chat_template import Refused, Renderer
from documents import to_bytes
from shards import COUNTED, ROW
from terminal import fail

SPEAKERS = {"human": "user", "gpt": "assistant"}  # other names of roles, mostly where a message is {"from", "value"}
ANSWERS = "assistant"
INSTRUCTIONS = ("system", "developer")

# Why conversations are left out, and what happened to others.
REASONS = SPECIAL, LONG, SILENT, UNLIKE, REFUSED = (
    "with special tokens", "too long", "without an answer", "whose answers do not begin with their prompts",
    "refused by the template")
SHORTENED, TURNS = "shortened", "turns left out"


class Unlike(Exception):
    """The text that asks for an answer is not that before the answer."""


def read(line, place):
    """The messages and the tools in a line of a .jsonl file; `place` names it in messages."""
    try:
        entry = json.loads(line)
    except ValueError:
        fail(f"{place}: not JSON; a .jsonl file has one conversation per line")
    if not isinstance(entry, dict):
        fail(f"{place}: not an object; a conversation is one with `messages`")
    messages = entry.get("messages")
    if messages is None:
        messages = entry.get("conversations")
    if messages is None and {"prompt", "completion"} <= entry.keys():
        parts = ("user", entry["prompt"]), (ANSWERS, entry["completion"])
        messages = [message for role, part in parts
                    for message in (part if isinstance(part, list) else [{"role": role, "content": part}])]
    if not isinstance(messages, list):
        fail(f"{place}: no list in `messages` or `conversations`, and no `prompt` with `completion` (its fields: "
             f"{', '.join(sorted(entry))})")
    messages = [message_of(message, f"{place}, message {i}") for i, message in enumerate(messages, 1)]
    return messages, clean(entry.get("tools"))


def message_of(message, place):
    """A message as templates take it. Like transformers, without the keys whose value is null."""
    message = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if "from" in message and "role" not in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", None)
    if not isinstance(message.get("role"), str):
        fail(f"{place}: no role; each message has `role` and `content`, or `from` and `value`")
    message["role"] = SPEAKERS.get(message["role"], message["role"])
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        fail(f"{place}: its content is not text")
    return clean(message)


def clean(value):
    """The value of JSON with text that is valid UTF-8."""
    if isinstance(value, str):
        return to_bytes(value).decode()
    if isinstance(value, dict):
        return {clean(key): clean(entry) for key, entry in value.items()}
    return [clean(entry) for entry in value] if isinstance(value, list) else value


def texts_in(value):
    """All texts in the value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from texts_in(entry)


def turns_of(messages):
    """Where the turns of a conversation begin. A turn is what a user says, with all that follows."""
    head = next((i for i, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), 0)
    return [i for i in range(head, len(messages)) if i == head or messages[i]["role"] == "user"]


def without(count, messages, turns):
    """The conversation without so many of its turns: of those in the middle the oldest, then the first one."""
    first = int(count < len(turns) - 1)
    return messages[:turns[first]] + messages[turns[first + count]:]


def first_true(holds, count, guess):
    """The first of `count` numbers from 0 for which holds(number), which then holds for those behind it; `count` if
    there is none. It asks near the guess first."""
    below, found, step, number = -1, count, 1, min(guess, count - 1)
    while found - below > 1:
        if holds(number):
            found = number
        else:
            below = number
        if found == count:
            number = min(below + step, count - 1)
        else:
            number = max(found - step, 0) if below < 0 else (below + found) // 2
        step *= 2
    return found


class Conversations:
    """An encoder of lines (encode.py); a piece is (line, its place in words). Each result is (rows as a shard has them,
    how often what happened, why the template refused the conversation or None)."""

    def __init__(self, tokenizer, template, special, date, most_tokens):
        self.arguments = tokenizer, template, special, date, most_tokens
        self.tokenizer, self.template, self.special, self.most_tokens = tokenizer, template, special, most_tokens
        self.renderer = Renderer(template, special, date)
        library = tokenizer.of_special_tokens()
        # A text is measured before it becomes a row.
        self.encoding = functools.lru_cache(2)(lambda text: library.encode(text, add_special_tokens=False))
        self.written = tokenizer.special()
        self.most_characters = most_tokens * tokenizer.longest()  # of a text that may have so few tokens

    def __reduce__(self):
        return Conversations, self.arguments

    def close(self):
        self.renderer.close()

    def require_texts(self):
        """Ends the script if the template ignores contents that are text."""
        probes = [{"role": "user", "content": "qUserq"}, {"role": ANSWERS, "content": "qAnswerq"}]
        with contextlib.suppress(Refused):
            text, _ = self.renderer.render((probes, False, None))[0]
            if not all(probe["content"] in text for probe in probes):
                fail("the chat template does not write messages whose content is text; give another one with "
                     "--template FILE")

    def encode_pieces(self, pieces):
        return [self.encode_line(line, place) for line, place in pieces]

    def encode_line(self, line, place):
        try:
            messages, tools = read(line, place)
        except RecursionError:
            fail(f"{place}: nested too deeply; leave this conversation out")
        self.renderer.place = place
        counts = collections.Counter()
        while messages and messages[-1]["role"] != ANSWERS:  # nothing answers these
            messages.pop()
        try:
            return self.rows_of(messages, tools, counts), counts, None
        except Unlike:
            return [], collections.Counter({UNLIKE: 1}), None
        except Refused as error:
            return [], collections.Counter({REFUSED: 1}), str(error)

    def rows_of(self, messages, tools, counts):
        if not messages:
            counts[SILENT] += 1
            return []
        if any(special in text for text in texts_in([messages, tools]) for special in self.written):
            counts[SPECIAL] += 1
            return []
        whole = self.whole(messages, tools)
        rows, left = [], 0
        for i, message in enumerate(messages):
            if message["role"] == ANSWERS and (not whole or i == len(messages) - 1):
                row, left = self.fitting(messages[:i + 1], tools, counts, whole, left)
                rows.append(row)
        kept = [row for row in rows if row is not None]
        counts[LONG] += len(rows) - len(kept)
        silent = [not (row & COUNTED).any() for row in kept]
        counts[SILENT] += bool(silent) and all(silent)
        return [row for row, is_silent in zip(kept, silent) if not is_silent]

    def fitting(self, messages, tools, counts, whole, guess):
        """The row of a conversation, without as many turns as must leave, and how many those are. None for the row if one
        turn is too long. `whole` is what whole() says; None if only the last answer counts."""
        turns = turns_of(messages)

        def fits(count):
            (text, _), = self.renderer.render((without(count, messages, turns), False, tools))
            return len(text) <= self.most_characters and len(self.encoding(text)) <= self.most_tokens

        left = first_true(fits, len(turns), guess)
        if left == len(turns):
            return None, left
        counts.update({SHORTENED: left > 0, TURNS: left})
        messages = without(left, messages, turns)
        if whole and left:
            whole = self.whole(messages, tools)
        return self.encode(*(whole or self.last_answer(messages, tools))), left

    def whole(self, messages, tools):
        """The text of a conversation that ends with an answer, and the places of all answers in it. None if the text up
        to an answer changes when it goes on."""
        if self.renderer.is_marked:
            return self.renderer.render((messages, False, tools))[0]
        text, places, goes_on = None, [], True
        for i in reversed(range(len(messages))):
            if messages[i]["role"] == ANSWERS:
                answered, place = self.last_answer(messages[:i + 1], tools)
                text = text or answered
                places += place
                goes_on &= text.startswith(answered)
        return (text, places) if goes_on else None

    def last_answer(self, messages, tools):
        """The text of a conversation, and the place of its last answer."""
        (asked, _), (answered, _) = self.renderer.render((messages[:-1], True, tools), (messages, False, tools))
        return answered, [self.added(asked, answered)]

    @staticmethod
    def added(asked, answered):
        if not answered.startswith(asked):
            raise Unlike
        return [len(asked), len(answered)]

    def encode(self, text, places):
        """The row of a text. A token counts if its first byte is in one of the places, given in characters."""
        encoding = self.encoding(text)
        row = np.array(encoding.ids, np.uint32)
        begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
        for first, end in places:
            row[(first <= begins) & (begins < end)] |= COUNTED
        row[:1] = row[:1] & ~np.uint32(COUNTED) | ROW  # the first token is no target
        return row
