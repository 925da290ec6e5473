"""The rows of docs/planner.md with `plan --search`."""

import planned
import pytest


@pytest.mark.parametrize("options, key, figure", [row for row in planned.rows_of_pages() if "--search" in row[0]], ids=lambda value: value if value.startswith("-") else None)
def test_the_searches_of_the_page(options, key, figure):
    planned.check_row(options, key, figure)
