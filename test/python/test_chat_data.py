"""data/chat.py: rows of conversations, what the loss counts in them, what is left out, and what stands around each role's text.
The templates are short ones of the kinds that models have."""

import contextlib
import itertools
import json
import random
import re

import numpy as np
import pytest

import made_tokenizers
import program
from dataset_scripts import manifest_of, refused_here, results_in, rows_of, run_here

import chat_format  # noqa: E402  (of data/, where dataset_scripts looks)
import chat_template  # noqa: E402
import conversations  # noqa: E402
import encode  # noqa: E402
import tokenizer  # noqa: E402
import tokenizer_checksum  # noqa: E402

pytest.importorskip("jinja2", reason="jinja2 is not installed (Debian has python3-jinja2)")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
HELPFUL = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}" + CHATML
# The counted part is marked.
MARKED = CHATML.replace("{{ '<|im_start|>' + message.role", "{% if message.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ "
                        "message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ '<|im_start|>' + message.role").replace(
                            "<|im_end|>\n' }}{% endfor", "<|im_end|>\n' }}{% endif %}{% endfor")
# White space is stripped, and a text begins with bos_token and the date.
TRIMMED = ("{{ bos_token + strftime_now('%d %b %Y') + '|' }}{% for message in messages %}{{ '[' + message.role + ']' + message.content | trim + "
           "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}")
# Thoughts leave when the conversation goes on.
THINKING = CHATML.replace("message.content +", "(message.content if loop.last else message.content.split('</think>')[-1]) +")


@pytest.fixture(scope="module")
def parts():
    """A tokenizer with the words of Llama 3, which puts <s> before a text."""
    return made_tokenizers.made("llama3", SPECIAL, size=330, post_processor=made_tokenizers.begins_with("<s>", 3))


@pytest.fixture
def model(tmp_path, parts):
    """Returns the folder of a model with a template."""
    def made(template):
        return made_tokenizers.write(tmp_path / "model", parts, config={}, tokenizer_config={
            "bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "chat_template": template})
    return made


def talk(*texts, system=None):
    """Messages of user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}] * (system is not None) + messages


def options_of(tmp_path, folder, conversations, *options):
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(each if isinstance(each, dict) else {"messages": each}) + "\n\n" for each in conversations))
    return ["chat.py", path, "--tokenizer", folder, "--out", tmp_path / "out", *options]


def rows_made(tmp_path, folder, conversations, *options, split="train"):
    """The rows as [(text, counted text)], and the ids and flags."""
    run_here(*options_of(tmp_path, folder, conversations, "--overwrite", "--val-fraction", 0, *options))
    rows, bytes_of = rows_of(tmp_path / "out", split), token_bytes(folder)
    return [tuple(b"".join(bytes_of[id] for id in chosen).decode(errors="replace") for chosen in (ids, ids[counts])) for ids, counts in rows]


def token_bytes(folder):
    parts = json.loads((folder / "tokenizer.json").read_text())
    return {**{id: tokenizer_checksum.bytes_of(token) for token, id in parts["model"]["vocab"].items()},
            **{added["id"]: added["content"].encode() for added in parts["added_tokens"]}}


def counts_of(tmp_path, split="train"):
    return {name: count for name, count in manifest_of(tmp_path / "out")["conversations"][split].items() if count}


# ---- Rows


def test_the_loss_counts_answers_and_their_ends(tmp_path, model):
    """The header of an answer is what asks for it; the end of its turn is part of it. What nothing answers is left out."""
    messages = talk("What is it?", " The cat's.\n", "東京?", "🦔 yes", "And?", system="Be good.")
    rows = rows_made(tmp_path, model(CHATML), [messages])
    assert rows == [("<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n The cat's.\n<|im_end|>\n"
                     "<|im_start|>user\n東京?<|im_end|>\n<|im_start|>assistant\n🦔 yes<|im_end|>\n", " The cat's.\n<|im_end|>\n🦔 yes<|im_end|>\n")]
    ids, counted = rows_of(tmp_path / "out", "train")[0]
    assert ids[0] == 1 and ids[counted].tolist().count(2) == 2  # special tokens are tokens here
    manifest = manifest_of(tmp_path / "out")
    assert manifest["finished"] and manifest["tokens"] == {"train": len(ids), "val": 0}
    assert counts_of(tmp_path) == {"conversations": 1, "rows": 1, "tokens": len(ids), "counted": counted.sum()}
    checksum = tokenizer.read_folder(tmp_path / "model").checksum
    header = np.frombuffer((tmp_path / "out/train_000001.bin").read_bytes()[:1024], "<u4")
    assert header[3] + (int(header[4]) << 32) == checksum and manifest["settings"]["checksum"] == f"{checksum:016x}"


def test_the_forms_of_conversations(tmp_path, model):
    folder = model(CHATML)
    forms = [{"messages": talk("Hello", "World")}, {"prompt": "Hello", "completion": "World"},
             {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "World"}]},
             {"messages": [{"role": "user", "content": "Hello", "name": None}, {"role": "assistant", "content": "World"}], "other": 1},
             {"messages": None, "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "World"}]},
             {"messages": None, "prompt": talk("Hello"), "completion": talk("Hello", "World")[1:]}, {"prompt": "Hello", "completion": talk("", "World")[1:]},
             {"messages": [{"role": "human", "content": "Hello"}, {"role": "gpt", "content": "World"}]}]
    rows = rows_made(tmp_path, folder, forms)
    assert len(rows) == 8 and len(set(rows)) == 1


def test_what_the_template_marks_counts(tmp_path, model):
    messages = [talk("What?", "It is.", "Why?", "12345", system="S"), talk("a", "b")]
    marked = rows_made(tmp_path, model(MARKED), messages)
    assert [counted for _, counted in marked] == ["It is.<|im_end|>12345<|im_end|>", "b<|im_end|>"]
    assert [text for text, _ in marked] == [text for text, _ in rows_made(tmp_path, model(CHATML), messages)]


@pytest.mark.parametrize("opening", ["Th", "it "])
def test_a_token_is_of_the_side_of_its_first_byte(tmp_path, model, parts, seed, opening):
    """Where the answer begins within a token, or within a word of several tokens; and characters of several tokens. What
    the post-processor of many tokenizers says of a token's place leaves out its space."""
    template = ("{% for message in messages %}{{ 'OPENING' if message.role == 'assistant' else '' }}{{ message.content }}{% endfor %}"
                "{{ 'OPENING' if add_generation_prompt else '' }}").replace("OPENING", opening)
    folder, numbers = model(template), random.Random(seed)
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made_tokenizers.write(folder, {**parts, "post_processor": trimming})
    contents = [numbers.choice(["e", "is", "king"]) + "".join(numbers.choices([" king", "y", "re", " ", "東京", "🦔", "\n", "'s", "1", "é", "e\u0301"], k=6)) for _ in range(60)]
    run_here(*options_of(tmp_path, folder, [talk(f"{i}.", content) for i, content in enumerate(contents)], "--val-fraction", 0))
    bytes_of, divided = token_bytes(folder), 0
    for i, (content, (ids, counted)) in enumerate(zip(contents, rows_of(tmp_path / "out", "train"))):
        begin, ends = len(f"{i}.{opening}"), np.cumsum([len(bytes_of[id]) for id in ids])
        assert ends[-1] == begin + len(content.encode())
        first = ends - [len(bytes_of[id]) for id in ids]
        assert counted.tolist() == [place >= begin for place in first]
        divided += begin not in first
    assert divided > 0


def test_each_answer_has_a_row_where_later_turns_change_it(tmp_path, model):
    rows = rows_made(tmp_path, model(THINKING), [talk("a", "hm</think>b", "c", "so</think>d"), talk("e", "f", "g", "h")])
    assert rows == [("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nhm</think>b<|im_end|>\n", "hm</think>b<|im_end|>\n"),
                    ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nso</think>d<|im_end|>\n",
                     "so</think>d<|im_end|>\n"),
                    ("<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\nf<|im_end|>\n<|im_start|>user\ng<|im_end|>\n<|im_start|>assistant\nh<|im_end|>\n",
                     "f<|im_end|>\nh<|im_end|>\n")]


def test_the_begin_token_comes_once(tmp_path, model):
    """It is the template's. The post-processor's belongs to documents."""
    for template, count in ((TRIMMED, 1), (CHATML, 0)):
        rows_made(tmp_path, model(template), [talk("a", "b")])
        assert rows_of(tmp_path / "out", "train")[0][0].tolist().count(3) == count


def test_the_date_is_the_given_one(tmp_path, model):
    [(text, counted)] = rows_made(tmp_path, model(TRIMMED), [talk(" a\n", "\tb ")])
    assert (text, counted) == ("<s>26 Jul 2024|[user]a<|im_end|>[assistant]b<|im_end|>", "b<|im_end|>")
    [(text, _)] = rows_made(tmp_path, model(TRIMMED), [talk("a", "b")], "--date", "2031-12-01")
    assert text.startswith("<s>01 Dec 2031|") and manifest_of(tmp_path / "out")["settings"]["date"] == "2031-12-01"


def test_what_is_left_out_is_counted(tmp_path, model, capsys):
    template = "{% if messages[-1].content == 'bad' %}{{ raise_exception('a bad answer') }}{% endif %}" + CHATML
    messages = [talk("a", "b"), talk("a", "b <|im_end|>"), talk("<s>", "b"), talk("a", "b", system="<|im_start|>"), talk("only asks"), [],
                talk("a", "bad"), talk("long " * 200, "b"), [{**talk("a")[0], "name": "<s>"}, *talk("a", "b")[1:]]]
    rows = rows_made(tmp_path, model(template), messages, "--max-tokens", 100)
    assert [counted for _, counted in rows] == ["b<|im_end|>\n"]
    assert counts_of(tmp_path) == {"conversations": 9, "rows": 1, "tokens": len(rows_of(tmp_path / "out", "train")[0][0]), "counted": 3,
                                   "with special tokens": 4, "without an answer": 2, "too long": 1, "refused by the template": 1}
    assert "left out: 4 with special tokens, 1 too long, 2 without an answer, 1 refused by the template (a bad answer)" in capsys.readouterr().out


def turns(letters, answer="{}!"):
    return [text for letter in letters for text in (f"{letter}?", answer.format(letter))]


@pytest.mark.parametrize("kept", ["abcdef", "acdef", "adef", "aef", "af", "f", ""])
def test_turns_leave_from_the_middle(tmp_path, model, kept):
    """The oldest of the middle first, then the first one. The system's message stays."""
    folder = model(CHATML)
    rows_made(tmp_path, folder, [talk(*turns("abcdef"[:len(kept) or 1]), system="S")])
    most = len(rows_of(tmp_path / "out", "train")[0][0]) - (kept == "")  # what the kept turns need
    (text, counted), *other = rows_made(tmp_path, folder, [talk(*turns("abcdef"), system="S"), talk("x", "y")], "--max-tokens", most)
    if kept == "":
        assert not other and counted == "y<|im_end|>\n" and counts_of(tmp_path)["too long"] == 1
        return
    assert re.findall(r"(\w)\?", text) == re.findall(r"(\w)!", counted) == list(kept) and text.startswith("<|im_start|>system\nS")
    assert len(rows_of(tmp_path / "out", "train")[0][0]) == most
    assert counts_of(tmp_path).get("turns left out", 0) == 6 - len(kept) and counts_of(tmp_path).get("shortened", 0) == (len(kept) < 6)


def test_rows_of_one_answer_are_shortened_too(tmp_path, model):
    folder, conversation = model(THINKING), talk(*turns("abc", "x</think>{}!"))
    rows_made(tmp_path, folder, [conversation[:4]])
    most = max(len(ids) for ids, _ in rows_of(tmp_path / "out", "train"))
    rows = rows_made(tmp_path, folder, [conversation], "--max-tokens", most)
    assert [re.findall(r"(\w)\?", text) for text, _ in rows] == [["a"], ["a", "b"], ["a", "c"]]
    assert [counted for _, counted in rows] == [f"x</think>{letter}!<|im_end|>\n" for letter in "abc"]


def test_the_first_number_is_found_near_the_guess():
    for count in range(1, 40):
        for first in range(count + 1):
            for guess in range(count + 1):
                asked = []
                found = conversations.first_true(lambda number: asked.append(number) or number >= first, count, guess)
                assert found == first and set(asked) < set(range(count + 1)) and len(asked) <= 2 + 2 * abs(first - guess).bit_length()


@pytest.mark.parametrize("template, most", [(CHATML, 2.2), (THINKING, 12)], ids=["whole", "a row for each"])
def test_a_long_conversation_needs_few_renderings(tmp_path, model, monkeypatch, template, most):
    """For each turn those up to its answer, and not again for each turn that leaves."""
    asked, ask, answers = [], chat_template.Renderer.ask, ["hm</think>" * (template == THINKING) + f"b{i}" for i in range(100)]
    monkeypatch.setattr(chat_template.Renderer, "ask", lambda self, request: asked.append(request) or ask(self, request))
    monkeypatch.setattr(chat_format, "DRAWN", 0)
    rows = rows_made(tmp_path, model(template), [talk(*(text for answer in answers for text in ("a?", answer)))], "--max-tokens", 300)
    assert len(rows) == (100 if template == THINKING else 1) and rows[-1][1].endswith("b99<|im_end|>\n")
    assert 200 < len(asked) < most * 100 + 40 and counts_of(tmp_path)["shortened"]
    size = len(rows_of(tmp_path / "out", "train")[-1][0])
    assert 250 < size <= 300


def test_templates_see_what_transformers_shows_them(tmp_path, model):
    """Blocks leave no white space; loops can break; JSON is not escaped for HTML; tools and other keys are there."""
    template = ("{% for message in messages %}\n    {% if loop.index0 == 2 %}\n        {% break %}\n    {% endif %}\n"
                "{% generation %}{{ message.content }}{% endgeneration %}{{ message.extra | tojson }}{{ tools | tojson(indent=1) }}{{ eos_token }}{{ documents }}\n{% endfor %}")
    rows = rows_made(tmp_path, model(template), [
        {"messages": [{"role": "user", "content": "a", "extra": {"é": "<"}}, {"role": "assistant", "content": "b", "extra": [1]}, *talk("c", "d")],
         "tools": [{"t": 1}]}])
    tools = '[\n {\n  "t": 1\n }\n]'
    assert rows[0][1] == "b" and rows[0][0] == f'a{{"é": "<"}}{tools}<|im_end|>None\nb[1]{tools}<|im_end|>None\n'


def test_any_number_of_processes_and_shards(tmp_path, model, seed, monkeypatch):
    numbers, folder = random.Random(seed), model(CHATML)
    words = ["The", " king", "\n", " 1234", "🦔", " it", "?"]
    conversations = [talk(*("".join(numbers.choices(words, k=numbers.randint(1, 60))) for _ in range(2 * numbers.randint(1, 5)))) for _ in range(500)]
    monkeypatch.setattr(encode, "BATCH", 50_000)
    options = options_of(tmp_path, folder, conversations, "--processes", 1)[:-4]
    outs = [tmp_path / name for name in ("one", "two")]
    for processes, out in enumerate(outs, 1):
        run_here(*options, "--shard-tokens", 20_000, "--out", out, processes=processes)
    assert results_in(outs[0]) == results_in(outs[1])
    assert sum(map(len, (rows_of(outs[0], split) for split in ("train", "val")))) == 500 and len(rows_of(outs[0], "val")) == 50
    assert len(list(outs[0].glob("train_*.bin"))) > 2
    # A row is in one shard, in order.
    bytes_of = token_bytes(folder)
    texts = [b"".join(bytes_of[id] for id in ids).decode() for split in ("train", "val") for ids, _ in rows_of(outs[0], split)]
    assert texts == ["".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in talk) for talk in conversations]


def test_a_second_start(tmp_path, model, capsys):
    options = options_of(tmp_path, model(CHATML), [talk("a", "b")] * 20)
    run_here(*options)
    first = results_in(tmp_path / "out")
    command = capsys.readouterr().out.splitlines()[-1]
    assert command == (f"train with: ./train_gpt --init {tmp_path}/model --seq-len {len(rows_of(tmp_path / 'out', 'val')[0][0])} "
                       f"--train-data '{tmp_path}/out/train_*.bin' --val-data '{tmp_path}/out/val_*.bin'")
    run_here(*options)
    assert "is already complete, and its checksums are right" in capsys.readouterr().out
    (tmp_path / "out/val_000000.bin").write_bytes(b"")
    run_here(*options)
    assert results_in(tmp_path / "out") == first
    assert "with max_tokens 2048 instead of 50" in refused_here(*options, "--max-tokens", 50)
    model(MARKED)
    assert "has shards of another run, with template " in refused_here(*options)
    assert results_in(tmp_path / "out") == first


# ---- Refused


@pytest.mark.parametrize("line, fault", [
    ('{"messages": [{"content": "x"}]}', "line 2, message 1: no role; each message has `role` and `content`, or `from` and `value`"),
    ('{"conversations": [{"from": "human"}]}', "line 2, message 1: its content is not text"),
    ('{"messages": ["a"]}', "line 2, message 1: no role"), ('{"messages": 1}', "line 2: no list in `messages`"), ("[]", "line 2: not an object"),
    ('{"text": "a"}', "line 2: no list in `messages` or `conversations`, and no `prompt` with `completion` (its fields: text)"), ("{", "line 2: not JSON"),
    ('{"messages": [], "tools": ' + "[" * 600 + "]" * 600 + "}", "line 2: nested too deeply"), ("[" * 10**5, "line 2: nested too deeply"),
    ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', "line 2, message 1: its content is not text"),
    ('{"prompt": "a", "completion": 1}', "line 2, message 2: its content is not text"), ('{"prompt": "a", "completion": ["b"]}', "line 2, message 2: no role"),
])
@pytest.mark.parametrize("processes", [1, 2])
def test_wrong_lines(tmp_path, model, line, fault, processes):
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": talk("a", "b")}) + "\n" + line + "\n")
    assert fault in refused_here("chat.py", path, "--tokenizer", model(CHATML), "--out", tmp_path / "a/b")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("template, fault", [
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "the chat template took longer than 1 seconds"),
    ("{{ 10 ** (10 ** 9) }}", "the chat template took longer than 1 seconds"),
    ("{% set n = namespace(a='a' * 1000) %}{% for i in range(40) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}",
     "the chat template takes more than 1024 MiB of memory"),
    (CHATML + "{{ messages[0].content * 40000000 }}", "the chat template writes more than 32,000,000 characters"),
    ("{% for", "the chat template is no Jinja ("), ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "the chat template is no Jinja ("),
    ("{{ messages.append(1) }}", "is unsafe"), ("{{ ''.__class__.__mro__ }}", "is unsafe"), ("{% include '/etc/passwd' %}", "no loader"),
    ("{{ lipsum.__globals__['os'].system('true') }}", "is unsafe"),
    ("Hello", "the chat template does not write messages whose content is text"),
    (CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>"), "are left out: 20 whose answers do not begin with their prompts"),
    ("{% generation %}" + CHATML + "{% endgeneration %}", "the chat template marks all tokens as answers"),
    ("{% generation %}{% endgeneration %}" + CHATML, "there is no answer to learn from; of 20 conversations, of which 18 are to train on, are left out: 20 without an answer"),
])
def test_wrong_templates(tmp_path, model, monkeypatch, template, fault):
    monkeypatch.setattr(chat_template, "SECONDS", 1 if "longer" in fault else 60)
    text = refused_here(*options_of(tmp_path, model(template), [talk("a", "b")] * 20))
    assert fault in text, text
    assert not (tmp_path / "out").exists()


@pytest.fixture
def escaped(tmp_path, monkeypatch):
    """Makes a renderer whose template came out of the sandbox: `does` is what raise_exception does, in Python."""
    def made(does, template="{{ raise_exception(1) }}", memory="1 << 30"):
        monkeypatch.setattr(chat_template, "__file__", str(tmp_path / "escaped.py"))
        source = (program.ROOT / "data/chat_template.py").read_text().replace("raise_exception=raise_exception", f"raise_exception=lambda given: {does}")
        (tmp_path / "escaped.py").write_text(source.replace("MEMORY = 1 << 30", f"MEMORY = {memory}"))
        return chat_template.Renderer(template, {}, "2024-07-26")
    return made


def test_a_template_can_open_no_file(escaped):
    with contextlib.closing(escaped("open('/etc/hostname').read()")) as renderer, pytest.raises(chat_template.Refused, match="Too many open files"):
        renderer.render(([], False, None))


def test_the_limit_of_time_is_that_of_a_text(monkeypatch):
    """However many texts there are; and even if the parts of one come without a pause. The clock goes on by a second whenever it is read."""
    clock = itertools.count()
    monkeypatch.setattr(chat_template.time, "monotonic", lambda: next(clock))
    texts = [([{"role": "user", "content": "a" * length}], False, None) for length in (1, 3_000_000)]
    with contextlib.closing(chat_template.Renderer("{{ messages[0].content }}", {}, "2024-07-26")) as renderer:
        assert len(renderer.render(*[texts[0]] * 25)) == 25
        with pytest.raises(SystemExit, match="took longer than 10 seconds"):
            renderer.render(texts[1])


def test_a_conversation_that_takes_too_much_is_named(tmp_path, model, escaped):
    template = "{{ (messages[0].content * 9000000000)[:1] if messages[0].content == '!' }}" + CHATML
    text = refused_here(*options_of(tmp_path, model(template), [talk("a", "b"), talk("!", "b")]))
    assert "talks.jsonl, line 3: the chat template takes more than 1024 MiB of memory; leave this conversation out, or give another template" in text
    # The request itself.
    with contextlib.closing(escaped("given", "a", "1 << 27")) as renderer, pytest.raises(SystemExit, match="takes more than 128 MiB of memory"):
        renderer.render(([{"role": "user", "content": "a" * 100_000_000}], False, None))


@pytest.mark.parametrize("options, fault", [
    (["TALKS"], "--tokenizer DIR is missing"), ([], "give files of conversations, or --format DIR"), (["TALKS", "--format", "MODEL"], "give files of conversations, or"),
    (["TALKS", "--tokenizer", "MODEL", "--date", "26 Jul"], "'26 Jul' is no date like 2024-07-26"), (["NONE", "--tokenizer", "MODEL"], "cannot read"),
    (["TALKS", "--tokenizer", "MODEL", "--template", "NONE"], "cannot read the template"), (["TALKS", "--tokenizer", "NONE"], "has no tokenizer.json"),
    (["--format", "PLAIN"], "has no chat template, neither in chat_template.jinja nor in tokenizer_config.json; give one with --template FILE"),
])
def test_wrong_options(tmp_path, model, options, fault):
    model(CHATML).rename(tmp_path / "MODEL")
    (tmp_path / "TALKS").write_text(json.dumps({"messages": talk("a", "b")}))
    (tmp_path / "PLAIN").mkdir()
    assert fault in refused_here("chat.py", *(tmp_path / option if option.isupper() else option for option in options), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- What stands around each role's text


def format_of(folder, *options):
    run_here("chat.py", "--format", folder, *options)
    return json.loads((folder / "chat_format.json").read_text())


CHATML_FORMAT = {"begin": "", "system": ["<|im_start|>system\n", "<|im_end|>\n"], "user": ["<|im_start|>user\n", "<|im_end|>\n"],
                 "assistant": ["<|im_start|>assistant\n", "<|im_end|>\n"], "generation": "<|im_start|>assistant\n", "default_system": None,
                 "trims": False, "date": None}


@pytest.mark.parametrize("template, wanted", [
    (CHATML, CHATML_FORMAT), (HELPFUL, {**CHATML_FORMAT, "default_system": "<|im_start|>system\nBe good.<|im_end|>\n"}),
    # A text ends in another way than it goes on.
    (CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}", CHATML_FORMAT),
    (TRIMMED, {"begin": "<s>", "system": ["26 Jul 2024|[system]", "<|im_end|>"], "user": ["[user]", "<|im_end|>"], "assistant": ["[assistant]", "<|im_end|>"],
               "generation": "[assistant]", "default_system": "26 Jul 2024|", "trims": True, "date": "2024-07-26"}),
    # Each message begins with bos_token, as with SmolLM2's.
    (CHATML.replace("<|im_start|>", "<s>"), {key: json.loads(json.dumps(part).replace("<|im_start|>", "<s>")) for key, part in CHATML_FORMAT.items()}),
], ids=["ChatML", "a default", "an end", "trimmed", "a begin token for each"])
def test_the_format(tmp_path, model, template, wanted):
    found = format_of(model(template))
    assert found == {"template": chat_format.checksum(template), **wanted}
    # Beside the shards too.
    run_here(*options_of(tmp_path, tmp_path / "model", [talk("a", "b")] * 20))
    assert json.loads((tmp_path / "out/chat_format.json").read_text()) == found


def test_the_template_of_the_file_wins(tmp_path, model):
    folder = model(THINKING)
    (tmp_path / "own.jinja").write_text(HELPFUL)
    assert format_of(folder, "--template", tmp_path / "own.jinja")["template"] == chat_format.checksum(HELPFUL)
    (folder / "chat_template.jinja").write_text(CHATML)
    assert format_of(folder)["template"] == chat_format.checksum(CHATML)
    (folder / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "tool_use", "template": THINKING}, {"name": "default", "template": HELPFUL}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert format_of(folder)["template"] == chat_format.checksum(HELPFUL)


@pytest.mark.parametrize("template, why", [
    (THINKING, "what stands around a message depends on the messages"),
    (CHATML.replace("message.role +", "message.role + loop.index0 | string +"), "what stands around a message depends on the"),
    (CHATML.replace("message.content +", "message.content | upper +"), "it does not write each message once, in their order"),
    ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML, "(no system)"),
])
def test_templates_of_another_form(tmp_path, model, template, why):
    folder = model(template)
    text = refused_here("chat.py", "--format", folder)
    assert "does more than to put texts around each role's, which is all that `--chat` can do: " in text and why in text
    assert not (folder / "chat_format.json").exists()


def test_rows_of_a_template_of_another_form(tmp_path, model, capsys):
    run_here(*options_of(tmp_path, model(THINKING), [talk("a", "b")] * 20))
    assert "note: the chat template does more than" in capsys.readouterr().out and not (tmp_path / "out/chat_format.json").exists()
