"""What users are told when something cannot be: what came, and what to pass in its place.

The tables have the calls under patterns of what their errors say. They are the place for a new
message: one row, and no test of its own.
"""

import operator

import messages_of_clips
import messages_of_data
import messages_of_losses
import pytest
from public_names import GIVEN
from wrong_values import WRONG_VALUES

import optaxclip

TABLES = (messages_of_clips, messages_of_data, messages_of_losses)
ROWS = [
    (kind, said, call)
    for table in TABLES
    for kind, rows in ((TypeError, table.TYPE_ERRORS), (ValueError, table.VALUE_ERRORS))
    for said, call in rows.items()
]


@pytest.mark.parametrize(("kind", "said", "call"), ROWS, ids=[row[1] for row in ROWS])
def test_error_messages_match_tables(kind, said, call):
    with pytest.raises(kind, match=f"(?s){said}") as raised:
        call()
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_invalid_values_raise_with_argument_name(name):
    make = operator.attrgetter(name)(optaxclip)
    for argument, values in WRONG_VALUES[name].items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=f"^{argument} must"):
                make(**{**GIVEN.get(name, {}), argument: value})
