"""Finds what a chat template puts around the text of each role, so that a program without Jinja can do the same. Not run
by itself: chat.py uses it.

A conversation is then the joined text of

    begin                                    before everything
    system[0] TEXT system[1]                 or default_system, if there is no system message
    user[0] TEXT user[1]                     for each user's message
    assistant[0] TEXT assistant[1]           for each answer
    generation                               where an answer is to follow

It is found by rendering a few conversations, and then compared with the template's text of 200 drawn ones.
"""

import os
import random

import xxhash

from chat_template import Refused

DRAWN = 200
PROBES = {"system": "qSystemq", "user": "qUserq", "assistant": "qAnswerq"}
WORDS = ["Hello", " world", "?", "\n", "\n\n", "  ", "\t", "é", "東京", "🦔", "1234", "'", '"', "\\", "(", ")", "#", ":",
         "{{ x }}", "{% if %}", "<b>", "&amp;", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
         "[INST]", "[/INST]", "<|", "|>", "system", "user", "assistant"]
OTHER_DATE = "2019-03-05"


class NoFormat(Exception):
    """The template has no such form, and why."""


def find(template, special, date, open_renderer):
    """The form of a template, as a dictionary; open_renderer(template, special, date) makes a renderer. Raises
    NoFormat."""
    renderer, later = (open_renderer(template, special, day) for day in (date, OTHER_DATE))
    try:
        found = around(renderer, special)
        found["date"] = date if around(later, special) != found else None
        found = {"template": checksum(template), **found}
        prove(found, renderer)
        return found
    except Refused as error:
        raise NoFormat(f"it refuses a conversation of system, user and assistant ({error})") from None
    finally:
        renderer.close()
        later.close()


def checksum(template):
    """Of its text, without a new line at its end, which has no meaning."""
    return xxhash.xxh3_64_hexdigest(template.removesuffix("\n").encode())


def conversation(text):
    """Messages of the roles S, U and A, with their probes."""
    return [{"role": role, "content": PROBES[role]} for letter in text for role in PROBES if role[0].upper() == letter]


def around(renderer, special):
    """All but the template's checksum and the date."""
    def pieces(roles, asks):
        """The text before, between and behind the probes."""
        text, _ = renderer.render((conversation(roles), asks, None))[0]
        found = []
        for message in conversation(roles):
            before, probe, text = text.partition(message["content"])
            if not probe:
                raise NoFormat("it does not write each message once, in their order")
            found.append(before)
        return [*found, text]

    asked, answered, instructed = pieces("U", True), pieces("UAU", True), pieces("SU", True)
    # What stands behind a message is seen where the text ends with it, if it goes on from there.
    user_end, answer_end = pieces("U", False)[1], pieces("UA", False)[2]
    if not asked[1].startswith(user_end):
        user_end = os.path.commonprefix([user_end, asked[1], answered[1]])
        user_end = user_end[:user_end.rfind("\n") + 1] or user_end
    if answered[2].startswith(answer_end):
        user_begin = answered[2].removeprefix(answer_end)
    else:
        user_begin = os.path.commonprefix([text[::-1] for text in (asked[0], answered[2], instructed[1])])[::-1]
    if not (asked[0].endswith(user_begin) and instructed[1].endswith(user_begin) and answered[1].startswith(user_end)):
        raise NoFormat("what stands around a message depends on the others")
    before = asked[0].removesuffix(user_begin)
    begin = special.get("bos_token", "")
    # If each message begins with it, as with <|im_start|>, it is a part of the messages.
    if not begin or user_begin.startswith(begin) or not (before.startswith(begin) and instructed[0].startswith(begin)):
        begin = ""
    return {
        "begin": begin,
        "system": [instructed[0][len(begin):], instructed[1].removesuffix(user_begin)],
        "user": [user_begin, user_end],
        "assistant": [answered[1].removeprefix(user_end), answered[2].removesuffix(user_begin)],
        "generation": asked[1].removeprefix(user_end),
        "default_system": before.removeprefix(begin) or None,
        "trims": trims(renderer)}


def trims(renderer):
    """Whether the template strips white space around messages."""
    padded = [{**message, "content": f" \n{message['content']}\t "} for message in conversation("SUAU")]
    plain, changed = (text for text, _ in renderer.render((conversation("SUAU"), True, None), (padded, True, None)))
    return plain == changed


def joined(found, messages):
    """The text of a conversation that asks for an answer."""
    text = found["begin"]
    if messages[0]["role"] != "system":
        text += found["default_system"] or ""
    for message in messages:
        before, behind = found[message["role"]]
        text += before + (message["content"].strip() if found["trims"] else message["content"]) + behind
    return text + found["generation"]


def prove(found, renderer):
    numbers = random.Random(1)
    for _ in range(DRAWN):
        roles = ["system"] * numbers.randint(0, 1) + ["user", "assistant"] * numbers.randint(0, 4) + ["user"]
        messages = [{"role": role, "content": "".join(numbers.choices(WORDS, k=numbers.randint(role == "user", 9)))}
                    for role in roles]
        if renderer.render((messages, True, None))[0][0] != joined(found, messages):
            raise NoFormat("what stands around a message depends on the messages")
