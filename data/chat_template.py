"""A model's chat template: a text in Jinja that makes one text of a conversation. Run by itself only as the process
that renders.

A template comes with a model and can do what it likes, so it is rendered in Jinja's sandbox, in a process that has no
environment, may open no files, and has a limit of memory and of time. It sees what transformers shows it. The date
is one that the caller gives.
"""

import datetime
import json
import os
import pathlib
import resource
import select
import subprocess
import sys
import time

SECONDS = 10  # for one text, and for the compilation
MEMORY = 1 << 30  # bytes of address space
LARGEST = 32_000_000  # characters of a text
TOO_MUCH = {"error": f"takes more than {MEMORY >> 20} MiB of memory"}
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_template(folder, file=None):
    """The text of a template: of the file, or of a model's folder. Ends the script if there is none."""
    from terminal import fail
    template = read_file(pathlib.Path(file)) if file else template_in(folder)
    if template is None:
        fail(f"{folder} has no chat template, neither in chat_template.jinja nor in tokenizer_config.json; give one "
             "with --template FILE")
    return template


def template_in(folder):
    """The text of the template of a model's folder, or None."""
    from model_folder import read_json
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_file(path)
    found = read_json(folder / "tokenizer_config.json", {}).get("chat_template")
    if isinstance(found, list):  # several, with names
        found = next((entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def read_file(path):
    from terminal import fail
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read the template {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}")


def special_texts(folder):
    """The special tokens that a template may name, from tokenizer_config.json."""
    from model_folder import read_json
    config = read_json(folder / "tokenizer_config.json", {})
    found = {name: config.get(name) for name in SPECIAL}
    found = {name: text.get("content") if isinstance(text, dict) else text for name, text in found.items()}
    return {name: text for name, text in found.items() if isinstance(text, str)}


class Refused(Exception):
    """The template does not accept a conversation, in its own words."""


class Renderer:
    """Renders conversations with a template. `special` are its special tokens, `date` is YYYY-MM-DD. It ends the script
    if the template is no Jinja, or takes too long or too much memory."""

    def __init__(self, template, special, date):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(sys.path)}, start_new_session=True)  # (Ctrl-C is not for that process)
        self.place = ""  # of the conversation that is rendered, in words, if it has one
        self.is_marked = self.ask({"template": template, "special": special, "date": date})["marked"]

    def render(self, *requests):
        """Each request is (messages, whether an answer is to follow, tools). Returns (text, marks) of each; marks are
        the places [begin, end] that {% generation %} encloses, in characters. Raises Refused."""
        return [self.answer_of(self.ask(request)) for request in requests]

    @staticmethod
    def answer_of(found):
        if "refused" in found:
            raise Refused(found["refused"])
        return found["text"], found["marks"]

    def ask(self, request):
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer is missing, too
        answer, deadline = bytearray(), time.monotonic() + SECONDS
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                self.fail(f"took longer than {SECONDS} seconds")
            block = os.read(self.process.stdout.fileno(), 1 << 20)
            if not block:
                self.fail("ended its process")
            answer += block
            if len(answer) > MEMORY:
                self.fail(TOO_MUCH["error"])
        found = json.loads(answer)
        if "error" in found:
            self.fail(found["error"])
        return found

    def fail(self, what):
        from terminal import fail
        self.process.kill()
        if self.place:
            fail(f"{self.place}: the chat template {what}; leave this conversation out, or give another template with "
                 "--template FILE")
        fail(f"the chat template {what}; give another one with --template FILE")

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


# ---- The process that renders


def environment_of(date):
    """Jinja as transformers sets it up. Returns it and its tracker of marks."""
    import jinja2
    import jinja2.debug
    import jinja2.ext
    import jinja2.sandbox

    class Marks(jinja2.ext.Extension):
        """{% generation %} .. {% endgeneration %}: notes where the text between them is."""

        tags = {"generation"}
        seen, written, size, found = False, [], 0, []

        def parse(self, parser):
            Marks.seen = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

        def note(self, caller):
            text, begin = caller(), Marks.size
            Marks.found.append([begin, begin + len(text)])
            return text

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marks, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=datetime.date.fromisoformat(date).strftime)
    return environment, Marks


def rendered(template, marks, special, messages, answers, tools):
    marks.written, marks.size, marks.found = [], 0, []
    shown = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": answers, **special}
    for block in template.generate(shown):
        marks.written.append(block)
        marks.size += len(block)
        if marks.size > LARGEST:
            return {"error": f"writes more than {LARGEST:,} characters"}
    return {"text": "".join(marks.written), "marks": marks.found}


def attempt(compute, *arguments):
    """The result, or why there is none."""
    try:
        return compute(*arguments)
    except MemoryError:
        return TOO_MUCH
    except Exception as error:  # whatever a template raises
        return {"refused": (str(error).strip() or type(error).__name__).splitlines()[0][:200]}


def serve():
    """Answers each line of standard input with a line: first {"template", "special", "date"}, then requests."""
    def next_request():
        return json.loads(sys.stdin.buffer.readline() or b"null")

    def answer(found):
        sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
        sys.stdout.buffer.flush()

    begin = next_request()
    environment, marks = environment_of(begin["date"])
    # Python reads some modules only when something is compiled and rendered.
    first = "{% for x in [1] %}{{ x | tojson | trim }}{% break %}{% endfor %}{{ strftime_now('%d') }}"
    environment.from_string(first).render()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    template = attempt(environment.from_string, begin["template"])
    if isinstance(template, dict):
        template = {"error": f"is no Jinja ({template['refused']})"} if "refused" in template else template
    answer(template if isinstance(template, dict) else {"marked": marks.seen})
    request = begin
    while request:
        try:
            if request := next_request():
                answer(attempt(rendered, template, marks, begin["special"], *request))
        except MemoryError:  # a long conversation, or its text
            answer(TOO_MUCH)


if __name__ == "__main__":
    serve()
