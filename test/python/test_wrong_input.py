"""Wrong input of users: one line on standard error, once for all ranks, status 1, quickly, and nothing written.

One table of cases. A case says how to make its input, the arguments, and the words that the line must contain. Every case
runs in its own folder, which must not change. Several cases run at a time, because they mostly wait.
"""

import concurrent.futures

import pytest
from refused import AT_ONCE, SECONDS, one_error, outcome_of
from wrong_files import CHECKPOINTS, OUTPUTS, SAFETENSORS, make_checkpoint
from wrong_options import DATA, MESHES, OPTIONS, SIZES

CASES = OPTIONS + SIZES + MESHES + DATA + SAFETENSORS + CHECKPOINTS + OUTPUTS
RUNS = [(case, ranks) for case in CASES for ranks in case.ranks]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """The outcome of every requested run, as futures by (case, ranks)."""
    asked = {item.callspec.params["number"] for item in request.session.items
             if getattr(item, "originalname", "") == "test_is_refused_with_one_line"}
    base = tmp_path_factory.mktemp("wrong")
    make_checkpoint(base)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield {number: pool.submit(outcome_of, *RUNS[number][:1], base / str(number), RUNS[number][1])
               for number in sorted(asked)}


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{case.name}, {ranks}" for case, ranks in RUNS])
def test_is_refused_with_one_line(number, outcomes):
    case, _ = RUNS[number]
    outcome = outcomes[number].result()
    line = one_error(outcome.stderr)
    assert outcome.status == 1
    for word in case.words:
        assert word in f"error: {line}"
    # A wrong input is reported before the header, unless a model must be read to find it.
    assert case.late or outcome.stdout == ""
    assert outcome.after == outcome.before
    assert outcome.seconds < SECONDS


def test_names_of_cases_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
